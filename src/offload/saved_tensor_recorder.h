#pragma once
#include <cstdint>
#include <exception>
#include <memory>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>

#include "analysis/planner.h"
#include "memory/storage_view.h"
#include "offload/autograd_engine.h"
#include "offload/exclusion_tallies.h"
#include "offload/exclusions.h"
#include "offload/planned_pass.h"
#include "offload/recorder_books.h"
#include "offload/saved_storage.h"
#include "offload/scope_tree.h"

namespace sidestream {

/// Hears which scope is the innermost one of a pass.
class ScopeListener {
 public:
  ScopeListener() = default;
  ScopeListener(const ScopeListener&) = delete;
  ScopeListener& operator=(const ScopeListener&) = delete;
  virtual ~ScopeListener() = default;
  /// Work from here on is inside of `scope`.
  virtual void in_scope(const ScopeNode& scope) noexcept = 0;
};

/// Records the tensors that autograd saves during one forward pass (a step's, or one capture's), sorts them into groups by scope, and hands
/// out the handles. One storage is one SavedStorage, however many tensors and groups save it.
///
/// With a planned pass, storages are offloaded if the plan says so. If it does not know a storage of an offloaded group, the
/// storage is offloaded too, as far as pinned memory is free, and counted. Without a planned pass, all groups that the options name are
/// to be offloaded.
/// Threads: the forward's; handles may be used and die on any thread, also after this object.
class SavedTensorRecorder final : public SavedTensorSource {
 public:
  struct Counts {
    std::uint64_t copied_twice_bytes = 0;
    std::uint64_t unplanned_bytes = 0;  ///< of offloaded groups, not in the plan
    std::uint64_t refused_bytes = 0;    ///< of storages that were to be offloaded and stayed: no pinned memory was free
  };

  /// `books`: of the recorder before, if any; two that are alive may not share them.
  SavedTensorRecorder(ScopeTree& tree, Exclusions& exclusions, std::shared_ptr<StorageMover> mover,
                      const PlannedPass* planned, std::shared_ptr<RecorderBooks> books = nullptr);
  ~SavedTensorRecorder() override;

  /// A scope that is open.
  using Frame = std::uint64_t;

  /// Enters a scope. `leave` ends it and its group. `discard` exits without ending the group (an exception is being thrown).
  /// Throws: a kept failure.
  Frame enter(ScopeNode* scope);
  Frame enter(std::string_view component) { return enter(tree_.child(stack_.back().scope, component)); }
  /// Its groups, a list by `next_tagged`, or null. `later`: their copies wait.
  /// Throws: errors of the copies; UsageError if it has ended, or if a scope inside of it is open (both end).
  Group* leave(Frame frame, bool later = false);
  void discard(Frame frame) noexcept;
  /// A failure that could not be thrown where it happened: logged, and thrown by the next `enter` or by `finish`.
  void keep_failure(std::exception_ptr failure) noexcept;
  /// What a program's own word about a group goes to; `function` is what the program called.
  /// Throws: UsageError in a call that is captured, now or later. Threads: any, while the forward's waits.
  [[nodiscard]] EagerOffload& by_hand(const char* function) const;
  /// Expires with this object.
  [[nodiscard]] std::weak_ptr<SavedTensorRecorder* const> alive() const noexcept { return alive_; }
  /// Puts `tensor`'s storage into the group `name` below the current scope.
  void tag(const at::Tensor& tensor, std::string_view name);
  /// Ends what is still open. No tensor is saved after this. Throws: a kept failure, what the copies throw, and UsageError for a
  /// scope that was open.
  void finish();
  /// Keeps `tensor`'s storage on the device for as long as it lives.
  void mark(const at::Tensor& tensor);
  /// See the functions of scope.h. `groups`: as `leave` gives them.
  void mark_ready(const at::Tensor& tensor);
  void release(const at::Tensor& tensor, const Group* groups);

  /// From here on `listener` is told of each scope that is entered or left; null: no listener. It must outlive this object, or be
  /// removed.
  void tell(ScopeListener* listener) noexcept { listener_ = listener; }
  /// Null: no listener.
  [[nodiscard]] ScopeListener* listener() const noexcept { return listener_; }

  /// Groups that begin while `to_be_captured` are marked so.
  bool set_to_be_captured(bool to_be_captured) noexcept { return std::exchange(to_be_captured_, to_be_captured); }

  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override;

  /// Groups and storages as met. `needed_immediately` is left false.
  [[nodiscard]] Profile profile() const;
  /// The profile's storages.
  [[nodiscard]] const std::vector<SavedIdentity>& identities() const noexcept { return identities_; }
  /// The scopes of the profile's groups.
  [[nodiscard]] std::vector<const ScopeNode*> group_scopes() const;
  /// Bytes of the distinct storages that were saved and not excluded.
  [[nodiscard]] std::uint64_t saved_bytes() const noexcept { return saved_bytes_; }
  /// Bytes of the tensors that stayed because their storages are small, counted for each tensor.
  [[nodiscard]] std::uint64_t small_bytes() const noexcept {
    return staying_.bytes(Exclusion::small) + captured_later_.bytes(Exclusion::small);
  }
  /// The record of the latest version of `storage`. Null if there is none, or if it has been freed. Threads: the forward's.
  [[nodiscard]] std::shared_ptr<const SavedStorage> saved(const c10::StorageImpl* storage) const;
  [[nodiscard]] Counts counts() const noexcept;
  /// False for the scopes of another engine.
  [[nodiscard]] bool knows_scopes_of(const ScopeTree& tree) const noexcept { return &tree_ == &tree; }
  [[nodiscard]] std::size_t depth() const noexcept { return stack_.size(); }
  /// The innermost scope that is open.
  [[nodiscard]] const ScopeNode& scope() const noexcept { return *stack_.back().scope; }
  /// Where its handles lie. Threads: the forward's.
  [[nodiscard]] BlockPool& blocks() noexcept { return books_->blocks; }

