#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "habits/action.h"
#include "habits/captured_trainer.h"
#include "habits/small_model.h"
#include "habits/statistics.h"
#include "habits/step_plan.h"
#include "runtime/runtime.h"
#include "sidestream/engine.h"

namespace sidestream::habits {

/// How a program's model is wrapped.
struct Form {
  const char* name;
  const char* graph;
  const char* offload;
  std::int64_t side_streams;
  bool accumulate;
  bool eager_on_new_arguments;
  bool retain;
  bool evaluates = false;         ///< calls without gradients have graphs
  bool shares = false;            ///< captures of several shapes share memory
  std::int64_t max_captures = 0;  ///< of a call, of which the least used makes room; 0: no bound is met
  const char* delayed = "";       ///< parameters whose gradients backward_dw computes
};
[[nodiscard]] const std::vector<Form>& forms();

/// What became of the calls that match `graph`.
enum class CallClass : std::uint8_t {
  sizing,
  without_gradients,
  in_eval,
  first_of_its_kind,
  by_option,
  in_steps_of_chunks,
  known
};
constexpr std::size_t kCallClasses = 7;
[[nodiscard]] const char* name_of(CallClass call);

/// One side of a program: a trainer with an engine, or its plain twin.
class Trainer {
 public:
  Trainer(const Setup& setup, c10::Device device, bool with_engine);
  ~Trainer();
  Trainer(const Trainer&) = delete;
  Trainer& operator=(const Trainer&) = delete;

  /// One step, and a descent where it trained. Throws: Left, what the engine throws, what plain training throws.
  void step(const StepPlan& plan);
  /// What a trainer does between steps. Throws: as step.
  void change(const Action& action);

  /// All that must be equal on both sides, by name.
  [[nodiscard]] std::vector<std::pair<std::string, at::Tensor>> state() const;
  /// Takes weights, buffers, gradients and kept outputs over from `other`, in place.
  void become(const Trainer& other);
  /// The next comparison leaves out the gradients of inputs.
  void forget_inputs();

  [[nodiscard]] SmallModel& model() noexcept { return *model_; }
  [[nodiscard]] const Form& form() const { return forms()[static_cast<std::size_t>(setup_.form)]; }
  [[nodiscard]] OffloadEngine* engine() noexcept { return engine_.get(); }
  /// By the engine's report.
  [[nodiscard]] std::int64_t eager_calls() const { return engine_ == nullptr ? 0 : engine_->report().eager_calls; }
  /// A trainer of a smaller model, made when it is first asked for.
  Trainer& second();
  /// Calls of what is captured by hand, since the last time.
  [[nodiscard]] CapturedCalls take_bucket_calls() { return buckets_ ? buckets_->take_calls() : CapturedCalls(); }
  [[nodiscard]] CapturedCalls take_whole_steps() { return whole_steps_ ? whole_steps_->take_calls() : CapturedCalls(); }
  /// True when the latest step's engine let it begin.
  [[nodiscard]] bool began() const noexcept { return began_; }
  /// Calls that match `graph`, by class, since the last time.
  [[nodiscard]] std::array<std::int64_t, kCallClasses> take_calls();

  /// True when the latest step went on after an exception of the user's code.
  [[nodiscard]] bool caught() const noexcept { return caught_; }
  /// The next step of this plain twin delays the weight gradients that the latest step of `mine` has delayed.
  void follow(const Trainer& mine);
  /// True when the latest step ended before all weight gradients were computed.
  [[nodiscard]] bool missed_weights() const noexcept { return missed_weights_; }
  /// What happened in steps with chunks and to delayed gradients, since the last time.
  [[nodiscard]] Statistics take_seen() { return std::exchange(seen_, {}); }

  at::Tensor random;  ///< state of the device's generator

 private:
  struct Hook {
    at::Tensor parameter;
    unsigned handle;
  };
  /// What the plain twin has computed in a backward and accumulates later.
  struct DelayedGradient {
    at::Tensor parameter, gradient;
    std::optional<ChunkId> chunk;
  };
  /// A forward on its way through the model.
  struct Pass {
    at::Tensor h, data, target, loss;
    void add(const at::Tensor& more) { loss = loss.defined() ? loss + more : more; }
  };
  class ChunkRun;

  void make_engine();
  void run_step(const StepPlan& plan);
  void forwards_and_backwards(const StepPlan& plan, std::vector<at::Tensor>& left);
  [[nodiscard]] at::Tensor forward(const StepPlan& plan, std::int64_t microbatch);
  [[nodiscard]] Pass begin_pass(const StepPlan& plan, std::int64_t microbatch);
  void pass_stem(Pass& pass);
  void pass_block(Pass& pass, std::size_t index, const StepPlan& plan);
  [[nodiscard]] at::Tensor pass_head(Pass& pass, const StepPlan& plan);
  std::pair<at::Tensor, at::Tensor> call_block(std::size_t index, Block& block, const at::Tensor& h,
                                               const at::Tensor& context, const StepPlan& plan);
  void backward(const at::Tensor& loss, const StepPlan& plan);
  void count_call(std::size_t index, const at::Tensor& h, const at::Tensor& context, const StepPlan& plan);
  void end_of_step() noexcept;
  [[nodiscard]] bool delays() const { return *form().delayed != '\0'; }
  [[nodiscard]] Block::ReadAs delayed_reads(std::size_t index);
  [[nodiscard]] Step begin_step(const StepPlan& plan);
  void finish_step(Step& step, const StepPlan& plan);
  void run_chunks(const StepPlan& plan);
  /// Of one chunk, or all that there are.
  void compute_weights(const std::optional<ChunkId>& chunk);
  void compute_weights_after_backward(const std::optional<ChunkId>& chunk);
  void compute_weights_at_end();
  /// Makes and captures what the plan trains beside the model.
  void prepare_captured(const StepPlan& plan);
  void train_captured(const StepPlan& plan);
  void set_flags(bool training);
  void prepare_gradients(const StepPlan& plan);

  const Setup setup_;
  const c10::Device device_;
  const bool with_engine_;
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<SmallModel> model_;
  std::unique_ptr<OffloadEngine> engine_;
  std::unique_ptr<Trainer> second_;
  std::unique_ptr<CapturedTrainer> buckets_, whole_steps_;
  OwnedStream other_stream_;
  std::vector<at::Tensor> kept_;    ///< detached outputs
  std::vector<at::Tensor> losses_;  ///< of the latest step, detached
  at::Tensor kept_loss_;            ///< with its graph
  std::vector<at::Tensor> inputs_;  ///< of the latest step, where their gradients are wanted
  std::vector<Hook> hooks_;
  std::int64_t part_in_eval_ = -1;
  bool began_ = false;
  std::function<void()> end_step_;  ///< the step that is active
  std::function<void()> begun_;     ///< called when the next step has begun
  bool in_step_ = false;

  WeightTime weight_time_ = WeightTime::at_once;
  bool after_one_backward_ = false;  ///< of two
  bool missed_weights_ = false;
  bool caught_ = false;
  std::vector<bool> delayed_calls_;  ///< by call of the step: it replays
  std::size_t next_call_ = 0;
  std::vector<DelayedGradient> delayed_;
  std::optional<ChunkId> chunk_;  ///< the active one
  std::vector<Chunk> open_;       ///< left open by the step
  Statistics seen_;

  bool sized_ = false;
  std::set<std::string> known_, seen_in_step_;
  std::vector<std::int64_t> open_calls_;  ///< by block, in this step
  std::array<std::int64_t, kCallClasses> calls_{};
};

}  // namespace sidestream::habits
