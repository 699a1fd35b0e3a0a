#include "models/plain_twin.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <sstream>
#include <utility>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>

#include "sidestream/engine.h"

namespace sidestream::testing_model {
namespace {

/// Of a tensor as it lies on the host, densely.
std::string element(const at::Tensor& tensor, std::int64_t index) {
  std::ostringstream text;
  text.precision(17);
  const at::Tensor value = tensor.flatten()[index];
  if (tensor.is_complex()) {
    text << value.item<c10::complex<double>>();
  } else if (tensor.is_floating_point()) {
    text << value.item<double>();
  } else {
    text << value.item<std::int64_t>();
  }
  return text.str();
}

/// The place of element `index`, "[1, 3]".
std::vector<std::int64_t> place_of(const at::Tensor& tensor, std::int64_t index) {
  std::vector<std::int64_t> place(static_cast<std::size_t>(tensor.dim()));
  for (std::int64_t dim = tensor.dim(); dim-- > 0; index /= tensor.size(dim)) {
    place[static_cast<std::size_t>(dim)] = index % tensor.size(dim);
  }
  return place;
}

testing::AssertionResult same_tensor(const StepTensor& mine, const StepTensor& plain) {
  if (mine.name != plain.name) {
    return testing::AssertionFailure() << mine.name << " stands where plain training has " << plain.name;
  }
  if (mine.value.defined() != plain.value.defined()) {
    return testing::AssertionFailure() << mine.name
                                       << (mine.value.defined() ? " is there, plain training has none"
                                                                : " is missing, plain training has one");
  }
  if (!mine.value.defined()) {
    return testing::AssertionSuccess();
  }
  if (mine.value.sizes() != plain.value.sizes() || mine.value.scalar_type() != plain.value.scalar_type()) {
    return testing::AssertionFailure() << mine.name << " is " << mine.value.toString() << mine.value.sizes()
                                       << ", plain training's " << plain.value.toString() << plain.value.sizes();
  }
  const std::int64_t count = mine.value.numel();
  const std::size_t size = mine.value.element_size();
  const auto* const a = static_cast<const std::byte*>(mine.value.const_data_ptr());
  const auto* const b = static_cast<const std::byte*>(plain.value.const_data_ptr());
  const at::Tensor not_a_number = at::isnan(plain.value).flatten();
  if (std::memcmp(a, b, mine.value.nbytes()) == 0 && !not_a_number.any().item<bool>()) {
    return testing::AssertionSuccess();
  }
  std::int64_t first = count;
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::size_t at = static_cast<std::size_t>(i) * size;
    if (std::memcmp(a + at, b + at, size) != 0 || not_a_number.const_data_ptr<bool>()[i]) {
      first = std::min(first, i);
      ++wrong;
    }
  }
  return testing::AssertionFailure() << mine.name << " differs first at "
                                     << at::IntArrayRef(place_of(mine.value, first)) << ": "
                                     << element(mine.value, first) << ", plain training has "
                                     << element(plain.value, first) << "; " << wrong << " of " << count
                                     << " elements differ";
}

}  // namespace

StepTensor::StepTensor(std::string of, const at::Tensor& tensor)
    : name(std::move(of)),
      value(tensor.defined()
                ? tensor.detach().to(at::kCPU, /*non_blocking=*/false, /*copy=*/true).resolve_conj().contiguous()
                : at::Tensor()) {}

StepTensors gradients(const torch::nn::Module& model) {
  StepTensors result;
  for (const auto& parameter : model.named_parameters()) {
    result.emplace_back("gradient of " + parameter.key(), parameter.value().grad());
  }
  return result;
}

StepTensors gradients_and_buffers(const torch::nn::Module& model) {
  StepTensors result = gradients(model);
  for (const auto& buffer : model.named_buffers()) {
    result.emplace_back("buffer " + buffer.key(), buffer.value());
  }
  return result;
}

StepTensors values(const std::vector<at::Tensor>& tensors) {
  StepTensors all;
  for (const at::Tensor& tensor : tensors) {
    all.emplace_back("held", tensor);
  }
  return all;
}

void clear_gradients(torch::nn::Module& model) { model.zero_grad(/*set_to_none=*/true); }

void relocate(const torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters()) {
    parameter.set_data(parameter.detach().clone());
  }
}

at::Tensor in_one_buffer(const torch::nn::Module& model,
                         const std::function<void(at::Tensor& parameter, const at::Tensor& part)>& act) {
  const std::vector<at::Tensor> parameters = model.parameters();
  std::int64_t numel = 0;
  for (const at::Tensor& parameter : parameters) {
    numel += parameter.numel();
  }
  const at::NoGradGuard no_grad;
  at::Tensor buffer = at::zeros({numel}, parameters[0].options().requires_grad(false));
  std::int64_t begin = 0;
  for (at::Tensor parameter : parameters) {
    act(parameter, buffer.narrow(0, begin, parameter.numel()).view(parameter.sizes()));
    begin += parameter.numel();
  }
  return buffer;
}

void flatten_parameters(const torch::nn::Module& model) {
  (void)in_one_buffer(model, [](at::Tensor& parameter, const at::Tensor& part) {
    part.copy_(parameter);
    parameter.set_data(part);
  });
}

void descend(torch::nn::Module& model) {
  const at::NoGradGuard no_grad;
  for (at::Tensor& parameter : model.parameters()) {
    if (parameter.grad().defined()) {
      parameter.add_(parameter.grad(), -0.1);
    }
  }
}

testing::AssertionResult same(const StepTensors& mine, const StepTensors& plain) {
  if (mine.size() != plain.size()) {
    return testing::AssertionFailure() << mine.size() << " tensors, plain training has " << plain.size();
  }
  for (std::size_t i = 0; i < mine.size(); ++i) {
    if (testing::AssertionResult result = same_tensor(mine[i], plain[i]); !result) {
      return result;
    }
  }
  return testing::AssertionSuccess();
}

void in_step(OffloadEngine* engine, const std::function<void()>& run) {
  if (engine == nullptr) {
    run();
    return;
  }
  auto step = engine->step();
  run();
  step.finish();
}

std::optional<Chunk> chunk_of(OffloadEngine* engine, ChunkId id) {
  return engine == nullptr ? std::nullopt : std::optional<Chunk>(engine->chunk(id));
}

StepTensors train_step(torch::nn::Module& model, OffloadEngine* engine, const std::function<void()>& run) {
  clear_gradients(model);
  in_step(engine, run);
  StepTensors result = gradients_and_buffers(model);
  descend(model);
  return result;
}

void expect_plain(std::int64_t first, std::int64_t last, const std::function<StepTensors(std::int64_t s)>& mine,
                  const std::function<StepTensors(std::int64_t s)>& plain) {
  for (std::int64_t s = first; s < last; ++s) {
    const StepTensors expected = plain(s);
    EXPECT_TRUE(same(mine(s), expected)) << "step " << s;
  }
}

}  // namespace sidestream::testing_model
