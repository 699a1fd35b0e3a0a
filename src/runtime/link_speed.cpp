#include "runtime/link_speed.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include <ATen/ops/zeros.h>

namespace sidestream {
namespace {

constexpr int kRounds = 5;

// GB/s of `bytes` moved by `copies` between two synchronisations, the best of the rounds after one that warms up.
template <typename Copies>
double best_speed(Runtime& runtime, std::size_t bytes, Copies copies) {
  double best = 0;
  for (int round = 0; round <= kRounds; ++round) {
    runtime.synchronize_device();
    const auto begin = std::chrono::steady_clock::now();
    copies();
    runtime.synchronize_device();
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - begin;
    if (round > 0 && took.count() > 0) {
      best = std::max(best, static_cast<double>(bytes) / took.count() / 1e9);
    }
  }
  return best;
}

}  // namespace

LinkSpeed link_speed(Runtime& runtime, std::size_t bytes) {
  const auto outward = runtime.create_stream();
  const auto inward = runtime.create_stream();
  const auto begin = std::chrono::steady_clock::now();
  const auto source = runtime.allocate_pinned(bytes);
  const auto target = runtime.allocate_pinned(bytes);
  const std::chrono::duration<double> pinning = std::chrono::steady_clock::now() - begin;
  std::memset(source.data(), 1, bytes);
  std::memset(target.data(), 2, bytes);
  const auto options = at::TensorOptions().dtype(at::kByte).device(runtime.device());
  const auto near = at::zeros({static_cast<std::int64_t>(bytes)}, options);
  const auto far = at::zeros({static_cast<std::int64_t>(bytes)}, options);
  const auto out = [&] { runtime.copy_to_host(target.data(), near.const_data_ptr(), bytes, outward); };
  const auto in = [&] { runtime.copy_to_device(far.mutable_data_ptr(), source.data(), bytes, inward); };
  LinkSpeed speed;
  speed.pinning = static_cast<double>(2 * bytes) / pinning.count() / 1e9;
  speed.to_host = best_speed(runtime, bytes, out);
  speed.to_device = best_speed(runtime, bytes, in);
  speed.both = best_speed(runtime, 2 * bytes, [&] {
    out();
    in();
  });
  return speed;
}

}  // namespace sidestream
