// The reference systems' tests of numerics, by their names: 3 steps of 2 microbatches with SGD. Outputs, gradients and parameters bit
// for bit, graphed as one callable, layer by layer, and eagerly.
#include <functional>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "conformance/fixture.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/device_flag.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

using Forward = std::function<at::Tensor(const at::Tensor& x, std::int64_t step, std::int64_t microbatch)>;

class ConformanceNumerics : public conformance::ConformanceTest {
 protected:
  static constexpr std::int64_t kSteps = 3;
  static constexpr std::int64_t kMicrobatches = 2;

  [[nodiscard]] at::Tensor input(std::int64_t s, std::int64_t salt = 0) const {
    return rows(s, device_, salt).requires_grad_(true);
  }

  /// One step of a trainer, and what it leaves.
  StepTensors step(torch::nn::Module& model, std::int64_t s, const Forward& forward) {
    clear_gradients(model);
    StepTensors result;
    for (std::int64_t microbatch = 0; microbatch < kMicrobatches; ++microbatch) {
      const at::Tensor x = input(s, 10 + microbatch);
      const at::Tensor y = forward(x, s, microbatch);
      (y * rows(s, device_, 20 + microbatch)).sum().backward();
      result.emplace_back("output", y);
      result.emplace_back("gradient of the input", x.grad());
    }
    for (StepTensors more : {gradients_and_buffers(model)}) {
      result.insert(result.end(), more.begin(), more.end());
    }
    descend(model);
    for (const auto& parameter : model.named_parameters()) {
      result.emplace_back(parameter.key(), parameter.value());
    }
    return result;
  }

  void expect_same(torch::nn::Module& mine, const Forward& graphed, torch::nn::Module& plain, const Forward& eager) {
    expect_plain(
        0, kSteps, [&](std::int64_t s) { return step(mine, s, graphed); },
        [&](std::int64_t s) { return step(plain, s, eager); });
  }
};

TEST_F(ConformanceNumerics, MakeGraphedCallables) {
  for (const std::string form : {"full", "individual", "eager"}) {
    for (const bool offload : {false, true}) {
      SCOPED_TRACE(form + (offload ? ", offloaded" : ""));
      torch::nn::Sequential mine = layer_stack(3, device_);
      torch::nn::Sequential plain = layer_stack(3, device_);
      const Options options = Options(device_).min_bytes(1024);
      OffloadEngine engine(*mine, offload ? Options(options).offload("layers.*.*").offload("full.*") : options);
      std::vector<GraphedCallable> layers;
      if (form == "full") {
        layers = make_graphed_callables(
            engine,
            {Callable(
                "full",
                [](torch::nn::SequentialImpl& model, const Tensors& in) { return Tensors{model.forward(in[0])}; },
                mine)},
            {{input(0)}});
      } else if (form == "individual") {
        layers = graph_stack(engine, mine, device_, GraphOptions());
      }
      expect_same(
          *mine,
          [&](const at::Tensor& x, std::int64_t, std::int64_t) {
            return layers.empty() ? mine->forward(x) : run_stack(layers, x);
          },
          *plain, [&](const at::Tensor& x, std::int64_t, std::int64_t) { return plain->forward(x); });
    }
  }
}

/// Projects three inputs and lets them attend to each other.
class Attending : public torch::nn::Module {
 public:
  explicit Attending(c10::Device device) {
    for (std::int64_t i = 0; i < 3; ++i) {
      projections_.push_back(register_parameter("projection" + std::to_string(i),
                                                rows(40 + i, device).slice(0, 0, 16).t().contiguous().mul(0.1)));
    }
  }
  Tensors forward(const Tensors& in) const {
    std::vector<at::Tensor> heads;
    for (std::size_t i = 0; i < 3; ++i) {
      heads.push_back(at::mm(in[i], projections_[i]).view({16, 2, 8}).transpose(0, 1).unsqueeze(0));
    }
    const at::Tensor mask = in.size() > 3 ? in[3] : at::Tensor();
    const at::Tensor attended = at::scaled_dot_product_attention(
        heads[0], heads[1], heads[2], mask.defined() ? std::optional<at::Tensor>(mask) : std::nullopt);
    return {attended.squeeze(0).transpose(0, 1).reshape({16, 16}).repeat({1, 2})};
  }

 private:
  std::vector<at::Tensor> projections_;
};

