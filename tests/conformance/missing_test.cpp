// What the reference systems' tests leave out of callables, by the names of the list in docs/conformance.md.
#include <memory>
#include <stdexcept>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "conformance/fixture.h"
#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_event.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/testing/simulator.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

class ConformanceMissing : public conformance::ConformanceTest {
 protected:
  void TearDown() override {
    layers_.clear();
    order_by(Schedule());
    synchronize(device_);
    ConformanceTest::TearDown();
  }
  /// A GPU has its own.
  void order_by(const Schedule& schedule) {
    if (!on_gpu()) {
      set_schedule(device_, schedule);
    }
  }
  /// Long kernels on the current stream, ahead of all that follows: what does not wait for it overtakes.
  void keep_busy() {
    at::Tensor product = at::ones({2048, 2048}, at::TensorOptions().device(device_));
    for (int i = 0; i < 40; ++i) {
      product = at::mm(product, product).mul_(1e-4);
    }
  }
  [[nodiscard]] Runtime& runtime() const { return EngineAccess::state(engine_).runtime(); }
  void capture(const GraphOptions& options) { layers_ = graph_stack(engine_, model_, device_, options); }
  /// A trainer that reuses the memory of its input and of its output as soon as the forward has returned.
  StepTensors step(torch::nn::Sequential& model, bool graphed, std::int64_t s) {
    const at::Tensor batch = rows(s, device_);
    const at::Tensor x = batch.clone().requires_grad_(true);
    StepTensors result = train_step(*model, nullptr, [&] {
      if (graphed && busy_) {
        keep_busy();
      }
      const at::Tensor y = graphed ? run_stack(layers_, x) : model->forward(x);
      const at::Tensor loss = (y * rows(s, device_, 1)).mean();
      y.detach().zero_();
      if (graphed) {  // plain training reads its input once more in backward: it could not do so
        x.detach().copy_(rows(s + 1, device_));
      }
      loss.backward();
    });
    result.emplace_back("gradient of the input", x.grad());
    return result;
  }
  void expect_plain() {
    testing_model::expect_plain(
        0, 4, [&](std::int64_t s) { return step(model_, true, s); },
        [&](std::int64_t s) { return step(plain_, false, s); });
  }
  /// Under schedules that run everything late, or early; on a GPU as it comes, and behind long kernels.
  template <class Run>
  void in_several_orders(const Run& run) {
    if (on_gpu()) {
      for (const bool busy : {false, true}) {
        SCOPED_TRACE(busy ? "behind long kernels" : "as it comes");
        busy_ = busy;
        run();
      }
      return;
    }
    for (const char* name : {"early", "late", "d2h-early", "d2h-late", "seed:1", "seed:2", "seed:3"}) {
      SCOPED_TRACE(name);
      order_by(Schedule::parse(name));
      run();
      order_by(Schedule());
    }
  }

  sim::OneThread one_thread_;
  torch::nn::Sequential model_ = layer_stack(4, device_);
  torch::nn::Sequential plain_ = layer_stack(4, device_);
  OffloadEngine engine_{*model_, Options(device_).offload("layers.*.*").min_bytes(1024)};
  OwnedStream side_ = runtime().create_stream();
  std::vector<GraphedCallable> layers_;
  bool busy_ = false;
};

// On the simulated device long kernels are a schedule in which everything runs as late as it may.
TEST_F(ConformanceMissing, SideStreamAndEventForwardAndBackward) {
  in_several_orders([&] {
    capture(GraphOptions().cuda_graph_stream(side_.get()).cuda_graph_event(std::make_shared<GraphEvent>(device_)));
    expect_plain();
  });
}

TEST_F(ConformanceMissing, EventAbsent) {
  in_several_orders([&] {
    capture(GraphOptions().cuda_graph_stream(side_.get()));
    expect_plain();
  });
}

// The copies to the host may still read when the trainer writes what it gave and what it got.
TEST_F(ConformanceMissing, DrainedEventWriteAfterRead) {
  in_several_orders([&] {
    capture(GraphOptions());
    expect_plain();
  });
}

TEST_F(ConformanceMissing, ResetThenReplay) {
  capture(GraphOptions());
  expect_plain();
  layers_[0].reset();
  EXPECT_THROWS(UsageError, "replayed after reset", (void)layers_[0]({rows(0, device_).requires_grad_(true)}));
  capture(GraphOptions());
  expect_plain();
}

// A transposed input is copied, unless it has the address of the output that the graph reads in place: that is refused.
TEST_F(ConformanceMissing, EqualAddressAndOtherStrides) {
  const at::Tensor square = rows(0, device_).slice(1, 0, 16).contiguous();
  const auto twice = [](const Tensors& in) { return Tensors{in[0] * 2}; };
  const auto graphed = make_graphed_callables(engine_, {Callable("first", twice), Callable("second", twice)},
                                              {{square}, {Sample::output_of(0)}});
  for (const at::Tensor& x : {square, square.t(), square.t().contiguous().t()}) {
    const at::Tensor h = graphed[0]({x})[0];
    EXPECT_TRUE(at::equal(h.cpu(), (x * 2).cpu()));
    EXPECT_THROWS(UsageError, "second", (void)graphed[1]({h.t()}));
    EXPECT_TRUE(at::equal(graphed[1]({h})[0].cpu(), (x * 4).cpu()));
  }
}

TEST_F(ConformanceMissing, CaptureFailureCleanup) {
  plain_->forward(rows(0, device_)).sum().backward();  // libraries allocate what they work on when they are first used
  for (const int fails_in : {0, 1, 2}) {               // sizing, warm-up, capture
    int run = 0;
    Callable callable("breaks", owning([this, &run, fails_in](const Tensors& in) {
                        const at::Tensor y = model_->forward(in[0]);
                        if (run++ == fails_in) {
                          throw std::runtime_error("the model broke");
                        }
                        return Tensors{y};
                      }));
    const at::Tensor sample = rows(0, device_).requires_grad_(true);
    model_->zero_grad();
    synchronize(device_);
    release_cached_memory(device_);
    const MemoryUse before = memory_use(device_);
    EXPECT_THROWS(std::runtime_error, "the model broke",
                  (void)make_graphed_callables(engine_, {callable}, {{sample}}, GraphOptions().num_warmup_iters(1)));
    EXPECT_EQ(runtime().capture_status(runtime().current_stream()), CaptureStatus::none);
    EXPECT_FALSE(model_->parameters()[0].grad().defined());
    release_cached_memory(device_);
    EXPECT_LE(memory_use(device_).reserved, before.reserved);
    EXPECT_TRUE(on_gpu() || memory_use(device_).allocated <= before.allocated);
    capture(GraphOptions());
    expect_plain();
    layers_.clear();
  }
}

}  // namespace
}  // namespace sidestream::testing_model
