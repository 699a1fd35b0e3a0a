#include "graphs/calls/call_table.h"

#include <algorithm>
#include <vector>

#include <torch/nn/module.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Throws: UsageError with `rule` for a pattern that matches none of `names`.
void require_offloaded(const NamePatterns& named, const std::vector<std::string>& names, const char* rule) {
  try {
    named.require_each_matches(names);
  } catch (const UsageError& error) {
    throw UsageError(rule + std::string(error.what()));
  }
}

}  // namespace

CallTable::CallTable(torch::nn::Module& model, ScopeTree& tree, NamePatterns graphed, const CallRules& rules)
    : model_(model), tree_(tree), graphed_(std::move(graphed)), rules_(rules) {
  learn_names();
}

void CallTable::learn_names() {
  names_.clear();
  for (const auto& item : model_.named_modules("", /*include_self=*/false)) {
    names_.emplace(item.value().get(), std::make_pair(item.key(), item.value()));
  }
  names_.emplace(&model_, std::make_pair("model", model()));
}

CallSite* CallTable::site_for(const detail::CallRequest& request) {
  const void* key = request.module != nullptr ? static_cast<const void*>(request.module) : request.name;
  if (const auto found = by_key_.find(key); found != by_key_.end()) {
    const CallSite& site = *found->second;  // the address may have been freed and used again, for the other kind too
    if (site.module.get() == request.module && (site.module != nullptr || site.scope->name == request.name)) {
      return found->second;
    }
  }
  std::string name;
  std::shared_ptr<const torch::nn::Module> module;
  if (request.module != nullptr) {
    if (foreign_.count(request.module) != 0) {
      return nullptr;
    }
    auto known = names_.find(request.module);
    if (known == names_.end()) {
      learn_names();
      known = names_.find(request.module);
    }
    if (known == names_.end()) {
      foreign_.insert(request.module);
      return nullptr;
    }
    name = known->second.first;
    module = known->second.second;
  } else {
    name = request.name;
  }
  ScopeNode* scope = tree_.child(tree_.root(), name);
  for (CallSite& site : sites_) {
    if (site.scope == scope && site.module == module) {
      by_key_[key] = &site;
      return &site;
    }
  }
  CallSite& site = sites_.emplace_back();
  site.scope = scope;
  site.watched = module != nullptr ? module : model();
  site.module = std::move(module);
  for (const CallSite& other : sites_) {
    if (other.scope == scope) {  // the module took that one's place
      site.to_record = site.to_record || other.to_record || !other.variants.all.empty();
      site.captured_before = site.captured_before || other.captured_before;
    }
  }
  site.rules = rules_;
  site.kind = graphed_.matches(name) ? CallSite::Kind::graphed : CallSite::Kind::eager;
  by_key_[key] = &site;
  return &site;
}

bool CallTable::in_graphed_call(const std::string& group) const {
  return std::any_of(sites_.begin(), sites_.end(), [&](const CallSite& site) {
    const std::string& name = site.scope->name;
    return site.kind == CallSite::Kind::graphed && group.compare(0, name.size(), name) == 0 &&
           (group.size() == name.size() || group[name.size()] == '.');
  });
}

NamePatterns CallTable::patterns_of(const torch::nn::Module& module) const {
  std::vector<std::string> patterns;
  for (const auto& item : model_.named_modules("", /*include_self=*/false)) {
    if (item.value().get() == &module) {
      patterns.push_back(item.key() + ".**");
    }
  }
  if (&module == &model_) {
    patterns.emplace_back("**");
  }
  if (patterns.empty()) {
    throw UsageError("OffloadEngine::set_activation_offloading: the module \"" + module.name() +
                     "\" is not part of the engine's model; pass one of its modules, or the name of a scope");
  }
  return NamePatterns(std::move(patterns));
}

void CallTable::check_patterns() {
  tree_.require_known_switches();
  if (patterns_match_) {
    return;  // names never go
  }
  std::vector<std::string> called;
  for (const CallSite& site : sites_) {
    called.push_back(site.scope->name);
  }
  if (!graphed_.empty() && !graphed_.matches("")) {
    graphed_.require_each_matches(called, NameKind::call);
  }
  if (!tree_.selected().empty() && !tree_.selected().matches("")) {
    tree_.selected().require_each_matches(tree_.names());
  }
  if (!tree_.delayed().empty() && !tree_.delayed().matches("")) {
    check_delayed();
  }
  for (const NamedBudget& budget : tree_.budgets()) {
    if (!budget.named.matches("")) {
      require_offloaded(budget.named, tree_.selected_names(),
                        "Options::offload_at_most and offload_fraction can name only scopes that Options::offload also "
                        "names: ");
    }
  }
  patterns_match_ = true;
}

void CallTable::check_delayed() const {
  std::vector<std::string> eager = tree_.selected_names();
  eager.erase(
      std::remove_if(eager.begin(), eager.end(), [&](const std::string& name) { return in_graphed_call(name); }),
      eager.end());
  require_offloaded(tree_.delayed(), eager,
                    "Options::delay can name only scopes outside of graphed calls that Options::offload also names: ");
}

void CallTable::drop_variants() {
  for (CallSite& site : sites_) {
    site.variants.all.clear();
    site.to_record = false;
  }
}

void CallTable::drop_variants_of(const SequenceHolder& sequence) {
  for (CallSite& site : sites_) {
    const auto of_sequence = [&](const CallVariant& variant) { return variant.holder.get() == &sequence; };
    site.to_record = std::erase_if(site.variants.all, of_sequence) > 0 || site.to_record;
  }
}

}  // namespace sidestream
