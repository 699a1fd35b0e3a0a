#include "sim/device/capture.h"

#include <algorithm>
#include <cstring>
#include <set>

#include <sidestream/error.h>

#include "runtime/capture_turn.h"
#include "sim/device/graph.h"
#include "sim/device/state.h"
#include "sim/torch/device_guard.h"

namespace sidestream::sim {
namespace {

std::vector<MemoryImage>::iterator image_of(std::vector<MemoryImage>& images, const Segment& segment) {
  return std::find_if(images.begin(), images.end(),
                      [&](const MemoryImage& image) { return image.begin == segment.begin; });
}

}  // namespace

CaptureMemory::CaptureMemory(CachingAllocator& memory, Pool& pool) : memory_(memory), pool_(pool) {
  for (const Segment* segment : pool_.segments) {
    const auto computed = image_of(pool_.captured, *segment);
    if (computed != pool_.captured.end() && computed->bytes.size() == segment->lent) {
      computed->swap();  // copies of a whole pool at each capture take long
      pool_before_.push_back(std::move(*computed));
      pool_.captured.erase(computed);
    } else {
      pool_before_.emplace_back(segment->begin, segment->lent);
    }
  }
  const auto put_back = [this](const MemoryImage& image) {
    preserve(image.begin, image.bytes.size());
    image.restore();
  };
  std::set<const Pool*> others;
  memory_.for_each_segment([&](const Segment& segment) { others.insert(segment.pool); });
  others.erase(&pool_);
  for (const Pool* const other : others) {
    if (other->captured_by != std::this_thread::get_id()) {  // that thread may launch its graphs meanwhile
      continue;
    }
    for (const MemoryImage& image : other->captured) {
      const Segment* const segment = memory_.segment_of(image.begin);
      if (segment != nullptr && segment->pool == other && image.bytes.size() <= segment->bytes) {
        put_back(image);
      }
    }
  }
  for (const MemoryImage& image : pool_.captured) {
    put_back(image);
  }
}

void CaptureMemory::preserve(std::byte* begin, std::size_t bytes) {
  const Segment* segment = memory_.segment_of(begin);
  if (segment != nullptr && segment->pool == &pool_) {
    return;
  }
  for (const MemoryImage& image : outside_before_) {
    if (image.covers(begin, bytes)) {
      return;
    }
  }
  outside_before_.emplace_back(begin, bytes);
}

void CaptureMemory::finish() {
  pool_.captured.clear();
  pool_.captured_by = std::this_thread::get_id();
  for (const Segment* segment : pool_.segments) {
    auto image = image_of(pool_before_, *segment);
    if (image == pool_before_.end()) {
      image = pool_before_.emplace(image, segment->begin, 0);
    }
    image->bytes.resize(segment->lent, std::byte{poison_byte});
    image->swap();
    pool_.captured.push_back(std::move(*image));
    pool_before_.erase(image);
  }
  for (const MemoryImage& image : outside_before_) {
    if (!memory_.owns(image.begin)) {
      pool_.captured.emplace_back(image.begin, image.bytes.size());
    }
  }
  // Overlapping ranges: the first one kept holds the oldest bytes.
  for (auto image = outside_before_.rbegin(); image != outside_before_.rend(); ++image) {
    image->restore();
  }
}

Capture::Capture(std::uint64_t number_, c10::StreamId origin_, CachingAllocator& memory_, Pool& pool_,
                 c10::ArrayRef<at::Generator> generators)
    : number(number_),
      origin(origin_),
      thread(std::this_thread::get_id()),
      pool(pool_),
      streams{origin_},
      memory(memory_, pool_),
      stood_{{default_generator(), default_state()}} {
  for (const at::Generator& generator : generators) {
    if (!knows(generator)) {
      stood_.push_back({generator, state_of(generator)});
    }
  }
}

bool Capture::knows(const at::Generator& generator) const noexcept {
  return std::any_of(stood_.begin(), stood_.end(), [&](const Stood& stood) { return stood.generator == generator; });
}

void Capture::put_draws_back() const {
  for (const Stood& stood : stood_) {
    set_state_of(stood.generator, stood.state);
  }
}

void Capture::add(NodeSet& last, std::shared_ptr<const Work> work, c10::intrusive_ptr<EventState> event) {
  CapturedWork& node = nodes.emplace_back();
  node.work = std::move(work);
  node.after = last;
  node.event = std::move(event);
  listed += node.work->kind != Work::Kind::poison ? 1 : 0;
  last.assign(1, static_cast<std::uint32_t>(nodes.size() - 1));
}

bool Capture::joined(const NodeSet& last) const {
  std::vector<bool> reached(nodes.size(), false);
  for (const std::uint32_t node : last) {
    reached[node] = true;
  }
  for (std::size_t node = nodes.size(); node-- > 0;) {
    if (!reached[node]) {
      if (nodes[node].work->kind != Work::Kind::poison) {
        return false;
      }
      continue;
    }
    for (const std::uint32_t before : nodes[node].after) {
      reached[before] = true;
    }
  }
  return true;
}

void merge(NodeSet& set, const NodeSet& more) {
  for (const std::uint32_t node : more) {
    if (std::find(set.begin(), set.end(), node) == set.end()) {
      set.push_back(node);
    }
  }
}

void Device::begin_capture(c10::StreamId id, Pool* pool, c10::ArrayRef<at::Generator> generators) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  if (stream.capture != nullptr) {
    state_->invalidate(*stream.capture, "begin_capture on a stream that captures already; end that capture first");
  }
  if (Capture* open = state_->capture_of_thread(std::this_thread::get_id())) {
    state_->invalidate(*open, "begin_capture while this thread captures another stream; end that capture first");
  }
  if (id == 0) {
    throw CaptureError("sim device: the default stream cannot capture; capture a stream of create_stream()");
  }
  state_->timeline.drain();
  std::erase_if(pool->captured, [&](const MemoryImage& image) {  // pinned memory may have been freed since
    return !state_->memory.owns(image.begin) && !state_->pinned.holds(image.begin, image.bytes.size());
  });
  state_->memory.retain(pool);
  auto capture = std::make_unique<Capture>(++state_->captures_begun, id, state_->memory, *pool, generators);
  stream.capture = capture.get();
  stream.capture_last.clear();
  state_->captures.push_back(std::move(capture));
  state_->open_captures.fetch_add(1);
}

