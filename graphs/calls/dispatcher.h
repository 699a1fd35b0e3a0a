#pragma once
#include <cstddef>
#include <cstdint>

#include "graphs/calls/call_table.h"
#include "graphs/calls/engine_counts.h"
#include "graphs/sequence/graph_sequence.h"
#include "sidestream/detail/call_request.h"

namespace sidestream {

class CallContext;
class EagerPlan;
class EngineSequences;
struct EngineResources;
class RecordedCalls;
class ReplayVerification;
class EngineCounts;

/// Decides what becomes of one call, be it one of `ss::call` or of a GraphedCallable: it runs eagerly as a scope, replays a
/// capture, or runs and is recorded so that a capture may follow.
/// Threads: the step's.
class Dispatcher {
 public:
  /// All must outlive this object. `verification`: null where no replay is verified.
  Dispatcher(EngineResources& resources, CallContext& context, const EagerPlan& plan, RecordedCalls& recorded,
             EngineSequences& sequences, EngineCounts& counts, ReplayVerification* verification)
      : resources_(resources),
        context_(context),
        plan_(plan),
        recorded_(recorded),
        sequences_(sequences),
        counts_(counts),
        verification_(verification) {}
  Dispatcher(const Dispatcher&) = delete;
  Dispatcher& operator=(const Dispatcher&) = delete;
  ~Dispatcher() = default;

  /// `request` may leave `name` empty for a callable. Throws: as ss::call and
  /// GraphedCallable.
  void dispatch(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs);

 private:
  enum class Route : std::uint8_t {
    scope,     ///< runs eagerly, and nothing else was to be expected
    eager,     ///< runs eagerly although it might replay: without gradients, or in eval mode
    record,    ///< runs eagerly and is to be captured
    find,      ///< replays the variant that fits, or does as the options say
    callable,  ///< replays the one capture there is
  };
  [[nodiscard]] Route route(const CallSite& site) const;
  /// Of an `ss::call` that wants no gradients, whatever mode its module is in.
  [[nodiscard]] Route route_of_evaluation() const;
  /// Of the calling thread, for the engine's device.
  [[nodiscard]] CallModes modes() const;

  /// `variant` fits and no other one that does is free, but a sequence that shares its memory awaits a backward.
  void run_beside_pending(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs,
                          const CallVariant& variant);
  /// True where `site` may have one capture more, of calls in `modes`: fewer than CallOptions::max_captures are there and will be, or
  /// as many others have no backward to come and may go before the next step.
  [[nodiscard]] bool may_capture(const CallSite& site, const CallModes& modes) const;
  /// A graphed call that is neither replayed nor recorded.
  void count_eager(CallSite& site, EagerCause cause) noexcept;
  void run_eagerly(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs);
  void record_and_run(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                      detail::TensorBuffer& outputs, std::size_t busy);
  void find_and_replay(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                       detail::TensorBuffer& outputs);
  void replay_callable(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                       detail::TensorBuffer& outputs);
  /// `call`: of its sequence as it is now.
  void replay(const CallVariant& variant, std::size_t call, const detail::CallRequest& request,
              detail::TensorBuffer& outputs, GraphSequence::Inputs known);
  /// `variant` would fit, but its weights were relocated or replaced in the middle of a step.
  void run_beside_stale_capture(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs,
                                const CallVariant& variant);
  /// No variant is free: `busy` fit and await their backward, `other` is one that does not fit.
  void on_mismatch(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                   detail::TensorBuffer& outputs, std::size_t busy, const CallVariant* other);

  EngineResources& resources_;
  CallContext& context_;
  const EagerPlan& plan_;
  RecordedCalls& recorded_;
  EngineSequences& sequences_;
  EngineCounts& counts_;
  ReplayVerification* verification_;
};

}  // namespace sidestream
