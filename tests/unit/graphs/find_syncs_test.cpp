// What makes the host wait is found wherever a step does it, and said with its place (Options::find_syncs): every kind in every context.
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/nn/module.h>

#include "expect_throws.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/scope.h"
#include "warnings.h"

namespace sidestream {
namespace {

/// Where in a step something waits.
enum class WaitContext : std::uint8_t {
  eager_call,   ///< in a graphed call that runs eagerly
  between,      ///< between graphed calls
  scope,        ///< in a scope between them
  hook,         ///< in a tensor's hook
  backward,     ///< in the backward of a function of the user's
  optimizer,    ///< in the update
  other_thread  ///< on a thread that is no part of the step
};

struct WaitKind {
  const char* label;
  const char* name;       ///< SyncFinding::kind
  const char* operation;  ///< SyncFinding::operation
  std::function<void(const at::Tensor&)> wait;
};

std::vector<WaitKind> wait_kinds() {
  static std::int64_t grown = 1;
  const auto host = [](bool pinned) {
    const at::Tensor made = at::empty({8, 8});
    return pinned ? made.pin_memory() : made;
  };
  return {
      {"item", "value read on the host", "aten::item", [](const at::Tensor& t) { (void)t.sum().item<float>(); }},
      {"is_nonzero", "value read on the host", "aten::is_nonzero",
       [](const at::Tensor& t) { (void)t.sum().is_nonzero(); }},
      {"equal", "value read on the host", "aten::equal", [](const at::Tensor& t) { (void)at::equal(t, t.add(1)); }},
      {"nonzero", "result whose shape depends on data", "aten::nonzero",
       [](const at::Tensor& t) { (void)at::nonzero(t); }},
      {"masked_select", "result whose shape depends on data", "aten::masked_select",
       [](const at::Tensor& t) { (void)at::masked_select(t, t.gt(0)); }},
      {"index by a mask", "result whose shape depends on data", "aten::index",
       [](const at::Tensor& t) { (void)at::index(t, {t.gt(0)}); }},
      {"blocking copy to the host", "blocking copy", "aten::copy_",
       [host](const at::Tensor& t) { host(true).copy_(t); }},
      {"blocking copy to the device", "blocking copy", "aten::copy_",
       [host](const at::Tensor& t) {
         (void)at::zeros({8, 8}, t.options()).copy_(host(true));
       }},
      {"to the CPU", "copy of pageable host memory", "aten::to", [](const at::Tensor& t) { (void)t.to(at::kCPU); }},
      {"pageable copy that is not to block", "copy of pageable host memory", "aten::to",
       [host](const at::Tensor& t) { (void)host(false).to(t.device(), /*non_blocking=*/true); }},
      {"index on the host", "copy of pageable host memory", "aten::index",
       [](const at::Tensor& t) { (void)at::index(t, {at::zeros({2}, at::kLong)}); }},
      {"event", "event synchronisation", "synchronize of an event",
       [](const at::Tensor& t) {
         c10::Event event(t.device().type());
         event.record(c10::impl::getDeviceGuardImpl(t.device().type())->getStream(t.device()));
         event.synchronize();
       }},
      {"stream", "stream synchronisation", "synchronize of a stream",
       [](const at::Tensor& t) {
         c10::impl::getDeviceGuardImpl(t.device().type())->getStream(t.device()).synchronize();
       }},
      {"device", "device synchronisation", "sidestream::synchronize",
       [](const at::Tensor& t) { synchronize(t.device()); }},
      {"guard's device", "device synchronisation", "synchronize of the device",
       [](const at::Tensor& t) { c10::impl::getDeviceGuardImpl(t.device().type())->synchronizeDevice(0); }},
      {"cached memory given back", "device synchronisation", "sidestream::release_cached_memory",
       [](const at::Tensor& t) { release_cached_memory(t.device()); }},
      {"allocation", "device allocation", "aten::empty",
       [](const at::Tensor& t) { (void)at::empty({(grown++ << 23) + (std::int64_t{1} << 25)}, t.options()); }},
  };
}

struct PlantedWait {
  WaitContext context;
  std::function<void(const at::Tensor&)> wait;
};
/// What the program below does besides training; read by autograd's thread as well.
const PlantedWait* planted_wait = nullptr;

void wait_at(WaitContext context, const at::Tensor& tensor) {
  if (planted_wait != nullptr && planted_wait->context == context) {
    const c10::AutoGradMode no_grad(false);
    planted_wait->wait(tensor.detach());
  }
}

struct WaitsInBackward : torch::autograd::Function<WaitsInBackward> {
  static at::Tensor forward(torch::autograd::AutogradContext* /*context*/, const at::Tensor& x) { return x.clone(); }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* /*context*/,
                                                 torch::autograd::variable_list grads) {
    wait_at(WaitContext::backward, grads[0]);
    return grads;
  }
};

class WaitingLayer : public torch::nn::Module {
 public:
  WaitingLayer() : weight_(register_parameter("weight", at::rand({8, 8}))) {}
  at::Tensor forward(at::Tensor h) {
    h = at::tanh(h.matmul(weight_));
    wait_at(WaitContext::eager_call, h);
    return h;
  }

