#pragma once
#include <functional>
#include <initializer_list>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

namespace sidestream::testing_model {

/// Passes `h` through one offload scope a name; each saves two storages of its own: what exp and tanh give.
[[nodiscard]] at::Tensor through_scopes(at::Tensor h, std::initializer_list<const char*> names = {"first", "second",
                                                                                                  "third", "fourth"});

/// Models on two streams: `main`, current at the call, and `branch`.
struct TwoStreams {
  using Order = std::function<void(c10::Stream earlier, c10::Stream later)>;
  c10::Stream main;
  c10::Stream branch;
  Order fork;  ///< makes the branch wait for main
  Order join;  ///< and main for the branch

  /// Layers with a scope of each name that run a branch in it and join it behind the scope "between", as shared experts do.
  [[nodiscard]] at::Tensor forked_layers(const at::Tensor& x, const std::vector<const char*>& names) const;
  /// One storage is saved by operators on both streams, in the scopes "maker" and "reader".
  [[nodiscard]] at::Tensor saved_on_both(const at::Tensor& x) const;
  /// One storage is read by the backward of both streams, of the scopes "a" and "b"; what main and the branch give.
  [[nodiscard]] std::pair<at::Tensor, at::Tensor> read_back_on_both(const at::Tensor& x,
                                                                    const at::Tensor& weight) const;
};

}  // namespace sidestream::testing_model
