#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/nn/module.h>

namespace sidestream::testing_model {

/// Where in a step something waits.
enum class WaitContext : std::uint8_t {
  eager_call,   ///< in a graphed call that runs eagerly
  between,      ///< between graphed calls
  scope,        ///< in a scope between them
  hook,         ///< in a tensor's hook
  backward,     ///< in the backward of a function of the user's
  optimizer,    ///< in the update
  other_thread  ///< on a thread that is no part of the step
};

/// What is to be said of a wait there, in a step of WaitingModel.
struct ExpectedPlace {
  WaitContext context;
  const char* label;
  const char* call;
  const char* scope;
  bool in_backward;
};
/// Of all contexts that are parts of a step.
[[nodiscard]] std::vector<ExpectedPlace> waiting_places();

struct WaitKind {
  const char* label;
  const char* name;       ///< SyncFinding::kind
  const char* operation;  ///< SyncFinding::operation; empty: what the driver's call is named
  std::function<void(const at::Tensor&)> wait;
  bool past_libtorch = false;  ///< a GPU tells of it through CUPTI alone
};
/// Waits of LibTorch's operators, the same on each device, for a matrix of 8 by 8.
[[nodiscard]] std::vector<WaitKind> operator_waits();

/// While it lives, WaitingModel's steps wait in `context`, on whatever thread that is.
class [[nodiscard]] PlantedWait {
 public:
  PlantedWait(WaitContext context, std::function<void(const at::Tensor&)> wait);
  PlantedWait(const PlantedWait&) = delete;
  PlantedWait& operator=(const PlantedWait&) = delete;
  ~PlantedWait();
};

/// Two graphed layers, "front" and "back", which also runs eagerly without gradients, and between them the scope "middle".
/// Trains without ever making the host wait.
class WaitingModel : public torch::nn::Module {
 public:
  WaitingModel();

  /// Forward, backward and update. `eager_too`: "front" runs eagerly as well.
  void train_on(at::Tensor h, bool eager_too = true);

 private:
  class Layer;
  std::shared_ptr<Layer> front_, back_;
};

/// A layer with a scope "tail" behind it, whose backward waits where WaitContext::backward is planted.
class WaitingTail : public torch::nn::Module {
 public:
  WaitingTail();
  at::Tensor forward(at::Tensor h);

 private:
  at::Tensor weight_;
};

}  // namespace sidestream::testing_model
