#pragma once
#include <cstdint>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace sidestream {

/// A generator, and the state that it had when this object was made.
struct GeneratorState {
  explicit GeneratorState(at::Generator of);
  /// Gives the generator that state.
  void put_back() const;

  at::Generator generator;
  at::Tensor state;
};

/// Lets a generator draw from a separate sequence until the end. The generator then has the state that it had before, so the draws of a
/// warm-up do not count. The next guard of the same generator continues the sequence.
///
/// Another thread's operator may draw meanwhile, if it began before HeldDraws could stop it. Its numbers come from the separate
/// sequence, so no number comes twice. A seed that is set meanwhile is never the separate sequence's seed: its numbers would come twice.
///
/// Graphs that are replayed meanwhile draw from the state that the generator had at their capture. That state is put back too.
/// Needs the device's CaptureTurn.  Threads: ends on the thread it began on.
class [[nodiscard]] RngStateGuard {
 public:
  explicit RngStateGuard(at::Generator generator);
  RngStateGuard(const RngStateGuard&) = delete;
  RngStateGuard& operator=(const RngStateGuard&) = delete;
  ~RngStateGuard();

  /// True if the generator was seeded since this guard began, or since take_seed.
  [[nodiscard]] bool is_seeded() const { return generator_.current_seed() != own_seed_; }
  /// Another thread set the seed: at the end the generator starts from that seed. The separate sequence gets a new seed.
  void take_seed();
  /// The call set the seed: at the end the generator has its state of before.
  void forget_seed() noexcept { taken_.reset(); }

 private:
  at::Generator generator_;
  at::Generator shared_;  ///< the state object that the generator had; graphs share it
  at::Tensor before_;     ///< its value
  std::uint64_t own_seed_;
  std::optional<std::uint64_t> taken_;
};

}  // namespace sidestream
