#include "graphs/outputs/output_liveness.h"

#include <algorithm>

#include <c10/util/irange.h>

namespace sidestream {
namespace {

using Kind = StaticOutput::Kind;

/// What a recorder's handles have of a storage.
struct Saved {
  bool offloaded = false;
  bool on_device = false;
};

Saved saved_of(const SavedTensorRecorder& recorder, const c10::Storage& storage) {
  Saved saved;
  for (const SavedIdentity& identity : recorder.identities()) {
    const auto alive = identity.saved.lock();
    if (alive == nullptr || identity.storage._unsafe_get_target() != storage.unsafeGetStorageImpl()) {
      continue;
    }
    (alive->place == SavedStorage::Place::device ? saved.on_device : saved.offloaded) = true;
  }
  return saved;
}

}  // namespace

OutputLiveness::OutputLiveness(const std::vector<CallSpec>& specs, const SequenceOrder& order,
                               const StorageHolders& holders, bool keeps_graph)
    : order_(order), holders_(holders), keeps_graph_(keeps_graph) {
  for (const CallSpec& spec : specs) {
    Call& call = calls_.emplace_back();
    call.outputs_released = spec.outputs_released;
    for (const CallInput& input : spec.inputs) {
      call.inputs.push_back(input.from);
    }
  }
}

std::optional<Link> OutputLiveness::storage_of(Link link) const {
  while (link.call < lives_.size()) {
    const StaticOutput& output = forwards_[link.call].outputs[link.index];
    const std::vector<std::optional<Link>>& inputs = calls_[link.call].inputs;
    if (output.kind == Kind::made) {
      return Link{link.call, output.of};
    }
    if (output.kind == Kind::earlier_output) {
      link.index = output.of;
    } else if ((output.kind == Kind::input || output.kind == Kind::view_of_input) && inputs[output.of]) {
      link = *inputs[output.of];
    } else {
      return std::nullopt;
    }
  }
  return std::nullopt;  // of a call to come, which reads what it passes on
}

bool OutputLiveness::is_read_from(std::size_t graph_index, const Link& storage) const {
  for (std::size_t i = order_.first_run_from(graph_index); i < calls_.size(); ++i) {
    for (const std::optional<Link>& from : calls_[i].inputs) {
      const std::optional<Link> read = from ? storage_of(*from) : std::nullopt;
      if (read && read->call == storage.call && read->index == storage.index) {
        return true;
      }
    }
  }
  return false;
}

void OutputLiveness::learn(const Link& output, const Findings& findings) {
  const std::size_t index = forwards_.size() - 1;
  const c10::Storage& storage = forwards_[output.call].storages[output.index].captured();
  const Saved saved = saved_of(findings.recorder, storage);
  std::size_t until = order_.forward_index(index) + 1;
  if (saved.offloaded) {
    until = std::max(until, findings.released_at);
  }
  if (saved.on_device || (findings.saved.contains(storage) && !saved.offloaded) || holders_.others_hold(storage)) {
    until = findings.delays ? order_.weights_index(index) : order_.backward_index(index) + 1;
  }
  Life& life = lives_[output.call][output.index];
  life.needed_until = std::max(life.needed_until, until);
}

void OutputLiveness::forward_captured(const CapturedForward& forward, const Findings& findings) {
  const std::size_t index = forwards_.size();
  const Call& call = calls_[index];
  forwards_.push_back(forward);
  std::vector<Life>& own = lives_.emplace_back(forward.storages.size());
  for (const Link& output : findings.kept) {
    const bool given = output.index < forwards_[output.call].outputs.size();
    if (const std::optional<Link> kept = given ? storage_of(output) : std::nullopt; kept) {
      lives_[kept->call][kept->index].kept = true;
    }
  }
  for (const StaticOutput& output : forward.outputs) {
    if (output.kind == Kind::made) {
      own[output.of].released = true;
    }
  }
  for (const auto i : c10::irange(forward.outputs.size())) {
    const bool released = i < call.outputs_released.size() && call.outputs_released[i];
    if (forward.outputs[i].kind == Kind::made && !released) {
      own[forward.outputs[i].of].released = false;
    }
  }
  std::vector<Link> met;
  for (const auto i : c10::irange(own.size())) {
    met.push_back({index, i});
  }
  for (const std::optional<Link>& from : call.inputs) {
    const std::optional<Link> read = from ? storage_of(*from) : std::nullopt;
    if (read) {
      lives_[read->call][read->index].read = true;
      met.push_back(*read);
    }
  }
  for (const Link& output : met) {
    learn(output, findings);
  }
}

std::optional<std::size_t> OutputLiveness::end_of(const Life& life, std::size_t call) const {
  if (life.kept || life.ended) {
    return std::nullopt;
  }
  if (life.read) {
    return life.needed_until;
  }
  std::size_t until = life.needed_until;
  if (!life.released) {  // the caller holds it until its backward has gone through all calls before it
    const std::size_t next = order_.first_run_from(order_.backward_index(call));
    until = next < order_.runs() ? std::max(until, order_.forward_index(next)) : order_.size();
  }
  // If no forward follows, no graph would gain by its memory.
  return until <= order_.forward_index(calls_.size() - 1) ? std::optional(until) : std::nullopt;
}

std::vector<Link> OutputLiveness::ended_before(std::size_t graph_index) {
  std::vector<Link> ended;
  for (const auto call : c10::irange(keeps_graph_ ? 0 : lives_.size())) {
    for (const auto i : c10::irange(lives_[call].size())) {
      Life& life = lives_[call][i];
      const std::optional<std::size_t> end = end_of(life, call);
      if (end && *end <= graph_index && !is_read_from(graph_index, {call, i})) {
        life.ended = true;
        ended.push_back({call, i});
      }
    }
  }
  return ended;
}

}  // namespace sidestream
