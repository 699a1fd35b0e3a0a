#pragma once
#include <functional>
#include <memory>
#include <vector>

#include "graphs/engine/engine_state.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"

namespace sidestream {

class BucketSet;

/// Access to an engine's parts: for make_graphed_callables, and for tests that give an engine another runtime or inspect its parts. Not
/// installed.
class EngineAccess {
 public:
  /// An engine on `runtime` in place of its device's own.
  [[nodiscard]] static OffloadEngine engine(torch::nn::Module& model, Options options,
                                            std::shared_ptr<Runtime> runtime) {
    return OffloadEngine(std::make_shared<EngineState>(model, std::move(options), std::move(runtime)));
  }
  [[nodiscard]] static EngineState& state(const OffloadEngine& engine) { return engine.state(); }
  /// The same engine, for what is to keep it.
  [[nodiscard]] static OffloadEngine handle(const OffloadEngine& engine) { return OffloadEngine(engine.state_); }

  /// Captures as make_graphed_callables says.
  [[nodiscard]] static std::vector<GraphedCallable> capture(const OffloadEngine& engine,
                                                            std::vector<Callable> callables,
                                                            const std::vector<std::vector<Sample>>& samples,
                                                            const GraphOptions& options);
  /// Captures as make_graphed_step says.
  [[nodiscard]] static GraphedStep capture_whole_step(const OffloadEngine& engine, Callable step,
                                                      const std::vector<Tensors>& samples, const StepOptions& options);
  /// True if `inputs` are what `callable` was captured with.
  [[nodiscard]] static bool fits(const GraphedCallable& callable, const Tensors& inputs);
  /// True while it cannot replay: a capture that shares its memory awaits a backward, or its own of this call or a later one.
  [[nodiscard]] static bool has_to_wait(const GraphedCallable& callable);
  /// True while a capture in its memory awaits a backward, its own among them.
  [[nodiscard]] static bool memory_is_pending(const GraphedCallable& callable);
  struct Ran {
    Tensors outputs;
    bool eagerly = false;  ///< instead of a replay; a verification's run beside a replay does not count
  };
  /// Runs a call. `prepare` is called just before the call replays or runs; if the call is captured again first, after that capture.
  [[nodiscard]] static Ran run(const GraphedCallable& callable, const Tensors& inputs,
                               const std::function<void()>& prepare);
  /// True while its modules have other flags than at the capture, so that it runs eagerly.
  [[nodiscard]] static bool is_in_other_mode(const GraphedCallable& callable);
  /// A call. `options`: null for none, as below.
  static Tensors run(const GraphedCallable& callable, const Tensors& inputs, const ReplayOptions* options);
  /// The plain call, as a scope.
  static Tensors run_eagerly(const GraphedCallable& callable, const Tensors& inputs, const ReplayOptions* options);
  /// The named inputs, in the order of the capture. Throws: as GraphedCallable::call.
  [[nodiscard]] static Tensors in_order(const GraphedCallable& callable, c10::ArrayRef<NamedInput> inputs);
  /// The callables of `set`, as users have them.
  [[nodiscard]] static std::vector<BucketedCallable> bucketed(std::shared_ptr<BucketSet> set);
};

}  // namespace sidestream