void Device::State::close(Capture& capture) noexcept {
  for (const c10::StreamId id : capture.streams) {
    streams[static_cast<std::size_t>(id)].capture = nullptr;
    streams[static_cast<std::size_t>(id)].capture_last.clear();
  }
  capture.memory.finish();
  capture.put_draws_back();
  memory.release(&capture.pool);
  open_captures.fetch_sub(1);
  std::erase_if(captures, [&](const auto& open) { return open.get() == &capture; });
}

std::shared_ptr<GraphBody> Device::end_capture(c10::StreamId id) {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  StreamState& stream = state_->stream(id);
  if (stream.capture == nullptr) {
    throw UsageError("sim device: end_capture on a stream that does not capture; call begin_capture first");
  }
  Capture& capture = *stream.capture;
  if (capture.thread != std::this_thread::get_id()) {
    throw UsageError(
        "sim device: end_capture was called on another thread than begin_capture; end it on the thread that began it");
  }
  std::string reason = capture.reason;
  if (!capture.invalidated) {
    if (capture.origin != id) {
      reason = "end_capture on a stream that joined the capture; end it on the stream that began it";
    } else if (!capture.joined(stream.capture_last)) {
      reason =
          "a forked stream was not joined; record an event on it after its last work and wait for that on the "
          "capturing "
          "stream before end_capture";
    }
  }
  if (!reason.empty()) {
    state_->close(capture);
    throw CaptureError("sim device: the capture failed: " + reason);
  }
  std::shared_ptr<GraphBody> graph;
  try {
    graph = std::make_shared<GraphBody>(*this, capture, std::move(capture.nodes));
  } catch (...) {
    state_->close(capture);
    throw;
  }
  state_->close(capture);
  return graph;
}

void Device::abandon_capture(c10::StreamId id) noexcept {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  if (id >= 0 && static_cast<std::size_t>(id) < state_->streams.size()) {
    if (Capture* capture = state_->streams[static_cast<std::size_t>(id)].capture) {
      state_->close(*capture);
    }
  }
}

std::size_t Device::captured_nodes(c10::StreamId id) const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  const Capture* capture = state_->stream(id).capture;
  return capture == nullptr ? 0 : capture->listed;
}

CaptureStatus Device::capture_status(c10::StreamId id) const {
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  const Capture* capture = state_->stream(id).capture;
  if (capture == nullptr) {
    return CaptureStatus::none;
  }
  return capture->invalidated ? CaptureStatus::invalidated : CaptureStatus::active;
}

DrawLock Device::draw(c10::StreamId id, const at::Generator& generator) {
  std::unique_lock lock(draws_lock(), std::defer_lock);
  for (bool may_wait = true; !lock.owns_lock();) {
    may_wait = may_wait && CaptureTurn::let_others_finish(sim_device());
    lock.lock();
    if (may_wait && CaptureTurn::others(sim_device())) {  // it has begun just now
      lock.unlock();
    }
  }
  if (state_->open_captures.load(std::memory_order_acquire) != 0) {
    state_->check_draw(id, generator);
  }
  std::mutex& own = generator.unsafeGetGeneratorImpl()->mutex_;
  return {std::move(lock), &own == &draws_lock() ? std::unique_lock<std::mutex>() : std::unique_lock(own)};
}

void Device::State::check_draw(c10::StreamId id, const at::Generator& generator) {
  const std::lock_guard<std::recursive_mutex> lock(mutex);
  if (const Capture* capture = stream(id).capture; capture != nullptr) {
    if (!capture->knows(generator)) {
      throw UsageError(
          "sim device: a capture draws from a generator that it was not begun with; launches of its graph would not "
          "advance that generator. Name it in GraphOptions::generators, or draw from the default generator");
    }
    return;
  }
  if (std::any_of(captures.begin(), captures.end(), [&](const auto& open) { return open->knows(generator); })) {
    throw UsageError(
        "sim device: random numbers are drawn from a generator that a running capture uses alone; draw before the "
        "capture begins or after it has ended. Operators of other threads wait automatically, except in a backward "
        "pass");
  }
}

void Device::let_draws_finish() { const std::lock_guard lock(draws_lock()); }

void Device::preserve(const void* address, std::size_t bytes, c10::StreamId id) {
  if (state_->open_captures.load(std::memory_order_acquire) == 0) {
    return;
  }
  const std::lock_guard<std::recursive_mutex> lock(state_->mutex);
  if (Capture* capture = state_->stream(id).capture) {
    capture->memory.preserve(const_cast<std::byte*>(static_cast<const std::byte*>(address)), bytes);
  }
}

}  // namespace sidestream::sim
