#include "models/expert_model.h"

#include <string>

#include <ATen/Functions.h>
#include <ATen/TensorOperators.h>

#include "sidestream/scope.h"

namespace sidestream::testing_model {

ExpertModel::ExpertModel() {
  auto generator = at::detail::createCPUGenerator(41);
  const auto weight = [&](const std::string& name, at::IntArrayRef sizes) {
    return register_parameter(name, at::randn(sizes, generator).mul_(0.3));
  };
  for (const int i : {0, 1}) {
    const std::string number = std::to_string(i);
    router_[i] = weight("router" + number, {kWidth, kExperts});
    in_[i] = weight("in" + number, {kExperts, kWidth, 2 * kWidth});
    out_[i] = weight("out" + number, {kExperts, 2 * kWidth, kWidth});
  }
}

at::Tensor ExpertModel::layer(const at::Tensor& h, std::int64_t number) {
  const at::Tensor shares = h.matmul(router_[number]).softmax(-1);
  const at::Tensor chosen = shares.argmax(-1);
  at::Tensor sum = h;
  for (std::int64_t expert = 0; expert < kExperts; ++expert) {
    const at::Tensor places = chosen.eq(expert).nonzero().squeeze(-1);
    if (places.numel() == 0) {
      continue;
    }
    const OffloadScope all("experts");
    const OffloadScope scope(std::to_string(expert).c_str());
    at::Tensor part = h.index_select(0, places).matmul(in_[number][expert]);
    part = part.sigmoid() * part.tanh();
    part = part.matmul(out_[number][expert]).tanh() * shares.index_select(0, places).narrow(1, expert, 1);
    sum = sum.index_add(0, places, part);
  }
  return sum;
}

at::Tensor ExpertModel::loss(const at::Tensor& tokens) { return layer(layer(tokens, 0).tanh(), 1).square().mean(); }

at::Tensor expert_tokens(std::int64_t number, std::int64_t count, c10::Device device) {
  auto generator = at::detail::createCPUGenerator(static_cast<std::uint64_t>(4000 + number));
  return at::randn({count, ExpertModel::kWidth}, generator).to(device);
}

}  // namespace sidestream::testing_model
