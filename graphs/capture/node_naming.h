#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <c10/core/Stream.h>

#include "graphs/sequence/node_names.h"
#include "observe/operator_observer.h"
#include "offload/saved_tensor_recorder.h"
#include "offload/scope_tree.h"
#include "runtime/runtime.h"

namespace sidestream {

/// Writes down, while a graph is captured, which scope and which operator its nodes come from. A copy that the graph holds, as a whole
/// step's does, comes from the scope of its group.
///
/// Threads: the capture's and, in a backward, autograd's; one at a time.
class NodeNaming final : public ScopeListener {
 public:
  /// In which scope of a forward autograd's nodes were made: a backward's work belongs to the same scope.
  class Scopes {
   public:
    /// Autograd's nodes that the calling thread makes from here on are made in `scope`.
    void enter(const ScopeNode& scope);
    /// Null for a node that the forward did not make.
    [[nodiscard]] const ScopeNode* of(std::uint64_t sequence_number) const noexcept;

   private:
    std::vector<std::pair<std::uint64_t, const ScopeNode*>> begins_;  ///< by the number of their first node, rising
  };

  /// For a forward: `recorder` reports scopes, and `scopes` learns in which of them autograd's nodes are made.
  NodeNaming(const Runtime& runtime, c10::Stream capture, NodeNames& names, SavedTensorRecorder& recorder,
             Scopes& scopes);
  /// Of a backward of what `scopes` has seen in the call at `call`.
  NodeNaming(const Runtime& runtime, c10::Stream capture, NodeNames& names, const ScopeNode& call,
             const Scopes& scopes);
  ~NodeNaming() override;

  /// While it lives, operators of this thread and of backward passes that it starts are seen.
  [[nodiscard]] OperatorObserverGuard watch();
  void in_scope(const ScopeNode& scope) noexcept override;

 private:
  void began(const OperatorAccess& access);
  void ended(const OperatorAccess& access);
  void mark(std::string_view scope, std::string_view work);
  [[nodiscard]] std::uint32_t index_of(std::string_view text);

  const Runtime& runtime_;
  c10::Stream capture_;
  NodeNames& names_;
  const ScopeNode* scope_;
  const ScopeNode* call_ = nullptr;          ///< in a forward: its own scope
  SavedTensorRecorder* recorder_ = nullptr;  ///< null in a backward
  Scopes* learned_ = nullptr;                ///< null in a backward
  const Scopes* gradient_scopes_ = nullptr;  ///< null in a forward
  int open_ = 0;                             ///< operators that have begun and not ended
  std::unordered_map<std::string, std::uint32_t> texts_;
};

}  // namespace sidestream
