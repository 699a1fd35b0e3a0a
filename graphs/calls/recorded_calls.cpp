#include "graphs/calls/recorded_calls.h"

#include <algorithm>
#include <atomic>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty_strided.h>
#include <c10/util/DimVector.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/nn/module.h>

#include "graphs/calls/step_chunks.h"
#include "graphs/guards/call_spec.h"
#include "graphs/resources/step_memory.h"
#include "offload/saved_tensor_recorder.h"

namespace sidestream {
namespace {

/// A backward that has begun or not.
struct BackwardSeen {
  std::atomic<bool> begun{false};
  std::optional<CallModes> modes;  ///< may be read once it has begun
};

/// Sees a call's backward begin, or that none will come. Threads: autograd's.
class BackwardWatch final {
 public:
  BackwardWatch(std::shared_ptr<BackwardSeen> seen, std::shared_ptr<EagerMemoryEstimate> rest, c10::DeviceType type,
                std::shared_ptr<OrderLog> log, const SequenceStep& step)
      : seen_(std::move(seen)), rest_(std::move(rest)), type_(type), log_(std::move(log)), step_(step) {}
  BackwardWatch(const BackwardWatch&) = delete;
  BackwardWatch& operator=(const BackwardWatch&) = delete;
  /// If no backward has begun, none will come: a capture of the call would be free again as well (GraphSequence::drop_pending).
  ~BackwardWatch() { seen_->begun.store(true); }
  void begins() {
    if (!claimed_.exchange(true)) {
      seen_->modes = CallModes::current(type_);
      seen_->begun.store(true);
      log_->backward(step_);
      rest_->close();
    }
  }

 private:
  std::shared_ptr<BackwardSeen> seen_;
  std::shared_ptr<EagerMemoryEstimate> rest_;
  c10::DeviceType type_;
  std::shared_ptr<OrderLog> log_;
  SequenceStep step_;
  std::atomic<bool> claimed_{false};  // by the node that runs first
};

/// Sits on a node that made an output of a call. All nodes of the call share the watch, since any of them may run first, or none.
class NodeWatch final : public torch::autograd::FunctionPreHook {
 public:
  explicit NodeWatch(std::shared_ptr<BackwardWatch> watch) : watch_(std::move(watch)) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override {
    watch_->begins();
    return grads;
  }

 private:
  std::shared_ptr<BackwardWatch> watch_;
};

/// What a sample holds of the device.
std::size_t device_bytes(const CallInput& input) {
  return input.sample.defined() && !input.on_host ? input.sample.nbytes() : 0;
}

/// True if the tensors of `request` are like those that the call was recorded with.
bool is_like_recorded(const RecordedCall& call, const detail::CallRequest& request) {
  for (std::size_t k = 0; k < call.inputs.size(); ++k) {
    const at::Tensor& recorded = call.inputs[k].from ? call.inputs[k].like : call.inputs[k].sample;
    const at::Tensor& given = request.inputs[k];
    if (recorded.defined() && given.defined() &&
        (recorded.sizes() != given.sizes() || recorded.dtype() != given.dtype())) {
      return false;
    }
  }
  return true;
}

}  // namespace

/// One recorded call's latest run.
struct RecordedCalls::Flight {
  explicit Flight(const RunningChunk* of)
      : weights_told(of != nullptr && of->weights_at != RunningChunk::never), chunk(of != nullptr ? of->number : 0) {}

