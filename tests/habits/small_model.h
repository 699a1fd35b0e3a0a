#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/dropout.h>

#include "habits/action.h"
#include "sidestream/argument_traits.h"

namespace sidestream::habits {

constexpr std::int64_t kWidth = 8;

/// A user's own exception.
struct Left {};

/// What a block is given beside its input, in one.
struct Beside {
  at::Tensor context;
  double scale;
};

/// One block of a model: normalises, widens, activates, narrows. Its part says what is special about it.
class Block : public torch::nn::Module {
 public:
  enum class Part : std::uint8_t { plain, dropout, batch_norm, cached_mask, counter, default_dtype, in_place };
  static constexpr std::int64_t kParts = static_cast<std::int64_t>(Part::in_place) + 1;

  Block(Part part, c10::Device device);
  /// The block's output, and a second one.
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor given, at::Tensor context, double scale);
  std::tuple<at::Tensor, at::Tensor> forward(at::Tensor given, const Beside* beside);
  /// Tensors in plain members that the body writes.
  [[nodiscard]] std::vector<at::Tensor> unregistered() const;

  torch::nn::Dropout drop{nullptr};  ///< of the part with dropout

  /// Gives what the body reads in the place of a parameter.
  using ReadAs = std::function<at::Tensor(const std::string& name, const at::Tensor& parameter)>;
  /// From now on the body reads what `as` gives; without `as`, the parameters.
  void read(const ReadAs& as);

  std::int64_t runs = 0;  ///< of the body: a replay does not run it
  bool throws = false;    ///< the next run of the body throws Left
  bool thrown = false;    ///< it did

 private:
  at::Tensor attend(const at::Tensor& x);

  Part part_;
  at::Tensor norm_, fc1_, fc2_;
  at::Tensor mean_, variance_, scale_, shift_;
  at::Tensor mask_;   ///< made for the number of rows last seen, as attention layers cache theirs
  at::Tensor count_;  ///< of calls, in no buffer
};

/// Stem, blocks and head; a further block that is called late, if ever.
class SmallModel : public torch::nn::Module {
 public:
  SmallModel(const Setup& setup, c10::Device device);
  /// Puts a new block in the place of `index`.
  void replace(std::size_t index);
  /// As a schedule does it: the rate is an option of LibTorch's module.
  void set_dropout(double rate);
  [[nodiscard]] double dropout() const noexcept { return dropout_; }

  at::Tensor stem, head;
  std::vector<std::shared_ptr<Block>> blocks;
  std::shared_ptr<Block> late;

 private:
  Setup setup_;
  double dropout_ = 0.25;
  c10::Device device_;
  std::shared_ptr<torch::nn::Module> container_;
};

}  // namespace sidestream::habits

template <>
struct sidestream::ArgumentTraits<sidestream::habits::Beside>
    : sidestream::Members<&sidestream::habits::Beside::context, &sidestream::habits::Beside::scale> {};
