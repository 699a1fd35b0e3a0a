#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <torch/nn/utils/clip_grad.h>
#include <torch/optim/adamw.h>
#include <torch/serialize.h>

#include <sstream>

#include "model_of_real_parts.h"
#include "operator_cases.h"

namespace {

using sidestream::test::Model;
using sidestream::test::same_bits;

/// One model with its optimiser on one device.
struct Trainer {
  explicit Trainer(c10::Device on) : device(on) {
    at::manual_seed(1);
    model = Model();
    model->to(device);
    optimizer =
        std::make_unique<torch::optim::AdamW>(model->parameters(), torch::optim::AdamWOptions(1e-2).weight_decay(0.1));
  }

  at::Tensor step(const at::Tensor& tokens, std::uint64_t seed, bool autocast) {
    const at::Tensor here = tokens.to(device);
    optimizer->zero_grad();
    at::manual_seed(seed);
    at::Tensor logits;
    {
      const bool before = at::autocast::is_autocast_enabled(device.type());
      at::autocast::set_autocast_dtype(device.type(), at::kBFloat16);
      at::autocast::set_autocast_enabled(device.type(), autocast);
      logits = model->forward(here.narrow(1, 0, here.size(1) - 1));
      at::autocast::set_autocast_enabled(device.type(), before);
      at::autocast::clear_cache();
    }
    const at::Tensor targets = here.narrow(1, 1, here.size(1) - 1).reshape({-1});
    const at::Tensor loss = at::cross_entropy_loss(logits.to(at::kFloat).view({-1, logits.size(-1)}), targets);
    loss.backward();
    torch::nn::utils::clip_grad_norm_(model->parameters(), 1.0);
    optimizer->step();
    return loss.detach();
  }

  c10::Device device;
  Model model{nullptr};
  std::unique_ptr<torch::optim::AdamW> optimizer;
};

at::Tensor batch(std::uint64_t seed) {
  at::manual_seed(seed);
  return at::randint(64, {4, 17}, at::kLong);
}

void expect_same_parameters(Trainer& cpu, Trainer& other, bool gradients) {
  const auto expected = cpu.model->named_parameters();
  const auto actual = other.model->named_parameters();
  ASSERT_EQ(expected.size(), actual.size());
  for (std::size_t i = 0; i < expected.size(); ++i) {
    EXPECT_TRUE(same_bits(expected[i].value(), actual[i].value())) << expected[i].key();
    if (gradients) {
      EXPECT_TRUE(same_bits(expected[i].value().grad(), actual[i].value().grad()))
          << "gradient of " << expected[i].key();
    }
  }
}

class ModelTraining : public ::testing::TestWithParam<bool> {};

TEST_P(ModelTraining, EveryGradientAndParameterHasTheBitsOfTheCpu) {
  Trainer cpu(at::kCPU), sim(sidestream::test::sim());
  double first = 0, last = 0;
  for (std::uint64_t i = 0; i < 10; ++i) {
    const at::Tensor tokens = batch(i % 2);
    const at::Tensor expected = cpu.step(tokens, 100 + i, GetParam());
    const at::Tensor actual = sim.step(tokens, 100 + i, GetParam());
    ASSERT_TRUE(same_bits(expected, actual)) << "loss of step " << i;
    expect_same_parameters(cpu, sim, true);
    ASSERT_FALSE(HasFailure()) << "step " << i;
    (i == 0 ? first : last) = expected.item<double>();
  }
  EXPECT_LT(last, first - 0.3);
}

INSTANTIATE_TEST_SUITE_P(Precision, ModelTraining, ::testing::Values(false, true),
                         [](const auto& info) { return info.param ? "AutocastBFloat16" : "Float"; });

TEST(ModelCheckpoint, GoesFromSimToCpuAndBackAndTrainingContinuesTheSame) {
  Trainer cpu(at::kCPU), sim(sidestream::test::sim());
  for (std::uint64_t i = 0; i < 2; ++i) {
    (void)cpu.step(batch(i), i, false);
    (void)sim.step(batch(i), i, false);
  }
  std::stringstream model_file, optimizer_file;
  torch::save(sim.model, model_file);
  torch::save(*sim.optimizer, optimizer_file);

  Trainer loaded(sidestream::test::sim());
  torch::load(loaded.model, model_file);
  torch::load(*loaded.optimizer, optimizer_file);
  for (const auto& parameter : loaded.model->named_parameters()) {
    EXPECT_TRUE(parameter.value().is_privateuseone()) << parameter.key();
  }
  expect_same_parameters(cpu, loaded, false);
  (void)cpu.step(batch(9), 9, false);
  (void)loaded.step(batch(9), 9, false);
  expect_same_parameters(cpu, loaded, true);

  loaded.model->to(at::kCPU);
  expect_same_parameters(cpu, loaded, false);
}

}  // namespace
