#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>
#include <vector>

#include <c10/core/Storage.h>
#include <c10/util/flat_hash_map.h>

#include "analysis/planner.h"
#include "base/block_pool.h"
#include "offload/saved_storage.h"
#include "offload/version_stamp.h"

namespace sidestream {

/// A storage that was saved, to be looked for later.
struct SavedIdentity {
  std::weak_ptr<SavedStorage> saved;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
};

/// Elements that stay where they are, and that keep what memory they have for their next use: `begin_again` empties one.
template <class T>
class Reused {
 public:
  T& emplace_back() {
    if (used_ == all_.size()) {
      all_.emplace_back();
    }
    return all_[used_++];
  }
  void clear() {
    for (T& element : *this) {
      begin_again(element);
    }
    used_ = 0;
  }
  [[nodiscard]] std::size_t size() const noexcept { return used_; }
  [[nodiscard]] T& operator[](std::size_t index) { return all_[index]; }
  [[nodiscard]] const T& operator[](std::size_t index) const { return all_[index]; }
  [[nodiscard]] auto begin() { return all_.begin(); }
  [[nodiscard]] auto begin() const { return all_.begin(); }
  [[nodiscard]] auto end() { return all_.begin() + static_cast<std::ptrdiff_t>(used_); }
  [[nodiscard]] auto end() const { return all_.begin() + static_cast<std::ptrdiff_t>(used_); }

 private:
  std::deque<T> all_;
  std::size_t used_ = 0;
};

inline void begin_again(StorageProfile& storage) {
  std::vector<std::uint32_t> savers = std::move(storage.savers);
  savers.clear();
  storage = StorageProfile();
  storage.savers = std::move(savers);
}

/// The records of a SavedTensorRecorder. An engine keeps them from step to step: a step in the same order as the step before allocates
/// nothing from the heap.
/// Threads: one recorder at a time; see BlockPool for the contents of `blocks`.
struct RecorderBooks {
  /// A scope that is open.
  struct OpenScope {
    std::uint64_t frame = 0;
    ScopeNode* scope = nullptr;
    Group* group = nullptr;         // made by the first save
    Group* first_tagged = nullptr;  // groups of tags inside this scope, a list: they end with it
    Group* last_tagged = nullptr;
  };
  struct Entry {
    std::weak_ptr<SavedStorage> saved;
    c10::weak_intrusive_ptr<c10::StorageImpl> identity;  // keeps the address from being used again
    VersionStamp version;
    std::size_t profile_index = 0;
  };

  /// A storage whose value is complete, and that was not saved yet.
  struct Ready {
    c10::weak_intrusive_ptr<c10::StorageImpl> identity;
    VersionStamp version;
    ReadyMark mark;
  };

  void clear() {
    open.clear();
    groups.clear();
    entries.clear();
    tags.clear();
    ready.clear();
    entered.clear();
    storages.clear();
    identities.clear();
  }

  BlockPool blocks;  ///< of handles and saved storages
  std::vector<OpenScope> open;
  Reused<Group> groups;
  ska::flat_hash_map<const c10::StorageImpl*, Entry> entries;
  ska::flat_hash_map<const c10::StorageImpl*, std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, Group*>> tags;
  ska::flat_hash_map<const c10::StorageImpl*, Ready> ready;
  ska::flat_hash_map<const ScopeNode*, std::size_t> entered;  ///< groups so far by scope, if a pass is planned
  Reused<StorageProfile> storages;
  std::vector<SavedIdentity> identities;
};

}  // namespace sidestream
