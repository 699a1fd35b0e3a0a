// LSTM, GRU and RNN inside graphed calls: the gradients of a plain twin, bit for bit, with what they save offloaded.
#include <cstdint>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/nn/modules/rnn.h>

#include "guard_models.h"
#include "sidestream/call.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/report.h"
#include "sidestream/testing/simulator.h"

namespace sidestream::testing_model {
namespace {

constexpr std::int64_t kTimeSteps = 3, kSequences = 4, kFeatures = 8;
constexpr std::int64_t kNetworks = 3;  // so many that the first is offloaded

enum class RecurrentKind : std::uint8_t { lstm, gru, tanh, relu, lstm_cell, gru_cell };

/// Two layers, both directions, batch by batch; a cell runs over the steps one after the other.
class Recurrent : public torch::nn::Module {
 public:
  Recurrent(RecurrentKind kind, double dropout) : kind_(kind) {
    const auto formed = [&](auto options) {
      return options.num_layers(2).bidirectional(true).batch_first(true).dropout(dropout);
    };
    const std::int64_t half = kFeatures / 2;  // of each direction
    switch (kind) {
      case RecurrentKind::lstm:
        lstm_ = register_module("lstm", torch::nn::LSTM(formed(torch::nn::LSTMOptions(kFeatures, half))));
        break;
      case RecurrentKind::gru:
        gru_ = register_module("gru", torch::nn::GRU(formed(torch::nn::GRUOptions(kFeatures, half))));
        break;
      case RecurrentKind::tanh:
      case RecurrentKind::relu: {
        auto options = formed(torch::nn::RNNOptions(kFeatures, half));
        kind == RecurrentKind::tanh ? options.nonlinearity(torch::kTanh) : options.nonlinearity(torch::kReLU);
        rnn_ = register_module("rnn", torch::nn::RNN(options));
        break;
      }
      case RecurrentKind::lstm_cell:
        lstm_cell_ = register_module("cell", torch::nn::LSTMCell(kFeatures, kFeatures));
        break;
      case RecurrentKind::gru_cell:
        gru_cell_ = register_module("cell", torch::nn::GRUCell(kFeatures, kFeatures));
        break;
    }
  }
  at::Tensor forward(const at::Tensor& x) {
    switch (kind_) {
      case RecurrentKind::lstm: {
        const auto [y, last] = lstm_->forward(x);
        return y + std::get<0>(last).mean() + std::get<1>(last).mean();
      }
      case RecurrentKind::gru:
        return std::get<0>(gru_->forward(x));
      case RecurrentKind::tanh:
      case RecurrentKind::relu:
        return std::get<0>(rnn_->forward(x));
      case RecurrentKind::lstm_cell: {
        std::vector<at::Tensor> outputs;
        std::tuple<at::Tensor, at::Tensor> state{at::zeros({kSequences, kFeatures}, x.options()),
                                                 at::zeros({kSequences, kFeatures}, x.options())};
        for (const at::Tensor& step : x.unbind(1)) {
          state = lstm_cell_->forward(step, state);
          outputs.push_back(std::get<0>(state));
        }
        return at::stack(outputs, 1);
      }
      case RecurrentKind::gru_cell: {
        std::vector<at::Tensor> outputs;
        at::Tensor state = at::zeros({kSequences, kFeatures}, x.options());
        for (const at::Tensor& step : x.unbind(1)) {
          state = gru_cell_->forward(step, state);
          outputs.push_back(state);
        }
        return at::stack(outputs, 1);
      }
    }
    return x;
  }

 private:
  RecurrentKind kind_;
  torch::nn::LSTM lstm_{nullptr};
  torch::nn::GRU gru_{nullptr};
  torch::nn::RNN rnn_{nullptr};
  torch::nn::LSTMCell lstm_cell_{nullptr};
  torch::nn::GRUCell gru_cell_{nullptr};
};

class RecurrentModel : public torch::nn::Module {
 public:
  RecurrentModel(RecurrentKind kind, double dropout) {
    torch::manual_seed(31);
    for (std::int64_t i = 0; i < kNetworks; ++i) {
      networks.push_back(register_module("network" + std::to_string(i), std::make_shared<Recurrent>(kind, dropout)));
    }
  }
  at::Tensor forward(at::Tensor h) {
    for (const auto& network : networks) {
      h = h + call(network, h);
    }
    return h;
  }

