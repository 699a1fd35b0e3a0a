#include "graphs/calls/step_chunks.h"

#include <algorithm>
#include <map>
#include <string>
#include <tuple>
#include <utility>

#include "analysis/chunk_groups.h"
#include "offload/eager_offload.h"
#include "offload/group_mover.h"
#include "sidestream/error.h"

namespace sidestream {

std::string describe(const ChunkId& id) {
  return "stage " + std::to_string(id.stage) + ", microbatch " + std::to_string(id.microbatch);
}

namespace {

using ChunkWork = PipelineStep::Kind;

ChunkId id_of(const PipelineStep& step) { return {step.stage, step.microbatch}; }

std::string describe(const PipelineStep& step) {
  const char* work = step.kind == ChunkWork::forward    ? "forward of "
                     : step.kind == ChunkWork::backward ? "backward of "
                                                        : "weight gradients of ";
  return work + describe(id_of(step));
}

/// By forward of `order`, where the chunk's `kind` of work is.
std::vector<std::size_t> places_of(const std::vector<PipelineStep>& order, ChunkWork kind) {
  std::vector<std::size_t> places;
  std::map<std::pair<std::int64_t, std::int64_t>, std::size_t> forwards;  // by stage and microbatch
  for (std::size_t i = 0; i < order.size(); ++i) {
    const std::pair chunk(order[i].stage, order[i].microbatch);
    if (order[i].kind == ChunkWork::forward) {
      forwards[chunk] = places.size();
      places.push_back(RunningChunk::never);
    } else if (order[i].kind == kind) {
      places[forwards[chunk]] = i;
    }
  }
  return places;
}

/// The chunks in a message: the first ones by name.
class NamedChunks {
 public:
  void add(const ChunkId& id) {
    constexpr std::int64_t kNamed = 8;
    if (++count_ <= kNamed) {
      text_ += (text_.empty() ? "" : "; ") + describe(id);
    } else {
      rest_ = " and " + std::to_string(count_ - kNamed) + " more";
    }
  }
  [[nodiscard]] bool empty() const noexcept { return count_ == 0; }
  [[nodiscard]] std::string text() const { return text_ + rest_; }

 private:
  std::int64_t count_ = 0;
  std::string text_;
  std::string rest_;
};

}  // namespace

void check_order(const std::vector<PipelineStep>& order, const std::string& where) {
  const auto refuse = [&](const std::string& what) { throw UsageError(where + ": the order " + what); };
  const auto key = [&](std::size_t i) { return std::tuple(order[i].stage, order[i].microbatch, order[i].kind, i); };
  std::vector<std::size_t> by_chunk(order.size());
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (order[i].stage < 0 || order[i].microbatch < 0) {
      refuse("has the " + describe(order[i]) + "; stages and microbatches are numbered from 0");
    }
    by_chunk[i] = i;
  }
  std::sort(by_chunk.begin(), by_chunk.end(), [&](std::size_t a, std::size_t b) { return key(a) < key(b); });
  for (std::size_t k = 0; k < by_chunk.size(); ++k) {
    const std::size_t at = by_chunk[k];
    const PipelineStep& step = order[at];
    const PipelineStep* const before = k == 0 ? nullptr : &order[by_chunk[k - 1]];
    const bool same_chunk = before != nullptr && id_of(*before) == id_of(step);
    if (same_chunk && before->kind == step.kind) {
      refuse("has the " + describe(step) + " twice; a step has each chunk once: remove one of them");
    }
    if (step.kind == ChunkWork::forward) {
      continue;
    }
    PipelineStep needed = step;
    needed.kind = step.kind == ChunkWork::backward ? ChunkWork::forward : ChunkWork::backward;
    if (!same_chunk || !(*before == needed)) {
      refuse("has the " + describe(step) + ", but not the " + describe(needed) + "; add it before that step");
    }
    if (by_chunk[k - 1] > at) {
      refuse("has the " + describe(step) + " before the " + describe(needed) + "; change the order of the two");
    }
  }
  const bool delays = std::any_of(order.begin(), order.end(),
                                  [](const PipelineStep& step) { return step.kind == ChunkWork::weight_gradients; });
  for (std::size_t k = 0; delays && k < by_chunk.size(); ++k) {
    PipelineStep step = order[by_chunk[k]];
    const bool last_of_chunk = k + 1 == by_chunk.size() || !(id_of(order[by_chunk[k + 1]]) == id_of(step));
    if (step.kind == ChunkWork::backward && last_of_chunk) {
      step.kind = ChunkWork::weight_gradients;
      refuse("never computes the " + describe(step) + ", but delays others; add them as a step after their backward");
    }
  }
}

