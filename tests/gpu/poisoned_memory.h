#pragma once
#include <cstdint>
#include <memory>

#include "runtime/forwarding_runtime.h"

namespace sidestream::gpu {

/// Overwrites device memory when LibTorch's allocator lends it and when it takes it back, in the order of the stream that the
/// block belongs to. In a capture that is a node of the graph, so that every replay overwrites what this graph was lent
/// or gave back; memory of a graph's pool that goes back between captures is left alone, as no replay says when.
/// Memory that other streams use (record_stream) goes back when the allocator has seen those done.
///
/// One lives at a time. Threads: as Runtime; captures one at a time.
class PoisonedMemory final : public ForwardingRuntime {
 public:
  explicit PoisonedMemory(std::shared_ptr<Runtime> cuda);
  ~PoisonedMemory() override;

  void begin_capture(c10::Stream stream, const MemoryPool& pool, c10::ArrayRef<at::Generator> generators) override;
  void record(const ExternalEvent& event, c10::Stream stream) override;
  void record(const Event& event, c10::Stream stream) override { inner().record(event, stream); }
  [[nodiscard]] Graph end_capture(c10::Stream stream) override;
  void abandon_capture(c10::Stream stream) noexcept override;

  /// Blocks overwritten so far by the host's orders, and those that captures hold.
  [[nodiscard]] std::int64_t count() const noexcept;
  [[nodiscard]] std::int64_t captured_count() const noexcept;
  /// What the allocator's callback was refused by the driver; must be 0.
  [[nodiscard]] std::int64_t failures() const noexcept;
};

}  // namespace sidestream::gpu
