#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/dropout.h>
#include <ATen/ops/linear.h>
#include <ATen/ops/lstm.h>
#include <ATen/ops/matmul.h>
#include <ATen/ops/mkldnn_rnn_layer.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/stack.h>
#include <ATen/ops/zeros.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/irange.h>
#include <sidestream/error.h>
#include <torch/csrc/autograd/function.h>

#include "observe/operator_observer.h"
#include "sim/torch/fused_kernels.h"

namespace sidestream::sim {
namespace {

// LibTorch runs recurrent networks in another way on each kind of device. On the CPU it multiplies all inputs of a sequence by
// the weights at once and computes the gates with plain operators, or gives a whole layer of an LSTM to oneDNN. On a GPU it gives
// them to cuDNN. On any other device it multiplies step by step and calls fused cells. The functions below compose the CPU's
// operators, in the CPU's order, so that autograd computes the CPU's gradients.

using Tensors = std::vector<at::Tensor>;
using Optional = std::optional<at::Tensor>;

enum class Cell : std::uint8_t { lstm, gru, tanh, relu };

/// What one step hands to the next. Only an LSTM has `c`.
struct State {
  at::Tensor h, c;

  [[nodiscard]] State rows(std::int64_t begin, std::int64_t end) const {
    const auto of = [&](const at::Tensor& t) { return t.defined() ? t.narrow(0, begin, end - begin) : t; };
    return {of(h), of(c)};
  }
  [[nodiscard]] static State joined(const std::vector<State>& states) {
    Tensors hs, cs;
    for (const State& state : states) {
      hs.push_back(state.h);
      cs.push_back(state.c);
    }
    return {at::cat(hs, 0), cs.front().defined() ? at::cat(cs, 0) : at::Tensor()};
  }
};

/// Of one direction of one layer. Biases may be undefined. Only an LSTM with projections has `projection`.
struct Weights {
  at::Tensor input, hidden, input_bias, hidden_bias, projection;

