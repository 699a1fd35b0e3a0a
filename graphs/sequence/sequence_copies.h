#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include <c10/core/Stream.h>

#include "graphs/sequence/captured_calls.h"
#include "offload/group_mover.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Queues the copies of a sequence's replays beside its graphs, and makes each graph wait for those whose memory it uses.
///
/// Ordering: Note [Graph choreography] in graph_sequence.cpp.  Capture: illegal.  Threads: one at a time (the sequence's mutex).
/// Where a call throws, the copies that it had queued are done.
class SequenceCopies {
 public:
  /// `calls` must outlive this object.
  SequenceCopies(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover, CapturedCalls& calls);
  SequenceCopies(const SequenceCopies&) = delete;
  SequenceCopies& operator=(const SequenceCopies&) = delete;
  /// Blocks the host until the copies are done.
  ~SequenceCopies();

  /// Before the captures, when all calls are there.
  void prepare();
  [[nodiscard]] std::size_t backward_index(std::size_t call) const noexcept { return 2 * calls_.size() - 1 - call; }

  /// Makes `side` wait for all that the forward of call `index` must be behind.
  void before_forward(std::size_t index, c10::Stream side);
  /// Behind its launch: queues its copies to the host.
  void forward_launched(std::size_t index);
  /// Queues what is to come back before the backward of call `index`; makes `side` wait for all that it must be behind.
  void before_backward(std::size_t index, c10::Stream side);
  /// Behind its launch.
  void backward_launched(std::size_t index);
  /// Makes `stream` wait for all copies that no graph has waited for.
  void join(c10::Stream stream);
  /// Blocks the host until the copies of call `index` are done, and forgets them.
  void reset(std::size_t index);

 private:
  /// A call whose copies to the device were queued since the latest forward, while no graph has used their memory.
  struct Reload {
    std::size_t call = 0;
    bool awaited = false;  ///< by a graph
  };

  /// True where the graph at `graph_index` may use the memory that the copies of call `index` come back to.
  [[nodiscard]] bool may_use_targets(std::size_t graph_index, std::size_t index) const;
  [[nodiscard]] bool is_on_device(std::size_t index) const;
  /// Once behind the captures, and behind each reset: no backward then looks at calls that have nothing to bring back.
  void find_calls_with_copies();
  /// Queues what is due before the backward of call `index`, and notes it in `due_`.
  void queue_due_reloads(std::size_t index, c10::Stream side);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<GroupMover> mover_;
  CapturedCalls& calls_;
  std::vector<std::size_t> offloading_;  ///< calls whose copies to the host no graph has waited for
  std::vector<Reload> reloading_;
  std::vector<std::size_t> due_;
  std::vector<std::size_t> with_copies_;  ///< in order
  bool found_ = false;                    ///< `with_copies_` is as the calls are
};

}  // namespace sidestream
