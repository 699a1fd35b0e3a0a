#include <memory>

#include <ATen/Functions.h>
#include <ATen/autocast_mode.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/stack_twins.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_event.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

/// `expect_usable` says that whatever happened left the graphs right.
class GraphedCallableError : public testing::Test, protected StackTwins {
 protected:
  GraphedCallableError() : StackTwins(find_device("sim")) {}

  void expect_usable() { expect_plain(0, 2); }
  [[nodiscard]] CaptureStatus capturing() const {
    Runtime& runtime = EngineAccess::state(*engine).runtime();
    return runtime.capture_status(runtime.current_stream());
  }
};

TEST_F(GraphedCallableError, AnotherStateOfAutocastIsRefused) {
  capture();
  const c10::DeviceType type = device.type();
  at::autocast::set_autocast_enabled(type, true);
  EXPECT_THROWS(UsageError, "the state of autocast differs from that at its capture", (void)layers[0]({input(0)}));
  at::autocast::set_autocast_enabled(type, false);
  expect_usable();
}

TEST_F(GraphedCallableError, ABackwardInsideAnAutocastRegionIsRefusedAndMayRunOutsideOfIt) {
  capture();
  const c10::DeviceType type = device.type();
  const auto run = [&](torch::nn::Sequential& model, bool graphed) {
    const at::Tensor x = input(0);
    StepTensors result = train_step(*model, nullptr, [&] {
      const at::Tensor y = graphed ? run_stack(layers, x) : model->forward(x);
      if (graphed) {
        at::autocast::set_autocast_enabled(type, true);
        EXPECT_THROWS(UsageError, "call backward() outside of the autocast region", y.backward(at::ones_like(y)));
        at::autocast::set_autocast_enabled(type, false);
      }
      y.backward(at::ones_like(y));
    });
    result.emplace_back("gradient of the input", x.grad());
    return result;
  };
  EXPECT_TRUE(testing_model::same(run(model, true), run(plain, false)));
  expect_usable();
}

TEST_F(GraphedCallableError, OptionsThatMakeNoSense) {
  EXPECT_THROWS(UsageError, "side_streams is 0", capture(GraphOptions().side_streams(0)));
  EXPECT_THROWS(UsageError, "num_warmup_iters", capture(GraphOptions().num_warmup_iters(-1)));
  const auto event = std::make_shared<GraphEvent>(device);
  EXPECT_THROWS(UsageError, "without cuda_graph_stream", capture(GraphOptions().cuda_graph_event(event)));
  const c10::Stream current = EngineAccess::state(*engine).runtime().current_stream();
  EXPECT_THROWS(UsageError, "current stream",
                capture(GraphOptions().cuda_graph_event(event).cuda_graph_stream(current)));
  EXPECT_THROWS(UsageError, "side_streams and cuda_graph_stream are both set",
                capture(GraphOptions().side_streams(2).cuda_graph_stream(current)));
  EXPECT_THROWS(UsageError, "at least one", (void)make_graphed_callables(*engine, {}, {}));
  const Callable callable("twice", [](const Tensors& in) { return Tensors{in[0] * 2}; });
  EXPECT_THROWS(UsageError, "1 callables and 2",
                (void)make_graphed_callables(*engine, {callable}, {{input(0)}, {input(0)}}));
  EXPECT_THROWS(UsageError, "does not come before it",
                (void)make_graphed_callables(*engine, {callable}, {{Sample::output_of(0)}}));
  capture();
  expect_usable();
}

TEST_F(GraphedCallableError, TheCallersStreamWithItsEvent) {
  Runtime& runtime = EngineAccess::state(*engine).runtime();
  const OwnedStream side = runtime.create_stream();
  const OwnedStream reader = runtime.create_stream();
  const auto event = std::make_shared<GraphEvent>(device);
  capture(GraphOptions().cuda_graph_stream(side).cuda_graph_event(event));
  expect_usable();
  const at::Tensor x = input(7);
  const at::Tensor y = run_stack(layers, x);
  at::Tensor read;
  {
    const c10::impl::VirtualGuardImpl guard(device.type());
    event->wait(reader);
    const c10::Stream before = guard.exchangeStream(reader);
    read = y.detach().clone();
    guard.exchangeStream(before);
    runtime.synchronize(reader);
  }
  EXPECT_TRUE(at::equal(read.cpu(), plain->forward(x).cpu()));
  layers.clear();
}

