#include "sidestream/tensor_pool.h"

#include <algorithm>
#include <cstdio>
#include <exception>
#include <limits>
#include <list>
#include <map>
#include <mutex>
#include <sstream>
#include <string>
#include <unordered_map>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/safe_numerics.h>

#include "runtime/runtime.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

struct Key {
  std::vector<std::int64_t> sizes;
  c10::ScalarType dtype;
};
/// Looks a key up without making one.
struct KeyView {
  KeyView(c10::IntArrayRef sizes_in, c10::ScalarType dtype_in) : sizes(sizes_in), dtype(dtype_in) {}
  KeyView(const Key& key) : sizes(key.sizes), dtype(key.dtype) {}  // NOLINT: for the comparison
  c10::IntArrayRef sizes;
  c10::ScalarType dtype;
};
struct KeyLess {
  using is_transparent = void;
  bool operator()(const KeyView& a, const KeyView& b) const noexcept {
    return a.dtype != b.dtype
               ? a.dtype < b.dtype
               : std::lexicographical_compare(a.sizes.begin(), a.sizes.end(), b.sizes.begin(), b.sizes.end());
  }
};

std::string name_of(const KeyView& key) {
  std::ostringstream text;
  text << "shape " << key.sizes << " and dtype " << c10::toString(key.dtype);
  return text.str();
}

/// Throws: UsageError if no tensor can be of this shape and dtype.
void check_possible(const KeyView& key) {
  const auto refuse = [&](const char* why) {
    throw UsageError("tensor pool: there is no tensor of " + name_of(key) + why);
  };
  if (key.dtype == c10::ScalarType::Undefined || key.dtype >= c10::ScalarType::NumOptions) {
    refuse("; name a dtype");
  }
  if (c10::isQIntType(key.dtype)) {
    refuse(
        ": a pool gives memory, but no scale and zero point; allocate kByte, kChar or kInt, and keep the integers of "
        "quantised tensors (int_repr) there");
  }
  if (std::any_of(key.sizes.begin(), key.sizes.end(), [](std::int64_t size) { return size < 0; })) {
    refuse("; each size must be 0 or more");
  }
  std::uint64_t bytes = c10::elementSize(key.dtype);
  const bool overflows = std::any_of(key.sizes.begin(), key.sizes.end(), [&](std::int64_t size) {
    return c10::mul_overflows(bytes, static_cast<std::uint64_t>(std::max<std::int64_t>(size, 1)), &bytes);  // strides
  });
  if (overflows || bytes > std::numeric_limits<std::int64_t>::max()) {
    refuse(": its bytes are too many for a 64-bit number; use smaller sizes");
  }
}

}  // namespace

struct TensorPool::State {
  struct Entry;
  using Entries = std::list<Entry>;
  /// All tensors of one shape and dtype. An entry changes from list to list without an allocation.
  struct Shelf {
    Entries free;  // the first is free for longest
    Entries in_use;
  };
  struct Entry {
    at::Tensor tensor;  // never handed out: each user gets a tensor of its own that shares the storage
    Event last_use;
    std::optional<c10::Stream> stream;  // of the last use. Not set: nothing to wait for
    Shelf* shelf;
    bool in_use = false;
  };
  using Shelves = std::map<Key, Shelf, KeyLess>;

  /// `stream`, or the current one. Neither may capture.
  [[nodiscard]] c10::Stream usable(std::optional<c10::Stream> stream, const char* function) const {
    const c10::Stream current = runtime->current_stream();
    for (const c10::Stream used : {current, stream.value_or(current)}) {
      if (runtime->capture_status(used) != CaptureStatus::none) {
        throw UsageError(std::string("tensor pool: ") + function +
                         "() on a stream that captures: the graph would use memory that the pool hands out again. "
                         "Allocate before the capture, and free after the last launch of the graph");
      }
    }
    return stream.value_or(current);
  }

  [[nodiscard]] at::Tensor make_tensor(const KeyView& key, c10::Stream on) const {
    const c10::InferenceMode normal(false);  // else the tensor could never need a gradient
    const auto options = c10::TensorOptions().dtype(key.dtype);
    if (memory == Memory::device) {
      const StreamGuard current(*runtime, on);  // the caching allocator orders the block's reuse with this stream
      at::Tensor tensor = at::empty(key.sizes, options.device(runtime->device()));
      tensor.storage().unsafeGetStorageImpl()->set_resizable(false);
      return tensor;
    }
    const std::size_t bytes = at::detail::computeStorageNbytesContiguous(key.sizes, c10::elementSize(key.dtype));
    auto pinned = std::make_shared<PinnedMemory>(runtime->allocate_pinned(bytes));
    void* const data = pinned->data();
    return at::from_blob(
        data, key.sizes, [runtime = runtime, pinned = std::move(pinned)](void*) mutable { pinned.reset(); },
        options.device(c10::kCPU), c10::Device(c10::kCPU));
  }

