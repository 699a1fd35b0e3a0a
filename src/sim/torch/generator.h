#pragma once
#include <cstdint>
#include <mutex>
#include <optional>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/Generator.h>
#include <ATen/core/MT19937RNGEngine.h>

namespace sidestream::sim {

/// A point in the sequence of the generator: everything that the next draw depends on.
struct GeneratorState {
  at::mt19937 engine;
  std::optional<float> next_float_normal;
  std::optional<double> next_double_normal;
};

/// The device's default generator: draws the numbers that the CPU's default generator would draw from the same seed.
[[nodiscard]] const at::Generator& default_generator();
/// A generator of its own, for operators that take one.
[[nodiscard]] at::Generator make_generator();
/// True for generators made here.
[[nodiscard]] bool is_sim_generator(const at::Generator& generator);
/// The CPU generator that holds the state of a generator made here; CPU kernels draw from it.
[[nodiscard]] at::Generator cpu_side(const at::Generator& generator);

/// Hold it for a whole operator or launch that draws from a generator of the device, as CUDA's kernels hold the lock of their generator
/// while they look up its state. It is the default generator's lock. Take it before the locks of other generators and the device's.
[[nodiscard]] std::mutex& draws_lock();

/// State of a generator made here, and back. Threads: any; locks the CPU generator that holds it.
[[nodiscard]] GeneratorState state_of(const at::Generator& generator);
void set_state_of(const at::Generator& generator, const GeneratorState& state);
/// Of the default one.
[[nodiscard]] inline GeneratorState default_state() { return state_of(default_generator()); }
inline void set_default_state(const GeneratorState& state) { set_state_of(default_generator(), state); }
/// The state of `generator`, which is then moved on by `draws` 32-bit outputs: what one launch of a captured random work takes.
/// A pending second normal sample stays.
[[nodiscard]] GeneratorState take_draws(const at::Generator& generator, std::uint32_t draws);

/// Number of 32-bit outputs between two states of one sequence.
[[nodiscard]] std::uint32_t draws_between(const GeneratorState& before, const GeneratorState& after);

/// For its lifetime, random works that the calling thread runs draw from `state` (and move it on), whatever generator they
/// were issued with. Without it a work repeats the draws of its first run.
class [[nodiscard]] ReplayState {
 public:
  explicit ReplayState(GeneratorState& state) noexcept;
  ReplayState(const ReplayState&) = delete;
  ReplayState& operator=(const ReplayState&) = delete;
  ~ReplayState();
  /// The state set on the calling thread, or null.
  [[nodiscard]] static GeneratorState* current() noexcept;

 private:
  GeneratorState* before_;
};

/// Converts the state of a CPU generator, both ways. The caller holds its lock, or no other thread uses it.
[[nodiscard]] GeneratorState state_of(at::CPUGeneratorImpl& generator);
void set_state_of(at::CPUGeneratorImpl& generator, const GeneratorState& state);

/// For its lifetime CPU kernels that draw on the calling thread go on from `state`, which gets their progress at the end: by
/// `generator()`, a scratch generator of this thread that kernels of ours find by `drawing()`, or, for kernels that take no
/// generator, by the CPU's default one.
class [[nodiscard]] DrawsFrom {
 public:
  enum class Through : std::uint8_t { argument, cpu_default };
  DrawsFrom(GeneratorState& state, Through through);
  DrawsFrom(const DrawsFrom&) = delete;
  DrawsFrom& operator=(const DrawsFrom&) = delete;
  ~DrawsFrom();
  [[nodiscard]] const at::Generator& generator() const noexcept { return generator_; }
  /// The generator of the innermost one on the calling thread. Throws: Error without one.
  [[nodiscard]] static const at::Generator& drawing();

 private:
  GeneratorState& state_;
  at::Generator generator_;
  std::optional<GeneratorState> cpu_default_;
  DrawsFrom* outer_;
};

}  // namespace sidestream::sim
