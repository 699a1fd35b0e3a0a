#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>
#include <torch/nn/module.h>
#include <torch/nn/modules/container/any.h>
#include <torch/nn/pimpl.h>

#include "sidestream/capture_time_hooks.h"
#include "sidestream/detail/export.h"
#include "sidestream/graph_options.h"
#include "sidestream/named_input.h"
#include "sidestream/owning.h"
#include "sidestream/replay_options.h"

namespace sidestream {

class EngineAccess;
class OffloadEngine;

/// What a callable takes and gives: tensors, some of which may be undefined.
using Tensors = std::vector<at::Tensor>;
using TensorFunction = std::function<Tensors(const Tensors&)>;

/// One module or function to be captured. A function is a function pointer, a lambda without captures, or ss::owning(...): it
/// may be captured again later, where weights were relocated. Throws: UsageError for a null module or function.
class SIDESTREAM_API Callable {
 public:
  /// A plain function of Tensors. Leaves that require a gradient and that it reads are its parameters.
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, torch::nn::AnyModule>>>
  Callable(std::string name, F&& function) : name_(std::move(name)) {
    check_function<std::decay_t<F>>();
    constexpr bool fits = std::is_invocable_r_v<Tensors, const std::decay_t<F>&, const Tensors&>;
    static_assert(fits, "sidestream: the function of a Callable takes (const ss::Tensors&) and gives ss::Tensors");
    if constexpr (fits) {
      function_ = std::forward<F>(function);
    }
    check_not_null();
  }
  /// A function of the module, which owns its parameters, buffers and training mode, and of Tensors.
  template <class F, class M>
  Callable(std::string name, F&& function, std::shared_ptr<M> module) : name_(std::move(name)), module_(module) {
    check_function<std::decay_t<F>>();
    constexpr bool fits = std::is_invocable_r_v<Tensors, const std::decay_t<F>&, M&, const Tensors&>;
    static_assert(fits,
                  "sidestream: the function of a Callable that has a module gets it as an argument: it takes (Module&, "
                  "const ss::Tensors&) and gives ss::Tensors");
    if constexpr (fits) {
      function_ = [f = std::decay_t<F>(std::forward<F>(function)), module](const Tensors& inputs) -> Tensors {
        return std::invoke(f, *module, inputs);
      };
    }
    check_not_null(/*with_module=*/true);
  }
  /// The same for a ModuleHolder (`TORCH_MODULE`).
  template <class F, class M>
  Callable(std::string name, F&& function, const torch::nn::ModuleHolder<M>& module)
      : Callable(std::move(name), std::forward<F>(function),
                 module.is_empty() ? std::shared_ptr<M>() : std::shared_ptr<M>(module.ptr())) {}
  /// A module held by an AnyModule, one tensor in, one tensor out.
  Callable(std::string name, torch::nn::AnyModule module);

  /// Names its arguments, in order, for GraphedCallable::call [sample_kwargs].
  /// Throws: UsageError for an empty name, or one that is given twice; make_graphed_callables throws it where there are not as many
  /// samples.
  Callable& input_names(std::vector<std::string> names);
  /// What runs around its passes before it replays [capture_time_hooks].
  Callable& capture_time_hooks(CaptureTimeHooks hooks);

  /// Generators that it draws from, beside those of GraphOptions::generators: its graphs alone know them.
  Callable& generators(std::vector<at::Generator> generators);

  [[nodiscard]] const std::string& name() const { return name_; }
  [[nodiscard]] const TensorFunction& function() const { return function_; }
  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  [[nodiscard]] const std::vector<std::string>& input_names() const { return input_names_; }
  [[nodiscard]] const std::vector<at::Generator>& generators() const { return generators_; }
  /// Null for none.
  [[nodiscard]] const std::shared_ptr<const CaptureTimeHooks>& capture_time_hooks() const { return hooks_; }

 private:
  template <class F>
  static constexpr void check_function() {
    static_assert(
        detail::is_keepable_function<F>,
        "sidestream: the function of a Callable holds state (a lambda with captures, a std::function), which a "
        "capture would freeze and may outlive: give Callable its module as the third argument and take it as "
        "Module&, or wrap the function in ss::owning(...), which promises that it owns its state");
  }
  void check_not_null(bool with_module = false) const;
  std::string name_;
  TensorFunction function_;
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::string> input_names_;
  std::shared_ptr<const CaptureTimeHooks> hooks_;
  std::vector<at::Generator> generators_;
};

/// One sample argument: a tensor, or "what callable `callable` gives as its output `output`". An argument given so shares
/// its memory with that output, and no copy is made at replay as long as exactly that output is passed.
class SIDESTREAM_API Sample {
 public:
  Sample(at::Tensor tensor) : tensor_(std::move(tensor)) {}  // NOLINT: a sample is written as the tensor
  /// Both count from 0. Throws: UsageError for a negative number.
  [[nodiscard]] static Sample output_of(std::int64_t callable, std::int64_t output = 0);
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
/// Replay: shapes, dtypes, devices and requires_grad as captured, else UsageError. The returned tensors are the caller's own: what
/// is held of them is copied out before a replay overwrites it. A second forward before the backward of the first is a UsageError here,
/// as is a second backward without retain_graph_in_backward, an output changed in place that its backward needs, and calls in
/// another nesting order than captured, and another state of autocast. When the module's training mode is not
/// the captured one, in inference mode, and under no_grad it runs eagerly; with GraphOptions::forward_only it replays under no_grad, and
/// runs eagerly with gradients.
/// Ordering: on return the current stream waits for the graph's compute, not for its copies.  Capture: illegal.
/// Threads: one at a time; backward may run on autograd's device thread.
class SIDESTREAM_API GraphedCallable {
 public:
  Tensors operator()(const Tensors& inputs) const;
  /// The same on a stream, or with an event, of the caller's.
  Tensors operator()(const Tensors& inputs, const ReplayOptions& options) const;
  /// The same, with the arguments by the names of Callable::input_names, in any order: `layer.call({{"x", x}, {"mask", mask}})`.
  /// Throws: UsageError for a callable without names, a name that it does not have, and one that is missing or given twice.
  Tensors call(c10::ArrayRef<NamedInput> inputs) const;
  Tensors call(c10::ArrayRef<NamedInput> inputs, const ReplayOptions& options) const;
  [[nodiscard]] const std::string& name() const;
  /// Gives back what this callable alone has: its graphs, static inputs and seeds, what it saves, its pinned memory and its part of
  /// the pool; the pool's memory itself goes back with the last of the callables that were captured together. The others go on: one that
  /// took its output takes any tensor like it. What is held of its outputs stays as it is. Idempotent. Later replays throw
  /// UsageError; a pending backward too.
  /// Ordering: blocks the host until its graphs are done.
  void reset();

 private:
  friend class EngineAccess;
  class Shared;
  explicit GraphedCallable(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  [[nodiscard]] Shared& shared() const;
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
