#include "graphs/verify/verified_call.h"

#include <cstdint>
#include <limits>
#include <sstream>

#include <ATen/TensorOperators.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/abs.h>
#include <ATen/ops/isnan.h>
#include <ATen/ops/le.h>
#include <ATen/ops/logical_and.h>
#include <ATen/ops/logical_not.h>
#include <ATen/ops/ne.h>
#include <ATen/ops/zeros_like.h>

namespace sidestream {
namespace {

at::Tensor dense(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() != c10::Layout::Strided ? tensor.to_dense() : tensor;
}

bool is_half(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kBFloat16 || tensor.scalar_type() == at::kHalf;
}

/// Magnitudes in a type that holds their differences.
at::Tensor magnitude(const at::Tensor& tensor) { return at::abs(is_half(tensor) ? tensor.to(at::kFloat) : tensor); }

/// True where the elements differ.
at::Tensor differing(const at::Tensor& replayed, const at::Tensor& eager, double tolerance) {
  at::Tensor differ = at::ne(replayed, eager);
  if (!eager.is_floating_point() && !eager.is_complex()) {
    return differ;
  }
  differ.logical_and_(at::logical_not(at::logical_and(at::isnan(replayed), at::isnan(eager))));
  if (tolerance > 0) {
    const at::Tensor apart =
        magnitude(is_half(eager) ? replayed.to(at::kFloat) - eager.to(at::kFloat) : replayed - eager);
    differ.logical_and_(at::logical_not(at::le(apart, magnitude(eager).max() * tolerance)));
  }
  return differ;
}

int digits(at::ScalarType type) {
  switch (type) {
    case at::kDouble:
    case at::kComplexDouble:
      return std::numeric_limits<double>::max_digits10;
    case at::kHalf:
    case at::kBFloat16:
      return 5;
    default:
      return std::numeric_limits<float>::max_digits10;
  }
}

void append_element(std::ostringstream& text, const at::Tensor& element) {
  text.precision(digits(element.scalar_type()));
  if (element.is_complex()) {
    text << element.item<c10::complex<double>>();
  } else if (element.is_floating_point()) {
    text << element.item<double>();
  } else {
    text << element.item<std::int64_t>();
  }
}

std::string kind(const at::Tensor& tensor) { return c10::str(tensor.scalar_type(), " ", tensor.sizes()); }

}  // namespace

std::optional<std::string> difference(const at::Tensor& replayed_or_none, const at::Tensor& eager_or_none,
                                      double tolerance) {
  if (!replayed_or_none.defined() && !eager_or_none.defined()) {
    return std::nullopt;
  }
  const at::NoGradGuard no_grad;
  at::Tensor replayed = dense(replayed_or_none);
  at::Tensor eager = dense(eager_or_none);
  replayed = replayed.defined() ? replayed.detach() : at::zeros_like(eager);
  eager = eager.defined() ? eager.detach() : at::zeros_like(replayed);
  if (replayed.sizes() != eager.sizes() || replayed.scalar_type() != eager.scalar_type() ||
      replayed.device() != eager.device()) {
    return c10::str("is ", kind(replayed), " on ", replayed.device(), " replayed, ", kind(eager), " on ",
                    eager.device(), " run eagerly");
  }
  if (replayed.numel() == 0) {
    return std::nullopt;
  }
  const at::Tensor differ = differing(replayed, eager, tolerance);
  if (!differ.any().item<bool>()) {
    return std::nullopt;
  }
  const at::Tensor on_host = differ.flatten().to(at::kCPU);
  const bool* const flags = on_host.const_data_ptr<bool>();
  std::int64_t first = 0;
  std::int64_t count = 0;
  for (std::int64_t i = on_host.numel(); i-- > 0;) {
    if (flags[i]) {
      first = i;
      ++count;
    }
  }
  std::vector<std::int64_t> place(static_cast<std::size_t>(eager.dim()));
  std::int64_t rest = first;
  for (std::int64_t dim = eager.dim(); dim-- > 0; rest /= eager.size(dim)) {
    place[static_cast<std::size_t>(dim)] = rest % eager.size(dim);
  }
  std::ostringstream text;
  text << "differs first at " << at::IntArrayRef(place) << ": ";
  append_element(text, replayed.flatten()[first].to(at::kCPU));
  text << " replayed, ";
  append_element(text, eager.flatten()[first].to(at::kCPU));
  text << " run eagerly (" << count << " of " << eager.numel() << " elements differ)";
  return text.str();
}

}  // namespace sidestream
