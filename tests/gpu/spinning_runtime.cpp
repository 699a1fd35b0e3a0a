#include "gpu/spinning_runtime.h"

#include <utility>

#include <ATen/cuda/Sleep.h>

namespace sidestream::gpu {
namespace {

// What a callback of LibTorch, which carries no state, needs: one SpinningRuntime with operators lives at a time.
std::atomic<std::int64_t> operator_cycles{0};
std::atomic<std::int64_t>* operator_count = nullptr;

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& /*function*/) {
  at::cuda::sleep(operator_cycles.load());
  operator_count->fetch_add(1);
  return nullptr;
}

}  // namespace

SpinningRuntime::SpinningRuntime(std::shared_ptr<Runtime> cuda, Spins spins)
    : ForwardingRuntime(std::move(cuda)), spins_(spins) {
  at::cuda::sleep(1);  // its module is loaded outside of captures
  inner().synchronize_device();
  if (spins_.compute > 0) {
    operator_cycles = spins_.compute;
    operator_count = &count_;
    before_operators_ =
        at::addGlobalCallback(at::RecordFunctionCallback(&before_operator).scopes({at::RecordScope::FUNCTION}));
  }
}

SpinningRuntime::~SpinningRuntime() {
  if (before_operators_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(before_operators_);
  }
}

void SpinningRuntime::spin(std::int64_t cycles, c10::Stream stream) {
  if (cycles > 0) {
    const StreamGuard on_stream(inner(), stream);
    at::cuda::sleep(cycles);
    count_.fetch_add(1);
  }
}

void SpinningRuntime::copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) {
  spin(spins_.to_host, stream);
  inner().copy_to_host(pinned, device, bytes, stream);
}

void SpinningRuntime::copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) {
  spin(spins_.to_device, stream);
  inner().copy_to_device(device, pinned, bytes, stream);
}

void SpinningRuntime::launch(const Graph& graph, c10::Stream stream) {
  spin(spins_.launch, stream);
  inner().launch(graph, stream);
}

bool SpinningRuntime::spins_before(GraphNode::Kind copy) const noexcept {
  return (copy == GraphNode::Kind::copy_to_host && spins_.to_host > 0) ||
         (copy == GraphNode::Kind::copy_to_device && spins_.to_device > 0);
}

std::vector<GraphNode> SpinningRuntime::nodes(const Graph& graph) const {
  std::vector<GraphNode> nodes = inner().nodes(graph);
  for (const GraphNode& node : nodes) {
    if (!spins_before(node.kind)) {
      continue;
    }
    // The kernel that this copy was captured right behind, on its own stream, is the one issued above.
    for (const std::uint32_t before : node.predecessors) {
      if (nodes[before].kind == GraphNode::Kind::kernel) {
        nodes[before].kind = GraphNode::Kind::empty;
      }
    }
  }
  return nodes;
}

}  // namespace sidestream::gpu
