#include "offload/eager_offload.h"

#include <algorithm>
#include <exception>

#include "base/site.h"
#include "runtime/replayed_memory.h"

namespace sidestream {

// Note [Eager choreography]
// M is the stream on which operators saved tensors; autograd runs their backward on the same stream. D and H are the copy streams of
// GroupMover, and g is a group.
//
//   M  g ends --+-- later groups --+-- (sources of g are free) -- allocate g --+-- ... --+-- unpack g
//               | fork             ^ offloaded(g)                              | fork    ^ reloaded(g)
//   D           +--> copy to host -+                                           |         |
//   H                                                                          +--> copy to device
//
//   scope of g ends      M: record fork     D: wait fork, wait the host slots' last copies, copy g, record offloaded(g)
//     or, delayed        (after the launch of the next graph, or when the program says so or the lag is exceeded, or at the step's end:
//                        the same)
//   later groups end     M: wait offloaded(g), once they and g exceed the lag; then g's sources are freed: M may use their memory
//     or, by hand        (when the program says so: the same)
//   a group ends, or is  M: allocate g, record fork   H: wait fork, copy g, record reloaded(g)
//   used for the first time
//     or, by hand        (when the program says so: the same)
//   backward reaches g   M: wait reloaded(g), unpack
//   the step ends        M and the current stream: wait for D and H; reloaded storages that were not used are freed
//
// Copies of graphed calls run on D and H too (Note [Graph choreography]). They run one after the other, but only the waits above order
// them: no rule relies on the order of one copy stream.
//
// StepOrder learns after which event g is reloaded. It knows in which order groups ended and were used in the step before, and
// group_reloads finds the earliest event from which on g has room on the device. If a step takes another order, a group is reloaded when
// backward reaches the group after it. Correct results need neither rule: a storage that is not being reloaded yet is reloaded when it is
// unpacked.
//
// A destination is allocated on M before the fork is recorded, so H starts after all earlier uses of that memory. The same fork puts H
// after g's copy to the host: only a group whose sources were freed is reloaded, and M waited for offloaded(g) before it freed them. D
// waits for a host slot's last copy because a model may use several streams. A group that one stream saved may be offloaded into a slot
// that the reload of another stream's group still reads.
//
// Memory that graphs write at each replay is released at once, and D is named as its user. Such memory is that of graphed calls' outputs
// that went back to their pool. It does not belong to the allocator, so holding it until M is after the copy would gain nothing. The
// sequence copies out what is held before it uses the memory again, and waits for the streams that were named (Note [Outputs are ordinary
// tensors]). If backward needs a group before its sources were freed, and graphs write some of them, the sources are freed first and the
// group is reloaded after that.
//
// A delayed group's fork is recorded when the group is offloaded, and not when its scope ends. M holds no less by then and does not wait
// for the graph yet, so the copies run beside the graph. Until then the group's slot holds the sources. Memory that graphs write anew is
// never delayed, because the graph for which it would wait may be the one that writes it.
//
// If a step saves on several streams, each of them is an M, and D and H fork from all that saved tensors of g. The first of them waits
// for offloaded(g). For the others the allocator is told of every stream that has saved in the step. Without offload autograd would hold
// a saved tensor until backward, and any of these streams could read it until then. So the memory is used again only after all of these
// streams, and on the first one after the copy. Backward reads a reloaded copy on the streams that saved it, or on others that unpack it
// or that the program named for its source. The copy is memory of the first saver, so the allocator is told of all these streams.

EagerOffload::EagerOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover, CopyLimits limits)
    : runtime_(std::move(runtime)),
      mover_(std::move(mover)),
      live_(LiveMemory::of(runtime_->device())),
      limits_(limits) {}

EagerOffload::~EagerOffload() {
  mover_->settle();  // no code uses what copies still carry, but its memory must not be freed before they are done
  try {
    for (Slot& slot : slots_) {
      set_in_flight(slot, 0);
    }
  } catch (const std::exception&) {  // the device has failed: no measurement follows
  }
}

void EagerOffload::set_window(const CopyWindow& window) {
  const std::lock_guard lock(mutex_);
  if (!(window == window_)) {
    order_.forget();
  }
  planned_window_ = window_ = window;
}

