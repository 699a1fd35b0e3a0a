#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>

#include "graphs/replay/layer.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Queues the copies of a chain's replays beside its graphs, and makes each graph wait for those whose memory it uses.
///
/// Ordering: Note [Graph choreography] in chain.cpp.  Capture: illegal.  Threads: one at a time (the chain's mutex).
/// Where a call throws, the copies that it had queued are done.
class ChainCopies {
 public:
  struct Counts {
    std::uint64_t waits = 0;
    std::uint64_t offloaded_bytes = 0;
    std::uint64_t reloaded_bytes = 0;
    std::uint64_t inline_reloads = 0;
  };

  /// `layers` must outlive this object.
  ChainCopies(std::shared_ptr<Runtime> runtime, std::vector<Layer>& layers);
  ChainCopies(const ChainCopies&) = delete;
  ChainCopies& operator=(const ChainCopies&) = delete;
  /// Blocks the host until the copies are done.
  ~ChainCopies();

  /// Before the captures, when all layers are there.
  void prepare();
  [[nodiscard]] std::size_t place_of_backward(std::size_t layer) const noexcept {
    return 2 * layers_.size() - 1 - layer;
  }

  /// Makes `side` wait for all that the forward of layer `index` must be behind.
  void before_forward(std::size_t index, c10::Stream side);
  /// Behind its launch: queues its copies to the host.
  void forward_launched(std::size_t index);
  /// Queues what is to come back before the backward of layer `index`; makes `side` wait for all that it must be behind.
  void before_backward(std::size_t index, c10::Stream side);
  /// Behind its launch.
  void backward_launched(std::size_t index);
  /// Makes `stream` wait for all copies that no graph has waited for.
  void join(c10::Stream stream);
  /// Blocks the host until the copies of layer `index` are done, and forgets them.
  void reset(std::size_t index);
  [[nodiscard]] Counts take_counts() noexcept { return std::exchange(counts_, {}); }

 private:
  void wait(c10::Stream side, const Event& event);
  /// True where the graph at `place` may use the memory that the copies of layer `index` come back to.
  [[nodiscard]] bool may_use_targets(std::size_t place, std::size_t index) const;
  [[nodiscard]] bool is_due(std::size_t index, std::size_t backward) const;
  void bring_back(std::size_t index);
  void settle(const OwnedStream& copies) noexcept;

  std::shared_ptr<Runtime> runtime_;
  std::vector<Layer>& layers_;
  OwnedStream to_host_;
  OwnedStream to_device_;
  Event fork_;
  Counts counts_;
};

}  // namespace sidestream
