// What makes the host wait on a GPU is found, LibTorch's calls and those past it, with its place (Options::find_syncs).
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/rand.h>
#include <c10/core/Event.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "gpu_fixture.h"
#include "models/waiting_model.h"
#include "runtime/cuda/driver_calls.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream::gpu {
namespace {

using testing_model::PlantedWait;
using testing_model::WaitContext;
using testing_model::WaitingModel;
using testing_model::WaitKind;

/// Those that LibTorch and CUPTI tell of.
std::vector<WaitKind> gpu_wait_kinds() {
  static std::int64_t grown = 1;
  static std::vector<void*> pinned_blocks;  // given back by the end of the process
  const auto guard = [](const at::Tensor& t) { return c10::impl::getDeviceGuardImpl(t.device().type()); };
  std::vector<WaitKind> kinds = testing_model::operator_waits();
  const std::vector<WaitKind> others = {
      {"event", "event synchronisation", "",
       [guard](const at::Tensor& t) {
         c10::Event event(t.device().type());
         event.record(guard(t)->getStream(t.device()));
         event.synchronize();
       }},
      {"stream", "stream synchronisation", "",
       [guard](const at::Tensor& t) { guard(t)->getStream(t.device()).synchronize(); }},
      {"raw stream", "stream synchronisation", "",
       [](const at::Tensor& /*t*/) { ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess); },
       /*past_libtorch=*/true},
      {"raw device", "device synchronisation", "",
       [](const at::Tensor& /*t*/) { ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); },
       /*past_libtorch=*/true},
      {"raw copy", "blocking copy", "",
       [](const at::Tensor& t) {
         float value = 0;
         ASSERT_EQ(cudaMemcpy(&value, t.data_ptr(), sizeof value, cudaMemcpyDeviceToHost), cudaSuccess);
       },
       /*past_libtorch=*/true},
      {"raw copy of rows", "blocking copy", "",
       [](const at::Tensor& t) {
         float values[2] = {};
         ASSERT_EQ(cudaMemcpy2D(values, 4, t.data_ptr(), 32, 4, 2, cudaMemcpyDeviceToHost), cudaSuccess);
       },
       /*past_libtorch=*/true},
      {"raw pinning", "pinning of host memory", "",
       [](const at::Tensor& /*t*/) {
         void* block = nullptr;
         ASSERT_EQ(cudaHostAlloc(&block, 64, cudaHostAllocDefault), cudaSuccess);
         pinned_blocks.push_back(block);
       },
       /*past_libtorch=*/true},
      {"ours", "device synchronisation", "sidestream::synchronize",
       [](const at::Tensor& t) { synchronize(t.device()); }},
      {"allocation", "device allocation", "aten::empty",
       [](const at::Tensor& t) { (void)at::empty({(grown++ << 24) + (std::int64_t{1} << 27)}, t.options()); },
       /*past_libtorch=*/true},
  };
  kinds.insert(kinds.end(), others.begin(), others.end());
  return kinds;
}

class FindSyncsOnGpu : public Gpu {
 protected:
  [[nodiscard]] Options searched() const {
    return Options(runtime().device()).graph("front,back").offload("middle").min_bytes(64).find_syncs(true);
  }
  void steps(WaitingModel& model, OffloadEngine& engine, std::int64_t count) const {
    for (std::int64_t i = 0; i < count; ++i) {
      const at::Tensor data = at::rand({8, 8}).to(runtime().device()).requires_grad_();
      auto step = engine.step();
      model.train_on(data);
      step.finish();
    }
  }
  [[nodiscard]] static bool hears_cupti(const Report& report) {
    for (const std::string& note : report.notes) {
      if (note.find("find_syncs: ") != std::string::npos) {
        return false;
      }
    }
    return true;
  }
};

TEST_F(FindSyncsOnGpu, TrainingThatNeverWaitsHasNoFindings) {
  WaitingModel model;
  model.to(runtime().device());
  OffloadEngine engine(model, searched().verify_replays(3));
  steps(model, engine, 12);
  EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
}

// One listener a process: an engine that has gone leaves the place to the next one, and to a profiler.
TEST_F(FindSyncsOnGpu, CuptiIsTakenWhileEnginesSearchAndThenGivenBack) {
  WaitingModel model;
  WaitingModel other;
  model.to(runtime().device());
  other.to(runtime().device());
  for (int i = 0; i < 3; ++i) {
    OffloadEngine engine(model, searched());
    OffloadEngine beside(other, searched());
    EXPECT_TRUE(hears_cupti(engine.report()));
    EXPECT_TRUE(hears_cupti(beside.report()));
    steps(model, engine, 1);
    const PlantedWait planted(WaitContext::between,
                              [](const at::Tensor& /*t*/) { ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess); });
    steps(model, engine, 1);
    EXPECT_EQ(engine.report().syncs_found, 1) << engine.report().json();
  }
  const std::string missing = cuda::hear_driver_calls();
  EXPECT_EQ(missing, "");
  cuda::leave_driver_calls();
}

TEST_F(FindSyncsOnGpu, EveryKindIsFoundInEveryContextWithItsPlaceAndCount) {
  WaitingModel model;
  model.to(runtime().device());
  bool cupti_is_missing = false;
  for (const WaitKind& kind : gpu_wait_kinds()) {
    for (const testing_model::ExpectedPlace& place : testing_model::waiting_places()) {
      SCOPED_TRACE(std::string(kind.label) + ", " + place.label);
      OffloadEngine engine(model, searched());
      steps(model, engine, 7);
      cupti_is_missing = !hears_cupti(engine.report());
      if (kind.past_libtorch && cupti_is_missing) {
        continue;
      }
      {
        const PlantedWait planted(place.context, kind.wait);
        steps(model, engine, 3);
      }
      steps(model, engine, 1);
      const Report report = engine.report();
      std::int64_t count = 0;
      for (const SyncFinding& found : report.syncs) {
        if ((found.kind == "device allocation" || found.kind == "pinning of host memory") && found.kind != kind.name) {
          continue;  // what the planted operators themselves needed
        }
        EXPECT_EQ(found.kind, kind.name) << report.json();
        if (*kind.operation != '\0') {
          EXPECT_EQ(found.operation, kind.operation);
        }
        EXPECT_EQ(found.call, place.call);
        EXPECT_EQ(found.scope, place.scope);
        EXPECT_EQ(!found.node.empty(), place.in_backward) << found.node;
        EXPECT_FALSE(found.stack.empty());
        count += found.count;
      }
      EXPECT_EQ(count, 3) << report.json();
    }
  }
  EXPECT_FALSE(cupti_is_missing)
      << "raw calls were not tested: no profiler may be attached, and libcupti must be found";
}

TEST_F(FindSyncsOnGpu, AnotherThreadsWaitIsNoFinding) {
  WaitingModel model;
  model.to(runtime().device());
  for (const WaitKind& kind : gpu_wait_kinds()) {
    SCOPED_TRACE(kind.label);
    OffloadEngine engine(model, searched());
    steps(model, engine, 7);
    const PlantedWait planted(WaitContext::other_thread, kind.wait);
    steps(model, engine, 2);
    EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
  }
}

}  // namespace
}  // namespace sidestream::gpu
