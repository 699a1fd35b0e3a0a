#include "graphs/sequence/delayed_weights.h"

#include <algorithm>
#include <utility>

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>

#include "graphs/gradients/backward_split.h"
#include "graphs/sequence/graph_sequence.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

/// True in a backward that names inputs (autograd::grad, or backward with a list): no other leaf gets a gradient from it.
bool names_inputs() {
  const auto* wanted = torch::autograd::get_current_graph_task_exec_info();
  return wanted != nullptr && !wanted->empty();
}

}  // namespace

void GraphSequence::refuse_lost_weights(std::size_t index) const {
  if (captured_.calls[index].delays && delayed_weights_->closed() && !names_inputs()) {
    throw UsageError(captured_.describe(index) +
                     ": its weight gradients are delayed, but the engine, which computes them, is gone. They would be "
                     "lost; keep the engine until backward_dw has run");
  }
}

void GraphSequence::delay_weights(std::size_t index, OutputSet used) {
  CapturedCall& call = captured_.calls[index];
  if (call.delays && !names_inputs()) {
    delayed_weights_->add(shared_from_this(), index);
    weights_use_->idle(-copies_.for_weights_bytes());
    call.replay.used = used;
    call.replay.weights_delayed = runtime_->current_stream();
    pending_.weights_delayed(index);
  }
}

void GraphSequence::await_failed_weights(std::size_t graph_index, std::unique_lock<std::recursive_mutex>& lock) const {
  if (pending_.weights().obstacle(graph_index) && delayed_weights_->has_failed()) {
    pending_.await_weights(graph_index, lock);
  }
}

/// Is owned by a callback of a backward(). Autograd runs the callback if the backward() succeeds, and frees it in any case.
class DelayedWeights::Watch {
 public:
  Watch(std::weak_ptr<DelayedWeights> weights, int backward) : weights_(std::move(weights)), backward_(backward) {}
  Watch(const Watch&) = delete;
  Watch& operator=(const Watch&) = delete;
  ~Watch() {
    if (const auto weights = weights_.lock()) {
      weights->drop_if([this](const Entry& entry) { return entry.backward == backward_; });
    }
  }
  void succeeded() const {
    if (const auto weights = weights_.lock()) {
      const std::lock_guard lock(weights->mutex_);
      for (Entry& entry : weights->entries_) {
        entry.backward = entry.backward == backward_ ? kNone : entry.backward;
      }
    }
  }

 private:
  std::weak_ptr<DelayedWeights> weights_;
  int backward_;
};

void DelayedWeights::add(std::shared_ptr<GraphSequence> sequence, std::size_t call) {
  const int backward = torch::autograd::get_current_graph_task_id();
  if (backward != kNone && backward != watched_.load()) {
    const auto watch = std::make_shared<const Watch>(weak_from_this(), backward);
    torch::autograd::Engine::get_default_engine().queue_callback([watch] { watch->succeeded(); });
    watched_.store(backward);
  }
  const std::lock_guard lock(mutex_);
  if (!closed()) {
    entries_.push_back({std::move(sequence), call, backward});
  }
}

std::optional<DelayedWeights::Found> DelayedWeights::find(Accepts accepts) {
  const int now = torch::autograd::get_current_graph_task_id();
  for (std::size_t i = 0;; ++i) {
    Found found{};  // is freed outside of the lock: a sequence's end takes other locks
    {
      const std::lock_guard lock(mutex_);
      if (i >= entries_.size()) {
        return std::nullopt;
      }
      if (entries_[i].backward == kNone || entries_[i].backward == now) {
        found = {entries_[i].sequence, entries_[i].call};
      }
    }
    if (found.sequence != nullptr && accepts(*found.sequence, found.call)) {
      return found;
    }
  }
}

bool DelayedWeights::compute_next(Accepts accepts) {
  const std::optional<Found> found = find(accepts);
  if (found) {
    if (const std::exception_ptr error = compute(*found)) {
      std::rethrow_exception(error);
    }
  }
  return found.has_value();
}

void DelayedWeights::compute_all(Accepts accepts) {
  while (const std::optional<Found> found = find(accepts)) {
    if (const std::exception_ptr error = compute(*found)) {
      while (const std::optional<Found> rest = find(accepts)) {
        rest->sequence->settle_weights(rest->call);
        forget(*rest);
      }
      std::rethrow_exception(error);
    }
  }
}

std::exception_ptr DelayedWeights::compute(const Found& found) {
  std::exception_ptr thrown_by_hook;
  const auto compute_and_accumulate = [&] {
    LeafGradients made;
    try {
      made = found.sequence->take_weights(found.call);
    } catch (...) {
      if (!found.sequence->captured().calls[found.call].replay.weights_delayed) {  // it was reset
        forget(found);
      }
      throw;
    }
    forget(found);
    try {
      accumulate(std::move(made));
    } catch (...) {
      thrown_by_hook = std::current_exception();
    }
  };
  found.sequence->run_where_delayed(found.call, compute_and_accumulate);
  return thrown_by_hook;
}

void DelayedWeights::forget(const Found& found) noexcept {
  const std::lock_guard lock(mutex_);
  const auto is_it = [&](const Entry& entry) { return entry.call == found.call && entry.sequence == found.sequence; };
  if (const auto entry = std::find_if(entries_.begin(), entries_.end(), is_it); entry != entries_.end()) {
    entries_.erase(entry);
  }
}

std::string DelayedWeights::drop_if(c10::function_ref<bool(const Entry&)> matches) noexcept {
  std::string first;
  for (;;) {
    Entry entry;
    {
      const std::lock_guard lock(mutex_);
      const auto found = std::find_if(entries_.begin(), entries_.end(), matches);
      if (found == entries_.end()) {
        return first;
      }
      entry = std::move(*found);
      entries_.erase(found);
    }
    entry.sequence->settle_weights(entry.call);
    if (first.empty()) {
      first = entry.sequence->captured().calls[entry.call].spec.name;
    }
  }
}

std::string DelayedWeights::drop_ended() noexcept {
  return drop_if([](const Entry& entry) { return entry.backward == kNone; });
}

void DelayedWeights::drop_all() noexcept {
  (void)drop_if([](const Entry&) { return true; });
}

void DelayedWeights::close() noexcept {
  {
    const std::lock_guard lock(mutex_);
    closed_.store(true);
  }
  drop_all();
}

bool DelayedWeights::has_failed() {
  if (torch::autograd::get_current_graph_task_id() != kNone) {
    return false;
  }
  const std::lock_guard lock(mutex_);
  return std::any_of(entries_.begin(), entries_.end(), [](const Entry& entry) { return entry.backward != kNone; });
}

}  // namespace sidestream
