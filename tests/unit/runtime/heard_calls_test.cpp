// Which calls of CUDA are said to make the host wait, as CUPTI would bring them.
#if __has_include(<cupti_callbacks.h>)
#include "runtime/cuda/heard_calls.h"

#include <cstdint>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <cuda_runtime_api.h>
#include <cupti_driver_cbid.h>
#include <cupti_runtime_cbid.h>
#include <generated_cuda_runtime_api_meta.h>
#include <gtest/gtest.h>

#include "runtime/host_waits.h"

namespace sidestream::cuda {
namespace {

constexpr auto kRuntimeCalls = CUPTI_CB_DOMAIN_RUNTIME_API;
constexpr auto kDriverCalls = CUPTI_CB_DOMAIN_DRIVER_API;

// Addresses that nobody reads, of each kind of memory.
char device_bytes[2];
char pinned_bytes[2];
char pageable_bytes[2];
char managed_bytes[2];
int ends_asked = 0;

CopyEnd known_end(const void* address) noexcept {
  ++ends_asked;
  if (address == pinned_bytes) {
    return CopyEnd::pinned;
  }
  if (address == pageable_bytes) {
    return CopyEnd::pageable;
  }
  return address == managed_bytes ? CopyEnd::managed : CopyEnd::device;
}

std::optional<HostWait> runtime_call(CUpti_CallbackId id, const void* parameters) {
  return wait_of({kRuntimeCalls, id}, parameters, &known_end);
}

TEST(HeardCalls, EachIsNamedOnce) {
  std::set<std::pair<int, CUpti_CallbackId>> named;
  for (const DriverCall& call : heard_calls()) {
    EXPECT_TRUE(named.emplace(call.domain, call.id).second) << call.id;
  }
  EXPECT_GT(named.size(), 60U);
}

TEST(HeardCalls, SynchronisationsAllocationsAndPinning) {
  const cudaStreamSynchronize_v3020_params nothing{};
  EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaStreamSynchronize_v3020, &nothing), HostWait::stream);
  EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaEventSynchronize_v3020, &nothing), HostWait::event);
  EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020, &nothing), HostWait::device);
  EXPECT_EQ(wait_of({kDriverCalls, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize}, &nothing, &known_end), HostWait::device);
  for (const CUpti_CallbackId id :
       {CUPTI_RUNTIME_TRACE_CBID_cudaMalloc_v3020, CUPTI_RUNTIME_TRACE_CBID_cudaMallocManaged_v6000,
        CUPTI_RUNTIME_TRACE_CBID_cudaMallocAsync_v11020}) {
    EXPECT_EQ(runtime_call(id, &nothing), HostWait::allocation) << id;
  }
  for (const CUpti_CallbackId id :
       {CUPTI_RUNTIME_TRACE_CBID_cudaHostAlloc_v3020, CUPTI_RUNTIME_TRACE_CBID_cudaMallocHost_v3020,
        CUPTI_RUNTIME_TRACE_CBID_cudaHostRegister_v4000}) {
    EXPECT_EQ(runtime_call(id, &nothing), HostWait::pinning) << id;
  }
  for (const CUpti_CallbackId id : {CUPTI_DRIVER_TRACE_CBID_cuMemHostAlloc, CUPTI_DRIVER_TRACE_CBID_cuMemAllocHost_v2,
                                    CUPTI_DRIVER_TRACE_CBID_cuMemHostRegister_v2}) {
    EXPECT_EQ(wait_of({kDriverCalls, id}, &nothing, &known_end), HostWait::pinning) << id;
  }
}

TEST(HeardCalls, FreeingWaitsUnlessThereIsNothingToFree) {
  const cudaFree_v3020_params something{device_bytes};
  const cudaFree_v3020_params nothing{nullptr};
  EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaFree_v3020, &something), HostWait::device);
  EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaFree_v3020, &nothing), std::nullopt);
  EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaFreeHost_v3020, &something), HostWait::pinning);
  EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaFreeHost_v3020, &nothing), std::nullopt);
  EXPECT_EQ(wait_of({kDriverCalls, CUPTI_DRIVER_TRACE_CBID_cuMemFree_v2}, &something, &known_end), HostWait::device);
}

struct CopyCase {
  const char* label;
  void* to;
  const void* from;
  cudaMemcpyKind kind;
  std::optional<HostWait> blocking;      ///< of a copy that is to wait
  std::optional<HostWait> asynchronous;  ///< of one that is not to
};

