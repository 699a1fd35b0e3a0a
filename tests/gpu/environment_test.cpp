// What the environment of a process decides, each in a process of its own: allocators that are refused, settings that are not, and a
// device 0 that an engine on another one leaves alone.
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <climits>
#include <cstdio>
#include <memory>
#include <string>

#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/cuda/CUDAFunctions.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "gpu/gpu_blocks.h"
#include "models/wrapping.h"
#include "sidestream/call.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

struct Ended {
  int status = -1;
  std::string output;
};

/// Runs the test DISABLED_Alone.`test` of this program with `environment`, "NAME=value ...".
Ended run_alone(const std::string& test, const std::string& environment) {
  std::array<char, PATH_MAX> program{};
  if (readlink("/proc/self/exe", program.data(), program.size() - 1) <= 0) {
    return {};
  }
  const std::string command = "env " + environment + " '" + program.data() +
                              "' --gtest_also_run_disabled_tests --gtest_filter='DISABLED_Alone." + test + "' 2>&1";
  Ended ended;
  FILE* const pipe = popen(command.c_str(), "r");
  std::array<char, 4096> part{};
  while (pipe != nullptr && fgets(part.data(), part.size(), pipe) != nullptr) {
    ended.output += part.data();
  }
  const int status = pipe == nullptr ? -1 : pclose(pipe);
  ended.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return ended;
}

void expect_passes(const std::string& test, const std::string& environment) {
  const Ended ended = run_alone(test, environment);
  EXPECT_EQ(ended.status, 0) << environment << "\n" << ended.output;
  EXPECT_EQ(ended.output.find("sidestream: "), std::string::npos) << environment << "\n" << ended.output;
}

class GpuEnvironmentTest : public gpu::Gpu {};

TEST_F(GpuEnvironmentTest, AllocatorsThatCannotServeAreRefusedWhenTheEngineIsMade) {
  expect_passes("NoEngineIsMade", "PYTORCH_ALLOC_CONF=backend:cudaMallocAsync");
  expect_passes("NoEngineIsMade", "PYTORCH_NO_CUDA_MEMORY_CACHING=1");
}

TEST_F(GpuEnvironmentTest, SettingsThatFreeInsideACaptureAreRefusedForGraphs) {
  expect_passes("GraphsAreRefused", "PYTORCH_ALLOC_CONF=max_split_size_mb:128");
  expect_passes("GraphsAreRefused", "PYTORCH_ALLOC_CONF=garbage_collection_threshold:0.8");
}

TEST_F(GpuEnvironmentTest, EnginesComeAndGoOnExpandableSegments) {
  expect_passes("EnginesComeAndGo", "PYTORCH_ALLOC_CONF=expandable_segments:True");
}

TEST_F(GpuEnvironmentTest, LaunchesThatBlockGiveTheGradientsOfPlainTraining) {
  expect_passes("EnginesComeAndGo", "CUDA_LAUNCH_BLOCKING=1");
}

TEST_F(GpuEnvironmentTest, TheFirstAttentionOfAProcessChangesNoModeThatCapturesDependOn) {
  expect_passes("AFirstEngineCapturesOnce", "");
}

class TwoGpusEnvironmentTest : public GpuEnvironmentTest {};

TEST_F(TwoGpusEnvironmentTest, AnEngineOnTheSecondDeviceLeavesTheFirstAlone) {
  if (c10::cuda::device_count() < 2) {
    GTEST_SKIP() << "this needs two GPUs";
  }
  expect_passes("TheFirstDeviceHasNoContext", "SIDESTREAM_TEST_GPU=1");
  expect_passes("EnginesComeAndGo", "SIDESTREAM_TEST_GPU=1");
  expect_passes("EnginesComeAndGo", "SIDESTREAM_TEST_GPU=1 PYTORCH_ALLOC_CONF=expandable_segments:True");
}

/// Each is run in a process of its own by a test above.
class DISABLED_Alone : public gpu::GpuBlocks {
 protected:
  [[nodiscard]] Options options() const { return Wrapping{"", "blocks.*", "blocks.*.*", 2}.options(device_, 4096); }
  void expect_plain_training() const {
    expect_plain(train([&](BlockModel& model) { return std::make_unique<OffloadEngine>(model, options()); }), train());
  }
};

TEST_F(DISABLED_Alone, NoEngineIsMade) {
  torch::nn::Module model;
  for (const char* graph : {"", "blocks.*"}) {
    Options options = Options(device_).offload("**");
    EXPECT_THROWS(UsageError, "caching", OffloadEngine(model, *graph == 0 ? options : options.graph(graph)));
  }
}

TEST_F(DISABLED_Alone, GraphsAreRefused) {
  torch::nn::Module model;
  EXPECT_THROWS(UsageError, "memory during a capture", OffloadEngine(model, Options(device_).graph("blocks.*")));
  OffloadEngine eager(model, Options(device_).offload("**"));
  const auto callable = Callable("half", [](const Tensors& x) { return Tensors{x[0] * 0.5}; });
  const at::Tensor sample = at::ones({4}, runtime().device()).requires_grad_(true);
  EXPECT_THROWS(UsageError, "memory during a capture",
                (void)make_graphed_callables(eager, {callable}, {{Sample(sample)}}));
}

TEST_F(DISABLED_Alone, EnginesComeAndGo) {
  for (int round = 0; round < 3; ++round) {
    expect_plain_training();
    release_cached_memory(device_);
  }
}

TEST_F(DISABLED_Alone, AFirstEngineCapturesOnce) {
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device_).graph("attention"));
  const auto attention = [](const at::Tensor& x) { return at::scaled_dot_product_attention(x, x, x); };
  const at::Tensor x = at::ones({1, 2, 64, 64}, at::TensorOptions().device(device_).dtype(at::kHalf)).requires_grad_();
  for (int s = 0; s < 4; ++s) {
    const auto step = engine.step();
    call("attention", attention, x).sum().backward();
  }
  EXPECT_EQ(engine.report().captures, 2);
}

TEST_F(DISABLED_Alone, TheFirstDeviceHasNoContext) {
  ASSERT_EQ(device_.index(), 1);
  expect_plain_training();
  synchronize(device_);
  EXPECT_FALSE(c10::cuda::hasPrimaryContext(0));
  EXPECT_TRUE(c10::cuda::hasPrimaryContext(1));
}

}  // namespace
}  // namespace sidestream::testing_model