 private:
  at::Tensor weight_;
};

class WaitingModel : public torch::nn::Module {
 public:
  WaitingModel()
      : front_(register_module("front", std::make_shared<WaitingLayer>())),
        back_(register_module("back", std::make_shared<WaitingLayer>())) {}

  void train_on(at::Tensor h, bool eager_too) {
    h = call(front_, h);
    if (eager_too) {
      const at::NoGradGuard no_grad;
      (void)call(front_, h.detach());
    }
    wait_at(WaitContext::between, h);
    {
      const OffloadScope scope("middle");
      h = h.add(1);
      h = h.mul(h);
      wait_at(WaitContext::scope, h);
    }
    h = WaitsInBackward::apply(h);
    if (planted_wait != nullptr && planted_wait->context == WaitContext::hook) {
      h.register_hook([](const at::Tensor& grad) { wait_at(WaitContext::hook, grad); });
    }
    h = call(back_, h);
    h.sum().backward();
    if (planted_wait != nullptr && planted_wait->context == WaitContext::other_thread) {
      std::thread([&] { planted_wait->wait(h.detach()); }).join();
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) {
      parameter.sub_(parameter.grad(), 0.01);
      parameter.mutable_grad().zero_();
    }
    wait_at(WaitContext::optimizer, h);
  }

 private:
  std::shared_ptr<WaitingLayer> front_, back_;
};

class FindSyncsTest : public testing::Test {
 protected:
  FindSyncsTest() { model_.to(device_); }
  ~FindSyncsTest() override { planted_wait = nullptr; }

  [[nodiscard]] Options options() const {
    return Options(device_).graph("front,back").offload("front,middle").min_bytes(64).lag(1).find_syncs(true);
  }
  /// Data is made before a step, as a trainer does.
  void step(OffloadEngine& engine, bool eager_too = true) {
    const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
    auto step = engine.step();
    model_.train_on(data, eager_too);
    step.finish();
  }
  void steps(OffloadEngine& engine, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      step(engine);
    }
  }

  c10::Device device_ = find_device("sim");
  WaitingModel model_;
};

TEST_F(FindSyncsTest, TrainingThatNeverWaitsHasNoFindings) {
  OffloadEngine engine(model_, options());
  steps(engine, 12);
  const Report report = engine.report();
  EXPECT_GT(report.replays, 0);
  EXPECT_EQ(report.syncs_found, 0) << report.json();
  EXPECT_TRUE(report.syncs.empty());
}

struct ExpectedPlace {
  WaitContext context;
  const char* label;
  const char* call;
  const char* scope;
  bool in_backward;
};

TEST_F(FindSyncsTest, EveryKindIsFoundInEveryContextWithItsPlaceAndCount) {
  const std::vector<ExpectedPlace> places = {
      {WaitContext::eager_call, "eager call", "front", "front", false},
      {WaitContext::between, "between", "", "", false},
      {WaitContext::scope, "scope", "", "middle", false},
      {WaitContext::hook, "hook", "", "", true},
      {WaitContext::backward, "backward", "", "", true},
      {WaitContext::optimizer, "optimizer", "", "", false},
  };
  for (const WaitKind& kind : wait_kinds()) {
    for (const ExpectedPlace& place : places) {
      SCOPED_TRACE(std::string(kind.label) + ", " + place.label);
      OffloadEngine engine(model_, options());
      steps(engine, 7);
      const PlantedWait planted{place.context, kind.wait};
      planted_wait = &planted;
      steps(engine, 3);
      planted_wait = nullptr;
      step(engine);
      const Report report = engine.report();
      std::int64_t count = 0;
      for (const SyncFinding& found : report.syncs) {
        if (found.kind != kind.name) {  // memory that was given back is asked for anew
          EXPECT_EQ(found.kind, "device allocation") << report.json();
          continue;
        }
        count += found.count;
        EXPECT_EQ(found.operation, kind.operation);
        EXPECT_EQ(found.call, place.call);
        EXPECT_EQ(found.scope, place.scope);
        EXPECT_EQ(!found.node.empty(), place.in_backward) << found.node;
        EXPECT_FALSE(found.stack.empty());
        EXPECT_FALSE(found.remedy.empty());
      }
      EXPECT_EQ(count, 3) << report.json();
    }
  }
}

