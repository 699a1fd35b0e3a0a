#include "offload/saved_tensor_recorder.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <string>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/variable.h>

#include "offload/kept_failure.h"
#include "offload/kept_memory.h"
#include "runtime/composite.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::getDeviceGuardImpl(device.type())->getStream(device);
}

/// The form of `tensor` that a handle keeps if the tensor stays. If an operator saves its own output, keeping the variable itself would
/// be a cycle. A parameter is never such an output. Of other tensors it is the form in which autograd keeps outputs.
at::Tensor kept_form(const at::Tensor& tensor, Exclusion reason, const Exclusions& exclusions) {
  if (reason == Exclusion::unsupported) {
    return tensor.detach();
  }
  return reason == Exclusion::parameter && exclusions.is_parameter(tensor) ? tensor : at::Tensor(tensor.tensor_data());
}

}  // namespace

SavedStorage::SavedStorage(std::shared_ptr<StorageMover> owner, Group* first_saver, c10::Storage storage)
    : mover(std::move(owner)),
      group(first_saver),
      device(std::move(storage)),
      streams({current_stream(device.device())}),
      bytes(device.nbytes()) {}

SavedStorage::~SavedStorage() { mover->dropped(*this); }

VersionStamp::VersionStamp(const at::Tensor& tensor)
    : counter_(tensor.is_inference() ? c10::VariableVersion() : torch::autograd::impl::version_counter(tensor)),
      version_(counter_.enabled() ? counter_.current_version() : 0) {}

void VersionStamp::put_on(const at::Tensor& tensor) const {
  if (counter_.enabled()) {
    tensor.unsafeGetTensorImpl()->set_version_counter(counter_);
  }
}

bool VersionStamp::same_as(const VersionStamp& other) const noexcept {
  return is_same(counter_, other.counter_) && version_ == other.version_;
}

/// Autograd holds this in place of one saved tensor.
class SavedTensorHandle final : public torch::autograd::SavedVariableHooks, public Pooled {
 public:
  explicit SavedTensorHandle(SavedTensorRecorder& recorder) : recorder_(&recorder) {}
  SavedTensorHandle(const SavedTensorHandle&) = delete;
  SavedTensorHandle& operator=(const SavedTensorHandle&) = delete;
  ~SavedTensorHandle() override = default;

  void call_pack_hook(const at::Tensor& tensor) override {
    SavedTensorRecorder& recorder = *std::exchange(recorder_, nullptr);
    scope_ = recorder.stack_.back().scope;
    if (is_composite(tensor) && pack_parts(recorder, tensor)) {
      return;
    }
    pack(recorder, tensor, whole_);
  }

  at::Tensor call_unpack_hook() override {
    check_unchanged(whole_);
    if (composite_ == nullptr) {
      return unpack(whole_);
    }
    c10::SmallVector<at::Tensor, 3> parts;
    for (const Plain& part : composite_->parts) {
      // Autograd does not look at the versions of parts. A part that was offloaded has the value that it was saved with.
      if (part.storage != nullptr) {
        check_unchanged(part);
      }
      parts.push_back(unpack(part));
    }
    at::Tensor rebuilt = composite_->rebuild(parts);
    whole_.version.put_on(rebuilt);
    return rebuilt;
  }

 private:
  /// A plain tensor: offloaded with its storage, or kept.
  struct Plain {
    at::Tensor kept;
    std::shared_ptr<SavedStorage> storage;
    StorageView view;
    VersionStamp version;
  };
  struct Parts {
    c10::SmallVector<Plain, 3> parts;
    std::function<at::Tensor(c10::ArrayRef<at::Tensor>)> rebuild;
  };

  void pack(SavedTensorRecorder& recorder, const at::Tensor& tensor, Plain& plain) {
    plain.version = VersionStamp(tensor);
    const Exclusion reason = recorder.exclusions_.classify(tensor);
    if (reason != Exclusion::none) {
      (recorder.to_be_captured_ ? recorder.captured_later_ : recorder.staying_).count(reason, tensor);
      plain.kept = kept_form(tensor, reason, recorder.exclusions_);
      return;
    }
    Group& group = recorder.group_for(tensor);
    scope_ = group.scope;
    plain.storage = recorder.save(tensor, plain.version, group);
    plain.view = StorageView::capture(tensor);
  }

  /// False if `tensor` stays as a whole: a leaf that requires grad stays, and `split` does not split all kinds.
  bool pack_parts(SavedTensorRecorder& recorder, const at::Tensor& tensor) {
    if (tensor.requires_grad() && tensor.is_leaf()) {
      return false;
    }
    std::optional<Composite> composite = split(tensor);
    if (!composite) {
      return false;
    }
    whole_.version = VersionStamp(tensor);
    composite_ = std::make_unique<Parts>();
    composite_->rebuild = std::move(composite->rebuild);
    composite_->parts.resize(composite->parts.size());
    for (std::size_t i = 0; i < composite->parts.size(); ++i) {
      pack(recorder, composite->parts[i], composite_->parts[i]);
    }
    return true;
  }

