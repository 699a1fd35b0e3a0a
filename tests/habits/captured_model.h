#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

#include "habits/action.h"
#include "habits/small_model.h"

namespace sidestream::habits {

/// A block that counts how often its code runs: a replay does not run it.
class CountedBlock : public torch::nn::Module {
 public:
  CountedBlock(Block::Part part, c10::Device device);
  at::Tensor forward(const at::Tensor& h);
  std::int64_t runs = 0;

 private:
  std::shared_ptr<Block> block_;
};

/// Two blocks behind each other, to be captured by hand.
class CapturedModel : public torch::nn::Module {
 public:
  CapturedModel(const Setup& setup, c10::Device device);
  at::Tensor forward(at::Tensor h);
  /// Of all blocks.
  [[nodiscard]] std::int64_t runs() const;

  std::vector<std::shared_ptr<CountedBlock>> blocks;
};

/// Switches that a capture freezes: a trainer that turns one captures anew.
struct Switches {
  bool deterministic = false;
  bool double_by_default = false;
  [[nodiscard]] static Switches now();
  bool operator==(const Switches& other) const {
    return deterministic == other.deterministic && double_by_default == other.double_by_default;
  }
};

using NamedTensors = std::vector<std::pair<std::string, at::Tensor>>;

/// Gradients, weights and buffers.
[[nodiscard]] NamedTensors state_of(const torch::nn::Module& model);
/// Takes weights, buffers and gradients over, in place.
void copy_state(torch::nn::Module& to, const torch::nn::Module& from);
/// Subtracts a part of each gradient.
void descend(torch::nn::Module& model);
/// Data of a number, the same each time.
[[nodiscard]] at::Tensor rows_of(std::int64_t number, std::int64_t rows, c10::Device device);

}  // namespace sidestream::habits