TEST_F(ConformanceNumerics, MakeGraphedCallablesWithDotProductAttention) {
  const auto mine = std::make_shared<Attending>(device_);
  const auto plain = std::make_shared<Attending>(device_);
  OffloadEngine engine(*mine, Options(device_));
  const auto attend = [](Attending& model, const Tensors& in) { return model.forward(in); };
  const auto graphed =
      make_graphed_callables(engine, {Callable("attend", attend, mine)}, {{input(0), input(1), input(2)}});
  const auto inputs = [&](const at::Tensor& x, std::int64_t s, std::int64_t microbatch) {
    return Tensors{x, x * rows(s, device_, 30 + microbatch), x + rows(s, device_, 40 + microbatch)};
  };
  expect_same(
      *mine,
      [&](const at::Tensor& x, std::int64_t s, std::int64_t m) { return graphed[0](inputs(x.view_as(x), s, m))[0]; },
      *plain,
      [&](const at::Tensor& x, std::int64_t s, std::int64_t m) {
        const Tensors in = inputs(x.view_as(x), s, m);
        return plain->forward({in[0].view_as(in[0]), in[1].view_as(in[1]), in[2].view_as(in[2])})[0];
      });
}

// A mask of each call's own, and an input that the body does not use.
TEST_F(ConformanceNumerics, MakeGraphedCallablesWithKwargs) {
  const auto mine = std::make_shared<Attending>(device_);
  const auto plain = std::make_shared<Attending>(device_);
  OffloadEngine engine(*mine, Options(device_));
  const auto mask = [&](std::int64_t s, std::int64_t m) { return rows(s, device_, 50 + m).slice(1, 0, 16).gt(-0.5); };
  Callable callable(
      "attend",
      [](Attending& model, const Tensors& in) {
        return model.forward({in[0], in[0], in[0], in[1]});
      },
      mine);
  callable.input_names({"x", "attention_mask", "unused"});
  const auto graphed = make_graphed_callables(engine, {callable}, {{input(0), mask(0, 0), input(1)}},
                                              GraphOptions().allow_unused_input(true));
  const at::Tensor unused = input(2);
  expect_same(
      *mine,
      [&](const at::Tensor& x, std::int64_t s, std::int64_t m) {
        return graphed[0].call({{"attention_mask", mask(s, m)}, {"unused", unused}, {"x", x}})[0];
      },
      *plain,
      [&](const at::Tensor& x, std::int64_t s, std::int64_t m) {
        return plain->forward({x, x, x, mask(s, m)})[0];
      });
  EXPECT_FALSE(unused.grad().defined());
}

/// Weights in groups, used as rounded by the first microbatch of a step.
class Rounding : public torch::nn::Module {
 public:
  Rounding(c10::Device device, std::int64_t groups) : first(device, true) {
    for (std::int64_t i = 0; i < groups; ++i) {
      weights_.push_back(register_parameter("weight" + std::to_string(i), rows(60 + i, device).clone()));
      caches_.push_back(register_buffer("cache" + std::to_string(i), at::zeros_like(weights_.back()).detach()));
    }
  }
  Tensors forward(const Tensors& in) const {
    at::Tensor h = in[0];
    for (std::size_t i = 0; i < weights_.size(); ++i) {
      const at::Tensor rounded = (weights_[i].detach() * 8).round() / 8;
      caches_[i].copy_(at::where(first.tensor(), rounded, caches_[i]));
      h = (h * (weights_[i] + (caches_[i] - weights_[i]).detach())).tanh();
    }
    return {h};
  }
  DeviceFlag first;

 private:
  std::vector<at::Tensor> weights_;
  std::vector<at::Tensor> caches_;
};

class ConformanceWeightCaching : public ConformanceNumerics {
 protected:
  void expect_same_with_groups(std::int64_t groups) {
    const auto mine = std::make_shared<Rounding>(device_, groups);
    const auto plain = std::make_shared<Rounding>(device_, groups);
    OffloadEngine engine(*mine, Options(device_));
    const auto graphed = make_graphed_callables(
        engine,
        {Callable(
            "round", [](Rounding& model, const Tensors& in) { return model.forward(in); }, mine)},
        {{input(0)}});
    const auto with_flag = [](Rounding& model, const auto& run) {
      return [&model, run](const at::Tensor& x, std::int64_t /*step*/, std::int64_t microbatch) {
        model.first.set(microbatch == 0);
        return run(Tensors{x})[0];
      };
    };
    expect_same(*mine, with_flag(*mine, [&](const Tensors& in) { return graphed[0](in); }), *plain,
                with_flag(*plain, [&](const Tensors& in) { return plain->forward(in); }));
    EXPECT_EQ(engine.report().captures, 2) << "one forward and one backward for both kinds of microbatch";
  }
};

TEST_F(ConformanceWeightCaching, Fp8WeightCaching) { expect_same_with_groups(1); }

TEST_F(ConformanceWeightCaching, GroupedLinear) { expect_same_with_groups(4); }

}  // namespace
}  // namespace sidestream::testing_model
