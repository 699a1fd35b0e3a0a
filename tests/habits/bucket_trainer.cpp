// Callables that are captured for several numbers of rows, in shared memory; in every other form also for those that they meet.
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "habits/captured_trainer.h"
#include "sidestream/bucketed_callables.h"
#include "warnings.h"

namespace sidestream::habits {
namespace {

constexpr std::int64_t kBuckets[] = {2, 6, 4};
constexpr std::int64_t kUnknownRows = 5;

class BucketTrainer final : public CapturedTrainer {
 public:
  using CapturedTrainer::CapturedTrainer;

  void step(const StepPlan& plan) override {
    const testing_model::ExpectedWarnings unknown_shapes;
    results_.clear();
    inputs_.clear();
    model_->zero_grad();
    const auto length = [&](std::int64_t i) { return kBuckets[(plan.data + i) % 3]; };
    switch (plan.buckets) {
      case 1: {  // the second while the first is pending
        const at::Tensor first = loss(plan.data, length(0));
        const at::Tensor second = loss(plan.data + 1, length(1));
        second.backward();
        first.backward();
        break;
      }
      case 2:
        loss(plan.data, kUnknownRows).backward();
        loss(plan.data + 1, length(0)).backward();
        break;
      case 3: {
        const at::Tensor pending = loss(plan.data, length(0));
        {
          const at::NoGradGuard no_grad;
          (void)loss(plan.data + 1, length(1));
        }
        pending.backward();
        break;
      }
      default:
        for (std::int64_t i = 0; i < 3; ++i) {
          loss(plan.data + i, length(i)).backward();
        }
        break;
    }
    for (const at::Tensor& input : inputs_) {
      results_.push_back(input.grad());
    }
    inputs_.clear();
    descend(*model_);
  }

 private:
  void capture() override {
    std::vector<Callable> callables;
    for (std::size_t i = 0; i < model_->blocks.size(); ++i) {
      callables.emplace_back(
          "block" + std::to_string(i),
          [](CountedBlock& block, const Tensors& in) { return Tensors{block.forward(in[0])}; }, model_->blocks[i]);
    }
    std::vector<std::vector<std::vector<Sample>>> samples;
    for (const std::int64_t rows : kBuckets) {
      samples.push_back({{rows_of(0, rows, device_).requires_grad_(true)}, {Sample::output_of(0)}});
    }
    BucketOptions options;
    options.graph(GraphOptions().num_warmup_iters(1));
    if (setup_.form % 2 == 1) {
      options.on_unknown_shape(OnUnknownShape::capture).max_buckets(setup_.form % 4 == 1 ? 3 : 4);
    }
    layers_ = make_bucketed_callables(*engine_, callables, samples, options);
  }
  void drop_captures() override { layers_.clear(); }

  at::Tensor loss(std::int64_t data, std::int64_t rows) {
    at::Tensor h = rows_of(3 * data, rows, device_);
    if (at::GradMode::is_enabled()) {
      inputs_.push_back(h.requires_grad_(true));
    }
    for (std::size_t i = 0; i < model_->blocks.size(); ++i) {
      h = layers_.empty() ? model_->blocks[i]->forward(h) : counted([&] { return layers_[i]({h})[0]; });
    }
    results_.push_back(h.detach());
    const at::Tensor target = rows_of(3 * data + 1, rows, device_);
    return (h * target).mean() + h.square().mean() * 0.1;
  }

  std::vector<GraphedCallable> layers_;
  std::vector<at::Tensor> inputs_;
};

}  // namespace

std::unique_ptr<CapturedTrainer> make_bucket_trainer(const Setup& setup, c10::Device device, bool with_engine) {
  return std::make_unique<BucketTrainer>(setup, device, with_engine);
}

}  // namespace sidestream::habits
