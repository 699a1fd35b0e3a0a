#pragma once
#include <chrono>
#include <stdexcept>
#include <string>

#include <torch/cuda.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#ifdef USE_C10D_NCCL
#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>
#endif

/// What programs of two ranks share.
namespace sidestream::testing_ranks {

constexpr std::chrono::minutes kLimit{2};
constexpr int kSkipped = 77;

inline void require(bool holds, const std::string& what) {
  if (!holds) {
    throw std::runtime_error(what);
  }
}

#ifdef USE_C10D_NCCL
using Nccl = c10d::ProcessGroupNCCL;
/// Why NCCL cannot run here; empty if it can.
inline std::string missing_for_nccl() {
  const auto gpus = torch::cuda::device_count();
  return gpus < 2 ? "it needs two GPUs, and here are " + std::to_string(gpus) : "";
}
/// `Group`: Nccl, or a class over it, which takes `arguments` first.
template <class Group, class... Arguments>
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                            Arguments&... arguments) {
  auto options = Nccl::Options::create();
  options->timeout = kLimit;
  return c10::make_intrusive<Group>(arguments..., store, rank, 2, options);
}
#else
struct Nccl : c10d::Backend {};
inline std::string missing_for_nccl() { return "it was built without NCCL's headers"; }
template <class Group, class... Arguments>
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& /*store*/, int /*rank*/,
                                            Arguments&... /*arguments*/) {
  return {};
}
#endif

}  // namespace sidestream::testing_ranks
