#pragma once
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace sidestream {

enum class Direction : std::uint8_t {
  forward,
  backward,
  weights,  ///< after the backward: gradients of delayed parameters
};

/// One graph of a sequence: of one call for one microbatch.
struct SequenceStep {
  std::size_t call = 0;
  std::size_t microbatch = 0;
  Direction direction = Direction::forward;

  friend bool operator==(const SequenceStep&, const SequenceStep&) = default;
};

/// The order in which the graphs of a sequence are captured, as a list of forwards and backwards. A graph's position in the list is its
/// *graph index*. Memory is reused along this order: what a graph frees, graphs of a higher index may use.
///
/// A call for one microbatch is a *run*: a forward and a backward. Runs are numbered in the order of their forwards. A call may have
/// several runs, and backwards may come in any order. Plain data, made once.
///
/// Weights graphs have memory of their own and no index. The order says before which graph each of them is: graphs from there on may use
/// what it reads.
class SequenceOrder {
 public:
  SequenceOrder() = default;
  /// Steps of weights may be missing: they are at the end then.
  /// Throws: UsageError if a step occurs twice, or if a run's forward or backward is missing or comes too late.
  explicit SequenceOrder(std::vector<SequenceStep> steps);

  /// Number of forwards and backwards.
  [[nodiscard]] std::size_t size() const noexcept { return steps_.size(); }
  [[nodiscard]] std::size_t runs() const noexcept { return forwards_.size(); }
  /// Forwards and backwards.
  [[nodiscard]] const std::vector<SequenceStep>& steps() const noexcept { return steps_; }
  [[nodiscard]] std::size_t run_at(std::size_t graph_index) const { return run_of_[graph_index]; }
  [[nodiscard]] bool is_backward(std::size_t graph_index) const {
    return steps_[graph_index].direction == Direction::backward;
  }
  [[nodiscard]] std::size_t forward_index(std::size_t run) const { return forwards_[run]; }
  [[nodiscard]] std::size_t backward_index(std::size_t run) const { return backwards_[run]; }
  /// The first run whose forward has `graph_index` or a higher one; runs() if there is none.
  [[nodiscard]] std::size_t first_run_from(std::size_t graph_index) const;
  /// True if a forward follows a backward: then later runs may use the memory of earlier ones.
  [[nodiscard]] bool interleaves() const;
  /// The same order without the runs that `dropped` says; the runs that are left are the calls 0, 1 and so on, each once.
  [[nodiscard]] SequenceOrder without(const std::vector<bool>& dropped) const;
  /// All runs, in the order of their backwards, and the position of a run in that list.
  [[nodiscard]] const std::vector<std::size_t>& by_backward() const noexcept { return by_backward_; }
  [[nodiscard]] std::size_t backward_rank(std::size_t run) const { return backward_rank_[run]; }
  /// Index of the first graph after the weights graph of `run`; size() if there is none.
  [[nodiscard]] std::size_t weights_index(std::size_t run) const { return weights_[run]; }
  /// All runs, in the order of their weights graphs, and the position of a run in that list.
  [[nodiscard]] const std::vector<std::size_t>& by_weights() const noexcept { return by_weights_; }
  [[nodiscard]] std::size_t weights_rank(std::size_t run) const { return weights_rank_[run]; }

 private:
  std::vector<SequenceStep> steps_;
  std::vector<std::size_t> run_of_;     // by graph index
  std::vector<std::size_t> forwards_;   // by run
  std::vector<std::size_t> backwards_;  // by run
  std::vector<std::size_t> by_backward_;
  std::vector<std::size_t> backward_rank_;  // by run
  std::vector<std::size_t> weights_;        // by run
  std::vector<std::size_t> by_weights_;
  std::vector<std::size_t> weights_rank_;  // by run
};

/// One microbatch: the forwards of `calls` calls, then their backwards in reverse. Pure.
[[nodiscard]] SequenceOrder nested_order(std::size_t calls);

/// The runs of a sequence whose saved tensors wait for their backward. Says which graphs may be launched without overwriting them: a
/// pending run allows the graphs between its forward and its backward, and the backward itself.
/// Amortised over a pass, each call takes constant time. Allocates only when it is made.
class PendingRuns {
 public:
  explicit PendingRuns(const SequenceOrder& order);
  /// The same for runs that wait for their weights graph: each allows the graphs between its backward and its weights graph.
  [[nodiscard]] static PendingRuns of_weights(const SequenceOrder& order);

  /// The forward of `run` (the backward, if it is to wait for its weights graph) is launched.
  void begin(std::size_t run);
  /// The graph that `run` waits for is launched, or will not come.
  void end(std::size_t run) noexcept;
  [[nodiscard]] bool contains(std::size_t run) const { return pending_[run]; }
  [[nodiscard]] bool empty() const noexcept { return count_ == 0; }
  /// The pending run that begins last in the order. Only if not empty.
  [[nodiscard]] std::size_t latest() const noexcept { return begins_.runs[latest_]; }
  /// The pending run that forbids a launch of the graph at `graph_index`; not set if it may be launched.
  [[nodiscard]] std::optional<std::size_t> obstacle(std::size_t graph_index) const;

 private:
  /// One graph index of each run.
  struct Indices {
    explicit Indices(std::vector<std::size_t> by_run);

    std::vector<std::size_t> of;    // by run
    std::vector<std::size_t> runs;  // in increasing order of their indices
    std::vector<std::size_t> rank;  // by run: its position there
  };

  /// A pending run allows the graphs above `begins`, up to and with `ends`.
  PendingRuns(Indices begins, Indices ends);

  Indices begins_;
  Indices ends_;
  std::vector<bool> pending_;  // by run
  std::size_t count_ = 0;
  std::size_t latest_ = 0;  // if not empty: rank of the pending run that begins last
  std::size_t due_ = 0;     // if not empty: rank of the pending run that ends first
};

}  // namespace sidestream
