#include <algorithm>
#include <array>
#include <cstdlib>
#include <iostream>
#include <mutex>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/Context.h>
#include <c10/util/Exception.h>
#include <gtest/gtest.h>

namespace {

/// LibTorch says the first once where autograd's device thread is the first to multiply on a GPU; it then does what is right. It says the
/// others of the first tensor of the kind.
constexpr std::array<std::string_view, 3> kHarmless{"Attempting to run cuBLAS, but there was no current CUDA context",
                                                    "Sparse CSR tensor support is in beta state",
                                                    "The PyTorch API of nested tensors is in prototype stage"};

/// Keeps what LibTorch warns of on the thread of the tests (its handlers are per thread); any warning fails the run.
class WarningCollector : public c10::WarningHandler {
 public:
  void process(const c10::Warning& warning) override {
    const auto begins_with = [&](std::string_view text) { return warning.msg().rfind(text, 0) == 0; };
    if (std::any_of(kHarmless.begin(), kHarmless.end(), begins_with)) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    warnings_.push_back(warning.msg());
  }

  std::vector<std::string> take() {
    std::lock_guard<std::mutex> lock(mutex_);
    return std::move(warnings_);
  }

 private:
  std::mutex mutex_;
  std::vector<std::string> warnings_;
};

class FailOnWarning : public testing::EmptyTestEventListener {
 public:
  explicit FailOnWarning(WarningCollector& collector) : collector_(collector) {}

  void OnTestEnd(const testing::TestInfo& /*info*/) override { report(); }
  void OnTestProgramEnd(const testing::UnitTest& /*unit_test*/) override { report(); }

  [[nodiscard]] bool warned() const { return warned_; }

 private:
  void report() {
    for (const std::string& warning : collector_.take()) {
      std::cerr << "unexpected warning: " << warning << '\n';
      warned_ = true;
    }
  }

  WarningCollector& collector_;
  bool warned_ = false;
};

constexpr int kSkipped = 77;

/// Tests that were skipped, but those that need a second GPU.
int skipped_though_one_gpu_serves() {
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  int count = 0;
  for (int i = 0; i < tests.total_test_suite_count(); ++i) {
    const testing::TestSuite& suite = *tests.GetTestSuite(i);
    count += std::string_view(suite.name()).find("TwoGpus") == std::string_view::npos ? suite.skipped_test_count() : 0;
  }
  return count;
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  // oneDNN makes a program for each gelu. Under AddressSanitizer that took half the time of the simulated device's kernels.
  at::globalContext().setUserEnabledMkldnn(false);
  WarningCollector collector;
  c10::WarningUtils::set_warning_handler(&collector);
  auto* fail_on_warning = new FailOnWarning(collector);  // owned by GoogleTest's listeners
  testing::UnitTest::GetInstance()->listeners().Append(fail_on_warning);
  const int status = RUN_ALL_TESTS();
  c10::WarningUtils::set_warning_handler(nullptr);
  if (status != 0 || fail_on_warning->warned()) {
    return 1;
  }
  const testing::UnitTest& tests = *testing::UnitTest::GetInstance();
  if (tests.skipped_test_count() > 0) {
    const char* require_gpu = std::getenv("SIDESTREAM_REQUIRE_GPU");
    if (require_gpu != nullptr && std::string(require_gpu) == "1" && skipped_though_one_gpu_serves() > 0) {
      std::cerr << skipped_though_one_gpu_serves() << " tests skipped, and SIDESTREAM_REQUIRE_GPU=1 forbids it\n";
      return 1;
    }
    if (tests.successful_test_count() == 0) {
      return kSkipped;
    }
  }
  return 0;
}
