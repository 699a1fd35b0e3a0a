#pragma once
#include <chrono>
#include <thread>

namespace sidestream::testing_model {

/// Waits until `holds()`. For what autograd's device thread frees: it frees the last tensors of a backward some time after the backward
/// has returned, on a busy machine much later. False after a minute.
template <class Condition>
[[nodiscard]] bool eventually(const Condition& holds) {
  const auto bound = std::chrono::steady_clock::now() + std::chrono::minutes(1);
  while (!holds()) {
    if (std::chrono::steady_clock::now() > bound) {
      return false;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace sidestream::testing_model
