#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include <c10/core/Device.h>

#include "runtime/runtime.h"

namespace sidestream {

/// What a tensor of so many bytes takes, as LibTorch's allocators count.
[[nodiscard]] constexpr std::int64_t allocated_bytes(std::size_t bytes) noexcept {
  constexpr std::size_t kBlock = 512;
  return static_cast<std::int64_t>((bytes + kBlock - 1) / kBlock * kBlock);
}

/// Live memory of one device at one moment: the bytes that LibTorch's allocator counts as allocated, and what captured graphs use of
/// their pools beyond that.
///
/// Note [Live memory]
/// Each sequence says by how much the allocator's count is wrong about it, launch by launch (PoolUse). Movers say which bytes they have
/// in flight. The allocator knows only what tensors hold. It does not know what replays use: the temporaries of a graph and its saved
/// tensors lie in memory that no tensor holds. And a captured output stays allocated, even before its graph has run.
///
/// As with the allocator, memory is in use from its allocation to its release on the host.
///
/// Between two such changes the allocator's own peak gives the rest, so its peak statistics are reset at each change. A reset asks the
/// allocator twice, so it is done only during a measurement. Without a measurement a change is an addition, and the peak comes from a
/// step that was measured.
/// Threads: any. Throws: as Runtime::memory_stats, if `runtime` (the device's) is passed.
class LiveMemory {
 public:
  struct Change {
    std::int64_t hidden = 0;     ///< live, and not counted by the allocator; negative: counted, and not live
    std::int64_t in_flight = 0;  ///< of bytes that a step offloads: on the device
  };
  struct Peak {
    std::int64_t live = 0;
    std::int64_t in_flight = 0;  ///< at that moment
    std::int64_t allocated = 0;  ///< as the allocator counts
  };
  struct Use {
    MemoryStats allocator;
    std::int64_t live = 0;
    std::int64_t live_peak = 0;
  };

  [[nodiscard]] static LiveMemory& of(c10::Device device);
  LiveMemory(const LiveMemory&) = delete;
  LiveMemory& operator=(const LiveMemory&) = delete;
  ~LiveMemory() = delete;  // there is one for each device, for the life of the process

  /// What holds now changes by so much.
  void change(Runtime& runtime, const Change& by);
  /// A graph is launched: what holds now changes by `during`, and then, from before it by `after`.
  void launched(Runtime& runtime, const Change& during, const Change& after);

  /// Now, and the peaks since the latest `restart`; those of live bytes as far as they were measured or told.
  [[nodiscard]] Use use(Runtime& runtime);
  void restart(Runtime& runtime);
  /// The allocator's peaks start anew; those of `use` do not.
  void mark(Runtime& runtime);
  /// Live bytes have been so many: by one who measured the same before.
  void tell_peak(std::int64_t live);

  /// Measures for as long as it lives.
  class [[nodiscard]] Measurement {
   public:
    explicit Measurement(Runtime& runtime);
    Measurement(const Measurement&) = delete;
    Measurement& operator=(const Measurement&) = delete;
    ~Measurement();
    /// Since it began.
    [[nodiscard]] Peak peak();

   private:
    friend class LiveMemory;
    LiveMemory& memory_;
    Runtime& runtime_;
    Peak peak_;
  };

 private:
  LiveMemory() = default;
  void add(const Change& by) noexcept;
  /// Takes what the allocator saw since the latest change into all peaks, and starts its peaks anew. Gives what it counts now.
  std::int64_t close(Runtime& runtime);
  void raise_peaks(std::int64_t live, std::int64_t in_flight);

  std::atomic<std::int64_t> hidden_{0};
  std::atomic<std::int64_t> in_flight_{0};
  std::atomic<bool> measured_{false};
  std::atomic<bool> changed_{false};  ///< unmeasured, since the allocator's peaks began

  std::mutex mutex_;
  std::vector<Measurement*> measurements_;
  // Since the latest restart, before the allocator's peaks began anew.
  std::int64_t allocated_peak_ = 0;
  std::int64_t reserved_peak_ = 0;
  std::int64_t live_peak_ = 0;
};

}  // namespace sidestream
