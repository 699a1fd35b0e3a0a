// What sizing, warm-up and capture do to the world outside of them: put back, or refused by name.
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>
#include <torch/utils.h>

#include "expect_throws.h"
#include "models/body_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

class CaptureWritesTest : public testing::Test {
 protected:
  [[nodiscard]] Options options(std::int64_t warmups = 3) const {
    return Options(device_).graph("blocks.*").min_bytes(256).graph_options(GraphOptions().num_warmup_iters(warmups));
  }

  /// `body` trains as plainly, with warm-ups and without, and replays.
  void expect_trains(const BodyBlock::Body& body, const std::function<void(BodyModel&)>& prepare = {}) {
    for (const std::int64_t warmups : {0, 3}) {
      BodyTwins twins(device_, {body, body});
      if (prepare) {
        prepare(twins.mine);
        prepare(twins.plain);
      }
      OffloadEngine engine(twins.mine, options(warmups));
      twins.expect_plain(engine, 0, 5);
      EXPECT_GT(engine.report().replays, 0);
    }
  }

  /// The capture of `body` is refused with a message that holds each of `parts`, again at each step, and leaves what
  /// plain training has.
  template <class E>
  void expect_refused(const BodyBlock::Body& body, const std::vector<std::string>& parts,
                      const std::function<void(BodyModel&)>& prepare = {}) {
    BodyTwins twins(device_, {body});
    if (prepare) {
      prepare(twins.mine);
      prepare(twins.plain);
    }
    OffloadEngine engine(twins.mine, options());
    twins.expect_plain(engine, 0, 1);
    const at::Tensor generator = at::detail::getDefaultCPUGenerator().get_state();
    for (int time = 0; time < 2; ++time) {
      for (const std::string& part : parts) {
        EXPECT_THROWS(E, part, (void)engine.step());
      }
    }
    EXPECT_TRUE(at::equal(at::detail::getDefaultCPUGenerator().get_state(), generator)) << "draws were put back";
    if (twins.mine.block(0).kept.defined()) {
      EXPECT_TRUE(at::equal(twins.mine.block(0).kept.cpu(), twins.plain.block(0).kept.cpu()));
    }
  }

  c10::Device device_ = find_device("sim");
};

at::Tensor mix(BodyBlock& block, const at::Tensor& x) { return at::matmul(x, block.weight).tanh(); }

TEST_F(CaptureWritesTest, ACounterThatNobodyRegisteredIsPutBack) {
  const auto prepare = [&](BodyModel& model) {
    for (std::size_t i = 0; i < 2; ++i) {
      model.block(i).kept = at::zeros({1}, model.first.options().requires_grad(false));
    }
  };
  expect_trains(
      [](BodyBlock& block, const at::Tensor& x) {
        block.kept.add_(1);
        return mix(block, x) * block.kept;
      },
      prepare);
}

TEST_F(CaptureWritesTest, RunningStatisticsInAMemberArePutBack) {
  const auto prepare = [&](BodyModel& model) {
    for (std::size_t i = 0; i < 2; ++i) {
      model.block(i).kept = at::zeros({4, 16}, model.first.options().requires_grad(false));
    }
  };
  expect_trains(
      [](BodyBlock& block, const at::Tensor& x) {
        const at::Tensor h = mix(block, x);
        const at::Tensor mean = block.kept.select(0, 1);  // a view, by an operator that writes and reads
        mean.lerp_(h.detach().mean(at::IntArrayRef{0, 1}), 0.1);
        return h - mean.clone();
      },
      prepare);
}

TEST_F(CaptureWritesTest, ABufferThatIsOnlyReadKeepsItsVersion) {
  const auto body = [](BodyBlock& block, const at::Tensor& x) { return mix(block, x) * block.other; };
  BodyTwins twins(device_, {body});
  for (BodyModel* const model : {&twins.mine, &twins.plain}) {
    model->block(0).other = model->block(0).register_buffer("table", at::full({16}, 0.5, at::device(device_)));
  }
  const std::uint32_t before = twins.mine.block(0).other._version();
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 3);
  EXPECT_GT(engine.report().replays, 0);
  EXPECT_EQ(twins.mine.block(0).other._version(), before) << "an eager forward may have saved it";
}

TEST_F(CaptureWritesTest, AWeightClippedInTheForwardIsPutBack) {
  expect_trains([](BodyBlock& block, const at::Tensor& x) {
    {
      const at::NoGradGuard no_grad;
      block.weight.mul_(0.9);
    }
    return mix(block, x);
  });
}

