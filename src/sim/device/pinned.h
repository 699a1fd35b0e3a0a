#pragma once
#include <cstddef>
#include <map>

namespace sidestream::sim {

/// The page-locked host memory of the sim device: page-aligned ranges of exact size, known by address.
/// Threads: the caller's lock.
class PinnedRegistry {
 public:
  /// The limit is the machine's memory: mmap itself may promise more.
  PinnedRegistry();
  PinnedRegistry(const PinnedRegistry&) = delete;
  PinnedRegistry& operator=(const PinnedRegistry&) = delete;
  ~PinnedRegistry();

  /// Zero-filled. Throws: DeviceError that says "pinned host memory" beyond the limit or when the system has no more.
  [[nodiscard]] std::byte* allocate(std::size_t bytes);
  void free(void* data) noexcept;
  /// As free, but the memory stays mapped until free_retired.
  void retire(void* data) noexcept;
  void free_retired() noexcept;
  [[nodiscard]] bool holds(const void* address, std::size_t bytes) const noexcept;
  /// Allocated, or retired and still mapped.
  [[nodiscard]] bool mapped(std::byte* begin) const noexcept {
    return ranges_.count(begin) + retired_.count(begin) > 0;
  }
  void set_limit(std::size_t bytes) noexcept { limit_ = bytes; }
  [[nodiscard]] const std::map<std::byte*, std::size_t>& ranges() const noexcept { return ranges_; }

 private:
  std::map<std::byte*, std::size_t> ranges_;
  std::map<std::byte*, std::size_t> retired_;
  std::size_t total_ = 0;
  std::size_t limit_;
};

}  // namespace sidestream::sim
