#include <algorithm>
#include <array>
#include <cstring>

#include <ATen/ops/add.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/mul.h>

#include "contract/fixture.h"

namespace sidestream::contract {
namespace {

class GraphContract : public RuntimeContract {
 protected:
  // Waits on the host, so that what was made on the main stream may be read by a capture.
  void settle() { runtime().synchronize_device(); }
};

TEST_P(GraphContract, AReplayComputesOnNewInput) {
  const auto pool = runtime().create_pool();
  const auto input = filled(1);
  at::Tensor output;
  settle();
  Graph graph = captured(pool, [&] {
    EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::active);
    output = at::add(at::mul(input, 3), 1);
  });
  EXPECT_EQ(runtime().capture_status(capture()), CaptureStatus::none);
  const auto written = runtime().create_event();
  const auto done = runtime().create_event();
  for (int i = 0; i < 4; ++i) {
    input.fill_(i);
    runtime().record(written, runtime().current_stream());
    runtime().wait(side(), written);
    runtime().launch(graph, side());
    runtime().record(done, side());
    runtime().wait(runtime().current_stream(), done);
    EXPECT_TRUE(all_equal(output, 3.0F * static_cast<float>(i) + 1));
  }
}

TEST_P(GraphContract, CapturingChangesNothingThatWasThereBefore) {
  const auto pool = runtime().create_pool();
  const auto tensor = filled(2);
  settle();
  Graph graph = captured(pool, [&] { tensor.add_(1); });
  EXPECT_TRUE(all_equal(tensor, 2));
  runtime().launch(graph, side());
  runtime().launch(graph, side());
  EXPECT_TRUE(all_equal(tensor, 4));
}

TEST_P(GraphContract, TheBackwardOfACaptureComesFromTheSamePoolAndReadsTheForward) {
  const auto pool = runtime().create_pool();
  const auto input = filled(2);
  at::Tensor middle;
  at::Tensor output;
  std::array<Graph, 2> graphs;
  settle();
  {
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    middle = at::mul(input, input);
    graphs[0] = runtime().end_capture(capture());
    runtime().begin_capture(capture(), pool);
    output = at::add(middle, input);
    graphs[1] = runtime().end_capture(capture());
  }
  for (const float value : {2.0F, 5.0F}) {
    input.fill_(value);
    settle();
    runtime().launch(graphs[0], side());
    runtime().launch(graphs[1], side());
    EXPECT_TRUE(all_equal(output, value * value + value));
  }
}

TEST_P(GraphContract, AForkedStreamJoinsTheCapture) {
  const auto pool = runtime().create_pool();
  const auto pinned = runtime().allocate_pinned(4096);
  auto* const host = reinterpret_cast<float*>(pinned.data());
  const auto input = filled(1);
  at::Tensor squared;
  Graph graph;
  settle();
  {
    const StreamGuard guard(runtime(), capture());
    const auto fork = runtime().create_event();
    const auto join = runtime().create_event();
    runtime().begin_capture(capture(), pool);
    squared = at::mul(input, input);
    runtime().record(fork, capture());
    runtime().wait(copies(), fork);
    EXPECT_EQ(runtime().capture_status(copies()), CaptureStatus::active);
    runtime().copy_to_host(host, squared.const_data_ptr(), 4096, copies());
    runtime().record(join, copies());
    runtime().wait(capture(), join);
    graph = runtime().end_capture(capture());
  }
  EXPECT_EQ(runtime().capture_status(copies()), CaptureStatus::none);
  for (const float value : {3.0F, 4.0F}) {
    input.fill_(value);
    settle();
    runtime().launch(graph, side());
    runtime().synchronize(side());
    EXPECT_EQ(host[0], value * value);
    EXPECT_EQ(host[1023], value * value);
  }
}

TEST_P(GraphContract, AReloadInsideAGraphIsReadByTheComputeThatWaitsForIt) {
  const auto pool = runtime().create_pool();
  const auto pinned = runtime().allocate_pinned(4096);
  auto* const host = reinterpret_cast<float*>(pinned.data());
  at::Tensor output;
  Graph graph;
  settle();
  {
    const StreamGuard guard(runtime(), capture());
    const auto fork = runtime().create_event();
    const auto join = runtime().create_event();
    runtime().begin_capture(capture(), pool);
    const auto back = at::empty({1024}, options());
    runtime().record(fork, capture());
    runtime().wait(copies(), fork);
    runtime().copy_to_device(back.mutable_data_ptr(), host, 4096, copies());
    runtime().record(join, copies());
    runtime().wait(capture(), join);
    output = at::add(back, 1);
    graph = runtime().end_capture(capture());
  }
  for (const float value : {3.0F, 4.0F}) {
    std::fill_n(host, 1024, value);
    runtime().launch(graph, side());
    EXPECT_TRUE(all_equal(output, value + 1));
  }
}

// Graph: compute, done event, then a copy on a forked stream.
struct CopyingGraph {
  ExternalEvent done;
  ExternalEvent copies_done;
  PinnedMemory pinned;
  at::Tensor output;
  Graph graph;
};

class ExternalEventContract : public GraphContract {
 protected:
  CopyingGraph capture_copying(const MemoryPool& pool, const at::Tensor& input) {
    const auto bytes = static_cast<std::size_t>(input.numel()) * sizeof(float);
    CopyingGraph graph{
        runtime().create_external_event(), runtime().create_external_event(), runtime().allocate_pinned(bytes), {}, {}};
    const auto fork = runtime().create_event();
    const auto join = runtime().create_event();
    settle();
    const StreamGuard guard(runtime(), capture());
    runtime().begin_capture(capture(), pool);
    graph.output = at::add(input, 1);
    runtime().record(fork, capture());
    runtime().wait(copies(), fork);
    runtime().record(graph.done, capture());
    runtime().copy_to_host(graph.pinned.data(), graph.output.const_data_ptr(), bytes, copies());
    runtime().record(graph.copies_done, copies());
    runtime().record(join, copies());
    runtime().wait(capture(), join);
    graph.graph = runtime().end_capture(capture());
    return graph;
  }
};

TEST_P(ExternalEventContract, EveryLaunchRecordsItAndWaitersSeeThatLaunch) {
  const auto pool = runtime().create_pool();
  const auto input = filled(1);
  const auto graph = capture_copying(pool, input);
  const auto written = runtime().create_event();
  const auto stream = runtime().current_stream();
  at::Tensor seen;
  for (const float value : {4.0F, 6.0F, 8.0F}) {
    runtime().wait(stream, graph.copies_done);
    input.fill_(value);
    runtime().record(written, stream);
    runtime().wait(side(), written);
    delay(side());
    runtime().launch(graph.graph, side());
    runtime().wait(stream, graph.done);
    seen = at::mul(graph.output, 2);
    EXPECT_TRUE(all_equal(seen, 2 * (value + 1)));
  }
}

TEST_P(ExternalEventContract, TheCopiesDoneEventStandsForTheCopies) {
  const auto pool = runtime().create_pool();
  const auto input = filled(1);
  const auto graph = capture_copying(pool, input);
  const auto copied = runtime().create_event();
  for (const float value : {4.0F, 6.0F}) {
    input.fill_(value);
    settle();
    std::memset(graph.pinned.data(), 0, graph.pinned.bytes());
    runtime().launch(graph.graph, side());
    runtime().wait(runtime().current_stream(), graph.copies_done);
    runtime().record(copied, runtime().current_stream());
    runtime().synchronize(copied);
    EXPECT_EQ(reinterpret_cast<const float*>(graph.pinned.data())[1023], value + 1);
  }
}

TEST_P(ExternalEventContract, ItReleasesTheMainStreamBeforeTheCopy) {
  const auto pool = runtime().create_pool();
  const auto input = filled(1, on_gpu() ? std::int64_t{64} << 20 : 1024);
  const auto graph = capture_copying(pool, input);
  const auto released = runtime().create_event();
  settle();
  runtime().launch(graph.graph, side());
  runtime().wait(runtime().current_stream(), graph.done);
  runtime().record(released, runtime().current_stream());
  runtime().synchronize(released);
  if (copies_are_late()) {
    EXPECT_FALSE(side().query()) << "the copy was waited for";
  }
  runtime().synchronize(side());
  EXPECT_TRUE(side().query());
}

TEST_P(ExternalEventContract, AGraphCanWaitForOne) {
  const auto pool = runtime().create_pool();
  const auto gate = runtime().create_external_event();
  const auto input = filled(1);
  at::Tensor output;
  settle();
  Graph graph = captured(pool, [&] {
    runtime().wait(capture(), gate);
    output = at::add(input, 1);
  });
  const auto stream = runtime().current_stream();
  for (const float value : {5.0F, 7.0F}) {
    delay(stream);
    input.fill_(value);
    runtime().record(gate, stream);
    runtime().launch(graph, side());
    EXPECT_TRUE(all_equal(output, value + 1));
  }
}

// What a wait inside a graph binds to: what recorded the event last when the graph was launched.
TEST_P(ExternalEventContract, AWaitInAGraphIsForTheLaunchBeforeItsOwn) {
  const auto pool = runtime().create_pool();
  const auto ready = runtime().create_external_event();
  const auto input = filled(1);
  const auto order = runtime().create_event();
  at::Tensor middle;
  at::Tensor output;
  settle();
  const Graph first = captured(pool, [&] {
    middle = at::add(input, 1);
    runtime().record(ready, capture());
  });
  const Graph second = captured(pool, [&] {
    runtime().wait(capture(), ready);
    output = at::mul(middle, 2);
  });
  for (const float value : {3.0F, 5.0F, 7.0F}) {
    input.fill_(value);
    runtime().record(order, runtime().current_stream());
    runtime().wait(side(), order);
    for (int launches = 0; launches < 2; ++launches) {  // the latest of them counts
      delay(side());
      runtime().launch(first, side());
    }
    runtime().launch(second, copies());
    runtime().synchronize(copies());
    if (on_gpu()) {
      EXPECT_TRUE(side().query()) << "it waited for an earlier launch";
    }
    EXPECT_TRUE(all_equal(output, 2 * (value + 1)));
  }
}

TEST_P(ExternalEventContract, AWaitInAGraphIsNotForALaterRecord) {
  const auto pool = runtime().create_pool();
  const auto ready = runtime().create_external_event();
  const auto input = filled(1);
  at::Tensor output;
  settle();
  const Graph waiting = captured(pool, [&] {
    runtime().wait(capture(), ready);
    output = at::mul(input, 2);
  });
  runtime().record(ready, side());
  for (int i = 0; i < 3; ++i) {
    runtime().launch(waiting, copies());
    delay(side());
    delay(side());
    runtime().record(ready, side());
    runtime().synchronize(copies());
    if (on_gpu()) {
      EXPECT_FALSE(side().query()) << "it waited for the record behind its launch";
    }
    runtime().synchronize(side());
  }
  EXPECT_TRUE(all_equal(output, 2));
}

class NodeContract : public ExternalEventContract {};

std::vector<std::uint32_t> of_kind(const std::vector<GraphNode>& nodes, GraphNode::Kind kind) {
  std::vector<std::uint32_t> found;
  for (std::uint32_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].kind == kind) {
      found.push_back(i);
    }
  }
  return found;
}

