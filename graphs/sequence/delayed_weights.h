#pragma once
#include <atomic>
#include <cstddef>
#include <exception>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/util/FunctionRef.h>

namespace sidestream {

class GraphSequence;

/// The calls of one engine whose weight gradients are delayed, in the order of their backwards.
///
/// A call belongs to the backward() that its backward is part of. If that fails, the call is dropped: who goes on clears the gradients and
/// tries again, as in plain training. While it runs, only its own hooks can have the call computed.
/// A call's captures are kept until it is computed or dropped, also if the engine forgets them.
/// Threads: `add` any; the other functions the step's.
class DelayedWeights : public std::enable_shared_from_this<DelayedWeights> {
 public:
  using Accepts = c10::function_ref<bool(const GraphSequence& sequence, std::size_t call)>;

  /// The backward of `call` was launched, in the backward() that runs on this thread, if one does.
  void add(std::shared_ptr<GraphSequence> sequence, std::size_t call);
  /// Computes and accumulates those of the first call that `accepts`. False if there is none.
  /// Throws: as GraphSequence::replay_weights, and the call stays delayed; what hooks of the parameters throw.
  bool compute_next(Accepts accepts);
  /// The same of all calls that `accepts`. If a hook throws, the rest of them is dropped, as in a backward().
  void compute_all(Accepts accepts);
  /// They will not be computed: their captures may replay again. Calls of a backward() that runs still are kept. Returns the name of the
  /// first call; empty if there is none.
  std::string drop_ended() noexcept;
  /// The same, and calls of a backward() that runs still.
  void drop_all() noexcept;
  /// Outside of backwards: true if a backward() failed whose calls are not dropped yet. They are when autograd's thread frees it.
  [[nodiscard]] bool has_failed();
  /// The engine ends: all are dropped, and no call can be added any more.
  void close() noexcept;
  [[nodiscard]] bool closed() const noexcept { return closed_.load(); }

 private:
  class Watch;
  struct Entry {
    std::shared_ptr<GraphSequence> sequence;
    std::size_t call;
    int backward;  ///< autograd's number of the backward() that runs; kNone if it succeeded, or if there was none
  };
  struct Found {
    std::shared_ptr<GraphSequence> sequence;
    std::size_t call;
  };
  static constexpr int kNone = -1;

  [[nodiscard]] std::optional<Found> find(Accepts accepts);
  /// Returns what a hook threw; null if none did.
  [[nodiscard]] std::exception_ptr compute(const Found& found);
  void forget(const Found& found) noexcept;
  std::string drop_if(c10::function_ref<bool(const Entry&)> matches) noexcept;

  std::mutex mutex_;
  std::vector<Entry> entries_;
  std::atomic<int> watched_ = kNone;  ///< the latest backward() that has a Watch
  std::atomic<bool> closed_ = false;
};

}  // namespace sidestream
