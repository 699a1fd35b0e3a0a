// What LibTorch itself asks of a GPU's streams, as DeviceListener has it.
#include <algorithm>
#include <atomic>
#include <cstdio>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/core/impl/GPUTrace.h>
#include <c10/util/Exception.h>

#include "runtime/cuda/driver_calls.h"
#include "runtime/cuda/libtorch.h"
#include "runtime/cuda/libtorch_order.h"
#include "runtime/device_listener.h"
#include "runtime/host_waits.h"
#include "runtime/replayed_memory.h"

namespace sidestream::cuda {
namespace {

constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

// Note [How LibTorch's events are heard]
// A tracer is installed in c10::impl::GPUTrace. Every record and wait of c10::Event and CUDAEvent passes it, and every wait of the host.
//
// The tracer is derived from an interpreter's table of functions, because GPUTrace was made for Python's sanitizer. GPUTrace keeps the
// first table that it is offered for good.
//
// Only the tracing functions are called: no tensor ever refers to this table.
class Tracer final : public c10::impl::PyInterpreterVTable {
 public:
  std::string name() const override { return "sidestream's tracer"; }

  void trace_gpu_event_record(c10::DeviceType type, std::uintptr_t event, std::uintptr_t stream) const override {
    device_listeners::recorded(type, pointer(event), key(stream));
  }
  void trace_gpu_event_wait(c10::DeviceType type, std::uintptr_t event, std::uintptr_t stream) const override {
    device_listeners::waited(type, key(stream), pointer(event));
  }
  void trace_gpu_stream_synchronization(c10::DeviceType type, std::uintptr_t stream) const override {
    if (asks_libtorch()) {
      host_waits::tell(type, HostWait::stream, "cudaStreamSynchronize");
    }
    device_listeners::host_saw_stream(type, key(stream));
  }
  void trace_gpu_event_synchronization(c10::DeviceType type, std::uintptr_t event) const override {
    if (asks_libtorch()) {
      host_waits::tell(type, HostWait::event, "cudaEventSynchronize");
    }
    device_listeners::host_saw_event(type, pointer(event));
  }
  void trace_gpu_device_synchronization(c10::DeviceType type) const override {
    if (asks_libtorch()) {
      host_waits::tell(type, HostWait::device, "cudaDeviceSynchronize");
    }
    device_listeners::host_saw_device(c10::Device(type, current_device()));
  }
  void trace_gpu_event_creation(c10::DeviceType /*type*/, std::uintptr_t /*event*/) const override {}
  void trace_gpu_event_deletion(c10::DeviceType /*type*/, std::uintptr_t /*event*/) const override {}
  void trace_gpu_memory_allocation(c10::DeviceType /*type*/, std::uintptr_t /*data*/) const override {}
  void trace_gpu_memory_deallocation(c10::DeviceType /*type*/, std::uintptr_t /*data*/) const override {}
  void trace_gpu_stream_creation(c10::DeviceType /*type*/, std::uintptr_t /*stream*/) const override {}

