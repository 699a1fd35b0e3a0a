#pragma once
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "models/layer_stack.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "unit/graphs/engine_program.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {

using Calls = std::vector<TensorFunction>;

/// Callables and a step that calls them.
struct HazardForm {
  std::string name;
  std::function<Calls(const at::Tensor& weight)> bodies;
  /// Gives what is compared beside the weight's gradient.
  std::function<std::vector<at::Tensor>(const Calls& calls, std::int64_t s, c10::Device device)> step;
  bool on_stream = false;  ///< on a stream of the caller's
  std::size_t sequences =
      1;  ///< as many parts of the bodies are captured apart; in a sequence each takes the output of the one before
};

class HazardProgram final : public EngineProgram {
 public:
  HazardProgram(const Runtimes& runtimes, HazardForm form);
  ~HazardProgram() override;

  std::vector<at::Tensor> step(std::int64_t s) override;
  [[nodiscard]] c10::Stream stream() const { return stream_; }

 private:
  HazardForm form_;
  OwnedStream stream_;
  torch::nn::Module nothing_;
  at::Tensor weight_ = rows_of(9).requires_grad_(true);
  Calls calls_;
};

/// Saves what it exponentiates, in a scope that leaves.
[[nodiscard]] TensorFunction exponentiates(const at::Tensor& weight);
[[nodiscard]] Calls several(const at::Tensor& weight, std::size_t count);
[[nodiscard]] at::Tensor run_all(const Calls& calls, at::Tensor h);

/// Provokes a hazard: the gradients are right, or an error names it and the model trains on.
class HazardTest : public testing::Test {
 protected:
  void expect_right_in_every_order(const HazardForm& form);
  /// The body alone, and graphed by a new engine, after whatever went wrong.
  void expect_usable(const TensorFunction& body);
  /// What a capture of `bodies` throws.
  [[nodiscard]] std::string refusal_of(const Calls& bodies, const std::shared_ptr<Runtime>& runtime) const;

  sim::OneThread one_thread_;
  c10::Device device_ = find_device("sim");
  at::Tensor weight_ = rows(9, device_).requires_grad_(true);
};

}  // namespace sidestream::testing_model
