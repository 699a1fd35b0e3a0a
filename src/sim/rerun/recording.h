#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <vector>

#include "sim/device/device.h"
#include "sim/device/memory_image.h"
#include "sim/torch/generator.h"

namespace sidestream::sim {

/// A piece of work of a recorded step and what it is ordered after, by streams, events and graph edges.
struct RecordedWork {
  std::shared_ptr<const Work> work;
  c10::StreamId queue = 0;           ///< as in Queued
  std::vector<std::uint32_t> after;  ///< positions in the recording, all lower
  std::shared_ptr<const GeneratorState> random;
};

/// All work of the device from construction to `stop`: eager operators, and the nodes of launched graphs. It can then run again, operator
/// by operator, in every order that streams and events allow.
///
/// To find a missing wait it is not enough to run eager compute at issue and to hold only copies back. Compute is then never late, so a
/// copy that does not wait for it shows no fault. A rerun starts from the memory of the start, with all memory that was not in use
/// poisoned.
/// Threads: one for its calls; the recorded step may use any.
class Recording final {
 public:
  /// Drains the device and keeps the content of its memory. Throws: UsageError while another recording is being made;
  /// CaptureError while this thread captures.
  Recording();
  Recording(const Recording&) = delete;
  Recording& operator=(const Recording&) = delete;
  /// Stops, and puts memory back as `restore` does.
  ~Recording();

  /// Drains the device and ends the recording.
  void stop();
  /// What was recorded, in the order of issue. Plain data: the order checker reads it too.
  [[nodiscard]] const std::vector<RecordedWork>& works() const noexcept { return works_; }

  /// The positions of all works in the order that `schedule` gives them. Throws: UsageError before `stop`.
  [[nodiscard]] std::vector<std::uint32_t> order(const Schedule& schedule) const;
  /// Restores memory to its state at the start and runs everything in `order`, an order that streams and events allow. The results stay
  /// in memory.
  /// Throws: errors of operators (an index out of range may be poison); UsageError before `stop`.
  void rerun(const std::vector<std::uint32_t>& order);
  void rerun(const Schedule& schedule) { rerun(order(schedule)); }
  /// Puts memory back as the recorded step left it. Without a rerun before, does nothing.
  void restore() noexcept;

 private:
  /// What a copy takes from the host belongs to the start state.
  void keep_input_of(const Work& copy);
  void find_overwritten();
  void keep_start();
  void keep_end();
  void load_start();

  Device& device_;
  bool stopped_ = false;
  bool changed_ = false;  ///< a rerun has changed memory
  std::vector<RecordedWork> works_;
  std::vector<std::vector<std::uint32_t>> followers_;
  std::deque<MemoryImage> start_;
  std::deque<MemoryImage> host_inputs_;  ///< pinned memory that the host wrote before a copy took it
  std::vector<Access> copied_out_;       ///< pinned memory that copies of the step have written so far
  std::vector<Access> overwritten_;      ///< ranges whose old content nothing reads
  std::vector<MemoryImage> end_;
};

}  // namespace sidestream::sim