  void incref(PyObject* /*object*/) const override { refuse(); }
  void decref(PyObject* /*object*/) const override { refuse(); }
  bool try_incref(const c10::impl::PyObjectSlot& /*slot*/) const override { refuse(); }
  std::size_t refcnt(PyObject* /*object*/) const override { refuse(); }
  c10::intrusive_ptr<c10::TensorImpl> detach(const c10::TensorImpl* /*self*/) const override { refuse(); }
  void dispatch(const c10::OperatorHandle& /*op*/, torch::jit::Stack* /*stack*/) const override { refuse(); }
  void reportErrorCallback(PyObject* /*callback*/, c10::DispatchKey /*key*/) const override { refuse(); }
  void python_op_registration_trampoline(const c10::OperatorHandle& /*op*/, c10::DispatchKey /*key*/,
                                         c10::DispatchKeySet /*keys*/, torch::jit::Stack* /*stack*/, bool /*with_keys*/,
                                         bool /*with_op*/) const override {
    refuse();
  }
  void throw_abstract_impl_not_imported_error(std::string /*name*/, const char* /*module*/,
                                              const char* /*context*/) const override {
    refuse();
  }
  void python_dispatcher(const c10::OperatorHandle& /*op*/, c10::DispatchKeySet /*keys*/,
                         torch::jit::Stack* /*stack*/) const override {
    refuse();
  }
  bool is_contiguous(const c10::TensorImpl* /*self*/, at::MemoryFormat /*format*/) const override { refuse(); }
  c10::SymBool sym_is_contiguous(const c10::TensorImpl* /*self*/, at::MemoryFormat /*format*/) const override {
    refuse();
  }
  bool is_strides_like(const c10::TensorImpl* /*self*/, at::MemoryFormat /*format*/) const override { refuse(); }
  bool is_non_overlapping_and_dense(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::Device device(const c10::TensorImpl* /*self*/) const override { refuse(); }
  std::int64_t dim(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::IntArrayRef strides(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::IntArrayRef sizes(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymIntArrayRef sym_sizes(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::Layout layout(const c10::TensorImpl* /*self*/) const override { refuse(); }
  std::int64_t numel(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymInt sym_numel(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymIntArrayRef sym_strides(const c10::TensorImpl* /*self*/) const override { refuse(); }
  c10::SymInt sym_storage_offset(const c10::TensorImpl* /*self*/) const override { refuse(); }
  void reset_backward_hooks(const c10::TensorImpl* /*self*/) const override { refuse(); }

 private:
  [[noreturn]] static void refuse() {
    TORCH_CHECK(false, "sidestream's tracer was called as if it were Python's interpreter");
  }
  static const void* pointer(std::uintptr_t native) { return reinterpret_cast<const void*>(native); }
  // LibTorch has made the stream's device current.
  static StreamKey key(std::uintptr_t stream) {
    return key_of(pointer(stream), stream == 0 ? current_device() : c10::DeviceIndex{0});
  }
  static c10::DeviceIndex current_device() {
    int device = 0;
    (void)cudaGetDevice(&device);
    return static_cast<c10::DeviceIndex>(device);
  }
};

/// Which streams use a block beside its own: what the caching allocator asks the clock for when the block is freed.
class BlockUses {
 public:
  void add(const void* block, StreamKey stream) {
    const std::lock_guard lock(mutex_);
    std::vector<StreamKey>& streams = uses_[block];
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }
  void freed(const void* block, std::size_t bytes) {
    std::vector<StreamKey> streams;
    {
      const std::lock_guard lock(mutex_);
      if (auto used = uses_.extract(block); !used.empty()) {
        streams = std::move(used.mapped());
      }
    }
    for (const StreamKey stream : streams) {
      device_listeners::freed_behind(kCuda, stream, block, bytes);
    }
  }

 private:
  std::mutex mutex_;
  std::unordered_map<const void*, std::vector<StreamKey>> uses_;
};

BlockUses& block_uses() {
  static auto* const uses = new BlockUses();
  return *uses;
}

/// Whether frees are heard: only then may uses be kept until one.
std::atomic<bool> hears_frees{false};

/// LibTorch's guard of CUDA devices, which also tells of `recordDataPtrOnStream`: autograd asks for that past every operator.
class UseTellingGuard final : public c10::impl::DeviceGuardImplInterface {
 public:
  explicit UseTellingGuard(const c10::impl::DeviceGuardImplInterface& inner) : inner_(inner) {}

  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    inner_.recordDataPtrOnStream(data, stream);
    ReplayedMemory::used_on(data, stream);
    if (hears_frees.load(std::memory_order_relaxed)) {
      block_uses().add(data.get(), key_of(stream));
    }
  }

  c10::DeviceType type() const override { return inner_.type(); }
  c10::Device exchangeDevice(c10::Device device) const override { return inner_.exchangeDevice(device); }
  c10::Device getDevice() const override { return inner_.getDevice(); }
  void setDevice(c10::Device device) const override { inner_.setDevice(device); }
  void uncheckedSetDevice(c10::Device device) const noexcept override { inner_.uncheckedSetDevice(device); }
  c10::Stream getStream(c10::Device device) const override { return inner_.getStream(device); }
  c10::Stream getDefaultStream(c10::Device device) const override { return inner_.getDefaultStream(device); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority) const override {
    return inner_.getStreamFromGlobalPool(device, high_priority);
  }
  c10::Stream getNewStream(c10::Device device, int priority) const override {
    return inner_.getNewStream(device, priority);
  }
  c10::Stream exchangeStream(c10::Stream stream) const override { return inner_.exchangeStream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return inner_.getStreamNativeHandle(stream); }
  void destroyEvent(void* event, const c10::DeviceIndex device) const noexcept override {
    inner_.destroyEvent(event, device);
  }
  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag flag) const override {
    inner_.record(event, stream, device, flag);
  }
  void block(void* event, const c10::Stream& stream) const override { inner_.block(event, stream); }
  bool queryEvent(void* event) const override {
    const bool done = inner_.queryEvent(event);
    if (done && event != nullptr) {
      device_listeners::host_saw_event(kCuda, event);
    }
    return done;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return inner_.deviceCount(); }
  c10::DeviceCapability getDeviceCapability(c10::Device device) const override {
    return inner_.getDeviceCapability(device);
  }
  bool queryStream(const c10::Stream& stream) const override {
    const bool idle = inner_.queryStream(stream);
    if (idle) {
      device_listeners::host_saw_stream(kCuda, key_of(stream));
    }
    return idle;
  }
  void synchronizeStream(const c10::Stream& stream) const override { inner_.synchronizeStream(stream); }
  void synchronizeEvent(void* event) const override { inner_.synchronizeEvent(event); }
  void synchronizeDevice(const c10::DeviceIndex device) const override { inner_.synchronizeDevice(device); }
  double elapsedTime(void* begin, void* end, const c10::DeviceIndex device) const override {
    return inner_.elapsedTime(begin, end, device);
  }

 private:
  const c10::impl::DeviceGuardImplInterface& inner_;
};

void hear() {
  static const auto* const tracer = new Tracer();  // LibTorch keeps all of these for the life of the process
  static const auto* const interpreter = new c10::impl::PyInterpreter(tracer);
  c10::impl::GPUTrace::set_trace(interpreter);
  if (c10::impl::GPUTrace::get_trace() != interpreter) {
    std::fprintf(stderr,
                 "sidestream: another tracer (Python's CUDA sanitizer?) receives LibTorch's events. Events of the "
                 "model are not in the journal, so some findings may be false\n");
  }
  hear_uses();
  try {
    libtorch::hear_frees([](const void* block, std::size_t bytes) { block_uses().freed(block, bytes); });
    hears_frees = true;
  } catch (const c10::Error&) {
    std::fprintf(stderr,
                 "sidestream: this allocator of LibTorch does not report frees. Memory that is reused after "
                 "record_stream may cause false findings\n");
  }
}

}  // namespace

void hear_uses() {
  static std::once_flag once;
  std::call_once(once, [] {
    static const auto* const guard = new UseTellingGuard(*c10::impl::getDeviceGuardImpl(kCuda));
    c10::impl::registerDeviceGuard(kCuda, guard);
    libtorch::hear_record_stream();
  });
}

void hear_libtorch() {
  static std::once_flag once;
  std::call_once(once, hear);
}

}  // namespace sidestream::cuda
