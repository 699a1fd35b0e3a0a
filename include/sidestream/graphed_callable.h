#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>

#include "sidestream/export.h"
#include "sidestream/graph_options.h"

namespace sidestream {

class EngineAccess;
class OffloadEngine;

/// What a callable takes and gives: tensors, some of which may be undefined.
using Tensors = std::vector<at::Tensor>;
using TensorFunction = std::function<Tensors(const Tensors&)>;

/// One module or function to be captured.
class SIDESTREAM_API Callable {
 public:
  /// A plain function. Leaves that require a gradient and that it reads are its parameters.
  Callable(std::string name, TensorFunction function) : name_(std::move(name)), function_(std::move(function)) {}
  /// A function with the module that owns its parameters, buffers and training mode.
  Callable(std::string name, TensorFunction function, std::shared_ptr<torch::nn::Module> module)
      : name_(std::move(name)), function_(std::move(function)), module_(std::move(module)) {}
  /// A module held by an AnyModule, one tensor in, one tensor out.
  Callable(std::string name, torch::nn::AnyModule module);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const TensorFunction& function() const { return function_; }
  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& module() const { return module_; }

 private:
  std::string name_;
  TensorFunction function_;
  std::shared_ptr<torch::nn::Module> module_;
};

/// One sample argument: a tensor, or "what callable `callable` gives as its output `output`". An argument given so shares
/// its memory with that output, and no copy is made at replay as long as exactly that output is passed.
class Sample {
 public:
  Sample(at::Tensor tensor) : tensor_(std::move(tensor)) {}  // NOLINT: a sample is written as the tensor
  [[nodiscard]] static Sample output_of(std::int64_t callable, std::int64_t output = 0) {
    Sample sample{at::Tensor()};
    sample.callable_ = callable;
    sample.output_ = output;
    return sample;
  }
  [[nodiscard]] const at::Tensor& tensor() const { return tensor_; }
  [[nodiscard]] std::int64_t callable() const { return callable_; }  ///< -1 for a tensor
  [[nodiscard]] std::int64_t output() const { return output_; }

 private:
  at::Tensor tensor_;
  std::int64_t callable_ = -1;
  std::int64_t output_ = 0;
};

/// A callable whose forward and backward replay as graphs; copies share one capture.
///
/// Replay: shapes, dtypes, devices and requires_grad as captured, else UsageError. The returned tensors are static: the next
/// replay overwrites them. A second forward before the backward of the first is a UsageError here, as is a second backward
/// without retain_graph_in_backward, a static output changed in place before its backward, and calls in another nesting order
/// than captured, and another state of autocast. Under no_grad, or when the module's training mode is not the captured one,
/// it runs eagerly.
/// Ordering: on return the current stream waits for the graph's compute, not for its copies.  Capture: illegal.
/// Threads: one at a time; backward may run on autograd's device thread.
class SIDESTREAM_API GraphedCallable {
 public:
  Tensors operator()(const Tensors& inputs) const;
  [[nodiscard]] const std::string& name() const;
  /// Drops the graphs and their memory; idempotent. Later replays throw UsageError; a pending backward too.
  void reset();

 private:
  friend class EngineAccess;
  class Shared;
  explicit GraphedCallable(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  std::shared_ptr<Shared> shared_;  ///< by copies
};

/// Captures the callables, in order, forward and backward, offloading what the engine's options name.
/// `samples[i]` are the arguments of `callables[i]`; their values are used in warm-up. A sizing pass runs first.
/// Ordering: waits for the device. Parameters' gradients, buffers and random state are as before when it returns.
/// Capture: illegal.  Throws: UsageError (sizes, K < 1, an event without a stream), CaptureError (nothing of it is left).
/// Source: TransformerEngine's make_graphed_callables.
[[nodiscard]] SIDESTREAM_API std::vector<GraphedCallable> make_graphed_callables(
    OffloadEngine& engine, std::vector<Callable> callables, const std::vector<std::vector<Sample>>& samples,
    const GraphOptions& options = {});

}  // namespace sidestream
