#include "graphs/replay/chain_copies.h"

#include <exception>

#include <c10/util/irange.h>

#include "base/site.h"

namespace sidestream {

ChainCopies::ChainCopies(std::shared_ptr<Runtime> runtime, std::vector<Layer>& layers)
    : runtime_(std::move(runtime)),
      layers_(layers),
      to_host_(runtime_->create_stream()),
      to_device_(runtime_->create_stream()),
      fork_(runtime_->create_event()) {}

ChainCopies::~ChainCopies() {
  settle(to_host_);
  settle(to_device_);
}

void ChainCopies::prepare() {
  for (Layer& layer : layers_) {
    layer.copies.left = runtime_->create_event();
    layer.copies.back = runtime_->create_event();
  }
}

void ChainCopies::settle(const OwnedStream& copies) noexcept {
  try {
    runtime_->synchronize(copies);
  } catch (const std::exception&) {  // the device has failed: nothing runs any more
  }
}

void ChainCopies::wait(c10::Stream side, const Event& event) {
  runtime_->wait(side, event);
  ++counts_.waits;
}

// A layer that is not below left in an earlier pass, whose order of graphs is over: all memory is in other hands by then.
void ChainCopies::before_forward(std::size_t index, c10::Stream side) {
  for (const auto i : c10::irange(layers_.size())) {
    const LayerCopies& copies = layers_[i].copies;
    if (copies.leaving && (i >= index || copies.released_at <= index)) {
      wait(side, copies.left);
    }
    if (copies.returning) {
      wait(side, copies.back);
    }
  }
}

void ChainCopies::forward_launched(std::size_t index) {
  for (const auto i : c10::irange(layers_.size())) {
    LayerCopies& copies = layers_[i].copies;
    copies.leaving = copies.leaving && i < index && copies.released_at > index;
    copies.returning = copies.on_device = false;
  }
  LayerCopies& copies = layers_[index].copies;
  const CapturedCopies& captured = copies.captured;
  if (captured.empty()) {
    return;
  }
  try {
    std::size_t next = 0;
    for (const CapturedCopies::Group& group : captured.groups) {
      const Site site(Activity::offload, group.site);
      for (const ExternalEvent& ready : group.ready) {
        runtime_->wait(to_host_, ready);
      }
      for (; next < group.end; ++next) {
        const CapturedCopy& copy = captured.copies[next];
        runtime_->copy_to_host(copy.host, copy.source, copy.bytes, to_host_);
      }
      if (next == captured.copies.size()) {
        runtime_->record(copies.left, to_host_);
      }
    }
  } catch (...) {
    settle(to_host_);
    throw;
  }
  copies.leaving = true;
  counts_.offloaded_bytes += captured.bytes;
}

bool ChainCopies::may_use_targets(std::size_t place, std::size_t index) const {
  return place < layers_[index].copies.returns_at || place > place_of_backward(index);
}

bool ChainCopies::is_due(std::size_t index, std::size_t backward) const {
  const LayerCopies& copies = layers_[index].copies;
  return !copies.captured.empty() && !copies.on_device &&
         (index == backward || (layers_[index].pending && !may_use_targets(place_of_backward(backward), index)));
}

void ChainCopies::bring_back(std::size_t index) {
  const LayerCopies& copies = layers_[index].copies;
  const Site site(Activity::reload, layers_[index].site);
  for (const CapturedCopy& copy : copies.captured.copies) {
    runtime_->copy_to_device(copy.target, copy.host, copy.bytes, to_device_);
  }
  runtime_->record(copies.back, to_device_);
}

void ChainCopies::before_backward(std::size_t index, c10::Stream side) {
  const std::size_t place = place_of_backward(index);
  for (const auto i : c10::irange(layers_.size())) {
    const LayerCopies& copies = layers_[i].copies;
    if (copies.leaving && copies.released_at <= place) {
      wait(side, copies.left);
    }
    if (copies.returning && may_use_targets(place, i)) {
      wait(side, copies.back);
    }
  }
  std::size_t lowest = index + 1;
  try {
    for (std::size_t i = index + 1; i-- > 0;) {
      if (!is_due(i, index)) {
        continue;
      }
      if (lowest > index) {  // the first: behind all that has used the targets' memory, and behind the copies out
        runtime_->record(fork_, side);
        runtime_->wait(to_device_, fork_);
      }
      bring_back(i);
      lowest = i;
    }
  } catch (...) {
    settle(to_device_);
    throw;
  }
  for (std::size_t i = index + 1; i-- > lowest;) {
    if (is_due(i, index)) {
      LayerCopies& copies = layers_[i].copies;
      copies.on_device = copies.returning = true;
      counts_.reloaded_bytes += copies.captured.bytes;
      counts_.inline_reloads += i == index && copies.returns_at < place ? 1 : 0;
    }
  }
  if (layers_[index].copies.returning) {
    wait(side, layers_[index].copies.back);
  }
}

void ChainCopies::backward_launched(std::size_t index) {
  const std::size_t place = place_of_backward(index);
  for (const auto i : c10::irange(layers_.size())) {
    LayerCopies& copies = layers_[i].copies;
    copies.leaving = copies.leaving && copies.released_at > place;
    copies.returning = copies.returning && i != index && !may_use_targets(place, i);
    copies.on_device = copies.on_device && place >= copies.returns_at;
  }
}

void ChainCopies::join(c10::Stream stream) {
  for (const Layer& layer : layers_) {
    if (layer.copies.leaving) {
      runtime_->wait(stream, layer.copies.left);
    }
    if (layer.copies.returning) {
      runtime_->wait(stream, layer.copies.back);
    }
  }
}

void ChainCopies::reset(std::size_t index) {
  LayerCopies& copies = layers_[index].copies;
  if (copies.leaving || copies.returning) {
    settle(to_host_);
    settle(to_device_);
  }
  copies = {};
}

}  // namespace sidestream
