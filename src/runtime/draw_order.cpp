#include "runtime/draw_order.h"

#include <cstdio>
#include <exception>

#include "runtime/each_device.h"

namespace sidestream {

DrawOrder::DrawOrder(c10::Device device)
    : device_(device), owner_(make_runtime(device)), latest_(owner_->create_event()) {}

DrawOrder& DrawOrder::of(c10::Device device) {
  return of_device<DrawOrder>(device, [device] { return new DrawOrder(device); });
}

void DrawOrder::wait(Runtime& runtime, c10::Stream stream) const {
  if (marked_) {
    runtime.wait(stream, latest_);
  }
}

void DrawOrder::mark(Runtime& runtime, c10::Stream stream) {
  runtime.record(latest_, stream);
  marked_ = true;
}

DrawOrder::Capturing::Capturing(DrawOrder& order, Runtime& runtime, c10::Stream stream)
    : order_(order), runtime_(runtime), stream_(stream) {
  const std::lock_guard lock(order_.mutex_);
  order_.wait(runtime_, stream_);
}

DrawOrder::Capturing::~Capturing() {
  try {
    const std::lock_guard lock(order_.mutex_);
    order_.mark(runtime_, stream_);
  } catch (const std::exception& error) {  // the device has failed: nothing is launched any more
    std::fprintf(stderr, "sidestream: graphs that draw random numbers could not be ordered: %s\n", error.what());
  }
}

}  // namespace sidestream
