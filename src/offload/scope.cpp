#include "sidestream/scope.h"

#include <exception>
#include <string>

#include "offload/recorder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

void check_name(const char* name, const char* where) {
  const std::string_view text = name == nullptr ? std::string_view() : std::string_view(name);
  if (text.empty() || text.find('.') != std::string_view::npos) {
    throw UsageError(std::string(where) + ": the name \"" + std::string(text) +
                     "\" is empty or holds a dot; give one plain word, the scopes around it add the dots");
  }
}

}  // namespace

OffloadScope::OffloadScope(const char* name) {
  Recorder* recorder = current_recorder();
  if (recorder == nullptr) {
    return;
  }
  check_name(name, "OffloadScope");
  recorder->enter(name);
  recorder_ = recorder;
  exceptions_ = std::uncaught_exceptions();
}

OffloadScope::~OffloadScope() noexcept(false) {
  if (recorder_ == nullptr) {
    return;
  }
  auto& recorder = *static_cast<Recorder*>(recorder_);
  if (std::uncaught_exceptions() > exceptions_) {
    recorder.discard();
  } else {
    recorder.leave();
  }
}

at::Tensor tag(const at::Tensor& tensor, const char* name) {
  if (Recorder* recorder = current_recorder(); recorder != nullptr) {
    check_name(name, "tag");
    if (StorageView::supported(tensor)) {
      recorder->tag(tensor, name);
    }
  }
  return tensor;
}

void mark_not_offload(const at::Tensor& tensor) {
  if (Recorder* recorder = current_recorder(); recorder != nullptr) {
    recorder->mark(tensor);
  }
}

}  // namespace sidestream