std::vector<CopyCase> copy_cases() {
  constexpr auto kNone = std::nullopt;
  constexpr auto kBlocks = HostWait::blocking_copy;
  constexpr auto kPageable = HostWait::pageable_copy;
  return {
      {"device to device", device_bytes, device_bytes + 1, cudaMemcpyDeviceToDevice, kNone, kNone},
      {"device to device, by address", device_bytes, device_bytes + 1, cudaMemcpyDefault, kNone, kNone},
      {"pinned to device", device_bytes, pinned_bytes, cudaMemcpyHostToDevice, kBlocks, kNone},
      {"pinned to device, by address", device_bytes, pinned_bytes, cudaMemcpyDefault, kBlocks, kNone},
      {"pageable to device", device_bytes, pageable_bytes, cudaMemcpyHostToDevice, kBlocks, kPageable},
      {"pageable to device, by address", device_bytes, pageable_bytes, cudaMemcpyDefault, kBlocks, kPageable},
      {"device to pinned", pinned_bytes, device_bytes, cudaMemcpyDeviceToHost, kBlocks, kNone},
      {"device to pageable", pageable_bytes, device_bytes, cudaMemcpyDeviceToHost, kBlocks, kPageable},
      {"managed to device", device_bytes, managed_bytes, cudaMemcpyDefault, kBlocks, kNone},
      {"pinned to pinned", pinned_bytes, pinned_bytes, cudaMemcpyHostToHost, kBlocks, kBlocks},
      {"pageable to pinned", pinned_bytes, pageable_bytes, cudaMemcpyHostToHost, kBlocks, kPageable},
  };
}

TEST(HeardCalls, ACopyOfTheRuntimeWaitsAsItsEndsSay) {
  for (const CopyCase& copy : copy_cases()) {
    SCOPED_TRACE(copy.label);
    const cudaMemcpyAsync_v3020_params plain{copy.to, copy.from, 1, copy.kind, nullptr};
    EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_v3020, &plain), copy.blocking);
    EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy_ptds_v7000, &plain), copy.blocking);
    EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020, &plain), copy.asynchronous);
    const cudaMemcpy2DAsync_v3020_params rows{copy.to, 1, copy.from, 1, 1, 1, copy.kind, nullptr};
    EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy2D_v3020, &rows), copy.blocking);
    EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy2DAsync_v3020, &rows), copy.asynchronous);
    cudaMemcpy3DParms box{};
    box.dstPtr.ptr = copy.to;
    box.srcPtr.ptr = const_cast<void*>(copy.from);
    box.kind = copy.kind;
    const cudaMemcpy3DAsync_v3020_params in_box{&box, nullptr};
    EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy3D_v3020, &in_box), copy.blocking);
    EXPECT_EQ(runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpy3DAsync_v3020, &in_box), copy.asynchronous);
  }
}

CUdeviceptr as_driver(const void* address) { return reinterpret_cast<CUdeviceptr>(address); }

CUmemorytype driver_type(const void* address, cudaMemcpyKind kind) {
  return kind == cudaMemcpyDefault                              ? CU_MEMORYTYPE_UNIFIED
         : address == pinned_bytes || address == pageable_bytes ? CU_MEMORYTYPE_HOST
                                                                : CU_MEMORYTYPE_DEVICE;
}

template <class Copy>
Copy driver_copy(const CopyCase& of) {
  Copy copy{};
  copy.dstMemoryType = driver_type(of.to, of.kind);
  copy.srcMemoryType = driver_type(of.from, of.kind);
  (copy.dstMemoryType == CU_MEMORYTYPE_HOST ? copy.dstHost : reinterpret_cast<void*&>(copy.dstDevice)) = of.to;
  (copy.srcMemoryType == CU_MEMORYTYPE_HOST ? copy.srcHost : reinterpret_cast<const void*&>(copy.srcDevice)) = of.from;
  return copy;
}

TEST(HeardCalls, ACopyOfTheDriverWaitsAsItsEndsSay) {
  const auto driver_call = [](CUpti_CallbackId id, const void* parameters) {
    return wait_of({kDriverCalls, id}, parameters, &known_end);
  };
  for (const CopyCase& copy : copy_cases()) {
    SCOPED_TRACE(copy.label);
    const CUdeviceptr addresses[] = {as_driver(copy.to), as_driver(copy.from), 1};
    EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy, addresses), copy.blocking);
    EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpyAsync, addresses), copy.asynchronous);
    if (copy.kind == cudaMemcpyHostToDevice) {
      EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoD_v2, addresses), copy.blocking);
      EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpyHtoDAsync_v2, addresses), copy.asynchronous);
    } else if (copy.kind == cudaMemcpyDeviceToHost) {
      EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoH_v2, addresses), copy.blocking);
      EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpyDtoHAsync_v2, addresses), copy.asynchronous);
    }
    const auto rows = driver_copy<CUDA_MEMCPY2D>(copy);
    const auto* const rows_at = &rows;
    EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy2D_v2, &rows_at), copy.blocking);
    EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy2DAsync_v2, &rows_at), copy.asynchronous);
    const auto box = driver_copy<CUDA_MEMCPY3D>(copy);
    const auto* const box_at = &box;
    EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3D_v2, &box_at), copy.blocking);
    EXPECT_EQ(driver_call(CUPTI_DRIVER_TRACE_CBID_cuMemcpy3DAsync_v2, &box_at), copy.asynchronous);
  }
}

