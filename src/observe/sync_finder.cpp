#include "observe/sync_finder.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

#include "observe/call_stack.h"
#include "observe/sync_kinds.h"
#include "runtime/backend.h"
#include "runtime/debug_info_kinds.h"
#include "runtime/host_waits.h"

namespace sidestream {
namespace {

constexpr std::size_t kMostFindings = 100;
constexpr std::size_t kMostFrames = 24;

/// The operators that the calling thread is in.
class Operators {
 public:
  /// `name`: null for what LibTorch records beside operators, a backward's node for example. True for the outermost one.
  bool begin(const char* name) {
    names_.push_back(name);
    if (name == nullptr || depth_++ > 0) {
      return false;
    }
    outermost_ = name;
    waited_ = false;
    return true;
  }
  /// True for the outermost one.
  bool end() {
    if (names_.empty()) {
      return false;
    }
    const char* const name = names_.back();
    names_.pop_back();
    return name != nullptr && --depth_ == 0;
  }
  void clear() {
    names_.clear();
    depth_ = 0;
  }
  [[nodiscard]] bool any() const { return depth_ > 0; }
  [[nodiscard]] const char* outermost() const { return outermost_; }
  [[nodiscard]] const char* innermost() const {
    return *std::find_if(names_.rbegin(), names_.rend(), [](const char* name) { return name != nullptr; });
  }
  /// True for the first time in the outermost one.
  bool waits() { return !std::exchange(waited_, true); }

 private:
  std::vector<const char*> names_;
  std::size_t depth_ = 0;  ///< without nulls
  const char* outermost_ = nullptr;
  bool waited_ = false;  ///< the outermost one has been counted
};

thread_local Operators operators;
thread_local bool hearing = false;  ///< what the finder itself does is not found

struct Key {
  HostWait kind;
  std::string_view operation;
  const std::string* call;
  const std::string* scope;
  CallStack stack;

  friend bool operator<(const Key& a, const Key& b) {
    return std::tie(a.kind, a.operation, a.call, a.scope, a.stack) <
           std::tie(b.kind, b.operation, b.call, b.scope, b.stack);
  }
};

struct Finding {
  std::string call;  ///< the names may go before the report is read
  std::string scope;
  std::string node;
  std::int64_t count = 0;
};

/// How many finders there are: the listener is set while there is one.
class Listening {
 public:
  static void add(const host_waits::Listener* listener) {
    const std::lock_guard lock(mutex());
    if (finders()++ == 0) {
      host_waits::set_listener(listener);
    }
  }
  static void remove() {
    const std::lock_guard lock(mutex());
    if (--finders() == 0) {
      host_waits::set_listener(nullptr);
    }
  }

 private:
  static std::mutex& mutex() {
    static auto* const instance = new std::mutex();
    return *instance;
  }
  static int& finders() {
    static int count = 0;
    return count;
  }
};

}  // namespace

struct SyncFinder::State {
  c10::DeviceType type = c10::DeviceType::CPU;
  Place place;
  std::function<void(OperatorEdge)> passed;
  const Backend* backend = nullptr;
  std::string shortcoming;  ///< what the backend cannot tell
  std::atomic<std::int64_t> unsettled{0};

  mutable std::mutex mutex;
  std::map<Key, Finding> findings;
  std::int64_t found = 0;
  std::int64_t unlisted = 0;
};

/// The entry in a thread's chain: a step, or a pause, for which `state` is null. See Note [How the observer reaches other threads].
struct SyncFinder::Link final : c10::DebugInfoBase {
  std::shared_ptr<State> state;
  std::atomic<bool> steady{false};
  std::thread::id thread = std::this_thread::get_id();
  std::shared_ptr<Link> outer;  ///< finds again when this one has ended and could not be taken out
  std::atomic<bool> active{true};

  static std::shared_ptr<Link> current() {
    if (c10::ThreadLocalDebugInfo::get(DebugInfoKinds::sync_finder) == nullptr) {
      return nullptr;
    }
    auto* const link = static_cast<Link*>(c10::ThreadLocalDebugInfo::get(DebugInfoKinds::sync_finder));
    std::shared_ptr<Link> found = link->self.lock();
    while (found != nullptr && !found->active.load(std::memory_order_acquire)) {
      found = found->outer;
    }
    return found;
  }
  std::weak_ptr<Link> self;

  static std::shared_ptr<Link> make(std::shared_ptr<State> state) {
    auto link = std::make_shared<Link>();
    link->self = link;
    link->outer = current();
    link->state = std::move(state);
    return link;
  }
};

/// The functions that LibTorch and the backends call.
struct SyncFinderHears {
  static bool listens() noexcept {
    if (hearing) {
      return false;
    }
    const auto link = SyncFinder::Link::current();
    return link != nullptr && link->state != nullptr;
  }
  static void wait(c10::DeviceType type, HostWait told, const char* call) noexcept {
    if (hearing) {
      return;
    }
    hearing = true;
    try {
      if (const auto link = SyncFinder::Link::current(); link != nullptr && link->state != nullptr) {
        count(*link, type, told, call);
      }
    } catch (...) {  // a finding less; the program goes on
    }
    hearing = false;
  }

  static std::unique_ptr<at::ObserverContext> begin(const at::RecordFunction& function) {
    if (operators.begin(function.operator_name().has_value() ? function.name() : nullptr)) {
      tell_edge(OperatorEdge::begins);
    }
    return nullptr;
  }
  static void end(const at::RecordFunction& /*function*/, at::ObserverContext* /*context*/) {
    if (operators.end()) {
      tell_edge(OperatorEdge::ends);
    }
  }

