#pragma once
#include <cstddef>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/intrusive_ptr.h>

#include "sim/device/allocator.h"
#include "sim/device/device.h"
#include "sim/device/memory_image.h"
#include "sim/torch/generator.h"

namespace sidestream::sim {

/// Indices of nodes of one capture or graph.
using NodeSet = std::vector<std::uint32_t>;

/// A node of a graph: work and the nodes that it runs after.
struct CapturedWork {
  std::shared_ptr<const Work> work;
  NodeSet after;
  c10::intrusive_ptr<EventState> event;  ///< the external event of a record or wait node
};

/// Undoes what a capture does to memory: operators compute while they are captured, but no code may see the results.
///
/// Note [Captures compute]
/// ~~~~~~~~~~~~~~~~~~~~~~~
/// A capture saves what it overwrites outside of its pool, and the whole content of its pool. At its end it puts both back and poisons
/// what it allocated. It must do so because a CPU kernel cannot be recorded without running.
///
/// What captures computed is kept with the pool until the next launch of a graph of the pool. It is in memory while a later capture of any
/// pool of its thread runs, because that capture must compute on sane numbers. An example is a backward that writes to the indices that its
/// forward saved. After the end of the forward's capture, that memory holds poison, or old results of graphs that share the pool.
///
/// Memory that a capture allocates holds zeros during the capture. Copies beside the graphs fill that memory at each replay, for example
/// with indices that were saved and offloaded. In a capture no copy fills it, and zeros are in range.
class CaptureMemory {
 public:
  CaptureMemory(CachingAllocator& memory, Pool& pool);
  void preserve(std::byte* begin, std::size_t bytes);
  /// Puts memory back. What was computed stays with the pool for the captures to come.
  void finish();

 private:
  CachingAllocator& memory_;
  Pool& pool_;
  std::vector<MemoryImage> pool_before_;
  std::vector<MemoryImage> outside_before_;
};

/// A capture in progress, over all streams that joined it.
class Capture {
 public:
  Capture(std::uint64_t number, c10::StreamId origin, CachingAllocator& memory, Pool& pool,
          c10::ArrayRef<at::Generator> generators);
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  /// Adds a node after `last`, which then is that node alone.
  void add(NodeSet& last, std::shared_ptr<const Work> work, c10::intrusive_ptr<EventState> event = {});
  /// True if every node, except poisons, is an ancestor of `last`: no forked stream is left unjoined.
  [[nodiscard]] bool joined(const NodeSet& last) const;
  /// True for the generators that launches of its graph move on.
  [[nodiscard]] bool knows(const at::Generator& generator) const noexcept;
  /// Puts its generators back where they stood when it began.
  void put_draws_back() const;

  const std::uint64_t number;
  const c10::StreamId origin;
  const std::thread::id thread;
  Pool& pool;
  std::vector<c10::StreamId> streams;
  std::vector<CapturedWork> nodes;
  std::size_t listed = 0;  ///< of them: those that a driver would list
  bool invalidated = false;
  std::string reason;  ///< why, once invalidated
  CaptureMemory memory;

 private:
  struct Stood {
    at::Generator generator;
    GeneratorState state;
  };
  std::vector<Stood> stood_;  ///< the default generator's first
};

/// Adds to `set` what of `more` is missing.
void merge(NodeSet& set, const NodeSet& more);

}  // namespace sidestream::sim
