// GradientPolicy::delayed, if other graphs could overwrite what the weight gradients are computed of: inputs, gradients and saved tensors.
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "models/plain_twin.h"
#include "models/stack_twins.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"
#include "sidestream/owning.h"

namespace sidestream::testing_model {
namespace {

GraphOptions all_delayed() { return GraphOptions().gradients("**", GradientPolicy::delayed); }

/// One matrix, whose gradient is computed of what the layer is given.
class Reader : public torch::nn::Module {
 public:
  explicit Reader(std::int64_t salt, c10::Device device) {
    weight_ = register_parameter("weight", rows(salt, device, 50).t().mm(rows(salt, device, 51)).div(16));
  }
  at::Tensor apply(const at::Tensor& h) { return at::linear(h, weight_); }

 private:
  at::Tensor weight_;
};

/// Three layers as linked callables, and plainly. The first gives two outputs; the second adds to one what it makes of the other.
class Readers : public torch::nn::Module {
 public:
  explicit Readers(c10::Device device) : device_(device) {
    for (std::int64_t i = 0; i < 4; ++i) {
      readers_.push_back(register_module("r" + std::to_string(i), std::make_shared<Reader>(i, device)));
    }
  }
  void capture(OffloadEngine& engine, const GraphOptions& options) {
    std::vector<Callable> callables;
    for (std::size_t i = 0; i < 3; ++i) {
      callables.emplace_back("layer" + std::to_string(i), owning([this, i](const Tensors& x) { return run(i, x); }));
    }
    layers_ = make_graphed_callables(engine, callables,
                                     {{rows(90, device_).requires_grad_(true)},
                                      {Sample::output_of(0, 0), Sample::output_of(0, 1)},
                                      {Sample::output_of(1)}},
                                     options);
  }
  at::Tensor loss(std::int64_t s) {
    const at::Tensor x = rows(s, device_).requires_grad_(true);
    const Tensors first = replay(0, {x});
    const Tensors second = replay(1, first);
    const Tensors third = replay(2, second);
    return ((third[0] + first[1] * 3) * rows(s, device_, 1)).sum();  // the second output is read elsewhere too
  }
  [[nodiscard]] const std::vector<GraphedCallable>& layers() const { return layers_; }
  /// They own the engine, which shares the ownership of this model.
  void drop_layers() { layers_.clear(); }

 private:
  Tensors run(std::size_t i, const Tensors& x) {
    return i == 0   ? Tensors{readers_[0]->apply(x[0]), readers_[1]->apply(x[0])}
           : i == 1 ? Tensors{x[1] + readers_[2]->apply(x[0])}
                    : Tensors{readers_[3]->apply(x[0])};
  }
  Tensors replay(std::size_t i, const Tensors& x) { return layers_.empty() ? run(i, x) : layers_[i](x); }

  c10::Device device_;
  std::vector<std::shared_ptr<Reader>> readers_;
  std::vector<GraphedCallable> layers_;
};

TEST(DelayedReadersTest, ReadInputsAndGradientsThatNoOtherGraphOverwrites) {
  const c10::Device device = find_device("sim");
  const auto model = std::make_shared<Readers>(device);
  const auto plain = std::make_shared<Readers>(device);
  OffloadEngine engine(*model, Options(device).check_steps(8));
  model->capture(engine, all_delayed());
  for (std::int64_t s = 0; s < 4; ++s) {
    expect_same_step(*model, &engine, *plain, s, [&](Readers& readers) {
      readers.loss(s).backward();
      for (const GraphedCallable& layer : readers.layers()) {  // in the order of the forwards
        layer.backward_dw();
      }
    });
  }
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
  model->drop_layers();
}

/// Takes the address of what it saved, which no operator gets.
struct AddressReader : torch::autograd::Function<AddressReader> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->save_for_backward({x});
    return x * 2;
  }
  static Tensors backward(torch::autograd::AutogradContext* context, const Tensors& grads) {
    EXPECT_NE(context->get_saved_variables()[0].const_data_ptr(), nullptr);
    return {grads[0] * 2};
  }
};

class AddressReading : public torch::nn::Module {
 public:
  explicit AddressReading(c10::Device device) {
    for (std::int64_t i = 0; i < 2; ++i) {
      readers_.push_back(register_module("r" + std::to_string(i), std::make_shared<Reader>(i, device)));
    }
  }
  at::Tensor run(const at::Tensor& x) { return readers_[1]->apply(AddressReader::apply(readers_[0]->apply(x)).tanh()); }

 private:
  std::vector<std::shared_ptr<Reader>> readers_;
};

TEST(DelayedReadersTest, ANodeThatIsNotLibTorchsReadsWhatItSaved) {
  const c10::Device device = find_device("sim");
  const auto model = std::make_shared<AddressReading>(device);
  AddressReading plain(device);
  OffloadEngine engine(*model, Options(device).offload("**").min_bytes(256).lag(0).check_steps(8));
  const auto layers = make_graphed_callables(
      engine,
      {Callable("layer", owning([model](const Tensors& x) { return Tensors{model->run(x[0])}; })),
       Callable("last", [](const Tensors& x) { return Tensors{x[0].sin()}; })},
      {{rows(90, device).requires_grad_(true)}, {Sample::output_of(0)}}, all_delayed());
  for (std::int64_t s = 0; s < 3; ++s) {
    expect_same_step(*model, &engine, plain, s, [&](AddressReading& of) {
      const at::Tensor x = rows(s, device).requires_grad_(true);
      const bool graphed = &of == &*model;
      const at::Tensor y = graphed ? layers[1](layers[0]({x}))[0] : of.run(x).sin();
      (y * rows(s, device, 1)).sum().backward();
      if (graphed) {
        engine.backward_dw();
      }
    });
  }
  EXPECT_GT(engine.report().offloaded_bytes, 0);
  EXPECT_EQ(engine.report().order_findings, std::vector<std::string>());
}

}  // namespace
}  // namespace sidestream::testing_model
