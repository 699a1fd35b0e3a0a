#pragma once
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "analysis/planner.h"
#include "base/site.h"
#include "offload/name_pattern.h"

namespace sidestream {

/// One scope or call by its place in the nesting: a group's identity from step to step.
struct ScopeNode {
  std::string name;  ///< full, dotted; empty for the root
  std::string_view component;
  bool selected = false;     ///< it is offloaded: Options::offload names it, and no switch turns it off
  bool delayed = false;      ///< it is, and Options::delay names it
  std::uint32_t budget = 0;  ///< 1 + the index of the first budget that names it; 0 for none
  SiteName site;             ///< the name again, for sites
  std::vector<ScopeNode*> children;
};

/// Bounds what is offloaded of the groups that `named` matches.
struct NamedBudget {
  NamePatterns named;
  OffloadBudget budget;
};

/// All scopes that were ever entered. A scope seen before is found without allocation. Nodes live as long as the tree, or as what
/// `nodes` returned.
/// Threads: one at a time.
class ScopeTree {
 public:
  /// `selected` says which names are offloaded, `delayed` which of them are offloaded only after the next graph.
  explicit ScopeTree(NamePatterns selected, NamePatterns delayed = {}, std::vector<NamedBudget> budgets = {});

  [[nodiscard]] ScopeNode* root() noexcept { return root_; }
  [[nodiscard]] std::shared_ptr<const void> nodes() const noexcept { return nodes_; }
  /// The child of `parent` called `component`, made on first use. A call's name may hold dots.
  [[nodiscard]] ScopeNode* child(ScopeNode* parent, std::string_view component);
  /// The names of all nodes but the root, in the order they were first entered.
  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] const NamePatterns& selected() const noexcept { return selected_; }
  [[nodiscard]] const NamePatterns& delayed() const noexcept { return delayed_; }
  [[nodiscard]] const std::vector<NamedBudget>& budgets() const noexcept { return budgets_; }
  /// The names of those that Options::offload names.
  [[nodiscard]] std::vector<std::string> selected_names() const;

  /// Switches offload of the scopes that `named` matches off, or on again as far as the options name them. Of several switches that match
  /// one scope, the latest holds. True if a scope that was entered changes.
  bool switch_offload(const NamePatterns& named, bool on);
  /// Throws: UsageError if `named` matches no scope that was entered, and is not the name of a switch.
  void require_known(const NamePatterns& named) const;
  /// Throws: UsageError for a switch that matches no scope that was entered.
  void require_known_switches() const;
  /// For the report: the switches, the latest last; empty if there are none.
  [[nodiscard]] std::string describe_switches() const;

 private:
  struct Switch {
    NamePatterns named;
    bool on;
  };
  void require_entered(const NamePatterns& named) const;
  /// Decides whether `node` is offloaded.
  void select(ScopeNode& node) const;

  NamePatterns selected_;
  NamePatterns delayed_;
  std::vector<NamedBudget> budgets_;
  std::vector<Switch> switches_;  ///< the latest last
  std::shared_ptr<std::deque<ScopeNode>> nodes_ = std::make_shared<std::deque<ScopeNode>>();
  ScopeNode* root_;
};

}  // namespace sidestream
