// Recurrent networks: LibTorch runs them in another way on each kind of device, the simulated one runs them as the CPU does.
#include <ATen/ATen.h>
#include <ATen/Context.h>
#include <ATen/core/grad_mode.h>
#include <sidestream/error.h>
#include <torch/csrc/autograd/autograd.h>
#include <torch/nn/modules/rnn.h>
#include <torch/nn/utils/rnn.h>

#include <functional>

#include "expect_throws.h"
#include "operator_cases.h"
#include "warnings.h"

namespace {

using sidestream::test::OperatorCase;
using sidestream::test::parameter;
using sidestream::test::values;
using Tensors = std::vector<at::Tensor>;
using D = c10::Device;

constexpr std::int64_t kTimeSteps = 5, kSequences = 3, kFeatures = 6, kStates = 4;

/// The options that LSTM, GRU and RNN have in common.
struct Form {
  std::int64_t layers = 1;
  bool bidirectional = false;
  bool batch_first = false;
  double dropout = 0;
  bool bias = true;

  template <class Options>
  [[nodiscard]] Options options() const {
    return Options(kFeatures, kStates)
        .num_layers(layers)
        .bidirectional(bidirectional)
        .batch_first(batch_first)
        .dropout(dropout)
        .bias(bias);
  }
  [[nodiscard]] std::vector<std::int64_t> input() const {
    return batch_first ? std::vector<std::int64_t>{kSequences, kTimeSteps, kFeatures}
                       : std::vector<std::int64_t>{kTimeSteps, kSequences, kFeatures};
  }
  [[nodiscard]] std::vector<std::int64_t> state() const {
    return {layers * (bidirectional ? 2 : 1), kSequences, kStates};
  }
};

/// The gradients of all `outputs`, each with weights of its own, then the outputs.
Tensors all_gradients(const Tensors& outputs, const Tensors& inputs) {
  at::Tensor loss;
  double factor = 1;
  for (const at::Tensor& output : outputs) {
    const at::Tensor part = output.to(at::kFloat).square().sum() * factor;
    loss = loss.defined() ? loss + part : part;
    factor += 0.5;
  }
  Tensors results = torch::autograd::grad({loss}, inputs);
  for (const at::Tensor& output : outputs) {
    results.push_back(output.detach());
  }
  return results;
}

/// A module with the weights of seed 11, on `device`.
template <class Module, class Options>
Module made(const Options& options, D device, at::ScalarType dtype = at::kFloat) {
  at::manual_seed(11);
  Module module(options);
  module->to(device, dtype);
  return module;
}

template <class Module>
Tensors with_weights(const Module& module, Tensors inputs) {
  for (const at::Tensor& weight : module->parameters()) {
    inputs.push_back(weight);
  }
  return inputs;
}

Tensors lstm(D d, const Form& form, at::ScalarType dtype = at::kFloat, std::int64_t projection = 0) {
  auto options = form.options<torch::nn::LSTMOptions>();
  options.proj_size(projection);
  auto module = made<torch::nn::LSTM>(options, d, dtype);
  auto x = parameter(form.input(), d, dtype), c = parameter(form.state(), d, dtype);
  std::vector<std::int64_t> state = form.state();
  state[2] = projection > 0 ? projection : state[2];
  auto h = parameter(state, d, dtype);
  at::manual_seed(9);
  // The CPU's own words, once a process: "LSTM with projections is not supported with oneDNN".
  const sidestream::testing_model::ExpectedWarnings warnings;
  const auto [y, last] = module->forward(x, std::make_tuple(h, c));
  return all_gradients({y, std::get<0>(last), std::get<1>(last)}, with_weights(module, {x, h, c}));
}

template <class Module, class Options>
Tensors one_state(D d, const Form& form, const Options& options, at::ScalarType dtype = at::kFloat) {
  auto module = made<Module>(options, d, dtype);
  auto x = parameter(form.input(), d, dtype), h = parameter(form.state(), d, dtype);
  at::manual_seed(9);
  const auto [y, last] = module->forward(x, h);
  return all_gradients({y, last}, with_weights(module, {x, h}));
}
Tensors gru(D d, const Form& form, at::ScalarType dtype = at::kFloat) {
  return one_state<torch::nn::GRU>(d, form, form.options<torch::nn::GRUOptions>(), dtype);
}
Tensors rnn(D d, const Form& form, bool tanh) {
  auto options = form.options<torch::nn::RNNOptions>();
  tanh ? options.nonlinearity(torch::kTanh) : options.nonlinearity(torch::kReLU);
  return one_state<torch::nn::RNN>(d, form, options);
}

/// Of sequences of lengths 5, 3 and 2.
template <class Module, class Options>
Tensors packed(D d, const Options& options) {
  auto module = made<Module>(options, d);
  auto x = parameter({kTimeSteps, kSequences, kFeatures}, d);
  at::manual_seed(9);
  const auto sequence = torch::nn::utils::rnn::pack_padded_sequence(x, at::tensor({5, 3, 2}, at::kLong));
  const auto [y, last] = module->forward_with_packed_input(sequence);
  Tensors outputs{y.data()};
  if constexpr (std::is_same_v<Module, torch::nn::LSTM>) {
    outputs.push_back(std::get<0>(last));
    outputs.push_back(std::get<1>(last));
  } else {
    outputs.push_back(last);
  }
  return all_gradients(outputs, with_weights(module, {x}));
}

/// Two layers, both directions, dropout, inputs batch by batch.
Form full(double dropout = 0.3) { return {2, true, true, dropout, true}; }

/// `run` without oneDNN: the CPU composes its LSTM of plain operators then.
Tensors composed(const std::function<Tensors()>& run) {
  at::globalContext().setUserEnabledMkldnn(false);
  Tensors results = run();
  at::globalContext().setUserEnabledMkldnn(true);
  return results;
}

std::vector<OperatorCase> recurrent_cases() {
  const auto lstm_of = [](D d, const Form& form) { return lstm(d, form); };
  const auto gru_of = [](D d, const Form& form) { return gru(d, form); };
  const auto row = [](const char* name, const auto& module, const Form& form) {
    return OperatorCase{name, [=](D d) { return module(d, form); }};
  };
  return {
      row("Lstm", lstm_of, {}),
      row("LstmLayers", lstm_of, {3, false, false, 0, true}),
      row("LstmBothDirections", lstm_of, {1, true, false, 0, true}),
      row("LstmBatchFirst", lstm_of, {1, false, true, 0, true}),
      row("LstmDropout", lstm_of, {2, false, false, 0.3, true}),
      row("LstmFull", lstm_of, full()),
      row("LstmWithoutBias", lstm_of, {2, true, false, 0, false}),
      {"LstmProjected", [](D d) { return lstm(d, full(0), at::kFloat, 2); }},
      {"LstmDouble", [](D d) { return lstm(d, full(), at::kDouble); }},
      {"LstmBFloat16", [](D d) { return lstm(d, full(), at::kBFloat16); }},
      {"LstmComposed", [](D d) { return composed([&] { return lstm(d, full()); }); }},
      {"LstmComposedWithoutBias", [](D d) { return composed([&] {
                                              return lstm(d, {2, true, false, 0, false});
                                            }); }},
      {"LstmPacked", [](D d) { return packed<torch::nn::LSTM>(d, full(0).options<torch::nn::LSTMOptions>()); }},
      {"LstmUnderNoGrad",
       [](D d) {
         const at::NoGradGuard no_grad;
         auto module = made<torch::nn::LSTM>(full(0).options<torch::nn::LSTMOptions>(), d);
         module->eval();
         const auto [y, last] = module->forward(values(full().input(), d));
         return Tensors{y, std::get<0>(last), std::get<1>(last)};
       }},
      {"LstmTwiceDifferentiated",
       [](D d) {
         return composed([&] {
           auto module = made<torch::nn::LSTM>(Form().options<torch::nn::LSTMOptions>(), d);
           auto x = parameter(Form().input(), d);
           const at::Tensor y = std::get<0>(module->forward(x)).square().sum();
           const at::Tensor first = torch::autograd::grad({y}, {x}, {}, true, true)[0];
           return torch::autograd::grad({first.square().sum()}, with_weights(module, {x}), {}, std::nullopt, false,
                                        /*allow_unused=*/true);
         });
       }},
      {"LstmCell",
       [](D d) {
         auto cell = made<torch::nn::LSTMCell>(torch::nn::LSTMCellOptions(kFeatures, kStates), d);
         auto x = parameter({kSequences, kFeatures}, d), h = parameter({kSequences, kStates}, d),
              c = parameter({kSequences, kStates}, d);
         const auto [h1, c1] = cell->forward(x, std::make_tuple(h, c));
         const auto [h2, c2] = cell->forward(x, std::make_tuple(h1, c1));
         return all_gradients({h2, c2}, with_weights(cell, {x, h, c}));
       }},
      row("Gru", gru_of, {}),
      row("GruLayers", gru_of, {3, false, false, 0, true}),
      row("GruBothDirections", gru_of, {1, true, false, 0, true}),
      row("GruBatchFirst", gru_of, {1, false, true, 0, true}),
      row("GruFull", gru_of, full()),
      row("GruWithoutBias", gru_of, {2, true, false, 0, false}),
      {"GruDouble", [](D d) { return gru(d, full(), at::kDouble); }},
      {"GruBFloat16", [](D d) { return gru(d, full(), at::kBFloat16); }},
      {"GruPacked", [](D d) { return packed<torch::nn::GRU>(d, full().options<torch::nn::GRUOptions>()); }},
      {"GruCell",
       [](D d) {
         auto cell = made<torch::nn::GRUCell>(torch::nn::GRUCellOptions(kFeatures, kStates), d);
         auto x = parameter({kSequences, kFeatures}, d), h = parameter({kSequences, kStates}, d);
         return all_gradients({cell->forward(x, cell->forward(x, h))}, with_weights(cell, {x, h}));
       }},
      {"RnnTanh", [](D d) { return rnn(d, full(), true); }},
      {"RnnRelu", [](D d) { return rnn(d, full(), false); }},
      {"RnnPacked", [](D d) { return packed<torch::nn::RNN>(d, full().options<torch::nn::RNNOptions>()); }},
      {"RnnCell",
       [](D d) {
         auto cell = made<torch::nn::RNNCell>(torch::nn::RNNCellOptions(kFeatures, kStates), d);
         auto x = parameter({kSequences, kFeatures}, d), h = parameter({kSequences, kStates}, d);
         return all_gradients({cell->forward(x, cell->forward(x, h))}, with_weights(cell, {x, h}));
       }},
  };
}

SIDESTREAM_OPERATOR_SUITE(OperatorRecurrent, recurrent_cases());

TEST(OperatorRecurrentErrors, SayWhatIsWrong) {
  const D d = sidestream::test::sim();
  const auto w = [&](std::int64_t rows, std::int64_t columns) { return values({rows, columns}, d); };
  const Tensors weights{w(16, kFeatures), w(16, kStates)};
  const at::Tensor x = values(Form().input(), d), h = values(Form().state(), d);
  EXPECT_THROWS(sidestream::UsageError, "takes two states",
                (void)at::lstm(x, Tensors{h}, weights, false, 1, 0.0, true, false, false));
  EXPECT_THROWS(sidestream::UsageError, "given 2 weights and needs 4",
                (void)at::lstm(x, Tensors{h, h}, weights, false, 2, 0.0, true, false, false));
  EXPECT_THROWS(
      sidestream::UsageError, "given 2 hidden states and needs 1",
      (void)at::gru(x, at::cat({h, h}), Tensors{w(12, kFeatures), w(12, kStates)}, false, 1, 0.0, true, false, false));
  EXPECT_THROWS(sidestream::UsageError, "length 0",
                (void)at::gru(x.narrow(0, 0, 0), h, Tensors{w(12, kFeatures), w(12, kStates)}, false, 1, 0.0, true,
                              false, false));
  EXPECT_THROWS(sidestream::UsageError, "int64 on the CPU",
                (void)at::gru(x[0], at::ones({1}, at::kLong).to(d), h, Tensors{w(12, kFeatures), w(12, kStates)}, false,
                              1, 0.0, true, false));
}

}  // namespace
