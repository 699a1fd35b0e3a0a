#include "observe/operator_observer.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <exception>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>
#include <ATen/record_function.h>
#include <c10/util/SmallVector.h>
#include <c10/util/ThreadLocalDebugInfo.h>

#include "observe/unmarked_writes.h"
#include "runtime/debug_info_kinds.h"

namespace sidestream {

thread_local constinit bool UnobservedGuard::unobserved_ = false;

namespace {

// Note [How the observer reaches other threads]
// The callback is thread-local, and its state is in the debug-info chain under a kind of the library's own. Autograd passes two kinds of
// thread-local state to the threads that run a backward pass: record-function callbacks, which are plain function pointers, and
// LibTorch's debug-info chain, which can carry an object.
//
// The state is shared, because a device thread may hold it longer than the guard.

using TensorList = c10::SmallVector<at::Tensor, 8>;

// Operators that mark an argument as written and change none of its bytes, beside those that LibTorch tags.
constexpr std::array<std::string_view, 3> only_names{"aten::requires_grad_", "aten::set_data", "aten::retain_grad"};

struct OperatorSchema {
  std::vector<bool> writes;                 // by argument, as the schema says
  std::vector<std::size_t> unmarked;        // positions of what it writes beside those
  std::optional<std::size_t> only_if;       // position of the flag without which it does not write them
  std::optional<std::size_t> non_blocking;  // positions
  std::optional<std::size_t> stream;
  std::optional<std::size_t> generator;
  bool only_shape = false;
  bool random = false;
};

void append_tensors(const c10::IValue& value, TensorList& out) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) {
      out.push_back(value.toTensor());
    }
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) {
      append_tensors(element, out);
    }
  }
}

thread_local bool observing = false;
thread_local int depth = 0;  // of reported operators that have begun and not ended

struct OperatorRecord final : at::ObserverContext {
  /// `outputs`: none before the operator has run.
  [[nodiscard]] OperatorAccess access(const char* name, c10::ArrayRef<at::Tensor> outputs) const {
    return {name,         reads,      writes, outputs, depth > 0,
            non_blocking, only_shape, stream, random,  own_generator.defined() ? &own_generator : nullptr};
  }

  TensorList reads;
  TensorList writes;
  bool non_blocking = false;
  bool only_shape = false;
  bool random = false;
  at::Generator own_generator;
  std::optional<c10::Stream> stream;
};

}  // namespace

struct OperatorObserverGuard::State final : c10::DebugInfoBase, std::enable_shared_from_this<State> {
  const OperatorSchema* schema_of(const at::RecordFunction& function);
  void read_arguments(const at::RecordFunction& function, OperatorRecord& record);
  void began(const at::RecordFunction& function, OperatorRecord& record);
  void ended(const at::RecordFunction& function, const OperatorRecord& record);
  void tell(Observe OperatorObserverGuard::State::*listener, const OperatorAccess& access);

  Observe observe;
  Observe before;
  std::shared_ptr<State> outer;  // is called too if it asks for that, and for everything after the end of this one
  bool outer_hears_too = false;
  std::mutex mutex;
  bool active = true;
  std::exception_ptr error;
  std::unordered_map<const char*, OperatorSchema> schemas;  // by the schema's own copy of its name
};

const OperatorSchema* OperatorObserverGuard::State::schema_of(const at::RecordFunction& function) {
  if (const auto known = schemas.find(function.name()); known != schemas.end()) {
    return &known->second;
  }
  const auto name = function.operator_name();
  const auto handle = name ? c10::Dispatcher::singleton().findSchema(*name) : std::nullopt;
  if (!handle) {
    return nullptr;
  }
  OperatorSchema schema;
  std::string_view flag;
  for (const c10::Argument& argument : handle->schema().arguments()) {
    if (writes_unmarked(name->name, argument.name(), &flag)) {
      schema.unmarked.push_back(schema.writes.size());
    }
    if (argument.name() == "non_blocking") {
      schema.non_blocking = schema.writes.size();
    }
    if (argument.type()->kind() == c10::TypeKind::StreamObjType) {
      schema.stream = schema.writes.size();
    }
    if (argument.name() == "generator") {
      schema.generator = schema.writes.size();
    }
    schema.writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
  }
  schema.random = handle->hasTag(at::Tag::nondeterministic_seeded);
  schema.only_shape = handle->hasTag(at::Tag::inplace_view) ||
                      std::find(only_names.begin(), only_names.end(), name->name) != only_names.end();
  if (!flag.empty()) {
    const int position = handle->schema().argumentIndexWithName(flag).value();
    schema.only_if = static_cast<std::size_t>(position);
  }
  return &schemas.emplace(function.name(), std::move(schema)).first->second;
}

void OperatorObserverGuard::State::read_arguments(const at::RecordFunction& function, OperatorRecord& record) {
  const std::lock_guard lock(mutex);
  const OperatorSchema* const schema = schema_of(function);
  const c10::ArrayRef<const c10::IValue> inputs = function.inputs();
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    append_tensors(inputs[i], record.reads);
    if (schema != nullptr && i < schema->writes.size() && schema->writes[i] && !schema->stream) {
      append_tensors(inputs[i], record.writes);
    }
  }
  if (schema == nullptr) {
    return;
  }
  record.only_shape = schema->only_shape;
  record.random = schema->random;
  const auto given = [&](std::optional<std::size_t> at) { return at && *at < inputs.size() ? &inputs[*at] : nullptr; };
  if (const c10::IValue* flag = given(schema->non_blocking); flag != nullptr && flag->isBool()) {
    record.non_blocking = flag->toBool();
  }
  if (const c10::IValue* stream = given(schema->stream); stream != nullptr && stream->isStream()) {
    record.stream = stream->toStream();
  }
  if (const c10::IValue* value = given(schema->generator); value != nullptr && value->isGenerator()) {
    const at::Generator generator = value->toGenerator();
    if (generator.defined() && generator != at::globalContext().defaultGenerator(generator.device())) {
      record.own_generator = generator;
    }
  }
  const c10::IValue* const only_if = given(schema->only_if);
  if (!schema->only_if || (only_if != nullptr && only_if->isBool() && only_if->toBool())) {
    for (const std::size_t argument : schema->unmarked) {
      append_tensors(inputs[argument], record.writes);
    }
  }
}

