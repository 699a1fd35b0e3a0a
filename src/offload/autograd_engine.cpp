#include "offload/autograd_engine.h"

#include <mutex>
#include <string_view>

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/mul.h>
#include <ATen/ops/ones.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "offload/gradient_owner.h"
#include "offload/nested_backward.h"
#include "sidestream/error.h"

namespace sidestream {

namespace {

// Everything but the hooks is the base engine's: device threads, streams, reentrant backward, errors.
class HookingEngine final : public torch::autograd::Engine {
 public:
  // Destroyed at exit as the base engine is: its device threads are told to end before the vtable goes.
  static HookingEngine& instance() {
    static HookingEngine engine;
    return engine;
  }
  static Engine& get() { return instance(); }

  // LibTorch starts device threads once in a process: for the engine that runs the first backward, and for the devices that it knows
  // then. If a backward ran before, or if a device is registered later, this engine would have no threads for it.
  void ensure_device_threads() {
    if (!device_ready_queues_.empty()) {
      return;
    }
    for (const auto& guard : c10::impl::device_guard_impl_registry) {
      const c10::impl::DeviceGuardImplInterface* const device = guard.load();
      if (device != nullptr && !on_cpu_queue(device->type()) && device->deviceCount() > 0) {
        start_device_threads();
        return;
      }
    }
  }

  ~HookingEngine() override { stop(); }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs, bool keep_graph,
                                         bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    if (accumulate_grad && NestedBackwardRefusal::holds_here() && torch::autograd::get_current_graph_task_id() != -1) {
      throw CaptureError(
          "a call that is captured runs backward() inside its own backward (an activation checkpoint?), which adds "
          "into gradients that a graph cannot own; leave the call out of the graphs, or use autograd::grad there");
    }
    if (!outputs.empty()) {
      refuse_owned_gradients(roots, outputs);
    }
    try {
      return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
    } catch (const c10::Error& error) {
      if (!NestedBackwardRefusal::holds_here() && met_a_capture(error)) {
        throw UsageError(
            "a backward pass draws random numbers (an activation checkpoint with dropout?) while another thread "
            "captures graphs on the same device; let that capture end first: run two steps of each engine before the "
            "threads train at once");
      }
      throw;
    }
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    SavedTensorSource* const source = current_saved_tensor_source();
    return source == nullptr ? nullptr : source->make_hooks();
  }

 private:
  HookingEngine() = default;

  // What the generator of a GPU says to a thread that draws while another one captures.
  static bool met_a_capture(const c10::Error& error) {
    return std::string_view(error.what_without_backtrace()).find("Offset increment outside graph capture") !=
           std::string_view::npos;
  }

  static bool on_cpu_queue(c10::DeviceType type) {
    return type == c10::DeviceType::CPU || type == c10::DeviceType::Meta || type == c10::DeviceType::Lazy;
  }
};

class SeamProbe final : public SavedTensorSource {
 public:
  std::unique_ptr<torch::autograd::SavedVariableHooks> make_hooks() override {
    struct Hooks final : torch::autograd::SavedVariableHooks {
      explicit Hooks(SeamProbe& probe) : probe_(probe) {}
      void call_pack_hook(const at::Tensor& tensor) override {
        probe_.packed = true;
        tensor_ = tensor;
      }
      at::Tensor call_unpack_hook() override {
        probe_.unpacked = true;
        return tensor_;
      }
      SeamProbe& probe_;
      at::Tensor tensor_;
    };
    return std::make_unique<Hooks>(*this);
  }

  bool packed = false;
  bool unpacked = false;
};

}  // namespace

SavedTensorSource* current_saved_tensor_source() noexcept { return ThreadStack<SavedTensorSource>::top(); }

void install_autograd_engine() {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  using torch::autograd::Engine;
  const Engine* const present = &Engine::get_default_engine();
  if (present == &HookingEngine::get()) {
    HookingEngine::instance().ensure_device_threads();
    return;
  }
  if (present != &Engine::get_base_engine()) {
    throw UsageError(
        "autograd engine: another engine than LibTorch's own is installed, so Sidestream cannot see saved tensors. Is "
        "Python's torch loaded in this process? Use Sidestream in a program that does not load it; there is no Python "
        "binding");
  }
  torch::autograd::set_default_engine_stub(&HookingEngine::get);
  try {
    check_saved_tensor_seam();
    HookingEngine::instance().ensure_device_threads();
  } catch (...) {
    torch::autograd::set_default_engine_stub(&Engine::get_base_engine);
    throw;
  }
}

void check_saved_tensor_seam() {
  const c10::InferenceMode no_inference(false);
  const at::AutoGradMode with_grad(true);
  SeamProbe probe;
  at::Tensor x = at::ones({1}).requires_grad_(true);
  at::Tensor y;
  {
    const SavedTensorGuard guard(&probe);
    y = at::mul(x, x);
  }
  torch::autograd::grad({y}, {x});
  if (!probe.packed || !probe.unpacked) {
    throw UsageError(std::string("autograd engine: this LibTorch did not call the ") +
                     (probe.packed ? "unpack" : "pack") +
                     " hook of a saved tensor; another autograd engine has taken its place, or this LibTorch is not "
                     "the tested version (2.11)");
  }
}

}  // namespace sidestream