void StepChunks::begin_step(const std::vector<PipelineStep>* order) {
  if (order != nullptr && *order != *order_) {
    check_order(*order, "OffloadEngine::step");
    order_ = std::make_shared<std::vector<PipelineStep>>(*order);
    backwards_ = places_of(*order_, ChunkWork::backward);
    weights_ = places_of(*order_, ChunkWork::weight_gradients);
    slots_ = slots_of_order(*order_);
    too_many_slots_.reset();
    if (!slots_.empty() && *std::max_element(slots_.begin(), slots_.end()) >= most_slots_) {
      too_many_slots_ = *std::max_element(slots_.begin(), slots_.end()) + 1;
      slots_.clear();
    }
  }
  ordered_ = order != nullptr;
  ++step_;
  next_ = 0;
  first_number_ += chunks_.size();
  chunks_.clear();
  open_.clear();
  copied_ = mover_->counts().offloaded_bytes;
}

void StepChunks::step_begun() {
  in_step_ = true;
  eager_->expect_order(ordered_ ? order_.get() : nullptr);
}

void StepChunks::tell() noexcept {
  const RunningChunk* const chunk = active();
  mover_->trace().enter_chunk(chunk == nullptr ? 0 : chunk->number);
  eager_->in_chunk(chunk == nullptr ? GroupChunk{} : GroupChunk{chunk->id.stage, chunk->number - first_number_ + 1});
}

const PipelineStep* StepChunks::next_forward() noexcept {
  const std::vector<PipelineStep>& order = *order_;
  while (next_ < order.size() && order[next_].kind != ChunkWork::forward) {
    ++next_;
  }
  return next_ < order.size() ? &order[next_] : nullptr;
}

std::uint64_t StepChunks::begin(const ChunkId& id) {
  const PipelineStep* const next = ordered_ ? next_forward() : nullptr;
  if (next == nullptr || !(id_of(*next) == id)) {
    check(id);
  }
  count_copies();
  const std::uint64_t number = first_number_ + chunks_.size();
  chunks_.push_back({id, number});
  if (ordered_ && chunks_.size() <= slots_.size()) {  // in order, the chunk's forward is the one of that number
    chunks_.back().slot = slots_[chunks_.size() - 1];
    chunks_.back().order = order_;
    chunks_.back().backward_at = backwards_[chunks_.size() - 1];
    chunks_.back().weights_at = weights_[chunks_.size() - 1];
  }
  open_.push_back(chunks_.size() - 1);
  tell();
  next_ += ordered_ ? 1 : 0;
  return number;
}

