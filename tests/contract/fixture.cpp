#include "contract/fixture.h"

#include <algorithm>
#include <string_view>

#include <ATen/ops/full.h>
#include <ATen/ops/mm.h>
#include <ATen/ops/zeros.h>

#include "observe/checked_runtime.h"
#include "sidestream/error.h"
#include "sidestream/testing/schedule.h"
#include "sim/device/device.h"
#include "tested_gpu.h"

namespace sidestream::contract {
namespace {

struct Made {
  std::shared_ptr<Runtime> runtime;
  std::string why;
};

Made make(c10::DeviceType type) {
  try {
    return {make_runtime(type == kCuda ? testing_model::tested_gpu() : c10::Device(type, 0)), ""};
  } catch (const Error& error) {
    return {nullptr, error.what()};
  }
}

/// A device is made when its first case runs, so that a run of a GPU's cases alone has no simulated device. Beside one, LibTorch treats
/// the simulated device as the accelerator: it pins memory for it only, and autograd finds no stream for nodes of the GPU.
const Made& made_once(c10::DeviceType type) {
  if (type == kSim) {
    static const Made sim = make(kSim);
    return sim;
  }
  static const Made cuda = make(kCuda);
  return cuda;
}

}  // namespace

std::shared_ptr<Runtime> runtime_of(c10::DeviceType type, std::string* why) {
  const Made& made = made_once(type);
  if (why != nullptr) {
    *why = made.why;
  }
  return made.runtime;
}

void PrintTo(const Subject& subject, std::ostream* out) { *out << subject.name; }

std::vector<Subject> every_subject() {
  return {{"sim_early", kSim, "early"},         {"sim_late", kSim, "late"},
          {"sim_d2h_early", kSim, "d2h-early"}, {"sim_d2h_late", kSim, "d2h-late"},
          {"sim_seed_1", kSim, "seed:1"},       {"sim_seed_2", kSim, "seed:2"},
          {"sim_checked", kSim, "early", true}, {"cuda", kCuda, ""},
          {"cuda_checked", kCuda, "", true}};
}

std::string subject_name(const testing::TestParamInfo<Subject>& info) { return info.param.name; }

void RuntimeContract::SetUp() {
  std::string why;
  runtime_ = runtime_of(GetParam().type, &why);
  if (runtime_ == nullptr) {
    ASSERT_TRUE(on_gpu()) << "the sim backend runs everywhere: " << why;
    GTEST_SKIP() << why;
  }
  if (GetParam().checked) {
    runtime_ = std::make_shared<CheckedRuntime>(runtime_);
  }
  if (!on_gpu()) {
    sim::Device::get().set_schedule(Schedule::parse(GetParam().schedule));
  }
  live_before_ = runtime_->live_handles();
  current_before_ = {runtime_->current_stream()};
  if (on_gpu()) {
    busy_ = at::zeros({2048, 2048}, options());
    (void)at::mm(busy_, busy_);
    runtime_->synchronize_device();
  }
  for (auto* stream : {&main_, &capture_, &side_, &copies_}) {
    *stream = std::make_unique<OwnedStream>(runtime_->create_stream());
  }
  runtime_->set_current_stream(*main_);
}

void RuntimeContract::TearDown() {
  if (runtime_ == nullptr) {
    return;
  }
  for (const auto* stream : {&main_, &capture_, &side_, &copies_}) {
    if (*stream != nullptr) {
      EXPECT_EQ(runtime_->capture_status(**stream), CaptureStatus::none) << "a capture was left open";
      runtime_->abandon_capture(**stream);
    }
  }
  runtime_->set_current_stream(current_before_.front());
  runtime_->synchronize_device();
  busy_.reset();
  for (auto* stream : {&main_, &capture_, &side_, &copies_}) {
    stream->reset();
  }
  if (!on_gpu()) {
    sim::Device::get().set_schedule(Schedule());
  }
  EXPECT_EQ(runtime_->live_handles(), live_before_) << "a stream, event, graph, pool or pinned block was left alive";
}

bool RuntimeContract::copies_are_late() const {
  const std::string_view schedule = GetParam().schedule;
  return (on_gpu() && !testing_model::launches_block()) || schedule == "late" || schedule == "d2h-late";
}

c10::TensorOptions RuntimeContract::options() const {
  return c10::TensorOptions().dtype(at::kFloat).device(runtime_->device());
}

at::Tensor RuntimeContract::filled(double value, std::int64_t numel) const {
  return at::full({numel}, value, options());
}

std::vector<float> RuntimeContract::values(const at::Tensor& tensor) {
  runtime_->synchronize_device();
  const auto host = tensor.cpu();
  const auto* data = host.const_data_ptr<float>();
  return {data, data + host.numel()};
}

testing::AssertionResult RuntimeContract::all_equal(const at::Tensor& tensor, float value) {
  const auto found = values(tensor);
  const auto other = std::find_if(found.begin(), found.end(), [&](float element) { return element != value; });
  if (other == found.end()) {
    return testing::AssertionSuccess();
  }
  return testing::AssertionFailure() << "element " << (other - found.begin()) << " is " << *other << ", not " << value;
}

void RuntimeContract::delay(c10::Stream stream) {
  if (!busy_.defined()) {
    return;
  }
  const StreamGuard guard(*runtime_, stream);
  auto product = at::mm(busy_, busy_);
  for (int i = 0; i < 40; ++i) {
    at::mm_out(product, busy_, busy_);
  }
}

void RuntimeContract::expect_failed_end(c10::Stream stream) {
  EXPECT_THROW((void)runtime_->end_capture(stream), CaptureError);
  for (const auto* each : {&main_, &capture_, &side_, &copies_}) {
    EXPECT_EQ(runtime_->capture_status(**each), CaptureStatus::none);
  }
}

}  // namespace sidestream::contract
