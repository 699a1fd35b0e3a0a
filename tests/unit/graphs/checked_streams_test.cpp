// Models on streams of their own under check_steps: no finding where they order their streams, and a finding that names both sides
// where they, or the engine, forget to.
#include <algorithm>
#include <array>
#include <functional>
#include <memory>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/module.h>

#include "base/site.h"
#include "graphs/engine/engine_access.h"
#include "models/scopes.h"
#include "observe/checked_runtime.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"
#include "stream_order.h"

namespace sidestream::testing_model {
namespace {

class CheckedStreamsTest : public testing::Test {
 protected:
  static constexpr std::size_t kSteps = 4;

  [[nodiscard]] at::Tensor data(std::uint64_t salt) const {
    auto generator = at::detail::createCPUGenerator(900 + salt);
    return at::randn({64, 64}, generator).to(device_).requires_grad_(true);
  }
  [[nodiscard]] c10::Stream a() const { return a_.get(); }
  [[nodiscard]] c10::Stream b() const { return b_.get(); }
  void TearDown() override { synchronize(device_); }

  /// The inputs of all steps: they outlive every stream's work.
  [[nodiscard]] std::vector<at::Tensor> inputs(std::uint64_t salt) const {
    std::vector<at::Tensor> all;
    for (std::uint64_t i = 0; i < 2 * kSteps; ++i) {
      all.push_back(data(salt + i));
    }
    synchronize(device_);
    return all;
  }
  /// Findings of a few steps of `body(index of the step)`.
  std::vector<std::string> findings(const std::function<void(std::size_t)>& body) {
    OffloadEngine engine(model_,
                         Options(device_).min_bytes(1024).groups_in_flight(1).offload("**").check_steps(kSteps));
    for (std::size_t s = 0; s < kSteps; ++s) {
      const auto step = engine.step();
      body(s);
    }
    EXPECT_GT(engine.report().offloaded_bytes, 0);
    return engine.report().order_findings;
  }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<Runtime> runtime_ = make_runtime(device_);
  torch::nn::Module model_;
  OwnedStream a_ = runtime_->create_stream();
  OwnedStream b_ = runtime_->create_stream();
};

/// What a model that forks a stream in each scope may forget.
enum class Forgets { nothing, fork, join };

class ForkingModel : public CheckedStreamsTest, public testing::WithParamInterface<Forgets> {
 protected:
  [[nodiscard]] at::Tensor loss(const at::Tensor& input) const {
    const auto unless = [&](Forgets what) {
      return [forgets = GetParam() == what](c10::Stream earlier, c10::Stream later) {
        if (!forgets) {
          order(earlier, later);
        }
      };
    };
    return TwoStreams{a(), b(), unless(Forgets::fork), unless(Forgets::join)}
        .forked_layers(input, {"first", "second", "third"})
        .sum();
  }
};

TEST_P(ForkingModel, IsCleanUnlessItForgets) {
  const std::vector<at::Tensor> given = inputs(0);
  const std::vector<std::string> found = findings([&](std::size_t s) {
    const at::Tensor& x = given[s];
    const c10::StreamGuard on_a(a());
    (void)torch::autograd::grad({loss(x)}, {x});
  });
  if (GetParam() == Forgets::nothing) {
    EXPECT_EQ(found, std::vector<std::string>());
    return;
  }
  ASSERT_FALSE(found.empty());
  const bool fork = GetParam() == Forgets::fork;
  for (const char* word : {fork ? "aten::mul on" : "aten::tanh on", fork ? "aten::exp on" : "aten::add on", "stream",
                           "(forward of first, step ", "bytes)", "must wait for an event that"}) {
    EXPECT_NE(found[0].find(word), std::string::npos) << word << " is not in: " << found[0];
  }
}

INSTANTIATE_TEST_SUITE_P(Model, ForkingModel, testing::Values(Forgets::nothing, Forgets::fork, Forgets::join),
                         [](const testing::TestParamInfo<Forgets>& info) {
                           return std::string(info.param == Forgets::nothing ? "Nothing"
                                              : info.param == Forgets::fork  ? "Fork"
                                                                             : "Join");
                         });

/// A call gives out a view of its input, and the next call reads that. The capture copies the view's sample on the capture stream.
TEST_F(CheckedStreamsTest, TheCaptureReadsSamplesAfterTheyWereWritten) {
  OffloadEngine engine(model_, Options(device_).graph("*").check_steps(kSteps));
  for (std::size_t s = 0; s < kSteps; ++s) {
    const auto step = engine.step();
    const auto outputs = call(
        "first",
        [](const at::Tensor& x) {
          return std::array<at::Tensor, 2>{x.tanh(), x.view({-1})};
        },
        data(s) * 1.5);
    const at::Tensor next = call(
        "second", [](const at::Tensor& x) { return x.exp(); }, outputs[1]);
    (outputs[0].sum() + next.sum()).backward();
  }
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
  EXPECT_GT(engine.report().replays, 0);
}

TEST_F(CheckedStreamsTest, AStorageSavedOnTwoStreamsIsClean) {
  const std::vector<at::Tensor> given = inputs(10);
  EXPECT_EQ(findings([&](std::size_t s) {
              const c10::StreamGuard on_a(a());
              const at::Tensor h = TwoStreams{a(), b(), order, order}.saved_on_both(given[s]);
              (void)torch::autograd::grad({h.sum()}, {given[s]});
            }),
            std::vector<std::string>());
}

TEST_F(CheckedStreamsTest, AStorageReadBackOnTwoStreamsIsClean) {
  const std::vector<at::Tensor> given = inputs(20);
  EXPECT_EQ(findings([&](std::size_t s) {
              const at::Tensor& x = given[2 * s];
              const at::Tensor& weight = given[2 * s + 1];
              const c10::StreamGuard on_a(a());
              const auto [p, branch] = TwoStreams{a(), b(), order, order}.read_back_on_both(x, weight);
              (void)torch::autograd::grad({p.sum() + branch.sum()}, {x, weight});
            }),
            std::vector<std::string>());
}

TEST_F(CheckedStreamsTest, MicrobatchesOnStreamsThatNeverMeetAreClean) {
  const std::vector<at::Tensor> given = inputs(40);
  EXPECT_EQ(findings([&](std::size_t s) {
              for (const std::size_t microbatch : {0, 1}) {
                const at::Tensor& x = given[2 * s + microbatch];
                const c10::StreamGuard on_stream((s + microbatch) % 2 == 0 ? a() : b());
                (void)torch::autograd::grad({through_scopes(x).sum()}, {x});
              }
            }),
            std::vector<std::string>());
}

TEST_F(CheckedStreamsTest, PlainOperatorsSayWhereTheyWereIssued) {
  const std::vector<at::Tensor> given = inputs(70);
  OffloadEngine engine(model_, Options(device_).min_bytes(1024).groups_in_flight(1).offload("**").check_steps(kSteps));
  for (std::size_t s = 0; s < 2; ++s) {
    const auto step = engine.step();
    (void)torch::autograd::grad({through_scopes(given[s]).sum()}, {given[s]});
  }
  const Journal journal = engine.journal();
  std::set<std::string> places;
  for (const JournalOperation& operation : journal.operations) {
    const JournalSite& site = journal.sites[operation.site];
    places.insert(journal.names[operation.name] + ", " + journal.names[site.phase] + " of " + journal.names[site.name] +
                  ", " + std::to_string(site.step));
  }
  for (const char* place : {"aten::exp, forward of first, 1", "aten::tanh, forward of fourth, 2",
                            "aten::tanh_backward, backward of TanhBackward0, 2", "copy_to_host, offload of first, 2",
                            "copy_to_device, reload of first, 2"}) {
    EXPECT_EQ(places.count(place), 1U) << place;
  }
}

/// Layers that fork a stream inside their captures; side streams K, and whether they race there.
class GraphedForks : public CheckedStreamsTest, public testing::WithParamInterface<std::pair<std::int64_t, bool>> {
 protected:
  static at::Tensor forward(const at::Tensor& given, c10::Stream main, c10::Stream branch_stream, bool races) {
    at::Tensor h = given.mul(1.1);
    at::Tensor branch;
    at::Tensor own;
    {
      const OffloadScope scope("experts");
      order(main, branch_stream);
      {
        const c10::StreamGuard on_branch(branch_stream);
        branch = h.exp().mul(0.1).tanh();
      }
      own = (races ? h.mul_(0.5) : h).sigmoid();
    }
    const OffloadScope scope("rest");
    const at::Tensor rest = own.tanh();
    order(branch_stream, main);
    return rest + branch;
  }
};

TEST_P(GraphedForks, AreCleanUnlessTheyRace) {
  const auto [side_streams, races] = GetParam();
  const std::vector<at::Tensor> given = inputs(80);
  OffloadEngine engine(model_, Options(device_).min_bytes(1024).offload("**").check_steps(kSteps));
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (std::int64_t i = 0; i < 4; ++i) {
    callables.emplace_back("layers." + std::to_string(i), owning([this, &engine, races = races](const Tensors& x) {
                             const c10::Stream current = EngineAccess::state(engine).runtime().current_stream();
                             return Tensors{forward(x[0], current, b(), races)};
                           }));
    samples.push_back({i > 0 ? Sample::output_of(i - 1) : Sample(data(90))});
  }
  auto layers =
      make_graphed_callables(engine, std::move(callables), samples, GraphOptions().side_streams(side_streams));
  for (std::size_t s = 0; s < kSteps; ++s) {
    const auto step = engine.step();
    at::Tensor h = given[s];
    for (auto& layer : layers) {
      h = layer({h})[0];
    }
    (void)torch::autograd::grad({h.sum()}, {given[s]});
  }
  const std::vector<std::string> found = engine.report().order_findings;
  if (!races) {
    EXPECT_EQ(found, std::vector<std::string>());
    return;
  }
  const auto race = std::find_if(found.begin(), found.end(), [](const std::string& text) {
    return text.find("aten::exp on fork") != std::string::npos && text.find("aten::mul on") != std::string::npos;
  });
  ASSERT_NE(race, found.end()) << found.size() << " findings";
  EXPECT_NE(race->find("(forward of layers."), std::string::npos) << *race;
}

INSTANTIATE_TEST_SUITE_P(Model, GraphedForks,
                         testing::Values(std::make_pair(1, false), std::make_pair(2, false), std::make_pair(2, true)),
                         [](const auto& info) {
                           return "K" + std::to_string(info.param.first) + (info.param.second ? "Racing" : "");
                         });

/// Leaves out the waits for a host slot's last copy, and where told to, those for all copies at the end of a step.
class SlotsAreNotAwaited final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;

