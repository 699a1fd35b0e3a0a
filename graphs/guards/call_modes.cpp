#include "graphs/guards/call_modes.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>

namespace sidestream {

const std::array<ProcessSwitch, 18>& process_switches() noexcept {
  using Context = at::Context;
  static constexpr std::array<ProcessSwitch, 18> switches{{
      {[](const Context& c) { return c.deterministicAlgorithms(); },
       [](Context& c, bool on) { c.setDeterministicAlgorithms(on, c.deterministicAlgorithmsWarnOnly()); }},
      {[](const Context& c) { return c.deterministicAlgorithmsWarnOnly(); },
       [](Context& c, bool on) { c.setDeterministicAlgorithms(c.deterministicAlgorithms(), on); }},
      {[](const Context& c) { return c.deterministicFillUninitializedMemory(); },
       [](Context& c, bool on) { c.setDeterministicFillUninitializedMemory(on); }},
      {[](const Context& c) { return c.userEnabledCuDNN(); }, [](Context& c, bool on) { c.setUserEnabledCuDNN(on); }},
      {[](const Context& c) { return c.benchmarkCuDNN(); }, [](Context& c, bool on) { c.setBenchmarkCuDNN(on); }},
      {[](const Context& c) { return c.deterministicCuDNN(); },
       [](Context& c, bool on) { c.setDeterministicCuDNN(on); }},
      {[](const Context& c) { return c.userEnabledMkldnn(); }, [](Context& c, bool on) { c.setUserEnabledMkldnn(on); }},
      {[](const Context& c) { return c.deterministicMkldnn(); },
       [](Context& c, bool on) { c.setDeterministicMkldnn(on); }},
      {[](const Context& c) { return c.userEnabledNNPACK(); }, [](Context& c, bool on) { c.setUserEnabledNNPACK(on); }},
      {[](const Context& c) { return c.userEnabledFlashSDP(); }, [](Context& c, bool on) { c.setSDPUseFlash(on); }},
      {[](const Context& c) { return c.userEnabledFA3SDP(); }, [](Context& c, bool on) { c.setSDPUseFA3(on); }},
      {[](const Context& c) { return c.userEnabledMemEfficientSDP(); },
       [](Context& c, bool on) { c.setSDPUseMemEfficient(on); }},
      {[](const Context& c) { return c.userEnabledMathSDP(); }, [](Context& c, bool on) { c.setSDPUseMath(on); }},
      {[](const Context& c) { return c.userEnabledCuDNNSDP(); }, [](Context& c, bool on) { c.setSDPUseCuDNN(on); }},
      {[](const Context& c) { return c.userEnabledOverrideableSDP(); },
       [](Context& c, bool on) { c.setSDPUseOverrideable(on); }},
      {[](const Context& c) { return c.allowFP16BF16ReductionMathSDP(); },
       [](Context& c, bool on) { c.setAllowFP16BF16ReductionMathSDP(on); }},
      {[](const Context& c) { return c.allowFP16AccumulationCuBLAS(); },
       [](Context& c, bool on) { c.setAllowFP16AccumulationCuBLAS(on); }},
      {[](const Context& c) { return c.allowFP16ReductionCPU(); },
       [](Context& c, bool on) { c.setAllowFP16ReductionCPU(on); }},
  }};
  return switches;
}

const std::array<std::pair<at::Float32Backend, at::Float32Op>, 6>& float32_operators() noexcept {
  using Backend = at::Float32Backend;
  using Op = at::Float32Op;
  static constexpr std::array<std::pair<Backend, Op>, 6> operators{{
      {Backend::CUDA, Op::MATMUL},
      {Backend::CUDA, Op::CONV},
      {Backend::CUDA, Op::RNN},
      {Backend::MKLDNN, Op::MATMUL},
      {Backend::MKLDNN, Op::CONV},
      {Backend::MKLDNN, Op::RNN},
  }};
  return operators;
}

ProcessModes ProcessModes::current(c10::DeviceType type) {
  at::Context& context = at::globalContext();
  ProcessModes modes;
  for (std::size_t i = 0; i < float32_count(type); ++i) {
    const auto& [backend, op] = float32_operators()[i];
    const at::Float32Precision precision = context.float32Precision(backend, op);
    modes.float32_precision[i] = precision == at::Float32Precision::NONE ? at::Float32Precision::IEEE : precision;
  }
  modes.attention_order = context.sDPPriorityOrder();
  modes.half_reduction = context.allowFP16ReductionCuBLAS();
  modes.bfloat16_reduction = context.allowBF16ReductionCuBLAS();
  modes.default_dtype = c10::get_default_dtype_as_scalartype();
  modes.cudnn_benchmark_limit = context.benchmarkLimitCuDNN();
  std::uint32_t bit = 1;
  for (const ProcessSwitch& one : process_switches()) {
    modes.switches |= one.get(context) ? bit : 0;
    bit <<= 1;
  }
  return modes;
}

AutocastState AutocastState::current(c10::DeviceType type) {
  AutocastState state;
  state.type = type;
  state.enabled = at::autocast::is_autocast_enabled(type);
  if (state.enabled) {
    state.dtype = at::autocast::get_autocast_dtype(type);
    state.cached = at::autocast::is_autocast_cache_enabled();
  }
  return state;
}

}  // namespace sidestream