 private:
  using OperatorEdge = SyncFinder::OperatorEdge;

  static void tell_edge(OperatorEdge edge) {
    if (const auto link = SyncFinder::Link::current(); link != nullptr && link->state != nullptr &&
                                                       link->state->passed &&
                                                       link->thread == std::this_thread::get_id()) {
      const std::lock_guard lock(link->state->mutex);
      if (link->active.load(std::memory_order_acquire)) {
        link->state->passed(edge);
      }
    }
  }

  static void count(const SyncFinder::Link& link, c10::DeviceType type, HostWait told, const char* call) {
    SyncFinder::State& state = *link.state;
    const bool asks_memory = told == HostWait::allocation || told == HostWait::pinning;
    // Libraries below operators wait for the device when they initialise: cuBLAS for each thread's handle.
    const bool may_set_up = told == HostWait::device && operators.any();
    if (type != state.type || ((asks_memory || may_set_up) && !link.steady.load(std::memory_order_relaxed))) {
      return;
    }
    // However often an operator waits while it runs, it is one thing to mend; the memory that it asks for is another.
    if (!asks_memory && operators.any() && !operators.waits()) {
      return;
    }
    const char* const outside = told == HostWait::data_dependent ? call : "";
    const char* const innermost = operators.any() ? operators.innermost() : outside;
    const CallStack stack = CallStack::here(1);
    const std::lock_guard lock(state.mutex);
    if (!link.active.load(std::memory_order_acquire)) {
      return;
    }
    WaitPlace place = state.place ? state.place() : WaitPlace();
    const Key key{sync_kind(told, innermost), operators.any() ? operators.outermost() : call, place.call, place.scope,
                  stack};
    ++state.found;
    auto at = state.findings.find(key);
    if (at == state.findings.end()) {
      if (state.findings.size() >= kMostFindings) {
        ++state.unlisted;
        return;
      }
      at = state.findings
               .emplace(key, Finding{place.call != nullptr ? *place.call : "",
                                     place.scope != nullptr ? *place.scope : "", std::move(place.node)})
               .first;
    }
    ++at->second.count;
  }
};

SyncFinder::SyncFinder(c10::DeviceType type, Place place, std::function<void(OperatorEdge)> passed)
    : state_(std::make_shared<State>()) {
  state_->type = type;
  state_->place = std::move(place);
  state_->passed = std::move(passed);
  (void)CallStack::here(0);  // the first one of a process loads what unwinds
  state_->backend = find_backend(type);
  if (state_->backend != nullptr && state_->backend->tell_waits != nullptr) {
    state_->shortcoming = state_->backend->tell_waits();
  }
  static constexpr host_waits::Listener kListener{&SyncFinderHears::wait, &SyncFinderHears::listens};
  Listening::add(&kListener);
}

SyncFinder::~SyncFinder() {
  Listening::remove();
  if (state_->backend != nullptr && state_->backend->leave_waits != nullptr) {
    state_->backend->leave_waits();
  }
}

void SyncFinder::unsettle() {
  for (std::shared_ptr<Link> link = Link::current(); link != nullptr; link = link->outer) {
    if (link->state != nullptr) {
      link->steady.store(false, std::memory_order_relaxed);
      link->state->unsettled.fetch_add(1, std::memory_order_relaxed);
    }
  }
}

std::int64_t SyncFinder::unsettled() const { return state_->unsettled.load(std::memory_order_relaxed); }

SyncFinder::Step::Step(SyncFinder& finder, bool steady) : link_(Link::make(finder.state_)) {
  link_->steady = steady;
  if (link_->outer == nullptr) {
    callback_ = at::addThreadLocalCallback(
        at::RecordFunctionCallback(&SyncFinderHears::begin, &SyncFinderHears::end).scopes({at::RecordScope::FUNCTION}));
  }
  info_ = std::make_unique<c10::DebugInfoGuard>(DebugInfoKinds::sync_finder, link_);
}

SyncFinder::Step::~Step() {
  {
    const std::lock_guard lock(link_->state->mutex);
    link_->active.store(false, std::memory_order_release);
  }
  if (std::this_thread::get_id() != thread_) {
    (void)info_.release();  // it would put that thread's chain into this one
    return;
  }
  info_.reset();
  if (callback_ != at::INVALID_CALLBACK_HANDLE) {
    at::removeCallback(callback_);
    operators.clear();
  }
}

SyncFinder::Pause::Pause() {
  if (c10::ThreadLocalDebugInfo::get(DebugInfoKinds::sync_finder) != nullptr) {
    info_.emplace(DebugInfoKinds::sync_finder, Link::make(nullptr));
  }
}

void SyncFinder::add_to(Report& report) const {
  const std::lock_guard lock(state_->mutex);
  for (const auto& [key, finding] : state_->findings) {
    report.syncs.push_back({name_of(key.kind), std::string(key.operation), finding.call, finding.scope, finding.node,
                            key.stack.frames(kMostFrames), finding.count, remedy_for(key.kind)});
  }
  std::stable_sort(report.syncs.begin(), report.syncs.end(),
                   [](const SyncFinding& a, const SyncFinding& b) { return a.count > b.count; });
  report.syncs_found = state_->found;
  report.syncs_unlisted = state_->unlisted;
  if (!state_->shortcoming.empty()) {
    report.notes.push_back("find_syncs: " + state_->shortcoming);
  }
}

}  // namespace sidestream
