#include "sidestream/device_flag.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/full.h>

#include "runtime/runtime.h"
#include "sidestream/error.h"

namespace sidestream {

/// What copies of a DeviceFlag share.
class DeviceFlagState {
 public:
  DeviceFlagState(c10::Device device, std::int64_t value, bool is_bool)
      : runtime_(make_runtime(device)), value_(in_range(value, is_bool)), is_bool_(is_bool) {
    const at::NoGradGuard no_grad;
    tensor_ =
        at::full({}, value_, at::TensorOptions().device(runtime_->device()).dtype(is_bool ? at::kBool : at::kLong));
  }

  void set(std::int64_t value) {
    if (runtime_->capture_status(runtime_->current_stream()) != CaptureStatus::none) {
      throw UsageError(
          "DeviceFlag::set was called inside a capture, and the graph would set the flag at each replay; set it before "
          "the call");
    }
    const at::NoGradGuard no_grad;
    value_ = in_range(value, is_bool_);
    tensor_.fill_(value_);
  }

  [[nodiscard]] std::int64_t value() const noexcept { return value_; }
  [[nodiscard]] const at::Tensor& tensor() const noexcept { return tensor_; }

 private:
  [[nodiscard]] static std::int64_t in_range(std::int64_t value, bool is_bool) noexcept {
    return is_bool && value != 0 ? 1 : value;
  }

  std::shared_ptr<Runtime> runtime_;
  at::Tensor tensor_;
  std::int64_t value_;
  bool is_bool_;
};

DeviceFlag::DeviceFlag(c10::Device device, std::int64_t value, bool is_bool)
    : state_(std::make_shared<DeviceFlagState>(device, value, is_bool)) {}

void DeviceFlag::set(std::int64_t value) { state_->set(value); }

std::int64_t DeviceFlag::value() const noexcept { return state_->value(); }

const at::Tensor& DeviceFlag::tensor() const noexcept { return state_->tensor(); }

}  // namespace sidestream
