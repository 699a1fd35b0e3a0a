#pragma once
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "habits/captured_model.h"
#include "habits/step_plan.h"
#include "sidestream/engine.h"

namespace sidestream::habits {

/// How often a captured trainer's calls replayed, and how often they ran its code.
struct CapturedCalls {
  std::int64_t replayed = 0;
  std::int64_t ran = 0;
};

/// What a program trains beside its calls, captured by hand; or its plain twin.
class CapturedTrainer {
 public:
  CapturedTrainer(const Setup& setup, c10::Device device, bool with_engine);
  CapturedTrainer(const CapturedTrainer&) = delete;
  CapturedTrainer& operator=(const CapturedTrainer&) = delete;
  virtual ~CapturedTrainer();

  /// Captures, where there is no capture or one under other switches.
  void prepare();
  /// Forwards, backwards and a descent.
  virtual void step(const StepPlan& plan) = 0;
  /// All that must be equal on both sides, by name.
  [[nodiscard]] virtual NamedTensors state() const;
  /// Takes the state over from the other side, in place.
  virtual void become(const CapturedTrainer& other);
  [[nodiscard]] CapturedCalls take_calls() { return std::exchange(calls_, {}); }

 protected:
  virtual void capture() = 0;
  virtual void drop_captures() = 0;
  /// `call`, counted by whether it ran the model's code.
  template <class Call>
  auto counted(const Call& call) {
    const std::int64_t before = model_->runs();
    auto result = call();
    ++(model_->runs() == before ? calls_.replayed : calls_.ran);
    return result;
  }

  const Setup setup_;
  const c10::Device device_;
  const bool with_engine_;
  std::shared_ptr<CapturedModel> model_;
  std::unique_ptr<OffloadEngine> engine_;
  std::vector<at::Tensor> results_;  ///< of the latest step, detached

 private:
  Switches switches_;
  bool captured_ = false;
  CapturedCalls calls_;
};

/// Of callables for several numbers of rows.
[[nodiscard]] std::unique_ptr<CapturedTrainer> make_bucket_trainer(const Setup& setup, c10::Device device,
                                                                   bool with_engine);
/// Of whole steps: every other form accumulates gradients, every third has the update in its graph.
[[nodiscard]] std::unique_ptr<CapturedTrainer> make_whole_step_trainer(const Setup& setup, c10::Device device,
                                                                       bool with_engine);

}  // namespace sidestream::habits
