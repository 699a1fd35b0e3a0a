// The stream and the event of one call of a callable.
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "graphs/engine/engine_access.h"
#include "models/stack_twins.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_event.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/testing/simulator.h"
#include "unit/sim/rerun/every_order.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

class ReplayOptionsTest : public testing::Test, protected StackTwins {
 protected:
  ReplayOptionsTest() : StackTwins(find_device("sim")) {}
  void TearDown() override {
    layers.clear();  // they replay on the streams below
    set_schedule(device, Schedule());
    synchronize(device);
  }
  [[nodiscard]] Runtime& runtime() const { return EngineAccess::state(*engine).runtime(); }
  /// `of(s, i)`: how layer i is called in step s.
  template <class Of>
  void expect_plain(std::int64_t first, std::int64_t last, const Of& of) {
    for (std::int64_t s = first; s < last; ++s) {
      (void)StackTwins::expect_plain(s,
                                     [&](std::size_t i, const at::Tensor& h) { return layers[i]({h}, of(s, i))[0]; });
    }
  }
  /// What `reader` sees of `tensor` when it waits for `event` alone.
  [[nodiscard]] at::Tensor read_behind(const GraphEvent& event, const at::Tensor& tensor) {
    event.wait(reader_);
    at::Tensor read;
    {
      const c10::StreamGuard on_reader(reader_.get());
      read = tensor.detach().clone();
    }
    tensor.record_stream(reader_);
    runtime().synchronize(reader_);
    return read.cpu();
  }

  sim::OneThread one_thread_;
  OwnedStream a_ = runtime().create_stream();
  OwnedStream b_ = runtime().create_stream();
  OwnedStream reader_ = runtime().create_stream();
};

TEST_F(ReplayOptionsTest, AnyStreamEachCallTheCurrentOneAmongThem) {
  for (const char* name : {"early", "late", "d2h-late", "seed:1", "seed:2"}) {
    SCOPED_TRACE(name);
    set_schedule(device, Schedule::parse(name));
    capture();
    const c10::Stream streams[] = {a_, b_, runtime().current_stream()};
    expect_plain(0, 4, [&](std::int64_t s, std::size_t i) {
      const std::size_t which = (static_cast<std::size_t>(s) + i) % 4;
      return which < 3 ? ReplayOptions().stream(streams[which]) : ReplayOptions();
    });
  }
}

TEST_F(ReplayOptionsTest, ReplacesTheStreamOfTheCapture) {
  capture(GraphOptions().cuda_graph_stream(a_.get()));
  expect_plain(0, 4, [&](std::int64_t s, std::size_t /*layer*/) {
    return s % 2 == 0 ? ReplayOptions().stream(b_.get()) : ReplayOptions();
  });
}

TEST_F(ReplayOptionsTest, AnEventWithAStreamWithoutOneAndOnTheCurrentOne) {
  capture();
  const auto event = std::make_shared<GraphEvent>(device);
  expect_plain(0, 2, [](std::int64_t, std::size_t) { return ReplayOptions(); });
  set_schedule(device, Schedule::parse("late"));
  std::int64_t s = 2;
  for (const auto& options : {ReplayOptions().event(event).stream(a_.get()), ReplayOptions().event(event),
                              ReplayOptions().event(event).stream(runtime().current_stream())}) {
    for (const std::int64_t step : {s, s + 1}) {  // the second's record must be anew
      const at::Tensor x = rows(step, device).requires_grad_(true);
      const at::Tensor y = layers[0]({x}, options)[0];
      const at::Tensor read = read_behind(*event, y);
      EXPECT_TRUE(at::equal(read, plain->begin()->forward(rows(step, device)).cpu()));
      y.sum().backward();
    }
    s += 2;
  }
}

