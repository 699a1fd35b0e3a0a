// What Options::progress hears of an engine's work before calls replay. That it may throw at every visit stands in user_fault_test.
#include "sidestream/progress.h"

#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "models/block_model.h"
#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

const char* words(ProgressPhase phase) {
  switch (phase) {
    case ProgressPhase::warm_up:
      return "warm-up";
    case ProgressPhase::pin:
      return "pin";
    case ProgressPhase::capture_forward:
      return "forward";
    case ProgressPhase::capture_backward:
      return "backward";
    case ProgressPhase::plan:
      return "plan";
  }
  return "";
}

class ProgressTest : public testing::Test {
 protected:
  ProgressTest() { model_.to(device_); }

  /// Options that write down what they hear.
  Options heard_options() {
    return Options(device_).min_bytes(1024).offload("blocks.**").progress([this](const Progress& progress) {
      EXPECT_EQ(std::this_thread::get_id(), thread_);
      EXPECT_EQ(runtime_->capture_status(runtime_->current_stream()), CaptureStatus::none);
      EXPECT_EQ(progress.phase == ProgressPhase::pin, progress.bytes > 0);
      heard_.push_back(std::string(words(progress.phase)) + " " + std::string(progress.name) + " " +
                       std::to_string(progress.index) + "/" + std::to_string(progress.count));
      pinned_ = progress.bytes > 0 ? progress.bytes : pinned_;
    });
  }
  void train(OffloadEngine& engine, std::int64_t s) {
    clear_gradients(model_);
    const auto step = engine.step();
    model_.loss_of(s).backward();
  }
  [[nodiscard]] std::vector<std::string> take_heard() { return std::exchange(heard_, {}); }

  c10::Device device_ = find_device("sim");
  std::shared_ptr<Runtime> runtime_ = make_runtime(device_);
  std::thread::id thread_ = std::this_thread::get_id();
  BlockModel model_{{.layers = 3}};
  std::vector<std::string> heard_;
  std::size_t pinned_ = 0;
};

TEST_F(ProgressTest, NamesEachWarmUpPinningAndCaptureOnce) {
  OffloadEngine engine(model_, heard_options().graph("blocks.*").graph_options(GraphOptions().side_streams(1)));
  const std::vector<std::string> captures{
      "warm-up blocks.0 0/3",  "warm-up blocks.1 1/3",  "warm-up blocks.2 2/3",  "pin  0/1",
      "forward blocks.0 0/3",  "forward blocks.1 1/3",  "forward blocks.2 2/3",  //
      "backward blocks.2 0/3", "backward blocks.1 1/3", "backward blocks.0 2/3",
  };
  train(engine, 0);
  EXPECT_TRUE(take_heard().empty()) << "the sizing step is the user's own";
  train(engine, 1);
  EXPECT_EQ(take_heard(), captures);
  EXPECT_GT(pinned_, 0U);
  EXPECT_LE(pinned_, static_cast<std::size_t>(engine.report().pinned_bytes));
  train(engine, 2);
  EXPECT_TRUE(take_heard().empty()) << "replays";
  for (const at::Tensor& parameter : model_.parameters()) {
    parameter.set_data(parameter.clone());
  }
  train(engine, 3);
  EXPECT_EQ(take_heard(), captures) << "the weights lie elsewhere";
}

TEST_F(ProgressTest, WithoutGraphsThereIsPinningOnly) {
  OffloadEngine engine(model_, heard_options());
  for (std::int64_t s = 0; s < 3; ++s) {
    train(engine, s);
  }
  EXPECT_EQ(take_heard(), std::vector<std::string>{"pin  0/1"});
}

TEST_F(ProgressTest, WithoutOffloadNothingIsPinned) {
  OffloadEngine engine(model_, heard_options().host_cap(0).graph("blocks.0"));
  for (std::int64_t s = 0; s < 3; ++s) {
    train(engine, s);
  }
  EXPECT_EQ(take_heard(),
            (std::vector<std::string>{"warm-up blocks.0 0/1", "forward blocks.0 0/1", "backward blocks.0 0/1"}));
}

}  // namespace
}  // namespace sidestream::testing_model
