#include "graphs/guards/call_modes.h"

#include <utility>

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <c10/util/irange.h>
#include <torch/csrc/autograd/anomaly_mode.h>

namespace sidestream {
namespace {

/// The on-or-off switches of at::Context that CallModes::Process holds.
struct Switch {
  bool (*get)(const at::Context& context);
  void (*set)(at::Context& context, bool on);
};
constexpr std::array<Switch, 18> kSwitches{{
    {[](const at::Context& c) { return c.deterministicAlgorithms(); },
     [](at::Context& c, bool on) { c.setDeterministicAlgorithms(on, c.deterministicAlgorithmsWarnOnly()); }},
    {[](const at::Context& c) { return c.deterministicAlgorithmsWarnOnly(); },
     [](at::Context& c, bool on) { c.setDeterministicAlgorithms(c.deterministicAlgorithms(), on); }},
    {[](const at::Context& c) { return c.deterministicFillUninitializedMemory(); },
     [](at::Context& c, bool on) { c.setDeterministicFillUninitializedMemory(on); }},
    {[](const at::Context& c) { return c.userEnabledCuDNN(); },
     [](at::Context& c, bool on) { c.setUserEnabledCuDNN(on); }},
    {[](const at::Context& c) { return c.benchmarkCuDNN(); }, [](at::Context& c, bool on) { c.setBenchmarkCuDNN(on); }},
    {[](const at::Context& c) { return c.deterministicCuDNN(); },
     [](at::Context& c, bool on) { c.setDeterministicCuDNN(on); }},
    {[](const at::Context& c) { return c.userEnabledMkldnn(); },
     [](at::Context& c, bool on) { c.setUserEnabledMkldnn(on); }},
    {[](const at::Context& c) { return c.deterministicMkldnn(); },
     [](at::Context& c, bool on) { c.setDeterministicMkldnn(on); }},
    {[](const at::Context& c) { return c.userEnabledNNPACK(); },
     [](at::Context& c, bool on) { c.setUserEnabledNNPACK(on); }},
    {[](const at::Context& c) { return c.userEnabledFlashSDP(); },
     [](at::Context& c, bool on) { c.setSDPUseFlash(on); }},
    {[](const at::Context& c) { return c.userEnabledFA3SDP(); }, [](at::Context& c, bool on) { c.setSDPUseFA3(on); }},
    {[](const at::Context& c) { return c.userEnabledMemEfficientSDP(); },
     [](at::Context& c, bool on) { c.setSDPUseMemEfficient(on); }},
    {[](const at::Context& c) { return c.userEnabledMathSDP(); }, [](at::Context& c, bool on) { c.setSDPUseMath(on); }},
    {[](const at::Context& c) { return c.userEnabledCuDNNSDP(); },
     [](at::Context& c, bool on) { c.setSDPUseCuDNN(on); }},
    {[](const at::Context& c) { return c.userEnabledOverrideableSDP(); },
     [](at::Context& c, bool on) { c.setSDPUseOverrideable(on); }},
    {[](const at::Context& c) { return c.allowFP16BF16ReductionMathSDP(); },
     [](at::Context& c, bool on) { c.setAllowFP16BF16ReductionMathSDP(on); }},
    {[](const at::Context& c) { return c.allowFP16AccumulationCuBLAS(); },
     [](at::Context& c, bool on) { c.setAllowFP16AccumulationCuBLAS(on); }},
    {[](const at::Context& c) { return c.allowFP16ReductionCPU(); },
     [](at::Context& c, bool on) { c.setAllowFP16ReductionCPU(on); }},
}};

/// The back end and operator of each entry of CallModes::Process::float32_precision.
constexpr std::array<std::pair<at::Float32Backend, at::Float32Op>, 6> kFloat32Operators{{
    {at::Float32Backend::CUDA, at::Float32Op::MATMUL},
    {at::Float32Backend::CUDA, at::Float32Op::CONV},
    {at::Float32Backend::CUDA, at::Float32Op::RNN},
    {at::Float32Backend::MKLDNN, at::Float32Op::MATMUL},
    {at::Float32Backend::MKLDNN, at::Float32Op::CONV},
    {at::Float32Backend::MKLDNN, at::Float32Op::RNN},
}};
/// How many of them matter to operators of `type`, from the first: a GPU has no use for oneDNN's.
constexpr std::size_t float32_count(c10::DeviceType type) noexcept { return type == c10::DeviceType::CUDA ? 3 : 6; }

using Anomaly = torch::autograd::AnomalyMode;

CallModes::Autocast raw_autocast(c10::DeviceType type) {
  return {type, at::autocast::is_autocast_enabled(type), at::autocast::is_autocast_cache_enabled(),
          at::autocast::get_autocast_dtype(type)};
}

void set_autocast(const CallModes::Autocast& state) {
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
void set_switches(const CallModes::Process& wanted, const CallModes::Process& now) {
  using Reduction = at::CuBLASReductionOption;
  at::Context& context = at::globalContext();
  for (const auto i : c10::irange(kSwitches.size())) {
    const std::uint32_t bit = std::uint32_t{1} << i;
    if (((wanted.switches ^ now.switches) & bit) != 0) {
      kSwitches[i].set(context, (wanted.switches & bit) != 0);
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

void set_float32(const CallModes::Process& wanted, c10::DeviceType type) {
  at::Context& context = at::globalContext();
  context.setAllowTF32CuBLAS(wanted.float32_precision[0] == at::Float32Precision::TF32);
  for (const auto i : c10::irange(float32_count(type))) {
    const auto& [backend, op] = kFloat32Operators[i];
    context.setFloat32Precision(backend, op, wanted.float32_precision[i]);
  }
}

void put_back_float32(const CallModes::Process& before, c10::DeviceType type,
                      std::optional<at::Float32MatmulPrecision> matmul) {
  at::Context& context = at::globalContext();
  if (matmul) {
    context.setFloat32MatmulPrecision(name_of(*matmul));
  }
  for (const auto i : c10::irange(float32_count(type))) {
    const auto& [backend, op] = kFloat32Operators[i];
    // If the wider switches have the same value, this switch continues to follow them.
    context.setFloat32Precision(backend, op, at::Float32Precision::NONE);
    if (CallModes::Process::current(type).float32_precision[i] != before.float32_precision[i]) {
      context.setFloat32Precision(backend, op, before.float32_precision[i]);
    }
  }
}

}  // namespace

CallModes::Process CallModes::Process::current(c10::DeviceType type) {
  at::Context& context = at::globalContext();
  Process modes;
  for (std::size_t i = 0; i < float32_count(type); ++i) {
    const auto& [backend, op] = kFloat32Operators[i];
    const at::Float32Precision precision = context.float32Precision(backend, op);
    modes.float32_precision[i] = precision == at::Float32Precision::NONE ? at::Float32Precision::IEEE : precision;
  }
  modes.attention_order = context.sDPPriorityOrder();
  modes.half_reduction = context.allowFP16ReductionCuBLAS();
  modes.bfloat16_reduction = context.allowBF16ReductionCuBLAS();
  modes.default_dtype = c10::get_default_dtype_as_scalartype();
  modes.cudnn_benchmark_limit = context.benchmarkLimitCuDNN();
  std::uint32_t bit = 1;
  for (const Switch& one : kSwitches) {
    modes.switches |= one.get(context) ? bit : 0;
    bit <<= 1;
  }
  return modes;
}

CallModes::Autocast CallModes::Autocast::current(c10::DeviceType type) {
  Autocast state;
  state.type = type;
  state.enabled = at::autocast::is_autocast_enabled(type);
  if (state.enabled) {
    state.dtype = at::autocast::get_autocast_dtype(type);
    state.cached = at::autocast::is_autocast_cache_enabled();
  }
  return state;
}

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
      process_before_(CallModes::Process::current(modes.autocast.type)),
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
    const CallModes::Process now = CallModes::Process::current(autocast_before_.type);
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