TEST_F(ReplayOptionsTest, BucketedCallsHaveThemWhicheverBucketReplaysAndRunEagerly) {
  const auto body = [](const Tensors& in) { return Tensors{in[0].exp().mul(2)}; };
  std::vector<std::vector<std::vector<Sample>>> samples;
  for (const std::int64_t length : {4, 8}) {
    samples.push_back({{rows(0, device).narrow(0, 0, length).clone().requires_grad_(true)}});
  }
  const GraphedCallable call = make_bucketed_callables(*engine, {Callable("call", body)}, samples)[0];
  ExpectedWarnings warnings;
  const auto event = std::make_shared<GraphEvent>(device);
  set_schedule(device, Schedule::parse("late"));
  set_strict_waits(device, true);
  std::int64_t s = 0;
  for (const std::int64_t length : {4, 8, 6, 4}) {
    const at::Tensor x = rows(++s, device).narrow(0, 0, length).clone().requires_grad_(true);
    const at::Tensor y = call({x}, ReplayOptions().stream(a_.get()).event(event))[0];
    EXPECT_TRUE(at::equal(read_behind(*event, y), x.detach().exp().mul(2).cpu())) << length;
    y.sum().backward();
  }
  set_strict_waits(device, false);
  EXPECT_EQ(warnings.take().size(), 1U) << "of six rows";
  const c10::Stream other(c10::Stream::DEFAULT, c10::Device(at::kCPU));
  for (const std::int64_t length : {4, 6}) {
    EXPECT_THROWS(UsageError, "ReplayOptions::stream is on cpu",
                  (void)call({rows(0, device).narrow(0, 0, length)}, ReplayOptions().stream(other)));
  }
}

TEST_F(ReplayOptionsTest, AnEagerRunRecordsTheEventToo) {
  capture();
  const auto event = std::make_shared<GraphEvent>(device);
  set_schedule(device, Schedule::parse("late"));
  set_strict_waits(device, true);
  const at::NoGradGuard no_grad;
  const at::Tensor y = layers[0]({rows(1, device)}, ReplayOptions().event(event))[0];
  const at::Tensor read = read_behind(*event, y);
  set_strict_waits(device, false);
  EXPECT_TRUE(at::equal(read, plain->begin()->forward(rows(1, device)).cpu()));
}

TEST_F(ReplayOptionsTest, AStreamOfAnotherDeviceIsRefusedBeforeAnythingIsQueued) {
  capture();
  const c10::Stream cpu(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU));
  EXPECT_THROWS(UsageError, "graphed call \"layers.0\": ReplayOptions::stream is on cpu",
                (void)layers[0]({rows(0, device).requires_grad_(true)}, ReplayOptions().stream(cpu)));
  expect_plain(0, 2, [](std::int64_t, std::size_t) { return ReplayOptions(); });
}

TEST_F(ReplayOptionsTest, TheBackwardReplaysThereToo) {
  capture();
  set_schedule(device, Schedule::parse("late"));
  for (const bool given : {true, false, true}) {
    const at::Tensor x = rows(0, device).requires_grad_(true);
    const at::Tensor y = layers[0]({x}, given ? ReplayOptions().stream(a_.get()) : ReplayOptions())[0];
    synchronize(device);
    EXPECT_TRUE(a_.get().query());
    y.sum().backward();
    EXPECT_EQ(a_.get().query(), !given);
  }
}

TEST_F(ReplayOptionsTest, ResetWaitsForTheStreamsOfCalls) {
  capture();
  set_schedule(device, Schedule::parse("late"));
  const at::Tensor x = rows(0, device).requires_grad_(true);
  const at::Tensor y = layers[0]({x}, ReplayOptions().stream(a_.get()))[0];
  for (GraphedCallable& layer : layers) {
    layer.reset();
  }
  EXPECT_TRUE(a_.get().query());
  EXPECT_TRUE(at::equal(y.cpu(), plain->begin()->forward(rows(0, device)).cpu()));
}

}  // namespace
}  // namespace sidestream::testing_model
