#include "sim/rerun/recording.h"

#include <algorithm>
#include <cstring>
#include <map>

#include <sidestream/error.h>

#include "sim/device/state.h"
#include "sim/rerun/rerun_order.h"

namespace sidestream::sim {
namespace {

// Ranges that some work has used, kept disjoint.
class TouchedRanges {
 public:
  // True if nothing of `access` was in it before.
  bool add(const Access& access) {
    const std::byte* begin = access.begin;
    const std::byte* end = access.begin + access.bytes;
    auto range = ends_.upper_bound(begin);
    if (range != ends_.begin() && std::prev(range)->second > begin) {
      --range;
    }
    const bool is_new = range == ends_.end() || range->first >= end;
    while (range != ends_.end() && range->first < end) {
      begin = std::min(begin, range->first);
      end = std::max(end, range->second);
      range = ends_.erase(range);
    }
    ends_.emplace(begin, end);
    return is_new;
  }

 private:
  std::map<const std::byte*, const std::byte*> ends_;
};

void poison(const std::byte* begin, std::size_t bytes) {
  std::memset(const_cast<std::byte*>(begin), poison_byte, bytes);
}

}  // namespace

Recording::Recording() : device_(Device::get()) {
  Device::State& state = device_.state();
  const std::lock_guard<std::recursive_mutex> lock(state.mutex);
  if (state.copy_issued) {
    throw UsageError("sim device: a recording is being made already; stop it first");
  }
  state.refuse_in_capture("a recording");
  state.timeline.start_keeping();
  state.keeping.store(true, std::memory_order_release);
  state.copy_issued = [this](const Work& copy) { keep_input_of(copy); };
  state.host_look = no_work;
  ++state.recordings;
  keep_start();
}

Recording::~Recording() {
  Device::State& state = device_.state();
  const std::lock_guard<std::recursive_mutex> lock(state.mutex);
  try {
    stop();
  } catch (const std::exception&) {
  }
  restore();
  if (--state.recordings == 0) {
    state.pinned.free_retired();
  }
}

void Recording::keep_start() {
  Device::State& state = device_.state();
  state.memory.for_each_segment([&](const Segment& segment) {
    if (segment.pool->is_private) {
      // Graphs use its free blocks as well.
      start_.emplace_back(segment.begin, segment.lent);
      return;
    }
    for (const Block* block = segment.first; block != nullptr; block = block->next) {
      if (block->lent) {
        start_.emplace_back(block->begin, block->requested);
      }
    }
  });
  for (const auto& [begin, bytes] : state.pinned.ranges()) {
    start_.emplace_back(begin, bytes);
  }
}

void Recording::keep_end() {
  Device::State& state = device_.state();
  end_.clear();
  state.memory.for_each_segment([&](const Segment& segment) { end_.emplace_back(segment.begin, segment.lent); });
  for (const auto& [begin, bytes] : state.pinned.ranges()) {
    end_.emplace_back(begin, bytes);
  }
}

void Recording::keep_input_of(const Work& copy) {
  for (const Access& access : copy.accesses) {
    if (device_.owns(access.begin)) {
      continue;
    }
    if (access.write) {
      copied_out_.push_back(access);
      continue;
    }
    const bool from_step =
        std::any_of(copied_out_.begin(), copied_out_.end(), [&](const Access& out) { return overlap(out, access); });
    const bool known = std::any_of(host_inputs_.begin(), host_inputs_.end(),
                                   [&](const MemoryImage& image) { return image.covers(access.begin, access.bytes); });
    if (!from_step && !known) {
      host_inputs_.emplace_back(const_cast<std::byte*>(access.begin), access.bytes);
    }
  }
}

void Recording::find_overwritten() {
  TouchedRanges touched;
  for (const RecordedWork& recorded : works_) {
    for (const Access& access : recorded.work->accesses) {
      if (touched.add(access) && access.fresh) {
        overwritten_.push_back(access);
      }
    }
  }
}

void Recording::stop() {
  Device::State& state = device_.state();
  const std::lock_guard<std::recursive_mutex> lock(state.mutex);
  if (stopped_) {
    return;
  }
  stopped_ = true;
  const WorkId first = state.timeline.first_id();
  std::deque<Queued> queue = state.timeline.stop_keeping();
  state.keeping.store(false, std::memory_order_release);
  state.copy_issued = nullptr;
  works_.reserve(queue.size());
  followers_.resize(queue.size());
  for (Queued& queued : queue) {
    RecordedWork recorded{std::move(queued.work), queued.queue, {}, std::move(queued.random)};
    std::sort(queued.after.begin(), queued.after.end());
    const auto last = std::unique(queued.after.begin(), queued.after.end());
    for (auto id = queued.after.begin(); id != last; ++id) {
      recorded.after.push_back(static_cast<std::uint32_t>(*id - first));
      followers_[*id - first].push_back(static_cast<std::uint32_t>(works_.size()));
    }
    works_.push_back(std::move(recorded));
  }
  find_overwritten();
}

void Recording::load_start() {
  Device::State& state = device_.state();
  state.memory.for_each_segment([](const Segment& segment) { poison(segment.begin, segment.lent); });
  for (const MemoryImage& image : start_) {
    if (device_.owns(image.begin) || state.pinned.mapped(image.begin)) {
      image.restore();
    }
  }
  for (const Access& range : overwritten_) {
    poison(range.begin, range.bytes);
  }
  for (const MemoryImage& image : host_inputs_) {
    image.restore();
  }
}

std::vector<std::uint32_t> Recording::order(const Schedule& schedule) const {
  if (!stopped_) {
    throw UsageError("sim device: rerun of a recording that is still being made; stop it first");
  }
  std::vector<std::uint32_t> result;
  result.reserve(works_.size());
  std::vector<std::uint32_t> missing(works_.size());
  std::vector<std::uint32_t> ready;
  for (std::uint32_t i = 0; i < works_.size(); ++i) {
    missing[i] = static_cast<std::uint32_t>(works_[i].after.size());
    if (missing[i] == 0) {
      ready.push_back(i);
    }
  }
  RerunOrder order(schedule, works_);
  while (!ready.empty()) {
    const std::size_t chosen = order.choose(ready);
    const std::uint32_t next = ready[chosen];
    ready[chosen] = ready.back();
    ready.pop_back();
    result.push_back(next);
    for (const std::uint32_t follower : followers_[next]) {
      if (--missing[follower] == 0) {
        ready.push_back(follower);
      }
    }
  }
  return result;
}

void Recording::rerun(const std::vector<std::uint32_t>& order) {
  Device::State& state = device_.state();
  const std::lock_guard<std::recursive_mutex> lock(state.mutex);
  if (!stopped_) {
    throw UsageError("sim device: rerun of a recording that is still being made; stop it first");
  }
  state.refuse_in_capture("a rerun");
  state.timeline.drain();
  if (!changed_) {
    keep_end();
    changed_ = true;
  }
  load_start();
  for (const std::uint32_t next : order) {
    run_work(*works_[next].work, works_[next].random.get());
  }
}

void Recording::restore() noexcept {
  const std::lock_guard<std::recursive_mutex> lock(device_.state().mutex);
  if (!changed_) {
    return;
  }
  changed_ = false;
  for (const MemoryImage& image : end_) {
    if (device_.owns(image.begin) || device_.state().pinned.mapped(image.begin)) {
      image.restore();
    }
  }
}

}  // namespace sidestream::sim
