// What is known of captured graphs: where each node comes from, what may not be in one, and how they are drawn.
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include <sys/stat.h>
#include <unistd.h>

#include <ATen/Functions.h>
#include <gtest/gtest.h>

#include "call_fixture.h"
#include "cli/scratch_folder.h"
#include "expect_throws.h"
#include "graphs/capture/graph_check.h"
#include "graphs/engine/engine_access.h"
#include "runtime/forwarding_runtime.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"
#include "unit/graphs/graphed_step_fixture.h"

namespace sidestream::testing_model {
namespace {

/// Shows the first kernel of each graph as another node than it is.
class DisguisedNodes final : public ForwardingRuntime {
 public:
  using ForwardingRuntime::ForwardingRuntime;
  using Disguise = std::function<void(GraphNode&)>;

  /// None: all are shown as they are.
  void disguise(Disguise disguise) { disguise_ = std::move(disguise); }

  std::vector<GraphNode> nodes(const Graph& graph) const override {
    std::vector<GraphNode> nodes = inner().nodes(graph);
    for (GraphNode& node : nodes) {
      if (disguise_ && node.kind == GraphNode::Kind::kernel) {
        disguise_(node);
        break;
      }
    }
    return nodes;
  }

 private:
  Disguise disguise_;
};

class GraphInspectionTest : public CallTest {
 protected:
  static const CapturedCall& call_of(const OffloadEngine& engine, std::size_t index) {
    return EngineAccess::state(engine).sequences().all().front().lock()->captured().calls[index];
  }

  std::shared_ptr<DisguisedNodes> runtime_ = std::make_shared<DisguisedNodes>(make_runtime(device_));
};

/// What the kernels of a graph are called: scope and work of each.
std::vector<std::pair<std::string, std::string>> names_of_kernels(const std::vector<GraphNode>& nodes,
                                                                  const NodeNames& names) {
  std::vector<std::pair<std::string, std::string>> of_kernels;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    if (nodes[i].kind == GraphNode::Kind::kernel) {
      of_kernels.emplace_back(names.of(i).scope, names.of(i).work);
    }
  }
  return of_kernels;
}

TEST_F(GraphInspectionTest, EveryNodeIsNamedByOperatorAndScope) {
  torch::nn::Module nothing;
  OffloadEngine engine(EngineAccess::engine(nothing, Options(device_).offload("**").min_bytes(64), runtime_));
  const auto graphed = make_graphed_callables(engine,
                                              {Callable("call",
                                                        [](const Tensors& in) {
                                                          at::Tensor h;
                                                          {
                                                            OffloadScope scope("first");
                                                            h = in[0].exp();
                                                          }
                                                          {
                                                            OffloadScope scope("second");
                                                            h = h.tanh();
                                                            OffloadScope inner("inner");
                                                            h = h.sigmoid();
                                                          }
                                                          return Tensors{h * 2};
                                                        })},
                                              {{at::ones({8, 64}, device_).requires_grad_(true)}});
  const CapturedCall& call = call_of(engine, 0);
  using Names = std::vector<std::pair<std::string, std::string>>;
  EXPECT_EQ(names_of_kernels(runtime_->nodes(call.forward.graph), call.forward.names),
            (Names{{"call.first", "aten::exp"},
                   {"call.second", "aten::tanh"},
                   {"call.second.inner", "aten::sigmoid"},
                   {"call", "aten::mul"}}));
  EXPECT_EQ(names_of_kernels(runtime_->nodes(call.backward.graph), call.backward.names),
            (Names{{"call", "MulBackward1: aten::mul"},
                   {"call.second.inner", "SigmoidBackward0: aten::sigmoid_backward"},
                   {"call.second", "TanhBackward0: aten::tanh_backward"},
                   {"call.first", "ExpBackward0: aten::mul"}}));
}

TEST_F(GraphInspectionTest, EveryScopeOfAModelIsFoundInBothGraphs) {
  OffloadEngine engine(EngineAccess::engine(model_, options(), runtime_));
  expect_plain(engine, 0, 2);
  for (std::size_t i = 0; i < 4; ++i) {
    const CapturedCall& call = call_of(engine, i);
    for (const bool backward : {false, true}) {
      std::set<std::string> scopes;
      for (const auto& [scope, work] :
           names_of_kernels(runtime_->nodes(backward ? call.backward.graph : call.forward.graph),
                            backward ? call.backward.names : call.forward.names)) {
        scopes.insert(scope);
        EXPECT_FALSE(work.empty()) << "a kernel in " << scope;
        EXPECT_EQ(work.find("Backward") != std::string::npos, backward) << work;
      }
      for (const char* name : {"qkv", "core_attn", "proj", "fc1"}) {
        EXPECT_EQ(scopes.count("blocks." + std::to_string(i) + "." + name), 1U)
            << name << (backward ? ", backward" : "");
      }
    }
  }
}

struct Refused {
  const char* name;
  const char* message;
  DisguisedNodes::Disguise disguise;
};

class RefusedNodeTest : public GraphInspectionTest, public testing::WithParamInterface<Refused> {};

TEST_P(RefusedNodeTest, IsRefusedByNameAndTheModelTrainsOn) {
  OffloadEngine engine(EngineAccess::engine(model_, options(), runtime_));
  expect_plain(engine, 0, 1);
  runtime_->disguise(GetParam().disguise);
  const std::string message = message_of<CaptureError>([&] { (void)engine.step(); });
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "graphed call \"blocks.0\", forward: the captured graph holds a", message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, GetParam().message, message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, ", of aten::", message);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, ", in \"blocks.0", message);
  expect_same_step(model_, nullptr, plain_, 1, [](BlockModel& model) { model.loss_of(1).backward(); });
  runtime_->disguise({});
  expect_plain(engine, 2, 3);
  EXPECT_EQ(engine.report().replays, 8);
}

