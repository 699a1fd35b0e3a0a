#pragma once
#include <cstdint>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/TensorOptions.h>
#include <gtest/gtest.h>

#include "runtime/runtime.h"

namespace sidestream::contract {

inline constexpr c10::DeviceType kSim = c10::DeviceType::PrivateUse1;
inline constexpr c10::DeviceType kCuda = c10::DeviceType::CUDA;

/// The runtime of the device type `type`, made once; null when this machine cannot run it. `why` then says what is missing.
[[nodiscard]] std::shared_ptr<Runtime> runtime_of(c10::DeviceType type, std::string* why = nullptr);

/// What a case runs on: a backend, and on the sim device the order in which queued work runs.
struct Subject {
  const char* name;
  c10::DeviceType type;
  const char* schedule;
  bool checked = false;  ///< decorated by a CheckedRuntime
};
/// Names the subject in a failure.
void PrintTo(const Subject& subject, std::ostream* out);

/// Every case runs on each subject; a backend that this machine lacks skips. After each case nothing that it made is left:
/// no live handle, no capturing stream.
class RuntimeContract : public testing::TestWithParam<Subject> {
 protected:
  void SetUp() override;
  void TearDown() override;

  /// A device tensor of `numel` floats, made on the current stream, each equal to `value`.
  [[nodiscard]] at::Tensor filled(double value, std::int64_t numel = 1024) const;
  /// The values of a device tensor, after the whole device is done.
  [[nodiscard]] std::vector<float> values(const at::Tensor& tensor);
  /// True when all of `tensor` equals `value`, after the whole device is done.
  [[nodiscard]] testing::AssertionResult all_equal(const at::Tensor& tensor, float value);
  /// Queues work on `stream` that keeps a real device busy for some ten milliseconds, so that a missing wait shows.
  void delay(c10::Stream stream);
  /// The graph of what `body` issues on the capture stream, with memory of `pool`.
  template <class Body>
  [[nodiscard]] Graph captured(const MemoryPool& pool, const Body& body, c10::ArrayRef<at::Generator> generators = {}) {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool, generators);
    body();
    return runtime().end_capture(capture());
  }
  /// Ends the capture of `stream`, which must fail, and checks that nothing of it is left.
  void expect_failed_end(c10::Stream stream);

  [[nodiscard]] c10::TensorOptions options() const;
  /// True where a copy to the host that nothing waits for is surely unfinished.
  [[nodiscard]] bool copies_are_late() const;
  [[nodiscard]] bool on_gpu() const { return GetParam().type == kCuda; }
  [[nodiscard]] Runtime& runtime() const { return *runtime_; }
  [[nodiscard]] c10::Stream capture() const { return *capture_; }
  [[nodiscard]] c10::Stream side() const { return *side_; }
  [[nodiscard]] c10::Stream copies() const { return *copies_; }

 private:
  std::shared_ptr<Runtime> runtime_;
  std::unique_ptr<OwnedStream> main_;
  std::unique_ptr<OwnedStream> capture_;
  std::unique_ptr<OwnedStream> side_;
  std::unique_ptr<OwnedStream> copies_;
  std::vector<c10::Stream> current_before_;
  at::Tensor busy_;
  std::int64_t live_before_ = 0;
};

[[nodiscard]] std::vector<Subject> every_subject();
[[nodiscard]] std::string subject_name(const testing::TestParamInfo<Subject>& info);

/// Runs a suite's cases on every subject.
#define SIDESTREAM_ON_EVERY_BACKEND(suite)                                                      \
  INSTANTIATE_TEST_SUITE_P(, suite, testing::ValuesIn(::sidestream::contract::every_subject()), \
                           ::sidestream::contract::subject_name)

}  // namespace sidestream::contract
