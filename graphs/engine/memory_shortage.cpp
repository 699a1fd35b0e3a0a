#include "graphs/engine/memory_shortage.h"

#include <algorithm>
#include <cstddef>
#include <exception>
#include <sstream>
#include <string>
#include <typeinfo>
#include <vector>

#include <c10/util/Exception.h>
#include <c10/util/irange.h>

#include "graphs/engine/engine_chains.h"
#include "graphs/engine/engine_resources.h"
#include "offload/recorder.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

constexpr std::size_t kNamed = 3;

std::string mebibytes(std::uint64_t bytes) {
  const std::uint64_t tenths = (bytes * 10) >> 20;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " MiB";
}

/// "blocks.3.mlp" as "blocks.*.mlp": layers of one kind are told as one.
std::string pattern_of(const std::string& name) {
  std::string pattern;
  std::istringstream components(name);
  for (std::string component; std::getline(components, component, '.');) {
    const bool number = !component.empty() && std::all_of(component.begin(), component.end(),
                                                          [](char letter) { return letter >= '0' && letter <= '9'; });
    pattern += (pattern.empty() ? "" : ".") + (number ? "*" : component);
  }
  return pattern;
}

/// What autograd saved under names of one pattern, and stays on the device.
struct Kind {
  std::string pattern;
  std::uint64_t bytes = 0;
  bool selected = false;  ///< the options name it
};

/// What autograd saved: what leaves, and what stays.
class Saved {
 public:
  void add(const Profile& profile, const Plan* plan) {
    for (const auto i : c10::irange(profile.storages.size())) {
      const StorageProfile& storage = profile.storages[i];
      const GroupProfile& group = profile.groups[storage.savers.front()];
      if (plan != nullptr ? plan->decisions[i].fate == Fate::offloaded : group.selected) {
        leaves_ += storage.bytes;
        continue;
      }
      stays_ += storage.bytes;
      const std::string pattern = pattern_of(group.name);
      auto kind = std::find_if(kinds_.begin(), kinds_.end(), [&](const Kind& of) { return of.pattern == pattern; });
      if (kind == kinds_.end()) {
        kind = kinds_.insert(kind, {pattern});
      }
      kind->bytes += storage.bytes;
      kind->selected = kind->selected || group.selected;
    }
  }
  [[nodiscard]] std::uint64_t leaves() const noexcept { return leaves_; }
  [[nodiscard]] std::uint64_t stays() const noexcept { return stays_; }
  [[nodiscard]] std::vector<Kind> largest() const {
    std::vector<Kind> sorted = kinds_;
    std::sort(sorted.begin(), sorted.end(), [](const Kind& a, const Kind& b) { return a.bytes > b.bytes; });
    sorted.resize(std::min(sorted.size(), kNamed));
    return sorted;
  }

 private:
  std::uint64_t leaves_ = 0;
  std::uint64_t stays_ = 0;
  std::vector<Kind> kinds_;
};

std::string description(const Saved& saved, std::uint64_t refused) {
  std::string held;
  std::string more;
  for (const Kind& kind : saved.largest()) {
    held += (held.empty() ? ": " : ", ") + (kind.pattern.empty() ? "(no scope)" : kind.pattern) + " " +
            mebibytes(kind.bytes);
    if (!kind.selected && !kind.pattern.empty()) {
      more += (more.empty() ? "" : ",") + kind.pattern;
    }
  }
  const std::string all = saved.leaves() + saved.stays() == 0
                              ? ""
                              : "Of what autograd saved, " + mebibytes(saved.leaves()) + " leave and " +
                                    mebibytes(saved.stays()) + " stay" + held + ". ";
  return all + "To fit, " + (more.empty() ? "" : "offload \"" + more + "\" as well, ") +
         (refused > 0 ? "raise the host cap (" + mebibytes(refused) + " found no pinned memory), " : "") +
         "put what saves much into scopes that leave, or use a smaller batch";
}

}  // namespace

MemoryShortage::MemoryShortage(const EngineResources& resources) : resources_(resources) {
  const MemoryStats stats = resources.runtime->memory_stats();
  refusals_ = stats.refusals;
  allocated_ = stats.allocated;
}

bool MemoryShortage::met() const { return resources_.runtime->memory_stats().refusals > refusals_; }

std::string MemoryShortage::text(const EngineChains& chains, const Recorder* recorder) const noexcept {
  try {
    if (!met()) {
      return {};
    }
    Saved saved;
    chains.for_each([&](const Chain& chain) { saved.add(chain.profile(), &chain.plan()); });
    if (recorder != nullptr) {
      saved.add(recorder->profile(), nullptr);
    }
    return std::string("the device ran out of memory in a ") + (recorder != nullptr ? "step" : "capture") +
           ". It began with " + mebibytes(static_cast<std::uint64_t>(allocated_)) +
           " allocated, of them weights and buffers " + mebibytes(resources_.exclusions.registered_bytes()) + ". " +
           description(saved, recorder != nullptr ? recorder->counts().refused_bytes : 0);
  } catch (const std::exception&) {  // the allocator's error says at least that it is full
    return {};
  }
}

void MemoryShortage::warn(const EngineChains& chains, const Recorder& recorder) const noexcept {
  if (const std::string what = text(chains, &recorder); !what.empty()) {
    try {
      TORCH_WARN("Sidestream: ", what);
    } catch (const std::exception&) {  // a handler of warnings that throws
    }
  }
}

bool MemoryShortage::is_the_error() const {
  if (!met()) {
    return false;
  }
  try {
    throw;
  } catch (const c10::OutOfMemoryError&) {
    return true;
  } catch (const DeviceError& error) {
    return typeid(error) == typeid(DeviceError);
  } catch (...) {
    return false;
  }
}

void MemoryShortage::rethrow(const EngineChains& chains) const {
  const std::string what = text(chains, nullptr);
  if (what.empty()) {
    throw;
  }
  try {
    throw;
  } catch (const c10::OutOfMemoryError& error) {
    throw DeviceError(std::string(error.what_without_backtrace()) + "; " + what);
  } catch (const DeviceError& error) {
    if (typeid(error) != typeid(DeviceError)) {
      throw;
    }
    throw DeviceError(std::string(error.what()) + "; " + what, error.status());
  }
}

}  // namespace sidestream
