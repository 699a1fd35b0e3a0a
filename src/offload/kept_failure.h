#pragma once
#include <exception>

namespace sidestream {

/// Says through LibTorch's warnings what a destructor could not throw, and what becomes of it. Never throws.
void log_failure(const std::exception_ptr& failure, const char* what_next) noexcept;

}  // namespace sidestream
