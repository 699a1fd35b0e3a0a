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

#include "sidestream/capture_time_hooks.h"
#include "sidestream/detail/export.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/graph_options.h"
#include "sidestream/named_input.h"
#include "sidestream/owning.h"
#include "sidestream/replay_options.h"

namespace sidestream {

class EngineAccess;
class OffloadEngine;

/// What a callable takes and returns: tensors, some of which may be undefined.
using Tensors = std::vector<at::Tensor>;
/// The function of a callable.
using TensorFunction = std::function<Tensors(const Tensors&)>;

/// One module or function to be captured.
///
/// A function is a function pointer, a lambda without captures, or ss::owning(...): a later capture (after weights were relocated) runs it
/// again.  Throws (constructors): UsageError for a null module or function, or an empty name.
class SIDESTREAM_API Callable {
 public:
  /// A plain function of Tensors. Its parameters are the leaves with requires_grad that it reads.
  template <class F, class = std::enable_if_t<!std::is_same_v<std::decay_t<F>, torch::nn::AnyModule>>>
  Callable(std::string name, F&& function) : name_(std::move(name)) {
    check_function<std::decay_t<F>>();
    constexpr bool fits = std::is_invocable_r_v<Tensors, const std::decay_t<F>&, const Tensors&>;
    static_assert(fits, "sidestream: the function of a Callable takes (const ss::Tensors&) and returns ss::Tensors");
    if constexpr (fits) {
      function_ = std::forward<F>(function);
    }
    check_not_null();
  }
  /// A function of a module and of Tensors. Parameters, buffers and training mode are those of the module.
  template <class F, class M>
  Callable(std::string name, F&& function, std::shared_ptr<M> module) : name_(std::move(name)), module_(module) {
    check_function<std::decay_t<F>>();
    constexpr bool fits = std::is_invocable_r_v<Tensors, const std::decay_t<F>&, M&, const Tensors&>;
    static_assert(fits,
                  "sidestream: the function of a Callable that has a module gets it as an argument: it takes (Module&, "
                  "const ss::Tensors&) and returns ss::Tensors");
    if constexpr (fits) {
      function_ = [f = std::decay_t<F>(std::forward<F>(function)), module](const Tensors& inputs) -> Tensors {
        return std::invoke(f, *module, inputs);
      };
    }
    check_not_null(/*with_module=*/true);
  }
  /// A function of the module of a ModuleHolder (`TORCH_MODULE`) and of Tensors.
  template <class F, class M>
  Callable(std::string name, F&& function, const torch::nn::ModuleHolder<M>& module)
      : Callable(std::move(name), std::forward<F>(function),
                 module.is_empty() ? std::shared_ptr<M>() : std::shared_ptr<M>(module.ptr())) {}
  /// The module of an AnyModule, with one tensor in and one tensor out.
  Callable(std::string name, torch::nn::AnyModule module);

  /// Names the arguments, in order, for GraphedCallable::call [sample_kwargs].
  /// Throws: UsageError for an empty or repeated name. If the number of samples differs, make_graphed_callables throws UsageError.
  Callable& input_names(std::vector<std::string> names);
  /// Sets functions that run around the passes of sizing, warm-up and capture [capture_time_hooks].
  Callable& capture_time_hooks(CaptureTimeHooks hooks);

  /// Sets generators from which the callable draws, besides those of GraphOptions::generators. Only its graphs use them.
  Callable& generators(std::vector<at::Generator> generators);

  /// Sets the virtual stage of this rank that the callable belongs to, for GraphOptions::order. 0 if it is not set.
  Callable& stage(std::int64_t stage) {
    stage_ = stage;
    return *this;
  }

  /// The name in reports and errors, and the first part of the names of its groups.
  [[nodiscard]] const std::string& name() const { return name_; }
  /// The function, with its module bound.
  [[nodiscard]] const TensorFunction& function() const { return function_; }
  /// Null for a plain function.
  [[nodiscard]] const std::shared_ptr<torch::nn::Module>& module() const { return module_; }
  /// Empty if the arguments have no names.
  [[nodiscard]] const std::vector<std::string>& input_names() const { return input_names_; }
  /// What `generators` was given.
  [[nodiscard]] const std::vector<at::Generator>& generators() const { return generators_; }
  /// What `stage` was given.
  [[nodiscard]] std::int64_t stage() const { return stage_; }
  /// Null if there are no hooks.
  [[nodiscard]] const std::shared_ptr<const CaptureTimeHooks>& capture_time_hooks() const { return hooks_; }

 private:
  template <class F>
  static constexpr void check_function() {
    static_assert(
        detail::is_keepable_function<F>,
        "sidestream: the function of a Callable holds state (a lambda with captures, a std::function). A capture would "
        "freeze that state, and may outlive it. Pass the module to Callable as its third argument, so that the "
        "function gets it as Module&, or wrap the function in ss::owning(...), which promises that it owns its state");
  }
  void check_not_null(bool with_module = false) const;
  std::string name_;
  TensorFunction function_;
  std::shared_ptr<torch::nn::Module> module_;
  std::vector<std::string> input_names_;
  std::shared_ptr<const CaptureTimeHooks> hooks_;
  std::vector<at::Generator> generators_;
  std::int64_t stage_ = 0;
};

/// One sample argument: a tensor, or an output of an earlier callable.
///
/// If the sample is an output, pass that output at each replay: no copy is made, and another tensor is a UsageError.
class SIDESTREAM_API Sample {
 public:
  /// A tensor. Its values are used in warm-up.
  Sample(at::Tensor tensor) : tensor_(std::move(tensor)) {}  // NOLINT: a sample is written as the tensor
  /// An output of a callable that is captured before. Both numbers count from 0.  Throws: UsageError for a negative number.
  [[nodiscard]] static Sample output_of(std::int64_t callable, std::int64_t output = 0);
  /// The tensor; undefined for an output.
  [[nodiscard]] const at::Tensor& tensor() const { return tensor_; }
  /// The number of the callable; -1 for a tensor.
  [[nodiscard]] std::int64_t callable() const { return callable_; }
  /// The number of the callable's output.
  [[nodiscard]] std::int64_t output() const { return output_; }

