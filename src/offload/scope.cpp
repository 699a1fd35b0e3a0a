#include "sidestream/scope.h"

#include <exception>
#include <string>
#include <utility>

#include "offload/kept_failure.h"
#include "offload/saved_tensor_recorder.h"
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
  if (frame_ == 0) {
    return;
  }
  if (thread_ != std::this_thread::get_id()) {
    throw UsageError("OffloadScope \"" + std::string(name_) +
                     "\" was ended on another thread than the one it began on; end it on the thread that it began on, "
                     "before its step ends");
  }
  const auto alive = recorder_.lock();
  const std::uint64_t frame = std::exchange(frame_, 0);
  if (alive == nullptr) {
    throw UsageError("OffloadScope \"" + std::string(name_) +
                     "\" was ended after its step; end it before the step ends");
  }
  (*alive)->leave(frame);
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

at::Tensor tag(const at::Tensor& tensor, const char* name) {
  if (SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr) {
    check_name(name, "tag");
    if (StorageView::supported(tensor)) {
      recorder->tag(tensor, name);
    }
  }
  return tensor;
}

void mark_not_offload(const at::Tensor& tensor) {
  if (SavedTensorRecorder* recorder = current_recorder(); recorder != nullptr) {
    recorder->mark(tensor);
  }
}

}  // namespace sidestream
