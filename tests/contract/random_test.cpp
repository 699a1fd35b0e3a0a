#include <cstdint>
#include <vector>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/equal.h>
#include <ATen/ops/rand.h>

#include "contract/fixture.h"
#include "sidestream/error.h"

namespace sidestream::contract {
namespace {

class RandomContract : public RuntimeContract {
 protected:
  void seed(std::uint64_t value) {
    auto generator = at::globalContext().defaultGenerator(runtime().device());
    generator.set_current_seed(value);
  }
  [[nodiscard]] at::Generator made(std::uint64_t value) const {
    at::Generator generator = at::globalContext().defaultGenerator(runtime().device()).clone();
    generator.set_current_seed(value);
    return generator;
  }
  [[nodiscard]] at::Tensor drawn(const at::Generator& generator) const {
    return at::empty({1000}, options()).normal_(0, 1, generator);
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

TEST_P(RandomContract, EachRunDrawsOnFromTheGeneratorsOfItsCapture) {
  constexpr int kRounds = 4;
  std::vector<std::vector<float>> eager;
  at::Generator one = made(21);
  at::Generator two = made(22);
  seed(17);
  for (int i = 0; i < kRounds; ++i) {
    eager.push_back(values(drawn(one)));
    eager.push_back(values(at::rand({1000}, options())));
    eager.push_back(values(drawn(two)));
    eager.push_back(values(drawn(one)));
  }
  const at::Tensor one_after = one.get_state();
  const at::Tensor two_after = two.get_state();

  one.set_current_seed(21);
  two.set_current_seed(22);
  const auto pool = runtime().create_pool();
  std::vector<at::Tensor> made_inside;
  runtime().synchronize_device();
  const Graph graph = captured(pool,
                               [&] {
                                 made_inside.push_back(drawn(one));
                                 made_inside.push_back(at::rand({1000}, options()));
                                 made_inside.push_back(drawn(two));
                                 made_inside.push_back(drawn(one));
                               },
                               {one, two});
  EXPECT_TRUE(runtime().draws(graph));
  seed(17);
  for (std::size_t i = 0; i < kRounds; ++i) {
    runtime().launch(graph, side());
    for (std::size_t k = 0; k < made_inside.size(); ++k) {
      EXPECT_EQ(values(made_inside[k]), eager[4 * i + k]) << "replay " << i << ", draw " << k;
    }
  }
  EXPECT_TRUE(at::equal(one.get_state(), one_after));
  EXPECT_TRUE(at::equal(two.get_state(), two_after));
}

TEST_P(RandomContract, TwoGraphsDrawOnFromOneGeneratorByTurns) {
  std::vector<std::vector<float>> eager;
  at::Generator generator = made(23);
  for (int i = 0; i < 4; ++i) {
    eager.push_back(values(drawn(generator)));
  }
  generator.set_current_seed(23);
  const auto pool = runtime().create_pool();
  std::vector<at::Tensor> results;
  std::vector<Graph> graphs;
  for (int i = 0; i < 2; ++i) {
    runtime().synchronize_device();
    graphs.push_back(captured(pool, [&] { results.push_back(drawn(generator)); }, {generator}));
  }
  EXPECT_EQ(values(drawn(generator)), eager[0]) << "the captures drew";
  for (std::size_t i = 1; i < 4; ++i) {
    runtime().launch(graphs[i % 2], side());
    EXPECT_EQ(values(results[i % 2]), eager[i]) << i;
  }
}

TEST_P(RandomContract, AGraphThatDrawsFromAGivenGeneratorAloneDraws) {
  const auto pool = runtime().create_pool();
  at::Tensor result;
  Graph graph;
  runtime().synchronize_device();
  {
    const at::Generator generator = made(24);
    graph = captured(pool, [&] { result = drawn(generator); }, {generator});
  }
  EXPECT_TRUE(runtime().draws(graph));
  const auto expected = values(drawn(made(24)));
  runtime().launch(graph, side());
  EXPECT_EQ(values(result), expected) << "the graph keeps its generator";
}

TEST_P(RandomContract, ADrawFromAnyOtherGeneratorThrowsAndTheGeneratorStaysUsable) {
  const at::Generator known = made(25);
  const at::Generator other = made(26);
  const auto expected = values(drawn(made(26)));
  const auto pool = runtime().create_pool();
  runtime().synchronize_device();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool, {known});
    EXPECT_ANY_THROW((void)drawn(other));
    runtime().abandon_capture(capture());
  }
  EXPECT_EQ(values(drawn(other)), expected);
  EXPECT_EQ(values(drawn(known)), values(drawn(made(25))));
}

TEST_P(RandomContract, AGeneratorOfAnotherDeviceIsRefused) {
  const auto pool = runtime().create_pool();
  const StreamGuard guard(runtime(), capture());
  EXPECT_THROW(runtime().begin_capture(capture(), pool, {at::detail::createCPUGenerator()}), UsageError);
  EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::none);
}

SIDESTREAM_ON_EVERY_BACKEND(RandomContract);

}  // namespace
}  // namespace sidestream::contract
