#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/SmallVector.h>

namespace sidestream {

/// In what the model differs from what a capture froze of it.
struct FactsChange {
  bool training = false;       ///< training flags
  bool requires_grad = false;  ///< frozen, or trained again
  bool relocated = false;      ///< the same tensors in other memory
  bool identity = false;       ///< other modules, parameters or buffers are registered
  bool layout = false;         ///< another dtype, shape, layout or device
  bool options = false;        ///< numbers of LibTorch's modules: a dropout rate

  [[nodiscard]] bool any() const noexcept { return training || requires_grad || options || stale(); }
  /// True if modules behave in another way: their training flags or their options differ.
  [[nodiscard]] bool other_mode() const noexcept { return training || options; }
  /// True if the capture reads what is no longer the model's: it replays never again.
  [[nodiscard]] bool stale() const noexcept { return relocated || identity || layout; }
  /// True if it is enough to capture the same call again, at its weights' present addresses.
  [[nodiscard]] bool only_relocated() const noexcept {
    return relocated && !identity && !layout && !requires_grad && !options;
  }
  FactsChange& operator|=(const FactsChange& other) noexcept;
};

/// A parameter, a buffer, or another tensor of the model that a graph reads at its address.
class TensorFacts {
 public:
  explicit TensorFacts(at::Tensor tensor);
  /// Allocates nothing.
  [[nodiscard]] FactsChange change() const noexcept;
  /// Adds the changes of all `tensors` to `all`. In nearly all steps nothing changed. Then this is all that a replay does for its
  /// weights: one pass over facts that are contiguous in memory, and over the tensors, which are prefetched.
  static void add_changes(const std::vector<TensorFacts>& tensors, FactsChange& all) noexcept;
  [[nodiscard]] const at::Tensor& tensor() const noexcept { return tensor_; }
  [[nodiscard]] bool requires_grad() const noexcept { return requires_grad_; }
  void expect_requires_grad(bool requires_grad) noexcept { requires_grad_ = requires_grad; }
  /// "is BFloat16, was Float"; empty if nothing changed. Allocates.
  [[nodiscard]] std::string difference() const;

 private:
  using Numbers = c10::SmallVector<std::int64_t, 4>;
  /// True if nothing about a tensor with memory has changed. Nearly all replays find this, without a search for the change.
  [[nodiscard]] bool as_it_was() const noexcept;
  void ask_ahead() const noexcept;

  // In the order in which a replay looks at them.
  at::Tensor tensor_;
  const void* address_ = nullptr;  ///< null if the memory has no single address (undefined, sparse)
  c10::DispatchKeySet keys_;       ///< layout, device, conjugate and negative bits
  const void* memory_ = nullptr;   ///< of its storage, where `address_` lies
  std::int64_t offset_ = 0;        ///< of its first element there
  caffe2::TypeMeta type_;
  bool requires_grad_ = false;
  c10::ScalarType dtype_ = c10::ScalarType::Undefined;
  c10::Device device_ = c10::Device(c10::DeviceType::CPU);
  Numbers sizes_;
  Numbers strides_;
};

}  // namespace sidestream