  /// Adds a free tensor, and its shelf if there is none. An exception adds neither.
  Shelves::iterator grow(const KeyView& key, c10::Stream on) {
    check_possible(key);
    Entries made;
    Entry& entry = made.emplace_back(Entry{make_tensor(key, on), runtime->create_event(), {}, nullptr});
    if (memory == Memory::device) {  // until then the caching allocator's earlier user of the block may run
      runtime->record(entry.last_use, on);
      entry.stream = on;
    }
    Shelves::iterator shelf = shelves.find(key);
    if (shelf == shelves.end()) {
      shelf = shelves.emplace(Key{key.sizes.vec(), key.dtype}, Shelf()).first;
    }
    entry.shelf = &shelf->second;
    by_storage.emplace(entry.tensor.storage().unsafeGetStorageImpl(), made.begin());
    shelf->second.free.splice(shelf->second.free.end(), made);
    counts.total += 1;
    counts.bytes += static_cast<std::int64_t>(entry.tensor.nbytes());
    counts.allocations_after_seal += sealed ? 1 : 0;
    return shelf;
  }

  /// Of one shape and dtype.
  [[nodiscard]] TensorPoolStatus status_of(const KeyView& key) const {
    const auto found = shelves.find(key);
    return found == shelves.end() ? TensorPoolStatus{key.sizes.vec(), key.dtype, 0, 0} : status_of(*found);
  }

  [[noreturn]] void refuse(const KeyView& key) const {
    const auto found = shelves.find(key);
    const std::size_t in_use = found == shelves.end() ? 0 : found->second.in_use.size();
    throw UsageError("tensor pool: no tensor of " + name_of(key) + " is free (" + std::to_string(in_use) +
                     " in use, 0 free), and the pool is sealed. Free one first, or plan() more of them before seal()");
  }

  void put_back(Entries::iterator entry) noexcept {
    entry->in_use = false;
    Shelf& shelf = *entry->shelf;
    shelf.free.splice(shelf.free.end(), shelf.in_use, entry);
    counts.in_use -= 1;
  }

  void clear() {
    const auto tell_allocator = [](const Entries& entries) {
      for (const Entry& entry : entries) {
        if (entry.tensor.is_cpu() || !entry.stream || entry.tensor.nbytes() == 0) {
          continue;  // host memory waits for the device when it is freed
        }
        entry.tensor.record_stream(*entry.stream);
      }
    };
    for (const auto& [key, shelf] : shelves) {
      tell_allocator(shelf.free);
      tell_allocator(shelf.in_use);
    }
    by_storage.clear();
    shelves.clear();
    counts.total = counts.in_use = counts.bytes = 0;
    sealed = false;
    was_cleared = true;
  }

  [[nodiscard]] static TensorPoolStatus status_of(const Shelves::value_type& shelf) {
    const auto used = static_cast<std::int64_t>(shelf.second.in_use.size());
    return {shelf.first.sizes, shelf.first.dtype, used + static_cast<std::int64_t>(shelf.second.free.size()), used};
  }

  Memory memory;
  std::shared_ptr<Runtime> runtime;
  mutable std::mutex mutex;
  Shelves shelves;
  std::unordered_map<const c10::StorageImpl*, Entries::iterator> by_storage;
  TensorPoolStatistics counts;
  bool sealed = false;
  bool was_cleared = false;
};

TensorPool::TensorPool(Memory memory, c10::Device device) : state_(std::make_unique<State>()) {
  state_->memory = memory;
  state_->runtime = make_runtime(device);
}

TensorPool::~TensorPool() {
  try {
    state_->clear();
  } catch (const std::exception& error) {
    std::fprintf(stderr, "sidestream: a tensor pool frees its memory without regard to its last uses: %s\n",
                 error.what());
  }
}

