#pragma once
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <c10/core/Storage.h>

#include "runtime/weak_storage_set.h"

namespace sidestream {

/// Why a saved tensor stays on the device. `unsupported`: not a plain strided tensor (see StorageView::supported), and not one that `split`
/// (runtime/composite.h) splits into such tensors.
enum class Exclusion : std::uint8_t {
  none,
  parameter,
  small,
  marked,
  other_device,
  weight_cast,
  static_input,
  held,
  unsupported,
};
inline constexpr std::size_t exclusion_count = 9;

[[nodiscard]] const char* exclusion_name(Exclusion reason) noexcept;

/// Decides what is never offloaded, whatever the policy says. Everything is compared by storage, so a view (linear saves
/// `weight.t()`) counts as what it is a view of, and a sparse, nested or quantised tensor as its parts. Holds weak references only, except
/// to the registered parameters.
/// Threads: any.
class Exclusions {
 public:
  /// `min_bytes`: storages with fewer bytes stay.
  Exclusions(c10::Device device, std::size_t min_bytes);

  /// Registers a module's parameters and buffers in place of those before.
  void set_parameters(std::vector<at::Tensor> parameters_and_buffers);
  /// Notices parameters whose storage changed (`set_data`, `Module::to`, `load`). Call at each step's begin. True if any did.
  bool refresh_parameters();
  /// Bytes of the storages of registered parameters and buffers, on the device.
  [[nodiscard]] std::uint64_t registered_bytes() const;
  /// What the gradients will take that registered parameters on the device will have and do not yet.
  [[nodiscard]] std::int64_t gradient_bytes() const;
  /// The registered parameters and buffers that lie in `storage`: several if they are parts of one buffer.
  [[nodiscard]] std::vector<at::Tensor> registered_in(const c10::Storage& storage) const;
  /// True for a registered parameter that is a leaf, and not a view of it.
  [[nodiscard]] bool is_parameter(const at::Tensor& tensor) const;
  /// The user's mark_not_offload: for as long as the storage lives.
  void mark(const at::Tensor& tensor);
  [[nodiscard]] bool is_marked(const at::Tensor& tensor) const;
  /// A tensor that a graph reads and does not make: an input, another graph's static output, or a tensor from elsewhere.
  void add_static_input(const at::Tensor& tensor);
  void add_static_input(const c10::Storage& storage);
  void remove_static_inputs() noexcept;
  /// A storage that the program itself holds from step to step. Applies as long as the storage lives.
  void add_held(const c10::Storage& storage);

  /// The first reason that holds, of: unsupported, other_device, parameter, static_input, marked, held, weight_cast, small. For a
  /// composite leaf that requires grad: parameter. `tensor` is what the pack hook was given, with its autograd history: that history shows
  /// leaves that require grad, and casts of weights.
  /// No driver call, no operator, no allocation.
  [[nodiscard]] Exclusion classify(const at::Tensor& tensor) const;

 private:
  void rebuild_parameter_storages();

  c10::Device device_;
  std::size_t min_bytes_;
  mutable std::mutex mutex_;
  std::vector<at::Tensor> parameters_;
  std::vector<const c10::StorageImpl*> parameter_order_;
  WeakStorageSet parameter_storages_;
  WeakStorageSet marked_;
  WeakStorageSet static_inputs_;
  WeakStorageSet held_;
};

}  // namespace sidestream
