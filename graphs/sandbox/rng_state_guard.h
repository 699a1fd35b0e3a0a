#pragma once
#include <cstdint>
#include <optional>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

namespace sidestream {

/// While it lives, a generator stands elsewhere: on a sequence of its own, which goes on from one of these to
/// the next. At its end it stands where it stood, whatever was drawn. So what a warm-up draws does not count. Another thread's operator that
/// draws meanwhile, begun before anything could hold it back, has numbers of that sequence: they come once, as all others.
///
/// A seed that is set meanwhile never becomes the sequence's: its numbers would come twice.
///
/// Graphs draw from where the generator stood when they were captured: what they take is put back as well.
/// The thread has the device's CaptureTurn.  Threads: ends on the thread it began on.
class [[nodiscard]] RngStateGuard {
 public:
  explicit RngStateGuard(at::Generator generator);
  RngStateGuard(const RngStateGuard&) = delete;
  RngStateGuard& operator=(const RngStateGuard&) = delete;
  ~RngStateGuard();

  /// Somebody has seeded the generator since the sequence began or went on.
  [[nodiscard]] bool is_seeded() const { return generator_.current_seed() != own_seed_; }
  /// It was another thread: at the end the generator stands where that seed begins. The sequence goes on elsewhere.
  void take_seed();
  /// It was not; the generator is put back.
  void forget_seed() noexcept { taken_.reset(); }

 private:
  at::Generator generator_;
  at::Generator stood_;  ///< the state that the generator had, which graphs share
  at::Tensor before_;    ///< its value
  std::uint64_t own_seed_;
  std::optional<std::uint64_t> taken_;
};

}  // namespace sidestream
