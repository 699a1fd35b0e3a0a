#pragma once
#include <memory>
#include <utility>
#include <vector>

#include "graphs/calls/call_set.h"
#include "graphs/engine/engine_state.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/graphed_step.h"

namespace sidestream {

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

  /// The samples of some callables.
  using Samples = std::vector<std::vector<Sample>>;
  /// The sites of callables that are captured together, without a capture. `rules`: of bucketed callables, else null.
  [[nodiscard]] static std::shared_ptr<CallSet> make_set(EngineState& state, const std::vector<Callable>& callables,
                                                         const GraphOptions& options, const CallRules* rules = nullptr);
  /// Captures the callables: each site of `set` gets one more variant. `shape`: of these variants. Throws: as make_graphed_callables.
  static void capture(EngineState& state, CallSet& set, const std::vector<Callable>& callables, const Samples& samples,
                      const std::vector<std::size_t>& shape = {});
  /// Captures the callables for each of `buckets`, in order. `rules`: as of make_set. Throws: as make_graphed_callables.
  [[nodiscard]] static std::vector<GraphedCallable> capture(const OffloadEngine& engine,
                                                            const std::vector<Callable>& callables,
                                                            const std::vector<Samples>& buckets,
                                                            const GraphOptions& options,
                                                            const CallRules* rules = nullptr);
  /// Captures as make_graphed_step says.
  [[nodiscard]] static GraphedStep capture_whole_step(const OffloadEngine& engine, Callable step,
                                                      const std::vector<Tensors>& samples, const StepOptions& options);

 private:
  /// What is captured of `callables`. Throws: UsageError for bad samples, and if not all ranks agree to capture now.
  [[nodiscard]] static std::vector<CallSpec> specs_of(EngineState& state, const std::vector<Callable>& callables,
                                                      const Samples& samples, const GraphOptions& options);
};

}  // namespace sidestream
