// What most sources of graphs/ and of the programs include, compiled once.
#include "tensors.h"
#include <ATen/Functions.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/variable.h>
#include <torch/nn/module.h>
