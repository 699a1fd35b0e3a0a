#include <cstdlib>

#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <torch/library.h>

#include "operator_cases.h"
#include "sim/torch/generator.h"

namespace {

using sidestream::test::gradients;
using sidestream::test::OperatorCase;
using sidestream::test::parameter;
using sidestream::test::same_bits;
using Tensors = std::vector<at::Tensor>;
using D = c10::Device;

// Values are drawn from the CPU's generator on both devices: the draws of the operator under test start from a seed of their own.
at::Tensor seeded(const at::Tensor& x) {
  at::manual_seed(9);
  return x;
}

at::TensorOptions on(D d) { return at::TensorOptions().device(d); }

std::vector<OperatorCase> random_cases() {
  return {
      {"Dropout",
       [](D d) {
         auto x = parameter({64, 32}, d);
         return gradients(at::dropout(seeded(x), 0.15, true), {x});
       }},
      {"DropoutBFloat16",
       [](D d) {
         auto x = parameter({64, 32}, d, at::kBFloat16);
         return gradients(at::dropout(seeded(x), 0.42, true), {x});
       }},
      {"DropoutInEvaluation",
       [](D d) {
         auto x = parameter({64, 32}, d);
         return gradients(at::dropout(seeded(x), 0.3, false), {x});
       }},
      {"DropoutOfAll",
       [](D d) {
         auto x = parameter({4}, d);
         return gradients(at::dropout(seeded(x), 1.0, true), {x});
       }},
      {"DropoutInPlace",
       [](D d) {
         auto x = sidestream::test::values({64}, d);
         seeded(x);
         at::dropout_(x, 0.4, true);
         return Tensors{x};
       }},
      {"Draws",
       [](D d) {
         return Tensors{at::randn({33}, on(d)),
                        at::rand({7}, on(d)),
                        at::randperm(8, on(d)),
                        at::randint(5, {8}, on(d)),
                        at::randn({5}, on(d)),
                        at::empty({9}, on(d)).exponential_(),
                        at::empty({9}, on(d)).bernoulli_(0.3),
                        at::multinomial(at::ones({6}, on(d)), 3)};
       }},
      {"GeneratorOfItsOwn",
       [](D d) {
         auto generator = d.is_cpu() ? at::detail::createCPUGenerator() : sidestream::sim::make_generator();
         generator.set_current_seed(5);
         return Tensors{at::empty({8}, on(d)).normal_(0, 1, generator), at::randperm(9, generator, on(d)),
                        at::rand({3}, on(d))};
       }},
      {"StateAndBack",
       [](D d) {
         auto generator = at::globalContext().defaultGenerator(d);
         auto first = at::rand({3}, on(d));
         const at::Tensor state = generator.get_state();
         auto second = at::rand({3}, on(d));
         generator.set_state(state);
         return Tensors{first, second, at::rand({3}, on(d))};
       }},
  };
}

SIDESTREAM_OPERATOR_SUITE(OperatorRandomness, random_cases());

TEST(SimGenerator, DrawsOnSimLeaveTheCpuGeneratorAlone) {
  const D device = sidestream::test::sim();
  at::manual_seed(3);
  const at::Tensor expected = at::rand({4});
  at::manual_seed(3);
  (void)at::rand({4}, on(device));
  (void)at::dropout(at::ones({100}, on(device)), 0.5, true);
  EXPECT_TRUE(same_bits(expected, at::rand({4})));
}

TEST(SimGenerator, CountsDraws) {
  const D device = sidestream::test::sim();
  namespace sim = sidestream::sim;
  for (const std::int64_t count : {1, 7, 623, 624, 625, 5000}) {
    at::manual_seed(11);
    (void)at::rand({3}, on(device));
    const sim::GeneratorState before = sim::default_state();
    (void)at::rand({count}, on(device));
    EXPECT_EQ(sim::draws_between(before, sim::default_state()), static_cast<std::uint32_t>(count));
  }
}

TEST(SimGenerator, TakingDrawsMovesTheDefaultGeneratorOn) {
  const D device = sidestream::test::sim();
  namespace sim = sidestream::sim;
  at::manual_seed(11);
  const at::Tensor skipped = at::rand({1000}, on(device));
  const at::Tensor expected = at::rand({4}, on(device));
  at::manual_seed(11);
  sim::GeneratorState taken = sim::take_draws(sim::default_generator(), 1000);
  EXPECT_TRUE(same_bits(expected, at::rand({4}, on(device))));
  sim::set_default_state(taken);
  EXPECT_TRUE(same_bits(skipped, at::rand({1000}, on(device))));
}

/// A trainer seeds first, and names its device later.
TEST(SimGeneratorDeathTest, TakesTheSeedOfBeforeItsDeviceIsUsed) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // a process of its own, in which nothing has used the device
  EXPECT_EXIT(
      {
        at::manual_seed(7);
        const at::Tensor drawn = at::rand({4}, on(sidestream::test::sim()));
        at::manual_seed(7);
        std::_Exit(same_bits(drawn, at::rand({4}, on(sidestream::test::sim()))) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

at::Tensor add_noise(const at::Tensor& x) { return x + at::rand_like(x); }

TEST(SimGenerator, ServesKernelsThatTakeNoGenerator) {
  torch::Library definition(torch::Library::DEF, "sidestream_test", std::nullopt, __FILE__, __LINE__);
  definition.def("add_noise(Tensor x) -> Tensor", {at::Tag::nondeterministic_seeded});
  torch::Library kernel(torch::Library::IMPL, "sidestream_test", c10::DispatchKey::CPU, __FILE__, __LINE__);
  kernel.impl("add_noise", &add_noise);
  const auto op = c10::Dispatcher::singleton()
                      .findSchemaOrThrow("sidestream_test::add_noise", "")
                      .typed<at::Tensor(const at::Tensor&)>();
  const D device = sidestream::test::sim();
  at::manual_seed(4);
  const at::Tensor first = op.call(at::zeros({5})), second = op.call(at::zeros({5}));
  at::manual_seed(4);
  EXPECT_TRUE(same_bits(first, op.call(at::zeros({5}, on(device)))));
  EXPECT_TRUE(same_bits(second, op.call(at::zeros({5}, on(device)))));
  EXPECT_TRUE(same_bits(first, op.call(at::zeros({5})))) << "the CPU's own generator has moved";
}

}  // namespace
