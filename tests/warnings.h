#pragma once
#include <mutex>
#include <string>
#include <vector>

#include <c10/util/Exception.h>

namespace sidestream::testing_model {

/// Takes what LibTorch warns of on this thread, for its lifetime; the run does not fail for it.
class ExpectedWarnings {
 public:
  ExpectedWarnings() : guard_(&collector_) {}
  [[nodiscard]] std::vector<std::string> take() { return std::move(collector_.texts); }

 private:
  struct Collector final : c10::WarningHandler {
    void process(const c10::Warning& warning) override {
      const std::lock_guard lock(mutex);
      texts.push_back(warning.msg());
    }
    std::mutex mutex;
    std::vector<std::string> texts;
  };
  Collector collector_;
  c10::WarningUtils::WarningHandlerGuard guard_;
};

}  // namespace sidestream::testing_model
