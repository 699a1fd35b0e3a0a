#pragma once
#include <atomic>
#include <cstdint>
#include <memory>
#include <vector>

#include <ATen/record_function.h>

#include "runtime/forwarding_runtime.h"

namespace sidestream::gpu {

/// Clock cycles that a stream is held up before each of its works of one kind; 0: not at all.
struct Spins {
  std::int64_t to_host = 0;    ///< copies to the host
  std::int64_t to_device = 0;  ///< copies to the device
  std::int64_t compute = 0;    ///< every operator, in graphs as well
  std::int64_t launch = 0;     ///< launches of graphs
};

/// Holds streams up by kernels that spin, so that what lacks a wait is overtaken. Captured copies and operators get theirs as
/// nodes of the graph. The host is not held up: it runs ahead.
///
/// A copy may be late without anyone's compute being late: the kernels before captured copies are no compute of the layer, and
/// `nodes` shows them as empty. Threads: as Runtime.
class SpinningRuntime final : public ForwardingRuntime {
 public:
  SpinningRuntime(std::shared_ptr<Runtime> cuda, Spins spins);
  ~SpinningRuntime() override;

  void copy_to_host(void* pinned, const void* device, std::size_t bytes, c10::Stream stream) override;
  void copy_to_device(void* device, const void* pinned, std::size_t bytes, c10::Stream stream) override;
  void launch(const Graph& graph, c10::Stream stream) override;
  [[nodiscard]] std::vector<GraphNode> nodes(const Graph& graph) const override;

  /// Spins so far, those captured counted once.
  [[nodiscard]] std::int64_t count() const noexcept { return count_.load(); }

 private:
  void spin(std::int64_t cycles, c10::Stream stream);
  [[nodiscard]] bool spins_before(GraphNode::Kind copy) const noexcept;

  Spins spins_;
  std::atomic<std::int64_t> count_{0};
  at::CallbackHandle before_operators_ = at::INVALID_CALLBACK_HANDLE;
};

}  // namespace sidestream::gpu
