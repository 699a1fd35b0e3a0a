// Sets modes for the lifetime of a guard.
#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/anomaly_mode.h>

#include "graphs/guards/call_modes.h"

namespace sidestream {
namespace {

using Anomaly = torch::autograd::AnomalyMode;

AutocastState raw_autocast(c10::DeviceType type) {
  return {type, at::autocast::is_autocast_enabled(type), at::autocast::is_autocast_cache_enabled(),
          at::autocast::get_autocast_dtype(type)};
}

void set_autocast(const AutocastState& state) {
  at::autocast::set_autocast_enabled(state.type, state.enabled);
  at::autocast::set_autocast_dtype(state.type, state.dtype);
  at::autocast::set_autocast_cache_enabled(state.cached);
}

std::optional<c10::InferenceMode> out_of_inference() {
  if (c10::InferenceMode::is_enabled()) {
    return std::optional<c10::InferenceMode>(std::in_place, false);
  }
  return std::optional<c10::InferenceMode>();
}

const char* name_of(at::Float32MatmulPrecision precision) {
  switch (precision) {
    case at::Float32MatmulPrecision::HIGHEST:
      return "highest";
    case at::Float32MatmulPrecision::HIGH:
      return "high";
    case at::Float32MatmulPrecision::MEDIUM:
      return "medium";
  }
  return "highest";
}

/// All but the precision of float32.
void set_switches(const ProcessModes& wanted, const ProcessModes& now) {
  using Reduction = at::CuBLASReductionOption;
  at::Context& context = at::globalContext();
  for (const auto i : c10::irange(process_switches().size())) {
    const std::uint32_t bit = std::uint32_t{1} << i;
    if (((wanted.switches ^ now.switches) & bit) != 0) {
      process_switches()[i].set(context, (wanted.switches & bit) != 0);
    }
  }
  if (wanted.attention_order != now.attention_order) {
    std::vector<std::int64_t> order;
    for (const at::SDPBackend backend : wanted.attention_order) {
      order.push_back(static_cast<std::int64_t>(backend));
    }
    context.setSDPPriorityOrder(order);
  }
  if (wanted.half_reduction != now.half_reduction) {
    context.setAllowFP16ReductionCuBLAS(wanted.half_reduction == Reduction::AllowReducedPrecisionWithSplitK,
                                        wanted.half_reduction != Reduction::DisallowReducedPrecisionDisallowSplitK);
  }
  if (wanted.bfloat16_reduction != now.bfloat16_reduction) {
    context.setAllowBF16ReductionCuBLAS(wanted.bfloat16_reduction == Reduction::AllowReducedPrecisionWithSplitK,
                                        wanted.bfloat16_reduction != Reduction::DisallowReducedPrecisionDisallowSplitK);
  }
  if (wanted.cudnn_benchmark_limit != now.cudnn_benchmark_limit) {
    context.setBenchmarkLimitCuDNN(wanted.cudnn_benchmark_limit);
  }
  if (wanted.default_dtype != now.default_dtype) {
    c10::set_default_dtype(c10::scalarTypeToTypeMeta(wanted.default_dtype));
  }
}

/// LibTorch keeps an older switch besides the newer ones, and refuses to run products if they contradict each other.
std::optional<at::Float32MatmulPrecision> older_switch() {
  try {
    return at::globalContext().float32MatmulPrecision();
  } catch (const c10::Error&) {  // they contradict each other now
    return std::nullopt;
  }
}

void set_float32(const ProcessModes& wanted, c10::DeviceType type) {
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(wanted.float32_precision[0] == at::Float32Precision::TF32);
  for (const auto i : c10::irange(float32_count(type))) {
    const auto& [backend, op] = float32_operators()[i];
    context.setFloat32Precision(backend, op, wanted.float32_precision[i]);
  }
}

void put_back_float32(const ProcessModes& before, c10::DeviceType type,
                      std::optional<at::Float32MatmulPrecision> matmul) {
  at::Context& context = at::globalContext();
  if (matmul) {
    context.setFloat32MatmulPrecision(name_of(*matmul));
  }
  for (const auto i : c10::irange(float32_count(type))) {
    const auto& [backend, op] = float32_operators()[i];
    // If the wider switches have the same value, this switch continues to follow them.
    context.setFloat32Precision(backend, op, at::Float32Precision::NONE);
    if (ProcessModes::current(type).float32_precision[i] != before.float32_precision[i]) {
      context.setFloat32Precision(backend, op, before.float32_precision[i]);
    }
  }
}

}  // namespace

CaptureModesGuard::CaptureModesGuard(c10::DeviceType type)
    : no_inference_(out_of_inference()),
      type_(type),
      autocast_before_(at::autocast::is_autocast_enabled(type)),
      anomaly_before_(Anomaly::is_enabled()) {
  at::autocast::set_autocast_enabled(type, false);
  if (anomaly_before_) {
    Anomaly::set_enabled(false, Anomaly::should_check_nan());
  }
}

CaptureModesGuard::~CaptureModesGuard() {
  if (anomaly_before_) {
    Anomaly::set_enabled(true, Anomaly::should_check_nan());
  }
  at::autocast::set_autocast_enabled(type_, autocast_before_);
}

CallModesGuard::CallModesGuard(const CallModes& modes)
    : autocast_before_(raw_autocast(modes.autocast.type)),
      process_before_(ProcessModes::current(modes.autocast.type)),
      process_differs_(!(process_before_ == modes.process)),
      grad_mode_(modes.gradients) {
  at::autocast::clear_cache();
  if (modes.autocast.enabled) {
    set_autocast(modes.autocast);
  } else {
    at::autocast::set_autocast_enabled(modes.autocast.type, false);
  }
  at::autocast::increment_nesting();
  if (process_differs_) {
    set_switches(modes.process, process_before_);
    if (modes.process.float32_precision != process_before_.float32_precision) {
      matmul_before_ = older_switch();
      set_float32(modes.process, modes.autocast.type);
    }
  }
}

CallModesGuard::~CallModesGuard() {
  if (process_differs_) {
    const ProcessModes now = ProcessModes::current(autocast_before_.type);
    set_switches(process_before_, now);
    if (now.float32_precision != process_before_.float32_precision) {
      put_back_float32(process_before_, autocast_before_.type, matmul_before_);
    }
  }
  at::autocast::decrement_nesting();
  set_autocast(autocast_before_);
  at::autocast::clear_cache();
}

}  // namespace sidestream
