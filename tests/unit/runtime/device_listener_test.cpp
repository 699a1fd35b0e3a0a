#include "runtime/device_listener.h"

#include <cstdlib>
#include <string>
#include <vector>

#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <gtest/gtest.h>

#include "runtime/runtime.h"

namespace sidestream {
namespace {

/// Writes down what it hears.
class Heard final : public DeviceListener {
 public:
  void recorded(const void* event, StreamKey stream) override { add("recorded", event, stream); }
  void waited(StreamKey stream, const void* event) override { add("waited", event, stream); }
  void host_saw_event(const void* event) override { add("host saw event", event, 0); }
  void host_saw_stream(StreamKey stream) override { add("host saw stream", nullptr, stream); }
  void host_saw_device(c10::Device device) override { add("host saw device", nullptr, device.index()); }
  void freed_behind(StreamKey stream, const void* begin, std::size_t /*bytes*/) override {
    add("freed behind", begin, stream);
  }

  std::vector<std::string> what;

 private:
  void add(const std::string& call, const void* event, StreamKey stream) {
    what.push_back(call + " " + std::to_string(reinterpret_cast<std::uintptr_t>(event)) + " " + std::to_string(stream));
  }
};

using Lines = std::vector<std::string>;

TEST(DeviceListenerTest, ListenersHearTheirDevicesAsLongAsTheyLive) {
  Heard sim;
  Heard other;
  {
    const ListeningGuard listening(c10::DeviceType::PrivateUse1, sim);
    const ListeningGuard elsewhere(c10::DeviceType::XPU, other);
    device_listeners::recorded(c10::DeviceType::PrivateUse1, nullptr, 3);
    device_listeners::freed_behind(c10::DeviceType::PrivateUse1, 4, nullptr, 8);
  }
  device_listeners::recorded(c10::DeviceType::PrivateUse1, nullptr, 5);
  EXPECT_EQ(sim.what, (Lines{"recorded 0 3", "freed behind 0 4"}));
  EXPECT_EQ(other.what, Lines());
}

TEST(DeviceListenerTest, ARuntimesOwnCallsAreNotForeign) {
  const auto runtime = make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
  const OwnedStream stream = runtime->create_stream();
  const Event event = runtime->create_event();
  Heard heard;
  const ListeningGuard listening(c10::DeviceType::PrivateUse1, heard);
  runtime->record(event, stream);
  runtime->wait(stream, event);
  runtime->synchronize(event);
  runtime->synchronize(stream);
  EXPECT_EQ(heard.what, Lines());
  c10::Event own(c10::DeviceType::PrivateUse1);
  own.record(stream);
  EXPECT_EQ(heard.what.size(), 1U);
}

// LibTorch's tracing seam, without a GPU: what its CUDA parts call is called by hand.
TEST(DeviceListenerTest, LibTorchsTracerTellsOfCuda) {
  const char* backend = std::getenv("SIDESTREAM_CUDA_BACKEND");
  if (!c10::impl::hasDeviceGuardImpl(c10::DeviceType::CUDA) ||
      (backend != nullptr && std::string(backend) == "absent")) {
    GTEST_SKIP() << "a LibTorch, or a build, without CUDA";
  }
  Heard heard;
  const ListeningGuard listening(c10::DeviceType::CUDA, heard);
  const c10::impl::PyInterpreter* tracer = c10::impl::GPUTrace::get_trace();
  ASSERT_NE(tracer, nullptr);
  (*tracer)->trace_gpu_event_record(c10::DeviceType::CUDA, 16, 512);
  (*tracer)->trace_gpu_event_wait(c10::DeviceType::CUDA, 16, 768);
  (*tracer)->trace_gpu_stream_synchronization(c10::DeviceType::CUDA, 768);
  (*tracer)->trace_gpu_event_synchronization(c10::DeviceType::CUDA, 16);
  EXPECT_EQ(heard.what, (Lines{"recorded 16 512", "waited 16 768", "host saw stream 0 768", "host saw event 16 0"}));
  EXPECT_THROW((void)(*tracer)->dim(nullptr), c10::Error);
}

}  // namespace
}  // namespace sidestream
