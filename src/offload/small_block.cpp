#include "offload/small_block.h"

#include <utility>

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_copy.h>
#include <ATen/ops/empty.h>

#include "memory/storage_view.h"
#include "offload/kept_memory.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::shared_ptr<SavedStorage> if_to_be_offloaded(const std::weak_ptr<SavedStorage>& weak) {
  auto saved = weak.lock();
  return saved != nullptr && saved->to_offload && saved->place == SavedStorage::Place::device ? saved : nullptr;
}

/// `bytes` of `storage`, from `at` on, as elements of `type`.
at::Tensor part_of(const c10::Storage& storage, std::size_t at, std::size_t bytes, c10::ScalarType type) {
  StorageView view;
  view.sizes.push_back(static_cast<std::int64_t>(bytes / c10::elementSize(type)));
  view.strides.push_back(1);
  view.dtype = type;
  view.keys = c10::DispatchKeySet(c10::computeDispatchKey(type, c10::kStrided, storage.device()));
  return view.restore(storage, at);
}

/// A copy of many storages by one kernel has one type: the widest for those whose size it divides, bytes for the others.
void copy_members(const SmallBlock& block) {
  for (const c10::ScalarType type : {c10::ScalarType::Long, c10::ScalarType::Byte}) {
    std::vector<at::Tensor> to;
    std::vector<at::Tensor> from;
    std::size_t at = 0;
    for (const auto& saved : block.members) {
      if ((saved->bytes % sizeof(std::int64_t) == 0) == (type == c10::ScalarType::Long)) {
        to.push_back(part_of(block.storage->device, at, saved->bytes, type));
        from.push_back(part_of(saved->device, 0, saved->bytes, type));
      }
      at += bytes_in_block(saved->bytes);
    }
    if (!to.empty()) {
      at::_foreach_copy_(to, from, /*non_blocking=*/true);
    }
  }
}

/// Allocates by an operator, so observers of a capture see that it makes this memory. Null if the device has no room and that is not
/// thrown.
c10::Storage allocate_block(c10::Device device, std::size_t bytes, SmallBlock::NoRoom no_room) {
  try {
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(at::kByte).device(device)).storage();
  } catch (const c10::OutOfMemoryError&) {
    if (no_room == SmallBlock::NoRoom::is_thrown) {
      throw;
    }
  } catch (const DeviceError&) {  // how the simulated device says it
    if (no_room == SmallBlock::NoRoom::is_thrown) {
      throw;
    }
  }
  return {};
}

}  // namespace

bool is_offloaded_as_block(const Group& group) {
  std::size_t bytes = 0;
  for (const auto& weak : group.small) {
    const auto saved = if_to_be_offloaded(weak);
    bytes += saved != nullptr ? saved->bytes : 0;
  }
  return bytes > 0 && bytes >= group.block_from;
}

SmallBlock SmallBlock::gather(GroupMover& mover, Runtime& runtime, Group& group, NoRoom no_room,
                              SharedSlots::Share* shared) {
  if (!is_offloaded_as_block(group)) {
    return {};
  }
  SmallBlock block;
  std::size_t bytes = 0;
  for (const auto& weak : group.small) {
    if (auto saved = if_to_be_offloaded(weak); saved != nullptr) {
      bytes += bytes_in_block(saved->bytes);
      block.members.push_back(std::move(saved));
    }
  }
  HostPlace place = mover.lease_block(group, bytes, shared);
  const std::size_t room = place.bytes();
  bytes = 0;
  std::erase_if(block.members, [&](const std::shared_ptr<SavedStorage>& saved) {
    if (bytes + bytes_in_block(saved->bytes) <= room) {
      bytes += bytes_in_block(saved->bytes);
      return false;
    }
    saved->to_offload = false;
    group.refused_bytes += saved->bytes;
    return true;
  });
  if (block.members.empty()) {
    return {};
  }
  Streams streams;
  for (const auto& saved : block.members) {
    for (const c10::Stream stream : saved->streams) {
      add_stream(streams, stream);
    }
  }
  const StreamGuard on_saver(runtime, streams.front());
  const at::NoGradGuard no_grad;
  const at::AutoDispatchBelowADInplaceOrView below_autograd;
  c10::Storage memory = allocate_block(runtime.device(), bytes, no_room);
  if (!memory) {
    return {};
  }
  block.storage = std::make_shared<SavedStorage>(block.members.front()->mover, &group, std::move(memory));
  block.storage->streams = streams;
  block.storage->is_block = block.storage->to_offload = true;
  for (const c10::Stream stream : streams) {
    if (stream != streams.front()) {
      mover.order(streams.front(), stream);
    }
  }
  copy_members(block);
  block.storage->lease = std::move(place.lease);
  block.storage->parts = std::move(place.parts);
  return block;
}

void SmallBlock::replace_members(const Streams& streams) const {
  std::size_t at = 0;
  for (const auto& saved : members) {
    keep_for(saved->device, streams);
    saved->device = c10::Storage();
    saved->block = storage;
    saved->offset = at;
    saved->place = SavedStorage::Place::in_block;
    at += bytes_in_block(saved->bytes);
  }
}

}  // namespace sidestream
