#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/StorageImpl.h>

#include "analysis/sequence_order.h"
#include "graphs/capture/captured_outputs.h"
#include "graphs/outputs/released_outputs.h"
#include "graphs/sequence/captured_call.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {

/// Until when the graphs of a sequence need the memory of outputs that are inputs of its calls. Then it goes back to the pool, and
/// nothing that the sequence keeps of it owns it any more.
///
/// An output is needed by the forwards that read it, and by the backward of a call that saved it, or by the copies to the host if it
/// is offloaded. What holds it and is unknown here may be read in that call's backward: a tensor that a node keeps as it is. What
/// bodies keep from call to call stays for good, and so do outputs that no call reads, and those that a view of is given out.
class OutputLiveness {
 public:
  /// What autograd and bodies hold while a sequence is captured.
  struct Holders {
    std::vector<at::Tensor> tensors;                    ///< leaves, arguments and outputs of the calls so far
    std::vector<const SavedTensorRecorder*> recorders;  ///< theirs
  };

  /// `calls` must outlive this object. `keeps_graph`: backwards may replay several times, so nothing is let go.
  OutputLiveness(const CapturedCalls& calls, const SequenceOrder& order, bool keeps_graph)
      : calls_(calls), order_(order), keeps_graph_(keeps_graph) {}

  /// The forward of call `index` is captured, and its outputs are sorted. `kept`: first outputs of storages that its body keeps.
  void forward_captured(std::size_t index, const SavedStorages& saved, const std::vector<std::size_t>& kept,
                        const Holders& holders);
  /// What the graphs from `graph_index` on do not need and was not told yet.
  [[nodiscard]] std::vector<Link> ended_before(std::size_t graph_index);

 private:
  struct Life {
    std::size_t needed_until = 0;  ///< index of the first graph that does without
    std::size_t unknown_holders = 0;
    bool read = false;
    bool let_go = false;  ///< by the program, before the next forward
    bool kept = false;
    bool ended = false;
  };

  /// The output storage that an input with `link` reads, as far as its calls are captured; none where it is no output of theirs.
  [[nodiscard]] std::optional<Link> storage_of(Link link) const;
  [[nodiscard]] bool is_read_from(std::size_t graph_index, const Link& storage) const;
  [[nodiscard]] bool may_end(const Life& life) const;
  void learn(std::size_t index, const Link& output, const SavedStorages& saved, const Holders& holders);

  const CapturedCalls& calls_;
  const SequenceOrder& order_;
  bool keeps_graph_;
  std::vector<std::vector<Life>> lives_;  ///< by call and output storage
};

}  // namespace sidestream
