#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "memory/host_arena.h"
#include "offload/group_mover.h"
#include "offload/saved_storage.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Bytes that one storage takes of a block. Each starts as aligned as an allocation of its own, as kernels expect.
[[nodiscard]] constexpr std::size_t bytes_in_block(std::size_t bytes) {
  return (bytes + HostArena::alignment - 1) / HostArena::alignment * HostArena::alignment;
}

/// True if the small storages of a group that has ended are offloaded: they have `block_from` bytes together.
[[nodiscard]] bool is_offloaded_as_block(const Group& group);

/// The storages below `Options::min_bytes` that one group saved, copied into one. It is offloaded and reloaded in their place, and is
/// alive until the last of them is no longer needed.
///
/// Ordering: the copy runs on the stream that saved the first of them, after the other streams that saved any. A reader of the block on
/// another stream, before the block was offloaded and reloaded, waits for that first stream.
struct SmallBlock {
  std::shared_ptr<SavedStorage> storage;  ///< with its lease; null if nothing is offloaded
  std::vector<std::shared_ptr<SavedStorage>> members;

  /// Where the device has no room for a block.
  enum class NoRoom : std::uint8_t { stays, is_thrown };

  /// Gathers what is to be offloaded of `group`. If pinned memory is short, as much as finds room, in order; the others stay and the group
  /// counts them. Nothing changes for the members. Capture: legal. Throws: what the operators throw; nothing is offloaded then.
  /// `shared`: see GroupMover::lease.
  [[nodiscard]] static SmallBlock gather(GroupMover& mover, Runtime& runtime, Group& group, NoRoom no_room,
                                         SharedSlots::Share* shared = nullptr);
  /// From here on the members' bytes are the block's. Their memory is not handed out again before what `streams` have queued is done.
  void replace_members(const Streams& streams) const;

  [[nodiscard]] explicit operator bool() const noexcept { return storage != nullptr; }
};

}  // namespace sidestream
