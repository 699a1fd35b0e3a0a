#include "tools/cli/trained_model.h"

#include <algorithm>
#include <array>

#include <ATen/Context.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "examples/byte_model/byte_model.h"
#include "sidestream/error.h"

namespace sidestream::cli {
namespace {

using byte_model::BlockImpl;
using byte_model::ByteModel;
using mixture_model::MixtureBlockImpl;
using mixture_model::MixtureModel;

template <std::size_t N>
bool is_among(const std::array<std::string_view, N>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

bool is_scope_of_eager_part(const TrainingOptions& options, std::string_view scope) {
  return options.mixture() ? is_among(MixtureBlockImpl::kExpertScopes, scope)
                           : is_among(BlockImpl::kScopes, scope) && !is_among(BlockImpl::kAttentionScopes, scope);
}

/// Of the scope in every layer.
std::string pattern_of(const TrainingOptions& options, const std::string& scope) {
  if (options.mixture()) {
    return (is_among(MixtureBlockImpl::kFrontScopes, scope) ? "blocks.*.front." : "blocks.*.experts.") + scope;
  }
  const bool apart = options.graph_mode() == "partial" && is_among(BlockImpl::kAttentionScopes, scope);
  return (apart ? "blocks.*.attention." : "blocks.*.") + scope;
}

}  // namespace

MixtureShape mixture_shape(const TrainingOptions& options) {
  MixtureShape shape;
  shape.layers = options.shape.layers;
  shape.hidden = options.shape.hidden;
  shape.heads = options.shape.heads;
  shape.kv_heads = options.shape.kv_heads;
  shape.ffn = options.shape.ffn;
  shape.seq = options.shape.seq;
  shape.experts = options.experts.value_or(shape.experts);
  shape.top_k = options.top_k.value_or(shape.top_k);
  shape.capacity = options.capacity.value_or(shape.capacity);
  return shape;
}

TrainedModel make_model(const TrainingOptions& options, c10::Device device, at::ScalarType dtype,
                        const std::vector<std::int64_t>& parts) {
  at::manual_seed(options.seed);
  TrainedModel model;
  if (options.mixture()) {
    const auto mixture = MixtureModel(mixture_shape(options)).ptr();
    model = {mixture, [mixture](const at::Tensor& windows) { return mixture->loss(windows); },
             [mixture](const at::Tensor& windows) { return mixture->cross_entropy(windows); }, nullptr};
  } else {
    byte_model::ModelShape shape = options.shape;
    shape.attention_apart = options.graph_mode() == "partial";
    const auto dense = ByteModel(shape).ptr();
    const auto loss = [dense](const at::Tensor& windows) { return dense->loss(windows); };
    model = {dense, loss, loss, dense};
  }
  if (parts.empty()) {
    model.module->to(device, dtype);
    return model;
  }
  model.module->to(dtype);
  for (const std::int64_t part : parts) {
    model.dense->place_part(part, options.parts(), device);
  }
  return model;
}

std::vector<std::string_view> scopes_of(std::string_view model) {
  if (model != "moe") {
    return {BlockImpl::kScopes.begin(), BlockImpl::kScopes.end()};
  }
  std::vector<std::string_view> scopes(MixtureBlockImpl::kFrontScopes.begin(), MixtureBlockImpl::kFrontScopes.end());
  scopes.insert(scopes.end(), MixtureBlockImpl::kExpertScopes.begin(), MixtureBlockImpl::kExpertScopes.end());
  return scopes;
}

namespace {

/// The option's commas also split a list in braces: what follows an open one is put back to it.
std::vector<std::string> with_whole_braces(const std::vector<std::string>& pieces) {
  std::vector<std::string> names;
  for (const std::string& piece : pieces) {
    if (!names.empty() && names.back().rfind('{') != std::string::npos &&
        names.back().find('}', names.back().rfind('{')) == std::string::npos) {
      names.back() += "," + piece;
    } else {
      names.push_back(piece);
    }
  }
  return names;
}

}  // namespace

std::vector<std::string> offload_patterns(const TrainingOptions& options) {
  const std::vector<std::string> names = with_whole_braces(options.offload);
  if (names == std::vector<std::string>{"off"}) {
    return {};
  }
  if (names == std::vector<std::string>{"all"}) {
    return {"blocks.**"};
  }
  const std::vector<std::string_view> scopes = scopes_of(options.model);
  if (names.empty()) {
    throw UsageError(
        fmt::format("--offload names no scope; the scopes are {} (or: all, off)", fmt::join(scopes, ", ")));
  }
  std::vector<std::string> patterns;
  for (const std::string& name : names) {
    if (name.find_first_of(".*{") != std::string::npos) {
      patterns.push_back(name);
    } else if (std::find(scopes.begin(), scopes.end(), name) != scopes.end()) {
      patterns.push_back(pattern_of(options, name));
    } else {
      throw UsageError(fmt::format("--offload: no scope is named '{}'; the scopes are {} (or: all, off)", name,
                                   fmt::join(scopes, ", ")));
    }
  }
  return patterns;
}

std::string graph_pattern(const TrainingOptions& options) {
  if (options.graph_mode() == "layer") {
    return "blocks.*";
  }
  return options.mixture() ? "blocks.*.front" : "blocks.*.attention";
}

std::vector<std::string> delay_patterns(const TrainingOptions& options) {
  if (!options.delays()) {
    return {};
  }
  if (options.offload == std::vector<std::string>{"all"}) {
    return {options.mixture() ? "blocks.*.experts.*" : "blocks.*.*"};
  }
  std::vector<std::string> patterns;
  for (const std::string& name : options.offload) {
    if (is_scope_of_eager_part(options, name)) {
      patterns.push_back(pattern_of(options, name));
    }
  }
  return patterns;
}

}  // namespace sidestream::cli
