#include "graphs/sequence/sequence_copies.h"

#include <algorithm>

#include "base/site.h"

namespace sidestream {

SequenceCopies::SequenceCopies(std::shared_ptr<Runtime> runtime, std::shared_ptr<GroupMover> mover,
                               CapturedCalls& calls)
    : runtime_(std::move(runtime)), mover_(std::move(mover)), calls_(calls) {}

SequenceCopies::~SequenceCopies() { mover_->settle(); }

void SequenceCopies::prepare() {
  for (CapturedCall& call : calls_) {
    call.copies.left = runtime_->create_event();
    call.copies.back = runtime_->create_event();
  }
  leaving_.reserve(calls_.size());
  back_.reserve(calls_.size());
  due_.reserve(calls_.size());
  with_copies_.reserve(calls_.size());
}

// A call that is not below left in an earlier pass, whose order of graphs is over: all memory is in other hands by then.
void SequenceCopies::before_forward(std::size_t index, c10::Stream side) {
  for (const std::size_t call : leaving_) {
    if (call >= index || calls_[call].copies.released_at <= index) {
      mover_->await(side, calls_[call].copies.left);
    }
  }
  for (const Back& back : back_) {
    if (!back.awaited) {
      mover_->await(side, calls_[back.call].copies.back);
    }
  }
}

void SequenceCopies::forward_launched(std::size_t index) {
  std::erase_if(leaving_, [&](std::size_t call) { return call >= index || calls_[call].copies.released_at <= index; });
  back_.clear();
  const CapturedCopies& captured = calls_[index].copies.captured;
  if (captured.empty()) {
    return;
  }
  GroupMover::Copies copies = mover_->copies_out();
  std::size_t next = 0;
  for (const CapturedCopies::Group& group : captured.groups) {
    const Site site(Activity::offload, group.site);
    for (const ExternalEvent& ready : group.ready) {
      copies.behind(ready);
    }
    for (; next < group.end; ++next) {
      const CapturedCopy& copy = captured.copies[next];
      copies.to_host(copy.host, copy.source, copy.bytes);
    }
    if (next == captured.copies.size()) {
      copies.record(calls_[index].copies.left);
    }
  }
  copies.finish();
  leaving_.push_back(index);
}

bool SequenceCopies::may_use_targets(std::size_t graph_index, std::size_t index) const {
  return graph_index < calls_[index].copies.returns_at || graph_index > backward_index(index);
}

bool SequenceCopies::is_on_device(std::size_t index) const {
  return std::any_of(back_.begin(), back_.end(), [&](const Back& back) { return back.call == index; });
}

void SequenceCopies::find_calls_with_copies() {
  with_copies_.clear();
  for (std::size_t i = 0; i < calls_.size(); ++i) {
    if (!calls_[i].copies.captured.empty()) {
      with_copies_.push_back(i);
    }
  }
  found_ = true;
}

void SequenceCopies::bring_back_due(std::size_t index, c10::Stream side) {
  due_.clear();
  if (!found_) {
    find_calls_with_copies();
  }
  for (auto next = std::upper_bound(with_copies_.begin(), with_copies_.end(), index); next != with_copies_.begin();) {
    const std::size_t i = *--next;
    if (i < index && may_use_targets(backward_index(index), i)) {
      break;  // those below come back later still
    }
    if ((i == index || calls_[i].pending) && !is_on_device(i)) {
      due_.push_back(i);
    }
  }
  if (due_.empty()) {
    return;
  }
  GroupMover::Copies copies = mover_->copies_back();
  copies.behind(side);  // all that has used the targets' memory, and the copies out
  for (const std::size_t call : due_) {
    const Site site(Activity::reload, calls_[call].site);
    for (const CapturedCopy& copy : calls_[call].copies.captured.copies) {
      copies.to_device(copy.target, copy.host, copy.bytes);
    }
    copies.record(calls_[call].copies.back);
  }
  copies.finish();
}

void SequenceCopies::before_backward(std::size_t index, c10::Stream side) {
  const std::size_t graph_index = backward_index(index);
  for (const std::size_t call : leaving_) {
    if (calls_[call].copies.released_at <= graph_index) {
      mover_->await(side, calls_[call].copies.left);
    }
  }
  for (const Back& back : back_) {
    if (!back.awaited && may_use_targets(graph_index, back.call)) {
      mover_->await(side, calls_[back.call].copies.back);
    }
  }
  bring_back_due(index, side);
  for (const std::size_t call : due_) {
    back_.push_back({call});
    if (call == index && calls_[call].copies.returns_at < graph_index) {
      mover_->count_inline_reload();
    }
  }
  for (const Back& back : back_) {
    if (back.call == index && !back.awaited) {
      mover_->await(side, calls_[index].copies.back);
    }
  }
}

void SequenceCopies::backward_launched(std::size_t index) {
  const std::size_t graph_index = backward_index(index);
  std::erase_if(leaving_, [&](std::size_t call) { return calls_[call].copies.released_at <= graph_index; });
  std::erase_if(back_, [&](const Back& back) { return graph_index < calls_[back.call].copies.returns_at; });
  for (Back& back : back_) {
    back.awaited = back.awaited || back.call == index || may_use_targets(graph_index, back.call);
  }
}

void SequenceCopies::join(c10::Stream stream) {
  for (const std::size_t call : leaving_) {
    runtime_->wait(stream, calls_[call].copies.left);
  }
  for (const Back& back : back_) {
    if (!back.awaited) {
      runtime_->wait(stream, calls_[back.call].copies.back);
    }
  }
}

void SequenceCopies::reset(std::size_t index) {
  const auto is_it = [&](const Back& back) { return back.call == index; };
  if (std::erase(leaving_, index) + std::erase_if(back_, is_it) > 0) {
    mover_->settle();
  }
  calls_[index].copies = {};
  found_ = false;
}

}  // namespace sidestream
