// The hazards of events, waits and forks of graphs that replay beside other work, one test for each. docs/graphs.md has the table.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/error.h"
#include "sim/rerun/recording.h"
#include "unit/graphs/hazard_program.h"
#include "unit/graphs/recorded_steps.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

using EventHazardTest = HazardTest;

/// Of the events that graphs record for those who wait, records none, or each twice.
class RecordsOtherwise final : public ForwardingRuntime {
 public:
  RecordsOtherwise(std::shared_ptr<Runtime> inner, int times) : ForwardingRuntime(std::move(inner)), times_(times) {}
  void record(const Event& event, c10::Stream stream) override { inner().record(event, stream); }
  void record(const ExternalEvent& event, c10::Stream stream) override {
    for (int i = 0; i < times_; ++i) {
      inner().record(event, stream);
    }
  }

 private:
  int times_;
};

TEST_F(EventHazardTest, H01AnEventThatTheGraphDoesNotRecordOnceIsRefused) {
  for (const int times : {0, 2}) {
    const std::string message =
        refusal_of({exponentiates(weight_)}, std::make_shared<RecordsOtherwise>(make_runtime(device_), times));
    EXPECT_PRED_FORMAT2(
        testing::IsSubstring,
        "graphed call \"call.0\", forward: its done event is recorded by " + std::to_string(times) + " nodes", message);
    expect_usable(exponentiates(weight_));
  }
}

TEST_F(EventHazardTest, H02EachGraphHasAnEventOfItsOwn) {
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (int i = 0; i < 4; ++i) {
    callables.emplace_back("call." + std::to_string(i), owning(exponentiates(weight_)));
    samples.push_back({rows(0, device_).requires_grad_(true)});
  }
  const auto graphed = make_graphed_callables(engine, callables, samples);
  std::set<const void*> events;
  for (const CapturedCall& call : EngineAccess::state(engine).sequences().all().front().lock()->captured().calls) {
    events.insert({call.forward.done.native(), call.backward.done.native()});
  }
  EXPECT_EQ(events.size(), 8U);
  // One event of the caller's beside them, which every graph of the sequence records: see the program "stream_event".
  const auto& form = testing_model::program("stream_event");
  const auto runtime = make_runtime(device_);
  const auto program = form.make({runtime, runtime});
  RecordedSteps steps(*program);
  EXPECT_EQ(steps.first_wrong(plain_gradients(form, device_), 60).schedule, "");
}

TEST_F(EventHazardTest, H03EventsAreWhatTheirTypeSaysWhateverStreamIsCurrent) {
  const std::shared_ptr<Runtime> runtime = make_runtime(device_);
  Runtime& device = *runtime;
  const OwnedStream captured = device.create_stream();
  const OwnedStream other = device.create_stream();
  ExternalEvent made = device.create_external_event();
  const ExternalEvent event = std::move(made);  // a moved event is the same event
  EXPECT_THROWS(UsageError, "is empty", device.wait(other, made));
  EXPECT_THROWS(UsageError, "is empty", device.record(made, other));
  const MemoryPool pool = device.create_pool();
  const at::Tensor x = rows(0, device_);
  at::Tensor y;
  device.begin_capture(captured, pool);
  {
    const StreamGuard on_captured(device, captured);
    y = x.exp();
  }
  {
    const StreamGuard elsewhere(device, other);  // which does not capture
    device.record(event, captured);
  }
  const Graph graph = device.end_capture(captured);
  std::int64_t records = 0;
  for (const GraphNode& node : device.nodes(graph)) {
    records += node.kind == GraphNode::Kind::event_record && node.event == event.native() ? 1 : 0;
  }
  EXPECT_EQ(records, 1) << "recorded by the graph, not by the stream that was current";
  device.launch(graph, captured);
  device.wait(other, event);
  device.synchronize(other);
  EXPECT_TRUE(at::equal(y.cpu(), x.exp().cpu()));
  device.synchronize_device();
}

/// True if the last work of `stream` waits for a copy to the host.
bool last_waits_for_a_copy_out(const sim::Recording& recording, c10::Stream stream) {
  const std::vector<bool> before = sim::up_to_last_work(recording, stream);
  for (std::size_t i = 0; i < before.size(); ++i) {
    if (before[i] && recording.works()[i].work->kind == sim::Work::Kind::copy_to_host) {
      return true;
    }
  }
  return false;
}

/// Makes each graph wait for the copies out so far, as one would whose copies are a part of it.
class WaitsForTails final : public ForwardingRuntime {
 public:
  explicit WaitsForTails(std::shared_ptr<Runtime> inner)
      : ForwardingRuntime(std::move(inner)), tail_(this->inner().create_event(EventTiming::off)) {}
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override {
    inner().copy_to_host(pinned, device, bytes, stream);
    inner().record(tail_, stream);
  }
  void launch(const Graph& graph, c10::Stream stream) override {
    inner().wait(stream, tail_);
    inner().launch(graph, stream);
  }

 private:
  Event tail_;
};