  std::shared_ptr<BackwardSeen> backward = std::make_shared<BackwardSeen>();
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>> outputs;
  std::vector<c10::DimVector> sizes;  ///< of `outputs`: a program may change them in place
  std::vector<std::size_t> from;      ///< recorded calls that its inputs were computed from
  SequenceStep backward_step;         ///< of its backward, in the order log
  bool first = true;                  ///< of its recorded call
  bool like_recorded = true;          ///< its inputs have the shapes that the capture will have
  bool weights = false;               ///< its weight gradients are computed, if they are delayed
  bool weights_told;                  ///< the step's order says when
  std::uint64_t chunk;                ///< its chunk's number; 0 without one
};

std::size_t RecordedCalls::add(CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                               std::size_t busy_variants, RunningChunk* chunk) {
  const at::NoGradGuard no_grad;
  std::vector<std::size_t> from = dependencies_.of(request.inputs);
  if (chunk != nullptr) {
    add_calls_of(*chunk, from);
  }
  if (const auto again = repeated(site, request, modes, chunk)) {
    const std::size_t i = *again;
    learn_backward_modes(i);
    flights_[i] = std::make_shared<Flight>(chunk);
    flights_[i]->first = false;
    flights_[i]->like_recorded = is_like_recorded(*calls_[i], request);
    if (chunk != nullptr) {
      chunk->slot = calls_[i]->slot;
    }
    flights_[i]->backward_step = log_->forward(i, from);
    flights_[i]->from = std::move(from);
    outputs_.call_begins(i, calls_[i]->sequence(), current_recorder());
    return i;
  }
  const std::size_t at_least = chunk != nullptr ? chunk->slot.value_or(busy_variants) : busy_variants;
  const bool in_order = chunk != nullptr && chunk->order != nullptr;
  const std::size_t slot = in_order ? *chunk->slot : free_slot(site, request, modes, from, at_least);
  auto call = std::make_shared<RecordedCall>();
  call->site = &site;
  if (in_order) {
    call->order = chunk->order;
    call->stage = chunk->id.stage;
  }
  detail::KeptCall kept_call = request.keep(request.context);
  call->structure = std::move(kept_call.structure);
  call->module = modules_of_call(site.scope->name, site.module, kept_call.modules, *model_);
  const auto& watched = call->module != nullptr ? call->module : site.watched;
  if (watched != nullptr) {
    refuse_nested_members(describe(site), *watched);
  }
  call->state = {modes, modes.without_autocast(), ModuleFacts(watched)};
  call->body = std::move(kept_call.body);
  for (const detail::Guard& guard : request.guards) {
    call->guards.push_back({guard.copy(guard.value), guard.type, guard.equal});
  }
  call->shape.assign(request.shape.begin(), request.shape.end());
  call->slot = slot;
  outputs_.call_begins(calls_.size(), call->sequence(), current_recorder());
  for (const at::Tensor& input : request.inputs) {
    CallInput& kept = call->inputs.emplace_back();
    kept.shared_cast = input.defined() && modes.gradients && has_shared_cast(input);
    if (site.kind != CallSite::Kind::callable) {  // a callable takes each argument for a separate tensor
      kept.aliases = InputAliases::of(request.inputs, call->inputs.size() - 1);
    }
    if (kept.aliases && kept.aliases->same_as != call->inputs.size() - 1) {
      kept.from = call->inputs[kept.aliases->same_as].from;
      continue;
    }
    for (std::size_t i = calls_.size(); i-- > 0 && !kept.from && input.defined();) {
      for (std::size_t o = 0; o < flights_[i]->outputs.size(); ++o) {
        if (calls_[i]->slot == slot && calls_[i]->state.modes.gradients == modes.gradients &&
            flights_[i]->like_recorded && gave({i, o}, input)) {
          kept.from = Link{i, o};
          kept.marked = exclusions_->is_marked(input);
          kept.like = at::empty_strided(input.sizes(), input.strides(), input.options().device(at::kMeta))
                          .set_requires_grad(input.requires_grad());
        }
      }
    }
    if (!kept.from && input.defined()) {
      CallInput sample = sample_of(input, device_);
      kept.sample = std::move(sample.sample);
      if (!modes.gradients) {
        kept.sample.set_requires_grad(false);
      }
      kept.on_host = sample.on_host;
    }
  }
  for (const CallInput& input : call->inputs) {
    kept_bytes_ += device_bytes(input);
  }
  calls_.push_back(std::move(call));
  flights_.push_back(std::make_shared<Flight>(chunk));
  if (chunk != nullptr) {
    chunk->slot = slot;
  }
  std::vector<std::size_t> connected = from;
  for (const CallInput& input : calls_.back()->inputs) {
    if (input.from) {
      connected.push_back(input.from->call);  // also if no gradient goes there
    }
  }
  flights_.back()->backward_step = log_->forward(calls_.size() - 1, connected);
  flights_.back()->from = std::move(from);
  return calls_.size() - 1;
}

bool RecordedCalls::is_of(const RecordedCall& call, const CallSite& site, const detail::CallRequest& request,
                          const CallModes& modes) {
  return call.site == &site && call.state.modes == modes && !call.state.modules.change().any() &&
         same_arguments(call.guards, call.shape, request);
}

bool RecordedCalls::settled(std::size_t call) const {
  return flights_[call]->backward->begun.load() && (!delays_ || flights_[call]->weights);
}

void RecordedCalls::weights_computed(std::uint64_t chunk) {
  std::vector<SequenceStep> backwards;
  for (const auto& flight : flights_) {
    if (!flight->weights && (chunk == 0 || flight->chunk == chunk) && flight->backward->begun.load()) {
      flight->weights = true;
      if (delays_ && flight->weights_told) {
        backwards.push_back(flight->backward_step);
      }
    }
  }
  log_->weights(backwards);
}

const RecordedCall* RecordedCalls::awaiting_backward(std::uint64_t chunk) const {
  for (std::size_t i = 0; delays_ && i < calls_.size(); ++i) {  // else no weight gradients are asked for
    if (flights_[i]->chunk == chunk && !flights_[i]->backward->begun.load()) {
      return calls_[i].get();
    }
  }
  return nullptr;
}

bool RecordedCalls::gave(const Link& link, const at::Tensor& tensor) const {
  const auto& outputs = flights_[link.call]->outputs;
  return link.index < outputs.size() && outputs[link.index]._unsafe_get_target() == tensor.unsafeGetTensorImpl() &&
         !outputs[link.index].expired() && tensor.sizes() == flights_[link.call]->sizes[link.index];
}

std::optional<std::size_t> RecordedCalls::repeated(const CallSite& site, const detail::CallRequest& request,
                                                   const CallModes& modes, const RunningChunk* chunk) const {
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    const RecordedCall& call = *calls_[i];
    if (chunk != nullptr && chunk->slot && call.slot != *chunk->slot) {
      continue;
    }
    if (call.order != nullptr && (chunk == nullptr || chunk->order != call.order || chunk->id.stage != call.stage)) {
      continue;
    }
    if (!is_of(call, site, request, modes) || call.inputs.size() != request.inputs.size() || !settled(i)) {
      continue;
    }
    // The call's capture takes only that output (CapturedSequence::accepts).
    bool linked = true;
    for (std::size_t k = 0; k < call.inputs.size() && linked; ++k) {
      linked = !call.inputs[k].from || gave(*call.inputs[k].from, request.inputs[k]);
    }
    if (linked) {
      return i;
    }
  }
  return std::nullopt;
}

