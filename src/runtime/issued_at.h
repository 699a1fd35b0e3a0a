#pragma once
#include <string_view>

namespace sidestream {

/// Says for its lifetime where in the program the calling thread issues work: what a journal writes beside each operation. The
/// innermost counts. Costs two writes to a thread's own memory.
class [[nodiscard]] IssuedAt {
 public:
  /// Both must outlive this object.
  IssuedAt(std::string_view phase, std::string_view name) noexcept : phase_(phase), name_(name), before_(innermost_) {
    innermost_ = this;
  }
  IssuedAt(const IssuedAt&) = delete;
  IssuedAt& operator=(const IssuedAt&) = delete;
  ~IssuedAt() { innermost_ = before_; }

  /// Null outside of any.
  [[nodiscard]] static const IssuedAt* innermost() noexcept { return innermost_; }
  [[nodiscard]] std::string_view phase() const noexcept {
    return phase_;
  }  ///< "forward", "backward", "offload", "reload"
  [[nodiscard]] std::string_view name() const noexcept { return name_; }  ///< a call or group

 private:
  std::string_view phase_;
  std::string_view name_;
  const IssuedAt* before_;
  static inline thread_local const IssuedAt* innermost_ = nullptr;
};

}  // namespace sidestream
