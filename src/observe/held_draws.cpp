#include "observe/held_draws.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include "observe/operator_observer.h"
#include "runtime/capture_turn.h"

namespace sidestream {

struct HeldDraws::State {
  explicit State(c10::Device device_) : device(device_) {}
  const c10::Device device;
};

namespace {

/// Those that hold draws back, for the callback, which is a plain function.
struct Holders {
  std::mutex mutex;
  std::vector<std::shared_ptr<HeldDraws::State>> all;
};

Holders& holders() {
  static auto* const instance = new Holders();
  return *instance;
}

bool is_drawing(const at::RecordFunction& function) {
  thread_local std::unordered_map<const char*, bool> known;  // by the schema's own copy of its name
  if (const auto found = known.find(function.name()); found != known.end()) {
    return found->second;
  }
  const auto name = function.operator_name();
  const auto handle = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!handle) {
    return false;  // a range of somebody's, whose name may be gone the next moment
  }
  return known.emplace(function.name(), handle->hasTag(at::Tag::nondeterministic_seeded)).first->second;
}

bool stands_for(c10::Device given, c10::Device device) {
  return given.type() == device.type() && (!given.has_index() || given.index() == device.index());
}

bool touches_device(const c10::IValue& value, c10::Device device) {
  if (value.isTensor()) {
    return value.toTensor().defined() && stands_for(value.toTensor().device(), device);
  }
  if (value.isDevice()) {
    return stands_for(value.toDevice(), device);
  }
  if (value.isList()) {
    const auto elements = value.toListRef();
    return std::any_of(elements.begin(), elements.end(),
                       [&](const c10::IValue& element) { return touches_device(element, device); });
  }
  return false;
}

std::unique_ptr<at::ObserverContext> hold_draw(const at::RecordFunction& function) {
  if (UnobservedGuard::active() || !is_drawing(function)) {
    return nullptr;
  }
  std::vector<std::shared_ptr<HeldDraws::State>> held;
  {
    const std::lock_guard lock(holders().mutex);
    held = holders().all;
  }
  const auto inputs = function.inputs();
  for (const auto& state : held) {
    const bool touched = std::any_of(inputs.begin(), inputs.end(),
                                     [&](const c10::IValue& input) { return touches_device(input, state->device); });
    if (touched) {
      (void)CaptureTurn::let_others_finish(state->device);  // a backward pass goes on
    }
  }
  return nullptr;
}

}  // namespace

HeldDraws::HeldDraws(c10::Device device) : state_(std::make_shared<State>(device)) {
  {
    const std::lock_guard lock(holders().mutex);
    holders().all.push_back(state_);
  }
  callback_ = at::addGlobalCallback(
      at::RecordFunctionCallback(hold_draw).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
}

HeldDraws::~HeldDraws() {
  at::removeCallback(callback_);
  const std::lock_guard lock(holders().mutex);
  std::erase(holders().all, state_);
}

}  // namespace sidestream
