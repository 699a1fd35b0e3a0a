#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "base/site.h"
#include "memory/host_arena.h"
#include "offload/saved_storage.h"
#include "runtime/runtime.h"

namespace sidestream {

/// The storages of one captured forward that leave the device; the graph owns them (and with them the host leases) for life.
using OffloadedStorages = std::vector<std::shared_ptr<SavedStorage>>;

/// Offloads and reloads groups inside captures: each group's D2H forks off the capture stream at its scope's end, the H2D of
/// an earlier layer's groups forks in at the start of a backward capture; both are joined before their capture ends.
///
/// Nothing waits for an event here but the forks and joins: what a copy needs from another graph is ordered by how graphs are
/// launched (see Note [Graph choreography] in graphs/replay/chain.cpp).
/// Threads: one capture at a time; `fetch` may be called on autograd's device thread meanwhile.
class CaptureOffload final : public StorageMover {
 public:
  CaptureOffload(std::shared_ptr<Runtime> runtime, std::shared_ptr<HostArena> arena, c10::Stream capture);
  ~CaptureOffload() override;

  /// What the forward capture that now begins offloads is collected in `offloaded`.
  void begin_forward(OffloadedStorages& offloaded);
  /// Joins the copies of this forward into the capture stream.
  void join_forward();
  /// Lets the sources of `offloaded` go back to the pool.
  static void release(const OffloadedStorages& offloaded);
  /// In a backward capture: allocates `offloaded` on the device and forks their copies off.
  void prefetch(const OffloadedStorages& offloaded, const SiteName& name);
  void join_prefetch();
  /// Forgets a capture that failed.
  void abandon() noexcept;

  void group_ended(Group& group) override;
  c10::Storage fetch(SavedStorage& storage) override;
  void dropped(SavedStorage& /*storage*/) noexcept override {}

 private:
  void fork(const OwnedStream& copies, c10::Stream from);
  void join(const OwnedStream& copies);

  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<HostArena> arena_;
  c10::Stream capture_;
  OwnedStream to_host_;
  OwnedStream to_device_;
  Event fork_;
  Event join_;
  OffloadedStorages* offloaded_ = nullptr;
  bool copies_to_host_ = false;
  bool copies_to_device_ = false;
};

}  // namespace sidestream
