#include "sim/torch/cpu_allocator.h"

#include <c10/core/CPUAllocator.h>
#include <sidestream/error.h>

#include <cstring>
#include <string>

#include "sim/device/device.h"
#include "sim/torch/device_guard.h"

namespace sidestream::sim {
namespace {

thread_local OperatorMemory* active = nullptr;

void free_device_block(void* block) {
  if (block != nullptr) {
    Device::get().free(block);
  }
}

void free_nothing(void* /*block*/) {}

void free_pinned_block(void* block) {
  if (block != nullptr) {
    Device::get().free_pinned(block);
  }
}

class DeviceAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* block = bytes == 0 ? nullptr : Device::get().allocate(bytes, current_stream());
    return {block, block, &free_device_block, sim_device()};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_device_block; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
};

class PinnedAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(std::size_t bytes) override {
    void* block = bytes == 0 ? nullptr : Device::get().allocate_pinned(bytes);
    return {block, block, &free_pinned_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &free_pinned_block; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }
};

}  // namespace

/// Kernels also use raw_allocate and raw_deallocate, whose context is the address itself: the deleter tells device blocks from
/// others by address.
class CpuAllocator final : public c10::Allocator {
 public:
  explicit CpuAllocator(c10::Allocator* before) : before_(before) { base_ = before; }

  c10::DataPtr allocate(std::size_t bytes) override {
    OperatorMemory* memory = active;
    if (memory == nullptr || bytes == 0) {
      return before_->allocate(bytes);
    }
    if (memory->logged_ != nullptr) {
      void* block = next_logged(*memory, bytes);
      return {block, block, &free_nothing, c10::Device(c10::kCPU)};
    }
    void* block = Device::get().allocate(bytes, memory->stream_);
    Device::get().ready_again(memory->stream_);
    if (memory->log_ != nullptr) {
      memory->log_->push_back({block, bytes});
    }
    return {block, block, &free_device_block, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &raw_free; }
  void copy_data(void* destination, const void* source, std::size_t bytes) const override {
    std::memcpy(destination, source, bytes);
  }

 private:
  static void* next_logged(OperatorMemory& memory, std::size_t bytes) {
    if (memory.next_ >= memory.logged_->size()) {
      throw Error("a replayed operator allocates more often than when it was captured; run it outside of the graph");
    }
    const Allocation& allocation = (*memory.logged_)[memory.next_++];
    if (allocation.bytes != bytes) {
      throw Error("a replayed operator allocates " + std::to_string(bytes) + " bytes, but it allocated " +
                  std::to_string(allocation.bytes) + " when it was captured; run it outside of the graph");
    }
    return allocation.address;
  }

  static void raw_free(void* block) {
    if (!Device::get().owns(block)) {
      base_->raw_deallocate(block);
    } else if (active == nullptr || active->logged_ == nullptr) {
      free_device_block(block);
    }
  }

  static inline c10::Allocator* base_ = nullptr;
  c10::Allocator* before_;
};

OperatorMemory::OperatorMemory(c10::StreamId stream, std::vector<Allocation>* log) noexcept
    : stream_(stream), log_(log), outer_(active) {
  active = this;
}

OperatorMemory::OperatorMemory(const std::vector<Allocation>& logged) noexcept : logged_(&logged), outer_(active) {
  active = this;
}

OperatorMemory::~OperatorMemory() { active = outer_; }

void OperatorMemory::check_all_used(const char* name) const {
  if (logged_ != nullptr && next_ != logged_->size()) {
    throw Error(std::string(name) +
                " allocates less often in a replay than when it was captured; run it outside of the graph");
  }
}

c10::Allocator* device_allocator() {
  static auto* const allocator = new DeviceAllocator();
  return allocator;
}

c10::Allocator* pinned_allocator() {
  static auto* const allocator = new PinnedAllocator();
  return allocator;
}

c10::Allocator* operator_allocator() {
  static auto* const allocator = new CpuAllocator(c10::GetCPUAllocator());
  return allocator;
}

void register_allocators() {
  c10::SetAllocator(kDeviceType, device_allocator());
  c10::SetCPUAllocator(operator_allocator(), 1);
}

}  // namespace sidestream::sim
