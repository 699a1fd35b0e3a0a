#include "graphs/capture/output_liveness.h"

#include <algorithm>
#include <unordered_set>

#include <c10/util/irange.h>

#include "graphs/capture/capture_reads.h"

namespace sidestream {
namespace {

using Kind = StaticOutput::Kind;

bool is_over(const at::Tensor& tensor, const c10::Storage& storage) {
  return tensor.defined() && tensor.has_storage() &&
         tensor.storage().unsafeGetStorageImpl() == storage.unsafeGetStorageImpl();
}

/// Tensors over `storage`, and what they are views of.
std::size_t tensors_over(const c10::Storage& storage, const std::vector<at::Tensor>& among) {
  std::unordered_set<const c10::TensorImpl*> found;
  for (const at::Tensor& tensor : among) {
    if (is_over(tensor, storage)) {
      found.insert(tensor.unsafeGetTensorImpl());
      if (tensor.is_view()) {
        found.insert(tensor._base().unsafeGetTensorImpl());
      }
    }
  }
  return found.size();
}

/// What a recorder's handles hold of `storage`, by whether it is offloaded.
struct Saved {
  std::size_t offloaded = 0;
  std::size_t kept = 0;
};

Saved saved_of(const SavedTensorRecorder& recorder, const c10::Storage& storage) {
  Saved saved;
  for (const SavedIdentity& identity : recorder.identities()) {
    if (identity.storage._unsafe_get_target() != storage.unsafeGetStorageImpl()) {
      continue;
    }
    if (const auto alive = identity.saved.lock(); alive != nullptr && alive->place == SavedStorage::Place::device) {
      ++saved.kept;
    } else if (alive != nullptr) {
      ++saved.offloaded;
    }
  }
  return saved;
}

}  // namespace

std::optional<Link> OutputLiveness::storage_of(Link link) const {
  while (link.call < lives_.size()) {
    const CapturedCall& giver = calls_[link.call];
    const StaticOutput& output = giver.outputs[link.index];
    if (output.kind == Kind::made) {
      return Link{link.call, output.of};
    }
    if (output.kind == Kind::earlier_output) {
      link.index = output.of;
    } else if ((output.kind == Kind::input || output.kind == Kind::view_of_input) &&
               giver.spec.inputs[output.of].from) {
      link = *giver.spec.inputs[output.of].from;
    } else {
      return std::nullopt;
    }
  }
  return std::nullopt;  // of a call to come, which reads what it passes on
}

bool OutputLiveness::is_read_from(std::size_t graph_index, const Link& storage) const {
  for (std::size_t i = order_.first_run_from(graph_index); i < calls_.size(); ++i) {
    for (const CallInput& input : calls_[i].spec.inputs) {
      if (!input.from) {
        continue;
      }
      const std::optional<Link> read = storage_of(*input.from);
      if (read && read->call == storage.call && read->index == storage.index) {
        return true;
      }
    }
  }
  return false;
}

void OutputLiveness::learn(std::size_t index, const Link& output, const SavedStorages& saved, const Holders& holders) {
  const CapturedCall& call = calls_[index];
  const c10::Storage& storage = calls_[output.call].output_storages[output.index].captured();
  Life& life = lives_[output.call][output.index];
  const std::size_t behind_backward = order_.backward_index(index) + 1;
  const Saved by_call = saved_of(*holders.recorders[index], storage);
  std::size_t known = references_to(storage, calls_) + tensors_over(storage, holders.tensors);
  for (const SavedTensorRecorder* const recorder : holders.recorders) {
    known += saved_of(*recorder, storage).kept;
  }
  const std::size_t unknown = storage.use_count() > known ? storage.use_count() - known : 0;
  std::size_t until = order_.forward_index(index) + 1;
  if (by_call.offloaded > 0) {
    until = std::max(until, call.copies.released_at);
  }
  if (by_call.kept > 0 || (saved.contains(storage) && by_call.offloaded == 0) || unknown > life.unknown_holders) {
    until = behind_backward;
  }
  life.needed_until = std::max(life.needed_until, until);
  life.unknown_holders = unknown;
}

void OutputLiveness::forward_captured(std::size_t index, const SavedStorages& saved,
                                      const std::vector<std::size_t>& kept, const Holders& holders) {
  const CapturedCall& call = calls_[index];
  std::vector<Life>& own = lives_.emplace_back(call.output_storages.size());
  for (const std::size_t output : kept) {
    if (output < call.outputs.size() && call.outputs[output].kind == Kind::made) {
      own[call.outputs[output].of].kept = true;
    }
  }
  for (const StaticOutput& output : call.outputs) {
    if (output.kind == Kind::made) {
      own[output.of].let_go = true;
    }
  }
  for (const auto i : c10::irange(call.outputs.size())) {
    const bool let_go = i < call.spec.outputs_let_go.size() && call.spec.outputs_let_go[i];
    if (call.outputs[i].kind == Kind::made && !let_go) {
      own[call.outputs[i].of].let_go = false;
    }
  }
  std::vector<Link> met;
  for (const auto i : c10::irange(own.size())) {
    met.push_back({index, i});
  }
  for (const CallInput& input : call.spec.inputs) {
    const std::optional<Link> read = input.from ? storage_of(*input.from) : std::nullopt;
    if (read) {
      lives_[read->call][read->index].read = true;
      met.push_back(*read);
    }
  }
  for (const Link& output : met) {
    learn(index, output, saved, holders);
  }
}

bool OutputLiveness::may_end(const Life& life) const {
  // Where no call reads it and backward does, no graph would gain by its memory.
  return !life.kept && !life.ended &&
         (life.read || (life.let_go && life.needed_until <= order_.forward_index(calls_.size() - 1)));
}

std::vector<Link> OutputLiveness::ended_before(std::size_t graph_index) {
  std::vector<Link> ended;
  for (const auto call : c10::irange(keeps_graph_ ? 0 : lives_.size())) {
    for (const auto i : c10::irange(lives_[call].size())) {
      Life& life = lives_[call][i];
      if (may_end(life) && life.needed_until <= graph_index && !is_read_from(graph_index, {call, i})) {
        life.ended = true;
        ended.push_back({call, i});
      }
    }
  }
  return ended;
}

}  // namespace sidestream
