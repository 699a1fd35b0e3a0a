#pragma once
#include <cstdint>
#include <deque>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <c10/util/intrusive_ptr.h>

#include "observe/operator_observer.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// A generator, and the state that it had when this object was made.
struct GeneratorState {
  explicit GeneratorState(at::Generator of);
  /// Gives the generator that state.
  void put_back() const;

  at::Generator generator;
  at::Tensor state;
};

/// Lets a generator draw from a separate sequence until the end. The generator then has the state that it had before, so the draws of a
/// warm-up do not count. The next guard of the same generator continues the sequence.
///
/// Another thread's operator may draw meanwhile, if it began before HeldDraws could stop it. Its numbers come from the separate
/// sequence, so no number comes twice. A seed that is set meanwhile is never the separate sequence's seed: its numbers would come twice.
///
/// Graphs that are replayed meanwhile draw from the state that the generator had at their capture. That state is put back too.
/// Needs the device's CaptureTurn.  Threads: ends on the thread it began on.
class [[nodiscard]] RngStateGuard {
 public:
  explicit RngStateGuard(at::Generator generator);
  RngStateGuard(const RngStateGuard&) = delete;
  RngStateGuard& operator=(const RngStateGuard&) = delete;
  ~RngStateGuard();

  /// True if the generator was seeded since this guard began, or since take_seed.
  [[nodiscard]] bool is_seeded() const { return generator_.current_seed() != own_seed_; }
  /// Another thread set the seed: at the end the generator starts from that seed. The separate sequence gets a new seed.
  void take_seed();
  /// The call set the seed: at the end the generator has its state of before.
  void forget_seed() noexcept { taken_.reset(); }

 private:
  at::Generator generator_;
  at::Generator shared_;  ///< the state object that the generator had; graphs share it
  at::Tensor before_;     ///< its value
  std::uint64_t own_seed_;
  std::optional<std::uint64_t> taken_;
};

/// Puts back what a warm-up, a capture or a verification changes. A caller first says what to hold; at its end the sandbox puts that
/// back, and nothing else. If a step on the way throws, all that was held so far is put back.
///
/// Version counters stay as the run left them, because autograd may still read what the run saved.
/// Ordering: copies on the current stream.  Capture: illegal, except for gradients, hooks and accumulators.
/// Threads: one, which also ends it; watch_writes also covers the backward passes that this thread starts.
class [[nodiscard]] Sandbox {
 public:
  Sandbox();
  Sandbox(const Sandbox&) = delete;
  Sandbox& operator=(const Sandbox&) = delete;
  /// As put_back, but a failure is written to stderr.
  ~Sandbox();

  /// Removes `.grad` from `leaves` until the end. So any `.grad` that code finds there meanwhile is new.
  void hide_gradients(const std::vector<at::Tensor>& leaves);
  /// Removes tensor hooks from `leaves` until the end. autograd::grad would run them: a capture would record their work, and then the
  /// hooks would run again after each replay.
  void hide_hooks(const std::vector<at::Tensor>& leaves);
  /// Removes hooks, and the nodes that accumulate gradients. A node that an eager step made would tie a capture to that step's stream.
  /// Do not use this between a forward and its backward: the backward finds its leaves by these nodes.
  void hide_hooks_and_accumulators(const std::vector<at::Tensor>& leaves);

  /// Copies the bytes of `storage`, unless they were copied before. Call it before anything writes them.
  void keep_bytes(const c10::Storage& storage);
  /// Copies the bytes of `buffers`, and notes their storages: a run may give a buffer another storage. Undefined tensors are skipped.
  /// watch_writes does not replace this: an operator whose schema is wrong may write a buffer.
  void keep_buffers(const std::vector<at::Tensor>& buffers);
  /// From here on the bytes of any tensor are copied before the first operator that writes them, unless an operator made the tensor
  /// meanwhile.
  void watch_writes();
  /// Throws: the error that prevented a copy of watch_writes, if there was one.
  void check() const;

  /// Keeps the generator's state, unless the sandbox has one of that generator.
  void keep_state(GeneratorState state);
  /// Until the end each generator draws from a separate sequence: see RngStateGuard.
  void draw_apart(const std::vector<at::Generator>& generators);
  /// In the order of draw_apart.
  [[nodiscard]] std::deque<RngStateGuard>& draws() noexcept { return draws_; }

  /// Puts everything back now. The sandbox then holds nothing.
  /// Throws: as a copy. Leaves and generators are put back even then.
  void put_back();

 private:
  struct Hooks;
  /// Copies of storages, made before something writes the storages. A dead storage is forgotten with its copy. Version counters do not
  /// change.
  class WrittenStorages {
   public:
    /// Copies `storage`, unless it was copied before. Call it before anything writes the storage.
    void keep(const c10::Storage& storage);
    /// The run itself made the storage: there is nothing to put back.
    void forget(const c10::StorageImpl* storage) { kept_.erase(storage); }
    /// Frees the copies of dead storages.
    void forget_dead();
    /// Gives each storage its bytes back, in the memory that the storage has now: a held output may have been given other memory.
    /// Throws: as a copy.
    void put_back();

   private:
    /// The weak reference prevents that a new storage gets the address of a dead one.
    using Kept = std::pair<c10::weak_intrusive_ptr<c10::StorageImpl>, at::Tensor>;
    std::unordered_map<const c10::StorageImpl*, Kept> kept_;
  };

  void before(const OperatorAccess& access);
  void after(const OperatorAccess& access);
  void hide(const at::Tensor& leaf, bool accumulator);

  std::vector<std::pair<at::Tensor, at::Tensor>> gradients_;  ///< leaf, and its `.grad`
  std::vector<Hooks> hooks_;
  std::vector<std::pair<at::Tensor, at::Tensor>> buffers_;  ///< buffer, and a tensor over its storage
  WrittenStorages written_;
  WeakStorageSet made_;       ///< by operators, since watch_writes
  bool temporaries_ = false;  ///< `written_` may hold storages of one kernel only
  std::vector<GeneratorState> states_;
  std::deque<RngStateGuard> draws_;
  std::optional<OperatorObserverGuard> observer_;
};

}  // namespace sidestream
