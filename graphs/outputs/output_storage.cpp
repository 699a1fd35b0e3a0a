#include "graphs/outputs/output_storage.h"

#include <algorithm>
#include <utility>

#include <ATen/core/grad_mode.h>
#include <c10/core/StorageImpl.h>

#include "memory/storage_view.h"
#include "offload/kept_memory.h"

namespace sidestream {

OutputStorage::OutputStorage(c10::Storage captured)
    : memory_(c10::make_intrusive<ReplayedMemory>(std::move(captured))) {}

void OutputStorage::before_overwrite(Runtime& runtime, const Event& mark, Counts& counts) {
  if (!given_on_) {
    return;
  }
  if (!over_memory()) {
    given_ = c10::Storage();
  }
  const c10::Stream now = runtime.current_stream();
  const c10::Stream then = *given_on_;
  const bool held = given_ && others_hold(given_, 1);
  ReplayedMemory::Streams users = memory_->users();
  users.erase(std::remove(users.begin(), users.end(), then), users.end());
  if (held) {
    copy_out(runtime, mark, then, now, users);
    counts.copied += 1;
    counts.copied_bytes += memory_->captured().nbytes();
  } else if (given_since_) {
    counts.reused += 1;
  }
  given_since_ = false;
  if (then != now) {  // a copy is the latest on that stream
    runtime.record(mark, then);
    runtime.wait(now, mark);
  }
  for (const c10::Stream user : users) {
    if (!held && user != now) {  // a copy was behind them
      runtime.record(mark, user);
      runtime.wait(now, mark);
    }
  }
  memory_->forget_users();
}

void OutputStorage::copy_out(Runtime& runtime, const Event& mark, c10::Stream from, c10::Stream now,
                             const ReplayedMemory::Streams& users) {
  const at::NoGradGuard no_grad;
  const StreamGuard on_stream(runtime, from);
  c10::Storage copy = allocate_storage(runtime.device(), memory_->captured().nbytes());
  for (const c10::Stream user : users) {
    runtime.record(mark, user);
    runtime.wait(from, mark);
  }
  if (now != from && std::find(users.begin(), users.end(), now) == users.end()) {
    runtime.record(mark, now);
    runtime.wait(from, mark);
  }
  bytes_of(copy).copy_(bytes_of(memory_->captured()), /*non_blocking=*/true);
  if (!users.empty()) {
    runtime.record(mark, from);
    for (const c10::Stream user : users) {
      runtime.wait(user, mark);
    }
    keep_for(copy, users);
  }
  // All that can fail is done. What the held storage had goes with the pointer that is returned.
  c10::StorageImpl& held = *given_.unsafeGetStorageImpl();
  (void)held.set_data_ptr(copy.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, runtime.device())));
  moved_ = given_.getWeakStorageImpl();
  given_ = c10::Storage();
}

bool OutputStorage::gave(const c10::Storage& storage) const noexcept {
  return ReplayedMemory::of(storage.data_ptr()) == memory_.get() ||
         (moved_ && moved_->_unsafe_get_target() == storage.unsafeGetStorageImpl());
}

const c10::Storage& OutputStorage::give(c10::Stream current) {
  if (!given_) {
    given_ = memory_->make_storage();
  }
  moved_.reset();
  given_on_ = current;
  given_since_ = true;
  return given_;
}

}  // namespace sidestream
