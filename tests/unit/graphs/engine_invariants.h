#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>
#include <torch/csrc/autograd/function.h>
#include <torch/nn/module.h>

#include "runtime/runtime.h"

namespace sidestream {
class EngineState;
}

namespace sidestream::testing_model {

/// What an engine may change while a step or a capture runs, and must have put back when it is over, however it ended.
class EngineInvariants {
 public:
  /// Takes the state of the calling thread and the hooks of `model` as what must be found again.
  EngineInvariants(std::shared_ptr<Runtime> runtime, const torch::nn::Module& model);

  /// What is left over or not put back, in words; empty when nothing is. To be asked between steps, with no backward pending:
  /// open captures, streams, modes, recorders, callbacks of operators, hooks of saved tensors and of gradients, host leases
  /// that no graph owns.
  [[nodiscard]] std::string broken(const EngineState& engine) const;

 private:
  struct ParameterHooks {
    at::Tensor parameter;
    std::shared_ptr<torch::autograd::Node> accumulator;  ///< held, as a reducer of gradients would
    std::size_t hooks = 0;
    std::size_t accumulator_hooks = 0;
    bool after_accumulation = false;
  };
  [[nodiscard]] static ParameterHooks hooks_of(const at::Tensor& parameter);

  std::shared_ptr<Runtime> runtime_;
  c10::Stream stream_;
  std::vector<bool> modes_;
  std::vector<ParameterHooks> hooks_;
};

}  // namespace sidestream::testing_model
