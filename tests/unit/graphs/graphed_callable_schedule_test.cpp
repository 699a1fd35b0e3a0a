// Steps of the reference systems' form, run again in every order that streams and events allow.
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>

#include "graphs/engine_state.h"
#include "runtime/sim/recording.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graph_event.h"
#include "unit/graphs/layer_stack.h"

namespace sidestream {
namespace {

using testing_model::layer_stack;
using testing_model::rows;

constexpr std::uint64_t kSeeds = 50;

struct Form {
  std::string name;
  std::int64_t side_streams = 2;
  bool linked = true;
  std::size_t layers_run = 5;  ///< fewer: the rest of the chain is left out, and its groups come back inline
  bool stream = false;         ///< the caller's
  bool event = false;          ///< and the caller's
  bool accumulate = false;
};

void PrintTo(const Form& form, std::ostream* out) { *out << form.name; }

class GraphedCallableScheduleTest : public testing::TestWithParam<Form> {
 protected:
  void SetUp() override { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }
  void TearDown() override { c10::AutogradState::get_tls_state().set_multithreading_enabled(true); }

  /// Gradients as they lie in device memory, waiting for nothing; those of layers that were left out have none.
  static std::vector<std::byte> raw_gradients(const torch::nn::Sequential& model, const at::Tensor& x) {
    std::vector<at::Tensor> tensors = model->parameters();
    tensors.push_back(x);
    std::vector<std::byte> bytes;
    for (const at::Tensor& tensor : tensors) {
      if (tensor.grad().defined()) {
        const auto* data = static_cast<const std::byte*>(tensor.grad().const_data_ptr());
        bytes.insert(bytes.end(), data, data + tensor.grad().nbytes());
      }
    }
    return bytes;
  }

  c10::Device device_ = find_device("sim");
};

TEST_P(GraphedCallableScheduleTest, EveryOrderGivesTheGradientsOfPlainTraining) {
  const Form& form = GetParam();
  torch::nn::Sequential plain = layer_stack(5, device_);
  torch::nn::Sequential model = layer_stack(5, device_);
  OffloadEngine engine(*model, Options(device_).offload("layers.*.*").min_bytes(1024));
  const OwnedStream stream = engine.state()->runtime().create_stream();
  GraphOptions options = GraphOptions().side_streams(form.side_streams).accumulate_in_graph(form.accumulate);
  if (form.stream) {
    options.cuda_graph_stream(stream.get());
  }
  if (form.event) {
    options.cuda_graph_event(std::make_shared<GraphEvent>(device_));
  }
  auto layers = testing_model::graph_stack(engine, model, device_, options, form.linked);
  layers.erase(layers.begin() + static_cast<std::ptrdiff_t>(form.layers_run), layers.end());
  const auto one_step = [&](bool graphed, const at::Tensor& x, const at::Tensor& target) {
    at::Tensor h = x;
    if (graphed) {
      h = testing_model::run_stack(layers, x);
    } else {
      for (std::size_t i = 0; i < form.layers_run; ++i) {
        h = (plain->begin() + static_cast<std::ptrdiff_t>(i))->forward(h);
      }
    }
    (h * target).sum().backward();
  };
  for (std::int64_t s = 0; s < 2; ++s) {
    plain->zero_grad();
    model->zero_grad();
    one_step(false, rows(s, device_).requires_grad_(true), rows(s, device_, 1));
    one_step(true, rows(s, device_).requires_grad_(true), rows(s, device_, 1));
  }
  plain->zero_grad();
  model->zero_grad();
  const at::Tensor target = rows(2, device_, 1);
  const at::Tensor x_plain = rows(2, device_).requires_grad_(true);
  one_step(false, x_plain, target);
  synchronize(device_);
  const std::vector<std::byte> expected = raw_gradients(plain, x_plain);
  const at::Tensor x = rows(2, device_).requires_grad_(true);
  sim::Recording recording;
  one_step(true, x, target);
  recording.stop();
  ASSERT_EQ(raw_gradients(model, x), expected);
  const auto expect_same = [&](const Schedule& schedule) {
    recording.rerun(schedule);
    EXPECT_EQ(raw_gradients(model, x) == expected, true) << schedule.name();
  };
  for (const char* name : {"early", "late", "d2h-early", "d2h-late"}) {
    expect_same(Schedule::parse(name));
  }
  for (std::uint64_t seed = 0; seed < kSeeds && !HasFailure(); ++seed) {
    expect_same(Schedule(Schedule::Kind::seed, seed));
  }
}

INSTANTIATE_TEST_SUITE_P(Forms, GraphedCallableScheduleTest,
                         testing::Values(Form{"linked_1", 1}, Form{"linked_2", 2}, Form{"linked_3", 3},
                                         Form{"unlinked_2", 2, false}, Form{"part_1", 1, true, 3},
                                         Form{"part_2", 2, true, 2}, Form{"stream", 2, true, 5, true},
                                         Form{"stream_event", 2, true, 5, true, true},
                                         Form{"accumulating_2", 2, true, 5, false, false, true}),
                         [](const testing::TestParamInfo<Form>& info) { return info.param.name; });

}  // namespace
}  // namespace sidestream
