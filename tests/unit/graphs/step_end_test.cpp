// The end of a step is behind all its copies, by the recorded order itself.
#include <optional>
#include <vector>

#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/autograd.h>

#include "graphs/engine/engine_access.h"
#include "models/layer_stack.h"
#include "models/scopes.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "unit/sim/rerun/every_order.h"

namespace sidestream::testing_model {
namespace {

TEST(StepEndTest, IsBehindAllCopiesOfItsGraphs) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  torch::nn::Sequential model = layer_stack(5, device);
  OffloadEngine engine(*model, Options(device).offload("layers.*.*").min_bytes(1024));
  const auto layers = graph_stack(engine, model, device, GraphOptions());
  { const auto sizing = engine.step(); }
  const at::Tensor x = rows(0, device).requires_grad_(true);
  synchronize(device);
  sim::Recording recording;
  {
    const auto step = engine.step();
    (void)layers[1]({layers[0]({x})[0]});  // nothing after it: its copies are what runs last
  }
  const at::Tensor after = at::ones({4}, x.options().requires_grad(false));
  recording.stop();
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_TRUE(sim::last_work_is_behind_all_copies(recording, c10::Stream(c10::Stream::DEFAULT, device)));
}

// What reloads are still under way: none that was used, one that was begun for a backward which stopped before it.
TEST(StepEndTest, IsBehindAllCopiesOfItsEagerGroups) {
  const sim::OneThread one_thread;
  const c10::Device device = find_device("sim");
  torch::nn::Module model;
  OffloadEngine engine(model, Options(device).min_bytes(1024).groups_in_flight(1).offload("**"));
  Runtime& runtime = EngineAccess::state(engine).runtime();
  const OwnedStream a = runtime.create_stream();
  const OwnedStream b = runtime.create_stream();
  const at::Tensor inputs[] = {rows(60, device).requires_grad_(true), rows(61, device).requires_grad_(true)};
  synchronize(device);
  const auto body = [&](std::vector<at::Tensor>& alive) {
    for (const std::size_t microbatch : {0, 1}) {
      const c10::StreamGuard on_stream(microbatch == 0 ? a.get() : b.get());
      const at::Tensor middle = through_scopes(inputs[microbatch], {"first", "second"});
      const at::Tensor h = through_scopes(middle, {"third", "fourth"});
      alive.push_back(torch::autograd::grad({h.sum()}, {middle}, {}, /*retain_graph=*/true)[0]);
      alive.push_back(h);
    }
  };
  for (const bool recorded : {false, true}) {
    std::vector<at::Tensor> alive;
    std::optional<sim::Recording> recording;
    if (recorded) {
      recording.emplace();
    }
    {
      const auto step = engine.step();
      body(alive);
    }
    const at::Tensor after = at::ones({4}, inputs[0].options().requires_grad(false));
    if (recorded) {
      recording->stop();
      EXPECT_TRUE(sim::last_work_is_behind_all_copies(*recording, runtime.current_stream()));
      EXPECT_GT(engine.report().reloaded_bytes, 0);
    }
  }
  synchronize(device);
}

}  // namespace
}  // namespace sidestream::testing_model
