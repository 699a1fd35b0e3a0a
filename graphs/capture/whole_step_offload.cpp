#include "graphs/capture/whole_step_offload.h"

#include <algorithm>
#include <utility>

#include <ATen/ops/empty.h>

#include "offload/pinned_plan.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// Reloads into memory that an operator allocates, so observers of a warm-up or a capture see it as an operator's result.
class BranchedCopies final : public EagerOffload {
 public:
  BranchedCopies(const std::shared_ptr<Runtime>& runtime, std::shared_ptr<GroupMover> mover, const CopyLimits& limits)
      : EagerOffload(runtime, std::move(mover), limits), device_(runtime->device()) {}

  c10::Storage release(const c10::Storage& /*storage*/, const std::vector<std::shared_ptr<SavedStorage>>& /*holders*/,
                       const std::string& /*message*/) override {
    throw UsageError(
        "OffloadScope::release was called in a step that is captured as one graph, which frees tensors as they are "
        "dropped; drop the tensor instead");
  }

 private:
  c10::Storage allocate(std::size_t bytes) override {
    return at::empty({static_cast<std::int64_t>(bytes)}, at::TensorOptions(device_).dtype(at::kByte)).storage();
  }
  c10::Device device_;
};

std::uint64_t saved_by_selected(const Profile& profile) {
  std::uint64_t bytes = 0;
  for (const StorageProfile& storage : profile.storages) {
    bytes += profile.groups[storage.savers.front()].selected ? storage.bytes : 0;
  }
  return bytes;
}

}  // namespace

WholeStepOffload::~WholeStepOffload() { leave_passes(); }

void WholeStepOffload::leave_passes() noexcept {
  recorder_.reset();
  if (warm_ != nullptr) {
    warm_->abandon_step();
    warm_.reset();
  }
  if (copies_ != nullptr) {
    copies_->offload->abandon_step();
    if (copies_
            ->captured) {  // uses in a capture that failed have no end, and those of a graph are its sequence's to wait for
      copies_->arena->forget_uses();
    }
  }
}

void WholeStepOffload::begin_sizing() {
  leave_passes();
  passes_.clear();
  if (copies_ == nullptr || copies_->captured) {
    copies_.reset();  // its slots are given back before others are pinned
    auto copies = std::make_unique<Copies>();
    copies->arena = std::make_shared<HostArena>(*parts_.runtime, parts_.engine_arena->budget());
    copies->mover = std::make_shared<GroupMover>(parts_.runtime, copies->arena);
    copies->offload = std::make_shared<BranchedCopies>(parts_.runtime, copies->mover, parts_.limits);
    copies_ = std::move(copies);  // at once: unwinding looks at all of it
    counts_ = {};
    recorded_ = {};
  }
  copies_->arena->open();
  warm_ = std::make_shared<BranchedCopies>(parts_.runtime, std::make_shared<GroupMover>(parts_.runtime, copies_->arena),
                                           parts_.limits);
}

void WholeStepOffload::abandon() noexcept {
  leave_passes();
  copies_.reset();
  passes_.clear();
  profile_ = {};
  plan_ = {};
  planned_ = {};
  counts_ = {};
  recorded_ = {};
}

void WholeStepOffload::finish_sizing() {
  if (recorder_ != nullptr) {
    recorder_->finish();
    warm_->end_step();
    passes_.push_back({recorder_->profile(), recorder_->group_scopes()});
    recorder_.reset();
  }
}

SavedTensorRecorder& WholeStepOffload::next_sizing() {
  finish_sizing();
  warm_->begin_step();
  recorder_ = std::make_unique<SavedTensorRecorder>(*parts_.tree, *parts_.exclusions, warm_, nullptr);
  return *recorder_;
}

void WholeStepOffload::end_sizing() {
  finish_sizing();
  parts_.runtime->synchronize(parts_.runtime->current_stream());  // the current stream is after all copies
  warm_.reset();
  copies_->arena->forget_uses();
  const auto less = [](const Pass& a, const Pass& b) {
    return saved_by_selected(a.profile) < saved_by_selected(b.profile);
  };
  const auto largest = std::max_element(passes_.begin(), passes_.end(), less);
  const Plan plan = plan_and_pin(largest->profile, *copies_->arena, HostArena::Surplus::given_back);
  profile_ = {};
  plan_ = {};
  plan_.notes = plan.notes;
  std::vector<const ScopeNode*> scopes;
  for (auto pass = passes_.begin(); pass != passes_.end(); ++pass) {
    add_to_plan(
        *pass, pass == largest ? plan : make_plan(pass->profile, copies_->arena->stats().pinned, HostArena::alignment));
    scopes.insert(scopes.end(), pass->scopes.begin(), pass->scopes.end());
  }
  planned_ = lay_out(profile_, scopes, plan_.decisions.data());
}

void WholeStepOffload::add_to_plan(const Pass& pass, const Plan& plan) {
  const auto first = static_cast<std::uint32_t>(profile_.groups.size());
  profile_.groups.insert(profile_.groups.end(), pass.profile.groups.begin(), pass.profile.groups.end());
  for (StorageProfile storage : pass.profile.storages) {
    for (std::uint32_t& saver : storage.savers) {
      saver += first;
    }
    profile_.storages.push_back(std::move(storage));
  }
  for (Decision decision : plan.decisions) {
    decision.held_by += first;
    plan_.decisions.push_back(decision);
  }
  profile_.staying.insert(profile_.staying.end(), pass.profile.staying.begin(), pass.profile.staying.end());
  plan_.offloaded_bytes += plan.offloaded_bytes;
}

SavedTensorRecorder& WholeStepOffload::begin_capture() {
  copies_->captured = true;
  parts_.capture_offload->copies_inside(copies_->arena);
  const c10::Stream capture = parts_.runtime->current_stream();
  GroupMover::Copies offloads = copies_->mover->offload_copies();
  offloads.wait_for(capture);
  offloads.finish();
  GroupMover::Copies reloads = copies_->mover->reload_copies();
  reloads.wait_for(capture);
  reloads.finish();
  copies_->offload->begin_step();
  recorder_ = std::make_unique<SavedTensorRecorder>(*parts_.tree, *parts_.exclusions, copies_->offload, &planned_);
  if (const SavedTensorRecorder* const of_capture = current_recorder(); of_capture != nullptr) {
    recorder_->tell(of_capture->listener());
  }
  return *recorder_;
}

void WholeStepOffload::end_capture() {
  recorder_->finish();
  recorded_ = recorder_->counts();
  recorder_.reset();
  copies_->offload->end_step();
  Streams all;
  add_stream(all, parts_.runtime->current_stream());
  copies_->mover->join(all);
  copies_->arena->forget_uses();
  counts_ = copies_->mover->counts();
  counts_.waits = 0;  // they are edges of the graph
}

}  // namespace sidestream
