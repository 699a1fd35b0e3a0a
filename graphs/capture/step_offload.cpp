#include "graphs/capture/step_offload.h"

#include <algorithm>
#include <limits>
#include <numeric>
#include <utility>

#include <ATen/ops/empty.h>

#include "offload/sizing.h"

namespace sidestream {
namespace {

/// Of the storages that are to leave, each alone.
std::vector<std::size_t> leaving_sizes(const Profile& profile) {
  std::vector<std::size_t> sizes;
  for (const StorageProfile& storage : profile.storages) {
    const bool selected = std::all_of(storage.savers.begin(), storage.savers.end(),
                                      [&](std::uint32_t saver) { return profile.groups[saver].selected; });
    if (selected && !storage.small) {
      sizes.push_back(storage.bytes);
    }
  }
  return sizes;
}

/// What comes back inside of a capture is memory that an operator of the capture made, to whoever watches it.
class BranchedCopies final : public EagerOffload {
 public:
  BranchedCopies(const std::shared_ptr<Runtime>& runtime, std::shared_ptr<GroupMover> mover, const Limits& limits)
      : EagerOffload(runtime, std::move(mover), limits), device_(runtime->device()) {}

 private:
  c10::Storage allocate(std::size_t bytes) override {
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(device_).dtype(at::kByte)).storage();
  }
  c10::Device device_;
};

}  // namespace

void StepOffload::begin_sizing() {
  sizes_.clear();
  sizes_sum_ = 0;
  recorder_.reset();
}

Recorder& StepOffload::next_sizing() {
  if (recorder_ != nullptr) {
    recorder_->finish();
    std::vector<std::size_t> sizes = leaving_sizes(recorder_->profile());
    const std::size_t sum = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
    if (sum > sizes_sum_) {
      sizes_ = std::move(sizes);
      sizes_sum_ = sum;
    }
  }
  recorder_ = std::make_unique<Recorder>(*parts_.tree, *parts_.exclusions, std::make_shared<SizingMover>(), nullptr);
  return *recorder_;
}

void StepOffload::end_sizing() {
  (void)next_sizing();
  recorder_.reset();
  if (!copies_.empty() && !copies_.back().captured && copies_.back().sizes == sizes_) {
    return;
  }
  std::vector<Copies> kept;  // of two captures the older one's graphs are gone by now
  if (!copies_.empty() && copies_.back().captured) {
    kept.push_back(std::move(copies_.back()));
  }
  copies_ = std::move(kept);
  const HostArenaStats taken = parts_.engine_arena->stats();
  Copies next;
  next.sizes = sizes_;
  next.arena = std::make_shared<HostArena>(*parts_.runtime, taken.cap - std::min(taken.cap, taken.pinned));
  (void)next.arena->plan(sizes_);
  next.arena->seal();
  next.mover = std::make_shared<GroupMover>(parts_.runtime, next.arena);
  next.offload = std::make_shared<BranchedCopies>(parts_.runtime, next.mover, parts_.limits);
  parts_.step_arenas->push_back(next.arena);
  copies_.push_back(std::move(next));
}

Recorder& StepOffload::begin_capture() {
  Copies& copies = copies_.back();
  copies.captured = true;
  parts_.capture_offload->copies_inside(copies.arena);
  const c10::Stream capture = parts_.runtime->current_stream();
  GroupMover::Copies out = copies.mover->copies_out();
  out.behind(capture);
  out.finish();
  GroupMover::Copies back = copies.mover->copies_back();
  back.behind(capture);
  back.finish();
  copies.offload->begin_step();
  recorder_ = std::make_unique<Recorder>(*parts_.tree, *parts_.exclusions, copies.offload, nullptr);
  return *recorder_;
}

void StepOffload::end_capture() {
  Copies& copies = copies_.back();
  recorder_->finish();
  recorder_.reset();
  copies.offload->end_step();
  Streams all;
  add_stream(all, parts_.runtime->current_stream());
  copies.mover->join(all);
  copies.arena->forget_uses();
  offloaded_bytes_ = copies.mover->counts().offloaded_bytes;
}

}  // namespace sidestream