 private:
  friend class SavedTensorHandle;
  using OpenScope = RecorderBooks::OpenScope;
  using Entry = RecorderBooks::Entry;

  void place(SavedStorage& saved, Group& group);
  std::shared_ptr<SavedStorage> save(const at::Tensor& tensor, const VersionStamp& version, Group& group);
  /// The profile's indices of all records of `storage`: if it was saved in several versions, several records have it.
  [[nodiscard]] c10::SmallVector<std::size_t, 2> records_of(const Entry& latest, const c10::Storage& storage) const;
  Group& group_for(const at::Tensor& tensor);
  Group& group_of(OpenScope& open);
  Group& make_group(ScopeNode* scope);
  void end(Group* group, bool later);
  /// The groups of a scope.
  void end_all(const OpenScope& open, bool later);
  Group* leave_innermost(bool later = false);
  void tell_scope() const noexcept {
    if (listener_ != nullptr) {
      listener_->in_scope(scope());
    }
  }
  void throw_kept();

  ScopeTree& tree_;
  Exclusions& exclusions_;
  std::shared_ptr<StorageMover> mover_;
  const PlannedPass* planned_;
  std::shared_ptr<RecorderBooks> books_;
  std::vector<OpenScope>& stack_ = books_->open;
  Reused<Group>& groups_ = books_->groups;
  decltype(RecorderBooks::entries)& entries_ = books_->entries;
  decltype(RecorderBooks::tags)& tags_ = books_->tags;
  decltype(RecorderBooks::ready)& ready_ = books_->ready;
  Reused<StorageProfile>& storages_ = books_->storages;
  std::vector<SavedIdentity>& identities_ = books_->identities;
  Frame latest_ = 0;
  std::uint64_t saved_bytes_ = 0;
  bool to_be_captured_ = false;
  ScopeListener* listener_ = nullptr;
  ExclusionTallies staying_;
  ExclusionTallies captured_later_;
  Counts counts_;
  std::exception_ptr kept_failure_;
  std::shared_ptr<SavedTensorRecorder* const> alive_ =
      std::allocate_shared<SavedTensorRecorder* const>(PoolAllocator<SavedTensorRecorder* const>(books_->blocks), this);
};

/// The calling thread's recorder if a step or a capture is active; else null.
[[nodiscard]] SavedTensorRecorder* current_recorder() noexcept;

/// Makes `recorder` the thread's recorder and source of saved-tensor hooks. Null: neither scopes nor hooks do anything inside.
class [[nodiscard]] RecorderGuard {
 public:
  explicit RecorderGuard(SavedTensorRecorder* recorder)
      : entry_(recorder, recorder == nullptr ? nullptr : &recorder->blocks()),
        hooks_(recorder, recorder == nullptr ? nullptr : &recorder->blocks()) {}
  RecorderGuard(const RecorderGuard&) = delete;
  RecorderGuard& operator=(const RecorderGuard&) = delete;
  ~RecorderGuard() = default;

 private:
  ThreadStack<SavedTensorRecorder>::Entry entry_;
  SavedTensorGuard hooks_;
};

/// Groups that begin in its lifetime belong to a call that is captured later. Null: does nothing.
class [[nodiscard]] CapturedLater {
 public:
  explicit CapturedLater(SavedTensorRecorder* recorder) noexcept
      : recorder_(recorder), before_(recorder != nullptr && recorder->set_to_be_captured(true)) {}
  CapturedLater(const CapturedLater&) = delete;
  CapturedLater& operator=(const CapturedLater&) = delete;
  ~CapturedLater() {
    if (recorder_ != nullptr) {
      recorder_->set_to_be_captured(before_);
    }
  }

 private:
  SavedTensorRecorder* recorder_;
  bool before_;
};

/// Makes a scope of `recorder` until `end`. Left without it (by an exception), the scope is discarded.
class [[nodiscard]] RecorderScope {
 public:
  RecorderScope(SavedTensorRecorder& recorder, ScopeNode* scope)
      : recorder_(&recorder), frame_(recorder.enter(scope)) {}
  RecorderScope(const RecorderScope&) = delete;
  RecorderScope& operator=(const RecorderScope&) = delete;
  ~RecorderScope() {
    if (recorder_ != nullptr) {
      recorder_->discard(frame_);
    }
  }
  /// Throws: as SavedTensorRecorder::leave.
  void end() { std::exchange(recorder_, nullptr)->leave(frame_); }

 private:
  SavedTensorRecorder* recorder_;
  SavedTensorRecorder::Frame frame_;
};

}  // namespace sidestream
