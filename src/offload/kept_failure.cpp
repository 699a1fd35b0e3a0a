#include "offload/kept_failure.h"

#include <c10/util/Exception.h>

namespace sidestream {

void log_failure(const std::exception_ptr& failure, const char* what_next) noexcept {
  try {
    try {
      std::rethrow_exception(failure);
    } catch (const std::exception& error) {
      TORCH_WARN("Sidestream: ", error.what(), " (", what_next, ")");
    } catch (...) {
      TORCH_WARN("Sidestream: an exception that is not a std::exception (", what_next, ")");
    }
  } catch (...) {  // a warning handler that throws
  }
}

}  // namespace sidestream
