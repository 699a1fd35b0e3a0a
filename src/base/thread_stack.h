#pragma once
#include <atomic>

#include "base/block_pool.h"

namespace sidestream {

/// What is in force on a thread, innermost first. Entries end in any order and on any thread: what is in force is the latest that
/// has not ended. `Tag` tells stacks of one type apart.
/// Threads: `top` and the making of an entry are the thread's own; an entry may end on another.
template <class T, class Tag = T>
class ThreadStack {
  struct Node : Pooled {
    Node(T* of, Node* below) noexcept : value(of), before(below) {}
    T* value;
    Node* before;
    std::atomic<bool> ended{false};
  };

 public:
  /// `value` is in force on the calling thread while the entry lives. Null: what is below is hidden. `pool`: where the entry's part
  /// of the stack lies; null for the heap.
  class [[nodiscard]] Entry {
   public:
    explicit Entry(T* value, BlockPool* pool = nullptr) : home_(&top_), node_(new (pool) Node(value, live_top())) {
      top_ = node_;
    }
    Entry(const Entry&) = delete;
    Entry& operator=(const Entry&) = delete;
    ~Entry() {
      node_->ended.store(true, std::memory_order_release);
      if (home_ == &top_) {
        (void)live_top();
      }
    }

   private:
    Node** home_;  ///< tells threads apart
    Node* node_;   ///< the stack's, from its end on
  };

  /// Null where nothing is in force.
  [[nodiscard]] static T* top() noexcept {
    Node* const node = top_;
    if (node == nullptr) {
      return nullptr;
    }
    if (node->ended.load(std::memory_order_acquire)) {
      Node* const live = live_top();
      return live == nullptr ? nullptr : live->value;
    }
    return node->value;
  }

 private:
  /// Drops what has ended.
  static Node* live_top() noexcept {
    while (top_ != nullptr && top_->ended.load(std::memory_order_acquire)) {
      const Node* const ended = top_;
      top_ = top_->before;
      delete ended;
    }
    return top_;
  }

  static inline thread_local constinit Node* top_ = nullptr;
};

}  // namespace sidestream
