// Steps that are one graph: forward, backward, and in some forms the update.
#include <optional>

#include <ATen/Functions.h>

#include "habits/captured_trainer.h"
#include "sidestream/adamw.h"
#include "sidestream/graphed_step.h"

namespace sidestream::habits {
namespace {

class WholeStepTrainer final : public CapturedTrainer {
 public:
  WholeStepTrainer(const Setup& setup, c10::Device device, bool with_engine)
      : CapturedTrainer(setup, device, with_engine), optimizer_(model_->parameters(), 1e-2) {}

  /// Three in a row.
  void step(const StepPlan& plan) override {
    results_.clear();
    for (std::int64_t s = 0; s < 3; ++s) {
      one_step(plan, s);
    }
  }

  [[nodiscard]] NamedTensors state() const override {
    NamedTensors all = CapturedTrainer::state();
    for (auto& [name, tensor] : optimizer_.named_state()) {
      all.emplace_back("state " + name, tensor);
    }
    return all;
  }
  void become(const CapturedTrainer& other) override {
    CapturedTrainer::become(other);
    optimizer_.load_state(static_cast<const WholeStepTrainer&>(other).optimizer_.named_state());
  }

 private:
  [[nodiscard]] bool accumulates() const { return setup_.form % 2 == 1; }
  [[nodiscard]] bool updates() const { return setup_.form % 3 == 0; }

  void one_step(const StepPlan& plan, std::int64_t s) {
    const std::int64_t rows = plan.whole_step == 2 ? 6 : 4;
    const auto data = [&](std::int64_t number) { return rows_of(3 * plan.data + 100 * s + number, rows, device_); };
    std::vector<Tensors> microbatches;
    for (std::int64_t m = 0; m < (plan.whole_step == 1 ? 2 : 1); ++m) {
      microbatches.push_back({data(2 * m), data(2 * m + 1)});
    }
    optimizer_.set_lr(1e-2 / static_cast<double>(1 + (plan.data + s) % 4));
    model_->zero_grad(/*set_to_none=*/(plan.data + s) % 2 == 0);
    if (plan.whole_step == 3) {  // its gradients are added to, or replaced
      loss(*model_, {data(7), data(8)})[0].backward();
    }
    model_->train(plan.whole_step != 4 || s != 1);
    const auto made = step_ ? counted([&] { return (*step_)(microbatches); }) : plainly(microbatches);
    model_->train(true);
    for (const Tensors& of_microbatch : made) {
      for (const at::Tensor& tensor : of_microbatch) {
        results_.push_back(tensor.detach());
      }
    }
    if (!updates()) {
      descend(*model_);
    }
  }

  static Tensors loss(CapturedModel& model, const Tensors& in) {
    const at::Tensor y = model.forward(in[0]);
    return {(y * in[1]).mean() + y.square().mean() * 0.1, y};
  }

  std::vector<Tensors> plainly(const std::vector<Tensors>& microbatches) {
    if (!accumulates()) {
      model_->zero_grad();
    }
    std::vector<Tensors> made;
    for (const Tensors& inputs : microbatches) {
      made.push_back(loss(*model_, inputs));
      made.back()[0].backward();
    }
    if (updates()) {
      optimizer_.step();
    }
    return made;
  }

  void capture() override {
    StepOptions options;
    options.accumulate(accumulates()).max_captures(3).graph(GraphOptions().num_warmup_iters(1));
    if (updates()) {
      options.update([this] { optimizer_.step(); });
    }
    step_.emplace(make_graphed_step(*engine_, Callable("step", &loss, model_),
                                    {{rows_of(0, 4, device_), rows_of(1, 4, device_)}}, options));
  }
  void drop_captures() override { step_.reset(); }

  AdamW optimizer_;
  std::optional<GraphedStep> step_;
};

}  // namespace

std::unique_ptr<CapturedTrainer> make_whole_step_trainer(const Setup& setup, c10::Device device, bool with_engine) {
  return std::make_unique<WholeStepTrainer>(setup, device, with_engine);
}

}  // namespace sidestream::habits