  [[nodiscard]] at::Tensor times_input(const at::Tensor& x) const { return at::linear(x, input, input_bias); }
  [[nodiscard]] at::Tensor times_hidden(const at::Tensor& h) const { return at::linear(h, hidden, hidden_bias); }
};

/// One step of an LSTM. `input` gives the input times its weights: a cell computes that before or after the hidden state's
/// product, and gradients are added in the reverse order.
template <class Input>
State lstm_step(const Input& input, const State& state, const Weights& weights) {
  const Tensors gates = weights.times_hidden(state.h).add_(input()).unsafe_chunk(4, 1);
  const at::Tensor in = gates[0].sigmoid_();
  const at::Tensor forget = gates[1].sigmoid_();
  const at::Tensor candidate = gates[2].tanh_();
  const at::Tensor out = gates[3].sigmoid_();
  const at::Tensor c = forget.mul(state.c).add_(in.mul(candidate));
  const at::Tensor h = out.mul(c.tanh());
  return {weights.projection.defined() ? at::matmul(h, weights.projection.t()) : h, c};
}

template <class Input>
State gru_step(const Input& input, const State& state, const Weights& weights) {
  const Tensors of_input = input().unsafe_chunk(3, 1);
  const Tensors of_hidden = weights.times_hidden(state.h).unsafe_chunk(3, 1);
  const at::Tensor reset = of_hidden[0].add_(of_input[0]).sigmoid_();
  const at::Tensor keep = of_hidden[1].add_(of_input[1]).sigmoid_();
  const at::Tensor candidate = of_input[2].add(of_hidden[2].mul_(reset)).tanh_();
  return {state.h.sub(candidate).mul_(keep).add_(candidate), {}};
}

State step(Cell cell, const at::Tensor& given, const State& state, const Weights& weights) {
  const auto input = [&] { return given; };
  switch (cell) {
    case Cell::lstm:
      return lstm_step(input, state, weights);
    case Cell::gru:
      return gru_step(input, state, weights);
    case Cell::tanh:
      return {weights.times_hidden(state.h).add_(input()).tanh(), {}};
    case Cell::relu:
      return {weights.times_hidden(state.h).add_(input()).relu(), {}};
  }
  return {};
}

/// Inputs of all steps: of equal batches, [steps, batch, features], or packed, [rows, features], with the batch of each step.
struct Sequence {
  at::Tensor data;
  c10::ArrayRef<std::int64_t> batches;
};

/// Of one direction of one layer.
struct Pass {
  at::Tensor outputs;
  State last;
};

Pass run_direction(Cell cell, const at::Tensor& data, State state, const Weights& weights, bool reverse) {
  Tensors inputs = weights.times_input(data).unbind(0);
  if (inputs.empty()) {
    throw UsageError("a recurrent network was given a sequence of length 0; give it at least one step");
  }
  if (reverse) {
    std::reverse(inputs.begin(), inputs.end());
  }
  Tensors outputs;
  for (const at::Tensor& input : inputs) {
    state = step(cell, input, state, weights);
    outputs.push_back(state.h);
  }
  if (reverse) {
    std::reverse(outputs.begin(), outputs.end());
  }
  return {at::stack(outputs, 0), std::move(state)};
}

/// Batches become smaller from step to step: the states of sequences that have ended are set aside.
Pass run_packed(Cell cell, const Sequence& sequence, State state, const Weights& weights) {
  const at::Tensor inputs = weights.times_input(sequence.data);
  Tensors outputs;
  std::vector<State> ended;
  std::int64_t begin = 0;
  std::int64_t before = sequence.batches.front();
  for (const std::int64_t batch : sequence.batches) {
    const at::Tensor input = inputs.narrow(0, begin, batch);
    begin += batch;
    if (batch < before) {
      ended.push_back(state.rows(batch, before));
      state = state.rows(0, batch);
    }
    before = batch;
    state = step(cell, input, state, weights);
    outputs.push_back(state.h);
  }
  ended.push_back(std::move(state));
  std::reverse(ended.begin(), ended.end());
  return {at::cat(outputs, 0), State::joined(ended)};
}

/// From the last step to the first: sequences join where they end.
Pass run_packed_reversed(Cell cell, const Sequence& sequence, const State& first, const Weights& weights) {
  const at::Tensor inputs = weights.times_input(sequence.data);
  Tensors outputs;
  std::int64_t end = sequence.data.size(0);
  std::int64_t before = sequence.batches.back();
  State state = first.rows(0, before);
  for (std::size_t i = sequence.batches.size(); i-- > 0;) {
    const std::int64_t batch = sequence.batches[i];
    if (batch > before) {
      state = State::joined({state, first.rows(before, batch)});
    }
    const at::Tensor input = inputs.narrow(0, end - batch, batch);
    end -= batch;
    before = batch;
    state = step(cell, input, state, weights);
    outputs.push_back(state.h);
  }
  std::reverse(outputs.begin(), outputs.end());
  return {at::cat(outputs, 0), std::move(state)};
}

Pass run_direction(Cell cell, const Sequence& sequence, const State& state, const Weights& weights, bool reverse) {
  if (sequence.batches.empty()) {
    return run_direction(cell, sequence.data, state, weights, reverse);
  }
  return reverse ? run_packed_reversed(cell, sequence, state, weights) : run_packed(cell, sequence, state, weights);
}

/// What all operators of whole networks take.
struct Network {
  Cell cell;
  bool has_biases;
  std::int64_t layers;
  double dropout;
  bool train;
  bool bidirectional;