  void check_unchanged(const Plain& plain) const {
    if (!plain.version.unchanged()) {
      throw UsageError(
          "a tensor that backward needs, saved in \"" + (scope_->name.empty() ? "the step" : scope_->name) +
          "\", was changed in place after the forward pass saved it; clone it before the in-place operation");
    }
  }

  /// A backward that writes into the tensor in place raises the version, as in plain training: a later reader finds that out.
  static at::Tensor unpack(const Plain& plain) {
    if (plain.storage == nullptr) {
      return plain.kept;
    }
    at::Tensor tensor = plain.view.restore(plain.storage->mover->fetch(*plain.storage));
    plain.version.put_on(tensor);
    return tensor;
  }

  SavedTensorRecorder* recorder_;  // until packed
  const ScopeNode* scope_ = nullptr;
  Plain whole_;                       // of a composite only the version
  std::unique_ptr<Parts> composite_;  // null: a plain tensor, or kept as a whole
};

SavedTensorRecorder::SavedTensorRecorder(ScopeTree& tree, Exclusions& exclusions, std::shared_ptr<StorageMover> mover,
                                         const PlannedPass* planned, std::shared_ptr<RecorderBooks> books)
    : tree_(tree),
      exclusions_(exclusions),
      mover_(std::move(mover)),
      planned_(planned),
      books_(books != nullptr ? std::move(books) : std::make_shared<RecorderBooks>()) {
  books_->blocks.keep(tree.nodes());  // handles name their scopes
  stack_.emplace_back().scope = tree_.root();
}

SavedTensorRecorder::~SavedTensorRecorder() {
  for (Group& group : groups_) {
    for (const auto& weak : group.storages) {
      if (const auto saved = weak.lock()) {
        saved->group = nullptr;
      }
    }
  }
  books_->clear();
}

SavedTensorRecorder::Frame SavedTensorRecorder::enter(ScopeNode* scope) {
  throw_kept();
  OpenScope& open = stack_.emplace_back();
  open.frame = ++latest_;
  open.scope = scope;
  tell_scope();
  return latest_;
}

Group* SavedTensorRecorder::leave(Frame frame, bool later) {
  if (stack_.back().frame == frame) {
    return leave_innermost(later);
  }
  const auto of_frame = [&](const OpenScope& open) { return open.frame == frame; };
  const auto found = std::find_if(stack_.begin(), stack_.end(), of_frame);
  if (found == stack_.end()) {
    throw UsageError(
        "a scope was ended after the scope, the call or the step around it; end scopes in the reverse order of their "
        "beginning");
  }
  const std::string message = "scope \"" + found->scope->name + "\" was ended before the scope \"" +
                              stack_.back().scope->name +
                              "\" inside of it; end scopes in the reverse order of their beginning";
  while (stack_.back().frame >= frame) {
    leave_innermost();
  }
  throw UsageError(message);
}

Group* SavedTensorRecorder::leave_innermost(bool later) {
  const OpenScope open = stack_.back();
  stack_.pop_back();
  end_all(open, later);
  tell_scope();
  if (open.group == nullptr) {
    return open.first_tagged;
  }
  open.group->next_tagged = open.first_tagged;
  return open.group;
}

void SavedTensorRecorder::end_all(const OpenScope& open, bool later) {
  for (Group* group = open.first_tagged; group != nullptr; group = group->next_tagged) {
    end(group, later);
  }
  end(open.group, later);
}

void SavedTensorRecorder::discard(Frame frame) noexcept {
  while (stack_.back().frame >= frame) {
    stack_.pop_back();
  }
  tell_scope();
}

void SavedTensorRecorder::keep_failure(std::exception_ptr failure) noexcept {
  log_failure(failure, "thrown by the next scope or eager call, or by the end of the step");
  if (kept_failure_ == nullptr) {
    kept_failure_ = std::move(failure);
  }
}

void SavedTensorRecorder::throw_kept() {
  if (kept_failure_ != nullptr) {
    std::rethrow_exception(std::exchange(kept_failure_, nullptr));
  }
}

void SavedTensorRecorder::end(Group* group, bool later) {
  if (group != nullptr && !group->ended) {
    group->ended = true;
    group->ended_later = later;
    mover_->group_ended(*group);
  }
}

void SavedTensorRecorder::finish() {
  throw_kept();
  const std::string open = stack_.size() > 1 ? stack_.back().scope->name : std::string();
  while (stack_.size() > 1) {
    leave_innermost();
  }
  end_all(stack_.back(), false);
  if (!open.empty()) {
    throw UsageError("scope \"" + open +
                     "\" is still open at the end of its step (or of its capture); end it before that");
  }
}

std::unique_ptr<torch::autograd::SavedVariableHooks> SavedTensorRecorder::make_hooks() {
  return std::unique_ptr<torch::autograd::SavedVariableHooks>(new (&books_->blocks) SavedTensorHandle(*this));
}

