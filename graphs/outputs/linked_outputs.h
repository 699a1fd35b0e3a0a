#pragma once
#include <cstddef>
#include <map>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "graphs/guards/call_spec.h"
#include "graphs/outputs/storage_holders.h"
#include "offload/recorder_books.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/graph_options.h"

namespace sidestream {

/// The outputs of calls in their sizing passes, detached. They are the samples of the calls that read them; each is kept until the last
/// of these calls has run.
class LinkedOutputs {
 public:
  /// What a call did with outputs, its own and those of calls before it.
  struct Use {
    std::vector<std::pair<std::size_t, Link>> saved;  ///< which saved storage, and the first output that lies in it
    std::vector<Link> kept;  ///< first outputs in storages that its body keeps: its own, and those that it takes
    std::vector<WeakStorage> kept_storages;  ///< of `kept`, where they lay in the sizing pass
  };

  /// `specs` must outlive this object.
  explicit LinkedOutputs(const std::vector<CallSpec>& specs);
  LinkedOutputs(const LinkedOutputs&) = delete;
  LinkedOutputs& operator=(const LinkedOutputs&) = delete;
  ~LinkedOutputs() = default;
  /// What the next call made of `inputs`.
  void add(const std::vector<at::Tensor>& inputs, const detail::TensorBuffer& made);
  /// Throws: UsageError if there is no such output.
  [[nodiscard]] const at::Tensor& of(const CallSpec& reader, const Link& link) const;
  /// Which inputs of this call lie in memory that graphs make and may free. Not if the graphs keep saved tensors. Not if the output is a
  /// view of an input of its call, because replays make that view of the caller's tensor.
  [[nodiscard]] std::vector<bool> that_may_be_offloaded(std::size_t call, const GraphOptions& options) const;
  /// Of the call that was added last, after its sizing pass and its caller have freed all that they held. `saved`: the storages that it
  /// saved.
  [[nodiscard]] Use use_by_latest(const std::vector<SavedIdentity>& saved) const;
  /// All passes of this call are done.
  void ran(std::size_t call);

 private:
  struct Known {
    WeakStorage storage;  // keeps the address from being used again
    Link first;           // output that lies in it
  };
  [[nodiscard]] bool held_by_others(const WeakStorage& storage) const;

  const std::vector<CallSpec>& specs_;
  std::map<std::pair<std::size_t, std::size_t>, std::size_t> last_reader_;  // by call and output
  std::vector<std::vector<at::Tensor>> outputs_;
  std::vector<std::vector<bool>> views_of_inputs_;
  std::unordered_map<const c10::StorageImpl*, Known> known_;
  StorageHolders holders_;
};

}  // namespace sidestream
