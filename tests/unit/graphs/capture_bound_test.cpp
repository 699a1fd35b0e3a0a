// CallOptions::max_captures with OnMaxCaptures::drop_least_used, where one call of a sequence gets new shapes and another does not.
#include <cstdint>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "models/layer_stack.h"
#include "models/plain_twin.h"
#include "sidestream/call_options.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/graphs/called_stack.h"
#include "warnings.h"

namespace sidestream::testing_model {
namespace {

/// Two layers in one sequence. The second one takes a part of what the first one gives, of `length` rows.
class CaptureBoundTest : public testing::Test {
 protected:
  [[nodiscard]] Options options() const {
    return Options(device_)
        .min_bytes(256)
        .graph("layers.*")
        .call_options(CallOptions().max_captures(1).on_max_captures(OnMaxCaptures::drop_least_used));
  }
  void expect_plain_step(OffloadEngine& engine, std::int64_t s, std::int64_t length,
                         std::vector<at::Tensor>* held = nullptr) {
    expect_same_step(model_, &engine, plain_, s, [&](CalledStack& model) {
      const at::Tensor h = model.run_layer(0, rows(s, device_).requires_grad_(true));
      const at::Tensor taken = held != nullptr ? h.detach().requires_grad_(true) : h;
      model.run_layer(1, taken.narrow(0, 0, length)).square().mean().backward();
      if (held != nullptr && &model == &model_) {
        held->push_back(h);
      }
    });
  }

  c10::Device device_ = find_device("sim");
  CalledStack model_{device_, {}, 2};
  CalledStack plain_{device_, {}, 2};
};

TEST_F(CaptureBoundTest, ALaterCallOfTheSequenceMakesRoomToo) {
  OffloadEngine engine(model_, options());
  for (std::int64_t s = 0; s < 12; ++s) {
    expect_plain_step(engine, s, 16 - s / 4 * 4);
  }
  EXPECT_EQ(engine.report().captures, 4 + 2 + 2);
  EXPECT_EQ(engine.report().eager_calls, 2 + 1 + 1) << "each shape once";
}

TEST_F(CaptureBoundTest, HoldsWhileABackwardOfTheSequenceDoesNotCome) {
  OffloadEngine engine(model_, options());
  expect_plain_step(engine, 0, 16);
  expect_plain_step(engine, 1, 16);
  EXPECT_EQ(engine.report().captures, 4);
  {
    const ExpectedWarnings of_the_bound;  // the first layer awaits its backward
    std::vector<at::Tensor> held;
    for (std::int64_t s = 2; s < 6; ++s) {
      expect_plain_step(engine, s, 12 - s, &held);
    }
    EXPECT_EQ(engine.report().captures, 4) << "nothing could be dropped";
  }
  for (std::int64_t s = 6; s < 9; ++s) {
    expect_plain_step(engine, s, 4);
  }
  EXPECT_EQ(engine.report().captures, 4 + 2 + 2) << "of the latest shape before, and of this one";
}

}  // namespace
}  // namespace sidestream::testing_model
