// The reference systems' tests of hooks around captures, by their names; and what else hooks promise here.
#include <stdexcept>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <gtest/gtest.h>

#include "conformance/fixture.h"
#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/pipeline_order.h"

namespace sidestream::testing_model {
namespace {

using Log = std::vector<std::string>;

class ConformanceHooks : public conformance::ConformanceTest {
 protected:
  /// Writes down what runs, and that no capture is open then.
  [[nodiscard]] CaptureTimeHooks logging(const std::string& name) {
    const auto logs = [this, name](const char* what) {
      return [this, text = name + what] {
        Runtime& runtime = EngineAccess::state(engine_).runtime();
        EXPECT_EQ(runtime.capture_status(runtime.current_stream()), CaptureStatus::none) << text;
        runtime.synchronize(runtime.current_stream());
        log_.push_back(text);
      };
    };
    return CaptureTimeHooks()
        .before_forward(logs(": before forward"))
        .after_forward(logs(": after forward"))
        .before_backward(logs(": before backward"))
        .after_backward(logs(": after backward"));
  }

  /// x * weight; its runs are in the log.
  [[nodiscard]] Callable scaled(const std::string& name) {
    return Callable(name, owning([this, name, weight = weight_](const Tensors& in) {
                      log_.push_back(name + ": forward");
                      return Tensors{in[0] * weight};
                    }));
  }

  static void add_forward(Log& log, const std::string& name) {
    log.insert(log.end(), {name + ": before forward", name + ": forward", name + ": after forward"});
  }
  static void add_backward(Log& log, const std::string& name) {
    log.insert(log.end(), {name + ": before backward", name + ": after backward"});
  }

  [[nodiscard]] at::Tensor input(std::int64_t step) const { return rows(step, device_).requires_grad_(true); }

