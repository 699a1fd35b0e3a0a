#include "graphs/capture/node_naming.h"

#include <algorithm>
#include <memory>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include "base/site.h"

namespace sidestream {
namespace {

/// True for the report that autograd's engine makes around the operators of one of its nodes. It is no operator.
bool is_engine(const OperatorAccess& access) { return std::string_view(access.name).substr(0, 10) == "autograd::"; }

}  // namespace

void NodeNaming::Scopes::enter(const ScopeNode& scope) {
  const std::uint64_t next = at::sequence_number::peek();
  if (!begins_.empty() && begins_.back().first == next) {
    begins_.back().second = &scope;
  } else {
    begins_.emplace_back(next, &scope);
  }
}

const ScopeNode* NodeNaming::Scopes::of(std::uint64_t sequence_number) const noexcept {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), sequence_number,
                                      [](std::uint64_t sought, const auto& begin) { return sought < begin.first; });
  return after == begins_.begin() ? nullptr : (after - 1)->second;
}

NodeNaming::NodeNaming(const Runtime& runtime, c10::Stream capture, NodeNames& names, SavedTensorRecorder& recorder,
                       Scopes& scopes)
    : runtime_(runtime),
      capture_(capture),
      names_(names),
      scope_(&recorder.scope()),
      recorder_(&recorder),
      learned_(&scopes) {
  recorder.tell(this);
}

NodeNaming::NodeNaming(const Runtime& runtime, c10::Stream capture, NodeNames& names, const ScopeNode& call,
                       const Scopes& scopes)
    : runtime_(runtime), capture_(capture), names_(names), scope_(&call), gradient_scopes_(&scopes) {}

NodeNaming::~NodeNaming() {
  if (recorder_ != nullptr) {
    recorder_->tell(nullptr);
  }
}

OperatorObserverGuard NodeNaming::watch() {
  return OperatorObserverGuard([this](const OperatorAccess& access) { ended(access); },
                               [this](const OperatorAccess& access) { began(access); },
                               OperatorObserverGuard::Outer::hears_too);
}

// Names are for people: if a name cannot be written down, the node has none.
void NodeNaming::in_scope(const ScopeNode& scope) noexcept {
  try {
    if (call_ == nullptr && !scope.name.empty()) {
      call_ = &scope;
    }
    scope_ = scope.name.empty() && call_ != nullptr ? call_
                                                    : &scope;  // outside of all scopes of a recorder inside of the call
    learned_->enter(*scope_);
    mark(scope_->name, {});
  } catch (const std::exception&) {
  }
}

void NodeNaming::began(const OperatorAccess& access) {
  if (is_engine(access) || open_++ > 0) {
    return;
  }
  // A forward that asks for gradients itself, as a whole step's, has nodes of both kinds.
  const std::shared_ptr<torch::autograd::Node> node = torch::autograd::get_current_node();
  if (node == nullptr) {
    mark(scope_->name, access.name);
    return;
  }
  const Scopes& known = gradient_scopes_ != nullptr ? *gradient_scopes_ : *learned_;
  const ScopeNode* const scope = known.of(node->sequence_nr());
  mark(scope == nullptr ? scope_->name : scope->name, node->name() + ": " + access.name);
}

void NodeNaming::ended(const OperatorAccess& access) {
  if (is_engine(access) || --open_ > 0) {
    return;
  }
  const Site* const site = Site::innermost();
  const bool reloads = site != nullptr && site->phase() == phase_of(Activity::reload);  // its copies follow
  mark(reloads ? site->name() : std::string_view(scope_->name), {});
}

void NodeNaming::mark(std::string_view scope, std::string_view work) {
  names_.mark(runtime_.captured_nodes(capture_), index_of(scope), index_of(work));
}

std::uint32_t NodeNaming::index_of(std::string_view text) {
  const std::string key(text);
  const auto known = texts_.find(key);
  return known != texts_.end() ? known->second : texts_.emplace(key, names_.add(text)).first->second;
}

}  // namespace sidestream
