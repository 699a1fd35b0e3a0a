// Each wait that orders eager offload and replays, left out on a GPU whose streams are held up: the gradients must change, else
// the windows of RaceWindowTest are too narrow to show anything.
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <unordered_map>
#include <vector>

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <gtest/gtest.h>

#include "gpu/gpu_fixture.h"
#include "gpu/poisoned_memory.h"
#include "gpu/spinning_runtime.h"
#include "graphs/engine/engine_access.h"
#include "models/plain_twin.h"
#include "models/scoped_waves.h"
#include "poisoned_slots.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

/// Waits by who waits for what. A model's streams are all that the engine neither copies nor launches on.
enum class Wait : std::uint8_t {
  none,
  to_host_for_model,      ///< a source is copied after what computes it
  model_for_to_host,      ///< a source is freed after its copy
  to_device_for_model,    ///< memory is written after its earlier use
  model_for_to_device,    ///< a use is after the copy back
  to_host_for_to_device,  ///< a host slot is written after the copy that reads it
  graph_for_model,        ///< a launch is after what was queued before it
  model_for_graph,        ///< a use is after the graph's compute
};

/// Leaves out all waits of one kind from `drop` on.
class DroppingRuntime final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;

  void drop(Wait kind) { dropped_ = kind; }
  [[nodiscard]] std::int64_t dropped() const noexcept { return count_; }

  void record(const Event& event, c10::Stream stream) override {
    recorded_on_[event.native()] = stream.id();
    inner().record(event, stream);
  }
  void record(const ExternalEvent& event, c10::Stream stream) override { inner().record(event, stream); }
  void wait(c10::Stream stream, const Event& event) override {
    const auto found = recorded_on_.find(event.native());
    if (found == recorded_on_.end() || !drops(kind_of(stream.id(), found->second))) {
      inner().wait(stream, event);
    }
  }
  void wait(c10::Stream stream, const ExternalEvent& event) override {
    if (role_of(stream.id()) == Role::launches || !drops(Wait::model_for_graph)) {
      inner().wait(stream, event);
    }
  }
  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override {
    roles_[stream.id()] = Role::to_host;
    inner().copy_to_host(pinned, device, bytes, stream);
  }
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override {
    roles_[stream.id()] = Role::to_device;
    inner().copy_to_device(device, pinned, bytes, stream);
  }
  void launch(const Graph& graph, c10::Stream stream) override {
    roles_[stream.id()] = Role::launches;
    inner().launch(graph, stream);
  }

 private:
  /// What a stream did last: streams that one owner gave back serve the next one.
  enum class Role : std::uint8_t { model, to_host, to_device, launches };

  [[nodiscard]] Role role_of(c10::StreamId stream) const {
    const auto found = roles_.find(stream);
    return found == roles_.end() ? Role::model : found->second;
  }
  [[nodiscard]] Wait kind_of(c10::StreamId waits, c10::StreamId recorded) const {
    const bool for_to_device = role_of(recorded) == Role::to_device;
    const bool for_to_host = role_of(recorded) == Role::to_host;
    switch (role_of(waits)) {
      case Role::to_host:
        return for_to_device ? Wait::to_host_for_to_device : for_to_host ? Wait::none : Wait::to_host_for_model;
      case Role::to_device:
        return for_to_device || for_to_host ? Wait::none : Wait::to_device_for_model;
      case Role::launches:
        return Wait::graph_for_model;
      case Role::model:
        break;
    }
    return for_to_device ? Wait::model_for_to_device : for_to_host ? Wait::model_for_to_host : Wait::none;
  }
  bool drops(Wait kind) {
    if (kind == Wait::none || kind != dropped_) {
      return false;
    }
    ++count_;
    return true;
  }

  std::unordered_map<const void*, c10::StreamId> recorded_on_;
  std::unordered_map<c10::StreamId, Role> roles_;
  Wait dropped_ = Wait::none;
  std::int64_t count_ = 0;
};

/// One fault, and what is held up so that it must show. On two streams each step runs on another stream than the one before, and
/// the host waits for neither: what orders them is the engine's alone.
struct Fault {
  std::string name;
  Wait wait;
  gpu::Spins spins;
  bool graphs = false;
  bool two_streams = false;
};

void PrintTo(const Fault& value, std::ostream* out) { *out << value.name; }