  torch::nn::Sequential model_ = layer_stack(1, device_);
  OffloadEngine engine_{*model_, Options(device_)};
  at::Tensor weight_ = rows(100, device_).requires_grad_(true);
  Log log_;
};

// The sizing pass is a pass like a warm-up's: what its body needs its hooks have to make as well.
TEST_F(ConformanceHooks, CaptureTimeHooksNo) {
  for (const std::int64_t iterations : {0, 3}) {
    log_.clear();
    std::vector<Callable> callables{scaled("a"), scaled("b")};
    callables[0].capture_time_hooks(logging("a"));
    callables[1].capture_time_hooks(logging("b"));
    const auto graphed = make_graphed_callables(engine_, callables, {{input(0)}, {Sample::output_of(0)}},
                                                GraphOptions().num_warmup_iters(iterations));
    Log expected;
    for (const char* name : {"a", "b"}) {
      for (std::int64_t pass = 0; pass < 1 + iterations; ++pass) {
        add_forward(expected, name);
        add_backward(expected, name);
      }
    }
    add_forward(expected, "a");
    add_forward(expected, "b");
    add_backward(expected, "b");
    add_backward(expected, "a");
    EXPECT_EQ(log_, expected) << "the sizing pass, " << iterations << " of the warm-up, and the capture";
    for (std::int64_t step = 1; step < 4; ++step) {
      const at::Tensor x = input(step);
      graphed[1](graphed[0]({x}))[0].sum().backward();
      EXPECT_TRUE(at::equal(x.grad().cpu(), (weight_ * weight_).cpu()));
    }
    EXPECT_EQ(log_, expected) << "a replay runs no hook";
  }
}

TEST_F(ConformanceHooks, CaptureTimeHooksOrder) {
  std::vector<Callable> callables{scaled("a"), scaled("b")};
  callables[0].capture_time_hooks(logging("a"));
  callables[1].capture_time_hooks(logging("b"));
  const PipelineShape shape{2, 1, 2};  // the first rank: both forwards, then both backwards, oldest first
  const auto graphed = make_graphed_callables(engine_, callables, {{input(0)}, {Sample::output_of(0)}},
                                              GraphOptions().num_warmup_iters(1).order(pipeline_order(shape, 0)));
  Log captures;
  for (std::int64_t microbatch = 0; microbatch < 2; ++microbatch) {
    add_forward(captures, "a");
    add_forward(captures, "b");
  }
  for (std::int64_t microbatch = 0; microbatch < 2; ++microbatch) {
    add_backward(captures, "b");
    add_backward(captures, "a");
  }
  ASSERT_GE(log_.size(), captures.size());
  EXPECT_EQ(Log(log_.end() - static_cast<std::ptrdiff_t>(captures.size()), log_.end()), captures);
  const Log all = log_;
  for (std::int64_t step = 1; step < 3; ++step) {
    const at::Tensor first = input(step);
    const at::Tensor second = input(10 + step);
    const at::Tensor out = graphed[1](graphed[0]({first}))[0].sum();
    const at::Tensor other = graphed[1](graphed[0]({second}))[0].sum();
    out.backward();
    other.backward();
    EXPECT_TRUE(at::equal(first.grad().cpu(), (weight_ * weight_).cpu()));
    EXPECT_TRUE(at::equal(second.grad().cpu(), (weight_ * weight_).cpu()));
  }
  EXPECT_EQ(log_, all) << "a replay runs no hook";
}

TEST_F(ConformanceHooks, OfOneCallableAndSomeOfThem) {
  std::vector<Callable> callables{scaled("a"), scaled("b")};
  callables[1].capture_time_hooks(CaptureTimeHooks().after_backward([this] { log_.push_back("b: after backward"); }));
  (void)make_graphed_callables(engine_, callables, {{input(0)}, {input(1)}}, GraphOptions().num_warmup_iters(1));
  EXPECT_EQ(log_, (Log{"a: forward", "a: forward", "b: forward", "b: after backward", "b: forward", "b: after backward",
                       "a: forward", "b: forward", "b: after backward"}));
}

TEST_F(ConformanceHooks, ACallableWithoutABackwardHasItsForwardHooks) {
  Callable callable("flat", owning([this](const Tensors& in) {
                      log_.push_back("flat: forward");
                      return Tensors{in[0] * 2};
                    }));
  callable.capture_time_hooks(logging("flat"));
  (void)make_graphed_callables(engine_, {callable}, {{rows(0, device_)}}, GraphOptions().num_warmup_iters(0));
  Log expected;
  add_forward(expected, "flat");
  add_forward(expected, "flat");
  EXPECT_EQ(log_, expected);
}

// Weights that live for the passes only, as sharded ones do: what a hook makes is read by the graphs, at its address.
TEST_F(ConformanceHooks, ABodyReadsWhatItsHookMade) {
  const auto gathered = std::make_shared<at::Tensor>();
  Callable callable("gathered", owning([gathered](const Tensors& in) { return Tensors{in[0] * *gathered}; }));
  const at::Tensor whole = rows(5, device_);
  callable.capture_time_hooks(CaptureTimeHooks().before_forward([&] { *gathered = whole * 3; }).after_backward([&] {
    *gathered = at::Tensor();
  }));
  const auto graphed = make_graphed_callables(engine_, {callable}, {{input(0)}});
  for (std::int64_t step = 1; step < 3; ++step) {
    const at::Tensor x = input(step);
    graphed[0]({x})[0].sum().backward();
    EXPECT_TRUE(at::equal(x.grad().cpu(), (whole * 3).cpu()));
  }
}

class ScaledByWeight : public torch::nn::Module {
 public:
  explicit ScaledByWeight(c10::Device device) { weight = register_parameter("weight", rows(7, device)); }
  at::Tensor forward(const at::Tensor& x) { return (x * weight).tanh(); }
  at::Tensor weight;
};

/// A weight that lies in one place, and is gathered into another for each pass.
class HooksThatGather : public ConformanceHooks {
 protected:
  void gather() {
    const at::NoGradGuard no_grad;
    if (!gathered_.defined()) {
      gathered_ = at::empty_like(home_);
    }
    gathered_.copy_(home_);
    module_->weight.set_data(gathered_);
  }
  void scatter() { module_->weight.set_data(home_); }
  [[nodiscard]] GraphedCallable capture(const CaptureTimeHooks& hooks) {
    Callable callable("scaled", torch::nn::AnyModule(module_));
    callable.capture_time_hooks(hooks);
    return make_graphed_callables(engine_, {callable}, {{input(0)}})[0];
  }
  [[nodiscard]] CaptureTimeHooks whole() {
    return CaptureTimeHooks()
        .before_forward([this] { gather(); })
        .after_forward([this] { scatter(); })
        .before_backward([this] { gather(); })
        .after_backward([this] { scatter(); });
  }
  [[nodiscard]] StepTensors step(std::int64_t s, const GraphedCallable* graphed) {
    const at::Tensor x = input(s);
    module_->zero_grad();
    gather();
    const at::Tensor y = graphed != nullptr ? (*graphed)({x})[0] : module_->forward(x);
    y.sum().backward();
    scatter();
    return {{"output", y.detach().clone()}, {"input", x.grad()}, {"weight", module_->weight.grad().clone()}};
  }

