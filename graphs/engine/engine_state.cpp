#include "graphs/engine/engine_state.h"

#include <string>
#include <thread>
#include <utility>

#include <torch/nn/module.h>

#include "graphs/engine/graph_drawing.h"
#include "offload/name_pattern.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// How many slots the chunks of a step with an order may have, each with captures of its own: see StepChunks. None if the memory of the
/// calls is not free when their backward ends.
std::size_t most_slots(const Options& options) {
  const GraphOptions& graphs = options.graph_options();
  return graphs.retain_graph_in_backward() ? 0 : static_cast<std::size_t>(options.call_options().max_captures());
}

}  // namespace

EngineState::EngineState(torch::nn::Module& model, Options options, std::shared_ptr<Runtime> runtime)
    : model_(model.weak_from_this().lock()),
      resources_(model, std::move(options), std::move(runtime)),
      context_(*this),
      calls_(model, resources_.tree, resources_.graphed, CallRules::of(resources_.options.call_options())),
      recorded_(model, resources_.runtime->device(), resources_.exclusions, resources_.rest,
                delays_gradients(resources_.options.graph_options())),
      sequences_(resources_, context_, eager_plan_, counts_),
      budget_(resources_, sequences_),
      chunks_(resources_.mover, resources_.eager, most_slots(resources_.options)),
      verification_(resources_.options.verify_replays() > 0
                        ? std::make_unique<ReplayVerification>(resources_.options, model, context_)
                        : nullptr),
      dispatcher_(resources_, context_, eager_plan_, recorded_, sequences_, counts_, chunks_, verification_.get()),
      memory_(resources_.runtime) {}

void EngineState::refuse_inside(const char* what) const {
  if (making_ready_ || context_.phase() == CallContext::Phase::capturing) {
    throw UsageError(std::string(what) +
                     " was called inside a capture of the same engine (from a hook, from Options::progress, or from " +
                     "the body of a call); call it before or after the capture");
  }
}

std::vector<std::string> EngineState::write_graphs(const std::string& folder) const {
  refuse_inside("OffloadEngine::write_graphs");
  return write_graph_files(*resources_.runtime, sequences_, folder);
}

std::string EngineState::trace_json() const {
  refuse_inside("OffloadEngine::trace_json");
  const TracedStep& step = resources_.mover->trace().step();
  if (step.number == 0) {
    throw UsageError(
        "OffloadEngine::trace_json: no step has been traced; the second step after the latest captures is, so run more "
        "steps first. A GraphedStep is traced only if it is called inside of OffloadEngine::step");
  }
  return chrome_trace(step);
}

Chunk EngineState::begin_chunk(const std::shared_ptr<EngineState>& self, const ChunkId& id) {
  self->refuse_outside_of_step("OffloadEngine::chunk");
  return Chunk(self, self->chunks_.begin(id));
}

void EngineState::mark_not_offload(const at::Tensor& tensor) {
  if (step_ && step_->thread() == std::this_thread::get_id()) {
    step_->mark_not_offload(tensor);  // the step may have saved it already
  } else {
    resources_.exclusions.mark(tensor);
  }
}

void EngineState::refuse_in_call(const char* what) const {
  refuse_inside(what);
  if (context_.inside_body()) {
    throw UsageError(std::string(what) +
                     " was called inside of a graphed call, and replays would not run it; call it around the call");
  }
  if (step_ && step_->thread() != std::this_thread::get_id()) {
    throw UsageError(std::string(what) + " was called on another thread than the step's; call it where the step began");
  }
}

void EngineState::refuse_outside_of_step(const char* what) const {
  refuse_in_call(what);
  if (!step_) {
    throw UsageError(std::string(what) +
                     " was called outside of a step; begin the step first, and keep it until the end");
  }
}

void EngineState::backward_dw() {
  refuse_in_call("OffloadEngine::backward_dw");
  resources_.delayed_weights->compute_all([](const GraphSequence&, std::size_t) { return true; });
  recorded_.weights_computed();
}

void EngineState::backward_dw(const ChunkId& id) {
  refuse_outside_of_step("OffloadEngine::backward_dw");
  RunningChunk& chunk = chunks_.chunk_for_weights(id);
  const auto is_of_chunk = [&chunk](const GraphSequence& sequence, std::size_t call) {
    return sequence.captured().calls[call].replay.chunk == chunk.number;
  };
  const auto refuse = [&id](const std::string& call) {
    throw UsageError("OffloadEngine::backward_dw: the backward of " + call + " in " + describe(id) +
                     " has not run; call it after the backward of the chunk");
  };
  sequences_.for_each([&](const GraphSequence& sequence) {
    for (std::size_t call = 0; call < sequence.captured().calls.size() && sequence.pending().any(); ++call) {
      if (is_of_chunk(sequence, call) && sequence.pending().runs().contains(call)) {
        refuse(sequence.captured().describe(call));
      }
    }
  });
  if (const RecordedCall* const call = recorded_.awaiting_backward(chunk.number)) {
    refuse(describe(*call->site));
  }
  resources_.delayed_weights->compute_all(is_of_chunk);
  chunk.weights_computed = true;
  recorded_.weights_computed(chunk.number);
}

void EngineState::refuse_inside_step(const std::string& what) {
  refuse_inside(what.c_str());
  end_abandoned_step();
  if (step_) {
    throw UsageError(what + " was called inside a step; end the step first");
  }
}

void EngineState::reset() {
  refuse_inside_step("OffloadEngine::reset");
  forget_captures();
}

void EngineState::set_activation_offloading(const std::vector<NamePatterns>& named, bool on) {
  refuse_inside_step("OffloadEngine::set_activation_offloading");
  if (counts_.report.steps > 0) {
    for (const NamePatterns& each : named) {
      resources_.tree.require_known(each);
    }
  }
  bool changes = false;
  for (const NamePatterns& each : named) {
    changes = resources_.tree.switch_offload(each, on) || changes;
  }
  if (changes) {
    sequences_.offload_switched();
    forget_captures();
  }
}

void EngineState::forget_captures() {
  sequences_.drop_own();
  calls_.drop_variants();
  recorded_.clear();
  eager_plan_.drop();
  resources_.arena->trim();
  sequences_.mark_static_outputs();
  budget_.drop();
  resources_.mover->trace().begin_anew();
}

}  // namespace sidestream
