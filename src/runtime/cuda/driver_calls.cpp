// What is asked of CUDA past every Runtime, as host_waits has it.
#include "runtime/cuda/driver_calls.h"

#include <atomic>
#include <mutex>

#include "runtime/cuda/libtorch_order.h"

#if __has_include(<cupti_callbacks.h>)
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <cupti_callbacks.h>
#include <cupti_driver_cbid.h>
#include <cupti_runtime_cbid.h>
#include <dlfcn.h>
#include <generated_cuda_runtime_api_meta.h>

#include "runtime/host_waits.h"
#endif

namespace sidestream::cuda {
namespace {

std::atomic<bool> libtorch_tells{false};

#if __has_include(<cupti_callbacks.h>)

// As CUPTI's generated_cuda_meta.h has them, which does not compile beside cuda.h alone.
struct CopyToDeviceParameters {
  CUdeviceptr device;
  const void* host;
};
struct CopyToHostParameters {
  void* host;
};

/// One call of the runtime or the driver that is heard.
struct HeardCall {
  CUpti_CallbackDomain domain;
  CUpti_CallbackId id;
  HostWait kind;
};

constexpr auto kRuntime = CUPTI_CB_DOMAIN_RUNTIME_API;
constexpr auto kDriver = CUPTI_CB_DOMAIN_DRIVER_API;

constexpr HeardCall kHeard[] = {
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020, HostWait::stream},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_ptsz_v7000, HostWait::stream},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaEventSynchronize_v3020, HostWait::event},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020, HostWait::device},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_ptds_v7000, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy2D_v3020, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy2D_ptds_v7000, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy3D_v3020, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy3D_ptds_v7000, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyToSymbol_v3020, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyToSymbol_ptds_v7000, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyFromSymbol_v3020, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyFromSymbol_ptds_v7000, HostWait::blocking_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020, HostWait::pageable_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_ptsz_v7000, HostWait::pageable_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy2DAsync_v3020, HostWait::pageable_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy2DAsync_ptsz_v7000, HostWait::pageable_copy},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMalloc_v3020, HostWait::allocation},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMallocPitch_v3020, HostWait::allocation},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMallocManaged_v6000, HostWait::allocation},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaFree_v3020, HostWait::device},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaMallocHost_v3020, HostWait::device},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaHostAlloc_v3020, HostWait::device},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaHostRegister_v4000, HostWait::device},
    {kRuntime, CUPTI_RUNTIME_TRACE_CBID_cudaFreeHost_v3020, HostWait::device},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize, HostWait::stream},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuStreamSynchronize_ptsz, HostWait::stream},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuEventSynchronize, HostWait::event},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize, HostWait::device},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemcpy, HostWait::blocking_copy},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2, HostWait::blocking_copy},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoH_v2, HostWait::blocking_copy},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2, HostWait::pageable_copy},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2_ptsz, HostWait::pageable_copy},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoHAsync_v2, HostWait::pageable_copy},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoHAsync_v2_ptsz, HostWait::pageable_copy},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemAlloc_v2, HostWait::allocation},
    {kDriver, CUPTI_DRIVER_TRACE_CBID_cuMemCreate, HostWait::allocation},
};

/// The runtime calls the driver: what is inside of a call that was told is part of it.
thread_local int inside = 0;

bool is_pageable(const void* host) noexcept {
  cudaPointerAttributes attributes{};
  const cudaError_t status = cudaPointerGetAttributes(&attributes, host);
  if (status != cudaSuccess) {
    (void)cudaGetLastError();
    return false;
  }
  return attributes.type == cudaMemoryTypeUnregistered;
}

/// The sides of an asynchronous copy; null where a call has none that may be the host's.
bool copies_pageable(const HeardCall& call, const void* parameters) noexcept {
  const void* sides[2] = {nullptr, nullptr};
  if (call.domain == kRuntime) {
    if (call.id == CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020 ||
        call.id == CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_ptsz_v7000) {  // the same parameters
      const auto& copy = *static_cast<const cudaMemcpyAsync_v3020_params*>(parameters);
      if (copy.kind != cudaMemcpyDeviceToDevice) {
        sides[0] = copy.dst;
        sides[1] = copy.src;
      }
    } else {
      const auto& copy = *static_cast<const cudaMemcpy2DAsync_v3020_params*>(parameters);
      if (copy.kind != cudaMemcpyDeviceToDevice) {
        sides[0] = copy.dst;
        sides[1] = copy.src;
      }
    }
  } else if (call.id == CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2 ||
             call.id == CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2_ptsz) {
    sides[0] = static_cast<const CopyToDeviceParameters*>(parameters)->host;
  } else {
    sides[0] = static_cast<const CopyToHostParameters*>(parameters)->host;
  }
  return (sides[0] != nullptr && is_pageable(sides[0])) || (sides[1] != nullptr && is_pageable(sides[1]));
}

