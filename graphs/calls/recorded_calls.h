#pragma once
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/util/ArrayRef.h>

#include "graphs/calls/call_site.h"
#include "graphs/calls/order_log.h"
#include "graphs/calls/recorded_outputs.h"
#include "graphs/calls/step_chunks.h"
#include "graphs/guards/call_spec.h"
#include "sidestream/detail/argument_parts.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/detail/module_forward.h"

namespace torch::autograd {
struct Node;
}

namespace sidestream {

class EagerMemoryEstimate;
class Exclusions;

/// Which recorded calls later calls are computed from, by autograd's edges, also through other operators between them.
/// Threads: one at a time.
class CallDependencies {
 public:
  /// The recorded calls that `inputs` were computed from, directly or through other calls, in increasing order.
  [[nodiscard]] std::vector<std::size_t> of(c10::ArrayRef<at::Tensor> inputs) const;
  /// `call`, which was computed from `from`, has given `outputs`.
  void add(std::size_t call, std::vector<std::size_t> from, c10::ArrayRef<at::Tensor> outputs);
  void clear() noexcept;

 private:
  struct Giver {
    std::weak_ptr<torch::autograd::Node> alive;  ///< keeps the address from being used again
    std::size_t call;
  };
  std::unordered_map<const torch::autograd::Node*, Giver> givers_;
  std::unordered_map<std::size_t, std::vector<std::size_t>> from_;
};

/// A call that ran eagerly and is to be captured.
struct RecordedCall {
  CallSite* site = nullptr;
  Body body;
  std::shared_ptr<const void> structure;            ///< of its result: what the latest run of the body gave
  std::shared_ptr<const torch::nn::Module> module;  ///< the site's, with those that are arguments; null without any
  std::vector<KeptGuard> guards;
  std::vector<std::size_t> shape;
  CallState state;
  std::vector<CallInput> inputs;  ///< their links name recorded calls
  /// Of its sequence: the slot of its chunk and of the calls that it was computed from, or the next one in which the same call awaited no
  /// backward.
  std::size_t slot = 0;
  GivenOrder order;        ///< that its chunk has its slot from; null if there is none
  std::int64_t stage = 0;  ///< of that chunk
  /// Apart for training and for evaluation. All calls in the order of a step are one sequence.
  [[nodiscard]] std::size_t sequence() const noexcept {
    return 2 * (order != nullptr ? 0 : slot + 1) + (state.modes.gradients ? 0 : 1);
  }
  bool captured = false;  ///< only where a later slot's capture failed: the rest is tried again
};

/// The calls that ran eagerly since the last capture, in order, each once for every microbatch in flight.
/// Threads: the step's.
class RecordedCalls {
 public:
  /// `model`: the engine's, which may be an argument though no shared_ptr owns it. `device`: the graphs'. `exclusions` knows what was
  /// marked. `rest` is told where a backward of theirs begins.
  /// `delays`: captures are in flight until their weight gradients are computed, and so are the calls here.
  RecordedCalls(const torch::nn::Module& model, c10::Device device, const Exclusions& exclusions,
                std::shared_ptr<EagerMemoryEstimate> rest, bool delays) noexcept
      : model_(&model), device_(device), exclusions_(&exclusions), rest_(std::move(rest)), delays_(delays) {}

