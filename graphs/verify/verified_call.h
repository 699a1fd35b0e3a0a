#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/edge.h>

#include "graphs/sandbox/sandbox.h"
#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// One call's eager run. It happens before the replay, with the same inputs, buffers and random state, and a Sandbox puts its changes
/// back. Its results are compared with those of the replay, forward and backward. It keeps the eager run's saved tensors until the
/// backward of the replay was compared, or until `drop`.
///
/// verified_call.cpp handles the forward, verified_backward.cpp compares the gradients.
/// Threads: the forward's; gradients are compared on the thread that runs the backward.
class VerifiedCall : public std::enable_shared_from_this<VerifiedCall> {
 public:
  /// Of verified calls. Threads: any.
  struct Counts {
    std::atomic<std::int64_t> forwards{0};   ///< replays whose outputs and buffers were compared
    std::atomic<std::int64_t> backwards{0};  ///< replays whose gradients were compared
  };

  /// A call that runs eagerly and is replayed.
  struct Call {
    const CapturedCall* captured = nullptr;  ///< the graphs of the call
    Body body;                               ///< the call with its present arguments
    c10::ArrayRef<at::Tensor> inputs;
    c10::Device device;
    double tolerance = 0;
    /// Gives the gradients of the call's delayed parameters, after the replay's backward.
    std::function<std::vector<at::Tensor>()> delayed;
    /// Dotted names of the model's parameters and buffers.
    const std::unordered_map<const c10::TensorImpl*, std::string>* names = nullptr;
  };

  /// Runs `call` eagerly. Throws: what the call throws.
  [[nodiscard]] static std::shared_ptr<VerifiedCall> run(const Call& call, std::shared_ptr<Counts> counts);
  VerifiedCall(const VerifiedCall&) = delete;
  VerifiedCall& operator=(const VerifiedCall&) = delete;
  ~VerifiedCall();

  /// Compares `outputs` of the replay, and the buffers after it. The backward will be compared when it runs.
  /// Throws: VerificationError.
  void compare_forward(const detail::TensorBuffer& outputs);
  /// Frees the eager run. Its backward is not compared.
  void drop() noexcept;
  /// True if no backward will be compared any more.
  [[nodiscard]] bool done() const noexcept;

 private:
  class BeforeBackward;
  class AfterBackward;
  /// One gradient that both runs compute.
  struct Target {
    std::string what;
    torch::autograd::Edge edge;  ///< of the eager run's leaf
    at::Tensor leaf;
    std::optional<std::size_t> result;   ///< index in the results of the replay's node
    std::optional<std::size_t> delayed;  ///< index in the results of `Call::delayed`
    bool is_input = false;
    bool added = false;  ///< the replay adds it into the leaf's `.grad`
    at::Tensor grad_before;
  };
  struct Buffer {
    std::string what;
    at::Tensor tensor;
    at::Tensor eager;  ///< its value after the eager run
  };

  VerifiedCall(const Call& call, std::shared_ptr<Counts> counts);
  void run_forward(const Call& call);
  void add_inputs(const Call& call, detail::TensorBuffer& given);
  void add_parameters(const Call& call);
  void add_buffers(const Call& call);
  /// Adds hooks to `node`, the replay's, that compare the gradients of its backward.
  void await_backward(torch::autograd::Node& node);
  /// Lets `sandbox` keep all that an eager run of the call may change.
  void hold(Sandbox& sandbox) const;
  void keep_before_backward();
  /// `results`: of the replay's node for `grads`.
  void compare_backward(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& grads);
  [[nodiscard]] std::vector<at::Tensor> eager_gradients(const std::vector<at::Tensor>& grads);
  void compare(const std::string& what, const at::Tensor& replayed, const at::Tensor& eager) const;

  std::string name_;
  std::vector<at::Generator> generators_;        ///< that the call may draw from
  std::vector<GeneratorState> before_backward_;  ///< of `generators_`, when the replay's backward begins
  double tolerance_;
  std::function<std::vector<at::Tensor>()> delayed_;
  std::shared_ptr<Counts> counts_;
  std::vector<Target> targets_;
  std::vector<Buffer> buffers_;
  std::vector<bool> begins_backward_;  ///< of each output: the replay's node gets its gradient

  mutable std::mutex mutex_;
  bool awaits_backward_ = false;
  detail::TensorBuffer outputs_;  ///< with their autograd history
};

/// In words, where `replayed` is not `eager`; none where each element is the same. Zeros of either sign are the same, and so are
/// two NaNs; an undefined tensor stands for zeros. Floating-point elements may be `tolerance` times the largest magnitude of
/// `eager` apart.
/// Ordering: reads on the current stream and blocks for the answer.  Capture: illegal.
[[nodiscard]] std::optional<std::string> difference(const at::Tensor& replayed, const at::Tensor& eager,
                                                    double tolerance);

}  // namespace sidestream