void OperatorObserverGuard::State::tell(Observe State::*listener, const OperatorAccess& access) {
  bool outer_hears = outer_hears_too;
  {
    const std::lock_guard lock(mutex);
    outer_hears = outer_hears || !active;
    if (active && this->*listener) {
      observing = true;
      try {
        (this->*listener)(access);
      } catch (...) {
        if (!error) {
          error = std::current_exception();
        }
      }
      observing = false;
    }
  }
  if (outer_hears && outer != nullptr) {
    outer->tell(listener, access);
  }
}

void OperatorObserverGuard::State::began(const at::RecordFunction& function, OperatorRecord& record) {
  read_arguments(function, record);
  tell(&State::before, record.access(function.name(), {}));
}

void OperatorObserverGuard::State::ended(const at::RecordFunction& function, const OperatorRecord& record) {
  TensorList outputs;
  for (const c10::IValue& output : function.outputs()) {
    append_tensors(output, outputs);
  }
  tell(&State::observe, record.access(function.name(), outputs));
}

namespace {

std::unique_ptr<at::ObserverContext> on_begin(const at::RecordFunction& function) {
  auto* const state =
      static_cast<OperatorObserverGuard::State*>(c10::ThreadLocalDebugInfo::get(DebugInfoKinds::operator_observer));
  if (state == nullptr || observing || UnobservedGuard::active()) {
    return nullptr;
  }
  auto record = std::make_unique<OperatorRecord>();
  state->began(function, *record);
  ++depth;
  return record;
}

void on_end(const at::RecordFunction& function, at::ObserverContext* context) {
  auto* const state =
      static_cast<OperatorObserverGuard::State*>(c10::ThreadLocalDebugInfo::get(DebugInfoKinds::operator_observer));
  if (context == nullptr) {
    return;
  }
  --depth;
  if (state != nullptr) {
    state->ended(function, *static_cast<OperatorRecord*>(context));
  }
}

}  // namespace

// Only the outermost guard of a thread registers the callback; an inner guard changes what the callback finds. The callback and the chain
// of debug infos can only be undone in reverse order. So a guard that ends before an inner one, or on another thread, leaves its
// registration to the thread. The thread drops the registration when it is the innermost.
struct OperatorObserverGuard::Registration {
  explicit Registration(std::shared_ptr<State> state)
      : around(innermost),
        outermost(c10::ThreadLocalDebugInfo::get(DebugInfoKinds::operator_observer) == nullptr),
        info(DebugInfoKinds::operator_observer, std::move(state)),
        link(c10::ThreadLocalDebugInfo::current().get()) {
    innermost = this;
    if (outermost) {
      callback = at::addThreadLocalCallback(at::RecordFunctionCallback(on_begin, on_end)
                                                .needsInputs(true)
                                                .needsOutputs(true)
                                                .scopes({at::RecordScope::FUNCTION}));
    }
  }
  Registration(const Registration&) = delete;
  Registration& operator=(const Registration&) = delete;
  ~Registration() {
    if (outermost) {
      at::removeCallback(callback);
    }
  }
  /// Of the calling thread: what has ended and has nothing of others inside.
  static void drop_ended() {
    while (innermost != nullptr && innermost->ended.load(std::memory_order_acquire) &&
           innermost->link == c10::ThreadLocalDebugInfo::current().get()) {
      const std::unique_ptr<Registration> last(innermost);
      innermost = last->around;
    }
  }

  static inline thread_local constinit Registration* innermost = nullptr;
  Registration* const around;
  Registration** const home = &innermost;  ///< tells threads apart
  const bool outermost;
  c10::DebugInfoGuard info;
  const c10::ThreadLocalDebugInfo* const link;  ///< what `info` put into the chain
  at::CallbackHandle callback = at::INVALID_CALLBACK_HANDLE;
  std::atomic<bool> ended{false};
};

OperatorObserverGuard::OperatorObserverGuard(Observe observe, Observe before, Outer outer)
    : state_(std::make_shared<State>()) {
  Registration::drop_ended();
  state_->observe = std::move(observe);
  state_->before = std::move(before);
  state_->outer_hears_too = outer == Outer::hears_too;
  if (auto* const around = static_cast<State*>(c10::ThreadLocalDebugInfo::get(DebugInfoKinds::operator_observer));
      around != nullptr) {
    state_->outer = around->shared_from_this();
  }
  registration_ = new Registration(state_);
}

OperatorObserverGuard::~OperatorObserverGuard() {
  {
    const std::lock_guard lock(state_->mutex);
    state_->active = false;
  }
  const bool at_home = registration_->home == &Registration::innermost;
  registration_->ended.store(true, std::memory_order_release);  // from here on it is its thread's
  if (at_home) {
    Registration::drop_ended();
  }
}

bool OperatorObserverGuard::observes_this_thread() noexcept {
  return c10::ThreadLocalDebugInfo::get(DebugInfoKinds::operator_observer) != nullptr;
}

void OperatorObserverGuard::rethrow() const {
  const std::lock_guard lock(state_->mutex);
  if (state_->error) {
    std::rethrow_exception(state_->error);
  }
}

}  // namespace sidestream
