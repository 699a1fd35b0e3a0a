#include "graphs/capture/node_naming.h"

#include <algorithm>
#include <memory>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

/// What autograd's engine reports around the operators of one of its nodes, and is no operator.
bool is_engine(const OperatorAccess& access) { return std::string_view(access.name).substr(0, 10) == "autograd::"; }

}  // namespace

void GradientScopes::enter(const ScopeNode& scope) {
  const std::uint64_t next = at::sequence_number::peek();
  if (!begins_.empty() && begins_.back().first == next) {
    begins_.back().second = &scope;
  } else {
    begins_.emplace_back(next, &scope);
  }
}

const ScopeNode* GradientScopes::of(std::uint64_t sequence_number) const noexcept {
  const auto after = std::upper_bound(begins_.begin(), begins_.end(), sequence_number,
                                      [](std::uint64_t sought, const auto& begin) { return sought < begin.first; });
  return after == begins_.begin() ? nullptr : (after - 1)->second;
}

NodeNaming::NodeNaming(const Runtime& runtime, c10::Stream capture, NodeNames& names, Recorder& recorder,
                       GradientScopes& scopes)
    : runtime_(runtime),
      capture_(capture),
      names_(names),
      scope_(&recorder.scope()),
      recorder_(&recorder),
      learned_(&scopes) {
  recorder.tell(this);
}

NodeNaming::NodeNaming(const Runtime& runtime, c10::Stream capture, NodeNames& names, const ScopeNode& call,
                       const GradientScopes& scopes)
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

// Names are for people: where one cannot be written down, the node goes without.
void NodeNaming::in_scope(const ScopeNode& scope) noexcept {
  try {
    scope_ = &scope;
    learned_->enter(scope);
    mark(scope, {});
  } catch (const std::exception&) {
  }
}

void NodeNaming::began(const OperatorAccess& access) {
  if (is_engine(access) || open_++ > 0) {
    return;
  }
  if (gradient_scopes_ == nullptr) {
    mark(*scope_, access.name);
    return;
  }
  const std::shared_ptr<torch::autograd::Node> node = torch::autograd::get_current_node();
  const ScopeNode* const scope = node == nullptr ? nullptr : gradient_scopes_->of(node->sequence_nr());
  mark(scope == nullptr ? *scope_ : *scope, node == nullptr ? access.name : node->name() + ": " + access.name);
}

void NodeNaming::ended(const OperatorAccess& access) {
  if (!is_engine(access) && --open_ == 0) {
    mark(*scope_, {});
  }
}

void NodeNaming::mark(const ScopeNode& scope, const std::string& work) {
  names_.mark(runtime_.captured_nodes(capture_), index_of(scope.name), index_of(work));
}

std::uint32_t NodeNaming::index_of(const std::string& text) {
  const auto known = texts_.find(text);
  return known != texts_.end() ? known->second : texts_.emplace(text, names_.add(text)).first->second;
}

}  // namespace sidestream
