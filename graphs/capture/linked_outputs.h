#pragma once
#include <cstddef>
#include <map>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>
#include <c10/util/intrusive_ptr.h>

#include "graphs/capture/sizing_pass.h"
#include "graphs/guards/call_spec.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// What calls gave in their sizing passes, detached: the samples of the calls that read it, each until the last of them has run.
class LinkedOutputs {
 public:
  /// `specs` must outlive this object.
  explicit LinkedOutputs(const std::vector<CallSpec>& specs);
  /// What the next call made of `inputs`.
  void add(const std::vector<at::Tensor>& inputs, const detail::TensorBuffer& made);
  /// Throws: UsageError where there is no such output.
  [[nodiscard]] const at::Tensor& of(const CallSpec& reader, const Link& link) const;
  /// Which inputs of this call lie in memory that graphs make and could let go of: not where they keep what is saved, nor where the
  /// output is a view of what its call was given, which replays make of the caller's own.
  [[nodiscard]] std::vector<bool> that_may_be_offloaded(std::size_t call, const GraphOptions& options) const;
  /// Of the call that was added last, when nothing is left of its sizing pass but `sizing`: which outputs it saved, and which it
  /// keeps.
  void learn_of(CallSizing& sizing);
  /// All passes of this call are done.
  void ran(std::size_t call);

 private:
  struct Known {
    c10::weak_intrusive_ptr<c10::StorageImpl> storage;  // keeps the address from being used again
    Link first;                                         // output that lies in it
  };
  /// How many outputs that are kept here lie in it.
  [[nodiscard]] std::size_t references_to(const c10::StorageImpl* storage) const;
  [[nodiscard]] bool held_by_others(const c10::StorageImpl* storage) const;

  const std::vector<CallSpec>& specs_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> last_reader_;  // by call and output
  std::vector<std::vector<at::Tensor>> outputs_;
  std::vector<std::vector<bool>> views_of_inputs_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
};

/// Marks in the profiles the inputs that are to stay on the device: to offload an output frees its memory where one call saves it,
/// as an input, and no body keeps it.
void keep_outputs_that_several_need(std::vector<CallSizing>& sizings);

}  // namespace sidestream