void StepChunks::check(const ChunkId& id) const {
  const auto is_it = [&](const RunningChunk& chunk) { return chunk.id == id; };
  const bool repeated = std::any_of(chunks_.begin(), chunks_.end(), is_it);
  if (!ordered_) {
    if (id.stage < 0 || id.microbatch < 0) {
      throw UsageError("OffloadEngine::chunk: got " + describe(id) + "; stages and microbatches are numbered from 0");
    }
    if (repeated) {
      throw UsageError("OffloadEngine::chunk: this step has had " + describe(id) +
                       " already; a step has each chunk once: give each microbatch its own number, and call "
                       "Chunk::resume to go on with a chunk that is open");
    }
    return;
  }
  const std::string expected =
      next_ < order_->size() ? "expected " + describe((*order_)[next_]) : "expected no further forward";
  const bool known = std::any_of(order_->begin(), order_->end(), [&](const PipelineStep& step) {
    return step.kind == ChunkWork::forward && id_of(step) == id;
  });
  throw UsageError("OffloadEngine::chunk: " + expected + "; got " + describe(id) +
                   (repeated ? ", which this step has had already"
                    : known  ? ", which comes later in the order that OffloadEngine::step was given"
                             : ", which is not in the order that OffloadEngine::step was given") +
                   "; begin chunks in that order, or give step() another order");
}

std::vector<std::size_t>::iterator StepChunks::find_open(std::uint64_t number) noexcept {
  const auto is_it = [&](std::size_t index) { return chunks_[index].number == number; };
  const auto found = std::find_if(open_.rbegin(), open_.rend(), is_it);  // most often the last one
  return found == open_.rend() ? open_.end() : found.base() - 1;
}

bool StepChunks::resume(std::uint64_t number) noexcept {
  const auto found = find_open(number);
  if (found == open_.end()) {
    return false;
  }
  count_copies();
  std::rotate(found, found + 1, open_.end());
  tell();
  return true;
}

bool StepChunks::end(std::uint64_t number) noexcept {
  const auto found = find_open(number);
  if (found == open_.end()) {
    return false;
  }
  count_copies();
  open_.erase(found);
  tell();
  return true;
}

RunningChunk& StepChunks::chunk_for_weights(const ChunkId& id) {
  const auto found =
      std::find_if(chunks_.begin(), chunks_.end(), [&](const RunningChunk& chunk) { return chunk.id == id; });
  if (found == chunks_.end()) {
    throw UsageError("OffloadEngine::backward_dw: got " + describe(id) +
                     ", which this step has not had; call it for a chunk whose backward has run");
  }
  if (find_open(found->number) != open_.end()) {
    throw UsageError("OffloadEngine::backward_dw: got " + describe(id) +
                     ", whose forward has not ended; end the chunk and run its backward first");
  }
  if (found->weights_computed) {
    throw UsageError("OffloadEngine::backward_dw: the weight gradients of " + describe(id) +
                     " are computed already; call it once for each chunk");
  }
  return *found;
}

void StepChunks::end_step() {
  NamedChunks open;
  for (const std::size_t index : open_) {
    open.add(chunks_[index].id);
  }
  NamedChunks missing;
  while (const PipelineStep* const next = ordered_ ? next_forward() : nullptr) {
    missing.add(id_of(*next));
    ++next_;
  }
  abandon_step();
  if (!open.empty()) {
    throw UsageError("a step ended while a chunk was open (" + open.text() +
                     "); end each chunk before its step, by Chunk::finish or at the end of its block");
  }
  if (!missing.empty()) {
    throw UsageError("a step ended before all chunks of its order had begun (missing: " + missing.text() +
                     "); call OffloadEngine::chunk for each of them, or give step() an order without them");
  }
}

void StepChunks::abandon_step() noexcept {
  count_copies();
  open_.clear();
  tell();
  ordered_ = false;
  in_step_ = false;
}

void StepChunks::count_copies() noexcept {
  const std::uint64_t copied = mover_->counts().offloaded_bytes;
  if (RunningChunk* const chunk = active()) {
    chunk->offloaded_bytes += copied - copied_;
  }
  copied_ = copied;
}

void StepChunks::report(std::vector<ChunkReport>& chunks) const {
  chunks.clear();
  for (const RunningChunk& chunk : chunks_) {
    chunks.push_back({chunk.id.stage, chunk.id.microbatch, static_cast<std::int64_t>(chunk.offloaded_bytes)});
  }
}

}  // namespace sidestream
