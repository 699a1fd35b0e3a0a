#pragma once
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <gtest/gtest.h>
#include <sidestream/testing/schedule.h>

#include "runtime/runtime.h"
#include "sim/device/device.h"

namespace sidestream::sim {

/// The sim device with the default schedule, streams of its own, and nothing left queued or captured after each case.
class SimTest : public testing::Test {
 protected:
  void SetUp() override {
    runtime_ = make_runtime(c10::Device(c10::DeviceType::PrivateUse1, 0));
    live_before_ = runtime_->live_handles();
    for (auto* stream : {&main_, &side_, &copies_}) {
      *stream = std::make_unique<OwnedStream>(runtime_->create_stream());
    }
    runtime_->set_current_stream(*main_);
  }

  void TearDown() override {
    for (const auto* stream : {&main_, &side_, &copies_}) {
      EXPECT_EQ(runtime_->capture_status(**stream), CaptureStatus::none) << "a capture was left open";
      runtime_->abandon_capture(**stream);
    }
    device().set_strict(false);
    device().set_schedule(Schedule());
    runtime_->set_current_stream(c10::Stream(c10::Stream::DEFAULT, runtime_->device()));
    for (auto* stream : {&main_, &side_, &copies_}) {
      stream->reset();
    }
    EXPECT_EQ(runtime_->live_handles(), live_before_);
  }

  [[nodiscard]] static Device& device() { return Device::get(); }
  [[nodiscard]] Runtime& runtime() const { return *runtime_; }
  [[nodiscard]] c10::Stream main() const { return *main_; }
  [[nodiscard]] c10::Stream side() const { return *side_; }
  [[nodiscard]] c10::Stream copies() const { return *copies_; }
  [[nodiscard]] c10::TensorOptions options() const {
    return c10::TensorOptions().dtype(at::kFloat).device(runtime_->device());
  }

  /// Looks at device memory as it is, waiting for nothing.
  [[nodiscard]] static float first(const at::Tensor& tensor) {
    float value = 0;
    std::memcpy(&value, tensor.const_data_ptr(), sizeof(value));
    return value;
  }
  [[nodiscard]] static std::vector<std::byte> bytes(const at::Tensor& tensor) {
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    return {data, data + tensor.nbytes()};
  }
  [[nodiscard]] static float first(const PinnedMemory& pinned) {
    float value = 0;
    std::memcpy(&value, pinned.data(), sizeof(value));
    return value;
  }

  void order(c10::Stream before, c10::Stream after) {
    const auto event = runtime_->create_event();
    runtime_->record(event, before);
    runtime_->wait(after, event);
  }
  void to_host(const PinnedMemory& pinned, const at::Tensor& tensor, c10::Stream stream) {
    runtime_->copy_to_host(pinned.data(), tensor.const_data_ptr(), tensor.nbytes(), stream);
  }
  void to_device(const at::Tensor& tensor, const PinnedMemory& pinned, c10::Stream stream) {
    runtime_->copy_to_device(tensor.mutable_data_ptr(), pinned.data(), tensor.nbytes(), stream);
  }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<OwnedStream> main_;
  std::unique_ptr<OwnedStream> side_;
  std::unique_ptr<OwnedStream> copies_;
  std::int64_t live_before_ = 0;
};

}  // namespace sidestream::sim
