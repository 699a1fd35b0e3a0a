// Options that make no sense: some do not compile, the others are refused when the engine is made, by name.
#include <memory>
#include <string>
#include <vector>

#include <gtest/gtest.h>
#include <torch/nn/module.h>

#include "expect_throws.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graph_event.h"

namespace sidestream {
namespace {

template <class Choice>
concept HasEager = requires {
  Choice::eager;
};
template <class Struct>
concept HasCallOption = requires(Struct options) {
  options.on_pending();
}
|| requires(Struct options) { options.on_new_arguments(); }
|| requires(Struct options) { options.max_captures(); };

// An eager run has nothing to put in the place of weights that are gone.
static_assert(HasEager<OnNewArguments> && HasEager<OnPending> && !HasEager<OnRelocatedWeights>);
// make_graphed_callables takes GraphOptions: what it would ignore is no part of them.
static_assert(HasCallOption<CallOptions> && !HasCallOption<GraphOptions>);

TEST(OptionTest, WhatMakesNoSenseIsRefusedWhenTheEngineIsMade) {
  const c10::Device device = find_device("sim");
  const c10::Stream stream(c10::Stream::DEFAULT, device);
  struct Wrong {
    std::string what;
    Options options;
  };
  const auto graphs = [&](const GraphOptions& options) { return Options(device).graph_options(options); };
  const std::vector<Wrong> all = {
      {"side_streams is 0", graphs(GraphOptions().side_streams(0))},
      {"side_streams and cuda_graph_stream are both set",
       graphs(GraphOptions().side_streams(1).cuda_graph_stream(stream))},
      {"num_warmup_iters is negative", graphs(GraphOptions().num_warmup_iters(-1))},
      {"cuda_graph_event is set without cuda_graph_stream",
       graphs(GraphOptions().cuda_graph_event(std::make_shared<GraphEvent>(device)))},
      {"max_captures is 0", Options(device).call_options(CallOptions().max_captures(0))},
      {"groups_in_flight is negative", Options(device).groups_in_flight(-1)},
      {"delay is set without offload", Options(device).delay("blocks.*.mlp")},
      {"check_steps is negative", Options(device).check_steps(-1)},
  };
  torch::nn::Module model;
  for (const Wrong& wrong : all) {
    EXPECT_THROWS(UsageError, wrong.what, OffloadEngine(model, wrong.options));
  }
}

}  // namespace
}  // namespace sidestream
