#include <vector>

#include <ATen/Context.h>
#include <ATen/ops/rand.h>

#include "contract/fixture.h"

namespace sidestream::contract {
namespace {

class RandomContract : public RuntimeContract {
 protected:
  void seed(std::uint64_t value) {
    auto generator = at::globalContext().defaultGenerator(runtime().device());
    generator.set_current_seed(value);
  }
};

TEST_P(RandomContract, DrawsContinueAcrossReplaysAsInEagerMode) {
  constexpr int kRounds = 4;
  std::vector<std::vector<float>> eager;
  seed(17);
  for (int i = 0; i < 2 * kRounds; ++i) {
    eager.push_back(values(at::rand({1000}, options())));
  }
  EXPECT_NE(eager[0], eager[1]);

  const auto pool = runtime().create_pool();
  at::Tensor one;
  at::Tensor two;
  runtime().synchronize_device();
  Graph graph = captured(pool, [&] {
    one = at::rand({1000}, options());
    two = at::rand({1000}, options());
  });
  EXPECT_TRUE(runtime().draws(graph));
  seed(17);
  for (int i = 0; i < kRounds; ++i) {
    runtime().launch(graph, side());
    EXPECT_EQ(values(one), eager[static_cast<std::size_t>(2 * i)]) << "replay " << i;
    EXPECT_EQ(values(two), eager[static_cast<std::size_t>(2 * i + 1)]) << "replay " << i;
  }
}

TEST_P(RandomContract, AGraphWithoutRandomNumbersDrawsNone) {
  const auto pool = runtime().create_pool();
  const auto tensor = filled(1);
  runtime().synchronize_device();
  const Graph graph = captured(pool, [&] { tensor.add_(1); });
  EXPECT_FALSE(runtime().draws(graph));
}

TEST_P(RandomContract, ACaptureDrawsNothingFromTheGenerator) {
  seed(5);
  const auto expected = values(at::rand({64}, options()));
  seed(5);
  const auto pool = runtime().create_pool();
  for (const bool finish : {true, false}) {
    runtime().synchronize_device();
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    const auto drawn = at::rand({1000}, options());
    if (finish) {
      const auto graph = runtime().end_capture(capture());
    } else {
      runtime().abandon_capture(capture());
    }
  }
  EXPECT_EQ(values(at::rand({64}, options())), expected);
}

SIDESTREAM_ON_EVERY_BACKEND(RandomContract);

}  // namespace
}  // namespace sidestream::contract
