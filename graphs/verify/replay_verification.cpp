#include "graphs/verify/replay_verification.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include <torch/nn/module.h>

#include "graphs/resources/call_context.h"

namespace sidestream {
namespace {

using Names = std::unordered_map<const c10::TensorImpl*, std::string>;

Names names_of(const torch::nn::Module& model) {
  Names names;
  for (const auto& item : model.named_parameters()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  for (const auto& item : model.named_buffers()) {
    names.emplace(item.value().unsafeGetTensorImpl(), item.key());
  }
  return names;
}

}  // namespace

ReplayVerification::ReplayVerification(const Options& options, const torch::nn::Module& model, CallContext& context)
    : model_(model),
      context_(context),
      device_(options.device()),
      first_(static_cast<std::uint64_t>(options.verify_replays())),
      every_(static_cast<std::uint64_t>(options.verify_every())),
      tolerance_(options.verify_tolerance()) {}

void ReplayVerification::next_round() noexcept {
  limit_ = least_;
  least_ = kAny;
  taken_ = false;
  ++round_;
}

void ReplayVerification::begin_step() noexcept {
  in_step_ = true;
  next_round();
}

void ReplayVerification::end_step() noexcept {
  in_step_ = false;
  if (const auto latest = latest_.lock(); latest != nullptr) {
    latest->drop();
  }
}

bool ReplayVerification::due(const Turns& turns) const noexcept {
  return turns.verified < first_ || (every_ > 0 && turns.replays - turns.latest >= every_);
}

bool ReplayVerification::takes_turn(Turns& turns) {
  if (!in_step_ && turns.round == round_) {
    next_round();
  }
  turns.round = round_;
  ++turns.replays;
  if (!due(turns)) {
    return false;
  }
  const auto latest = latest_.lock();
  const bool takes = !taken_ && turns.verified <= limit_ && (latest == nullptr || latest->done());
  if (takes) {
    taken_ = true;
    ++turns.verified;
    turns.latest = turns.replays;
  }
  if (due(turns)) {
    least_ = std::min(least_, turns.verified);
  }
  return takes;
}

std::shared_ptr<VerifiedCall> ReplayVerification::run_eagerly(GraphSequence& sequence, std::size_t call,
                                                              const detail::CallRequest& request) {
  const Names names = names_of(model_);
  const CallContext::Enter inside(context_, CallContext::Phase::plain);
  const CapturedCall& captured = sequence.captured().calls[call];
  auto delayed = [of = sequence.weak_from_this(), call] {
    const std::shared_ptr<GraphSequence> alive = of.lock();  // the replay's node, which asks, owns the sequence
    if (alive == nullptr) {
      return std::vector<at::Tensor>();
    }
    const CapturedCall& run = alive->captured().calls[call];
    return run.replay.weights_delayed ? alive->replay_weights(call) : std::vector<at::Tensor>();
  };
  return VerifiedCall::run(
      {&captured, request.keep(request.context).body, request.inputs, device_, tolerance_, std::move(delayed), &names},
      counts_);
}

void ReplayVerification::forward(const std::shared_ptr<GraphSequence>& sequence, std::size_t call,
                                 const detail::CallRequest& request, detail::TensorBuffer& outputs) {
  const auto [of_sequence, is_new] = turns_.try_emplace(sequence, sequence->captured().calls.size());
  if (is_new) {  // sequences that were captured again leave theirs behind
    std::erase_if(turns_, [](const auto& item) { return item.first.expired(); });
  }
  if (!takes_turn(of_sequence->second[call])) {
    sequence->forward(call, request.inputs, outputs, request.replay);
    return;
  }
  const std::shared_ptr<VerifiedCall> eager = run_eagerly(*sequence, call, request);
  latest_ = eager;
  sequence->forward(call, request.inputs, outputs, request.replay);
  eager->compare_forward(outputs);
}

void ReplayVerification::add_to(Report& report) const {
  report.verified_forwards = counts_->forwards;
  report.verified_backwards = counts_->backwards;
}

}  // namespace sidestream
