// The hazards of graphs that replay beside other work, one test for each: provoked, and met with the right gradients or with an
// error by name, after which the model trains on. docs/graphs.md has the table.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"
#include "sim/rerun/recording.h"
#include "unit/graphs/ordered_programs.h"
#include "unit/graphs/recorded_steps.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream {
namespace {

using testing_model::NamedProgram;
using testing_model::Program;
using testing_model::rows;
using testing_model::Runtimes;

using Calls = std::vector<TensorFunction>;

/// Callables and a step that calls them.
struct HazardForm {
  std::string name;
  std::function<Calls(const at::Tensor& weight)> bodies;
  /// Gives what is compared beside the weight's gradient.
  std::function<std::vector<at::Tensor>(const Calls& calls, std::int64_t s, c10::Device device)> step;
  bool on_stream = false;  ///< on a stream of the caller's
  std::size_t chains =
      1;  ///< as many parts of the bodies are captured apart; in a chain each takes the output of the one before
};

class HazardProgram final : public Program {
 public:
  HazardProgram(const Runtimes& runtimes, HazardForm form)
      : runtime_(runtimes.model), form_(std::move(form)), stream_(runtime_->create_stream()) {
    calls_ = form_.bodies(weight_);
    if (runtimes.engine == nullptr) {
      return;
    }
    engine_.emplace(
        EngineAccess::engine(nothing_, Options(runtime_->device()).offload("**").min_bytes(256), runtimes.engine));
    GraphOptions options;
    if (form_.on_stream) {
      options.cuda_graph_stream(stream_);
    }
    const Sample own = rows(0, runtime_->device()).requires_grad_(true);
    const std::size_t length = calls_.size() / form_.chains;
    for (std::size_t begin = 0; begin < calls_.size(); begin += length) {
      std::vector<Callable> callables;
      std::vector<std::vector<Sample>> samples;
      for (std::size_t i = 0; i < length; ++i) {
        callables.emplace_back("call." + std::to_string(begin + i), owning(calls_[begin + i]));
        samples.push_back({i > 0 ? Sample::output_of(static_cast<std::int64_t>(i) - 1) : own});
      }
      const auto graphed = make_graphed_callables(*engine_, callables, samples, options);
      std::copy(graphed.begin(), graphed.end(), calls_.begin() + static_cast<std::ptrdiff_t>(begin));
    }
  }
  ~HazardProgram() override { runtime_->synchronize_device(); }

