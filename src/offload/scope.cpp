#include "sidestream/scope.h"

#include <exception>
#include <string>
#include <utility>

#include "offload/eager_offload.h"
#include "offload/kept_failure.h"
#include "offload/saved_tensor_recorder.h"
#include "runtime/composite.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

void check_name(const char* name, const char* where) {
  const std::string_view text = name == nullptr ? std::string_view() : std::string_view(name);
  if (text.empty() || text.find('.') != std::string_view::npos) {
    throw UsageError(
        std::string(where) + ": the name \"" + std::string(text) +
        "\" is empty or contains a dot; use one word: the names of the scopes around it are added with dots");
  }
}

}  // namespace

OffloadScope::OffloadScope(const char* name) : name_(name) {
  SavedTensorRecorder* recorder = current_recorder();
  if (recorder == nullptr) {
    return;
  }
  check_name(name, "OffloadScope");
  frame_ = recorder->enter(name);
  recorder_ = recorder->alive();
  exceptions_ = std::uncaught_exceptions();
  thread_ = std::this_thread::get_id();
}

void OffloadScope::end() {
  if (frame_ != 0) {
    leave(/*later=*/false);
  }
}

void OffloadScope::end_later() {
  if (thread_ == std::thread::id()) {
    return;
  }
  if (frame_ == 0) {
    throw UsageError("OffloadScope::end_later: the scope \"" + std::string(name_) +
                     "\" has ended, and its copies may be queued already; end a scope once, with end() or end_later()");
  }
  leave(/*later=*/true);
}

void OffloadScope::leave(bool later) {
  if (thread_ != std::this_thread::get_id()) {
    throw UsageError("OffloadScope \"" + std::string(name_) +
                     "\" was ended on another thread than the one it began on; end it on the thread that it began on, "
                     "before its step ends");
  }
  const auto alive = recorder_.lock();
  if (alive != nullptr && later) {
    (void)(*alive)->by_hand("OffloadScope::end_later");
  }
  const std::uint64_t frame = std::exchange(frame_, 0);
  if (alive == nullptr) {
    throw UsageError("OffloadScope \"" + std::string(name_) +
                     "\" was ended after its step; end it before the step ends");
  }
  groups_ = (*alive)->leave(frame, later);
}

OffloadScope::~OffloadScope() {
  if (frame_ == 0) {
    return;
  }
  if (thread_ != std::this_thread::get_id()) {
    // The recorder is another thread's. It still holds the scope open, which the end of the step finds.
    log_failure(std::make_exception_ptr(UsageError("OffloadScope \"" + std::string(name_) +
                                                   "\" was destroyed on another thread than it began on")),
                "the end of its step will throw an error");
    return;
  }
  const auto alive = recorder_.lock();
  if (alive == nullptr) {
    return;  // the end of its step found it open
  }
  SavedTensorRecorder& recorder = **alive;
  if (std::uncaught_exceptions() > exceptions_) {
    recorder.discard(frame_);
    return;
  }
  try {
    recorder.leave(frame_);
  } catch (...) {
    recorder.keep_failure(std::current_exception());
  }
}

SavedTensorRecorder* OffloadScope::ended(const char* function) const {
  if (thread_ == std::thread::id()) {
    return nullptr;
  }
  if (frame_ != 0) {
    throw UsageError(std::string(function) + ": the scope \"" + name_ +
                     "\" has not ended, so its group is not complete; call end() or end_later() first");
  }
  const auto alive = recorder_.lock();
  if (alive == nullptr) {
    throw UsageError(std::string(function) + ": the step of the scope \"" + name_ +
                     "\" has ended, and with it all that was to be copied; use the handle before that");
  }
  return *alive;
}

void OffloadScope::by_hand(const char* function, void (EagerOffload::*act)(const Group&)) const {
  if (SavedTensorRecorder* recorder = ended(function); recorder != nullptr) {
    EagerOffload& eager = recorder->by_hand(function);
    for (const Group* group = groups_; group != nullptr; group = group->next_tagged) {
      (eager.*act)(*group);
    }
  }
}

void OffloadScope::start_offload() { by_hand("OffloadScope::start_offload", &EagerOffload::start_offload); }

void OffloadScope::finish_offload() { by_hand("OffloadScope::finish_offload", &EagerOffload::finish_offload); }

void OffloadScope::start_reload() { by_hand("OffloadScope::start_reload", &EagerOffload::start_reload); }

void OffloadScope::release(const at::Tensor& tensor) {
  SavedTensorRecorder* const recorder = ended("OffloadScope::release");
  if (recorder == nullptr) {
    return;
  }
  if (thread_ != std::this_thread::get_id()) {
    throw UsageError("OffloadScope::release: the scope \"" + std::string(name_) +
                     "\" began on another thread; release tensors on the thread that the scope began on");
  }
  recorder->release(tensor, groups_);
}

at::Tensor tag(const at::Tensor& tensor, const char* name) {
  if (SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr) {
    check_name(name, "tag");
    for_each_part(tensor, [&](const at::Tensor& part) {
      if (StorageView::supported(part)) {
        recorder->tag(part, name);
      }
    });
  }
  return tensor;
}

void offload_delayed() {
  if (const SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr) {
    recorder->by_hand("offload_delayed").send_delayed();
  }
}

void mark_ready(const at::Tensor& tensor) {
  if (SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr) {
    recorder->mark_ready(tensor);
  }
}

void mark_not_offload(const at::Tensor& tensor) {
  if (SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr) {
    recorder->mark(tensor);
  }
}

}  // namespace sidestream