  [[nodiscard]] std::size_t directions() const { return bidirectional ? 2 : 1; }
  [[nodiscard]] at::Tensor dropped_out(at::Tensor outputs, std::int64_t layer) const {
    return dropout != 0 && train && layer < layers - 1 ? at::dropout(outputs, dropout, true) : outputs;
  }
  /// Each layer's and direction's, in their order.
  [[nodiscard]] std::vector<Weights> weights(at::TensorList given, bool projects) const {
    const std::size_t each = (has_biases ? 4 : 2) + (projects ? 1 : 0);
    const std::size_t wanted = each * directions() * static_cast<std::size_t>(layers);
    if (given.size() != wanted) {
      throw UsageError("a recurrent network was given " + std::to_string(given.size()) + " weights and needs " +
                       std::to_string(wanted));
    }
    std::vector<Weights> all;
    for (std::size_t i = 0; i < given.size(); i += each) {
      Weights& next = all.emplace_back(Weights{given[i], given[i + 1], {}, {}, {}});
      if (has_biases) {
        next.input_bias = given[i + 2];
        next.hidden_bias = given[i + 3];
      }
      if (projects) {
        next.projection = given[i + each - 1];
      }
    }
    return all;
  }
};

Pass run_layers(const Network& network, Sequence sequence, const std::vector<State>& first,
                const std::vector<Weights>& weights) {
  if (first.size() != weights.size()) {
    throw UsageError("a recurrent network was given " + std::to_string(first.size()) + " hidden states and needs " +
                     std::to_string(weights.size()) + ", one for each layer and direction");
  }
  Tensors hs, cs;
  std::size_t next = 0;
  for (const auto layer : c10::irange(network.layers)) {
    Tensors outputs;
    for (const auto direction : c10::irange(network.directions())) {
      Pass pass = run_direction(network.cell, sequence, first[next], weights[next], direction == 1);
      outputs.push_back(std::move(pass.outputs));
      hs.push_back(std::move(pass.last.h));
      cs.push_back(std::move(pass.last.c));
      ++next;
    }
    sequence.data = network.dropped_out(outputs.size() == 1 ? outputs[0] : at::cat(outputs, -1), layer);
  }
  return {sequence.data, {at::stack(hs, 0), cs.front().defined() ? at::stack(cs, 0) : at::Tensor()}};
}

std::vector<State> states_of(const at::Tensor& h, const at::Tensor& c) {
  std::vector<State> states;
  for (at::Tensor& of_layer : h.unbind(0)) {
    states.push_back({std::move(of_layer), {}});
  }
  if (c.defined()) {
    const Tensors cells = c.unbind(0);
    for (std::size_t i = 0; i < std::min(states.size(), cells.size()); ++i) {
      states[i].c = cells[i];
    }
  }
  return states;
}

c10::ArrayRef<std::int64_t> batches_of(const at::Tensor& sizes) {
  if (!sizes.device().is_cpu() || sizes.scalar_type() != at::kLong || sizes.numel() == 0) {
    throw UsageError("the batch sizes of a packed sequence are int64 on the CPU, at least one");
  }
  return {sizes.const_data_ptr<std::int64_t>(), static_cast<std::size_t>(sizes.numel())};
}

using LstmResult = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// Whether the CPU gives LSTMs of this dtype to oneDNN, which depends on the processor: asked of a network of one element.
bool cpu_takes_onednn(at::ScalarType dtype) {
  if ((dtype != at::kFloat && dtype != at::kBFloat16) || !at::globalContext().userEnabledMkldnn()) {
    return false;
  }
  enum class Answer : std::uint8_t { unknown, no, yes };
  static std::array<std::atomic<Answer>, 2> answers{};
  std::atomic<Answer>& answer = answers[dtype == at::kFloat ? 0 : 1];
  if (answer == Answer::unknown) {
    const UnobservedGuard unobserved;
    const c10::InferenceMode no_inference(false);
    const at::AutoGradMode with_gradients(true);
    const auto ones = [&](at::IntArrayRef size) { return at::ones(size, dtype).requires_grad_(true); };
    const auto result = at::lstm(ones({1, 1, 1}), Tensors{ones({1, 1, 1}), ones({1, 1, 1})},
                                 Tensors{ones({4, 1}), ones({4, 1})}, false, 1, 0.0, true, false, false);
    answer = std::get<0>(result).grad_fn()->name() == "MkldnnRnnLayerBackward0" ? Answer::yes : Answer::no;
  }
  return answer == Answer::yes;
}

LstmResult run_onednn(const Network& network, const at::Tensor& input, const at::Tensor& h, const at::Tensor& c,
                      const std::vector<Weights>& weights, bool batch_first) {
  constexpr std::int64_t kLstm = 2;  // oneDNN's number of it
  at::Tensor x = (batch_first ? input.transpose(0, 1) : input).contiguous();
  const at::Tensor hs = h.contiguous(), cs = c.contiguous();
  Tensors last_h, last_c;
  for (const auto layer : c10::irange(network.layers)) {
    Tensors outputs;
    for (const auto direction : c10::irange(network.directions())) {
      const auto i = static_cast<std::int64_t>(last_h.size());
      const Weights& of = weights[last_h.size()];
      const auto bias = [&](const at::Tensor& given, const at::Tensor& weight) {
        return network.has_biases ? given : at::zeros(weight.sizes(), weight.options());
      };
      auto [output, h_after, c_after, workspace] =
          at::mkldnn_rnn_layer(x, of.input, of.hidden, bias(of.input_bias, of.input), bias(of.hidden_bias, of.hidden),
                               hs[i], cs[i], direction == 1, {}, kLstm, h.size(2), network.layers, network.has_biases,
                               network.bidirectional, batch_first, network.train);
      outputs.push_back(std::move(output));
      last_h.push_back(std::move(h_after));
      last_c.push_back(std::move(c_after));
    }
    x = network.dropped_out(outputs.size() == 1 ? outputs[0] : at::cat(outputs, -1), layer);
  }
  return {batch_first ? x.transpose(0, 1) : x, at::stack(last_h, 0), at::stack(last_c, 0)};
}

void check_states(at::TensorList states) {
  if (states.size() != 2 || states[0].dim() != 3 || states[1].dim() != 3) {
    throw UsageError("an LSTM takes two states, h and c, each [layers * directions, batch, features]");
  }
}

LstmResult lstm(const at::Tensor& input, at::TensorList states, at::TensorList given, bool has_biases,
                std::int64_t layers, double dropout, bool train, bool bidirectional, bool batch_first) {
  check_states(states);
  const Network network{Cell::lstm, has_biases, layers, dropout, train, bidirectional};
  const bool projects = states[0].size(2) != states[1].size(2);
  const std::vector<Weights> weights = network.weights(given, projects);
  if (!projects && input.numel() != 0 && cpu_takes_onednn(input.scalar_type())) {
    return run_onednn(network, input, states[0], states[1], weights, batch_first);
  }
  Pass pass =
      run_layers(network, {batch_first ? input.transpose(0, 1) : input, {}}, states_of(states[0], states[1]), weights);
  return {batch_first ? pass.outputs.transpose(0, 1) : pass.outputs, pass.last.h, pass.last.c};
}

LstmResult lstm_packed(const at::Tensor& data, const at::Tensor& batch_sizes, at::TensorList states,
                       at::TensorList given, bool has_biases, std::int64_t layers, double dropout, bool train,
                       bool bidirectional) {
  check_states(states);
  const Network network{Cell::lstm, has_biases, layers, dropout, train, bidirectional};
  const bool projects = states[0].size(2) != states[1].size(2);
  Pass pass = run_layers(network, {data, batches_of(batch_sizes)}, states_of(states[0], states[1]),
                         network.weights(given, projects));
  return {pass.outputs, pass.last.h, pass.last.c};
}

std::tuple<at::Tensor, at::Tensor> lstm_cell(const at::Tensor& input, at::TensorList states, const at::Tensor& w_ih,
                                             const at::Tensor& w_hh, const Optional& b_ih, const Optional& b_hh) {
  if (states.size() != 2) {
    throw UsageError("an LSTM cell takes two states, h and c");
  }
  const Weights weights{w_ih, w_hh, b_ih.value_or(at::Tensor()), b_hh.value_or(at::Tensor()), {}};
  const State after = lstm_step([&] { return weights.times_input(input); }, {states[0], states[1]}, weights);
  return {after.h, after.c};
}

using Result = std::tuple<at::Tensor, at::Tensor>;

template <Cell cell>
Result network(const at::Tensor& input, const at::Tensor& h, at::TensorList given, bool has_biases, std::int64_t layers,
               double dropout, bool train, bool bidirectional, bool batch_first) {
  const Network network{cell, has_biases, layers, dropout, train, bidirectional};
  Pass pass = run_layers(network, {batch_first ? input.transpose(0, 1) : input, {}}, states_of(h, {}),
                         network.weights(given, false));
  return {batch_first ? pass.outputs.transpose_(0, 1) : pass.outputs, pass.last.h};
}

template <Cell cell>
Result network_packed(const at::Tensor& data, const at::Tensor& batch_sizes, const at::Tensor& h, at::TensorList given,
                      bool has_biases, std::int64_t layers, double dropout, bool train, bool bidirectional) {
  const Network network{cell, has_biases, layers, dropout, train, bidirectional};
  Pass pass = run_layers(network, {data, batches_of(batch_sizes)}, states_of(h, {}), network.weights(given, false));
  return {pass.outputs, pass.last.h};
}

at::Tensor gru_cell(const at::Tensor& input, const at::Tensor& h, const at::Tensor& w_ih, const at::Tensor& w_hh,
                    const Optional& b_ih, const Optional& b_hh) {
  const Weights weights{w_ih, w_hh, b_ih.value_or(at::Tensor()), b_hh.value_or(at::Tensor()), {}};
  return gru_step([&] { return weights.times_input(input); }, {h, {}}, weights).h;
}

}  // namespace

void register_recurrent(torch::Library& library) {
  library.impl("lstm.input", &lstm);
  library.impl("lstm.data", &lstm_packed);
  library.impl("lstm_cell", &lstm_cell);
  library.impl("gru.input", &network<Cell::gru>);
  library.impl("gru.data", &network_packed<Cell::gru>);
  library.impl("gru_cell", &gru_cell);
  library.impl("rnn_tanh.input", &network<Cell::tanh>);
  library.impl("rnn_tanh.data", &network_packed<Cell::tanh>);
  library.impl("rnn_relu.input", &network<Cell::relu>);
  library.impl("rnn_relu.data", &network_packed<Cell::relu>);
}

}  // namespace sidestream::sim
