#include <utility>

#include <ATen/ops/add.h>

#include "contract/fixture.h"
#include "sidestream/error.h"

namespace sidestream::contract {
namespace {

class StreamContract : public RuntimeContract {};

TEST_P(StreamContract, GuardMakesAStreamCurrentAndPutsTheOldOneBack) {
  const auto before = runtime().current_stream();
  {
    const StreamGuard guard(runtime(), side());
    EXPECT_EQ(runtime().current_stream(), side());
  }
  EXPECT_EQ(runtime().current_stream(), before);
}

TEST_P(StreamContract, EachCreatedStreamIsItsOwnAndOfTheDevice) {
  const auto one = runtime().create_stream();
  const auto two = runtime().create_stream();
  EXPECT_NE(one.get(), two.get());
  EXPECT_EQ(one.get().device(), runtime().device());
}

TEST_P(StreamContract, SynchronizeFinishesTheWorkOfAStream) {
  at::Tensor tensor;
  {
    const StreamGuard guard(runtime(), side());
    tensor = filled(1);
    delay(side());
    tensor.add_(2);
  }
  runtime().synchronize(side());
  EXPECT_TRUE(side().query());
  EXPECT_TRUE(all_equal(tensor, 3));
}

TEST_P(StreamContract, AStreamWithoutWorkIsIdle) {
  runtime().synchronize_device();
  EXPECT_TRUE(side().query());
}

TEST_P(StreamContract, WorkOnOneStreamKeepsItsOrder) {
  auto tensor = filled(1);
  for (int i = 0; i < 20; ++i) {
    tensor.mul_(2);
    tensor.sub_(1);
  }
  EXPECT_TRUE(all_equal(tensor, 1));
}

TEST_P(StreamContract, AStreamOfAnotherDeviceIsRefused) {
  const c10::Stream foreign(c10::Stream::DEFAULT, c10::Device(c10::DeviceType::CPU, 0));
  const auto event = runtime().create_event();
  EXPECT_THROW(runtime().synchronize(foreign), UsageError);
  EXPECT_THROW(runtime().set_current_stream(foreign), UsageError);
  EXPECT_THROW(runtime().record(event, foreign), UsageError);
  EXPECT_THROW(runtime().wait(foreign, event), UsageError);
}

class EventContract : public RuntimeContract {};

TEST_P(EventContract, AWaitOrdersWorkAfterTheRecord) {
  auto tensor = filled(1);
  const auto ready = runtime().create_event();
  const auto made = runtime().create_event();
  runtime().record(made, runtime().current_stream());
  runtime().wait(side(), made);
  {
    const StreamGuard guard(runtime(), side());
    delay(side());
    tensor.fill_(5);
  }
  runtime().record(ready, side());
  runtime().wait(runtime().current_stream(), ready);
  const auto sum = at::add(tensor, 1);
  EXPECT_TRUE(all_equal(sum, 6));
}

TEST_P(EventContract, AnEventThatWasNeverRecordedIsDone) {
  const auto event = runtime().create_event();
  runtime().synchronize(event);
}

TEST_P(EventContract, WaitingForAnEventThatWasNeverRecordedIsANoOp) {
  const auto event = runtime().create_event();
  runtime().wait(side(), event);
  const auto external = runtime().create_external_event();
  runtime().wait(side(), external);
  runtime().synchronize(side());
  EXPECT_TRUE(side().query());
}

TEST_P(EventContract, SynchronizeOnAnEventFinishesWhatItMarks) {
  const auto event = runtime().create_event();
  at::Tensor tensor;
  {
    const StreamGuard guard(runtime(), side());
    tensor = filled(1);
    delay(side());
    tensor.add_(1);
  }
  runtime().record(event, side());
  runtime().synchronize(event);
  EXPECT_TRUE(side().query());
  EXPECT_TRUE(all_equal(tensor, 2));
}

TEST_P(EventContract, AWaitTakesTheRecordThatIsCurrentAtItsCall) {
  auto tensor = filled(1);
  const auto event = runtime().create_event();
  runtime().record(event, runtime().current_stream());
  runtime().wait(side(), event);
  delay(runtime().current_stream());
  tensor.fill_(2);
  runtime().record(event, runtime().current_stream());
  runtime().wait(copies(), event);
  {
    const StreamGuard guard(runtime(), copies());
    tensor.add_(1);
  }
  EXPECT_TRUE(all_equal(tensor, 3));
  runtime().synchronize(side());
}

TEST_P(EventContract, AnEventIsRecordedAgainAndAgain) {
  auto tensor = filled(0);
  const auto forth = runtime().create_event();
  const auto back = runtime().create_event();
  for (int i = 0; i < 8; ++i) {
    runtime().record(forth, runtime().current_stream());
    runtime().wait(side(), forth);
    {
      const StreamGuard guard(runtime(), side());
      tensor.mul_(2);
    }
    runtime().record(back, side());
    runtime().wait(runtime().current_stream(), back);
    tensor.add_(1);
  }
  EXPECT_TRUE(all_equal(tensor, 255));
}

TEST_P(EventContract, TimingEventsMeasureForward) {
  const auto begin = runtime().create_event(EventTiming::on);
  const auto end = runtime().create_event(EventTiming::on);
  runtime().record(begin, side());
  delay(side());
  runtime().record(end, side());
  runtime().synchronize(end);
  EXPECT_GE(runtime().elapsed_ms(begin, end), 0.0);
}

TEST_P(EventContract, AnEmptyHandleIsRefused) {
  auto event = runtime().create_event();
  const auto moved = std::move(event);
  EXPECT_THROW(runtime().record(event, side()), UsageError);  // NOLINT(bugprone-use-after-move): what is tested
  EXPECT_THROW(runtime().wait(side(), Event()), UsageError);
  EXPECT_THROW(runtime().wait(side(), ExternalEvent()), UsageError);
  EXPECT_TRUE(static_cast<bool>(moved));
}

TEST_P(EventContract, AHandleOfAnotherBackendIsRefused) {
  const auto other = runtime_of(on_gpu() ? kSim : kCuda);
  if (other == nullptr) {
    return;  // One backend on this machine: there is no other handle to pass.
  }
  const auto event = other->create_event();
  const auto external = other->create_external_event();
  const auto pool = other->create_pool();
  const auto stream = other->create_stream();
  EXPECT_THROW(runtime().record(event, side()), UsageError);
  EXPECT_THROW(runtime().wait(side(), event), UsageError);
  EXPECT_THROW(runtime().record(external, side()), UsageError);
  EXPECT_THROW(runtime().wait(side(), external), UsageError);
  EXPECT_THROW(runtime().begin_capture(capture(), pool), UsageError);
  EXPECT_THROW(runtime().synchronize(stream), UsageError);
}

TEST_P(EventContract, AnExternalEventOrdersAlsoOutsideOfGraphs) {
  auto tensor = filled(1);
  const auto made = runtime().create_event();
  runtime().record(made, runtime().current_stream());
  runtime().wait(side(), made);
  const auto done = runtime().create_external_event();
  {
    const StreamGuard guard(runtime(), side());
    delay(side());
    tensor.fill_(7);
  }
  runtime().record(done, side());
  runtime().wait(runtime().current_stream(), done);
  tensor.add_(1);
  EXPECT_TRUE(all_equal(tensor, 8));
}

SIDESTREAM_ON_EVERY_BACKEND(StreamContract);
SIDESTREAM_ON_EVERY_BACKEND(EventContract);

}  // namespace
}  // namespace sidestream::contract