void EagerOffload::begin_step() {
  const std::lock_guard lock(mutex_);
  order_.begin();
  if (dropped_.empty()) {  // else its streams are joined at the end of this step
    step_streams_.clear();
  }
  used_ready_ = 0;
  (void)end_sizing_step();
  // If a backward of an earlier step is pending, its slots keep their places.
  while (used_slots_ > 0 && slots_[used_slots_ - 1].is_gone()) {
    --used_slots_;
  }
  first_slot_ = used_slots_;
}

void EagerOffload::expect_order(const std::vector<PipelineStep>* order) {
  const std::lock_guard lock(mutex_);
  order_.expect(order, window_);
}

void EagerOffload::begin_sizing_step(std::function<void(std::int64_t)> backward_begins) {
  const std::lock_guard lock(mutex_);
  order_.forget();
  planned_window_.reset();
  largest_.assign(2, 0);
  begin_step();
  backward_begins_ = std::move(backward_begins);
  sizing_ = std::make_unique<SizingPeak>(*runtime_);
}

std::unique_ptr<SizingPeak> EagerOffload::end_sizing_step() noexcept {
  const std::lock_guard lock(mutex_);
  backward_begins_ = nullptr;
  return std::move(sizing_);
}

void EagerOffload::look() {
  if (!sizing_) {
    return;
  }
  std::size_t only_copies = 0;
  for (const Trailing& trailing : trailing_) {
    for (const auto& saved : trailing.slot->sources) {
      only_copies += saved.use_count() == 1 && saved->device.use_count() == 1 ? saved->bytes : 0;
    }
  }
  for (const c10::Storage& storage : dropped_) {
    only_copies += storage.nbytes();
  }
  sizing_->look(static_cast<std::int64_t>(only_copies));
}

void EagerOffload::trace_memory() {
  if (mover_->trace().on()) {
    mover_->trace().look(runtime_->current_stream());
  }
}

void EagerOffload::set_in_flight(Slot& slot, std::int64_t bytes) {
  if (bytes != slot.in_flight) {
    live_.change(*runtime_, {0, bytes - slot.in_flight});
    slot.in_flight = bytes;
  }
}

EagerOffload::Slot& EagerOffload::next_slot() {
  if (used_slots_ == slots_.size()) {
    slots_.emplace_back();
  }
  Slot& slot = slots_[used_slots_];
  slot.storages.clear();
  slot.sources.clear();
  slot.savers.clear();
  slot.arrived.clear();
  slot.state = Slot::State::here;
  slot.used = false;
  set_in_flight(slot, 0);
  ++used_slots_;
  return slot;
}

EagerOffload::Slot* EagerOffload::slot_of(std::uint32_t mark) {
  return mark == 0 || mark > slots_.size() ? nullptr : &slots_[mark - 1];
}

void EagerOffload::group_ended(Group& group) {
  const std::lock_guard lock(mutex_);
  if (!group.scope->selected || group.storages.empty()) {
    return;
  }
  const Site site(Activity::offload, group.scope->site);
  look();
  trace_memory();
  Slot& slot = next_slot();
  slot.site = group.scope->site;
  slot.group = group.index;
  slot.chunk = mover_->trace().chunk();
  group.slot = static_cast<std::uint32_t>(used_slots_);
  GroupBytes bytes;
  try {
    for (const auto& weak : group.storages) {  // what gets no pinned memory is used all the same
      const auto saved = weak.lock();
      if (saved != nullptr && (group.needed_immediately || saved->to_offload)) {
        slot.storages.push_back(saved);
        saved->slot = group.slot;
        bytes.held += group.needed_immediately && !saved->to_offload ? saved->bytes : 0;
      }
    }
    mover_->lease(group, slot.sources);
  } catch (...) {
    give_up(slot);
    group.slot = 0;
    throw;
  }
  for (const auto& saved : slot.sources) {
    bytes.offloaded += saved->bytes;
  }
  bytes.held += bytes.offloaded;
  order_.ended(bytes);
  if (is_delayed(group, slot)) {
    delay(slot);
  } else if (!slot.sources.empty()) {
    send(slot);
  }
  trail(slot, bytes.held);
  look();
  reload_due();
}

