#pragma once
#include <cstddef>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

namespace sidestream::sim {

/// What a kernel asked for, in order: a run of the same kernel again gets the same addresses.
struct Allocation {
  void* address = nullptr;
  std::size_t bytes = 0;
};

/// For its lifetime, CPU memory that the calling thread allocates comes from the sim device, so the results of a CPU kernel lie in the
/// device's memory.
class [[nodiscard]] OperatorMemory {
 public:
  /// First run: blocks of `stream`; each is added to `log` unless that is null.
  OperatorMemory(c10::StreamId stream, std::vector<Allocation>* log) noexcept;
  /// A later run: the logged addresses in order; frees do nothing.
  /// Throws (from the kernel's allocation): Error when a size differs or the log is used up.
  explicit OperatorMemory(const std::vector<Allocation>& logged) noexcept;
  OperatorMemory(const OperatorMemory&) = delete;
  OperatorMemory& operator=(const OperatorMemory&) = delete;
  ~OperatorMemory();

  /// After a later run. Throws: Error when the kernel allocated less often than in its first run.
  void check_all_used(const char* name) const;

 private:
  friend class CpuAllocator;
  c10::StreamId stream_ = 0;
  std::vector<Allocation>* log_ = nullptr;
  const std::vector<Allocation>* logged_ = nullptr;
  std::size_t next_ = 0;
  OperatorMemory* outer_;
};

/// The allocator of tensors on the sim device: blocks of the current stream.
[[nodiscard]] c10::Allocator* device_allocator();
/// The allocator of pinned host memory.
[[nodiscard]] c10::Allocator* pinned_allocator();
/// The allocator that replaces LibTorch's CPU allocator and serves OperatorMemory. It forwards all other requests to the allocator that
/// was installed before.
[[nodiscard]] c10::Allocator* operator_allocator();
/// Registers the three with LibTorch. Called once, by register_sim_device.
void register_allocators();

}  // namespace sidestream::sim
