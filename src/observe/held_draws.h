#pragma once
#include <memory>

#include <ATen/record_function.h>
#include <c10/core/Device.h>

namespace sidestream {

/// While one lives, operators of other threads that draw random numbers on `device` wait for its end, because the device has one
/// generator and a capture takes it. Its thread also has the device's CaptureTurn. Threads that work for a capture do not wait.
///
/// A backward pass cannot wait (autograd's thread may be the one that the capture needs), and an operator that began before knows
/// nothing of this. During a warm-up such operators draw from a separate sequence (graphs/sandbox/sandbox.h), so no number comes
/// twice. While a graph is captured the device refuses them: an error there, never a lost number.
/// Costs other threads one look at each operator meanwhile, and nothing else.  Threads: ends on the thread it began on.
class [[nodiscard]] HeldDraws {
 public:
  explicit HeldDraws(c10::Device device);
  HeldDraws(const HeldDraws&) = delete;
  HeldDraws& operator=(const HeldDraws&) = delete;
  ~HeldDraws();

  struct State;

 private:
  std::shared_ptr<State> state_;
  at::CallbackHandle callback_;
};

}  // namespace sidestream
