#include "graphs/replay/chain.h"

#include <algorithm>

#include <ATen/core/grad_mode.h>
#include <c10/util/irange.h>

#include "base/site.h"
#include "graphs/replay/given_outputs.h"
#include "graphs/replay/graph_event_state.h"
#include "graphs/replay/replay_node.h"
#include "graphs/replay/version_check.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

constexpr std::int64_t kSideStreams = 1;  // where the options name no number

/// What the captures of a chain use.
std::shared_ptr<GraphMemory> memory_for(const GraphResources& resources, const GraphOptions& options) {
  if (resources.memory != nullptr) {
    return resources.memory;
  }
  return options.pool() != nullptr ? GraphMemory::of(*options.pool(), resources.runtime->device())
                                   : std::make_shared<GraphMemory>(GraphMemory::Use::own);
}

FactsChange with_watched(FactsChange modules, const Layer& layer) noexcept {
  TensorFacts::add_changes(layer.watched, modules);
  return modules;
}

}  // namespace

// Note [Graph choreography]
// M is the caller's stream, S a side stream of the chain, D and H the engine's streams of copies to the host and to the device
// (GroupMover): other chains and eager groups queue theirs there as well, and nothing here rests on it.
//
//   forward n    M: (where the chain's latest graph was called on another stream: wait for that one; backward n likewise)
//                M: (what is held of the outputs: copy out, see Note [Outputs are ordinary tensors])
//                M: (if an input has another address: copy)  record fork
//                S: wait fork, wait for the copies that this graph must be behind, launch
//                D: for each group: wait ready(n, group), copy   then record left(n)
//                M: wait done(n)
//                (eager groups that were delayed leave between launch and M's wait, here and below: Note [Eager choreography])
//   backward n   M: (if a gradient has another address: copy)  record fork
//                S: wait fork, wait for the copies that this graph must be behind
//                H: (what is due to come back: n if it is not here, and layers below) wait for S, copy k, record back(k)
//                S: wait back(n), launch
//                M: wait done(n)
//
// A graph holds no copy over the link (what it gathers into a block, see SmallBlock, is compute to it): it records ready where a group's tensors are complete, and done after its last compute. So nothing that
// waits for a graph waits for copies. M is behind done of each graph when it goes on, and each graph is behind M: graphs run one
// after the other, whichever side stream they are on.
//
// The graphs of a chain of n layers have places, in the order of their captures: forward i is at i, backward i at 2n - 1 - i.
// The memory of all of them is one pool, which captures used in that order. What a copy reads or writes is used again only from
// a certain place on, which is known from the capture, and the first graph that comes to it waits for the copy:
//  - released_at(k): the sources of k went back to the pool before the capture of the graph at this place. It, or the first that
//    is launched behind it, waits for left(k). A forward of k or of a layer below begins another pass, and waits for it too.
//  - returns_at(k): the targets of k were allocated before the capture of the backward at this place, and stay allocated until
//    backward k. In between they are nobody else's: the copies are queued before the launch of the first graph from there on, behind
//    S, and so behind all that used the memory before, and backward k waits for back(k). A graph at any other place, any
//    forward among them, waits for back(k) as well, and k has to come back once more if it is still needed.
// A host slot is the layer's own for the life of its graphs: its next D2H is behind ready of a forward, which waited for back. In shared
// memory other chains have it at their turns: see Note [Turns in shared memory].
// A static input of a layer's own lies outside of the pool and no copy touches it: M may write it behind done(n) of both
// directions. What lies in the pool M may write while no graph runs, and waits for all copies first: a seed, and a linked input
// where the output that it is has been given other memory since.
//
// An output that other layers read is in the pool as well. It goes back there before the capture of a graph at a place behind
// all that need it (OutputLives), the copies of it included: from that place on any graph may write its memory. So before the first
// launch from there on, what is held of it is copied out, and M waits for who reads it.

Chain::Chain(const GraphResources& resources, const GraphOptions& options)
    : runtime_(resources.runtime),
      arena_(resources.arena),
      options_(options),
      memory_(memory_for(resources, options)),
      draw_order_(DrawOrder::of(runtime_->device())),
      fork_(runtime_->create_event()),
      whole_stream_(runtime_->create_event()),
      pool_(memory_->pool(runtime_)),
      mutex_(memory_->mutex()),
      eager_(resources.eager),
      copies_(runtime_, resources.mover, layers_),
      use_(runtime_, *pool_) {
  if (options.cuda_graph_stream()) {
    streams_.push_back(*options.cuda_graph_stream());
  } else {
    for ([[maybe_unused]] const auto k : c10::irange(options.side_streams().value_or(kSideStreams))) {
      side_streams_.push_back(runtime_->create_stream());
      streams_.push_back(side_streams_.back());
    }
  }
}