TEST_F(GraphedCallableError, InputsThatWereNotCaptured) {
  capture();
  expect_usable();
  const auto message = [&](const Tensors& in) { return message_of<UsageError>([&] { (void)layers[0](in); }); };
  const auto expect = [&](const char* text, const Tensors& in) {
    EXPECT_PRED_FORMAT2(testing::IsSubstring, text, message(in));
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "layers.0", message(in));
    expect_usable();
  };
  const auto leaf = [](const at::Tensor& x) { return x.detach().requires_grad_(true); };
  expect("has shape [8, 32], captured with [16, 32]", {leaf(rows(0, device).slice(0, 0, 8))});
  expect("has shape [1, 32], captured with [16, 32]", {leaf(rows(0, device).slice(0, 0, 1))});  // would broadcast
  expect("has shape [32, 16]", {leaf(rows(0, device).t())});
  expect("has dtype Double", {leaf(rows(0, device).to(at::kDouble))});  // would be cast
  expect("device cpu", {rows(0, at::kCPU).requires_grad_(true)});
  expect("has requires_grad", {rows(0, device)});
  expect("undefined", {at::Tensor()});
  expect("captured with 1 tensors, given 2", {input(0), input(0)});
  const at::Tensor stranger = input(1);
  EXPECT_THROWS(UsageError, "output of an earlier call", (void)layers[1]({stranger}));
  expect_usable();
}

TEST_F(GraphedCallableError, BackwardTwice) {
  capture();
  const at::Tensor loss = run_stack(layers, input(0)).square().mean();
  loss.backward({}, /*retain_graph=*/true);
  EXPECT_THROWS(UsageError, "run a second time", loss.backward());
  expect_usable();
}

TEST_F(GraphedCallableError, ForwardWhileItsBackwardIsPending) {
  capture();
  const at::Tensor y = run_stack(layers, input(0));
  EXPECT_THROWS(UsageError, "still pending", run_stack(layers, input(1)));
  const at::Tensor x = input(0);
  const at::Tensor expected = plain->forward(x);
  y.square().mean().backward();
  expected.square().mean().backward();
  EXPECT_TRUE(same(gradients(*model), gradients(*plain))) << "the refused forward has touched nothing";
  expect_usable();
}

TEST_F(GraphedCallableError, CallsOutOfOrder) {
  capture({}, /*linked=*/false);
  {
    const at::Tensor later = layers[2]({input(0)})[0];
    EXPECT_THROWS(UsageError, "called after \"layers.2\"", (void)layers[1]({input(1)}));
  }
  expect_usable();
  {
    const at::Tensor first = layers[0]({input(0)})[0];
    const at::Tensor second = layers[1]({input(1)})[0];
    EXPECT_THROWS(UsageError, "before that of \"layers.1\"", first.sum().backward());
  }
  expect_usable();
}

TEST_F(GraphedCallableError, AnOutputChangedInPlaceBeforeItsBackward) {
  capture();
  {
    at::Tensor h = run_stack({layers[0], layers[1]}, input(0));
    const at::Tensor loss = run_stack({layers[2], layers[3]}, h).sum();
    h.mul_(2);
    EXPECT_THROWS(UsageError, "changed in place", loss.backward());
  }
  expect_usable();
}

TEST_F(GraphedCallableError, AGradientReplacedUnderAccumulation) {
  capture(GraphOptions().gradients("**", GradientPolicy::accumulated));
  expect_usable();
  at::Tensor parameter = model->parameters()[0];
  const at::Tensor owned = parameter.grad();
  ASSERT_TRUE(owned.defined());
  const at::Tensor replaced = at::zeros_like(owned);
  parameter.mutable_grad() = replaced;
  EXPECT_THROWS(UsageError, "replaced by another tensor", run_stack(layers, input(0)).sum().backward());
  parameter.mutable_grad() = at::Tensor();
  expect_usable();
  EXPECT_EQ(parameter.grad().const_data_ptr(), owned.const_data_ptr()) << "the graph's own buffer, attached again";
}

