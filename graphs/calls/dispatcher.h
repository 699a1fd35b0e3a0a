#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>

#include "graphs/calls/call_site.h"
#include "graphs/calls/engine_counts.h"
#include "graphs/sequence/graph_sequence.h"
#include "sidestream/detail/call_request.h"

namespace sidestream {

class CallContext;
class CallSet;
class EagerPlan;
class EngineSequences;
struct EngineResources;
class RecordedCalls;
class ReplayVerification;
struct RunningChunk;
class StepChunks;

/// Decides what becomes of one call, be it one of `ss::call` or of a GraphedCallable: it runs eagerly as a scope, replays a
/// capture, or runs and is recorded so that a capture may follow.
///
/// callable_dispatch.cpp has what is particular to callables, variant_search.cpp how a call's capture is found.
/// Threads: the step's.
class Dispatcher {
 public:
  /// All must outlive this object. `verification`: null if no replay is verified.
  Dispatcher(EngineResources& resources, CallContext& context, const EagerPlan& plan, RecordedCalls& recorded,
             EngineSequences& sequences, EngineCounts& counts, StepChunks& chunks, ReplayVerification* verification)
      : resources_(resources),
        context_(context),
        plan_(plan),
        recorded_(recorded),
        sequences_(sequences),
        counts_(counts),
        chunks_(chunks),
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
    callable,  ///< replays the one capture there is, or the one that fits
  };
  [[nodiscard]] Route route(const CallSite& site) const;
  /// Of the calling thread, for the engine's device.
  [[nodiscard]] CallModes modes() const;

  struct Call {
    CallSite& site;
    const detail::CallRequest& request;
    detail::TensorBuffer& outputs;
    CallModes modes;  ///< of the calling thread
  };
  /// The variants of a site, seen from one call of it.
  struct Found {
    CallVariant* ready = nullptr;          ///< fits, and may replay
    const CallVariant* stale = nullptr;    ///< fits, but weights were relocated or replaced in the middle of a step
    CallVariant* pending = nullptr;        ///< fits, but a pending backward needs its memory
    const CallVariant* waiting = nullptr;  ///< the same, and it is the backward of another sequence
    std::size_t busy = 0;                  ///< how many fit and await their own backward
    const CallVariant* other = nullptr;    ///< does not fit
  };
  /// Of a callable, the inputs alone decide which variants fit.
  [[nodiscard]] Found find(const Call& call) const;
  /// A call without a chunk would go on in the sequence of `variant`, in which another microbatch has a backward to come.
  [[nodiscard]] bool is_of_other_microbatch(const Call& call, const CallVariant& variant) const;
  /// The step has another order than the one in which `variant` was captured, and the backward of `chunk` or of a pending
  /// call would come before its turn.
  [[nodiscard]] bool contradicts(const RunningChunk& chunk, const CallVariant& variant) const;
  /// Of `ss::call`, and of a bucketed callable.
  void find_and_replay(const Call& call);
  /// Throws: UsageError for a callable that was reset.
  void call_callable(const Call& call);
  /// The first callable of `set`, which has buckets, is called: captures the pass before this one if it was recorded, and may be
  /// captured now. Otherwise the next recorded pass begins anew.
  void begin_pass(const Call& call, CallSet& set);
  /// Captures the complete pass of `set`: a bucket more. The least recently used bucket makes room if the bound demands it.
  /// Throws: as EngineSequences::capture; the pass is forgotten then.
  void capture_pass(CallSet& set);
  /// The pending rule: captures fit, but a pending backward needs their memory.
  void on_pending(const Call& call, const Found& found);
  /// The mismatch rule: no capture fits.
  void on_mismatch(const Call& call, const Found& found);
  /// Why a call that no capture fits runs eagerly without a message, whatever the rule says. Empty if the rule holds.
  [[nodiscard]] std::optional<EagerCause> excuse(const CallSite& site) const;
  /// The chunk that a recorded or replayed call belongs to; null if there is none, and for bucketed calls and calls without gradients.
  [[nodiscard]] RunningChunk* chunk_of(const Call& call) const;
  /// Counts a call that was to replay and is not recorded.
  void count_eager(CallSite& site, EagerCause cause);
  void run_eagerly(CallSite& site, const detail::CallRequest& request, detail::TensorBuffer& outputs);
  void run_eagerly(const Call& call, EagerCause cause);
  /// `busy`: see Found.
  void record_and_run(const Call& call, std::size_t busy);
  /// `known`: whether `variant` accepts the inputs. If it is the only one, it may not: the sequence says what differs.
  void replay_callable(const Call& call, const CallVariant& variant, GraphSequence::Inputs known);
  void replay(const Call& call, const CallVariant& variant, GraphSequence::Inputs known);
  /// `variant` is stale.
  void run_beside_stale_capture(const Call& call, const CallVariant& variant);

  EngineResources& resources_;
  CallContext& context_;
  const EagerPlan& plan_;
  RecordedCalls& recorded_;
  EngineSequences& sequences_;
  EngineCounts& counts_;
  StepChunks& chunks_;
  ReplayVerification* verification_;
  const GraphSequence* latest_ = nullptr;  ///< in which the latest graphed call replayed; null if that ran eagerly
};

}  // namespace sidestream