const std::byte kSomewhere[64] = {};

INSTANTIATE_TEST_SUITE_P(Nodes, RefusedNodeTest,
                         testing::Values(Refused{"host_function", "host function",
                                                 [](GraphNode& node) { node.kind = GraphNode::Kind::host; }},
                                         Refused{"from_pageable", "pageable memory",
                                                 [](GraphNode& node) {
                                                   node.kind = GraphNode::Kind::copy_to_device;
                                                   node.source = kSomewhere;
                                                   node.bytes = sizeof kSomewhere;
                                                   node.source_memory = GraphNode::Memory::pageable;
                                                 }},
                                         Refused{"to_pageable", "pageable memory",
                                                 [](GraphNode& node) {
                                                   node.kind = GraphNode::Kind::copy_to_host;
                                                   node.destination = kSomewhere;
                                                   node.bytes = sizeof kSomewhere;
                                                   node.destination_memory = GraphNode::Memory::pageable;
                                                 }},
                                         Refused{"from_pinned_of_others", "the graph does not own",
                                                 [](GraphNode& node) {
                                                   node.kind = GraphNode::Kind::copy_to_device;
                                                   node.source = kSomewhere;
                                                   node.bytes = sizeof kSomewhere;
                                                   node.source_memory = GraphNode::Memory::pinned;
                                                 }},
                                         Refused{"to_pinned_of_others", "the graph does not own",
                                                 [](GraphNode& node) {
                                                   node.kind = GraphNode::Kind::copy_to_host;
                                                   node.destination = kSomewhere;
                                                   node.bytes = sizeof kSomewhere;
                                                   node.destination_memory = GraphNode::Memory::pinned;
                                                 }}),
                         [](const auto& info) { return info.param.name; });