TEST(HeardCalls, OfACopyThatSaysItsEndsOnlyTheHostsIsAskedFor) {
  ends_asked = 0;
  const cudaMemcpyAsync_v3020_params on_device{device_bytes, device_bytes + 1, 1, cudaMemcpyDeviceToDevice, nullptr};
  (void)runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020, &on_device);
  EXPECT_EQ(ends_asked, 0);
  const cudaMemcpyAsync_v3020_params to_host{pinned_bytes, device_bytes, 1, cudaMemcpyDeviceToHost, nullptr};
  (void)runtime_call(CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020, &to_host);
  EXPECT_EQ(ends_asked, 1);
}

thread_local std::vector<std::string> told;
thread_local bool wants_to_hear = true;

constexpr host_waits::Listener kKeepsWords{
    [](c10::DeviceType /*type*/, HostWait /*kind*/, const char* call) noexcept { told.emplace_back(call); },
    []() noexcept { return wants_to_hear; }};

class HearCallTest : public testing::Test {
 protected:
  HearCallTest() {
    told.clear();
    host_waits::set_listener(&kKeepsWords);
  }
  ~HearCallTest() override { host_waits::set_listener(nullptr); }

  static void begin(std::uintptr_t subscription, DriverCall call, const char* name, const void* parameters = nullptr) {
    pass(CUPTI_API_ENTER, subscription, call, name, parameters);
  }
  static void end(std::uintptr_t subscription, DriverCall call) {
    pass(CUPTI_API_EXIT, subscription, call, "", nullptr);
  }

  static constexpr DriverCall kOuter{kRuntimeCalls, CUPTI_RUNTIME_TRACE_CBID_cudaDeviceSynchronize_v3020};
  static constexpr DriverCall kInner{kDriverCalls, CUPTI_DRIVER_TRACE_CBID_cuCtxSynchronize};
  static constexpr DriverCall kCopy{kRuntimeCalls, CUPTI_RUNTIME_TRACE_CBID_cudaMemcpyAsync_v3020};

 private:
  static void pass(CUpti_ApiCallbackSite site, std::uintptr_t subscription, DriverCall call, const char* name,
                   const void* parameters) {
    CUpti_CallbackData data{};
    data.callbackSite = site;
    data.functionName = name;
    data.functionParams = parameters;
    hear_call(subscription, call, data, &known_end);
  }
};

TEST_F(HearCallTest, WhatTheRuntimeAsksOfTheDriverIsAPartOfItsCall) {
  for (int i = 0; i < 2; ++i) {
    begin(1, kOuter, "outer");
    begin(1, kInner, "inner");
    end(1, kInner);
    end(1, kOuter);
  }
  begin(1, kInner, "alone");
  end(1, kInner);
  EXPECT_EQ(told, (std::vector<std::string>{"outer", "outer", "alone"}));
}

TEST_F(HearCallTest, ACallThatASubscriptionMissedTheEndOfMakesTheNextOneNotDeaf) {
  begin(2, kOuter, "its end is not heard");
  begin(3, kOuter, "of the next subscription");
  end(3, kOuter);
  begin(3, kInner, "alone");
  end(3, kInner);
  end(3, kOuter);  // whose begin was not heard
  begin(3, kInner, "alone again");
  end(3, kInner);
  EXPECT_EQ(told,
            (std::vector<std::string>{"its end is not heard", "of the next subscription", "alone", "alone again"}));
}

TEST_F(HearCallTest, NobodyIsAskedWhereNobodyListens) {
  const cudaMemcpyAsync_v3020_params copy{device_bytes, pageable_bytes, 1, cudaMemcpyHostToDevice, nullptr};
  ends_asked = 0;
  {
    const OwnWaits own;
    begin(4, kCopy, "own", &copy);
    end(4, kCopy);
  }
  wants_to_hear = false;
  begin(4, kCopy, "unwanted", &copy);
  end(4, kCopy);
  wants_to_hear = true;
  host_waits::set_listener(nullptr);
  begin(4, kCopy, "unheard", &copy);
  end(4, kCopy);
  EXPECT_EQ(ends_asked, 0);
  host_waits::set_listener(&kKeepsWords);
  begin(4, kCopy, "heard", &copy);
  end(4, kCopy);
  EXPECT_EQ(ends_asked, 1);
  EXPECT_EQ(told, (std::vector<std::string>{"heard"}));
}

TEST_F(HearCallTest, EachThreadIsInItsOwnCalls) {
  begin(5, kOuter, "outer");
  std::thread([] {
    begin(5, kInner, "of another thread");
    end(5, kInner);
    EXPECT_EQ(told, (std::vector<std::string>{"of another thread"}));
  }).join();
  end(5, kOuter);
  EXPECT_EQ(told, (std::vector<std::string>{"outer"}));
}

}  // namespace
}  // namespace sidestream::cuda
#endif
