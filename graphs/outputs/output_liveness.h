#pragma once
#include <cstddef>
#include <optional>
#include <vector>

#include "analysis/sequence_order.h"
#include "graphs/guards/call_spec.h"
#include "graphs/outputs/output_storage.h"
#include "graphs/outputs/static_tensors.h"
#include "graphs/outputs/storage_holders.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {

/// Says until when the graphs of a sequence need the memory of outputs that are inputs of its calls. After that the memory goes back to
/// the pool, and no tensor of the sequence owns it.
///
/// Three kinds of graphs need an output: the forwards that read it, the backward of a call that saved it, and, if it is offloaded, the
/// graphs before the copies to the host are done. If an unknown holder has an output, the backward of the call that runs then may read
/// it: a node of autograd may keep a tensor as it is. An output that no call reads is needed until the first forward after the backward of
/// its call, if there is one: the caller holds it while that backward goes on through other calls. These outputs stay for good: those that
/// bodies keep from call to call, others that no call reads, and those of which a view is given out.
class OutputLiveness {
 public:
  /// A forward whose capture has ended. The lists must outlive the OutputLiveness.
  struct CapturedForward {
    const std::vector<StaticOutput>& outputs;
    const std::vector<OutputStorage>& storages;
  };
  /// What its capture has shown.
  struct Findings {
    const SavedStorages& saved;
    const SavedTensorRecorder& recorder;
    const std::vector<Link>& kept;  ///< first outputs in storages that its body keeps: its own, and those that it takes
    std::size_t released_at = 0;    ///< index of the first graph after its copies to the host
    bool delays = false;            ///< its weights graph reads what it saves
  };

  /// `order` and `holders` must outlive this object. `keeps_graph`: backwards may replay several times, so no memory is released.
  OutputLiveness(const std::vector<CallSpec>& specs, const SequenceOrder& order, const StorageHolders& holders,
                 bool keeps_graph);

  /// Forwards are told in the order of their captures.
  void forward_captured(const CapturedForward& forward, const Findings& findings);
  /// The outputs that the graphs from `graph_index` on do not need. Each is returned once.
  [[nodiscard]] std::vector<Link> ended_before(std::size_t graph_index);

 private:
  struct Life {
    std::size_t needed_until = 0;  ///< index of the first graph that does not need it
    bool read = false;
    bool released = false;  ///< by the program, before the next forward
    bool kept = false;
    bool ended = false;
  };
  /// What the specs say of one call.
  struct Call {
    std::vector<std::optional<Link>> inputs;  ///< the outputs that they are linked to
    std::vector<bool> outputs_released;
  };

  /// The output storage that an input with `link` reads. Not set if it is not an output, or not yet captured.
  [[nodiscard]] std::optional<Link> storage_of(Link link) const;
  [[nodiscard]] bool is_read_from(std::size_t graph_index, const Link& storage) const;
  /// Index of the first graph that may use the memory of an output of `call`; none if it stays for good.
  [[nodiscard]] std::optional<std::size_t> end_of(const Life& life, std::size_t call) const;
  void learn(const Link& output, const Findings& findings);

  const SequenceOrder& order_;
  const StorageHolders& holders_;
  bool keeps_graph_;
  std::vector<Call> calls_;
  std::vector<CapturedForward> forwards_;
  std::vector<std::vector<Life>> lives_;  ///< by call and output storage
};

}  // namespace sidestream
