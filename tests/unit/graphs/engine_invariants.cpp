#include "unit/graphs/engine_invariants.h"

#include <exception>
#include <set>

#include <ATen/autocast_mode.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/ones.h>
#include <ATen/record_function.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/variable.h>

#include "eventually.h"
#include "graphs/engine/engine_state.h"
#include "offload/autograd_engine.h"

namespace sidestream::testing_model {
namespace {

std::vector<bool> modes_of(c10::Device device) {
  return {at::GradMode::is_enabled(),
          c10::InferenceMode::is_enabled(),
          at::autocast::is_autocast_enabled(device.type()),
          at::autocast::is_autocast_enabled(at::kCPU),
          at::autocast::is_autocast_cache_enabled(),
          at::hasThreadLocalCallbacks(),
          at::hasGlobalCallbacks(),
          current_saved_tensor_source() != nullptr,
          current_recorder() != nullptr,
          detail::step_active()};
}

const char* const kModes[] = {"grad mode",
                              "inference mode",
                              "autocast of the device",
                              "autocast of the CPU",
                              "autocast's cache",
                              "operator callbacks of the thread",
                              "operator callbacks of the process",
                              "hooks of saved tensors",
                              "the recorder",
                              "the active engine"};

/// A backward that runs another backward, which captures refuse while they last.
bool nested_backward_refused() {
  const at::AutoGradMode with_grad(true);
  const at::Tensor x = at::ones({1}).requires_grad_(true);
  const at::Tensor y = x * 2;
  y.register_hook([](const at::Tensor&) {
    const at::AutoGradMode with_grad_in_backward(true);
    (at::ones({1}).requires_grad_(true) * 3).backward();
  });
  try {
    y.backward();
  } catch (const std::exception&) {
    return true;
  }
  return false;
}

std::size_t captured_leases(const EngineState& engine) {
  std::set<const HostArena::Lease*> shared;
  engine.sequences().for_each([&](const GraphSequence& sequence) {
    for (const CapturedCall& call : sequence.captured().calls) {
      for (const auto& saved : call.copies.captured.storages) {
        if (saved->lease) {
          shared.insert(&saved->lease);  // a later call may have taken its place, and has it as a part
        }
        for (const SharedSlots::Part& part : saved->parts) {
          shared.insert(part.slot.get());
        }
      }
    }
  });
  return shared.size();
}

/// Autograd's device thread frees a failed backward's tensors after the caller has its error.
bool leases_come_back(const EngineState& engine) {
  const std::size_t captured = captured_leases(engine);
  return eventually([&] { return engine.arena().stats().live_leases == captured; });
}

}  // namespace

EngineInvariants::EngineInvariants(std::shared_ptr<Runtime> runtime, const torch::nn::Module& model)
    : runtime_(std::move(runtime)), stream_(runtime_->current_stream()), modes_(modes_of(runtime_->device())) {
  for (const at::Tensor& parameter : model.parameters()) {
    hooks_.push_back(hooks_of(parameter));
  }
}

EngineInvariants::ParameterHooks EngineInvariants::hooks_of(const at::Tensor& parameter) {
  using namespace torch::autograd::impl;
  ParameterHooks found{parameter, grad_accumulator(parameter)};
  const auto* meta = get_autograd_meta(parameter);
  found.hooks = meta->hooks_.size();
  found.after_accumulation = meta->post_acc_grad_hooks_ != nullptr;
  found.accumulator_hooks = found.accumulator->pre_hooks().size() + found.accumulator->tensor_pre_hooks().size() +
                            found.accumulator->post_hooks().size();
  return found;
}

std::string EngineInvariants::broken(const EngineState& engine) const {
  std::string text;
  const auto expect = [&](bool right, const std::string& what) { text += right ? "" : what + "; "; };
  expect(runtime_->current_stream() == stream_, "another current stream");
  const std::vector<bool> modes = modes_of(runtime_->device());
  for (std::size_t i = 0; i < modes.size(); ++i) {
    expect(modes[i] == modes_[i], kModes[i] + std::string(" not as before"));
  }
  expect(runtime_->capture_status(runtime_->current_stream()) == CaptureStatus::none, "the current stream captures");
  try {
    runtime_->synchronize_device();  // refused while anything captures
  } catch (const std::exception& error) {
    text += std::string("synchronize: ") + error.what() + "; ";
  }
  for (std::size_t i = 0; i < hooks_.size(); ++i) {
    const ParameterHooks& before = hooks_[i];
    const ParameterHooks now = hooks_of(before.parameter);
    expect(now.accumulator == before.accumulator && now.hooks == before.hooks &&
               now.accumulator_hooks == before.accumulator_hooks && now.after_accumulation == before.after_accumulation,
           "hooks of parameter " + std::to_string(i) + " not as before");
  }
  expect(!nested_backward_refused(), "nested backwards refused");
  expect(leases_come_back(engine), "host leases out");
  return text;
}

}  // namespace sidestream::testing_model