const HeardCall* find_call(CUpti_CallbackDomain domain, CUpti_CallbackId id) noexcept {
  for (const HeardCall& call : kHeard) {
    if (call.domain == domain && call.id == id) {
      return &call;
    }
  }
  return nullptr;
}

void CUPTIAPI on_call(void* /*nothing*/, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* given) {
  const auto& data = *static_cast<const CUpti_CallbackData*>(given);
  if (data.callbackSite == CUPTI_API_EXIT) {
    inside -= inside > 0 ? 1 : 0;
    return;
  }
  if (inside++ > 0) {
    return;
  }
  const HeardCall* const call = find_call(domain, id);
  if (call != nullptr && !OwnWaits::active() &&
      (call->kind != HostWait::pageable_copy || copies_pageable(*call, data.functionParams))) {
    host_waits::tell(c10::DeviceType::CUDA, call->kind, data.functionName);
  }
}

template <class Function>
Function* symbol(void* library, const char* name) {
  return reinterpret_cast<Function*>(dlsym(library, name));
}

/// Empty, or why CUPTI is not heard.
std::string subscribe() {
  // LibTorch's own profiler has loaded it mostly; else it lies beside the CUDA runtime, or where the loader looks.
  constexpr const char* kLibraries[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so"};
  void* library = nullptr;
  for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* name : kLibraries) {
      library = library == nullptr ? dlopen(name, flags) : library;
    }
  }
  if (library == nullptr) {
    return "libcupti is not found (it is in CUDA's extras/CUPTI/lib64, or beside LibTorch's CUDA runtime; put the "
           "folder into "
           "LD_LIBRARY_PATH)";
  }
  auto* const subscribe = symbol<decltype(cuptiSubscribe)>(library, "cuptiSubscribe");
  auto* const enable = symbol<decltype(cuptiEnableCallback)>(library, "cuptiEnableCallback");
  auto* const leave = symbol<decltype(cuptiUnsubscribe)>(library, "cuptiUnsubscribe");
  auto* const words = symbol<decltype(cuptiGetResultString)>(library, "cuptiGetResultString");
  if (subscribe == nullptr || enable == nullptr || leave == nullptr || words == nullptr) {
    return "this libcupti lacks its callbacks (install the CUPTI of the CUDA that LibTorch is built with)";
  }
  const auto text_of = [&](CUptiResult result) {
    const char* text = nullptr;
    return std::string(words(result, &text) == CUPTI_SUCCESS && text != nullptr ? text : "an unknown error");
  };
  static CUpti_SubscriberHandle subscriber = nullptr;
  if (const CUptiResult result = subscribe(&subscriber, &on_call, nullptr); result != CUPTI_SUCCESS) {
    return "CUPTI refuses a subscriber (" + text_of(result) +
           "; a profiler is attached, perhaps, and takes the only place: run without it)";
  }
  std::string refused;
  for (const HeardCall& call : kHeard) {
    if (const CUptiResult result = enable(1, subscriber, call.domain, call.id); result != CUPTI_SUCCESS) {
      refused = "CUPTI refuses a callback (" + text_of(result) + "; install the CUPTI of LibTorch's CUDA)";
    }
  }
  if (!refused.empty()) {
    (void)leave(subscriber);  // else LibTorch's trace and the rest of the callbacks would tell of the same calls
  }
  return refused;
}

#else

std::string subscribe() { return "this build has no CUPTI headers"; }

#endif

}  // namespace

bool asks_libtorch() noexcept { return libtorch_tells.load(std::memory_order_relaxed); }

std::string hear_driver_calls() {
  static std::once_flag once;
  static std::string shortcoming;
  std::call_once(once, [] {
    const std::string missing = subscribe();
    if (!missing.empty()) {
      hear_libtorch();
      libtorch_tells.store(true, std::memory_order_relaxed);
      shortcoming =
          "only synchronisations that LibTorch makes are found, and neither calls of CUDA past it, nor pageable copies "
          "that "
          "do not block, nor allocations: " +
          missing;
    }
  });
  return shortcoming;
}

}  // namespace sidestream::cuda
