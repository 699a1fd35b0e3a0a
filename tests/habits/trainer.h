#pragma once
#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "habits/action.h"
#include "habits/captured_trainer.h"
#include "habits/small_model.h"
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
};
[[nodiscard]] const std::vector<Form>& forms();

/// What became of the calls that match `graph`.
enum class CallClass : std::uint8_t { sizing, without_gradients, in_eval, first_of_its_kind, by_option, known };
constexpr std::size_t kCallClasses = 6;
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

  at::Tensor random;  ///< state of the device's generator

 private:
  struct Hook {
    at::Tensor parameter;
    unsigned handle;
  };

  void make_engine();
  void run_step(const StepPlan& plan);
  void forwards_and_backwards(const StepPlan& plan, std::vector<at::Tensor>& left);
  [[nodiscard]] at::Tensor forward(const StepPlan& plan, std::int64_t microbatch);
  std::pair<at::Tensor, at::Tensor> call_block(std::size_t index, Block& block, const at::Tensor& h,
                                               const at::Tensor& context, const StepPlan& plan);
  void backward(const at::Tensor& loss, const StepPlan& plan);
  void count_call(std::size_t index, const at::Tensor& h, const at::Tensor& context, const StepPlan& plan);
  void end_of_step() noexcept;
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

  bool sized_ = false;
  std::set<std::string> known_, seen_in_step_;
  std::vector<std::int64_t> open_calls_;  ///< by block, in this step
  std::array<std::int64_t, kCallClasses> calls_{};
};

}  // namespace sidestream::habits
