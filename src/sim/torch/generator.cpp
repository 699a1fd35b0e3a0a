#include "sim/torch/generator.h"

#include <sidestream/error.h>

#include <mutex>
#include <string>

#include "sim/device/device.h"
#include "sim/torch/device_guard.h"

namespace sidestream::sim {
namespace {

/// A generator on the sim device whose state is that of a CPU generator, so that CPU kernels can draw from it.
class Generator final : public c10::GeneratorImpl {
 public:
  explicit Generator(at::Generator cpu)
      : c10::GeneratorImpl(sim_device(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)), cpu_(std::move(cpu)) {}

  [[nodiscard]] const at::Generator& cpu() const { return cpu_; }

  void set_current_seed(std::uint64_t seed) override {
    if (seed != cpu_.current_seed()) {
      refuse_capture("a new seed");
    }
    locked([&] { cpu_.set_current_seed(seed); });
  }
  void set_offset(std::uint64_t /*offset*/) override {
    throw UsageError("a sim generator has no offset; use set_state");
  }
  std::uint64_t get_offset() const override { throw UsageError("a sim generator has no offset; use get_state"); }
  std::uint64_t current_seed() const override { return cpu_.current_seed(); }
  std::uint64_t seed() override {
    std::uint64_t value = 0;
    refuse_capture("a new seed");
    locked([&] { value = cpu_.seed(); });
    return value;
  }
  void set_state(const c10::TensorImpl& state) override {
    refuse_capture("a new state");
    locked([&] { cpu_.unsafeGetGeneratorImpl()->set_state(state); });
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return cpu_.unsafeGetGeneratorImpl()->get_state(); }
  /// By value: kernels and captures know the one CPU generator.
  void graphsafe_set_state(const c10::intrusive_ptr<c10::GeneratorImpl>& other) override {
    set_state(*other->get_state());
  }
  c10::intrusive_ptr<c10::GeneratorImpl> graphsafe_get_state() const override { return clone(); }

 private:
  Generator* clone_impl() const override { return new Generator(cpu_.clone()); }

  // As a GPU's: a replay would draw on from where the generator is then.
  static void refuse_capture(const char* what) {
    if (Device::get().capturing(current_stream())) {
      throw CaptureError(std::string("sim device: ") + what +
                         " for the generator inside a capture, which no replay would set again; seed before the step");
    }
  }

  template <typename Action>
  void locked(Action action) {
    const std::lock_guard<std::mutex> lock(cpu_.mutex());
    action();
  }

  at::Generator cpu_;
};

thread_local GeneratorState* replay_state = nullptr;
thread_local DrawsFrom* innermost = nullptr;

at::CPUGeneratorImpl& cpu_impl_of(const at::Generator& generator) {
  const auto& impl = *static_cast<const Generator*>(generator.unsafeGetGeneratorImpl());
  return *static_cast<at::CPUGeneratorImpl*>(impl.cpu().unsafeGetGeneratorImpl());
}

}  // namespace

const at::Generator& default_generator() {
  static const auto* const generator = new at::Generator(at::make_generator<Generator>(
      at::detail::createCPUGenerator(at::detail::getDefaultCPUGenerator().current_seed())));
  return *generator;
}

std::mutex& draws_lock() { return default_generator().unsafeGetGeneratorImpl()->mutex_; }

at::Generator make_generator() { return at::make_generator<Generator>(at::detail::createCPUGenerator()); }

bool is_sim_generator(const at::Generator& generator) {
  return generator.defined() && generator.device().type() == kDeviceType;
}

at::Generator cpu_side(const at::Generator& generator) {
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->cpu();
}

GeneratorState state_of(at::CPUGeneratorImpl& generator) {
  return {generator.engine(), generator.next_float_normal_sample(), generator.next_double_normal_sample()};
}

void set_state_of(at::CPUGeneratorImpl& generator, const GeneratorState& state) {
  generator.set_engine(state.engine);
  generator.set_next_float_normal_sample(state.next_float_normal);
  generator.set_next_double_normal_sample(state.next_double_normal);
}

GeneratorState state_of(const at::Generator& generator) {
  auto& impl = cpu_impl_of(generator);
  const std::lock_guard<std::mutex> lock(impl.mutex_);
  return state_of(impl);
}

void set_state_of(const at::Generator& generator, const GeneratorState& state) {
  auto& impl = cpu_impl_of(generator);
  const std::lock_guard<std::mutex> lock(impl.mutex_);
  set_state_of(impl, state);
}

GeneratorState take_draws(const at::Generator& generator, std::uint32_t draws) {
  auto& impl = cpu_impl_of(generator);
  const std::lock_guard<std::mutex> lock(impl.mutex_);
  GeneratorState taken = state_of(impl);
  at::mt19937 engine = taken.engine;
  for (std::uint32_t i = 0; i < draws; ++i) {
    engine();
  }
  set_state_of(impl, {engine, taken.next_float_normal, taken.next_double_normal});
  return taken;
}

std::uint32_t draws_between(const GeneratorState& before, const GeneratorState& after) {
  const at::mt19937_data_pod target = after.engine.data();
  at::mt19937 engine = before.engine;
  std::uint32_t draws = 0;
  // The state words change once in 624 draws: walk from one change to the next until they agree, then count what is left.
  while (engine.data().state_ != target.state_) {
    for (int left = engine.data().left_; left > 0; --left, ++draws) {
      engine();
    }
  }
  return draws + target.next_ - engine.data().next_;
}

ReplayState::ReplayState(GeneratorState& state) noexcept : before_(std::exchange(replay_state, &state)) {}
ReplayState::~ReplayState() { replay_state = before_; }
GeneratorState* ReplayState::current() noexcept { return replay_state; }

DrawsFrom::DrawsFrom(GeneratorState& state, Through through) : state_(state), outer_(std::exchange(innermost, this)) {
  thread_local const at::Generator scratch = at::detail::createCPUGenerator();
  generator_ = through == Through::argument ? scratch : at::detail::getDefaultCPUGenerator();
  auto& impl = *generator_.get<at::CPUGeneratorImpl>();
  const std::lock_guard<std::mutex> lock(impl.mutex_);
  if (through == Through::cpu_default) {
    cpu_default_ = state_of(impl);
  }
  set_state_of(impl, state);
}

DrawsFrom::~DrawsFrom() {
  innermost = outer_;
  auto& impl = *generator_.get<at::CPUGeneratorImpl>();
  const std::lock_guard<std::mutex> lock(impl.mutex_);
  state_ = state_of(impl);
  if (cpu_default_) {
    set_state_of(impl, *cpu_default_);
  }
}

const at::Generator& DrawsFrom::drawing() {
  if (innermost == nullptr) {
    throw Error("a random kernel of the sim device ran without a generator");
  }
  return innermost->generator_;
}

}  // namespace sidestream::sim