at::Tensor TensorPool::allocate(c10::IntArrayRef sizes, c10::ScalarType dtype, std::optional<c10::Stream> stream) {
  const c10::Stream on = state_->usable(stream, "allocate");
  const KeyView key(sizes, dtype);
  const std::lock_guard lock(state_->mutex);
  State::Shelves::iterator shelf = state_->shelves.find(key);
  const bool hit = shelf != state_->shelves.end() && !shelf->second.free.empty();
  state_->counts.allocation_requests += 1;
  (hit ? state_->counts.hits : state_->counts.misses) += 1;
  if (!hit) {
    if (state_->sealed) {
      state_->refuse(key);
    }
    shelf = state_->grow(key, on);
  }
  State::Entries& free = shelf->second.free;
  State::Entry& entry = free.front();
  if (entry.stream && *entry.stream != on) {
    state_->runtime->wait(on, entry.last_use);
  }
  at::Tensor tensor(entry.tensor.unsafeGetTensorImpl()->shallow_copy_and_detach(c10::VariableVersion(0), true));
  entry.stream = on;
  entry.in_use = true;
  shelf->second.in_use.splice(shelf->second.in_use.end(), free, free.begin());
  state_->counts.in_use += 1;
  return tensor;
}

void TensorPool::free(const at::Tensor& tensor, std::optional<c10::Stream> stream) {
  const c10::Stream on = state_->usable(stream, "free");
  const std::lock_guard lock(state_->mutex);
  state_->counts.free_requests += 1;
  const auto found = tensor.defined() && tensor.has_storage()
                         ? state_->by_storage.find(tensor.storage().unsafeGetStorageImpl())
                         : state_->by_storage.end();
  if (found == state_->by_storage.end()) {
    throw UsageError(std::string("tensor pool: free() of a tensor that this pool did not allocate") +
                     (state_->was_cleared ? ", or allocated before clear()" : "") +
                     "; free it into the pool that allocated it, or just drop it");
  }
  State::Entry& entry = *found->second;
  if (!entry.in_use) {
    throw UsageError("tensor pool: free() of a tensor of " +
                     name_of({entry.tensor.sizes(), entry.tensor.scalar_type()}) +
                     " that is already free; free each allocated tensor once");
  }
  state_->runtime->record(entry.last_use, on);
  entry.stream = on;
  state_->put_back(found->second);
}

void TensorPool::plan(c10::IntArrayRef sizes, c10::ScalarType dtype, std::int64_t count) {
  const c10::Stream on = state_->usable(std::nullopt, "plan");
  const std::lock_guard lock(state_->mutex);
  if (state_->sealed) {
    throw UsageError("tensor pool: plan() after seal(); plan every shape before the pool is sealed");
  }
  const KeyView key(sizes, dtype);
  check_possible(key);
  if (count < 0) {
    throw UsageError("tensor pool: plan() of " + std::to_string(count) + " tensors of " + name_of(key) +
                     "; the count must be 0 or more");
  }
  while (state_->status_of(key).total < count) {
    state_->grow(key, on);
  }
}

void TensorPool::seal() noexcept {
  const std::lock_guard lock(state_->mutex);
  state_->sealed = true;
}

void TensorPool::reset() {
  const c10::Stream on = state_->usable(std::nullopt, "reset");
  const std::lock_guard lock(state_->mutex);
  for (const auto& [key, shelf] : state_->shelves) {
    for (const State::Entry& entry : shelf.in_use) {
      if (entry.tensor.storage().use_count() > 1) {
        throw UsageError("tensor pool: reset() while a tensor of " + name_of(key) +
                         " is in use and still referenced; free() it, or drop all references to it and its views");
      }
    }
  }
  for (auto& [key, shelf] : state_->shelves) {
    while (!shelf.in_use.empty()) {
      State::Entry& entry = shelf.in_use.front();
      state_->runtime->record(entry.last_use, on);
      entry.stream = on;
      state_->put_back(shelf.in_use.begin());
    }
  }
}

void TensorPool::clear() {
  const std::lock_guard lock(state_->mutex);
  state_->clear();
}

std::vector<TensorPoolStatus> TensorPool::status() const {
  const std::lock_guard lock(state_->mutex);
  std::vector<TensorPoolStatus> all;
  all.reserve(state_->shelves.size());
  for (const auto& shelf : state_->shelves) {
    all.push_back(State::status_of(shelf));
  }
  return all;
}

TensorPoolStatus TensorPool::status(c10::IntArrayRef sizes, c10::ScalarType dtype) const {
  const std::lock_guard lock(state_->mutex);
  return state_->status_of(KeyView(sizes, dtype));
}

TensorPoolStatistics TensorPool::statistics() const {
  const std::lock_guard lock(state_->mutex);
  return state_->counts;
}

}  // namespace sidestream