  std::vector<at::Tensor> step(std::int64_t s) override {
    weight_.mutable_grad() = at::Tensor();
    std::vector<at::Tensor> results = form_.step(calls_, s, runtime_->device());
    if (weight_.grad().defined()) {
      results.push_back(weight_.grad().clone());
    }
    return results;
  }
  [[nodiscard]] const OffloadEngine* engine() const override { return engine_ ? &*engine_ : nullptr; }
  [[nodiscard]] c10::Stream stream() const { return stream_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  HazardForm form_;
  OwnedStream stream_;
  torch::nn::Module nothing_;
  at::Tensor weight_ = rows(9, runtime_->device()).requires_grad_(true);
  std::optional<OffloadEngine> engine_;
  Calls calls_;
};

/// Saves what it exponentiates, in a scope that leaves.
TensorFunction exponentiates(const at::Tensor& weight) {
  return [weight](const Tensors& in) {
    at::Tensor h;
    {
      const OffloadScope scope("saves");
      h = (in[0] * weight).tanh().exp();
    }
    return Tensors{h * 0.5};
  };
}

Calls several(const at::Tensor& weight, std::size_t count) { return Calls(count, exponentiates(weight)); }

at::Tensor run_all(const Calls& calls, at::Tensor h) {
  for (const TensorFunction& call : calls) {
    h = call({h})[0];
  }
  return h;
}

class HazardTest : public testing::Test {
 protected:
  void expect_right_in_every_order(const HazardForm& form) {
    const NamedProgram named{"hazard " + form.name,
                             [&](const Runtimes& runtimes) { return std::make_unique<HazardProgram>(runtimes, form); }};
    const auto& expected = testing_model::plain_gradients(named, device_);
    const auto runtime = make_runtime(device_);
    const auto program = named.make({runtime, runtime});
    testing_model::RecordedSteps steps(*program);
    const auto wrong = steps.first_wrong(expected, 60);
    EXPECT_EQ(wrong.schedule, "") << wrong.bytes << " bytes differ";
    EXPECT_GT(program->engine()->report().pinned_bytes, 0);
  }
  /// The body alone, and graphed by a new engine, after whatever went wrong.
  void expect_usable(const TensorFunction& body) {
    const auto gradient = [&](const TensorFunction& function) {
      const at::Tensor x = rows(5, device_).requires_grad_(true);
      function({x})[0].sum().backward();
      return x.grad();
    };
    const at::Tensor expected = gradient(body);
    torch::nn::Module nothing;
    OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
    const auto graphed =
        make_graphed_callables(engine, {Callable("good", owning(body))}, {{rows(0, device_).requires_grad_(true)}});
    EXPECT_TRUE(at::equal(gradient(graphed[0]), expected));
  }
  /// What a capture of `bodies` throws.
  [[nodiscard]] std::string refusal_of(const Calls& bodies, const std::shared_ptr<Runtime>& runtime) const {
    torch::nn::Module nothing;
    OffloadEngine engine(EngineAccess::engine(nothing, Options(device_).offload("**").min_bytes(256), runtime));
    std::vector<Callable> callables;
    std::vector<std::vector<Sample>> samples;
    for (std::size_t i = 0; i < bodies.size(); ++i) {
      callables.emplace_back("call." + std::to_string(i), owning(bodies[i]));
      samples.push_back({rows(0, device_).requires_grad_(true)});
    }
    return testing_model::message_of<CaptureError>([&] { (void)make_graphed_callables(engine, callables, samples); });
  }

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  at::Tensor weight_ = rows(9, device_).requires_grad_(true);
};

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

TEST_F(HazardTest, H01AnEventThatTheGraphDoesNotRecordOnceIsRefused) {
  for (const int times : {0, 2}) {
    const std::string message =
        refusal_of({exponentiates(weight_)}, std::make_shared<RecordsOtherwise>(make_runtime(device_), times));
    EXPECT_PRED_FORMAT2(
        testing::IsSubstring,
        "graphed call \"call.0\", forward: its done event is recorded by " + std::to_string(times) + " nodes", message);
    expect_usable(exponentiates(weight_));
  }
}

TEST_F(HazardTest, H02EachGraphHasAnEventOfItsOwn) {
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
  for (const Layer& layer : EngineAccess::state(engine).chains().all().front().lock()->chain->layers()) {
    events.insert({layer.forward_done.native(), layer.backward_done.native()});
  }
  EXPECT_EQ(events.size(), 8U);
  // One event of the caller's beside them, which every graph of the chain records: see the program "stream_event".
  const auto& form = testing_model::program("stream_event");
  const auto runtime = make_runtime(device_);
  const auto program = form.make({runtime, runtime});
  testing_model::RecordedSteps steps(*program);
  EXPECT_EQ(steps.first_wrong(testing_model::plain_gradients(form, device_), 60).schedule, "");
}

TEST_F(HazardTest, H03EventsAreWhatTheirTypeSaysWhateverStreamIsCurrent) {
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

TEST_F(HazardTest, H04TheMainStreamWritesWhatACopyMayStillRead) {
  // In place on an output that nothing saved, and each batch into the memory of the one before.
  expect_right_in_every_order({"writes", [](const at::Tensor& weight) { return several(weight, 4); },
                               [buffer = at::Tensor()](const Calls& calls, std::int64_t s, c10::Device device) mutable {
                                 buffer = s == 0 ? rows(0, device) : buffer;
                                 std::vector<at::Tensor> results;
                                 for (std::int64_t m = 0; m < 2; ++m) {
                                   buffer.copy_(rows(10 * s + m, device));
                                   const at::Tensor x = buffer.detach().requires_grad_(true);
                                   at::Tensor y = run_all(calls, x);
                                   y.mul_(3).add_(1);
                                   (y * rows(s, device, 1)).sum().backward();
                                   results.push_back(x.grad().clone());
                                 }
                                 return results;
                               }});
  // One that the next call saved, and maybe still copies: refused by name, as plain training refuses it.
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  const auto graphed = make_graphed_callables(
      engine, {Callable("first", owning(exponentiates(weight_))), Callable("second", owning(exponentiates(weight_)))},
      {{rows(0, device_).requires_grad_(true)}, {Sample::output_of(0)}});
  {
    at::Tensor h = graphed[0]({rows(1, device_).requires_grad_(true)})[0];
    const at::Tensor loss = graphed[1]({h})[0].sum();
    h.mul_(2);
    EXPECT_THROWS(UsageError, "changed in place", loss.backward());
  }
  expect_usable(exponentiates(weight_));
}

/// True where the last work of `stream` is behind a copy to the host.
bool last_is_behind_a_copy_out(const sim::Recording& recording, c10::Stream stream) {
  const std::vector<sim::RecordedWork>& works = recording.works();
  std::vector<bool> before(works.size(), false);
  bool found = false;
  bool behind = false;
  for (std::size_t i = works.size(); i-- > 0;) {
    if (!found && works[i].queue == stream.id()) {
      found = before[i] = true;
    }
    if (before[i]) {
      behind = behind || works[i].work->kind == sim::Work::Kind::copy_to_host;
      for (const std::uint32_t earlier : works[i].after) {
        before[earlier] = true;
      }
    }
  }
  EXPECT_TRUE(found);
  return behind;
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

TEST_F(HazardTest, H05TheNextGraphDoesNotWaitForTheCopiesOfTheOneBefore) {
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
    EXPECT_EQ(last_is_behind_a_copy_out(recording, program.stream()), waits);
  }
}

TEST_F(HazardTest, H06MemoryThatACopyReadsIsNotUsedAgainWithinTheGraph) {
  // What leaves is let go of by the body at once; as much is allocated behind it, several times.
  const auto reuses = [](const at::Tensor& weight) -> TensorFunction {
    return [weight](const Tensors& in) {
      at::Tensor h = in[0];
      for (const char* name : {"first", "second", "third"}) {
        const OffloadScope scope(name);
        h = (name[0] == 'f' ? h * weight : h * 1.5)
                .tanh();                              // one gradient of the weight a call: sums are in plain order
        h = h + h.detach().exp().sigmoid().mul(0.1);  // as large as what leaves, gone at once
      }
      return Tensors{h};
    };
  };
  expect_right_in_every_order({"reuse", [&](const at::Tensor& weight) { return Calls(4, reuses(weight)); },
                               [](const Calls& calls, std::int64_t s, c10::Device device) {
                                 const at::Tensor x = rows(s, device).requires_grad_(true);
                                 (run_all(calls, x) * rows(s, device, 1)).sum().backward();
                                 return std::vector<at::Tensor>{x.grad()};
                               }});
}

TEST_F(HazardTest, H07GraphsOfOnePoolKeepTheirOrderAndPoolsAreApart) {
  expect_right_in_every_order({"pools", [](const at::Tensor& weight) { return several(weight, 8); },
                               [](const Calls& calls, std::int64_t s, c10::Device device) {
                                 const at::Tensor x = rows(s, device).requires_grad_(true);
                                 const at::Tensor z = rows(s, device, 2).requires_grad_(true);
                                 const Calls first(calls.begin(), calls.begin() + 4);
                                 const Calls second(calls.begin() + 4, calls.end());
                                 const at::Tensor a = run_all(s % 2 == 0 ? first : second, x);
                                 const at::Tensor b = run_all(s % 2 == 0 ? second : first, z);
                                 a.sum().backward();
                                 b.square().sum().backward();
                                 return std::vector<at::Tensor>{x.grad(), z.grad()};
                               },
                               /*on_stream=*/false, /*chains=*/2});
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  std::vector<Callable> callables;
  for (int i = 0; i < 2; ++i) {
    callables.emplace_back("call." + std::to_string(i), owning(exponentiates(weight_)));
  }
  const Sample own = rows(0, device_).requires_grad_(true);
  const auto graphed = make_graphed_callables(engine, callables, {{own}, {own}});
  {
    const at::Tensor later = graphed[1]({rows(1, device_).requires_grad_(true)})[0];
    EXPECT_THROWS(UsageError, "called after \"call.1\", whose backward is pending",
                  (void)graphed[0]({rows(2, device_).requires_grad_(true)}));
    later.sum().backward();
  }
  expect_usable(exponentiates(weight_));
}

TEST_F(HazardTest, H08HostMemoryLivesAsLongAsTheGraphs) {
  const auto gradient = [&](const TensorFunction& function, const std::function<void()>& between) {
    const at::Tensor x = rows(3, device_).requires_grad_(true);
    const at::Tensor loss = function({x})[0].square().sum();
    between();
    loss.backward();
    return x.grad();
  };
  const at::Tensor expected =
      gradient([&](const Tensors& in) { return Tensors{run_all(several(weight_, 4), in[0])}; }, [] {});
  torch::nn::Module nothing;
  auto engine = std::make_unique<OffloadEngine>(nothing, Options(device_).offload("**").min_bytes(256));
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (int i = 0; i < 4; ++i) {
    callables.emplace_back("call." + std::to_string(i), owning(exponentiates(weight_)));
    samples.push_back({i == 0 ? Sample(rows(0, device_).requires_grad_(true)) : Sample::output_of(i - 1)});
  }
  auto graphed = make_graphed_callables(*engine, callables, samples);
  const std::size_t leases = EngineAccess::state(*engine).arena().stats().live_leases;
  EXPECT_GT(leases, 0U);
  const TensorFunction chain = [&](const Tensors& in) {
    return Tensors{run_all(Calls(graphed.begin(), graphed.end()), in[0])};
  };
  EXPECT_TRUE(at::equal(gradient(chain, [] {}), expected));
  EXPECT_EQ(EngineAccess::state(*engine).arena().stats().live_leases, leases) << "nobody else's between steps";
  const auto drop_all = [&] {
    engine.reset();
    graphed.clear();
  };
  EXPECT_TRUE(at::equal(gradient(chain, drop_all), expected)) << "a backward that is pending keeps them";
}

TEST_F(HazardTest, H09WaitsThatCrossACaptureAndForksThatAreNotJoinedAreNamed) {
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

TEST_F(HazardTest, H10GradientsThatAreHeldSurviveTheNextReplay) {
  // Of the weight and of the input, taken away and kept while later steps replay.
  expect_right_in_every_order(
      {"held gradients", [](const at::Tensor& weight) { return several(weight, 3); },
       [kept = std::vector<at::Tensor>()](const Calls& calls, std::int64_t s, c10::Device device) mutable {
         const at::Tensor x = rows(s, device).requires_grad_(true);
         (run_all(calls, x) * rows(s, device, 1)).sum().backward();
         std::vector<at::Tensor> results = kept;  // as the step before has left them
         kept = {x.grad()};
         results.push_back(x.grad());
         return results;
       }});
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  const auto graphed = make_graphed_callables(engine, {Callable("call", owning(exponentiates(weight_)))},
                                              {{rows(0, device_).requires_grad_(true)}});
  const auto step = [&](std::int64_t s) {
    weight_.mutable_grad() = at::Tensor();
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    graphed[0]({x})[0].sum().backward();
    return std::vector<at::Tensor>{x.grad(), weight_.grad()};
  };
  const std::vector<at::Tensor> held = step(1);
  const std::vector<at::Tensor> copies{held[0].clone(), held[1].clone()};
  const std::vector<at::Tensor> next = step(2);
  for (std::size_t i = 0; i < 2; ++i) {
    EXPECT_TRUE(at::equal(held[i], copies[i])) << i;
    EXPECT_FALSE(at::equal(next[i], copies[i])) << i << ": other data, other gradients";
    EXPECT_NE(held[i].const_data_ptr(), next[i].const_data_ptr()) << i;
  }
}

TEST_F(HazardTest, H11InputsAreNeitherBroadcastNorCastNorReadInAnotherLayout) {
  torch::nn::Module nothing;
  OffloadEngine engine(nothing, Options(device_).offload("**").min_bytes(256));
  const auto square = [&](std::int64_t s) { return at::cat({rows(s, device_), rows(s, device_, 3)}).contiguous(); };
  const TensorFunction body = [](const Tensors& in) { return Tensors{(in[0] * 2).exp().cumsum(0)}; };
  const auto graphed =
      make_graphed_callables(engine, {Callable("first", owning(body)), Callable("second", owning(body))},
                             {{square(0)}, {Sample::output_of(0)}});
  const auto refusal = [&](const at::Tensor& x) {
    return testing_model::message_of<UsageError>([&] { (void)graphed[0]({x}); });
  };
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "shape [1, 32], captured with [32, 32]", refusal(square(0).slice(0, 0, 1)));
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "dtype", refusal(square(0).to(at::kDouble)));
  // The same address, other strides: copied, where the input is the call's own; refused, where it is another call's output.
  const at::Tensor x = square(1);
  for (const at::Tensor& given : {x, x.t(), x}) {
    EXPECT_TRUE(at::equal(graphed[0]({given})[0], body({given})[0]));
  }
  const at::Tensor h = graphed[0]({x})[0];
  EXPECT_THROWS(UsageError, "second", (void)graphed[1]({h.t()}));
  EXPECT_TRUE(at::equal(graphed[1]({h})[0], body({body({x})[0]})[0]));
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

TEST_F(HazardTest, H12ADoneEventCoversTheGradientsOfWeights) {
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
}  // namespace sidestream