class DroppedWaitWindowTest : public gpu::Gpu, public testing::WithParamInterface<Fault> {
 protected:
  static constexpr std::uint64_t kSteps = 6;

  void SetUp() override {
    gpu::Gpu::SetUp();
    if (IsSkipped()) {
      return;
    }
    for (std::uint64_t s = 0; s < kSteps; ++s) {
      inputs_.push_back(scoped_wave_input(s, 8192, device_));
    }
    streams_.synchronizeDevice(device_.index());
  }
  void TearDown() override {
    if (!IsSkipped()) {
      streams_.synchronizeDevice(device_.index());
    }
  }

  /// Gradients of the last two steps, with waits of this kind left out of them.
  StepTensors run(Wait dropped) {
    auto memory = std::make_shared<gpu::PoisonedMemory>(make_runtime(device_));
    auto slots = std::make_shared<PoisonedSlots>(memory);
    auto spinning = std::make_shared<gpu::SpinningRuntime>(slots, GetParam().spins);
    auto dropping = std::make_shared<DroppingRuntime>(spinning);
    torch::nn::Module model;
    OffloadEngine engine(
        EngineAccess::engine(model, scoped_wave_options(device_, GetParam().graphs ? 2 : 0), dropping));
    const std::vector<c10::Stream> pool_streams{streams_.getStreamFromGlobalPool(device_),
                                                streams_.getStreamFromGlobalPool(device_)};
    std::vector<at::Tensor> grads;
    for (std::uint64_t s = 0; s < kSteps; ++s) {
      if (s + 2 == kSteps) {
        streams_.synchronizeDevice(device_.index());
        dropping->drop(dropped);
      }
      const c10::StreamGuard on_stream(pool_streams[GetParam().two_streams ? s % 2 : 0]);
      const auto step = engine.step();
      grads.push_back(scoped_wave_gradient(inputs_[s]));
    }
    streams_.synchronizeDevice(device_.index());
    dropping->drop(Wait::none);
    EXPECT_EQ(dropping->dropped() > 0, dropped != Wait::none);
    EXPECT_EQ(memory->failures(), 0);
    return {{"gradient of the last step but one", grads[kSteps - 2]}, {"gradient of the last step", grads[kSteps - 1]}};
  }

  StepTensors plain() {
    return {{"gradient of the last step but one", scoped_wave_gradient(inputs_[kSteps - 2])},
            {"gradient of the last step", scoped_wave_gradient(inputs_[kSteps - 1])}};
  }

  c10::Device device_ = tested_gpu();
  c10::impl::VirtualGuardImpl streams_{c10::DeviceType::CUDA};
  std::vector<at::Tensor> inputs_;
};

TEST_P(DroppedWaitWindowTest, ChangesTheGradients) {
  if (launches_block()) {
    GTEST_SKIP() << "no work is late where launches block";
  }
  const auto expected = plain();
  EXPECT_TRUE(same(run(Wait::none), expected));
  EXPECT_FALSE(same(run(GetParam().wait), expected));
}

// Cycles: 2,000,000 are about a millisecond, and the host issues a step in less.
constexpr gpu::Spins kLateCompute{.compute = 400'000};
constexpr gpu::Spins kLateToHost{.to_host = 2'000'000};
constexpr gpu::Spins kLateToDevice{.to_device = 2'000'000};

INSTANTIATE_TEST_SUITE_P(
    Faults, DroppedWaitWindowTest,
    testing::Values(
        Fault{"a_copy_to_the_host_without_its_compute", Wait::to_host_for_model, kLateCompute},
        Fault{"a_source_freed_before_its_copy", Wait::model_for_to_host, kLateToHost},
        Fault{"a_copy_back_into_memory_in_use", Wait::to_device_for_model, kLateCompute},
        Fault{"a_use_without_its_copy_back", Wait::model_for_to_device, kLateToDevice},
        Fault{"a_host_slot_written_before_it_was_read", Wait::to_host_for_to_device, kLateToDevice, false, true},
        Fault{"a_launch_before_what_was_queued", Wait::graph_for_model, {.compute = 400'000}, true},
        Fault{"a_use_without_the_graph", Wait::model_for_graph, {.compute = 400'000, .launch = 2'000'000}, true}),
    [](const testing::TestParamInfo<Fault>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream::testing_model
