#include "graphs/replay/chain.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/replay/given_outputs.h"
#include "graphs/replay/replay_node.h"
#include "graphs/replay/version_check.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

constexpr std::int64_t kSideStreams = 2;  // where the options name no number

}  // namespace

// Note [Graph choreography]
// M is the caller's stream, S[k] the side streams, layer n replays forward on S[n mod K] and backward on S[0].
//
//   forward n    M: (what is held of the outputs: copy out, see Note [Outputs are ordinary tensors])
//                M: (if an input has another address: copy)  record fork
//                S[n mod K]: wait fork, wait for the copies of the latest backward (first time since), launch
//                            (where n does not follow the latest forward: wait for the copies of the other side streams, too)
//                M: wait done(n)
//   backward n   M: (if a gradient has another address: copy)  record fork
//                S[0]: wait fork, wait copies_done of the latest forward of every other side stream (first backward only), launch
//                M: wait done(n)
//
// done is recorded inside the graph after its last compute, copies_done after its copies are joined. A static input never leaves
// the device and lies outside of the pool: M may write it behind done(n) of both directions, which it has waited for.
// What orders the copies:
//  - The source of a D2H of n is used again by graphs n+K and later at the earliest. n+K is behind all of n on one stream,
//    later ones are behind done(n+K). Where forwards are left out, n+K may be among them: the forward after the gap waits for
//    the copies of all side streams.
//  - A backward frees and uses again what D2H of this pass read: the join before the first backward.
//  - The H2D for n is issued by backward n+1 (the next above that has a backward), joined before that graph ends, and backward
//    n is behind it on S[0]. Where none is above, backward n begins with it.
//  - The host slot that a D2H of the next step writes was read by an H2D of this one; the memory that a forward writes was the
//    destination of an H2D: every side stream waits for the copies of the latest backward before its next forward.

Chain::Chain(const GraphResources& resources, const GraphOptions& options)
    : runtime_(resources.runtime),
      arena_(resources.arena),
      offload_(resources.offload),
      options_(options),
      draw_order_(DrawOrder::of(runtime_->device())),
      fork_(runtime_->create_event()),
      whole_stream_(runtime_->create_event()),
      pool_(runtime_->create_pool()) {
  if (options.cuda_graph_stream()) {
    streams_.push_back(*options.cuda_graph_stream());
  } else {
    for ([[maybe_unused]] const auto k : c10::irange(options.side_streams().value_or(kSideStreams))) {
      side_streams_.push_back(runtime_->create_stream());
      streams_.push_back(side_streams_.back());
    }
  }
  forward_copies_.resize(streams_.size(), nullptr);
  behind_backward_copies_.resize(streams_.size(), true);
}

Chain::~Chain() {
  try {
    for (const c10::Stream stream : streams_) {
      runtime_->synchronize(stream);
    }
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
}

bool Chain::pending(std::size_t layer) const {
  const std::lock_guard lock(mutex_);
  return layers_[layer].pending;
}

bool Chain::ready(std::size_t layer) const {
  const std::lock_guard lock(mutex_);
  return top_ < static_cast<std::int64_t>(layer);
}

bool Chain::any_pending() const {
  const std::lock_guard lock(mutex_);
  return top_ >= 0;
}

FactsChange Chain::change(std::size_t index) const noexcept {
  const Layer& layer = layers_[index];
  FactsChange change = layer.modules.change();
  for (const TensorFacts& watched : layer.watched) {
    change |= watched.change();
  }
  return change;
}

FactsChange Chain::change() const noexcept {
  FactsChange all;
  for (const auto i : c10::irange(layers_.size())) {
    all |= change(i);
  }
  return all;
}

std::string Chain::difference(std::size_t index) const {
  const Layer& layer = layers_[index];
  std::string text = layer.modules.difference();
  for (const TensorFacts& watched : layer.watched) {
    if (const std::string what = watched.difference(); text.empty() && !what.empty()) {
      text = "a tensor that it reads " + what;
    }
  }
  return text;
}

void Chain::launch(const Graph& graph, c10::Stream side, const ExternalEvent& done) {
  if (runtime_->draws(graph)) {
    draw_order_.launch(*runtime_, side, [&] { runtime_->launch(graph, side); });
  } else {
    runtime_->launch(graph, side);
  }
  ++counts_.replays;
  const c10::Stream main = runtime_->current_stream();
  if (options_.cuda_graph_stream() && !options_.cuda_graph_event()) {
    runtime_->record(whole_stream_, side);
    runtime_->wait(main, whole_stream_);
  } else {
    runtime_->wait(main, done);
  }
}

void Chain::write_static_inputs(Layer& layer, c10::ArrayRef<at::Tensor> inputs) {
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& input = layer.inputs[i];
    if (!input.tensor.defined() || input.same_as_earlier ||
        (inputs[i].const_data_ptr() == input.tensor.const_data_ptr() && same_layout(inputs[i], input.tensor))) {
      continue;
    }
    const at::NoGradGuard no_grad;
    input.tensor.copy_(inputs[i].detach(), /*non_blocking=*/true);
  }
}

