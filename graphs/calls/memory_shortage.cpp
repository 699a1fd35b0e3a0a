#include "graphs/calls/memory_shortage.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <typeinfo>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include "base/mebibytes.h"
#include "graphs/capture/sequence_capture.h"
#include "graphs/resources/engine_resources.h"
#include "offload/name_pattern.h"
#include "offload/saved_tensor_recorder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

constexpr std::size_t kNamed = 3;

/// Saved tensors that stay on the device, under names of one pattern.
struct Kind {
  std::string pattern;
  std::uint64_t bytes = 0;
  bool selected = false;  ///< the options name it
};

/// The bytes that autograd saved: offloaded, and kept on the device.
class Saved {
 public:
  /// Those of the calls of `sequences`.
  explicit Saved(const SequenceHolders& sequences) {
    for_each_sequence(
        sequences, [&](const GraphSequence& sequence) { add(sequence.captured().profile, &sequence.captured().plan); });
  }
  void add(const Profile& profile, const Plan* plan) {
    for (const auto i : c10::irange(profile.storages.size())) {
      const StorageProfile& storage = profile.storages[i];
      const GroupProfile& group = profile.groups[storage.savers.front()];
      if (plan != nullptr ? plan->decisions[i].fate == Fate::offloaded : group.selected) {
        offloaded_ += storage.bytes;
        continue;
      }
      kept_ += storage.bytes;
      const std::string pattern = numbers_as_stars(group.name);
      auto kind = std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& of) { return of.pattern == pattern; });
      if (kind == kinds_.end()) {
        kind = kinds_.insert(kind, {pattern});
      }
      kind->bytes += storage.bytes;
      kind->selected = kind->selected || group.selected;
    }
  }
  [[nodiscard]] std::uint64_t offloaded() const noexcept { return offloaded_; }
  [[nodiscard]] std::uint64_t kept() const noexcept { return kept_; }
  [[nodiscard]] std::vector<Kind> largest() const {
    std::vector<Kind> sorted = kinds_;
    std::sort(sorted.begin(), sorted.end(), [](const Kind& a, const Kind& b) { return a.bytes > b.bytes; });
    sorted.resize(std::min(sorted.size(), kNamed));
    return sorted;
  }

 private:
  std::uint64_t offloaded_ = 0;
  std::uint64_t kept_ = 0;
  std::vector<Kind> kinds_;
};

/// `refused`: bytes that found no pinned memory. `at_cap`: the cap has no room for them.
std::string description(const Saved& saved, std::uint64_t refused, bool at_cap) {
  std::string held;
  std::string more;
  for (const Kind& kind : saved.largest()) {
    held += (held.empty() ? ": " : ", ") + (kind.pattern.empty() ? "(no scope)" : kind.pattern) + " " +
            mebibytes(kind.bytes);
    if (!kind.selected && !kind.pattern.empty()) {
      more += (more.empty() ? "" : ",") + kind.pattern;
    }
  }
  const std::string all = saved.offloaded() + saved.kept() == 0
                              ? ""
                              : "Of the tensors that autograd saved, " + mebibytes(saved.offloaded() - refused) +
                                    " are offloaded and " + mebibytes(saved.kept() + refused) + " stay on the device" +
                                    held + ". ";
  return all + "To fit, " + (more.empty() ? "" : "offload \"" + more + "\" as well, ") +
         (refused == 0 ? ""
          : at_cap     ? "raise the host cap (" + mebibytes(refused) + " found no pinned memory), "
                       : "repeat the step (" + mebibytes(refused) +
                         " found no pinned memory, because no plan knew of them; the next step pins it), ") +
         "put code that saves large tensors into scopes that are offloaded, or use a smaller batch";
}

/// The error that is being handled, if the allocator threw it or if it says that a graph found no room.
struct NoRoom {
  std::string text;
  std::int64_t status = 0;
};

std::optional<NoRoom> error_in_hand() {
  try {
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    return NoRoom{error.what_without_backtrace(), 0};
  } catch (const DeviceError& error) {
    if (typeid(error) == typeid(DeviceError)) {
      return NoRoom{error.what(), error.status()};
    }
    return std::nullopt;
  } catch (...) {
    return std::nullopt;
  }
}

std::string beginning(const EngineResources& resources, const char* where, std::int64_t allocated) {
  return std::string("the device ran out of memory in a ") + where + ". The " + where + " began with " +
         mebibytes(allocated) + " allocated, including weights and buffers of " +
         mebibytes(resources.exclusions.registered_bytes()) + ". ";
}

/// True if the options name anything to offload.
bool offloads(const Options& options) {
  const auto& lists = options.offload_patterns();
  return std::any_of(lists.begin(), lists.end(),
                     [](const std::string& list) { return !NamePatterns::parse(list).empty(); });
}

/// Device memory that a step takes besides the sequence that was just captured, as far as it is known.
std::int64_t needed_beside(const EngineResources& resources) {
  return std::max(resources.rest->bytes(), resources.exclusions.gradient_bytes());
}