TEST_F(GraphInspectionTest, CopiesBesideAGraphLieInItsLeases) {
  OffloadEngine engine(EngineAccess::engine(model_, options(), runtime_));
  expect_plain(engine, 0, 2);
  auto& copies = const_cast<CapturedCopies&>(call_of(engine, 0).copies.captured);
  ASSERT_FALSE(copies.empty());
  EXPECT_THROWS(CaptureError, "has its device memory outside of the storage",
                check_copy_ends(copies, Direction::backward, "a graph"));  // which the pool has again
  CapturedCopy& copy = copies.copies.back();
  SavedStorage& saved = *copies.storages.back();
  const auto largest = std::max_element(copies.copies.begin(), copies.copies.end(),
                                        [](const auto& a, const auto& b) { return a.bytes < b.bytes; });
  const at::Tensor roomy =
      at::empty({static_cast<std::int64_t>(largest->bytes)}, c10::TensorOptions(at::kByte).device(device_));
  for (std::size_t i = 0; i < copies.copies.size(); ++i) {
    copies.copies[i].target = roomy.mutable_data_ptr();
    copies.storages[i]->device = roomy.storage();
  }
  check_copy_ends(copies, Direction::backward, "a graph");
  copy.host += 1;
  EXPECT_THROWS(CaptureError, "outside of a pinned slot that lives as long",
                check_copy_ends(copies, Direction::backward, "a graph"));
  copy.host -= 1;
  HostArena::Lease given_back = std::move(saved.lease);
  EXPECT_THROWS(CaptureError, "outside of a pinned slot that lives as long",
                check_copy_ends(copies, Direction::backward, "a graph"));
  saved.lease = std::move(given_back);
  check_copy_ends(copies, Direction::backward, "a graph");
}

/// Every node that an edge names is defined.
void expect_whole_drawing(const std::string& text) {
  EXPECT_EQ(text.rfind("digraph ", 0), 0U);
  std::set<std::string> defined;
  std::vector<std::string> named;
  std::istringstream lines(text);
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string first;
    std::string second;
    std::string third;
    words >> first >> second >> third;
    if (second == "->") {
      named.push_back(first);
      named.push_back(third.substr(0, third.find(';')));
    } else if (second.rfind("[", 0) == 0) {
      defined.insert(first);
    }
  }
  EXPECT_FALSE(named.empty());
  for (const std::string& node : named) {
    EXPECT_EQ(defined.count(node), 1U) << node;
  }
}

TEST_F(GraphInspectionTest, NodesOfAWholeStepAreNamedByScope) {
  WholeStepTrainer trainer(device_, {.layers = 3});
  trainer.graph(Options(device_).offload("fc1").min_bytes(1024));
  const CapturedCall& step = call_of(*trainer.engine, 0);
  const std::vector<GraphNode> nodes = runtime_->nodes(step.forward.graph);
  std::size_t left = 0;
  std::set<std::pair<std::string, GraphNode::Kind>> scopes;
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    scopes.emplace(step.forward.names.of(i).scope, nodes[i].kind);
    const bool out = nodes[i].kind == GraphNode::Kind::copy_to_host;
    if (out || nodes[i].kind == GraphNode::Kind::copy_to_device) {
      EXPECT_EQ(step.forward.names.of(i).scope, "fc1") << i;
      left += out ? nodes[i].bytes : 0;
    }
  }
  EXPECT_EQ(left, trainer.step->offloaded_bytes());
  for (const auto kind : {GraphNode::Kind::copy_to_host, GraphNode::Kind::copy_to_device, GraphNode::Kind::kernel}) {
    EXPECT_EQ(scopes.count({"fc1", kind}), 1U);
  }
  EXPECT_EQ(scopes.count({"step", GraphNode::Kind::kernel}), 1U) << "the loss";
  EXPECT_EQ(scopes.count({"act", GraphNode::Kind::kernel}), 1U);
  EXPECT_EQ(scopes.count({"", GraphNode::Kind::kernel}), 0U);
  const auto gradient = std::any_of(nodes.begin(), nodes.end(), [&](const GraphNode& node) {
    const NodeNames::Name name = step.forward.names.of(static_cast<std::size_t>(&node - nodes.data()));
    return name.scope == "fc1" && name.work.find("Backward0: aten::") != std::string_view::npos;
  });
  EXPECT_TRUE(gradient) << "autograd's nodes belong to the scope that made them";
}