TEST_F(CaptureWritesTest, AnInputWrittenInPlaceIsRefusedByName) {
  const std::vector<std::string> parts{"blocks.0", "input 0", "in place", "Clone the input"};
  expect_refused<CaptureError>([](BodyBlock& block, const at::Tensor& x) { return mix(block, x.mul_(2)); }, parts);
  expect_refused<CaptureError>(
      [](BodyBlock& block, const at::Tensor& x) {
        x.detach().select(1, 0).zero_();
        return mix(block, x);
      },
      parts);
}

TEST_F(CaptureWritesTest, ATensorOnTheCpuIsRefusedByName) {
  const auto scale = [](BodyModel& model) { model.block(0).other = at::full({}, 0.5); };
  expect_refused<CaptureError>([](BodyBlock& block, const at::Tensor& x) { return mix(block, x) * block.other; },
                               {"blocks.0", "cpu", "aten::mul", "existed before the call", "Module::to"}, scale);
  const auto table = [](BodyModel& model) {
    model.block(0).other = model.block(0).register_buffer("table", at::full({16}, 0.5));
  };
  expect_refused<CaptureError>(
      [](BodyBlock& block, const at::Tensor& x) { return mix(block, x) * block.other.to(x.device()); },
      {"buffer \"table\"", "cpu"}, table);
}

TEST_F(CaptureWritesTest, AModelLeftOnTheCpuIsRefusedByName) {
  BodyModel model(c10::Device(c10::DeviceType::CPU), {mix});
  OffloadEngine engine(model, options());
  (void)model.step(&engine, 0);
  EXPECT_THROWS(UsageError, "graphed call \"blocks.0\": input 0", (void)engine.step());
  EXPECT_THROWS(UsageError, "is on cpu", (void)engine.step());
}

TEST_F(CaptureWritesTest, ASampleOnTheCpuIsRefusedByName) {
  BodyModel model(device_, {mix});
  OffloadEngine engine(model, Options(device_));
  EXPECT_THROWS(UsageError, "input 0, a Float tensor [2, 8, 16], is on cpu",
                (void)make_graphed_callables(
                    engine,
                    {{"mix", [](BodyBlock& block, const Tensors& in) { return Tensors{mix(block, in[0])}; },
                      model.blocks->ptr<BodyBlock>(0)}},
                    {{model.data(0, 8, 2).cpu()}}));
}

TEST_F(CaptureWritesTest, DrawsOnTheCpuAreRefusedByName) {
  expect_refused<CaptureError>(
      [](BodyBlock& block, const at::Tensor& x) { return mix(block, x) * at::rand({1}).to(x.device()); },
      {"blocks.0", "aten::rand", "random numbers on the CPU"});
  expect_refused<CaptureError>(
      [](BodyBlock& block, const at::Tensor& x) {
        return mix(block, x).index_select(1, at::randperm(x.size(1)).to(x.device()));
      },
      {"aten::randperm"});
}

TEST_F(CaptureWritesTest, ASeedInsideIsRefused) {
  BodyModel model(device_, {[](BodyBlock& block, const at::Tensor& x) {
                    torch::manual_seed(17);
                    return at::dropout(mix(block, x), 0.5, true);
                  }});
  OffloadEngine engine(model, options());
  (void)model.step(&engine, 0);
  EXPECT_THROWS(CaptureError, "graphed call \"blocks.0\": it seeds the device's generator", (void)engine.step());
}

TEST_F(CaptureWritesTest, AnInputThatTheBodyLetsRequireAGradientIsRefused) {
  BodyModel model(device_, {[](BodyBlock& block, const at::Tensor& x) { return mix(block, x.requires_grad_(true)); }});
  model.first.requires_grad_(false);
  OffloadEngine engine(model, options());
  (void)model.step(&engine, 0);
  EXPECT_THROWS(CaptureError, "\"blocks.0\": it sets requires_grad of one of its inputs", (void)model.step(&engine, 1));
}

TEST_F(CaptureWritesTest, NumbersAndTensorsOfTheCallsOwnAreFine) {
  expect_trains([](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor two = at::scalar_tensor(2.0);  // on the CPU, made in the call from a constant
    return at::where(x > 0, mix(block, x) * 2.0, at::pow(x.tanh(), 2)) * two + at::dropout(x, 0.5, true).tanh();
  });
}

}  // namespace
}  // namespace sidestream::testing_model