  std::shared_ptr<ScaledByWeight> module_ = std::make_shared<ScaledByWeight>(device_);
  at::Tensor home_ = module_->weight.detach();
  at::Tensor gathered_;
};

TEST_F(HooksThatGather, AWeightIsReadWhereItWasGathered) {
  const GraphedCallable graphed = capture(whole());
  for (std::int64_t s = 1; s < 4; ++s) {
    home_.add_(0.25);
    const StepTensors expected = step(s, nullptr);
    EXPECT_THROWS(UsageError, "where its capture-time hooks placed them, and now \"weight\" lies in other memory",
                  (void)graphed({input(s)}));
    EXPECT_TRUE(same(step(s, &graphed), expected)) << "step " << s;
  }
  EXPECT_EQ(engine_.report().recaptures, 0);
}

TEST_F(HooksThatGather, WhatWasGatheredIsHeld) {
  const GraphedCallable graphed =
      capture(CaptureTimeHooks().before_forward([this] { gather(); }).after_backward([this] {
        scatter();
        gathered_ = at::Tensor();
      }));
  EXPECT_GE(engine_.report().external_bytes, static_cast<std::int64_t>(home_.nbytes()));
  EXPECT_THROWS(UsageError, "where its capture-time hooks placed them", (void)graphed({input(1)}));
  gather();
  EXPECT_THROWS(UsageError, "where its capture-time hooks placed them", (void)graphed({input(1)}));
}

// The other callable's weight lies elsewhere, and its body throws where both are captured again.
TEST_F(HooksThatGather, ACaptureThatFailedInItsPlaceIsNamed) {
  for (const bool gathered : {false, true}) {
    SCOPED_TRACE(gathered ? "gathered" : "scattered");
    bool breaks = false;
    Callable hooked("scaled", torch::nn::AnyModule(module_));
    hooked.capture_time_hooks(whole());
    Callable other("other", owning([&](const Tensors& in) {
                     if (breaks) {
                       throw std::runtime_error("the model broke");
                     }
                     return Tensors{in[0] * weight_};
                   }));
    const auto graphed = make_graphed_callables(engine_, {hooked, other}, {{input(0)}, {input(0)}});
    weight_.set_data(weight_.detach().clone());
    breaks = true;
    EXPECT_THROWS(std::runtime_error, "the model broke", (void)graphed[1]({input(1)}));
    breaks = false;
    scatter();
    if (gathered) {
      gather();
    }
    EXPECT_THROWS(UsageError, "because an earlier capture had failed", (void)graphed[0]({input(1)}));
    scatter();
    const StepTensors expected = step(2, nullptr);
    EXPECT_TRUE(same(step(2, graphed.data()), expected));
    const at::Tensor x = input(3);
    EXPECT_TRUE(at::equal(graphed[1]({x})[0].cpu(), (x * weight_).cpu()));
  }
}

TEST_F(HooksThatGather, OtherMemoryForTheBackwardIsRefused) {
  EXPECT_THROWS(
      CaptureError, "at other addresses for backward than for forward",
      (void)capture(CaptureTimeHooks().before_forward([this] { gather(); }).after_forward([this] { scatter(); })));
  const GraphedCallable graphed = capture(CaptureTimeHooks());
  const at::Tensor x = input(1);
  EXPECT_TRUE(at::equal(graphed({x})[0].cpu(), module_->forward(x).cpu()));
}

// What a pass writes is put back; what its hook writes is the hook's own.
TEST_F(ConformanceHooks, WhatAHookWritesStays) {
  const at::Tensor counter = at::zeros({}, at::TensorOptions().device(device_));
  Callable callable = scaled("a");
  callable.capture_time_hooks(CaptureTimeHooks().before_forward([&] { counter.add_(1); }));
  (void)make_graphed_callables(engine_, {callable}, {{input(0)}}, GraphOptions().num_warmup_iters(2));
  EXPECT_EQ(counter.item<float>(), 4) << "sizing, two of the warm-up, and the capture";
}

TEST_F(ConformanceHooks, WhatAHookThrowsComesOutAndLeavesNothing) {
  using Set = void (*)(CaptureTimeHooks&, std::function<void()>);
  const Set set[] = {[](CaptureTimeHooks& hooks, std::function<void()> f) { hooks.before_forward(std::move(f)); },
                     [](CaptureTimeHooks& hooks, std::function<void()> f) { hooks.after_forward(std::move(f)); },
                     [](CaptureTimeHooks& hooks, std::function<void()> f) { hooks.before_backward(std::move(f)); },
                     [](CaptureTimeHooks& hooks, std::function<void()> f) { hooks.after_backward(std::move(f)); }};
  Runtime& runtime = EngineAccess::state(engine_).runtime();
  const std::int64_t handles = runtime.live_handles();
  for (const Set& one : set) {
    for (const int throws_in_pass : {0, 1, 2}) {  // sizing, warm-up, capture
      int pass = 0;
      CaptureTimeHooks hooks;
      one(hooks, [&] {
        if (pass++ == throws_in_pass) {
          throw std::runtime_error("the hook's own words");
        }
      });
      Callable callable = scaled("a");
      callable.capture_time_hooks(hooks);
      EXPECT_THROWS(
          std::runtime_error, "the hook's own words",
          (void)make_graphed_callables(engine_, {callable}, {{input(0)}}, GraphOptions().num_warmup_iters(1)));
      EXPECT_EQ(runtime.capture_status(runtime.current_stream()), CaptureStatus::none);
      EXPECT_EQ(runtime.live_handles(), handles);
    }
  }
  const auto graphed = make_graphed_callables(engine_, {scaled("a")}, {{input(0)}});
  const at::Tensor x = input(1);
  graphed[0]({x})[0].sum().backward();
  EXPECT_TRUE(at::equal(x.grad().cpu(), weight_.detach().cpu()));
}

}  // namespace
}  // namespace sidestream::testing_model
