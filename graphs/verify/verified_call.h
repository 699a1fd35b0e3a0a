#pragma once
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/csrc/autograd/edge.h>

#include "graphs/sequence/captured_call.h"

namespace sidestream {

/// What verified calls count. Threads: any.
struct VerifiedCounts {
  std::atomic<std::int64_t> forwards{0};   ///< replays whose outputs and buffers were compared
  std::atomic<std::int64_t> backwards{0};  ///< replays whose gradients were compared
};

/// A call as it is run eagerly beside its replay.
struct CallToVerify {
  const CapturedCall* captured = nullptr;  ///< what replays it
  Body body;                               ///< the call with the arguments of now
  c10::ArrayRef<at::Tensor> inputs;
  c10::Device device;
  double tolerance = 0;
  /// Dotted names of the model's parameters and buffers.
  const std::unordered_map<const c10::TensorImpl*, std::string>* names = nullptr;
};

/// One call's eager run: made before its replay, from the same inputs, buffers and random state, which are then put back. It is
/// compared with what the replay gives, forward and backward. Keeps what autograd saved in the eager run until the backward of the
/// replay has been compared, or until it is dropped.
///
/// verified_call.cpp holds what goes with the forward, verified_backward.cpp the comparison of gradients.
/// Threads: the forward's; the comparison of gradients runs where backward does.
class VerifiedCall : public std::enable_shared_from_this<VerifiedCall> {
 public:
  /// Runs `call` eagerly. Throws: what the call throws.
  [[nodiscard]] static std::shared_ptr<VerifiedCall> run(const CallToVerify& call,
                                                         std::shared_ptr<VerifiedCounts> counts);
  VerifiedCall(const VerifiedCall&) = delete;
  VerifiedCall& operator=(const VerifiedCall&) = delete;
  ~VerifiedCall();

  /// Compares `outputs` of the replay, and the buffers as it left them; its backward will be compared when it runs.
  /// Throws: VerificationError.
  void compare_forward(const detail::TensorBuffer& outputs);
  /// Lets go of the eager run: its backward is not compared.
  void drop() noexcept;
  /// True once nothing more of it is awaited.
  [[nodiscard]] bool done() const noexcept;

 private:
  class BeforeBackward;
  class AfterBackward;
  /// One gradient that both runs make.
  struct Target {
    std::string what;
    torch::autograd::Edge edge;  ///< of the eager run's leaf
    at::Tensor leaf;
    std::optional<std::size_t> result;  ///< among what the replay's node gives
    bool is_input = false;
    bool added = false;  ///< the replay adds it into the leaf's `.grad`
    at::Tensor grad_before;
  };
  struct DrawnFrom {
    at::Generator generator;
    at::Tensor before_backward;  ///< its state when the replay's backward begins
  };
  struct Buffer {
    std::string what;
    at::Tensor tensor;
    at::Tensor eager;  ///< its value after the eager run
  };

  VerifiedCall(const CallToVerify& call, std::shared_ptr<VerifiedCounts> counts);
  void run_forward(const CallToVerify& call);
  void add_inputs(const CallToVerify& call, detail::TensorBuffer& given);
  void add_parameters(const CallToVerify& call);
  void add_buffers(const CallToVerify& call);
  /// `node`, the replay's, is told to compare what its backward gives.
  void await_backward(torch::autograd::Node& node);
  [[nodiscard]] std::vector<at::Generator> named_generators() const;
  void keep_before_backward();
  /// `results`: what the replay's node gave for `grads`.
  void compare_backward(const std::vector<at::Tensor>& results, const std::vector<at::Tensor>& grads);
  [[nodiscard]] std::vector<at::Tensor> eager_gradients(const std::vector<at::Tensor>& grads);
  void compare(const std::string& what, const at::Tensor& replayed, const at::Tensor& eager) const;

  std::string name_;
  c10::Device device_;
  std::vector<DrawnFrom> generators_;  ///< the device's default one first
  double tolerance_;
  std::shared_ptr<VerifiedCounts> counts_;
  std::vector<Target> targets_;
  std::vector<Buffer> buffers_;
  std::vector<bool> begins_backward_;  ///< of each output: the replay's node gets its gradient

  mutable std::mutex mutex_;
  bool awaits_backward_ = false;
  detail::TensorBuffer outputs_;  ///< with their autograd history
};

}  // namespace sidestream
