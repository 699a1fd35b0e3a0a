// The work of a step that replays is linear in its layers: counted in looks at layers and in calls of the runtime, not timed.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "graphs/engine/engine_access.h"
#include "graphs/engine/engine_state.h"
#include "models/layer_stack.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

/// Counts what a replay asks of the runtime: queries of the current stream among it, which each look at an output's memory makes.
class AskedRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  [[nodiscard]] c10::Stream current_stream() const override {
    ++asked_;
    return inner().current_stream();
  }
  void record(const Event& event, c10::Stream stream) override {
    ++asked_;
    inner().record(event, stream);
  }
  void wait(c10::Stream stream, const Event& event) override {
    ++asked_;
    inner().wait(stream, event);
  }
  void record(const ExternalEvent& event, c10::Stream stream) override {
    ++asked_;
    inner().record(event, stream);
  }
  void wait(c10::Stream stream, const ExternalEvent& event) override {
    ++asked_;
    inner().wait(stream, event);
  }
  void launch(const Graph& graph, c10::Stream stream) override {
    ++asked_;
    inner().launch(graph, stream);
  }
  [[nodiscard]] std::int64_t asked() const noexcept { return asked_; }

 private:
  mutable std::int64_t asked_ = 0;
};

class Scale : public torch::nn::Module {
 public:
  explicit Scale(c10::Device device) : weight_(register_parameter("weight", rows(1, device))) {}
  // NOLINTNEXTLINE(readability-make-member-function-const): a module's forward
  at::Tensor forward(const at::Tensor& h) { return (h * weight_).tanh(); }

 private:
  at::Tensor weight_;
};

class Scales : public torch::nn::Module {
 public:
  Scales(std::int64_t layers, c10::Device device) {
    for (std::int64_t i = 0; i < layers; ++i) {
      layers_.push_back(register_module("layer" + std::to_string(i), std::make_shared<Scale>(device)));
    }
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& layer : layers_) {
      h = call(layer, h);
    }
    return h;
  }

 private:
  std::vector<std::shared_ptr<Scale>> layers_;
};

struct Work {
  std::int64_t looks = 0;  ///< at calls of the sequence
  std::int64_t asked = 0;  ///< of the runtime
};

class LinearStepTest : public testing::TestWithParam<GradientPolicy> {
 protected:
  /// Of one steady step of so many layers.
  [[nodiscard]] static Work work(std::int64_t layers) {
    const c10::Device device = find_device("sim");
    Scales model(layers, device);
    const auto runtime = std::make_shared<AskedRuntime>(make_runtime(device));
    OffloadEngine engine = EngineAccess::engine(
        model, Options(device).graph("layer*").graph_options(GraphOptions().gradients("**", GetParam())), runtime);
    const at::Tensor x = rows(2, device).requires_grad_(true);
    const at::Tensor seed = rows(3, device);
    const auto looks = [&] {
      std::uint64_t sum = 0;
      EngineAccess::state(engine).sequences().for_each(
          [&](const GraphSequence& sequence) { sum += sequence.captured().calls.looks(); });
      return static_cast<std::int64_t>(sum);
    };
    const auto step = [&] {
      const Step active = engine.step();
      model.forward(x).backward(seed);
    };
    constexpr int kUnsteady = 4;
    for (int i = 0; i < kUnsteady; ++i) {
      step();
    }
    const Work before{looks(), runtime->asked()};
    step();
    EXPECT_EQ(engine.report().replays, 2 * layers);
    return {looks() - before.looks, runtime->asked() - before.asked};
  }
};

TEST_P(LinearStepTest, EachLayerMoreIsTheSameWorkMore) {
  const Work few = work(100);
  const Work some = work(250);
  const Work many = work(400);
  EXPECT_GT(few.looks, 200) << "what is counted is not what replays do";
  EXPECT_GT(few.asked, 200);
  EXPECT_EQ(many.looks - some.looks, some.looks - few.looks);
  EXPECT_EQ(many.asked - some.asked, some.asked - few.asked);
}

INSTANTIATE_TEST_SUITE_P(Policies, LinearStepTest, testing::Values(GradientPolicy::owned, GradientPolicy::accumulated));

}  // namespace
}  // namespace sidestream::testing_model
