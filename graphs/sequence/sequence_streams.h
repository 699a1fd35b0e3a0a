#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Stream.h>

#include "offload/eager_offload.h"
#include "runtime/draw_order.h"
#include "runtime/runtime.h"
#include "sidestream/graph_event.h"
#include "sidestream/graph_options.h"
#include "sidestream/replay_options.h"

namespace sidestream {

/// The state that a GraphEvent owns.
class GraphEventState {
 public:
  explicit GraphEventState(std::shared_ptr<Runtime> runtime)
      : runtime_(std::move(runtime)), event_(runtime_->create_external_event()) {}

  [[nodiscard]] static const ExternalEvent& event_of(const GraphEvent& event) noexcept { return event.state_->event_; }
  [[nodiscard]] static c10::Device device_of(const GraphEvent& event) noexcept {
    return event.state_->runtime_->device();
  }
  void wait(c10::Stream stream) const { runtime_->wait(stream, event_); }

 private:
  std::shared_ptr<Runtime> runtime_;
  ExternalEvent event_;
};

/// The streams on which a sequence's graphs run, beside the stream of the caller. Launches graphs there.
///
/// Ordering: Note [Graph choreography] in graph_sequence.cpp.  Capture: illegal.  Threads: one at a time (the sequence's mutex).
class SequenceStreams {
 public:
  SequenceStreams(std::shared_ptr<Runtime> runtime, std::shared_ptr<EagerOffload> eager, const GraphOptions& options);

  /// The stream that `target` names, else the side stream with this number, counted in turn.
  [[nodiscard]] c10::Stream side(const ReplayOptions& target, std::size_t number);
  /// `side` waits for all work of the current stream.
  void fork(c10::Stream side);
  /// `later` waits for all work of `earlier`, unless they are the same.
  void order(c10::Stream earlier, c10::Stream later);
  /// Locks `sequence`, and the order of graphs that draw if `graph` is one of them. Empty if it is not.
  /// Throws: as DrawOrder::lock_with.
  [[nodiscard]] std::unique_lock<std::mutex> lock_to_launch(const Graph& graph,
                                                            std::unique_lock<std::recursive_mutex>& sequence) const;
  /// Launches `graph` on `side`. The current stream waits for `done`. `event`: the caller's of this call, or null. `drawing`: what
  /// `lock_to_launch` returned for the graph.
  void launch(const Graph& graph, c10::Stream side, const ExternalEvent& done, const GraphEvent* event,
              const std::unique_lock<std::mutex>& drawing);
  /// The current stream waits for the stream that the latest graph was called on: that stream is after the graph and its readers.
  void follow_latest_call();
  [[nodiscard]] bool launched_any() const noexcept { return called_on_.has_value(); }

  /// Blocks the host until nothing runs on any stream that graphs replay on.
  void synchronize();
  /// After a failure that followed a launch: blocks the host until nothing that was queued on `side` runs any more.
  void settle(c10::Stream side) noexcept;

  /// Recorded anew for each wait of a stream for another.
  [[nodiscard]] const Event& mark() const noexcept { return fork_; }
  /// Graphs that were launched since `take_launches`.
  [[nodiscard]] std::uint64_t launches() const noexcept { return launches_; }
  [[nodiscard]] std::uint64_t take_launches() noexcept;
  /// The side stream with this number, for people.
  [[nodiscard]] std::string in_words(std::size_t number) const;

 private:
  std::shared_ptr<Runtime> runtime_;
  std::shared_ptr<EagerOffload> eager_;
  DrawOrder& draw_order_;
  std::vector<OwnedStream> owned_;  ///< empty if the options name a stream
  std::vector<c10::Stream> sides_;
  std::vector<c10::Stream> given_;  ///< of ReplayOptions, each once
  Event fork_;
  Event whole_stream_;
  bool waits_for_stream_;                 ///< for all work of the side stream, not for the graph's done event
  std::optional<c10::Stream> called_on_;  ///< the current stream at the latest launch
  std::uint64_t launches_ = 0;
};

}  // namespace sidestream
