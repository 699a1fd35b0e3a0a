#pragma once
#include <deque>
#include <memory>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "graphs/calls/call_site.h"
#include "offload/name_pattern.h"
#include "offload/scope_tree.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/detail/module_forward.h"

namespace sidestream {

/// What `ss::call` was given so far, by module and by name. Threads: the step's.
class CallTable {
 public:
  /// `model` and `tree` must outlive this object. `graphed`: names of calls that are captured. `rules`: of each call.
  CallTable(torch::nn::Module& model, ScopeTree& tree, NamePatterns graphed, const CallRules& rules);

  /// The call's site, made on first use. A site met before is found without allocation. Null for a module that is not part of the
  /// model, whether another engine has it or not: this engine runs such a call as if there were no engine.
  [[nodiscard]] CallSite* site_for(const detail::CallRequest& request);
  /// A module that was registered since the last step is no longer taken for a foreign one.
  void begin_step() { foreign_.clear(); }
  /// True for groups of calls that match `graph`: their sequences offload them.
  [[nodiscard]] bool in_graphed_call(const std::string& group) const;
  /// Throws: UsageError for a pattern that no call matches.
  void check_patterns();
  /// Patterns of `module` and of all inside of it, under each name that the model has for it.
  /// Throws: UsageError if it is not part of the model.
  [[nodiscard]] NamePatterns patterns_of(const torch::nn::Module& module) const;
  [[nodiscard]] std::deque<CallSite>& sites() noexcept { return sites_; }
  [[nodiscard]] const std::deque<CallSite>& sites() const noexcept { return sites_; }
  /// No call has a capture any more.
  void drop_variants();
  /// Calls that have captures in `sequence` lose them, and are recorded again whatever the options say.
  void drop_variants_of(const SequenceHolder& sequence);
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
  CallRules rules_;
  std::unordered_map<const torch::nn::Module*, std::pair<std::string, std::shared_ptr<const torch::nn::Module>>> names_;
  std::unordered_set<const torch::nn::Module*> foreign_;  ///< looked for in vain in this step
  std::deque<CallSite> sites_;
  std::unordered_map<const void*, CallSite*> by_key_;  ///< by module, or by the address of a function's name
  bool patterns_match_ = false;
};

}  // namespace sidestream
