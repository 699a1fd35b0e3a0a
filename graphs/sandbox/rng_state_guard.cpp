#include "graphs/sandbox/rng_state_guard.h"

#include <cstdint>
#include <cstdio>
#include <exception>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/core/GeneratorImpl.h>
#include <c10/util/intrusive_ptr.h>

namespace sidestream {
namespace {

constexpr std::uint64_t kOtherSeed = 0x5bd1e995;  // differs in bits that every generator uses

/// The separate sequence of each generator that had a guard and is alive.
struct Sequences {
  using Weak = c10::weak_intrusive_ptr<c10::GeneratorImpl>;
  std::mutex mutex;
  std::vector<std::pair<Weak, at::Generator>> all;

  at::Generator& of(const at::Generator& generator) {
    std::erase_if(all, [](const auto& item) { return item.first.expired(); });
    for (auto& [known, sequence] : all) {
      if (known._unsafe_get_target() == generator.unsafeGetGeneratorImpl()) {
        return sequence;
      }
    }
    at::Generator sequence = generator.clone();
    sequence.set_current_seed(generator.current_seed() ^ kOtherSeed);
    return all.emplace_back(Weak(generator.getIntrusivePtr()), std::move(sequence)).second;
  }
};

Sequences& sequences() {
  static auto* const instance = new Sequences();  // threads may end after static objects
  return *instance;
}

}  // namespace

GeneratorState::GeneratorState(at::Generator of) : generator(std::move(of)) {
  const std::lock_guard drawing(generator.mutex());
  state = generator.get_state();
}

void GeneratorState::put_back() const {
  at::Generator drawn = generator;
  const std::lock_guard drawing(drawn.mutex());
  drawn.set_state(state);
}

// Operators look up the state and draw from it under the generator's lock, so each uses one of the two sequences only.
RngStateGuard::RngStateGuard(at::Generator generator) : generator_(std::move(generator)) {
  const std::lock_guard drawing(generator_.mutex());
  const std::lock_guard lock(sequences().mutex);
  shared_ = generator_.graphsafe_get_state();
  before_ = generator_.get_state();
  at::Generator& sequence = sequences().of(generator_);
  own_seed_ = sequence.current_seed();
  generator_.graphsafe_set_state(sequence);
}

void RngStateGuard::take_seed() {
  taken_ = generator_.current_seed();
  generator_.set_current_seed(++own_seed_);
}

RngStateGuard::~RngStateGuard() {
  try {
    const std::lock_guard drawing(generator_.mutex());
    const std::lock_guard lock(sequences().mutex);
    at::Generator& sequence = sequences().of(generator_);
    if (is_seeded()) {
      sequence.set_current_seed(own_seed_ + 1);
    } else {
      sequence = generator_.graphsafe_get_state();
    }
    shared_.set_state(before_);
    if (taken_) {
      shared_.set_current_seed(*taken_);
    }
    generator_.graphsafe_set_state(shared_);
  } catch (const std::exception& error) {  // a device that fails here has failed the run already
    std::fprintf(stderr, "sidestream: the random generator could not be restored after a warm-up: %s\n", error.what());
  }
}

}  // namespace sidestream
