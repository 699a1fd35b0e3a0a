#include "graphs/calls/fitting_capture.h"

#include <algorithm>
#include <cstdint>
#include <string>

#include "graphs/calls/engine_sequences.h"
#include "graphs/calls/memory_shortage.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/resources/engine_resources.h"
#include "offload/name_pattern.h"

namespace sidestream {
namespace {

/// True where the options name anything that leaves.
bool offloads(const Options& options) {
  const auto& lists = options.offload_patterns();
  return std::any_of(lists.begin(), lists.end(),
                     [](const std::string& list) { return !NamePatterns::parse(list).empty(); });
}

/// What a step takes of the device beside the sequence that was just captured, as far as it is known.
std::int64_t needed_beside(const EngineResources& resources) {
  return std::max(resources.rest->bytes(), resources.exclusions.gradient_bytes());
}

/// What graphs take is told where it is much of what is left.
void note_room(const EngineResources& resources, GraphSequence& sequence) {
  constexpr std::int64_t kNotable = 10;
  const std::int64_t free = resources.runtime->room().free;
  if (const std::int64_t graphs = sequence.outside().graphs; graphs > free / kNotable) {
    sequence.note("the graphs of \"" + sequence.calls().front().spec.name + "\" and of the calls after it take " +
                  std::to_string(graphs) + " bytes of device memory beside their tensors, and " + std::to_string(free) +
                  " bytes are left. If that is too little for your step, graph fewer calls");
  }
  if (const std::int64_t needed = needed_beside(resources); needed > free) {
    sequence.note(
        "after the capture of \"" + sequence.calls().front().spec.name + "\" and the calls after it, " +
        std::to_string(free) + " bytes of device memory are left. That is " + std::to_string(needed - free) +
        " bytes fewer than the rest of the first step took: if a step runs out of memory, offload more, graph "
        "fewer calls or use a smaller batch");
  }
}

}  // namespace

std::shared_ptr<GraphSequence> capture_that_fits(EngineResources& resources, EngineSequences& sequences,
                                                 const std::vector<CallSpec>& specs, const GraphOptions& options,
                                                 const std::shared_ptr<GraphMemory>& memory) {
  GraphResources graphs = resources.for_graphs();
  CaptureAttempt attempt;
  graphs.attempt = &attempt;
  graphs.memory = memory;
  const bool may_offload_more = offloads(resources.options);
  // Ranks that capture together run the same collectives in it: none of them captures again for an estimate.
  const bool takes_what_fits = options.agree_to_capture() != nullptr;
  resources.runtime->release_cached_memory();
  for (;;) {
    const bool last = graphs.room == CopyRoom::none_stays || !may_offload_more;
    std::shared_ptr<GraphSequence> sequence;
    const CaptureShortage shortage(resources);
    try {
      sequence = SequenceCapture::make_sequence(graphs, specs, options);
    } catch (...) {
      sequences.mark_static_outputs();  // a capture ends with none marked
      if (last || !shortage.is_the_error()) {
        shortage.rethrow(sequences, attempt, specs.front().name);
      }
    }
    if (sequence != nullptr &&
        (last || takes_what_fits || resources.runtime->room().free >= needed_beside(resources))) {
      note_room(resources, *sequence);
      return sequence;
    }
    if (sequence != nullptr) {
      sequence.reset();
      sequences.mark_static_outputs();
    }
    graphs.room = graphs.room == CopyRoom::as_planned ? CopyRoom::least : CopyRoom::none_stays;
    resources.runtime->release_cached_memory();
  }
}

}  // namespace sidestream
