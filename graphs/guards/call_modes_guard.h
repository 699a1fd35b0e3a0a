#pragma once
#include <optional>

#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>

#include "graphs/guards/call_modes.h"

namespace sidestream {

/// Gradients on, outside of inference mode and of autocast, for its lifetime: what a capture runs in, whatever surrounds it. All
/// that is made for a capture is made inside one; a tensor made in inference mode is of no use to autograd. Anomaly mode, which
/// reads each gradient on the host to look for NaN, is off meanwhile, for the process as it is on for it.
class [[nodiscard]] CaptureModesGuard {
 public:
  explicit CaptureModesGuard(c10::DeviceType type);
  CaptureModesGuard(const CaptureModesGuard&) = delete;
  CaptureModesGuard& operator=(const CaptureModesGuard&) = delete;
  ~CaptureModesGuard();

 private:
  std::optional<c10::InferenceMode> no_inference_;
  at::AutoGradMode grad_mode_{true};
  c10::DeviceType type_;
  bool autocast_before_;
  bool anomaly_before_;
};

/// Sets `modes` for its lifetime. Casts of weights that autocast caches are made inside and do not outlive it: a capture must
/// neither read one from outside nor leave one of its own. Switches of the process are set only where they differ, since
/// other threads see them.
class [[nodiscard]] CallModesGuard {
 public:
  explicit CallModesGuard(const CallModes& modes);
  CallModesGuard(const CallModesGuard&) = delete;
  CallModesGuard& operator=(const CallModesGuard&) = delete;
  ~CallModesGuard();

 private:
  /// As LibTorch keeps it: it remembers dtype and cache switch where autocast is off, too.
  AutocastState autocast_before_;
  ProcessModes process_before_;
  bool process_differs_;
  at::AutoGradMode grad_mode_;
  std::optional<at::Float32MatmulPrecision> matmul_before_;  ///< the older switch, where it can be read
};

}  // namespace sidestream
