#include "offload/scope_tree.h"

#include <algorithm>

#include "sidestream/error.h"

namespace sidestream {

ScopeTree::ScopeTree(NamePatterns selected, NamePatterns delayed, std::vector<NamedBudget> budgets)
    : selected_(std::move(selected)),
      delayed_(std::move(delayed)),
      budgets_(std::move(budgets)),
      root_(&nodes_->emplace_back()) {}

ScopeNode* ScopeTree::child(ScopeNode* parent, std::string_view component) {
  for (ScopeNode* node : parent->children) {
    if (node->component == component) {
      return node;
    }
  }
  ScopeNode& node = nodes_->emplace_back();
  node.name = parent->name.empty() ? std::string(component) : parent->name + "." + std::string(component);
  node.component = std::string_view(node.name).substr(node.name.size() - component.size());
  select(node);
  node.site = SiteName(node.name);
  parent->children.push_back(&node);
  return &node;
}

std::vector<std::string> ScopeTree::names() const {
  std::vector<std::string> names;
  for (const ScopeNode& node : *nodes_) {
    if (&node != root_) {
      names.push_back(node.name);
    }
  }
  return names;
}

std::vector<std::string> ScopeTree::selected_names() const {
  std::vector<std::string> names;
  for (const ScopeNode& node : *nodes_) {
    if (&node != root_ && selected_.matches(node.name)) {
      names.push_back(node.name);
    }
  }
  return names;
}

void ScopeTree::select(ScopeNode& node) const {
  const auto of_node = [&](const Switch& each) { return each.named.matches(node.name); };
  const auto latest = std::find_if(switches_.rbegin(), switches_.rend(), of_node);
  node.selected = selected_.matches(node.name) && (latest == switches_.rend() || latest->on);
  node.delayed = node.selected && delayed_.matches(node.name);
  const auto budget = std::find_if(budgets_.begin(), budgets_.end(),
                                   [&](const NamedBudget& each) { return each.named.matches(node.name); });
  node.budget = budget == budgets_.end() ? 0 : static_cast<std::uint32_t>(budget - budgets_.begin() + 1);
}

bool ScopeTree::switch_offload(const NamePatterns& named, bool on) {
  const bool all = named.matches("");
  std::erase_if(switches_, [&](const Switch& each) { return all || each.named.patterns() == named.patterns(); });
  switches_.push_back({named, on});
  const auto first_off = std::find_if(switches_.begin(), switches_.end(), [](const Switch& each) { return !each.on; });
  switches_.erase(switches_.begin(), first_off);
  bool changes = false;
  for (ScopeNode& node : *nodes_) {
    const bool before = node.selected;
    if (&node != root_) {
      select(node);
    }
    changes = changes || node.selected != before;
  }
  return changes;
}

void ScopeTree::require_known(const NamePatterns& named) const {
  const auto is_it = [&](const Switch& each) { return each.named.patterns() == named.patterns(); };
  if (std::none_of(switches_.begin(), switches_.end(), is_it)) {
    require_entered(named);
  }
}

void ScopeTree::require_entered(const NamePatterns& named) const {
  const auto matches = [&](const std::string& name) { return named.matches(name); };
  const std::vector<std::string> known = names();
  if (std::any_of(known.begin(), known.end(), matches)) {
    return;
  }
  try {
    named.require_each_matches(known);
  } catch (const UsageError& error) {
    throw UsageError(
        std::string("OffloadEngine::set_activation_offloading: there is no such scope or call; call the module with "
                    "ss::call, put its code into an OffloadScope, or switch it on again: ") +
        error.what());
  }
}

void ScopeTree::require_known_switches() const {
  for (const Switch& each : switches_) {
    if (!each.on) {
      require_entered(each.named);
    }
  }
}

std::string ScopeTree::describe_switches() const {
  std::string text;
  for (const Switch& each : switches_) {
    for (const std::string& pattern : each.named.patterns()) {
      text += (text.empty() ? "\"" : ", \"") + pattern + (each.on ? "\" on" : "\" off");
    }
  }
  return text;
}

}  // namespace sidestream