  std::vector<std::shared_ptr<Recurrent>> networks;
};

using RecurrentForm = std::tuple<RecurrentKind, double>;

class RecurrentCallTest : public testing::TestWithParam<RecurrentForm> {
 protected:
  ~RecurrentCallTest() override { set_schedule(device_, Schedule()); }

  [[nodiscard]] std::shared_ptr<RecurrentModel> make() const {
    return std::make_shared<RecurrentModel>(std::get<0>(GetParam()), std::get<1>(GetParam()));
  }
  [[nodiscard]] at::Tensor input(std::int64_t s) const {
    auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(900 + s));
    return at::randn({kSequences, kTimeSteps, kFeatures}, generator, at::kFloat).to(device_).requires_grad_(true);
  }

  c10::Device device_ = find_device("sim");
};

TEST_P(RecurrentCallTest, ReplaysGiveThePlainGradients) {
  for (const char* schedule : {"early", "late", "d2h-late", "seed:1"}) {
    SCOPED_TRACE(schedule);
    set_schedule(device_, Schedule::parse(schedule));
    Twins<RecurrentModel> twins(Options(device_).min_bytes(64).graph("network*").offload("network*"),
                                [this] { return make(); });
    twins.expect_plain(
        0, 5, [&](RecurrentModel& model, std::int64_t s) { model.forward(input(s)).square().mean().backward(); });
    const Report report = twins.engine->report();
    EXPECT_EQ(report.replays, 2 * kNetworks);
    EXPECT_GT(report.offloaded_bytes, 0);
  }
}

TEST_P(RecurrentCallTest, CallablesGiveThePlainGradients) {
  Twins<RecurrentModel> twins(Options(device_).min_bytes(64).offload("**"), [this] { return make(); });
  std::vector<Callable> callables;
  std::vector<std::vector<Sample>> samples;
  for (std::int64_t i = 0; i < kNetworks; ++i) {
    callables.emplace_back(
        "network" + std::to_string(i),
        [](Recurrent& network, const Tensors& in) { return Tensors{in[0] + network.forward(in[0])}; },
        twins.mine->networks[static_cast<std::size_t>(i)]);
    samples.push_back({i == 0 ? Sample(input(77)) : Sample::output_of(i - 1)});
  }
  const auto graphed = make_graphed_callables(*twins.engine, callables, samples);
  twins.expect_plain(0, 4, [&](RecurrentModel& model, std::int64_t s) {
    at::Tensor h = input(s);
    for (std::size_t i = 0; i < graphed.size(); ++i) {
      h = &model == twins.mine.get() ? graphed[i]({h})[0] : h + model.networks[i]->forward(h);
    }
    h.square().mean().backward();
  });
  EXPECT_EQ(twins.replays(), 2 * kNetworks);
}

std::string recurrent_name(const testing::TestParamInfo<RecurrentForm>& info) {
  const auto kind = [&]() -> std::string {
    switch (std::get<0>(info.param)) {
      case RecurrentKind::lstm:
        return "lstm";
      case RecurrentKind::gru:
        return "gru";
      case RecurrentKind::tanh:
        return "rnn_tanh";
      case RecurrentKind::relu:
        return "rnn_relu";
      case RecurrentKind::lstm_cell:
        return "lstm_cell";
      case RecurrentKind::gru_cell:
        return "gru_cell";
    }
    return {};
  };
  return kind() + (std::get<1>(info.param) > 0 ? "_with_dropout" : "");
}

INSTANTIATE_TEST_SUITE_P(
    Kinds, RecurrentCallTest,
    testing::Values(RecurrentForm{RecurrentKind::lstm, 0.0}, RecurrentForm{RecurrentKind::lstm, 0.3},
                    RecurrentForm{RecurrentKind::gru, 0.0}, RecurrentForm{RecurrentKind::gru, 0.3},
                    RecurrentForm{RecurrentKind::tanh, 0.3}, RecurrentForm{RecurrentKind::relu, 0.3},
                    RecurrentForm{RecurrentKind::lstm_cell, 0.0}, RecurrentForm{RecurrentKind::gru_cell, 0.0}),
    recurrent_name);

}  // namespace
}  // namespace sidestream::testing_model
