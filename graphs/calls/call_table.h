#pragma once
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "graphs/calls/engine_counts.h"
#include "graphs/calls/recorded_calls.h"
#include "offload/name_pattern.h"
#include "offload/scope_tree.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/detail/module_forward.h"

namespace sidestream {

struct SequenceHolder;

/// One captured variant of a call: argument values and shapes, modes, flags of the model, and microbatch slot.
struct CallVariant {
  std::shared_ptr<SequenceHolder> holder;
  std::size_t call = 0;
  std::vector<KeptGuard> guards;
  std::vector<std::size_t> shape;
  std::shared_ptr<const void> structure = {};  ///< of its result
  std::uint64_t used_at = 0;                   ///< its capture or latest replay, on the site's clock

  /// Of its sequence as that is now.
  [[nodiscard]] std::size_t index() const;
};

/// One module or function whose calls the dispatcher serves.
struct CallSite {
  enum class Kind : std::uint8_t {
    eager,     ///< of ss::call, no pattern names it: a scope
    graphed,   ///< of ss::call, captured once it has been recorded; mismatches are handled as the options say
    callable,  ///< of make_graphed_callables: one capture, and what does not fit it is refused
  };

  Kind kind = Kind::eager;
  ScopeNode* scope = nullptr;
  std::shared_ptr<const torch::nn::Module> module;   ///< null for a plain function
  std::shared_ptr<const torch::nn::Module> watched;  ///< `module`, or the model for a plain function
  std::vector<CallVariant> variants;                 ///< of a callable: exactly one
  bool dropped = false;                              ///< by GraphedCallable::reset
  bool to_record =
      false;             ///< captures were dropped, for the model is another now: calls are recorded as in a first step
  EagerRuns eager_runs;  ///< of a graphed call
  bool warned_of_bound = false;       ///< CallOptions::max_captures
  bool warned_of_arguments = false;   ///< that run eagerly, where captures share memory
  bool warned_of_equality = false;    ///< of its arguments
  std::uint64_t clock = 0;            ///< counts captures and replays
  std::int64_t dropped_captures = 0;  ///< to make room for others: OnMaxCaptures::drop_least_used

  /// Captures of training, or of forwards alone.
  [[nodiscard]] std::size_t count(bool gradients) const;
  /// Of those the one that was used least recently and has no backward to come; null where there is none.
  [[nodiscard]] const CallVariant* least_used(bool gradients) const;
  /// How many of them have no backward to come.
  [[nodiscard]] std::size_t count_idle(bool gradients) const;
};

/// What `ss::call` was given so far, by module and by name. Threads: the step's.
class CallTable {
 public:
  /// Both must outlive this object. `graphed`: names of calls that are captured.
  CallTable(torch::nn::Module& model, ScopeTree& tree, NamePatterns graphed);

  /// The call's site, made on first use. A site met before is found without allocation. Null for a module that is not part of the
  /// model (another engine's, or nobody's): such a call is none of this engine's and runs as if there were none.
  [[nodiscard]] CallSite* site_for(const detail::CallRequest& request);
  /// A module that was registered since the last step is no longer taken for a foreign one.
  void begin_step() { foreign_.clear(); }
  /// True for groups of calls that match `graph`: their sequences offload them.
  [[nodiscard]] bool in_graphed_call(const std::string& group) const;
  /// Throws: UsageError for a pattern that no call matches.
  void check_patterns();
  [[nodiscard]] const std::deque<CallSite>& sites() const noexcept { return sites_; }
  /// No call has a capture any more.
  void drop_variants();
  /// Calls that have captures in `sequence` lose them, and are recorded again whatever the options say.
  void drop_variants_of(const SequenceHolder& sequence);
  /// Makes room for another capture of its call, which is as before that capture.
  void drop_variant(const CallVariant& variant);
  /// Not owned by the pointer: it outlives the engine.
  [[nodiscard]] std::shared_ptr<const torch::nn::Module> model() const {
    return {std::shared_ptr<const torch::nn::Module>(), &model_};
  }

 private:
  /// Throws: as check_patterns, for Options::delay.
  void check_delayed() const;
  void learn_names();

  torch::nn::Module& model_;
  ScopeTree& tree_;
  NamePatterns graphed_;
  std::unordered_map<const torch::nn::Module*, std::pair<std::string, std::shared_ptr<const torch::nn::Module>>> names_;
  std::unordered_set<const torch::nn::Module*> foreign_;  ///< looked for in vain in this step
  std::deque<CallSite> sites_;
  std::unordered_map<const void*, CallSite*> by_key_;  ///< by module, or by the address of a function's name
  bool patterns_match_ = false;
};

}  // namespace sidestream