 private:
  at::Tensor tensor_;
  std::int64_t callable_ = -1;
  std::int64_t output_ = 0;
};

/// A callable whose forward and backward replay as graphs. Copies of this object share the captures.
///
/// Inputs must have the shapes, dtypes, devices and requires_grad of the capture. The returned tensors belong to the caller: if one is
/// still referenced when a replay would overwrite its memory, its bytes are copied out first.
///
/// It runs eagerly if the module's training mode or module options (a dropout rate) differ from the capture, and in inference mode. Under
/// no_grad it runs eagerly too; with GraphOptions::forward_only it replays under no_grad, and runs eagerly with gradients.
/// In the body of a graphed call or step it runs eagerly as a part of that graph. It also runs eagerly if a callable that it is linked to
/// did, and if GraphOptions::agree_to_capture returned false.
/// If weights were relocated, it captures again or throws UsageError: see GraphOptions::on_relocated_weights. While a backward is pending
/// it always throws.
/// Ordering: on return the current stream waits for the graph's compute, not for its copies.  Capture: illegal.
/// Threads: one at a time; backward may run on autograd's device thread.
/// Throws: UsageError for inputs, or a state of autocast or of a global switch, that differ from the capture. Also for calls in another
/// order than captured.
/// Without GraphOptions::order also for a second forward before the backward of the first, and without retain_graph_in_backward for
/// a second backward. A backward throws UsageError if it needs an output of its forward that was changed in place.
class SIDESTREAM_API GraphedCallable {
 public:
  /// Replays the forward with these inputs, in the order of the samples.
  Tensors operator()(const Tensors& inputs) const;
  /// Replays on the stream, and records the event, that `options` name.
  Tensors operator()(const Tensors& inputs, const ReplayOptions& options) const;
  /// Replays with arguments by the names of Callable::input_names, in any order: `layer.call({{"x", x}, {"mask", mask}})`.
  /// Throws: UsageError if the callable has no names, and for a name that is unknown, missing or given twice.
  Tensors call(c10::ArrayRef<NamedInput> inputs) const;
  /// The same on the stream, and with the event, that `options` name.
  Tensors call(c10::ArrayRef<NamedInput> inputs, const ReplayOptions& options) const;
  /// Computes the delayed weight gradients (GradientPolicy::delayed) of this callable's oldest backward that still lacks them
  /// [backward_dw].
  ///
  /// A separate backward pass accumulates the gradients and runs the hooks of the parameters. Call it once after each backward, before the
  /// next forward of any callable captured with this one. With GraphOptions::order, call it at its entry of the order. Different callables
  /// may be called in any order. After an eager run it does nothing: that backward has computed all gradients.
  /// Ordering: as a backward.  Capture: illegal.
  /// Throws: UsageError if no gradients are delayed, and if a tensor that they are computed from was changed in place. What hooks throw.
  void backward_dw() const;
  /// The callable's name.
  [[nodiscard]] const std::string& name() const;
  /// Frees what only this callable uses: graphs, static inputs and incoming gradients, saved tensors, pinned memory, and its part of the
  /// pool. A second call does nothing. Later replays throw UsageError, and so does a pending backward.
  ///
  /// The pool's memory itself is freed with the last of the callables that were captured together. The other callables stay usable. If an
  /// input of one was linked to an output of this callable, it then takes any tensor with the shape of that output. Outputs that are still
  /// referenced keep their values.
  /// Ordering: blocks the host until its graphs are done.
  void reset();

 private:
  friend class EngineAccess;
  class Shared;
  explicit GraphedCallable(std::shared_ptr<Shared> shared) : shared_(std::move(shared)) {}
  [[nodiscard]] Shared& shared() const;
  std::shared_ptr<Shared> shared_;  ///< shared by copies
};

/// Captures forward and backward of the callables, in order (see GraphOptions::order). The groups that the engine's options name are
/// offloaded.
///
/// `samples[i]` are the arguments of `callables[i]`; their values are used in warm-up. A sizing pass runs first. Parameters' gradients,
/// buffers and random state are unchanged when it returns.
/// Ordering: waits for the device.  Capture: illegal.
/// Throws: UsageError if the numbers of callables, samples and names do not match, and for bad options. CaptureError if a capture fails;
/// nothing of it is left.
/// Source: TransformerEngine's make_graphed_callables.
[[nodiscard]] SIDESTREAM_API std::vector<GraphedCallable> make_graphed_callables(
    OffloadEngine& engine, std::vector<Callable> callables, const std::vector<std::vector<Sample>>& samples,
    const GraphOptions& options = {});

}  // namespace sidestream