TEST_F(EventHazardTest, H05TheNextGraphDoesNotWaitForTheCopiesOfTheOneBefore) {
  const HazardForm form{"tails", [](const at::Tensor& weight) { return several(weight, 5); },
                        [](const Calls& calls, std::int64_t s, c10::Device device) {
                          const at::Tensor x = rows(s, device).requires_grad_(true);
                          const Calls first(calls.begin(), calls.begin() + 2);
                          (void)run_all(s < 2 ? calls : first, x);
                          return std::vector<at::Tensor>{};
                        },
                        /*on_stream=*/true};
  for (const bool waits : {false, true}) {
    const auto runtime = make_runtime(device_);
    const auto engine = waits ? std::make_shared<WaitsForTails>(runtime) : runtime;
    HazardProgram program({runtime, engine}, form);
    (void)program.step(0);
    (void)program.step(1);
    runtime->synchronize_device();
    sim::Recording recording;
    (void)program.step(2);
    recording.stop();
    const auto& works = recording.works();
    EXPECT_TRUE(std::any_of(works.begin(), works.end(),
                            [](const auto& work) { return work.work->kind == sim::Work::Kind::copy_to_host; }));
    EXPECT_EQ(last_waits_for_a_copy_out(recording, program.stream()), waits);
  }
}

TEST_F(EventHazardTest, H09WaitsThatCrossACaptureAndForksThatAreNotJoinedAreNamed) {
  const std::shared_ptr<Runtime> runtime = make_runtime(device_);
  const OwnedStream branch = runtime->create_stream();
  const auto event = std::make_shared<Event>(runtime->create_event(EventTiming::off));
  const TensorFunction good = exponentiates(weight_);
  const auto capturing = [=] { return runtime->capture_status(runtime->current_stream()) == CaptureStatus::active; };

  // Work that nobody captured.
  runtime->record(*event, branch);
  const TensorFunction waits_outside = [=](const Tensors& in) {
    runtime->wait(runtime->current_stream(), *event);
    return good(in);
  };
  std::string message = refusal_of({waits_outside}, runtime);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"call.0\", forward", message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "a wait for an event recorded outside of the capture", message);
  expect_usable(good);

  // An event of an earlier capture's own.
  const auto internal = std::make_shared<Event>(runtime->create_event(EventTiming::off));
  const TensorFunction records = [=](const Tensors& in) {
    runtime->record(*internal, runtime->current_stream());
    return good(in);
  };
  const TensorFunction waits_across = [=](const Tensors& in) {
    if (capturing()) {
      runtime->wait(runtime->current_stream(), *internal);
    }
    return good(in);
  };
  message = refusal_of({records, waits_across}, runtime);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"call.1\", forward", message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "recorded inside a capture which has ended", message);
  expect_usable(good);

  // A fork that is not joined.
  const auto fork = std::make_shared<Event>(runtime->create_event(EventTiming::off));
  const TensorFunction forks = [=, &branch](const Tensors& in) {
    runtime->record(*fork, runtime->current_stream());
    runtime->wait(branch, *fork);
    {
      const c10::StreamGuard on_branch(branch.get());
      (void)in[0].exp();
    }
    return good(in);
  };
  message = refusal_of({forks}, runtime);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"call.0\", forward", message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "a forked stream was not joined", message);
  expect_usable(good);
}

/// Shows the record of a backward's done event as if it came before the last kernel.
class RecordsTooEarly final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  std::vector<GraphNode> nodes(const Graph& graph) const override {
    std::vector<GraphNode> nodes = inner().nodes(graph);
    const auto record = std::find_if(nodes.begin(), nodes.end(),
                                     [](const GraphNode& node) { return node.kind == GraphNode::Kind::event_record; });
    const bool backward = ++graphs_ == 2;  // of one call: the forward comes first
    if (backward && record != nodes.end()) {
      const std::uint32_t last = record->predecessors.at(0);
      record->predecessors = nodes[last].predecessors;
    }
    return nodes;
  }

 private:
  mutable int graphs_ = 0;
};

TEST_F(EventHazardTest, H12ADoneEventCoversTheGradientsOfWeights) {
  const std::string message =
      refusal_of({exponentiates(weight_)}, std::make_shared<RecordsTooEarly>(make_runtime(device_)));
  EXPECT_PRED_FORMAT2(testing::IsSubstring,
                      "graphed call \"call.0\", backward: its done event does not wait for all of its work", message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "Backward0: aten::mul", message);
  expect_usable(exponentiates(weight_));
  // Read by the main stream right behind the backward.
  expect_right_in_every_order({"weight gradients", [](const at::Tensor& weight) { return several(weight, 4); },
                               [](const Calls& calls, std::int64_t s, c10::Device device) {
                                 const at::Tensor x = rows(s, device).requires_grad_(true);
                                 (run_all(calls, x) * rows(s, device, 1)).sum().backward();
                                 return std::vector<at::Tensor>{};
                               }});
}

}  // namespace
}  // namespace sidestream::testing_model
