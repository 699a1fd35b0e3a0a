#pragma once
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/site.h"
#include "offload/name_pattern.h"

namespace sidestream {

/// One scope or call by its place in the nesting: a group's identity from step to step.
struct ScopeNode {
  std::string name;  ///< full, dotted; empty for the root
  std::string_view component;
  bool selected = false;  ///< the offload patterns name it
  bool delayed = false;   ///< Options::delay does
  SiteName site;          ///< the name again, for sites
  std::vector<ScopeNode*> children;
};

/// All scopes that were ever entered. A scope seen before is found without allocation. Nodes live as long as the tree.
/// Threads: one at a time.
class ScopeTree {
 public:
  /// `selected` says which names are offloaded, `delayed` which of them are offloaded only after the next graph.
  explicit ScopeTree(NamePatterns selected, NamePatterns delayed = {});

  [[nodiscard]] ScopeNode* root() noexcept { return root_; }
  /// The child of `parent` called `component`, made on first use. A call's name may hold dots.
  [[nodiscard]] ScopeNode* child(ScopeNode* parent, std::string_view component);
  /// The names of all nodes but the root, in the order they were first entered.
  [[nodiscard]] std::vector<std::string> names() const;
  [[nodiscard]] const NamePatterns& selected() const noexcept { return selected_; }
  [[nodiscard]] const NamePatterns& delayed() const noexcept { return delayed_; }
  /// The names of those that are offloaded.
  [[nodiscard]] std::vector<std::string> selected_names() const;

 private:
  NamePatterns selected_;
  NamePatterns delayed_;
  std::deque<ScopeNode> nodes_;
  ScopeNode* root_;
};

}  // namespace sidestream