void Chain::forward(std::size_t index, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs) {
  const std::lock_guard lock(mutex_);
  check(index, inputs);
  Layer& layer = layers_[index];
  if (layer.pending) {
    throw UsageError(describe(index) +
                     ": the backward of its previous forward is still pending, and this forward would " +
                     "overwrite what it needs; run that backward first, or capture once for each microbatch in flight");
  }
  if (top_ >= static_cast<std::int64_t>(index)) {
    throw UsageError(describe(index) + ": called after \"" + layers_[top_].spec.name +
                     "\", whose backward is pending; calls " +
                     "captured together replay in the order of their capture, or are captured apart");
  }
  const Site site(Activity::launch_forward, layer.spec.scope->site);
  // What this forward frees while it runs, the outputs of later ones were given by the pool (not the reverse: earlier outputs
  // were alive when this forward was captured). So those of an earlier pass are overwritten by this launch already.
  for (std::size_t later = std::max(index, highest_given_) + 1; later-- > index;) {
    for (OutputStorage& storage : layers_[later].output_storages) {
      storage.before_overwrite(*runtime_, fork_, counts_.outputs);
    }
  }
  highest_given_ = index;
  ++layer.generation;  // from here on what an earlier forward saved may be overwritten
  layer.backward_launched = layer.backward_failed = false;
  write_static_inputs(layer, inputs);
  const c10::Stream side = forward_stream(index);
  const std::size_t side_stream = index % streams_.size();
  runtime_->record(fork_, runtime_->current_stream());
  runtime_->wait(side, fork_);
  if (!behind_backward_copies_[side_stream]) {
    runtime_->wait(side, *backward_copies_);
    behind_backward_copies_[side_stream] = true;
    ++counts_.waits;
  }
  if (index != next_forward_) {
    for (const auto other : c10::irange(streams_.size())) {
      if (other != side_stream && forward_copies_[other] != nullptr) {
        runtime_->wait(side, *forward_copies_[other]);
        ++counts_.waits;
      }
    }
  }
  // Where the launch fails, nothing new is to be waited for; where the wait behind it fails, the copies run all the same.
  const auto queued = [&, replays = counts_.replays] {
    if (counts_.replays != replays) {
      next_forward_ = index + 1;
      forward_copies_[side_stream] = &layer.forward_copies_done;
    }
  };
  try {
    launch(layer.forward, side, layer.forward_done);
  } catch (...) {
    queued();
    settle(side);
    throw;
  }
  queued();
  reloaded_ = -1;  // what an earlier backward brought back may be overwritten now
  for (const auto& saved : layer.offloaded) {
    counts_.offloaded_bytes += saved->bytes;
  }
  give_outputs(layer, inputs, runtime_->current_stream(), outputs);
  if (layer.has_backward) {
    for (BackwardRead& read : layer.backward_reads) {
      read.at_forward = read.counter.current_version();
    }
    layer.pending = true;
    top_ = static_cast<std::int64_t>(index);
    attach_node(index, inputs, outputs);
    stamp_versions(layer, inputs, outputs);
  }
}

void Chain::join_copies() {
  const std::lock_guard lock(mutex_);
  const c10::Stream main = runtime_->current_stream();
  for (const ExternalEvent* copies : forward_copies_) {
    if (copies != nullptr) {
      runtime_->wait(main, *copies);
    }
  }
  if (backward_copies_ != nullptr) {
    runtime_->wait(main, *backward_copies_);
  }
}

void Chain::reset(std::size_t index) {
  const std::lock_guard lock(mutex_);
  for (const c10::Stream stream : streams_) {
    runtime_->synchronize(stream);
  }
  Layer& layer = layers_[index];
  drop_pending(index, layer.generation);
  layer.forward.reset();
  layer.backward.reset();
  layer.offloaded.clear();
  forward_copies_.assign(streams_.size(), nullptr);
  backward_copies_ = nullptr;
  behind_backward_copies_.assign(streams_.size(), true);
}

void Chain::reset() {
  for (const auto i : c10::irange(layers_.size())) {
    reset(i);
  }
}

Chain::Counts& Chain::Counts::operator+=(const Counts& other) noexcept {
  replays += other.replays;
  waits += other.waits;
  offloaded_bytes += other.offloaded_bytes;
  reloaded_bytes += other.reloaded_bytes;
  inline_reloads += other.inline_reloads;
  unused_outputs += other.unused_outputs;
  outputs.reused += other.outputs.reused;
  outputs.copied += other.outputs.copied;
  outputs.copied_bytes += other.outputs.copied_bytes;
  return *this;
}

Chain::Counts Chain::take_counts() {
  const std::lock_guard lock(mutex_);
  return std::exchange(counts_, {});
}

}  // namespace sidestream
