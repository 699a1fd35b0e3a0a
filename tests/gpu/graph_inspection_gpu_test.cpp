// The nodes of graphs as a driver lists them: named by operator and scope, and refused where they touch the host.
#include <cstddef>
#include <functional>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include "expect_throws.h"
#include "gpu/gpu_blocks.h"
#include "graphs/engine/engine_access.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/scope.h"

namespace sidestream::gpu {
namespace {

class GpuGraphInspectionTest : public GpuBlocks {
 protected:
  void SetUp() override {
    GpuBlocks::SetUp();
    if (!IsSkipped()) {
      engine_.emplace(nothing_, Options(device_).offload("**").min_bytes(64));
    }
  }
  /// Captures a call that exponentiates, queues `queue` and takes the tangent.
  std::vector<GraphedCallable> graph(const std::function<void(cudaStream_t)>& queue) {
    const auto body = [queue, device = device_.index()](const Tensors& in) {
      at::Tensor h;
      {
        OffloadScope scope("first");
        h = in[0].exp();
        queue(c10::cuda::getCurrentCUDAStream(device).stream());
      }
      OffloadScope scope("second");
      return Tensors{h.tanh()};
    };
    return make_graphed_callables(*engine_, {Callable("call", owning(body))},
                                  {{at::ones({64, 64}, options()).requires_grad_(true)}});
  }
  void expect_refused(const char* text, const std::function<void(cudaStream_t)>& queue) {
    const std::string message = testing_model::message_of<CaptureError>([&] { (void)graph(queue); });
    EXPECT_PRED_FORMAT2(testing::IsSubstring, text, message);
    EXPECT_PRED_FORMAT2(testing::IsSubstring, "in \"call.first\"", message);
    const auto graphed = graph([](cudaStream_t) {});
    const at::Tensor x = at::full({64, 64}, 0.5, options()).requires_grad_(true);
    EXPECT_TRUE(at::equal(graphed[0]({x})[0], x.exp().tanh())) << "a capture that failed leaves nothing";
  }

  torch::nn::Module nothing_;
  std::optional<OffloadEngine> engine_;
};

TEST_F(GpuGraphInspectionTest, EveryKernelIsNamedByOperatorAndScope) {
  const auto graphed = graph([](cudaStream_t) {});
  const CapturedCall& call = EngineAccess::state(*engine_).sequences().all().front().lock()->captured().calls[0];
  for (const bool backward : {false, true}) {
    const std::vector<GraphNode> nodes = runtime().nodes(backward ? call.backward.graph : call.forward.graph);
    const NodeNames& names = backward ? call.backward.names : call.forward.names;
    std::set<std::string> scopes;
    for (std::size_t i = 0; i < nodes.size(); ++i) {
      if (nodes[i].kind == GraphNode::Kind::kernel) {
        scopes.emplace(names.of(i).scope);
        EXPECT_FALSE(names.of(i).work.empty()) << nodes[i].name;
        EXPECT_NE(nodes[i].name.find("kernel"), std::string::npos) << nodes[i].name;
      }
    }
    EXPECT_EQ(scopes, (std::set<std::string>{"call.first", "call.second"})) << (backward ? "backward" : "forward");
  }
}

TEST_F(GpuGraphInspectionTest, AFunctionOfTheHostIsRefused) {
  expect_refused("host function", [](cudaStream_t stream) {
    (void)cudaLaunchHostFunc(
        stream, [](void*) {}, nullptr);
  });
}

TEST_F(GpuGraphInspectionTest, PinnedMemoryThatIsNotTheGraphsIsRefused) {
  const PinnedMemory pinned = runtime().allocate_pinned(4096);
  const at::Tensor memory = at::zeros({4096}, options().dtype(at::kByte));
  expect_refused("the graph does not own", [&](cudaStream_t stream) {
    (void)cudaMemcpyAsync(memory.mutable_data_ptr(), pinned.data(), 4096, cudaMemcpyHostToDevice, stream);
  });
}

}  // namespace
}  // namespace sidestream::gpu
