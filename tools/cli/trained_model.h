#pragma once
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>
#include <torch/nn/module.h>

#include "examples/byte_model/byte_model.h"
#include "examples/mixture_model/mixture_model.h"
#include "tools/cli/training_options.h"

namespace sidestream::cli {

using mixture_model::MixtureShape;

/// A model of the examples. Both functions take windows [batch, seq + 1] of bytes, int64, and give a scalar.
struct TrainedModel {
  std::shared_ptr<torch::nn::Module> module;
  std::function<at::Tensor(const at::Tensor&)> loss;           ///< what is trained
  std::function<at::Tensor(const at::Tensor&)> cross_entropy;  ///< nats a byte
  std::shared_ptr<byte_model::ByteModelImpl> dense;  ///< with parts that a pipeline can run; null for a mixture
};

/// The sizes of the mixture that the options ask for.
[[nodiscard]] MixtureShape mixture_shape(const TrainingOptions& options);
/// Equal options give equal weights on every device. `parts`: those of a pipeline that are put on the device, empty for the whole model;
/// the others stay on the CPU.
[[nodiscard]] TrainedModel make_model(const TrainingOptions& options, c10::Device device, at::ScalarType dtype,
                                      const std::vector<std::int64_t>& parts = {});

/// The offload scopes of a layer of "dense" or "moe", in forward order.
[[nodiscard]] std::vector<std::string_view> scopes_of(std::string_view model);
/// The name patterns that --offload stands for: "all" is everything inside the layers, a bare scope name is that scope of
/// every layer, a name with dots or wildcards is taken as it stands. Empty for "off".
/// Throws: UsageError that lists the scopes there are, for a bare name that is none of them, and for no name.
[[nodiscard]] std::vector<std::string> offload_patterns(const TrainingOptions& options);
/// The calls that --graphs stands for. Not for "step" and "off".
[[nodiscard]] std::string graph_pattern(const TrainingOptions& options);
/// What of --offload is in the layers' eager parts, by scope; empty where nothing is to be delayed.
[[nodiscard]] std::vector<std::string> delay_patterns(const TrainingOptions& options);

}  // namespace sidestream::cli