Group& SavedTensorRecorder::make_group(ScopeNode* scope) {
  Group& group = groups_.emplace_back();
  group.scope = scope;
  group.index = static_cast<std::uint32_t>(groups_.size() - 1);
  group.to_be_captured = to_be_captured_;
  if (planned_ != nullptr && to_be_captured_) {
    group.offloads_unplanned = scope->selected;  // this once: the next step begins with its capture
  } else if (planned_ != nullptr) {
    const std::size_t turn = books_->entered[scope]++;
    const auto found = planned_->find(scope);
    if (found == planned_->end()) {
      group.offloads_unplanned = scope->selected;
      return group;
    }
    const std::vector<PlannedGroup>& turns = found->second;
    if (turn < turns.size()) {
      group.planned.begin(&turns[turn]);
    }
    // A scope entered more often than planned is another microbatch, likely: as it was with the last.
    const PlannedGroup& like = turns[std::min(turn, turns.size() - 1)];
    group.needed_immediately = like.needed_immediately;
    group.offloads_unplanned = scope->selected && like.offloads;
  }
  return group;
}

Group& SavedTensorRecorder::group_of(OpenScope& open) {
  if (open.group == nullptr) {
    open.group = &make_group(open.scope);
  }
  return *open.group;
}

Group& SavedTensorRecorder::group_for(const at::Tensor& tensor) {
  if (!tags_.empty()) {
    const auto tagged = tags_.find(tensor.storage().unsafeGetStorageImpl());
    if (tagged != tags_.end() && !tagged->second.second->ended) {
      return *tagged->second.second;
    }
  }
  return group_of(stack_.back());
}

void SavedTensorRecorder::tag(const at::Tensor& tensor, std::string_view name) {
  OpenScope& frame = stack_.back();
  ScopeNode* scope = tree_.child(frame.scope, name);
  Group* group = nullptr;
  for (Group* open = frame.first_tagged; open != nullptr; open = open->next_tagged) {
    group = open->scope == scope ? open : group;
  }
  if (group == nullptr) {
    group = &make_group(scope);
    (frame.last_tagged == nullptr ? frame.first_tagged : frame.last_tagged->next_tagged) = group;
    frame.last_tagged = group;
  }
  const c10::Storage& storage = tensor.storage();
  tags_.insert_or_assign(storage.unsafeGetStorageImpl(), std::make_pair(storage.getWeakStorageImpl(), group));
}

void SavedTensorRecorder::place(SavedStorage& saved, Group& group) {
  if (planned_ == nullptr) {
    saved.to_offload = group.scope->selected;
  } else if (const PlannedStorage* const planned = group.planned.take(saved.bytes); planned != nullptr) {
    saved.to_offload = planned->to_offload;
    saved.for_weights = planned->for_weights;
  } else if (group.scope->selected) {
    counts_.unplanned_bytes += saved.bytes;
    saved.to_offload = group.offloads_unplanned;
  }
}

std::shared_ptr<SavedStorage> SavedTensorRecorder::save(const at::Tensor& tensor, const VersionStamp& version,
                                                        Group& group) {
  const c10::Storage& storage = tensor.storage();
  const c10::StorageImpl* key = storage.unsafeGetStorageImpl();
  const auto found = entries_.find(key);
  if (found != entries_.end()) {
    auto saved = found->second.saved.lock();
    if (saved != nullptr && found->second.version.same_as(version)) {
      if (add_stream(saved->streams, current_stream(storage.device())) && saved->slot != 0) {
        keep_for(storage, saved->streams);  // its group has ended, and knows only the streams that had saved it by then
      }
      auto& savers = storages_[found->second.profile_index].savers;
      if (savers.back() != group.index) {
        savers.push_back(group.index);
      }
      return saved;
    }
    if (saved != nullptr) {
      counts_.copied_twice_bytes += saved->bytes;
    }
  }
  auto saved = std::allocate_shared<SavedStorage>(PoolAllocator<SavedStorage>(books_->blocks), mover_, &group, storage);
  place(*saved, group);
  if (!ready_.empty()) {
    if (const auto marked = ready_.find(key); marked != ready_.end() && marked->second.version.same_as(version)) {
      saved->ready = std::move(marked->second.mark);
    }
  }
  group.storages.push_back(saved);
  saved_bytes_ += saved->bytes;
  StorageProfile& profile = storages_.emplace_back();
  profile.bytes = saved->bytes;
  profile.savers.push_back(group.index);
  identities_.push_back({saved, storage.getWeakStorageImpl()});
  entries_.insert_or_assign(key, Entry{saved, storage.getWeakStorageImpl(), version, storages_.size() - 1});
  return saved;
}

SavedTensorRecorder* current_recorder() noexcept { return ThreadStack<SavedTensorRecorder>::top(); }

}  // namespace sidestream
