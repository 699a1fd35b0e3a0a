#include "runtime/replayed_memory.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include <c10/core/StorageImpl.h>

namespace sidestream {
namespace {

/// The deleter of storages over replayed memory: gives back their reference to it.
void give_back(void* memory) {
  c10::intrusive_ptr<ReplayedMemory>::reclaim(static_cast<ReplayedMemory*>(memory)).reset();
}

}  // namespace

c10::Storage ReplayedMemory::make_storage() {
  c10::StorageImpl& captured = *captured_.unsafeGetStorageImpl();
  auto self = c10::intrusive_ptr<ReplayedMemory>::unsafe_reclaim_from_nonowning(this);
  c10::DataPtr data(captured.mutable_data(), self.release(), &give_back, captured.device());
  return c10::Storage(c10::make_storage_impl(
      c10::StorageImpl::use_byte_size_t{}, c10::SymInt(static_cast<std::int64_t>(captured.nbytes())), std::move(data),
      captured.allocator(), /*resizable=*/captured.allocator() != nullptr, captured.device()));
}

void ReplayedMemory::give_back_to(std::shared_ptr<const void> pool) {
  pool_ = std::move(pool);
  c10::StorageImpl& captured = *captured_.unsafeGetStorageImpl();
  (void)captured.set_data_ptr(c10::DataPtr(captured.mutable_data(), captured.device()));
}

ReplayedMemory* ReplayedMemory::of(const c10::DataPtr& data) noexcept {
  return data.get_deleter() == &give_back ? static_cast<ReplayedMemory*>(data.get_context()) : nullptr;
}

void ReplayedMemory::used_on(const c10::DataPtr& data, c10::Stream stream) {
  ReplayedMemory* const memory = of(data);
  if (memory == nullptr) {
    return;
  }
  const std::lock_guard lock(memory->mutex_);
  if (std::find(memory->users_.begin(), memory->users_.end(), stream) == memory->users_.end()) {
    memory->users_.push_back(stream);
  }
  memory->used_.store(true, std::memory_order_release);
}

ReplayedMemory::Streams ReplayedMemory::users() const {
  if (!used_.load(std::memory_order_acquire)) {
    return {};
  }
  const std::lock_guard lock(mutex_);
  return users_;
}

void ReplayedMemory::forget_users() {
  if (used_.load(std::memory_order_acquire)) {
    const std::lock_guard lock(mutex_);
    users_.clear();
    used_.store(false, std::memory_order_release);
  }
}

}  // namespace sidestream