void EagerOffload::give_up(Slot& slot) {
  for (const auto& weak : slot.storages) {
    if (const auto saved = weak.lock()) {
      saved->slot = 0;
    }
  }
  slot.keep_sources();
  slot.storages.clear();
  --used_slots_;
}

void EagerOffload::send(Slot& slot) {
  const StepTrace::InChunk in_chunk(mover_->trace(), slot.chunk);
  for (const auto& saved : slot.sources) {
    for (const c10::Stream stream : saved->streams) {
      add_stream(slot.savers, stream);
      add_stream(step_streams_, stream);
    }
  }
  try {
    if (slot.offloaded == nullptr) {
      slot.offloaded = std::make_shared<Event>(runtime_->create_event());
    }
    if (slot.reloaded == nullptr) {
      slot.reloaded = std::make_shared<Event>(runtime_->create_event());
    }
    copied_ = true;
    GroupMover::Copies copies = mover_->offload_copies();
    std::partition(slot.sources.begin(), slot.sources.end(),
                   [](const auto& saved) { return saved->ready.holds_for(saved->device); });
    bool forked = false;
    for (const auto& saved : slot.sources) {
      if (const ReadyMark ready = std::exchange(saved->ready, {}); ready.holds_for(saved->device)) {
        copies.wait_for(*ready.event);
      } else if (!std::exchange(forked, true)) {
        copies.wait_for(slot.savers);
      }
      copies.wait_for(saved->lease);
      copies.to_host(saved->lease.data(), saved->device.data(), saved->bytes);
    }
    copies.record(*slot.offloaded);
    for (const auto& saved : slot.sources) {
      ReplayedMemory::used_on(saved->device.data_ptr(), copies.stream());
    }
    copies.finish();
  } catch (...) {
    slot.keep_sources();
    throw;
  }
  slot.state = Slot::State::offloading;
  std::size_t bytes = 0;
  for (const auto& saved : slot.sources) {
    saved->lease.record_last_use(slot.offloaded);
    saved->place = SavedStorage::Place::offloading;
    bytes += saved->bytes;
    if (ReplayedMemory::of(saved->device.data_ptr()) != nullptr) {
      free_on_device(saved);
    }
  }
  set_in_flight(slot, static_cast<std::int64_t>(bytes));
}

void EagerOffload::end_step() {
  const std::lock_guard lock(mutex_);
  order_.end(window_);
  if (!copied_ && dropped_.empty() && delayed_.empty()) {
    trailing_.clear();
    trailing_bytes_ = 0;
    return;
  }
  look();
  trace_memory();
  try {
    send_delayed();
    while (!trailing_.empty()) {
      free_oldest();
    }
    add_stream(step_streams_, runtime_->current_stream());
    StepTrace::Span traced;
    traced.begin(mover_->trace(), SpanKind::wait, runtime_->current_stream(), "(end of the step)");
    mover_->join(step_streams_);
    traced.end();
  } catch (...) {
    abandon_step();
    throw;
  }
  copied_ = false;
  dropped_.clear();
  for (std::size_t i = first_slot_; i < used_slots_; ++i) {
    Slot& slot = slots_[i];
    if (slot.is_gone()) {  // was reloaded and never used
      set_in_flight(slot, 0);
    }
  }
}

void EagerOffload::abandon_step() noexcept {
  const std::lock_guard lock(mutex_);
  mover_->settle();
  while (!delayed_.empty()) {
    keep_delayed(*delayed_.front());
  }
  while (!trailing_.empty()) {
    try {
      drop_sources();
    } catch (const std::exception&) {  // its sources are freed: no measurement follows
    }
  }
  copied_ = false;
  dropped_.clear();
}

std::vector<GroupEvent> EagerOffload::events() const {
  const std::lock_guard lock(mutex_);
  std::vector<GroupEvent> events = order_.events();
  for (GroupEvent& event : events) {
    event.group = slots_[first_slot_ + event.group].group;
  }
  return events;
}

}  // namespace sidestream
