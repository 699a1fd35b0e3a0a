#pragma once
#include <cstddef>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace sidestream {

class GraphSequence;

/// The calls of one engine whose weight gradients are delayed, in the order of their backwards.
/// Threads: `add` any; the other functions the step's.
class DelayedWeights {
 public:
  /// The backward of `call` has run.
  void add(std::weak_ptr<GraphSequence> sequence, std::size_t call);
  /// Computes those of the first call that `accepts(sequence, call)`. False if there is none.
  /// Throws: as GraphSequence::backward_weights; the call stays delayed if nothing was queued.
  template <class Accepts>
  bool compute_next(const Accepts& accepts) {
    for (std::size_t i = 0;; ++i) {
      std::shared_ptr<GraphSequence> sequence;  // is freed outside of the lock: its end takes other locks
      std::size_t call = 0;
      {
        const std::lock_guard lock(mutex_);
        if (i >= entries_.size()) {
          return false;
        }
        sequence = entries_[i].sequence.lock();
        call = entries_[i].call;
      }
      if (sequence != nullptr && accepts(*sequence, call)) {
        compute(*sequence, call);
        return true;
      }
    }
  }
  /// Computes all.
  void compute_all() {
    while (compute_next([](const GraphSequence&, std::size_t) { return true; })) {
    }
  }
  /// They will not be computed: their captures may replay again. Returns the name of the first of these calls; empty if there is none.
  std::string drop_all() noexcept;

 private:
  struct Entry {
    std::weak_ptr<GraphSequence> sequence;
    std::size_t call;
  };
  void compute(GraphSequence& sequence, std::size_t call);

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace sidestream
