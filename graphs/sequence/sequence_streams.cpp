#include "graphs/sequence/sequence_streams.h"

#include <algorithm>
#include <exception>
#include <utility>

#include <c10/util/irange.h>

namespace sidestream {
namespace {

constexpr std::int64_t kSideStreams = 1;  // if the options name no number

}  // namespace

SequenceStreams::SequenceStreams(std::shared_ptr<Runtime> runtime, std::shared_ptr<EagerOffload> eager,
                                 const GraphOptions& options)
    : runtime_(std::move(runtime)),
      eager_(std::move(eager)),
      draw_order_(DrawOrder::of(runtime_->device())),
      fork_(runtime_->create_event()),
      whole_stream_(runtime_->create_event()),
      waits_for_stream_(options.cuda_graph_stream() && !options.cuda_graph_event()) {
  if (options.cuda_graph_stream()) {
    sides_.push_back(*options.cuda_graph_stream());
    return;
  }
  for ([[maybe_unused]] const auto k : c10::irange(options.side_streams().value_or(kSideStreams))) {
    owned_.push_back(runtime_->create_stream());
    sides_.push_back(owned_.back());
  }
}

c10::Stream SequenceStreams::side(const ReplayOptions& target, std::size_t number) {
  const auto& given = target.stream();
  if (!given) {
    return sides_[number % sides_.size()];
  }
  if (std::find(given_.begin(), given_.end(), *given) == given_.end()) {
    given_.push_back(*given);
  }
  return *given;
}

void SequenceStreams::fork(c10::Stream side) {
  runtime_->record(fork_, runtime_->current_stream());
  runtime_->wait(side, fork_);
}

void SequenceStreams::order(c10::Stream earlier, c10::Stream later) {
  if (earlier != later) {
    runtime_->record(fork_, earlier);
    runtime_->wait(later, fork_);
  }
}

std::unique_lock<std::mutex> SequenceStreams::lock_to_launch(const Graph& graph,
                                                             std::unique_lock<std::recursive_mutex>& sequence) const {
  if (graph && runtime_->draws(graph)) {
    return draw_order_.lock_with(sequence);
  }
  sequence.lock();
  return {};
}

void SequenceStreams::launch(const Graph& graph, c10::Stream side, const ExternalEvent& done, const GraphEvent* event,
                             const std::unique_lock<std::mutex>& drawing) {
  const auto launch_it = [&] {
    runtime_->launch(graph, side);
    ++launches_;  // whatever fails from here on, the graph runs
  };
  if (drawing.owns_lock()) {
    draw_order_.launch(*runtime_, side, launch_it);
  } else {
    launch_it();
  }
  eager_->graph_launched();
  if (event != nullptr) {
    runtime_->record(GraphEventState::event_of(*event), side);
  }
  const c10::Stream main = runtime_->current_stream();
  called_on_ = main;
  if (waits_for_stream_) {
    runtime_->record(whole_stream_, side);
    runtime_->wait(main, whole_stream_);
  } else {
    runtime_->wait(main, done);
  }
}

void SequenceStreams::follow_latest_call() {
  if (called_on_) {
    order(*called_on_, runtime_->current_stream());
  }
}

void SequenceStreams::synchronize() {
  for (const std::vector<c10::Stream>* const streams : {&sides_, &given_}) {
    for (const c10::Stream stream : *streams) {
      runtime_->synchronize(stream);
    }
  }
}

void SequenceStreams::settle(c10::Stream side) noexcept {
  try {
    runtime_->synchronize(side);
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
}

std::uint64_t SequenceStreams::take_launches() noexcept { return std::exchange(launches_, 0); }

std::string SequenceStreams::in_words(std::size_t number) const {
  if (owned_.empty()) {
    return "the stream that the options name";
  }
  return "side stream " + std::to_string(number % sides_.size() + 1) + " of " + std::to_string(sides_.size());
}

GraphEvent::GraphEvent(c10::Device device) : state_(std::make_unique<GraphEventState>(make_runtime(device))) {}

GraphEvent::~GraphEvent() = default;

void GraphEvent::wait(c10::Stream stream) const { state_->wait(stream); }

}  // namespace sidestream
