#include "runtime/named_streams.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <vector>

#include "runtime/weak_storage_set.h"

namespace sidestream::named_streams {
namespace {

struct Named {
  c10::Stream stream;
  WeakStorageSet storages;
};

struct Table {
  std::atomic<bool> any{false};
  std::mutex mutex;
  std::vector<Named> streams;
};

Table& table() {
  static auto* const table = new Table();  // storages may die after static objects
  return *table;
}

}  // namespace

void add(const c10::Storage& storage, c10::Stream stream) {
  Table& all = table();
  const std::lock_guard lock(all.mutex);
  const auto is_it = [&](const Named& named) { return named.stream == stream; };
  auto found = std::find_if(all.streams.begin(), all.streams.end(), is_it);
  if (found == all.streams.end()) {
    found = all.streams.insert(found, {stream, {}});
  }
  found->storages.insert(storage);
  all.any.store(true, std::memory_order_release);
}

c10::SmallVector<c10::Stream, 2> of(const c10::Storage& storage) {
  Table& all = table();
  if (!all.any.load(std::memory_order_acquire)) {
    return {};
  }
  c10::SmallVector<c10::Stream, 2> streams;
  const std::lock_guard lock(all.mutex);
  for (const Named& named : all.streams) {
    if (named.storages.contains(storage.unsafeGetStorageImpl())) {
      streams.push_back(named.stream);
    }
  }
  return streams;
}

}  // namespace sidestream::named_streams
