// What makes the host wait on a GPU is found, LibTorch's calls and those past it, with its place (Options::find_syncs).
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/index.h>
#include <ATen/ops/masked_select.h>
#include <ATen/ops/nonzero.h>
#include <ATen/ops/rand.h>
#include <ATen/ops/tanh.h>
#include <ATen/ops/zeros.h>
#include <c10/core/Event.h>
#include <c10/core/GradMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "gpu_fixture.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/scope.h"

namespace sidestream::gpu {
namespace {

/// Where in a step something waits.
enum class GpuWaitContext : std::uint8_t { eager_call, between, scope, hook, optimizer, other_thread };

struct GpuWaitKind {
  const char* label;
  const char* name;       ///< SyncFinding::kind
  const char* operation;  ///< SyncFinding::operation; empty: whatever the driver's call is named
  bool past_libtorch;     ///< heard by CUPTI alone
  std::function<void(const at::Tensor&)> wait;
};

std::vector<GpuWaitKind> gpu_wait_kinds() {
  static std::int64_t grown = 1;
  const auto guard = [](const at::Tensor& t) { return c10::impl::getDeviceGuardImpl(t.device().type()); };
  const auto pinned = [] { return at::empty({8, 8}).pin_memory(); };
  static const at::Tensor kept = pinned();  // pinning waits itself
  return {
      {"item", "value read on the host", "aten::item", false, [](const at::Tensor& t) { (void)t.sum().item<float>(); }},
      {"is_nonzero", "value read on the host", "aten::is_nonzero", false,
       [](const at::Tensor& t) { (void)t.sum().is_nonzero(); }},
      {"equal", "value read on the host", "aten::equal", false,
       [](const at::Tensor& t) { (void)at::equal(t, t.add(1)); }},
      {"nonzero", "result whose shape depends on data", "aten::nonzero", false,
       [](const at::Tensor& t) { (void)at::nonzero(t); }},
      {"masked_select", "result whose shape depends on data", "aten::masked_select", false,
       [](const at::Tensor& t) { (void)at::masked_select(t, t.gt(0)); }},
      {"index by a mask", "result whose shape depends on data", "aten::index", false,
       [](const at::Tensor& t) { (void)at::index(t, {t.gt(0)}); }},
      {"blocking copy to the host", "blocking copy", "aten::copy_", false, [](const at::Tensor& t) { kept.copy_(t); }},
      {"blocking copy to the device", "blocking copy", "aten::copy_", false,
       [](const at::Tensor& t) {
         (void)at::zeros({8, 8}, t.options()).copy_(kept);
       }},
      {"to the CPU", "copy of pageable host memory", "aten::to", false,
       [](const at::Tensor& t) { (void)t.to(at::kCPU); }},
      {"pageable copy that is not to block", "copy of pageable host memory", "aten::to", true,
       [](const at::Tensor& t) {
         (void)at::zeros({8, 8}).to(t.device(), /*non_blocking=*/true);
       }},
      {"event", "event synchronisation", "", false,
       [guard](const at::Tensor& t) {
         c10::Event event(t.device().type());
         event.record(guard(t)->getStream(t.device()));
         event.synchronize();
       }},
      {"stream", "stream synchronisation", "", false,
       [guard](const at::Tensor& t) { guard(t)->getStream(t.device()).synchronize(); }},
      {"raw stream", "stream synchronisation", "", true,
       [](const at::Tensor& /*t*/) { ASSERT_EQ(cudaStreamSynchronize(nullptr), cudaSuccess); }},
      {"raw device", "device synchronisation", "", true,
       [](const at::Tensor& /*t*/) { ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess); }},
      {"raw copy", "blocking copy", "", true,
       [](const at::Tensor& t) {
         float value = 0;
         ASSERT_EQ(cudaMemcpy(&value, t.data_ptr(), sizeof value, cudaMemcpyDeviceToHost), cudaSuccess);
       }},
      {"ours", "device synchronisation", "sidestream::synchronize", false,
       [](const at::Tensor& t) { synchronize(t.device()); }},
      {"allocation", "device allocation", "aten::empty", true,
       [](const at::Tensor& t) { (void)at::empty({(grown++ << 24) + (std::int64_t{1} << 27)}, t.options()); }},
  };
}

struct GpuPlantedWait {
  GpuWaitContext context;
  std::function<void(const at::Tensor&)> wait;
};
const GpuPlantedWait* gpu_planted_wait = nullptr;

void gpu_wait_at(GpuWaitContext context, const at::Tensor& tensor) {
  if (gpu_planted_wait != nullptr && gpu_planted_wait->context == context) {
    const c10::AutoGradMode no_grad(false);
    gpu_planted_wait->wait(tensor.detach());
  }
}

class GpuWaitingLayer : public torch::nn::Module {
 public:
  GpuWaitingLayer() : weight_(register_parameter("weight", at::rand({8, 8}))) {}
  at::Tensor forward(at::Tensor h) {
    h = at::tanh(h.matmul(weight_));
    gpu_wait_at(GpuWaitContext::eager_call, h);
    return h;
  }