Chain::~Chain() {
  const std::lock_guard lock(mutex_);
  try {
    synchronize_streams();
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
  leave_memory();
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
  return with_watched(layers_[index].modules.change(), layers_[index]);
}

FactsChange Chain::change_of_all(std::size_t index) const noexcept {
  return with_watched(layers_[index].modules.change_of_all(), layers_[index]);
}

FactsChange Chain::change() const noexcept {
  FactsChange all;
  const torch::nn::Module* model = nullptr;  // of the plain functions, whose replays look at few of its modules
  for (const auto i : c10::irange(layers_.size())) {
    const ModuleFacts& modules = layers_[i].modules;
    if (modules.attends() && modules.root() != model) {
      model = modules.root();
      all |= modules.members_change();
    }
    all |= change(i);
  }
  return all;
}

FactsChange Chain::change_before_pass() const noexcept {
  FactsChange all;
  const torch::nn::Module* model = nullptr;  // as in change()
  for (const auto i : c10::irange(layers_.size())) {
    const Layer& layer = layers_[i];
    if (layer.released) {
      continue;
    }
    FactsChange of_layer = change(i);
    if (layer.modules.attends() && layer.modules.root() != model) {
      model = layer.modules.root();
      of_layer |= layer.modules.members_change();
    }
    if (of_layer.layout) {
      continue;
    }
    of_layer.training = of_layer.options = false;
    if (layer.placed_by_hooks) {
      of_layer.relocated = of_layer.identity = false;
    }
    all |= of_layer;
  }
  return all;
}

bool Chain::begins_pass(std::size_t layer) const {
  const std::lock_guard lock(mutex_);
  return top_ < 0 && (!forwards_alone() || latest_ < 0 || static_cast<std::int64_t>(layer) <= latest_);
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

void Chain::take_target(Layer& layer, const ReplayOptions* target) {
  layer.target = target != nullptr ? *target : ReplayOptions();
  if (const auto& stream = layer.target.stream();
      stream && std::find(given_streams_.begin(), given_streams_.end(), *stream) == given_streams_.end()) {
    given_streams_.push_back(*stream);
  }
}

void Chain::synchronize_streams() {
  for (const std::vector<c10::Stream>* const streams : {&streams_, &given_streams_}) {
    for (const c10::Stream stream : *streams) {
      runtime_->synchronize(stream);
    }
  }
}

std::string Chain::stream_in_words(std::size_t index, bool backward) const {
  if (side_streams_.empty()) {
    return "the stream that the options name";
  }
  const std::size_t number = backward ? 0 : index % streams_.size();
  return "side stream " + std::to_string(number + 1) + " of " + std::to_string(streams_.size());
}

void Chain::launch(const Graph& graph, c10::Stream side, const ExternalEvent& done, const GraphEvent* event) {
  const auto launch_it = [&] {
    runtime_->launch(graph, side);
    ++counts_.replays;  // whatever fails from here on, the graph runs
  };
  if (runtime_->draws(graph)) {
    draw_order_.launch(*runtime_, side, launch_it);
  } else {
    launch_it();
  }
  eager_->graph_launched();
  if (event != nullptr) {
    runtime_->record(GraphEventState::event_of(*event), side);
  }
  const c10::Stream main = runtime_->current_stream();
  called_on_ = main;
  if (options_.cuda_graph_stream() && !options_.cuda_graph_event()) {
    runtime_->record(whole_stream_, side);
    runtime_->wait(main, whole_stream_);
  } else {
    runtime_->wait(main, done);
  }
}

void Chain::write_static_inputs(Layer& layer, c10::ArrayRef<at::Tensor> inputs) {
  bool joined = false;
  const at::NoGradGuard no_grad;
  for (const auto i : c10::irange(inputs.size())) {
    const StaticInput& input = layer.inputs[i];
    if (!input.tensor.defined() || input.same_as_earlier ||
        (inputs[i].const_data_ptr() == input.tensor.const_data_ptr() && same_layout(inputs[i], input.tensor))) {
      continue;
    }
    if (input.from && !joined) {  // memory of the pool, which copies may use by now
      join_copies();
      joined = true;
    }
    input.tensor.copy_(inputs[i], /*non_blocking=*/true);
  }
}

void Chain::forward(std::size_t index, c10::ArrayRef<at::Tensor> inputs, detail::TensorBuffer& outputs,
                    const ReplayOptions* target, Inputs known) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_[index];
  if (known == Inputs::unknown || !layer.forward) {
    check(index, inputs);
  }
  if (layer.pending) {
    throw UsageError(describe(index) +
                     ": the backward of its previous forward is still pending, and this forward would " +
                     "overwrite what it needs; run that backward first, or capture once for each microbatch in flight");
  }
  if (top_ >= static_cast<std::int64_t>(index)) {
    throw UsageError(describe(index) + ": called after \"" + layers_[top_].spec.name +
                     "\", whose backward is pending; replay " +
                     "calls that were captured together in the order of their capture, or capture them separately");
  }
  check_views_of_inputs(layer, inputs);
  const Site site(Activity::launch_forward, layer.site);
  take_turn(index);
  follow_latest_call();
  // What this forward frees while it runs, the outputs of later ones were given by the pool (not the reverse: earlier outputs
  // were alive when this forward was captured). So those of an earlier pass are overwritten by this launch already.
  for (std::size_t later = std::max(index, highest_given_) + 1; later-- > index;) {
    for (OutputStorage& storage : layers_[later].output_storages) {
      storage.before_overwrite(*runtime_, fork_, counts_.outputs);
    }
  }
  highest_given_ = index;
  overwrite_released_outputs(index);
  overwrite_given_gradients(index);
  latest_ = static_cast<std::int64_t>(index);
  ++layer.generation;  // from here on what an earlier forward saved may be overwritten
  layer.backward_launched = layer.backward_failed = false;
  write_static_inputs(layer, inputs);
  take_target(layer, target);
  const c10::Stream side = layer.target.stream().value_or(forward_stream(index));
  runtime_->record(fork_, runtime_->current_stream());
  runtime_->wait(side, fork_);
  copies_.before_forward(index, side);
  try {
    launch(layer.forward, side, layer.forward_done, layer.target.event().get());
    copies_.forward_launched(index);
    use_.launched(index);
  } catch (...) {
    settle(side);
    throw;
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
  copies_.join(runtime_->current_stream());
}

void Chain::reset(std::size_t index) {
  const std::lock_guard lock(mutex_);
  synchronize_streams();
  Layer& layer = layers_[index];
  drop_pending(index, layer.generation);
  layer.forward.reset();
  layer.backward.reset();
  copies_.reset(index);
  use_.dropped();
}

void Chain::reset() {
  for (const auto i : c10::irange(layers_.size())) {
    reset(i);
  }
  // What a capture in their place starts from stays: the layers' arguments that lie outside of the pool.
  const std::lock_guard lock(mutex_);
  leave_memory();
  for (Layer& layer : layers_) {
    for (StaticInput& input : layer.inputs) {
      const bool linked = input.from && !layers_[input.from->layer].released;
      input.tensor = linked ? at::Tensor() : input.tensor;
      input.grad = at::Tensor();
    }
    for (StaticOutput& output : layer.outputs) {
      output.tensor = output.seed = at::Tensor();
    }
    layer.output_storages.clear();
    for (LayerParameter& parameter : layer.parameters) {
      parameter.grad = parameter.attached = at::Tensor();
    }
    layer.for_each_given_gradient([](std::optional<OutputStorage>& memory) { memory.reset(); });
  }
  pool_.reset();
  outside_ = {};
}

void Chain::release(std::size_t index) {
  const std::lock_guard lock(mutex_);
  Layer& layer = layers_[index];
  if (layer.released) {
    return;
  }
  reset(index);
  layer.released = true;
  give_up_outputs(index);
  for (StaticInput& input : layer.inputs) {
    input.tensor = input.grad = at::Tensor();
  }
  for (LayerParameter& parameter : layer.parameters) {
    parameter.grad = parameter.attached = at::Tensor();
  }
  layer.for_each_given_gradient([](std::optional<OutputStorage>& memory) {
    if (memory && !memory->held()) {  // else it is copied out where a graph would overwrite it
      memory.reset();
    }
  });
  layer.externals.clear();
  layer.backward_reads.clear();
  layer.target = {};
  if (released()) {
    reset();
  }
}

bool Chain::released() const {
  return std::all_of(layers_.begin(), layers_.end(), [](const Layer& layer) { return layer.released; });
}

void Chain::give_up_outputs(std::size_t index) noexcept {
  Layer& layer = layers_[index];
  try {
    for (OutputStorage& storage : layer.output_storages) {
      storage.before_overwrite(*runtime_, fork_, counts_.outputs);
    }
    layer.for_each_given_gradient([&](std::optional<OutputStorage>& memory) {
      if (memory && !memory->held()) {
        memory->before_overwrite(*runtime_, fork_, counts_.gradients);
      }
    });
    if (layer.generation > 0) {  // the memory may go now, behind all that reads it
      runtime_->synchronize(runtime_->current_stream());
    }
  } catch (
      const std::exception&) {  // no room: what is held keeps it, and is copied out where a graph would overwrite it
    return;
  }
  released_.drop(index);
  layer.output_storages.clear();
  for (StaticOutput& output : layer.outputs) {
    output.tensor = output.owner = output.seed = at::Tensor();
  }
}

Chain::Counts& Chain::Counts::operator+=(const Counts& other) noexcept {
  replays += other.replays;
  unused_outputs += other.unused_outputs;
  outputs += other.outputs;
  gradients += other.gradients;
  return *this;
}

Chain::Counts Chain::take_counts() {
  const std::lock_guard lock(mutex_);
  return std::exchange(counts_, {});
}

}  // namespace sidestream
