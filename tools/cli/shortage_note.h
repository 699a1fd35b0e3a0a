#pragma once
#include <string>

#include <c10/util/Exception.h>

namespace sidestream::cli {

/// Takes what the library warns of where the device ran out of memory: it belongs to the line that ends the program. Other warnings
/// go the usual way.
class ShortageNote final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    const std::string begin = "Sidestream: the device ran out of memory";
    if (warning.msg().rfind(begin, 0) == 0) {
      text_ = "; " + warning.msg().substr(begin.find("the device"));
    } else {
      c10::WarningHandler::process(warning);
    }
  }
  /// Empty, or what to put behind the error.
  [[nodiscard]] const std::string& text() const noexcept { return text_; }

 private:
  std::string text_;
};

}  // namespace sidestream::cli