TEST_F(FindSyncsTest, AnotherThreadsWaitIsNoFinding) {
  for (const WaitKind& kind : wait_kinds()) {
    SCOPED_TRACE(kind.label);
    OffloadEngine engine(model_, options());
    steps(engine, 7);
    const PlantedWait planted{WaitContext::other_thread, kind.wait};
    planted_wait = &planted;
    steps(engine, 2);
    planted_wait = nullptr;
    for (const SyncFinding& found : engine.report().syncs) {
      EXPECT_EQ(found.kind, "device allocation") << "of the step itself, behind memory that was given back";
      EXPECT_STREQ(kind.label, "cached memory given back");
    }
  }
}

TEST_F(FindSyncsTest, FirstStepsAllocateAndThatIsNoFinding) {
  OffloadEngine engine(model_, options());
  const PlantedWait planted{WaitContext::between, wait_kinds().back().wait};
  planted_wait = &planted;
  steps(engine, 3);
  EXPECT_EQ(engine.report().syncs_found, 0);
  steps(engine, 5);
  EXPECT_GT(engine.report().syncs_found, 0);
}

TEST_F(FindSyncsTest, ABackwardIsAttributedToTheCallWhoseEagerRunMadeIt) {
  class Member : public torch::nn::Module {
   public:
    Member() : layer_(register_module("inside", std::make_shared<WaitingLayer>())) {}
    at::Tensor forward(at::Tensor h) {
      h = layer_->forward(h);
      const OffloadScope scope("tail");
      return WaitsInBackward::apply(h);
    }

   private:
    std::shared_ptr<WaitingLayer> layer_;
  };
  struct Outer : torch::nn::Module {
    Outer() : member(register_module("member", std::make_shared<Member>())) {}
    std::shared_ptr<Member> member;
  } outer;
  outer.to(device_);
  OffloadEngine engine(outer, Options(device_).graph("member").find_syncs(true));
  const PlantedWait planted{WaitContext::backward, wait_kinds().front().wait};
  planted_wait = &planted;
  const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
  {
    auto step = engine.step();
    call(outer.member, data).sum().backward();
    step.finish();
  }
  planted_wait = nullptr;
  const Report report = engine.report();
  ASSERT_EQ(report.syncs.size(), 1U) << report.json();
  EXPECT_EQ(report.syncs[0].call, "member");
  EXPECT_EQ(report.syncs[0].scope, "member.tail");
  EXPECT_NE(report.syncs[0].node.find("WaitsInBackward"), std::string::npos) << report.syncs[0].node;
}

TEST_F(FindSyncsTest, TheLibrarysOwnWaitsAreNoFindings) {
  const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
  OffloadEngine engine(model_, options().verify_replays(1000).check_steps(2));
  steps(engine, 5);
  EXPECT_GT(engine.report().verified_forwards, 0);
  EXPECT_GT(engine.report().verified_backwards, 0);
  EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
  engine.reset();
  steps(engine, 2);
  {  // captures inside of a step of an engine around it
    auto step = engine.step();
    WaitingModel other;
    other.to(device_);
    OffloadEngine inner(other, Options(device_).graph("front,back"));
    for (std::int64_t i = 0; i < 3; ++i) {
      auto inner_step = inner.step();
      other.train_on(data, false);
      inner_step.finish();
    }
    step.finish();
  }
  for (const SyncFinding& found : engine.report().syncs) {
    EXPECT_EQ(found.operation, "aten::to") << "the new model's weights go to the device in the step";
  }
}

TEST_F(FindSyncsTest, BetweenStepsAndWithoutTheOptionNothingIsFound) {
  OffloadEngine silent(model_, options().find_syncs(false));
  const PlantedWait planted{WaitContext::between, wait_kinds().front().wait};
  planted_wait = &planted;
  steps(silent, 3);
  EXPECT_EQ(silent.report().syncs_found, 0);
  planted_wait = nullptr;
  OffloadEngine engine(model_, options());
  for (std::int64_t i = 0; i < 4; ++i) {
    step(engine);
    for (const WaitKind& kind : wait_kinds()) {
      if (std::string(kind.label) != "cached memory given back") {
        kind.wait(at::ones({8, 8}).to(device_));
      }
    }
  }
  EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
}

