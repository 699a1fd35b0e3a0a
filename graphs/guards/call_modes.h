#pragma once
#include <array>
#include <cstdint>
#include <optional>

#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/DeviceType.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/ScalarType.h>

namespace sidestream {

/// The modes that the work of a call depends on. Inference mode is not among them: a captured call runs outside of it.
struct CallModes {
  /// Whether operators of one device type cast, and to what, on the calling thread; plain if they do not.
  struct Autocast {
    c10::DeviceType type = c10::DeviceType::CPU;
    bool enabled = false;
    bool cached = true;  ///< casts of weights are kept until the region ends
    c10::ScalarType dtype = c10::ScalarType::Float;

    [[nodiscard]] static Autocast current(c10::DeviceType type);
    bool operator==(const Autocast& other) const noexcept = default;
  };

  /// Switches of the whole process that decide which kernels operators of one device type choose. Plain values.
  struct Process {
    /// The precision of float32 products: of CUDA, then of oneDNN; products, convolutions, recurrent cells.
    std::array<at::Float32Precision, 6> float32_precision{};
    std::array<at::SDPBackend, at::num_sdp_backends> attention_order{};
    at::CuBLASReductionOption half_reduction{};
    at::CuBLASReductionOption bfloat16_reduction{};
    c10::ScalarType default_dtype = c10::ScalarType::Float;
    int cudnn_benchmark_limit = 0;
    std::uint32_t switches = 0;  ///< one bit each, in the order of kSwitches

    [[nodiscard]] static Process current(c10::DeviceType type);
    bool operator==(const Process& other) const noexcept = default;
  };

  Autocast autocast;
  Process process;
  bool gradients = true;  ///< false: a forward alone, under no_grad

  /// Of the calling thread, for operators of `type`. Allocates nothing.
  [[nodiscard]] static CallModes current(c10::DeviceType type) {
    return {Autocast::current(type), Process::current(type)};
  }
  /// The same outside of every autocast region.
  [[nodiscard]] CallModes without_autocast() const { return {{autocast.type}, process}; }
  bool operator==(const CallModes& other) const noexcept = default;
};

/// For its lifetime gradients are on, and inference mode and autocast are off, whatever surrounds it. Everything that is made for a
/// capture is made inside of one, because autograd cannot use a tensor that was made in inference mode. Anomaly mode is off too, for the
/// whole process, because it reads each gradient on the host to look for NaN.
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

/// Sets `modes` for its lifetime. The weight casts that autocast caches inside end with it: a capture must neither read a cast from
/// outside nor keep one of its own in the cache. Switches of the process are set only if they differ, because other threads see them.
class [[nodiscard]] CallModesGuard {
 public:
  explicit CallModesGuard(const CallModes& modes);
  CallModesGuard(const CallModesGuard&) = delete;
  CallModesGuard& operator=(const CallModesGuard&) = delete;
  ~CallModesGuard();

 private:
  /// As LibTorch keeps it: it remembers dtype and cache switch where autocast is off, too.
  CallModes::Autocast autocast_before_;
  CallModes::Process process_before_;
  bool process_differs_;
  at::AutoGradMode grad_mode_;
  std::optional<at::Float32MatmulPrecision> matmul_before_;  ///< the older switch, if it can be read
};

}  // namespace sidestream
