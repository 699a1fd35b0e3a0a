#include "observe/external_reads.h"

#include <algorithm>
#include <utility>

#include <ATen/EmptyTensor.h>
#include <c10/core/TensorImpl.h>

#include "runtime/composite.h"

namespace sidestream {
namespace {

// The storage that a tensor argument stands for; null for none. A wrapped number is a value that the operator takes along.
const c10::StorageImpl* storage_of(const at::Tensor& tensor) {
  const c10::TensorImpl& impl = *tensor.unsafeGetTensorImpl();
  return impl.has_storage() && !impl.is_wrapped_number() ? impl.unsafe_storage().unsafeGetStorageImpl() : nullptr;
}

void add_parts(c10::SmallVector<ByteRange, 1>& known, c10::ArrayRef<ByteRange> parts) {
  for (const ByteRange& part : parts) {
    if (std::none_of(known.begin(), known.end(), [&](const ByteRange& each) { return each.contains(part); })) {
      known.push_back(part);
    }
  }
}

}  // namespace

ByteRange bytes_in_storage(const at::Tensor& tensor) {
  const std::size_t begin = static_cast<std::size_t>(tensor.storage_offset()) * tensor.element_size();
  return {begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size())};
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  return a.defined() && b.defined() && a.has_storage() && b.has_storage() && a.storage().is_alias_of(b.storage()) &&
         bytes_in_storage(a).overlaps(bytes_in_storage(b));
}

void ExternalReads::add(c10::Storage storage, bool written, c10::ArrayRef<ByteRange> parts) {
  auto at = index_.find(storage.unsafeGetStorageImpl());
  if (at == index_.end()) {
    const c10::StorageImpl* const key = storage.unsafeGetStorageImpl();
    const std::size_t bytes = storage.nbytes();
    externals_.push_back(ExternalStorage{std::move(storage), bytes, written, {}});
    at = index_.emplace(key, externals_.size() - 1).first;  // last: it names what is there, also if memory runs out
  } else if (written) {
    externals_[at->second].written = true;
  }
  add_parts(externals_[at->second].parts, parts);
}

void ExternalReads::touch(const at::Tensor& tensor, const OperatorAccess& access, bool written) {
  for_each_part(tensor, [&](const at::Tensor& part) { touch_part(part, access, written); });
}

void ExternalReads::touch_part(const at::Tensor& tensor, const OperatorAccess& access, bool written) {
  const c10::StorageImpl* const key = storage_of(tensor);
  if (key == nullptr || made_.contains(key)) {
    return;
  }
  const ByteRange part = bytes_in_storage(tensor);
  if (!access.nested || index_.contains(key)) {
    add(tensor.storage(), written, part);
    return;
  }
  const auto [at, is_new] = pending_.try_emplace(key, Pending{tensor.storage().getWeakStorageImpl(), written, {}});
  at->second.written = at->second.written || written;
  add_parts(at->second.parts, part);
}

void ExternalReads::observe_before(const OperatorAccess& access) {
  for (const at::Tensor& tensor : access.reads) {
    touch(tensor, access, false);
  }
  for (const at::Tensor& tensor : access.writes) {
    touch(tensor, access, true);
  }
}

void ExternalReads::observe(const OperatorAccess& access) {
  observe_before(access);
  const auto is_argument = [&](const c10::StorageImpl* key) {
    bool found = false;
    for (const at::Tensor& tensor : access.reads) {
      for_each_part(tensor, [&](const at::Tensor& part) { found = found || storage_of(part) == key; });
    }
    return found;
  };
  for (const at::Tensor& tensor : access.outputs) {
    for_each_part(tensor, [&](const at::Tensor& part) {
      if (const c10::StorageImpl* const key = storage_of(part); key != nullptr && !is_argument(key)) {
        made(part);
      }
    });
  }
  if (!access.nested) {
    settle_pending();
  }
}

// A kernel's own temporaries are freed when the outermost operator has ended.
void ExternalReads::settle_pending() {
  for (auto& [key, pending] : pending_) {
    if (auto alive = pending.storage.lock(); alive && !made_.contains(key)) {
      add(c10::Storage(std::move(alive)), pending.written, pending.parts);
    }
  }
  pending_.clear();
}

void ExternalReads::made(const at::Tensor& tensor) {
  if (storage_of(tensor) != nullptr) {
    made(tensor.storage());
  }
}

void ExternalReads::made(const c10::Storage& storage) {
  if (storage.unsafeGetStorageImpl() != nullptr && !index_.contains(storage.unsafeGetStorageImpl())) {
    pending_.erase(storage.unsafeGetStorageImpl());
    made_.insert(storage);
  }
}

std::vector<ExternalStorage> ExternalReads::take() {
  index_.clear();
  return std::exchange(externals_, {});
}

const ExternalStorage* ExternalReads::find(const c10::StorageImpl* storage) const noexcept {
  const auto at = index_.find(storage);
  return at == index_.end() ? nullptr : &externals_[at->second];
}

}  // namespace sidestream
