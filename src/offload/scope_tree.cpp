#include "offload/scope_tree.h"

namespace sidestream {

ScopeTree::ScopeTree(NamePatterns selected, NamePatterns delayed)
    : selected_(std::move(selected)), delayed_(std::move(delayed)), root_(&nodes_.emplace_back()) {}

ScopeNode* ScopeTree::child(ScopeNode* parent, std::string_view component) {
  for (ScopeNode* node : parent->children) {
    if (node->component == component) {
      return node;
    }
  }
  ScopeNode& node = nodes_.emplace_back();
  node.name = parent->name.empty() ? std::string(component) : parent->name + "." + std::string(component);
  node.component = std::string_view(node.name).substr(node.name.size() - component.size());
  node.selected = selected_.matches(node.name);
  node.delayed = node.selected && delayed_.matches(node.name);
  node.site = SiteName(node.name);
  parent->children.push_back(&node);
  return &node;
}

std::vector<std::string> ScopeTree::names() const {
  std::vector<std::string> names;
  for (const ScopeNode& node : nodes_) {
    if (&node != root_) {
      names.push_back(node.name);
    }
  }
  return names;
}

std::vector<std::string> ScopeTree::selected_names() const {
  std::vector<std::string> names;
  for (const ScopeNode& node : nodes_) {
    if (&node != root_ && node.selected) {
      names.push_back(node.name);
    }
  }
  return names;
}

}  // namespace sidestream
