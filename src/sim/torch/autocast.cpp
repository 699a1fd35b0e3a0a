#include "sim/torch/autocast.h"

#include <ATen/Operators.h>
#include <ATen/autocast_mode.h>
#include <ATen/ops/norm.h>

namespace sidestream::sim {

// The names that LibTorch's lists use unqualified.
using at::DimnameList;
using at::IntArrayRef;
using at::Scalar;
using at::ScalarType;
using at::Tensor;

void register_autocast(torch::Library& all, torch::Library& aten) {
  all.fallback(torch::CppFunction::makeFallthrough());
  // LibTorch's lists expand to calls on a library of this name.
  torch::Library& m = aten;
#define SIDESTREAM_LOWER_PRECISION(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, lower_precision_fp)
#define SIDESTREAM_FP32(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32)
#define SIDESTREAM_FP32_SET_OPT_DTYPE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, fp32_set_opt_dtype)
#define SIDESTREAM_PROMOTE(...) KERNEL_PRIVATEUSEONE(__VA_ARGS__, promote)
  AT_FORALL_LOWER_PRECISION_FP(SIDESTREAM_LOWER_PRECISION)
  AT_FORALL_FP32(SIDESTREAM_FP32)
  AT_FORALL_FP32_SET_OPT_DTYPE(SIDESTREAM_FP32_SET_OPT_DTYPE)
  AT_FORALL_DIFFERENT_REDISPATCH_SIGNATURE(KERNEL_DIFFERENT_REDISPATCH_SIGNATURE_PRIVATEUSEONE)
  AT_FORALL_PROMOTE(SIDESTREAM_PROMOTE)
#undef SIDESTREAM_LOWER_PRECISION
#undef SIDESTREAM_FP32
#undef SIDESTREAM_FP32_SET_OPT_DTYPE
#undef SIDESTREAM_PROMOTE
}

}  // namespace sidestream::sim
