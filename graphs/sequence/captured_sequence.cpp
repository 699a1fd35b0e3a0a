#include "graphs/sequence/captured_sequence.h"

#include <algorithm>
#include <utility>

#include <c10/util/irange.h>

#include "graphs/sequence/graph_resources.h"

namespace sidestream {
namespace {

/// The memory for the captures of a sequence.
std::shared_ptr<GraphMemory> memory_for(const GraphResources& resources, const GraphOptions& options) {
  if (resources.memory != nullptr) {
    return resources.memory;
  }
  return options.pool() != nullptr ? GraphMemory::of(*options.pool(), resources.runtime->device())
                                   : std::make_shared<GraphMemory>(GraphMemory::Use::own);
}

FactsChange with_watched(FactsChange modules, const CapturedCall& call) noexcept {
  TensorFacts::add_changes(call.reads.watched, modules);
  return modules;
}

}  // namespace

CapturedSequence::CapturedSequence(const GraphResources& resources, const GraphOptions& given, SequenceOrder steps)
    : arena(resources.arena),
      options(given),
      memory(memory_for(resources, given)),
      pool(memory->pool(resources.runtime)),
      order(std::move(steps)) {}

bool CapturedSequence::released() const {
  return std::all_of(calls.begin(), calls.end(), [](const CapturedCall& call) { return call.replay.released; });
}

FactsChange CapturedSequence::change(std::size_t index) const noexcept {
  return with_watched(calls[index].reads.modules.change(), calls[index]);
}

FactsChange CapturedSequence::change_of_all(std::size_t index) const noexcept {
  return with_watched(calls[index].reads.modules.change_of_all(), calls[index]);
}

FactsChange CapturedSequence::change() const noexcept {
  FactsChange all;
  const torch::nn::Module* model = nullptr;  // of the plain functions, whose replays look at few of its modules
  for (const auto i : c10::irange(calls.size())) {
    const ModuleFacts& modules = calls[i].reads.modules;
    if (modules.attends() && modules.root() != model) {
      model = modules.root();
      all |= modules.members_change();
    }
    all |= change(i);
  }
  return all;
}

FactsChange CapturedSequence::change_before_pass() const noexcept {
  FactsChange all;
  const torch::nn::Module* model = nullptr;  // as in change()
  for (const auto i : c10::irange(calls.size())) {
    const CapturedCall& call = calls[i];
    if (call.replay.released) {
      continue;
    }
    FactsChange of_call = change(i);
    if (call.reads.modules.attends() && call.reads.modules.root() != model) {
      model = call.reads.modules.root();
      of_call |= call.reads.modules.members_change();
    }
    if (of_call.layout) {
      continue;
    }
    of_call.training = of_call.options = false;
    if (call.placed_by_hooks) {
      of_call.relocated = of_call.identity = false;
    }
    all |= of_call;
  }
  return all;
}

std::string CapturedSequence::difference(std::size_t index) const {
  const CapturedCall& call = calls[index];
  std::string text = call.reads.modules.difference();
  for (const TensorFacts& watched : call.reads.watched) {
    if (const std::string what = watched.difference(); text.empty() && !what.empty()) {
      text = "a tensor that it reads " + what;
    }
  }
  return text;
}

}  // namespace sidestream