/// A note says how much graphs take, if that is a large part of the remaining memory.
void note_room(const EngineResources& resources, GraphSequence& sequence) {
  constexpr std::int64_t kNotable = 10;
  const std::int64_t free = resources.runtime->room().free;
  if (const std::int64_t graphs = sequence.captured().outside.graphs; graphs > free / kNotable) {
    sequence.note("the graphs of \"" + sequence.captured().calls.front().spec.name +
                  "\" and of the calls after it take " + std::to_string(graphs) +
                  " bytes of device memory beside their tensors, and " + std::to_string(free) +
                  " bytes are left. If that is too little for your step, graph fewer calls");
  }
  if (const std::int64_t needed = needed_beside(resources); needed > free) {
    sequence.note(
        "after the capture of \"" + sequence.captured().calls.front().spec.name + "\" and the calls after it, " +
        std::to_string(free) + " bytes of device memory are left. That is " + std::to_string(needed - free) +
        " bytes fewer than the rest of the first step took: if a step runs out of memory, offload more, graph "
        "fewer calls or use a smaller batch");
  }
}

}  // namespace

MemoryShortage::MemoryShortage(const EngineResources& resources) : resources_(resources) {
  const MemoryStats stats = resources.runtime->memory_stats();
  refusals_ = stats.refusals;
  allocated_ = stats.allocated;
  reserved_ = stats.reserved;
}

bool MemoryShortage::met() const { return resources_.runtime->memory_stats().refusals > refusals_; }

void MemoryShortage::warn(const SequenceHolders& sequences, const SavedTensorRecorder& recorder) const noexcept {
  try {
    if (!met()) {
      return;
    }
    Saved saved(sequences);
    saved.add(recorder.profile(), nullptr);
    const std::uint64_t refused = std::min(recorder.counts().refused_bytes, saved.offloaded());
    TORCH_WARN("Sidestream: ", beginning(resources_, "step", allocated_),
               description(saved, refused, resources_.arena->budget()->room() < refused));
  } catch (const std::
               exception&) {  // a handler of warnings that throws; the allocator's error says at least that it is full
  }
}

bool MemoryShortage::is_the_error() const { return met() && error_in_hand().has_value(); }

std::string MemoryShortage::lack(const std::string& first) const {
  const MemoryRefusal refusal = resources_.runtime->latest_refusal();
  if (refusal.asked <=
      refusal.free) {  // the size of the request is unknown, or there was enough memory in smaller pieces
    return {};
  }
  const std::int64_t taken = std::max<std::int64_t>(0, refusal.reserved - reserved_);
  return "\"" + first + "\" and the calls after it needed at least " + std::to_string(taken + refusal.asked) +
         " bytes, but " + std::to_string(taken + refusal.free) + " were free: at least " +
         std::to_string(refusal.asked - refusal.free) + " too few. ";
}

void MemoryShortage::rethrow(const SequenceHolders& sequences, const GraphResources::Attempt& attempt,
                             const std::string& first) const {
  const std::optional<NoRoom> error = met() ? error_in_hand() : std::nullopt;
  if (!error) {
    throw;
  }
  Saved saved(sequences);
  saved.add(attempt.profile, &attempt.plan);
  throw DeviceError(
      error->text + "; " + beginning(resources_, "capture", allocated_) + lack(first) + description(saved, 0, false),
      error->status);
}

std::shared_ptr<GraphSequence> capture_that_fits(EngineResources& resources, const SequenceHolders& others,
                                                 const std::function<void()>& mark_outputs,
                                                 const std::vector<CallSpec>& specs, const SequenceOrder& order,
                                                 const GraphOptions& options,
                                                 const std::shared_ptr<GraphMemory>& memory) {
  GraphResources graphs = resources.for_graphs();
  GraphResources::Attempt attempt;
  graphs.attempt = &attempt;
  graphs.memory = memory;
  const bool may_offload_more = offloads(resources.options);
  // Ranks that capture together run the same collectives in it: none of them captures again for an estimate.
  const bool takes_what_fits = options.agree_to_capture() != nullptr;
  resources.runtime->release_cached_memory();
  for (;;) {
    const bool last = graphs.room == GraphResources::CopyRoom::none_stays || !may_offload_more;
    std::shared_ptr<GraphSequence> sequence;
    const MemoryShortage shortage(resources);
    try {
      sequence = capture_sequence(graphs, specs, order, options);
    } catch (...) {
      mark_outputs();
      if (last || !shortage.is_the_error()) {
        shortage.rethrow(others, attempt, specs.front().name);
      }
    }
    if (sequence != nullptr &&
        (last || takes_what_fits || resources.runtime->room().free >= needed_beside(resources))) {
      note_room(resources, *sequence);
      return sequence;
    }
    if (sequence != nullptr) {
      sequence.reset();
      mark_outputs();
    }
    graphs.room = graphs.room == GraphResources::CopyRoom::as_planned ? GraphResources::CopyRoom::least
                                                                      : GraphResources::CopyRoom::none_stays;
    resources.runtime->release_cached_memory();
  }
}

}  // namespace sidestream