  void record(const Event& event, c10::Stream stream) override {
    inner().record(event, stream);
    last_recorded_ = event.native();
  }
  void wait(c10::Stream stream, const Event& event) override {
    const Site* site = Site::innermost();
    const bool for_slot = site != nullptr && site->phase() == "offload" && event.native() != last_recorded_ &&
                          stream != inner().current_stream();
    if (for_slot || at_end_) {
      ++left_out_;
      return;
    }
    inner().wait(stream, event);
  }
  void end(Step& step) {
    at_end_ = true;
    { const Step ended = std::move(step); }
    at_end_ = false;
  }
  [[nodiscard]] int left_out() const noexcept { return left_out_; }

 private:
  const void* last_recorded_ = nullptr;
  bool at_end_ = false;
  int left_out_ = 0;
};

// Steps on two streams that never meet: a group leaves into the host slots that one of the step before was read back from.
TEST_F(CheckedStreamsTest, AHostSlotsFindingNamesBothGroupsAndTheirSteps) {
  const auto checked = std::make_shared<CheckedRuntime>(make_runtime(device_));
  const auto dropping = std::make_shared<SlotsAreNotAwaited>(checked);
  OffloadEngine engine(
      EngineAccess::engine(model_, Options(device_).min_bytes(1024).groups_in_flight(1).offload("**"), dropping));
  const std::vector<at::Tensor> given = inputs(60);
  for (std::size_t s = 0; s < kSteps; ++s) {
    checked->begin_step(s + 1);
    const OperatorObserverGuard observing([&](const OperatorAccess& access) { checked->observe(access); });
    Step step = engine.step();
    {
      const c10::StreamGuard on_stream(s % 2 == 0 ? a() : b());
      (void)torch::autograd::grad({through_scopes(given[s]).sum()}, {given[s]});
    }
    dropping->end(step);
  }
  EXPECT_GT(dropping->left_out(), 0);
  const std::vector<std::string> found = checked->findings();
  const auto about_a_slot = std::find_if(found.begin(), found.end(), [](const std::string& text) {
    return text.rfind("copy_to_device", 0) == 0 && text.find("pinned") != std::string::npos;
  });
  ASSERT_NE(about_a_slot, found.end()) << found.size() << " findings";
  for (const std::string_view word :
       {"copy_to_device on stream", "(reload of ", ", step 1)", "reads pinned host memory [0x", "bytes)",
        "copy_to_host on stream", "(offload of ", ", step 2)", "writes them", "must wait for an event that stream"}) {
    EXPECT_NE(about_a_slot->find(word), std::string::npos) << word << " is not in: " << *about_a_slot;
  }
}

}  // namespace
}  // namespace sidestream::testing_model
