#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <typeinfo>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/util/ArrayRef.h>

#include "analysis/chunk_groups.h"
#include "graphs/calls/engine_counts.h"
#include "graphs/sequence/graph_sequence.h"
#include "offload/scope_tree.h"
#include "sidestream/call_options.h"
#include "sidestream/capture_time_hooks.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/detail/module_forward.h"

namespace sidestream {

struct BucketOptions;
class CallableOrder;
class CallSet;

/// A sequence that may be captured anew while callables and call sites refer to it.
struct SequenceHolder {
  std::shared_ptr<GraphSequence> sequence;
  /// By the number that a call had at the first capture: its number now. Empty unless a later capture left out calls.
  std::vector<std::size_t> indices = {};
  GivenOrder order = {};  ///< of the step whose calls it has; null if they were not captured in one order
  bool switched = false;  ///< offload was switched since the capture: it is captured again before a pass

  [[nodiscard]] const CapturedSequence& captured() const noexcept { return sequence->captured(); }
  [[nodiscard]] std::size_t index_of(std::size_t call) const { return indices.empty() ? call : indices[call]; }
};

/// Sequences of an engine. A holder is gone when neither a callable nor a call site refers to it.
using SequenceHolders = std::vector<std::weak_ptr<SequenceHolder>>;

template <class Visit>
void for_each_sequence(const SequenceHolders& holders, const Visit& visit) {
  for (const auto& weak : holders) {
    if (const auto holder = weak.lock(); holder != nullptr && holder->sequence != nullptr) {
      visit(*holder->sequence);
    }
  }
}

/// A copy of an argument that is not a tensor.
struct KeptGuard {
  std::shared_ptr<const void> value;
  const std::type_info* type = nullptr;
  bool (*equal)(const void*, const void*) = nullptr;
};

/// True if the arguments of `request` that are not tensors equal the kept ones. Allocates nothing.
[[nodiscard]] bool same_arguments(const std::vector<KeptGuard>& kept, const std::vector<std::size_t>& kept_shape,
                                  const detail::CallRequest& request);

/// One captured variant of a call: argument values and shapes, modes, flags of the model, and microbatch slot.
struct CallVariant {
  std::shared_ptr<SequenceHolder> holder;
  std::size_t call = 0;
  std::vector<KeptGuard> guards = {};
  std::vector<std::size_t> shape = {};
  std::shared_ptr<const void> structure = {};  ///< of its result
  std::size_t slot = 0;                        ///< see RecordedCall::slot
  std::int64_t stage = 0;                      ///< of its chunk, if it was captured in an order
  bool continues = false;                      ///< it was computed from earlier calls of its sequence
  std::uint64_t used_at = 0;                   ///< its capture or latest replay, on the table's clock

  /// Of the call in its sequence now.
  [[nodiscard]] std::size_t index() const { return holder->index_of(call); }
  /// True if all arguments of `request` are as captured. Modes and weights may differ.
  [[nodiscard]] bool accepts(const detail::CallRequest& request) const {
    return same_arguments(guards, shape, request) && holder->captured().accepts(index(), request.inputs);
  }
};

/// What a call does if no capture may replay it. The options of its way in say so. The default is that of make_graphed_callables: there
/// is one capture, and a call that it cannot serve is an error.
struct CallRules {
  OnNewArguments on_new_arguments = OnNewArguments::error;
  OnPending on_pending = OnPending::error;
  std::int64_t max_captures = 1;
  OnMaxCaptures on_max_captures = OnMaxCaptures::error;
  bool warns = false;  ///< once, if the call runs eagerly because its arguments are new

  [[nodiscard]] static CallRules of(const CallOptions& options) noexcept;
  [[nodiscard]] static CallRules of(const BucketOptions& options) noexcept;
};

/// The captured variants of one call, and the bound on them. Captures of training and of forwards alone are counted separately.
struct VariantTable {
  std::vector<CallVariant> all;
  std::uint64_t clock = 0;   ///< counts captures and replays
  std::int64_t dropped = 0;  ///< to make room for others

  /// It counts as used now.
  void add(CallVariant variant);
  void use(CallVariant& variant) noexcept { variant.used_at = ++clock; }
  /// The first variant that accepts `request`; null if there is none.
  [[nodiscard]] CallVariant* find(const detail::CallRequest& request);
  /// How many variants are of calls with gradients, or without.
  [[nodiscard]] std::size_t count(bool gradients) const noexcept;
  /// True if `more` captures may be added: the bound allows them, or as many others may be dropped and have no backward to come.
  [[nodiscard]] bool has_room(bool gradients, std::size_t more, const CallRules& rules) const;
  /// Before `more` captures are added: the least recently used variant, if it must be dropped and has no backward to come; else null.
  [[nodiscard]] const CallVariant* to_drop(bool gradients, std::size_t more, const CallRules& rules) const;
  /// Frees what only this variant uses.
  void drop(const CallVariant& variant);
  /// The same for all. The table stays as it is: replays find that their graphs are gone.
  void release_graphs() const;
};

/// One module or function whose calls the dispatcher serves.
struct CallSite {
  enum class Kind : std::uint8_t {
    eager,     ///< of ss::call, no pattern names it: a scope
    graphed,   ///< of ss::call, captured once it has been recorded
    callable,  ///< of a callable or a whole step: captured before it is called
  };
  struct Warned {
    bool of_bound = false;
    bool of_arguments = false;  ///< that run eagerly
    bool of_equality = false;   ///< of its arguments
  };

  Kind kind = Kind::eager;
  ScopeNode* scope = nullptr;
  std::shared_ptr<const torch::nn::Module> module;   ///< null for a plain function
  std::shared_ptr<const torch::nn::Module> watched;  ///< `module`, or the model for a plain function
  std::shared_ptr<const CaptureTimeHooks> hooks;     ///< of a callable; null if there are none
  std::vector<at::Generator> generators;             ///< of a callable: see CallSpec
  bool forwards_alone = false;                       ///< of a callable: GraphOptions::forward_only
  CallSet* set = nullptr;                            ///< of a bucketed callable, which is in it; else null
  CallableOrder* order = nullptr;                    ///< of a callable in an order, which its set has; else null
  CallRules rules;
  VariantTable variants;
  bool dropped = false;  ///< by GraphedCallable::reset
  bool to_record =
      false;  ///< captures were dropped because the model is another now: calls are recorded as in a first step
  bool captured_before = false;           ///< of a graphed call, also if that capture is gone
  std::size_t eager_runs_without_dw = 0;  ///< of a callable, with gradients: backward_dw has nothing to do for them
  EagerRuns eager_runs;                   ///< of a graphed call
  Warned warned;
};

/// "graphed call "name"", for the errors and warnings here.
[[nodiscard]] std::string describe(const CallSite& site);

/// No capture of `site` fits `request`; `other`: one of them, or null. Throws: UsageError that says what differs.
[[noreturn]] void refuse_new_arguments(const CallSite& site, const detail::CallRequest& request,
                                       const CallVariant* other);
/// The call runs eagerly because no capture fits. Warns once, if the rules of `site` say so.
void warn_of_new_arguments(CallSite& site);
/// The backward of an earlier call of `site` is pending. Throws: UsageError.
[[noreturn]] void refuse_own_pending(const CallSite& site);
/// The call needs more captures than there may be, and runs eagerly. Warns once. `in_flight`: because microbatches are in flight.
/// Throws: UsageError, if the rules of `site` refuse such calls.
void warn_of_bound(CallSite& site, bool in_flight);
/// An argument is not equal to its own copy, so no capture can match it. Warns once.
void warn_of_equality(CallSite& site);

}  // namespace sidestream
