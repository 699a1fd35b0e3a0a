#include "tools/cli/optimizer.h"

namespace sidestream::cli {

Optimizer::Optimizer(const std::vector<at::Tensor>& parameters, double weight_decay, bool for_a_graph) {
  if (for_a_graph) {
    capturable_.emplace(parameters, AdamWOptions().weight_decay(weight_decay));
  } else {
    plain_.emplace(parameters, torch::optim::AdamWOptions().weight_decay(weight_decay));
  }
}

void Optimizer::set_lr(double lr) {
  if (capturable_) {
    capturable_->set_lr(lr);
    return;
  }
  for (torch::optim::OptimizerParamGroup& group : plain_->param_groups()) {
    group.options().set_lr(lr);
  }
}

void Optimizer::step() {
  if (capturable_) {
    capturable_->step();
  } else {
    plain_->step();
  }
}

void Optimizer::zero_grad() {
  if (capturable_) {
    capturable_->zero_grad();
  } else {
    plain_->zero_grad();
  }
}

}  // namespace sidestream::cli
