// Calls of CUDA that bypass every Runtime, reported to host_waits.
#include "runtime/cuda/driver_calls.h"

#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>

#include "runtime/cuda/libtorch_order.h"

#if __has_include(<cupti_callbacks.h>)
#include <cuda_runtime_api.h>
#include <dlfcn.h>

#include "runtime/cuda/heard_calls.h"
#endif

namespace sidestream::cuda {
namespace {

std::atomic<bool> libtorch_tells{false};

#if __has_include(<cupti_callbacks.h>)

// The driver is called inside of a callback. No document was found that allows it; the FindSyncsOnGpu tests show that the driver answers.
// It is called only for a thread with a listener, and only for addresses whose kind the call leaves open.
CopyEnd end_at(const void* address) noexcept {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) {
    (void)cudaGetLastError();
    return CopyEnd::managed;  // not known: a finding only if a call waits for any kind of memory
  }
  switch (attributes.type) {
    case cudaMemoryTypeUnregistered:
      return CopyEnd::pageable;
    case cudaMemoryTypeHost:
      return CopyEnd::pinned;
    case cudaMemoryTypeDevice:
      return CopyEnd::device;
    case cudaMemoryTypeManaged:
      break;
  }
  return CopyEnd::managed;
}

void CUPTIAPI on_call(void* subscription, CUpti_CallbackDomain domain, CUpti_CallbackId id, const void* data) {
  hear_call(reinterpret_cast<std::uintptr_t>(subscription), {domain, id}, *static_cast<const CUpti_CallbackData*>(data),
            &end_at);
}

/// The functions of CUPTI that are used. CUPTI is loaded, not linked.
struct Cupti {
  decltype(&cuptiSubscribe) subscribe = nullptr;
  decltype(&cuptiEnableCallback) enable = nullptr;
  decltype(&cuptiUnsubscribe) unsubscribe = nullptr;
  decltype(&cuptiGetResultString) words = nullptr;

  /// Empty, or why it cannot be used.
  std::string load() {
    // LibTorch's profiler has usually loaded it. Otherwise it is beside the CUDA runtime, or the loader finds it.
    constexpr const char* kLibraries[] = {"libcupti.so.13", "libcupti.so.12", "libcupti.so"};
    void* library = nullptr;
    for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
      for (const char* name : kLibraries) {
        library = library == nullptr ? dlopen(name, flags) : library;
      }
    }
    if (library == nullptr) {
      return "libcupti.so is not found; put the folder that has it into LD_LIBRARY_PATH: CUDA's extras/CUPTI/lib64, or "
             "nvidia/cu13/lib beside LibTorch's wheel";
    }
    find(library, "cuptiSubscribe", subscribe);
    find(library, "cuptiEnableCallback", enable);
    find(library, "cuptiUnsubscribe", unsubscribe);
    find(library, "cuptiGetResultString", words);
    return subscribe == nullptr || enable == nullptr || unsubscribe == nullptr || words == nullptr
               ? "the libcupti.so that was found lacks callbacks; install the CUPTI of the CUDA that LibTorch is built "
                 "with"
               : "";
  }
  [[nodiscard]] std::string text_of(CUptiResult result) const {
    const char* text = nullptr;
    return words(result, &text) == CUPTI_SUCCESS && text != nullptr ? text : "error " + std::to_string(result);
  }

 private:
  template <class Function>
  static void find(void* library, const char* name, Function& function) {
    function = reinterpret_cast<Function>(dlsym(library, name));
  }
};

/// A place among CUPTI's listeners.
class Subscription {
 public:
  /// Empty, or why there is none, with the remedy.
  std::string begin() {
    if (std::string missing = cupti_.load(); !missing.empty()) {
      return missing;
    }
    if (const CUptiResult result = cupti_.subscribe(&handle_, &on_call, reinterpret_cast<void*>(++number_));  // NOLINT
        result != CUPTI_SUCCESS) {
      handle_ = nullptr;
      return "CUPTI accepts no subscriber (" + cupti_.text_of(result) + "); " +
             (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED
                  ? "it accepts one at a time: run without nsys, ncu, compute-sanitizer, cuda-gdb and LibTorch's "
                    "profiler"
                  : "install the CUPTI of the CUDA that LibTorch is built with; the driver must not be older than that "
                    "CUDA");
    }
    for (const DriverCall& call : heard_calls()) {
      if (const CUptiResult result = cupti_.enable(1, handle_, call.domain, call.id); result != CUPTI_SUCCESS) {
        end();  // else LibTorch's trace and the rest of the callbacks would tell of the same calls
        return "CUPTI does not report call " + std::to_string(call.id) + " (" + cupti_.text_of(result) +
               "); install the CUPTI of the CUDA that LibTorch is built with";
      }
    }
    return {};
  }
  void end() noexcept {
    if (handle_ != nullptr) {
      (void)cupti_.unsubscribe(std::exchange(handle_, nullptr));
    }
  }

 private:
  Cupti cupti_;
  CUpti_SubscriberHandle handle_ = nullptr;
  std::uintptr_t number_ = 0;
};

#else

class Subscription {
 public:
  [[nodiscard]] std::string begin() const {
    return "this build had no CUPTI headers; build Sidestream with cupti_callbacks.h beside cuda.h, or in CUDA's "
           "extras/CUPTI/include";
  }
  void end() const noexcept {}
};

#endif

/// The listener to driver calls, if there is one.
struct Hearing {
  std::mutex mutex;
  std::size_t listeners = 0;
  Subscription subscription;
  std::string shortcoming;
};

Hearing& hearing() {
  static auto* const instance = new Hearing();  // engines may go after static objects
  return *instance;
}

}  // namespace

bool asks_libtorch() noexcept { return libtorch_tells.load(std::memory_order_relaxed); }

std::string hear_driver_calls() {
  Hearing& now = hearing();
  const std::lock_guard lock(now.mutex);
  if (now.listeners == 0) {
    now.shortcoming.clear();
    if (const std::string missing = now.subscription.begin(); !missing.empty()) {
      hear_libtorch();
      now.shortcoming =
          "only synchronisations made by LibTorch are found. CUDA calls made by other code, pageable copies that do "
          "not block, and allocations are not found: " +
          missing;
    }
    libtorch_tells.store(!now.shortcoming.empty(), std::memory_order_relaxed);
  }
  ++now.listeners;
  return now.shortcoming;
}

void leave_driver_calls() noexcept {
  Hearing& now = hearing();
  const std::lock_guard lock(now.mutex);
  if (--now.listeners == 0) {
    now.subscription.end();
    libtorch_tells.store(false, std::memory_order_relaxed);
  }
}

}  // namespace sidestream::cuda
