// Which calls of CUDA make the host wait: the "API synchronization behavior" of CUDA's references, and what allocates or pins.
#if __has_include(<cupti_callbacks.h>)
#include "runtime/cuda/heard_calls.h"

#include <cstddef>

#include <cuda_runtime_api.h>
#include <cupti_driver_cbid.h>
#include <cupti_runtime_cbid.h>
#include <cupti_version.h>
#include <generated_cuda_runtime_api_meta.h>

namespace sidestream::cuda {
namespace {

/// How a call's parameters are read.
enum class Form : std::uint8_t {
  plain,      ///< not at all
  free,       ///< of nothing it does nothing
  copy,       ///< from here on copies: of the runtime,
  copy_rows,  ///< in rows,
  copy_box,
  copy_to_symbol,
  copy_from_symbol,
  driver_copy,  ///< of the driver, between any addresses,
  driver_copy_to_device,
  driver_copy_to_host,
  driver_copy_rows,
  driver_copy_box
};

struct HeardCall {
  DriverCall call;
  HostWait kind;  ///< of copies: blocking_copy if the call waits, pageable_copy if it does not
  Form form;
};

// As CUPTI's generated_cuda_meta.h has them, which does not compile beside cuda.h alone.
struct DriverCopy {
  CUdeviceptr to;
  CUdeviceptr from;
};
struct DriverCopyToDevice {
  CUdeviceptr to;
  const void* from;
};
struct DriverCopyToHost {
  void* to;
};
struct DriverCopyRows {
  const CUDA_MEMCPY2D* copy;
};
struct DriverCopyBox {
  const CUDA_MEMCPY3D* copy;
};
/// Of the runtime and the driver.
struct Free {
  const void* memory;
};

// NOLINTBEGIN(bugprone-macro-parentheses): names of CUPTI's
#define SIDESTREAM_RUNTIME(name, kind, form) \
  { {CUPTI_CB_DOMAIN_RUNTIME_API, CUPTI_RUNTIME_TRACE_CBID_##name}, HostWait::kind, Form::form }
#define SIDESTREAM_DRIVER(name, kind, form) \
  { {CUPTI_CB_DOMAIN_DRIVER_API, CUPTI_DRIVER_TRACE_CBID_##name}, HostWait::kind, Form::form }

constexpr HeardCall kHeard[] = {
    SIDESTREAM_RUNTIME(cudaStreamSynchronize_v3020, stream, plain),
    SIDESTREAM_RUNTIME(cudaStreamSynchronize_ptsz_v7000, stream, plain),
    SIDESTREAM_RUNTIME(cudaEventSynchronize_v3020, event, plain),
    SIDESTREAM_RUNTIME(cudaDeviceSynchronize_v3020, device, plain),
    SIDESTREAM_RUNTIME(cudaThreadSynchronize_v3020, device, plain),
    SIDESTREAM_RUNTIME(cudaMemcpy_v3020, blocking_copy, copy),
    SIDESTREAM_RUNTIME(cudaMemcpy_ptds_v7000, blocking_copy, copy),
    SIDESTREAM_RUNTIME(cudaMemcpy2D_v3020, blocking_copy, copy_rows),
    SIDESTREAM_RUNTIME(cudaMemcpy2D_ptds_v7000, blocking_copy, copy_rows),
    SIDESTREAM_RUNTIME(cudaMemcpy3D_v3020, blocking_copy, copy_box),
    SIDESTREAM_RUNTIME(cudaMemcpy3D_ptds_v7000, blocking_copy, copy_box),
    SIDESTREAM_RUNTIME(cudaMemcpyToSymbol_v3020, blocking_copy, copy_to_symbol),
    SIDESTREAM_RUNTIME(cudaMemcpyToSymbol_ptds_v7000, blocking_copy, copy_to_symbol),
    SIDESTREAM_RUNTIME(cudaMemcpyFromSymbol_v3020, blocking_copy, copy_from_symbol),
    SIDESTREAM_RUNTIME(cudaMemcpyFromSymbol_ptds_v7000, blocking_copy, copy_from_symbol),
    SIDESTREAM_RUNTIME(cudaMemcpyAsync_v3020, pageable_copy, copy),
    SIDESTREAM_RUNTIME(cudaMemcpyAsync_ptsz_v7000, pageable_copy, copy),
    SIDESTREAM_RUNTIME(cudaMemcpy2DAsync_v3020, pageable_copy, copy_rows),
    SIDESTREAM_RUNTIME(cudaMemcpy2DAsync_ptsz_v7000, pageable_copy, copy_rows),
    SIDESTREAM_RUNTIME(cudaMemcpy3DAsync_v3020, pageable_copy, copy_box),
    SIDESTREAM_RUNTIME(cudaMemcpy3DAsync_ptsz_v7000, pageable_copy, copy_box),
    SIDESTREAM_RUNTIME(cudaMemcpyToSymbolAsync_v3020, pageable_copy, copy_to_symbol),
    SIDESTREAM_RUNTIME(cudaMemcpyToSymbolAsync_ptsz_v7000, pageable_copy, copy_to_symbol),
    SIDESTREAM_RUNTIME(cudaMemcpyFromSymbolAsync_v3020, pageable_copy, copy_from_symbol),
    SIDESTREAM_RUNTIME(cudaMemcpyFromSymbolAsync_ptsz_v7000, pageable_copy, copy_from_symbol),
    SIDESTREAM_RUNTIME(cudaMalloc_v3020, allocation, plain),
    SIDESTREAM_RUNTIME(cudaMallocPitch_v3020, allocation, plain),
    SIDESTREAM_RUNTIME(cudaMalloc3D_v3020, allocation, plain),
    SIDESTREAM_RUNTIME(cudaMallocManaged_v6000, allocation, plain),
    SIDESTREAM_RUNTIME(cudaMallocAsync_v11020, allocation, plain),
    SIDESTREAM_RUNTIME(cudaMallocAsync_ptsz_v11020, allocation, plain),
    SIDESTREAM_RUNTIME(cudaMallocFromPoolAsync_v11020, allocation, plain),
    SIDESTREAM_RUNTIME(cudaMallocFromPoolAsync_ptsz_v11020, allocation, plain),
    SIDESTREAM_RUNTIME(cudaFree_v3020, device, free),
    SIDESTREAM_RUNTIME(cudaMallocHost_v3020, pinning, plain),
    SIDESTREAM_RUNTIME(cudaHostAlloc_v3020, pinning, plain),
    SIDESTREAM_RUNTIME(cudaHostRegister_v4000, pinning, plain),
    SIDESTREAM_RUNTIME(cudaHostUnregister_v4000, pinning, free),
    SIDESTREAM_RUNTIME(cudaFreeHost_v3020, pinning, free),
    SIDESTREAM_DRIVER(cuStreamSynchronize, stream, plain),
    SIDESTREAM_DRIVER(cuStreamSynchronize_ptsz, stream, plain),
    SIDESTREAM_DRIVER(cuEventSynchronize, event, plain),
    SIDESTREAM_DRIVER(cuCtxSynchronize, device, plain),
#if CUPTI_API_VERSION >= 130000
    SIDESTREAM_DRIVER(cuCtxSynchronize_v2, device, plain),
#endif
    SIDESTREAM_DRIVER(cuMemcpy, blocking_copy, driver_copy),
    SIDESTREAM_DRIVER(cuMemcpy_ptds, blocking_copy, driver_copy),
    SIDESTREAM_DRIVER(cuMemcpyHtoD_v2, blocking_copy, driver_copy_to_device),
    SIDESTREAM_DRIVER(cuMemcpyHtoD_v2_ptds, blocking_copy, driver_copy_to_device),
    SIDESTREAM_DRIVER(cuMemcpyDtoH_v2, blocking_copy, driver_copy_to_host),
    SIDESTREAM_DRIVER(cuMemcpyDtoH_v2_ptds, blocking_copy, driver_copy_to_host),
    SIDESTREAM_DRIVER(cuMemcpy2D_v2, blocking_copy, driver_copy_rows),
    SIDESTREAM_DRIVER(cuMemcpy2D_v2_ptds, blocking_copy, driver_copy_rows),
    SIDESTREAM_DRIVER(cuMemcpy2DUnaligned_v2, blocking_copy, driver_copy_rows),
    SIDESTREAM_DRIVER(cuMemcpy2DUnaligned_v2_ptds, blocking_copy, driver_copy_rows),
    SIDESTREAM_DRIVER(cuMemcpy3D_v2, blocking_copy, driver_copy_box),
    SIDESTREAM_DRIVER(cuMemcpy3D_v2_ptds, blocking_copy, driver_copy_box),
    SIDESTREAM_DRIVER(cuMemcpyAsync, pageable_copy, driver_copy),
    SIDESTREAM_DRIVER(cuMemcpyAsync_ptsz, pageable_copy, driver_copy),
    SIDESTREAM_DRIVER(cuMemcpyHtoDAsync_v2, pageable_copy, driver_copy_to_device),
    SIDESTREAM_DRIVER(cuMemcpyHtoDAsync_v2_ptsz, pageable_copy, driver_copy_to_device),
    SIDESTREAM_DRIVER(cuMemcpyDtoHAsync_v2, pageable_copy, driver_copy_to_host),
    SIDESTREAM_DRIVER(cuMemcpyDtoHAsync_v2_ptsz, pageable_copy, driver_copy_to_host),
    SIDESTREAM_DRIVER(cuMemcpy2DAsync_v2, pageable_copy, driver_copy_rows),
    SIDESTREAM_DRIVER(cuMemcpy2DAsync_v2_ptsz, pageable_copy, driver_copy_rows),
    SIDESTREAM_DRIVER(cuMemcpy3DAsync_v2, pageable_copy, driver_copy_box),
    SIDESTREAM_DRIVER(cuMemcpy3DAsync_v2_ptsz, pageable_copy, driver_copy_box),
    SIDESTREAM_DRIVER(cuMemAlloc_v2, allocation, plain),
    SIDESTREAM_DRIVER(cuMemAllocPitch_v2, allocation, plain),
    SIDESTREAM_DRIVER(cuMemAllocManaged, allocation, plain),
    SIDESTREAM_DRIVER(cuMemAllocAsync, allocation, plain),
    SIDESTREAM_DRIVER(cuMemAllocAsync_ptsz, allocation, plain),
    SIDESTREAM_DRIVER(cuMemAllocFromPoolAsync, allocation, plain),
    SIDESTREAM_DRIVER(cuMemAllocFromPoolAsync_ptsz, allocation, plain),
    SIDESTREAM_DRIVER(cuMemCreate, allocation, plain),
    SIDESTREAM_DRIVER(cuMemFree_v2, device, free),
    SIDESTREAM_DRIVER(cuMemAllocHost_v2, pinning, plain),
    SIDESTREAM_DRIVER(cuMemHostAlloc, pinning, plain),
    SIDESTREAM_DRIVER(cuMemHostRegister_v2, pinning, plain),
    SIDESTREAM_DRIVER(cuMemHostUnregister, pinning, free),
    SIDESTREAM_DRIVER(cuMemFreeHost, pinning, free),
};

#undef SIDESTREAM_RUNTIME
#undef SIDESTREAM_DRIVER
// NOLINTEND(bugprone-macro-parentheses)

const void* pointer_of(CUdeviceptr pointer) noexcept { return reinterpret_cast<const void*>(pointer); }  // NOLINT

/// The ends of a copy; an address of null if one is the device's.
struct Ends {
  const void* to = nullptr;
  const void* from = nullptr;
};

Ends ends_of(const void* to, const void* from, cudaMemcpyKind kind) noexcept {
  switch (kind) {
    case cudaMemcpyDeviceToDevice:
      return {};
    case cudaMemcpyHostToDevice:
      return {nullptr, from};
    case cudaMemcpyDeviceToHost:
      return {to, nullptr};
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
      break;
  }
  return {to, from};
}

const void* end_of_driver(CUmemorytype type, const void* host, CUdeviceptr any) noexcept {
  switch (type) {
    case CU_MEMORYTYPE_HOST:
      return host;
    case CU_MEMORYTYPE_UNIFIED:
      return pointer_of(any);
    case CU_MEMORYTYPE_DEVICE:
    case CU_MEMORYTYPE_ARRAY:
      break;
  }
  return nullptr;
}

template <class Copy>
Ends ends_of_driver(const Copy& copy) noexcept {
  return {end_of_driver(copy.dstMemoryType, copy.dstHost, copy.dstDevice),
          end_of_driver(copy.srcMemoryType, copy.srcHost, copy.srcDevice)};
}

template <class Parameters>
const Parameters& parameters_as(const void* parameters) noexcept {
  return *static_cast<const Parameters*>(parameters);
}

// The forms with the suffixes ptds and ptsz have the same parameters.
Ends ends_of(Form form, const void* parameters) noexcept {
  switch (form) {
    case Form::plain:
    case Form::free:
      break;
    case Form::copy: {
      const auto& copy = parameters_as<cudaMemcpy_v3020_params>(parameters);  // cudaMemcpyAsync's begin as these
      return ends_of(copy.dst, copy.src, copy.kind);
    }
    case Form::copy_rows: {
      const auto& copy = parameters_as<cudaMemcpy2D_v3020_params>(parameters);
      return ends_of(copy.dst, copy.src, copy.kind);
    }
    case Form::copy_box: {
      const cudaMemcpy3DParms& copy = *parameters_as<cudaMemcpy3D_v3020_params>(parameters).p;
      return ends_of(copy.dstArray == nullptr ? copy.dstPtr.ptr : nullptr,
                     copy.srcArray == nullptr ? copy.srcPtr.ptr : nullptr, copy.kind);
    }
    case Form::copy_to_symbol: {
      const auto& copy = parameters_as<cudaMemcpyToSymbol_v3020_params>(parameters);
      return ends_of(nullptr, copy.src, copy.kind);
    }
    case Form::copy_from_symbol: {
      const auto& copy = parameters_as<cudaMemcpyFromSymbol_v3020_params>(parameters);
      return ends_of(copy.dst, nullptr, copy.kind);
    }
    case Form::driver_copy: {
      const auto& copy = parameters_as<DriverCopy>(parameters);
      return {pointer_of(copy.to), pointer_of(copy.from)};
    }
    case Form::driver_copy_to_device:
      return {nullptr, parameters_as<DriverCopyToDevice>(parameters).from};
    case Form::driver_copy_to_host:
      return {parameters_as<DriverCopyToHost>(parameters).to, nullptr};
    case Form::driver_copy_rows:
      return ends_of_driver(*parameters_as<DriverCopyRows>(parameters).copy);
    case Form::driver_copy_box:
      return ends_of_driver(*parameters_as<DriverCopyBox>(parameters).copy);
  }
  return {};
}

std::optional<HostWait> wait_of_copy(HostWait kind, Ends ends, EndOf end_of) noexcept {
  const CopyEnd to = ends.to != nullptr ? end_of(ends.to) : CopyEnd::device;
  const CopyEnd from = ends.from != nullptr ? end_of(ends.from) : CopyEnd::device;
  if (to == CopyEnd::device && from == CopyEnd::device) {
    return std::nullopt;
  }
  if (kind == HostWait::blocking_copy) {
    return kind;
  }
  if (to == CopyEnd::pageable || from == CopyEnd::pageable) {
    return HostWait::pageable_copy;
  }
  return to == CopyEnd::pinned && from == CopyEnd::pinned ? std::optional(HostWait::blocking_copy) : std::nullopt;
}

const HeardCall* find_call(DriverCall call) noexcept {
  for (const HeardCall& heard : kHeard) {
    if (heard.call.domain == call.domain && heard.call.id == call.id) {
      return &heard;
    }
  }
  return nullptr;
}

/// The calls that the calling thread is in, of one subscription.
struct Inside {
  std::uintptr_t subscription = 0;
  std::size_t depth = 0;
};
thread_local constinit Inside inside_calls{};

}  // namespace

std::vector<DriverCall> heard_calls() {
  std::vector<DriverCall> calls;
  for (const HeardCall& heard : kHeard) {
    calls.push_back(heard.call);
  }
  return calls;
}

std::optional<HostWait> wait_of(DriverCall call, const void* parameters, EndOf end_of) noexcept {
  const HeardCall* const heard = find_call(call);
  if (heard == nullptr) {
    return std::nullopt;
  }
  if (heard->form == Form::plain) {
    return heard->kind;
  }
  if (heard->form == Form::free) {
    return parameters_as<Free>(parameters).memory != nullptr ? std::optional(heard->kind) : std::nullopt;
  }
  return wait_of_copy(heard->kind, ends_of(heard->form, parameters), end_of);
}

void hear_call(std::uintptr_t subscription, DriverCall call, const CUpti_CallbackData& data, EndOf end_of) noexcept {
  if (inside_calls.subscription != subscription) {
    inside_calls = {subscription, 0};
  }
  if (data.callbackSite == CUPTI_API_EXIT) {
    inside_calls.depth -= inside_calls.depth > 0 ? 1 : 0;
    return;
  }
  if (inside_calls.depth++ > 0 || !host_waits::heard()) {
    return;
  }
  if (const std::optional<HostWait> wait = wait_of(call, data.functionParams, end_of); wait.has_value()) {
    host_waits::tell(c10::DeviceType::CUDA, *wait, data.functionName);
  }
}

}  // namespace sidestream::cuda
#endif