bool descends(const std::vector<GraphNode>& nodes, std::uint32_t node, std::uint32_t ancestor) {
  return std::any_of(nodes[node].predecessors.begin(), nodes[node].predecessors.end(),
                     [&](std::uint32_t before) { return before == ancestor || descends(nodes, before, ancestor); });
}

TEST_P(NodeContract, AreListedWithKindsEventsAndPredecessors) {
  const auto pool = runtime().create_pool();
  const auto input = filled(1);
  const auto graph = capture_copying(pool, input);
  const auto nodes = runtime().nodes(graph.graph);
  const auto kernels = of_kind(nodes, GraphNode::Kind::kernel);
  const auto records = of_kind(nodes, GraphNode::Kind::event_record);
  const auto out = of_kind(nodes, GraphNode::Kind::copy_to_host);
  ASSERT_EQ(kernels.size(), 1U);
  ASSERT_EQ(out.size(), 1U);
  ASSERT_EQ(records.size(), 2U) << "ordinary events leave edges, external ones leave nodes";
  EXPECT_TRUE(of_kind(nodes, GraphNode::Kind::copy_to_device).empty());
  const bool done_first = nodes[records[0]].event == graph.done.native();
  const auto done = records[done_first ? 0 : 1];
  const auto copies_done = records[done_first ? 1 : 0];
  EXPECT_EQ(nodes[done].event, graph.done.native());
  EXPECT_EQ(nodes[copies_done].event, graph.copies_done.native());
  EXPECT_TRUE(descends(nodes, done, kernels[0]));
  EXPECT_TRUE(descends(nodes, out[0], kernels[0]));
  EXPECT_TRUE(descends(nodes, copies_done, out[0]));
  EXPECT_FALSE(descends(nodes, done, out[0]));
}

TEST_P(NodeContract, AReloadIsACopyToTheDevice) {
  const auto pool = runtime().create_pool();
  const auto pinned = runtime().allocate_pinned(4096);
  const auto gate = runtime().create_external_event();
  const auto target = filled(0);
  settle();
  Graph graph = captured(pool, [&] {
    runtime().wait(capture(), gate);
    runtime().copy_to_device(target.mutable_data_ptr(), pinned.data(), 4096, capture());
  });
  const auto nodes = runtime().nodes(graph);
  ASSERT_EQ(nodes.size(), 2U);
  const auto waits = of_kind(nodes, GraphNode::Kind::event_wait);
  const auto in = of_kind(nodes, GraphNode::Kind::copy_to_device);
  ASSERT_EQ(waits.size(), 1U);
  ASSERT_EQ(in.size(), 1U);
  EXPECT_EQ(nodes[waits[0]].event, gate.native());
  EXPECT_TRUE(descends(nodes, in[0], waits[0]));
}

SIDESTREAM_ON_EVERY_BACKEND(GraphContract);
SIDESTREAM_ON_EVERY_BACKEND(ExternalEventContract);
SIDESTREAM_ON_EVERY_BACKEND(NodeContract);

}  // namespace
}  // namespace sidestream::contract
