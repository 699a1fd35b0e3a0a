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
    std::unique_lock lock(mutex_);
    for (std::size_t i = 0; i < entries_.size(); ++i) {
      const Entry entry = entries_[i];
      if (const auto sequence = entry.sequence.lock(); sequence != nullptr && accepts(*sequence, entry.call)) {
        lock.unlock();
        compute(*sequence, entry);
        return true;
      }
    }
    return false;
  }
  /// Computes all. True if there were any.
  bool compute_all() {
    bool any = false;
    while (compute_next([](const GraphSequence&, std::size_t) { return true; })) {
      any = true;
    }
    return any;
  }
  /// They will not be computed: their captures may replay again. Returns the name of the first of these calls; empty if there is none.
  std::string drop_all() noexcept;

 private:
  struct Entry {
    std::weak_ptr<GraphSequence> sequence;
    std::size_t call;
  };
  void compute(GraphSequence& sequence, const Entry& entry);

  std::mutex mutex_;
  std::vector<Entry> entries_;
};

}  // namespace sidestream
