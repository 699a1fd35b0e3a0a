#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <sidestream/pipeline_order.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace pipeline {

/// Runs one rank's order of a pipeline's chunks, and passes tensors to and from the other ranks.
class Pipeline {
 public:
  /// A virtual stage of this rank on one microbatch. `input` is not set in the first part of the model. The last part gives its part of the
  /// step's loss, a scalar.
  using Stage = std::function<at::Tensor(std::int64_t stage, std::int64_t microbatch, const at::Tensor& input)>;

  /// Computes the weight gradients of one chunk, if the shape delays them. Not set: the chunk's backward has computed them.
  using WeightGradients = std::function<void(std::int64_t stage, std::int64_t microbatch)>;

  /// `boundary` has the shape, the dtype and the device of what passes from part to part.
  Pipeline(const sidestream::PipelineShape& shape, c10::intrusive_ptr<c10d::Backend> ranks, const at::Tensor& boundary);

  /// One step: forward and backward of all chunks of this rank. Gradients are accumulated in the order of the backwards. Returns the sum of
  /// the losses; not set without the last part.
  [[nodiscard]] at::Tensor step(const Stage& run, const WeightGradients& weight_gradients = {});

  /// That of this rank's chunks in each step.
  [[nodiscard]] const std::vector<sidestream::PipelineStep>& order() const noexcept { return order_; }
  /// The number of the part that is this rank's virtual stage.
  [[nodiscard]] std::int64_t part(std::int64_t stage) const noexcept {
    return stage * shape_.ranks + ranks_->getRank();
  }
  [[nodiscard]] std::int64_t parts() const noexcept { return shape_.ranks * shape_.stages; }

 private:
  struct Chunk {
    at::Tensor input;
    at::Tensor output;
  };

  void forward(const sidestream::PipelineStep& work, const Stage& run);
  void backward(const sidestream::PipelineStep& work);
  void send(const at::Tensor& tensor, std::int64_t part, std::int64_t to_part, std::int64_t microbatch);
  [[nodiscard]] at::Tensor receive(std::int64_t part, std::int64_t from_part, std::int64_t microbatch);

  sidestream::PipelineShape shape_;
  c10::intrusive_ptr<c10d::Backend> ranks_;
  at::Tensor boundary_;
  std::vector<sidestream::PipelineStep> order_;
  std::map<std::pair<std::int64_t, std::int64_t>, Chunk> chunks_;  ///< those in flight
  at::Tensor loss_;
};

}  // namespace pipeline