void RecordedCalls::add_calls_of(const RunningChunk& chunk, std::vector<std::size_t>& from) const {
  for (std::size_t i = 0; i < flights_.size(); ++i) {
    const auto at = std::lower_bound(from.begin(), from.end(), i);
    if (flights_[i]->chunk == chunk.number && (at == from.end() || *at != i)) {
      from.insert(at, i);
    }
  }
}

std::size_t RecordedCalls::free_slot(const CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                                     const std::vector<std::size_t>& from, std::size_t at_least) const {
  std::size_t slot = at_least;
  for (const std::size_t earlier : from) {
    slot = std::max(slot, calls_[earlier]->slot);
  }
  const auto taken = [&] {
    for (std::size_t i = 0; i < calls_.size(); ++i) {
      // What this call is computed from is no microbatch beside it: a module that is called many times is one sequence.
      if (calls_[i]->slot == slot && is_of(*calls_[i], site, request, modes) && !settled(i) &&
          !std::binary_search(from.begin(), from.end(), i)) {
        return true;
      }
    }
    return false;
  };
  while (taken()) {
    ++slot;
  }
  return slot;
}

std::size_t RecordedCalls::count(const CallSite& site, bool gradients) const noexcept {
  return static_cast<std::size_t>(std::count_if(calls_.begin(), calls_.end(), [&](const auto& call) {
    return call->site == &site && call->state.modes.gradients == gradients && !call->captured;
  }));
}

void RecordedCalls::ran(std::size_t call, const detail::TensorBuffer& outputs) {
  Flight& flight = *flights_[call];
  dependencies_.add(call, flight.from, outputs);
  outputs_.add(call, calls_[call]->sequence(), outputs);
  flight.outputs.clear();
  flight.sizes.clear();
  std::vector<std::shared_ptr<torch::autograd::Node>> watched;
  const c10::DeviceType type = calls_[call]->state.modes.autocast.type;
  for (const at::Tensor& output : outputs) {
    flight.outputs.emplace_back(output.getIntrusivePtr());
    flight.sizes.emplace_back(output.defined() ? output.sizes() : c10::IntArrayRef());
    auto node = output.defined() ? output.grad_fn() : nullptr;
    if (node != nullptr && std::find(watched.begin(), watched.end(), node) == watched.end()) {
      watched.push_back(std::move(node));
    }
  }
  log_->ran(call, watched.empty());
  const auto watch = std::make_shared<BackwardWatch>(flight.backward, rest_, type, log_, flight.backward_step);
  for (const auto& node : watched) {
    node->add_pre_hook(std::make_unique<NodeWatch>(watch));
  }
}

void RecordedCalls::learn_backward_modes(std::size_t call) {
  const BackwardSeen& backward = *flights_[call]->backward;
  if (backward.begun.load() && backward.modes) {
    calls_[call]->state.backward_modes = *backward.modes;
  }
}

bool RecordedCalls::outdated() const noexcept {
  return std::any_of(calls_.begin(), calls_.end(), [](const auto& call) {
    const FactsChange change = call->state.modules.change();
    return change.identity || change.layout || change.options;
  });
}

void RecordedCalls::learn_backward_modes() {
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    learn_backward_modes(i);
  }
}

void RecordedCalls::forget(std::size_t call) {
  log_->forget(flights_[call]->backward_step);
  if (!flights_[call]->first) {
    flights_[call]->backward->begun.store(true);  // nothing of this run awaits a backward
    return;
  }
  for (const CallInput& input : calls_[call]->inputs) {
    kept_bytes_ -= device_bytes(input);
  }
  calls_.pop_back();
  flights_.pop_back();
}

bool RecordedCalls::continues(std::size_t call, const std::vector<std::size_t>& group) const {
  const std::vector<std::size_t>& from = flights_[call]->from;
  return std::any_of(from.begin(), from.end(),
                     [&](std::size_t earlier) { return std::binary_search(group.begin(), group.end(), earlier); });
}

void RecordedCalls::clear() {
  calls_.clear();
  flights_.clear();
  dependencies_.clear();
  log_ = std::make_shared<OrderLog>();  // hooks of graphs that are still there write into the old one
  outputs_.clear();
  kept_bytes_ = 0;
}

}  // namespace sidestream
