#pragma once

// LibTorch's modules by name. torch/nn/module.h takes six times as long to compile as at::Tensor, so headers that name modules only by
// pointer, by reference or in a declaration include this one.

namespace torch::nn {

class AnyModule;
class Module;
template <typename Contained>
class ModuleHolder;

}  // namespace torch::nn
