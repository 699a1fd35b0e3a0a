#pragma once
#include <memory>

#include <c10/core/Stream.h>

#include "offload/captured_copies.h"
#include "offload/group_mover.h"
#include "offload/saved_storage.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Offloads groups of captured forwards. At a scope's end the graph records when the group is ready, and the group's copies are noted.
/// The capture holds no copy over the link: replays queue these copies beside it (SequenceCopies).
///
/// Threads: one capture at a time; autograd's device thread may call `fetch` during it.
class CaptureOffload final : public StorageMover {
 public:
  CaptureOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover);

  /// A forward capture begins: its offloaded storages are noted in `copies`. `places`: where they are offloaded to.
  void begin_forward(CapturedCopies& copies, HostPlaces places) noexcept {
    copies_ = &copies;
    places_ = places;
  }
  /// The forward capture holds copies itself, from and to slots of `arena`, which lives as long as its graph.
  void copies_inside(std::shared_ptr<HostArena> arena) {
    if (copies_ != nullptr) {
      copies_->arenas.push_back(std::move(arena));
    }
  }
  /// It was captured, or failed.
  void end_forward() noexcept {
    copies_ = nullptr;
    places_ = {};
  }
  /// Lets the sources of `copies` go back to the pool: captures from here on may use their memory.
  static void release(const CapturedCopies& copies);
  /// The same for storages that no saved tensor refers to any more.
  static void release_unused(const CapturedCopies& copies);
  /// In a capture: allocates where those of `copies` are reloaded to that a backward reads, or only a graph of delayed parameters.
  /// Captures before this one may have used that memory.
  void allocate_targets(CapturedCopies& copies, bool for_weights) const;

  void group_ended(Group& group) override;
  c10::Storage fetch(SavedStorage& storage) override;
  void dropped(SavedStorage& /*storage*/) noexcept override {}

 private:
  /// Notes the copies of a storage that is to be the next in `copies_`.
  void add_copies(const SavedStorage& saved);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<GroupMover> mover_;
  CapturedCopies* copies_ = nullptr;
  HostPlaces places_;
};

}  // namespace sidestream
