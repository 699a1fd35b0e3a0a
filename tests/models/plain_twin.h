#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include <ATen/core/Tensor.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "sidestream/chunk.h"

namespace sidestream {
class OffloadEngine;
}

namespace sidestream::testing_model {

/// One tensor that a step has given, on the host; undefined where there is none.
struct StepTensor {
  StepTensor(std::string of, const at::Tensor& tensor);
  std::string name;
  at::Tensor value;
};
using StepTensors = std::vector<StepTensor>;

/// Copies of all gradients, in the order of named_parameters().
[[nodiscard]] StepTensors gradients(const torch::nn::Module& model);
/// Copies of all gradients and of all buffers.
[[nodiscard]] StepTensors gradients_and_buffers(const torch::nn::Module& model);
/// Copies of tensors that a test holds, to compare with `same`.
[[nodiscard]] StepTensors values(const std::vector<at::Tensor>& tensors);
/// Sets all gradients to none.
void clear_gradients(torch::nn::Module& model);
/// Gives each parameter other memory, with the same values.
void relocate(const torch::nn::Module& model);
/// Makes one zeroed buffer for all parameters, and calls `act(parameter, its part)` for each. Gives the buffer.
at::Tensor in_one_buffer(const torch::nn::Module& model,
                         const std::function<void(at::Tensor& parameter, const at::Tensor& part)>& act);
/// Gives all parameters parts of one buffer as their memory, with the same values.
void flatten_parameters(const torch::nn::Module& model);
/// A plain SGD step, so that every step has new weights.
void descend(torch::nn::Module& model);

/// Bit for bit, and no element is NaN. The message names the first tensor that differs and its first differing element.
[[nodiscard]] testing::AssertionResult same(const StepTensors& mine, const StepTensors& plain);

/// `run` in a step of `engine`, without a step where it is null. What the step's end throws comes out.
void in_step(OffloadEngine* engine, const std::function<void()>& run);
/// A chunk of `engine`'s step, none where it is null.
[[nodiscard]] std::optional<Chunk> chunk_of(OffloadEngine* engine, ChunkId id);

/// One step of a trainer: gradients cleared, `run` (forward and backward) as `in_step`, weights descended. Gives the gradients
/// and buffers.
StepTensors train_step(torch::nn::Module& model, OffloadEngine* engine, const std::function<void()>& run);

/// `act(model)` in a step of `engine` for `mine`, and without one for `plain`: both give the same gradients and buffers, and the same
/// tensors if `act` returns StepTensors. `s` is the number of the step, for the message.
template <class Model, class Act>
void expect_same_step(Model& mine, OffloadEngine* engine, Model& plain, std::int64_t s, const Act& act) {
  const auto all_of = [&act](Model& model, OffloadEngine* of) {
    StepTensors given;
    StepTensors all = train_step(model, of, [&] {
      if constexpr (std::is_void_v<std::invoke_result_t<const Act&, Model&>>) {
        act(model);
      } else {
        given = act(model);
      }
    });
    all.insert(all.end(), given.begin(), given.end());
    return all;
  };
  const StepTensors expected = all_of(plain, nullptr);
  EXPECT_TRUE(same(all_of(mine, engine), expected)) << "step " << s;
}

/// Each step `s` of [first, last) of a training with the engine and of its plain twin gives the same.
void expect_plain(std::int64_t first, std::int64_t last, const std::function<StepTensors(std::int64_t s)>& mine,
                  const std::function<StepTensors(std::int64_t s)>& plain);

}  // namespace sidestream::testing_model
