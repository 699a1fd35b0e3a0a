#pragma once
#include <array>
#include <cstddef>
#include <cstdint>

#include <ATen/core/Tensor.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/util/ArrayRef.h>

namespace sidestream {

/// Which arguments of one call share memory: for each argument the index of an earlier argument that is the same tensor, or that lies in
/// the same storage. If there is no such argument, its own index.
struct InputAliases {
  class InTurn;

  std::size_t same_as = 0;
  std::size_t shares_with = 0;

  [[nodiscard]] static InputAliases of(c10::ArrayRef<at::Tensor> inputs, std::size_t index) noexcept;
  bool operator==(const InputAliases& other) const noexcept = default;
};

/// The aliases of all arguments of a call, from the first on, without allocation and in time linear in them up to 256 of them; of more,
/// each is compared with all before it.
class InputAliases::InTurn {
 public:
  explicit InTurn(c10::ArrayRef<at::Tensor> inputs) noexcept : inputs_(inputs), few_(is_few(inputs.size())) {
    if (!few_) {
      tensors_.fill(0);
      storages_.fill(0);
    }
  }
  /// Of the next argument: what InputAliases::of says.
  [[nodiscard]] InputAliases next() noexcept;

 private:
  static constexpr std::size_t kPlaces = 512;        ///< of a table
  using Table = std::array<std::uint16_t, kPlaces>;  ///< index + 1 of an argument, by hash; 0 if there is no argument

  /// Fewer cost less when compared one by one; more would crowd the tables.
  [[nodiscard]] static constexpr bool is_few(std::size_t count) noexcept { return count <= 8 || count > kPlaces / 2; }
  /// The first argument that is at `key` as argument `index` is, which is entered if there is none.
  template <class KeyOf>
  [[nodiscard]] std::size_t first_at(Table& table, const void* key, std::size_t index, const KeyOf& key_of) noexcept;

  c10::ArrayRef<at::Tensor> inputs_;
  std::size_t next_ = 0;
  bool few_;
  Table tensors_;
  Table storages_;
};

/// True for sparse and nested tensors.
[[nodiscard]] inline bool is_sparse_or_nested(const at::Tensor& tensor) noexcept {
  constexpr c10::DispatchKeySet keys(
      {c10::DispatchKey::Sparse, c10::DispatchKey::SparseCsr, c10::DispatchKey::NestedTensor});
  return tensor.defined() && tensor.key_set().has_any(keys);
}

/// True for a leaf that requires a gradient. Autocast keeps the cast of such a tensor and shares it among all its readers. The gradients
/// of several readers then meet before the cast's backward, not after it.
[[nodiscard]] bool has_shared_cast(const at::Tensor& tensor);

/// True if both have the same strides where they matter. Their sizes must be the same.
[[nodiscard]] bool same_strides(const at::Tensor& a, const at::Tensor& b);

/// The same, and neither is lazily conjugated or negated unlike the other.
[[nodiscard]] bool same_layout(const at::Tensor& a, const at::Tensor& b);

}  // namespace sidestream