  /// Keeps what a capture of this call needs, before it runs: input values (or which recorded output an input is). One capture serves
  /// two calls if the first awaits no backward any more, and if linked inputs come from the same recorded calls. `busy_variants`:
  /// captures of the call that exist and await their backward. `chunk`: that it belongs to, null without one; the call counts as computed
  /// from all earlier calls of its chunk. Returns what `ran` is to be given.
  std::size_t add(CallSite& site, const detail::CallRequest& request, const CallModes& modes, std::size_t busy_variants,
                  RunningChunk* chunk = nullptr);
  /// After it ran: learns its outputs and watches for its backward.
  void ran(std::size_t call, const detail::TensorBuffer& outputs);
  /// It threw instead: it is as if it had not been called. `call` is the latest that was added.
  void forget(std::size_t call);
  /// Weight gradients were computed: of all calls whose backward has begun, or of those of one chunk, by its number.
  void weights_computed(std::uint64_t chunk = 0);
  /// A recorded call of that chunk whose backward is still to come; null if there is none.
  [[nodiscard]] const RecordedCall* awaiting_backward(std::uint64_t chunk) const;
  /// True when a call's module has other members, or weights of another dtype or shape, than when it ran: its inputs no longer
  /// go with it.
  [[nodiscard]] bool outdated() const noexcept;
  /// Before the capture: calls learn the modes that their backward ran in.
  void learn_backward_modes();
  /// The recorded call whose capture will serve this one as well.
  [[nodiscard]] std::optional<std::size_t> repeated(const CallSite& site, const detail::CallRequest& request,
                                                    const CallModes& modes, const RunningChunk* chunk) const;
  /// How many captures `site` is to get, of training or of forwards alone.
  [[nodiscard]] std::size_t count(const CallSite& site, bool gradients) const noexcept;
  [[nodiscard]] bool empty() const noexcept { return calls_.empty(); }
  [[nodiscard]] const std::vector<std::shared_ptr<RecordedCall>>& calls() const noexcept { return calls_; }
  /// The calls of `slot`, of training or of evaluation, that are not captured yet: lists of those that are captured together, in order.
  /// Autograd connects the calls of a list, and a sequence of them in nested order may replay what was recorded.
  [[nodiscard]] std::vector<std::vector<std::size_t>> groups(std::size_t slot, bool evaluation) const;
  /// Calls in one order of steps that ran a backward and are not captured yet, whatever their slots. Not among `groups`.
  [[nodiscard]] std::vector<std::size_t> in_order() const;
  /// By call: whether one of its runs had no backward.
  [[nodiscard]] std::vector<bool> without_backward() const;
  /// True if `call` was computed from one of `group`, which is in order, in its latest run.
  [[nodiscard]] bool continues(std::size_t call, const std::vector<std::size_t>& group) const;
  /// In which order `calls`, which are `in_order`, ran in the step.
  [[nodiscard]] SequenceOrder order_of(const std::vector<std::size_t>& calls) const { return log_->order_of(calls); }
  /// Asked about an input by its call, an index in a group, and its index in that call.
  using MayLink = std::function<bool(std::size_t call, std::size_t input)>;
  /// The calls of `group`, which is in order, as they are captured. An input that is the output of a call outside of `group`, or that
  /// `may_link` denies, becomes an input that takes any tensor like that output. `may_link`: not set allows all.
  [[nodiscard]] std::vector<CallSpec> specs_of(const std::vector<std::size_t>& group,
                                               const MayLink& may_link = {}) const;
  /// What became of the outputs.
  [[nodiscard]] const RecordedOutputs& outputs() const noexcept { return outputs_; }
  void clear();
  /// Bytes of the copies of inputs that are kept on the device.
  [[nodiscard]] std::size_t kept_bytes() const noexcept { return kept_bytes_; }

 private:
  struct Flight;
  /// True if `call` is one of `site` with these arguments, in these modes.
  [[nodiscard]] static bool is_of(const RecordedCall& call, const CallSite& site, const detail::CallRequest& request,
                                  const CallModes& modes);
  /// True if a capture of the call may replay its forward now, as far as the latest run goes.
  [[nodiscard]] bool settled(std::size_t call) const;
  /// True if `tensor` is this output of the recorded call's latest run.
  [[nodiscard]] bool gave(const Link& link, const at::Tensor& tensor) const;
  /// Adds to `from`, which is in increasing order, the calls of `chunk`.
  void add_calls_of(const RunningChunk& chunk, std::vector<std::size_t>& from) const;
  /// For a new call that is computed from the calls `from`: see RecordedCall::slot. It is `at_least` so much.
  [[nodiscard]] std::size_t free_slot(const CallSite& site, const detail::CallRequest& request, const CallModes& modes,
                                      const std::vector<std::size_t>& from, std::size_t at_least) const;
  void learn_backward_modes(std::size_t call);
  const torch::nn::Module* model_;
  c10::Device device_;
  const Exclusions* exclusions_;
  std::shared_ptr<EagerMemoryEstimate> rest_;
  bool delays_;
  std::vector<std::shared_ptr<RecordedCall>> calls_;
  std::vector<std::shared_ptr<Flight>> flights_;  // parallel to calls_
  CallDependencies dependencies_;
  std::shared_ptr<OrderLog> log_ = std::make_shared<OrderLog>();
  RecordedOutputs outputs_;
  std::size_t kept_bytes_ = 0;
};

}  // namespace sidestream