 private:
  at::Tensor weight_;
};

class GpuWaitingModel : public torch::nn::Module {
 public:
  GpuWaitingModel()
      : front_(register_module("front", std::make_shared<GpuWaitingLayer>())),
        back_(register_module("back", std::make_shared<GpuWaitingLayer>())) {}

  void train_on(at::Tensor h) {
    h = call(front_, h);
    {
      const at::NoGradGuard no_grad;
      (void)call(front_, h.detach());
    }
    gpu_wait_at(GpuWaitContext::between, h);
    {
      const OffloadScope scope("middle");
      h = h.add(1);
      h = h.mul(h);
      gpu_wait_at(GpuWaitContext::scope, h);
    }
    if (gpu_planted_wait != nullptr && gpu_planted_wait->context == GpuWaitContext::hook) {
      h.register_hook([](const at::Tensor& grad) { gpu_wait_at(GpuWaitContext::hook, grad); });
    }
    h = call(back_, h);
    h.sum().backward();
    if (gpu_planted_wait != nullptr && gpu_planted_wait->context == GpuWaitContext::other_thread) {
      std::thread([&] { gpu_planted_wait->wait(h.detach()); }).join();
    }
    const at::NoGradGuard no_grad;
    for (const at::Tensor& parameter : parameters()) {
      parameter.sub_(parameter.grad(), 0.01);
      parameter.mutable_grad().zero_();
    }
    gpu_wait_at(GpuWaitContext::optimizer, h);
  }

 private:
  std::shared_ptr<GpuWaitingLayer> front_, back_;
};

class FindSyncsOnGpu : public Gpu {
 protected:
  void TearDown() override { gpu_planted_wait = nullptr; }

  [[nodiscard]] Options searched() const {
    return Options(runtime().device()).graph("front,back").offload("middle").min_bytes(64).find_syncs(true);
  }
  void steps(GpuWaitingModel& model, OffloadEngine& engine, std::int64_t count) const {
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
  GpuWaitingModel model;
  model.to(runtime().device());
  OffloadEngine engine(model, searched().verify_replays(3));
  steps(model, engine, 12);
  EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
}

TEST_F(FindSyncsOnGpu, EveryKindIsFoundInEveryContextWithItsPlaceAndCount) {
  struct Place {
    GpuWaitContext context;
    const char* call;
    const char* scope;
    bool in_backward;
  };
  const std::vector<Place> places = {
      {GpuWaitContext::eager_call, "front", "front", false},
      {GpuWaitContext::between, "", "", false},
      {GpuWaitContext::scope, "", "middle", false},
      {GpuWaitContext::hook, "", "", true},
      {GpuWaitContext::optimizer, "", "", false},
  };
  GpuWaitingModel model;
  model.to(runtime().device());
  bool cupti_is_missing = false;
  for (const GpuWaitKind& kind : gpu_wait_kinds()) {
    for (const Place& place : places) {
      SCOPED_TRACE(std::string(kind.label) + ", context " + std::to_string(static_cast<int>(place.context)));
      OffloadEngine engine(model, searched());
      steps(model, engine, 7);
      cupti_is_missing = !hears_cupti(engine.report());
      if (kind.past_libtorch && cupti_is_missing) {
        continue;
      }
      const GpuPlantedWait planted{place.context, kind.wait};
      gpu_planted_wait = &planted;
      steps(model, engine, 3);
      gpu_planted_wait = nullptr;
      steps(model, engine, 1);
      const Report report = engine.report();
      std::int64_t count = 0;
      for (const SyncFinding& found : report.syncs) {
        if (found.kind == "device allocation" && std::string(kind.name) != found.kind) {
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
  GpuWaitingModel model;
  model.to(runtime().device());
  for (const GpuWaitKind& kind : gpu_wait_kinds()) {
    SCOPED_TRACE(kind.label);
    OffloadEngine engine(model, searched());
    steps(model, engine, 7);
    const GpuPlantedWait planted{GpuWaitContext::other_thread, kind.wait};
    gpu_planted_wait = &planted;
    steps(model, engine, 2);
    gpu_planted_wait = nullptr;
    EXPECT_EQ(engine.report().syncs_found, 0) << engine.report().json();
  }
}

}  // namespace
}  // namespace sidestream::gpu
