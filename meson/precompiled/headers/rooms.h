// What most sources of the rooms with LibTorch include, compiled once. A file still includes what it names: tests/headers compiles each
// header without this one, and so does a build with -Db_pch=false.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>
#include <ATen/Functions.h>
#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