TEST_F(GraphInspectionTest, EachGraphIsDrawnIntoAFileOfItsOwn) {
  const cli::ScratchFolder folder;
  OffloadEngine engine(EngineAccess::engine(model_, options(), runtime_));
  expect_plain(engine, 0, 1);
  EXPECT_TRUE(engine.write_graphs(folder.path().string()).empty()) << "nothing is captured";
  const std::string no_folder = folder.write("file", "").string();
  EXPECT_THROWS(UsageError, "for drawings of graphs cannot be written to", (void)engine.write_graphs(no_folder));
  expect_plain(engine, 1, 2);
  const std::vector<std::string> files = engine.write_graphs(folder.path().string());
  EXPECT_EQ(static_cast<std::int64_t>(files.size()), engine.report().captures);
  EXPECT_EQ(std::set<std::string>(files.begin(), files.end()).size(), files.size());
  for (const std::string& file : files) {
    const std::string text = cli::ScratchFolder::read(file);
    expect_whole_drawing(text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "record done", text);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "side stream 1 of 1", text);
  }
  const std::string forward = cli::ScratchFolder::read(folder.path() / "0_0_blocks.0_forward.dot");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "aten::", forward);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "beside the graph: to the host, group blocks.0.core_attn", forward);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, " bytes", forward);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "record ready, group blocks.0.core_attn", forward);
  const std::string backward = cli::ScratchFolder::read(folder.path() / "0_0_blocks.0_backward.dot");
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "Backward0: aten::", backward);
  EXPECT_PRED_FORMAT2(testing::IsSubstring, "beside the graph: to the device, group blocks.0.core_attn", backward);
  expect_plain(engine, 2, 3);
}

TEST_F(GraphInspectionTest, AFolderThatCannotBeWrittenIsNamed) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  EXPECT_THROWS(UsageError, "needs the name of a folder", (void)engine.write_graphs(""));
  EXPECT_THROWS(UsageError, "the folder \"/proc/none\" for drawings", (void)engine.write_graphs("/proc/none/here"));
}

TEST_F(GraphInspectionTest, ADrawingTakesThePlaceOfAnEarlierOneOrLeavesIt) {
  const cli::ScratchFolder folder;
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 2);
  const std::vector<std::string> files = engine.write_graphs(folder.path().string());
  ASSERT_FALSE(files.empty());
  const char* const first = files.front().c_str();
  const std::string earlier = folder.write("earlier", "what somebody still reads").string();
  ASSERT_EQ(unlink(first), 0);
  ASSERT_EQ(link(earlier.c_str(), first), 0);
  (void)engine.write_graphs(folder.path().string());
  expect_whole_drawing(cli::ScratchFolder::read(first));
  EXPECT_EQ(cli::ScratchFolder::read(earlier), "what somebody still reads");
  ASSERT_EQ(unlink(first), 0);
  ASSERT_EQ(mkdir(first, 0777), 0);  // no file takes its place
  EXPECT_THROWS(UsageError, "cannot be written to \"" + files.front(),
                (void)engine.write_graphs(folder.path().string()));
  ASSERT_EQ(rmdir(first), 0);
  std::size_t left = 0;
  std::error_code ignored;
  for (std::filesystem::directory_iterator entry(folder.path(), ignored), end; entry != end; entry.increment(ignored)) {
    EXPECT_NE(entry->path().extension(), ".partial") << entry->path();
    ++left;
  }
  EXPECT_EQ(left, files.size());  // "earlier" too, and not the first
}

}  // namespace
}  // namespace sidestream::testing_model