TEST_F(FindSyncsTest, TheEnvironmentTurnsItOn) {
  const PlantedWait planted{WaitContext::between, wait_kinds().front().wait};
  for (const auto& [value, finds] : std::vector<std::pair<const char*, bool>>{{"1", true}, {"0", false}, {"", false}}) {
    setenv("SIDESTREAM_FIND_SYNCS", value, 1);
    OffloadEngine engine(model_, options().find_syncs(false));
    unsetenv("SIDESTREAM_FIND_SYNCS");
    planted_wait = &planted;
    step(engine);
    planted_wait = nullptr;
    EXPECT_EQ(engine.report().syncs_found, finds ? 1 : 0) << value;
  }
  setenv("SIDESTREAM_FIND_SYNCS", "yes", 1);
  EXPECT_THROWS(UsageError, "SIDESTREAM_FIND_SYNCS is \"yes\"", OffloadEngine(model_, options()));
  unsetenv("SIDESTREAM_FIND_SYNCS");
}

TEST_F(FindSyncsTest, TwoEnginesFindWhatIsInTheirOwnSteps) {
  OffloadEngine first(model_, options());
  WaitingModel other;
  other.to(device_);
  OffloadEngine second(other, options());
  const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
  for (std::int64_t i = 0; i < 3; ++i) {
    step(first);
    auto inner = second.step();
    other.train_on(data, false);
    inner.finish();
  }
  {
    auto outer = first.step();
    const at::Tensor sum = data.detach().sum();
    (void)sum.item<float>();  // the outer's
    {
      auto inner = second.step();
      (void)at::nonzero(data.detach());  // the inner's
      other.train_on(data, false);
      inner.finish();
    }
    (void)sum.item<float>();  // the outer's again
    model_.train_on(data, false);
    outer.finish();
  }
  const Report outer = first.report();
  const Report inner = second.report();
  ASSERT_EQ(inner.syncs_found, 1) << inner.json();
  EXPECT_EQ(inner.syncs[0].operation, "aten::nonzero");
  ASSERT_EQ(outer.syncs_found, 2) << outer.json();
  EXPECT_EQ(outer.syncs[0].operation, "aten::item");
}

TEST_F(FindSyncsTest, EnginesOfTwoThreadsFindTheirOwn) {
  const auto train = [&](std::int64_t items, Report& report) {
    WaitingModel model;
    model.to(device_);
    OffloadEngine engine(model, Options(device_).offload("middle").min_bytes(64).find_syncs(true));
    const at::Tensor data = at::rand({8, 8}).to(device_).requires_grad_();
    for (std::int64_t i = 0; i < 6; ++i) {
      auto step = engine.step();
      model.train_on(data, false);
      for (std::int64_t k = 0; k < items; ++k) {
        (void)data.detach().sum().item<float>();
      }
      step.finish();
    }
    report = engine.report();
  };
  Report two;
  Report five;
  std::thread a([&] { train(2, two); });
  std::thread b([&] { train(5, five); });
  a.join();
  b.join();
  const auto values = [](const Report& report) {
    std::int64_t count = 0;
    for (const SyncFinding& found : report.syncs) {
      count += found.kind == "value read on the host" ? found.count : 0;
    }
    return count;
  };
  EXPECT_EQ(values(two), 12);
  EXPECT_EQ(values(five), 30);
}

TEST_F(FindSyncsTest, AStepThatIsLeftOnAnotherThreadFindsNoMore) {
  OffloadEngine engine(model_, options());
  steps(engine, 2);
  {
    auto left = std::make_unique<Step>(engine.step());
    std::thread([&] {
      const testing_model::ExpectedWarnings warnings;
      left.reset();
    }).join();
  }
  EXPECT_THROW((void)engine.step(), UsageError);  // what the destructor kept
  step(engine);
  (void)at::ones({4}).to(device_).sum().item<float>();
  EXPECT_EQ(engine.report().syncs_found, 0);
  const PlantedWait planted{WaitContext::between, wait_kinds().front().wait};
  planted_wait = &planted;
  step(engine);
  planted_wait = nullptr;
  EXPECT_EQ(engine.report().syncs_found, 1) << engine.report().json();
}

TEST_F(FindSyncsTest, AHundredPlacesAreListedAndAllAreCounted) {
  OffloadEngine engine(model_, options());
  static constexpr std::int64_t kPlaces = 130;
  const PlantedWait planted{WaitContext::between, [](const at::Tensor& t) {
                              for (std::int64_t i = 0; i < kPlaces; ++i) {
                                const std::string name = "place" + std::to_string(i);
                                const OffloadScope scope(name.c_str());
                                (void)t.sum().item<float>();
                              }
                            }};
  planted_wait = &planted;
  steps(engine, 2);
  const Report report = engine.report();
  EXPECT_EQ(report.syncs_found, 2 * kPlaces);
  EXPECT_EQ(report.syncs.size(), 100U);
  EXPECT_EQ(report.syncs_unlisted, 2 * kPlaces - 200);
}

}  // namespace
}  // namespace sidestream