TEST_F(GraphedCallableError, HooksOfParameters) {
  int fired = 0;
  model->parameters()[1].register_hook([&](const at::Tensor& grad) {
    ++fired;
    return grad * 2;
  });
  plain->parameters()[1].register_hook([](const at::Tensor& grad) { return grad * 2; });
  EXPECT_THROWS(UsageError, "gradient hooks", capture(GraphOptions().gradients("**", GradientPolicy::accumulated)));
  capture();
  EXPECT_EQ(fired, 0) << "neither warm-up nor capture runs them";
  expect_usable();
  EXPECT_EQ(fired, 2) << "once a backward";
}

TEST_F(GraphedCallableError, ReadingAValueInsideACallable) {
  const TensorFunction function = [](const Tensors& in) {
    return Tensors{in[0] * (in[0].sum().item<double>() > 0 ? 2 : 3)};
  };
  EXPECT_THROWS(CaptureError, "capture",
                (void)make_graphed_callables(*engine, {Callable("reads", owning(function))}, {{input(0)}}));
  EXPECT_EQ(capturing(), CaptureStatus::none);
  capture();
  expect_usable();
}

TEST_F(GraphedCallableError, WeightsThatMoveAreAnErrorByOption) {
  capture(GraphOptions().on_relocated_weights(OnRelocatedWeights::error));
  expect_usable();
  at::Tensor parameter = model->parameters()[2];
  const at::Tensor held = parameter.variable_data();
  parameter.set_data(parameter.detach() * 2);
  EXPECT_THROWS(UsageError, "relocated since the capture", run_stack(layers, input(0)));
  parameter.set_data(held);
  expect_usable();
}

TEST_F(GraphedCallableError, StridesThatAViewOfAnInputCannotHaveAreRefusedBeforeAnythingIsQueued) {
  const auto square = [&](std::int64_t s) { return rows(s, device).narrow(1, 0, 16).clone(); };
  const at::Tensor weight = square(900);
  const auto body = [weight](const Tensors& in) { return Tensors{in[0].view({-1}), in[0] * weight}; };
  const auto graphed = make_graphed_callables(*engine, {Callable("views", owning(body))}, {{square(0)}});
  const Tensors made = graphed[0]({square(1)});
  const at::Tensor then = made[1].cpu();
  const void* const memory = made[1].const_data_ptr();
  EXPECT_THROWS(UsageError, "output 0 is a view of input 0", (void)graphed[0]({square(2).t()}));
  EXPECT_EQ(made[1].const_data_ptr(), memory) << "a replay would have copied it out";
  EXPECT_TRUE(at::equal(made[1].cpu(), then));
  EXPECT_TRUE(at::equal(graphed[0]({square(2)})[0].cpu(), square(2).view({-1}).cpu()));
}

TEST_F(GraphedCallableError, DevicesAndModulesThatThereAreNotAreRefused) {
  EXPECT_THROWS(UsageError, "there is no device \"tpu\"; use auto, cuda, cuda:N or sim", (void)find_device("tpu"));
  EXPECT_THROWS(UsageError, "device \"sim:x\" is not of the form sim:N", (void)find_device("sim:x"));
  EXPECT_THROWS(UsageError, "ss::call was given no module", (void)call(std::shared_ptr<Mlp>(), input(0)));
  const Callable layer("layer", torch::nn::AnyModule(model->ptr<Mlp>(0)));
  EXPECT_THROWS(UsageError, "takes one tensor, but was given 2",
                (void)make_graphed_callables(*engine, {layer}, {{input(0), input(1)}}));
}

TEST_F(GraphedCallableError, NoStepInsideAStepAndNoResetInside) {
  const auto step = engine->step();
  EXPECT_THROWS(UsageError, "active already", (void)engine->step());
  EXPECT_THROWS(UsageError, "inside a step", engine->reset());
}

}  // namespace
}  // namespace sidestream::testing_model
