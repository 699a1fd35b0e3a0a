#pragma once

// Declares LibTorch's modules. torch/nn/module.h takes six times as long to compile as at::Tensor. So headers that name modules only by
// pointer, by reference or in a declaration include this one instead.

namespace torch::nn {

class AnyModule;
class Module;
template <typename Contained>
class ModuleHolder;

}  // namespace torch::nn
