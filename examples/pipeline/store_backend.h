#pragma once
#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

namespace pipeline {

/// A c10d backend that sends the bytes of tensors through a c10d store: TCPStore, FileStore or another one.
///
/// It needs no library beside LibTorch. It is for machines without NCCL, for small tensors, and for tests. Tensors of a device are copied
/// to the host and back. A message's keys are deleted when it was received.
/// A receive that lasts longer than `limit` throws. The message names the rank that every other rank waits for: a rank that has ended, or
/// computes for too long. After `fail` all receives of all ranks throw, within a second.
/// Threads: one at a time.  Throws: c10::DistBackendError.
class StoreBackend : public c10d::Backend {
 public:
  StoreBackend(c10::intrusive_ptr<c10d::Store> store, int rank, int size, std::chrono::milliseconds limit);

  [[nodiscard]] const std::string getBackendName() const override { return "store"; }
  /// Returns when the bytes are in the store, not when they are received.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override;
  /// Returns when the tensors are filled.
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override;
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options) override;
  /// Sums in the order of the ranks, so that all ranks have the same bits.
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options) override;

  /// Ends the receives of all ranks with this reason, unless another one was given before. The rank whose process serves the store gives
  /// the others two seconds to read it. Never throws.
  void fail(const std::string& reason, bool serves_store = false) noexcept;
  /// The last call. The rank whose process serves the store waits until all other ranks have called it.
  void leave(bool serves_store);

 private:
  using Messages = std::map<std::string, std::int64_t>;  ///< how many there were, by ranks and tag

  [[nodiscard]] static std::string next_key(Messages& messages, int from, int to, int tag);
  void put(const at::Tensor& tensor, int to, int tag);
  void take(at::Tensor& tensor, int from, int tag);
  void wait_for(const std::string& key, int from);
  [[nodiscard]] bool is_there(const std::string& key);
  /// The rank at the end of the chain of ranks that wait for each other, which begins with `rank`.
  [[nodiscard]] int silent_rank(int rank);

  c10::intrusive_ptr<c10d::Store> store_;
  std::chrono::milliseconds limit_;
  Messages sent_;
  Messages received_;
};

}  // namespace pipeline
