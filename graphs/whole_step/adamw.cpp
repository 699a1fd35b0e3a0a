#include "sidestream/adamw.h"

#include <algorithm>
#include <cmath>
#include <unordered_map>
#include <unordered_set>

#include <ATen/core/grad_mode.h>
#include <ATen/ops/_foreach_add.h>
#include <ATen/ops/_fused_adamw.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ATen/ops/zeros_like.h>
#include <c10/util/ScopeExit.h>
#include <c10/util/StringUtil.h>
#include <c10/util/irange.h>

#include "graphs/whole_step/whole_step_watch.h"
#include "offload/nested_backward.h"
#include "runtime/runtime.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

void check(const AdamWOptions& options) {
  const auto [beta1, beta2] = options.betas();
  const auto is_share = [](double beta) { return beta >= 0 && beta < 1; };
  const auto is_amount = [](double value) { return std::isfinite(value) && value >= 0; };
  if (!is_share(beta1) || !is_share(beta2)) {
    throw UsageError("AdamW: the betas are " + std::to_string(beta1) + " and " + std::to_string(beta2) +
                     "; each is at least 0 and less than 1");
  }
  if (!is_amount(options.lr()) || !is_amount(options.eps()) || !is_amount(options.weight_decay())) {
    throw UsageError("AdamW: lr is " + std::to_string(options.lr()) + ", eps " + std::to_string(options.eps()) +
                     " and weight_decay " + std::to_string(options.weight_decay()) + "; each is finite and at least 0");
  }
}

bool is_capturing(c10::Device device) {
  if (device.is_cpu()) {
    return false;
  }
  const auto runtime = make_runtime(device);
  return runtime->capture_status(runtime->current_stream()) != CaptureStatus::none;
}

/// As the parameter lies, which the fused operator needs.
at::Tensor laid_out_as(const at::Tensor& given, const at::Tensor& parameter) {
  if (given.strides() == parameter.strides()) {
    return given;
  }
  return at::empty_strided(parameter.sizes(), parameter.strides(), given.options()).copy_(given);
}

}  // namespace

/// The parameters by what one operator updates.
class AdamW::Updates {
 public:
  /// Of one group, on one device and of one dtype.
  struct Bucket {
    std::size_t group = 0;
    at::Tensor lr;
    std::vector<std::size_t> states;  ///< of the group
  };
  struct Group {
    AdamWOptions options;
    std::vector<AdamWState> states;
  };

  explicit Updates(std::vector<AdamWGroup> given);
  void step();
  [[nodiscard]] Group& group(std::size_t index) {
    if (index >= groups.size()) {
      throw UsageError("AdamW: there is no group " + std::to_string(index) + "; the optimizer has " +
                       std::to_string(groups.size()) + " groups, numbered from 0");
    }
    return groups[index];
  }
  void set_lr(std::size_t index, double lr);

  std::vector<Group> groups;
  std::vector<at::Tensor> frozen;  ///< given without requires_grad: they have no state

 private:
  void add(std::size_t index, const at::Tensor& parameter);
  /// Adds `state` to `list` as its parameter lies, which may have been relocated to another layout.
  void add_state(std::vector<at::Tensor>& list, const at::Tensor& state, const at::Tensor& parameter);
  void update(const Bucket& bucket);

  std::vector<Bucket> buckets_;
  // The arguments of one operator; empty between updates.
  std::vector<at::Tensor> parameters_, gradients_, averages_, squares_, maxima_, steps_;
  std::vector<std::pair<at::Tensor, at::Tensor>> relaid_;  ///< states, and what stands in for each
};

AdamW::Updates::Updates(std::vector<AdamWGroup> given) {
  const at::NoGradGuard no_grad;
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto i : c10::irange(given.size())) {
    check(given[i].options);
    groups.push_back({given[i].options, {}});
    for (const auto j : c10::irange(given[i].parameters.size())) {
      const at::Tensor& parameter = given[i].parameters[j];
      const auto named = [&] { return "AdamW: parameter " + std::to_string(j) + " of group " + std::to_string(i); };
      if (!parameter.defined() || !parameter.is_leaf() || !parameter.is_floating_point() ||
          parameter.layout() != at::kStrided) {
        throw UsageError(named() +
                         " is undefined, not a leaf, not dense or not floating-point; pass leaf tensors, such as those "
                         "of Module::parameters()");
      }
      if (!seen.insert(parameter.unsafeGetTensorImpl()).second) {
        throw UsageError(named() + " is given twice; pass each parameter once");
      }
      if (parameter.requires_grad()) {
        add(i, parameter);
      } else {
        frozen.push_back(parameter);
      }
    }
  }
  if (seen.empty()) {
    throw UsageError("AdamW: no parameters were given; pass the parameters to update");
  }
}

void AdamW::Updates::add(std::size_t index, const at::Tensor& parameter) {
  Group& group = groups[index];
  const at::Tensor made = parameter.detach();
  const auto scalar = made.options().dtype(at::kFloat);
  auto bucket = std::find_if(buckets_.begin(), buckets_.end(), [&](const Bucket& other) {
    const at::Tensor& first = groups[other.group].states[other.states.front()].parameter;
    return other.group == index && first.device() == made.device() && first.scalar_type() == made.scalar_type();
  });
  if (bucket == buckets_.end()) {
    bucket = buckets_.insert(buckets_.end(), {index, at::full({}, group.options.lr(), scalar), {}});
  }
  bucket->states.push_back(group.states.size());
  group.states.push_back({parameter, at::zeros({}, scalar), at::zeros_like(made), at::zeros_like(made),
                          group.options.amsgrad() ? at::zeros_like(made) : at::Tensor()});
}

void AdamW::Updates::step() {
  const at::NoGradGuard no_grad;
  if (UpdatedParameters* const listener = UpdatedParameters::current(); listener != nullptr) {
    for (const Group& group : groups) {
      for (const AdamWState& state : group.states) {
        listener->add(state.parameter);
      }
    }
  }
  const auto met =
      std::find_if(frozen.begin(), frozen.end(), [](const at::Tensor& given) { return given.grad().defined(); });
  if (met != frozen.end()) {
    throw UsageError("AdamW: a parameter of shape " + c10::str(met->sizes()) +
                     " has a gradient, but did not require one when the optimizer was made, and so has no state. "
                     "Make a new optimizer; or make it while all parameters are trainable, and freeze some afterwards");
  }
  for (const Bucket& bucket : buckets_) {
    update(bucket);
  }
}

void AdamW::Updates::add_state(std::vector<at::Tensor>& list, const at::Tensor& state, const at::Tensor& parameter) {
  list.push_back(laid_out_as(state, parameter));
  if (!list.back().is_same(state)) {
    relaid_.emplace_back(state, list.back());
  }
}

void AdamW::Updates::update(const Bucket& bucket) {
  const Group& group = groups[bucket.group];
  const auto end = c10::make_scope_exit([this] {  // nothing of a graph's, or of an update that fails, is kept beyond it
    for (auto* const list : {&parameters_, &gradients_, &averages_, &squares_, &maxima_, &steps_}) {
      list->clear();
    }
    relaid_.clear();
  });
  for (const std::size_t index : bucket.states) {
    const AdamWState& state = group.states[index];
    const at::Tensor& gradient = state.parameter.grad();
    if (!gradient.defined()) {
      continue;
    }
    if (gradient.layout() != at::kStrided) {
      throw UsageError("AdamW: the gradient of a parameter of shape " + c10::str(state.parameter.sizes()) +
                       " is not dense; use an optimizer for sparse gradients");
    }
    parameters_.push_back(state.parameter);
    gradients_.push_back(laid_out_as(gradient, state.parameter));
    add_state(averages_, state.exp_avg, state.parameter);
    add_state(squares_, state.exp_avg_sq, state.parameter);
    if (group.options.amsgrad()) {
      add_state(maxima_, state.max_exp_avg_sq, state.parameter);
    }
    steps_.push_back(state.step);
  }
  if (!parameters_.empty()) {
    const auto [beta1, beta2] = group.options.betas();
    at::_foreach_add_(steps_, 1);
    at::_fused_adamw_(parameters_, gradients_, averages_, squares_, maxima_, steps_, bucket.lr, beta1, beta2,
                      group.options.weight_decay(), group.options.eps(), group.options.amsgrad(), /*maximize=*/false);
  }
  for (const auto& [state, stand_in] : relaid_) {
    state.copy_(stand_in);
  }
}

void AdamW::Updates::set_lr(std::size_t index, double lr) {
  if (!std::isfinite(lr) || lr < 0) {
    throw UsageError("AdamW::set_lr(" + std::to_string(lr) + "): a learning rate must be finite and at least 0");
  }
  Group& changed = group(index);
  const auto of_group = [&](const Bucket& bucket) { return bucket.group == index; };
  if (NestedBackwardRefusal::holds_here() || std::any_of(buckets_.begin(), buckets_.end(), [&](const Bucket& bucket) {
        return of_group(bucket) && is_capturing(bucket.lr.device());
      })) {
    throw UsageError(
        "AdamW::set_lr was called inside a capture or its warm-up, which would freeze the rate; call it before the "
        "replay");
  }
  for (const Bucket& bucket : buckets_) {
    if (of_group(bucket)) {
      bucket.lr.fill_(lr);
    }
  }
  changed.options.lr(lr);
}

AdamW::AdamW(std::vector<at::Tensor> parameters, AdamWOptions options)
    : AdamW(std::vector<AdamWGroup>{{std::move(parameters), std::move(options)}}) {}

AdamW::AdamW(std::vector<AdamWGroup> groups) : updates_(std::make_unique<Updates>(std::move(groups))) {}

AdamW::AdamW(AdamW&&) noexcept = default;
AdamW& AdamW::operator=(AdamW&&) noexcept = default;
AdamW::~AdamW() = default;

AdamW::Updates& AdamW::updates() const {
  if (updates_ == nullptr) {
    throw UsageError("this AdamW was moved from; use the one that it was moved to");
  }
  return *updates_;
}

void AdamW::step() { updates().step(); }

void AdamW::zero_grad(bool set_to_none) {
  const at::NoGradGuard no_grad;
  for (Updates::Group& group : updates().groups) {
    for (AdamWState& state : group.states) {
      if (set_to_none) {
        state.parameter.mutable_grad() = at::Tensor();
      } else if (state.parameter.grad().defined()) {
        state.parameter.mutable_grad().zero_();
      }
    }
  }
}

void AdamW::set_lr(double lr) {
  for (const auto i : c10::irange(updates().groups.size())) {
    updates().set_lr(i, lr);
  }
}

void AdamW::set_lr(std::size_t group, double lr) { updates().set_lr(group, lr); }

double AdamW::lr(std::size_t group) const { return updates().group(group).options.lr(); }

std::size_t AdamW::groups() const noexcept { return updates_ == nullptr ? 0 : updates_->groups.size(); }

const std::vector<AdamWState>& AdamW::state(std::size_t group) const { return updates().group(group).states; }

std::vector<std::pair<std::string, at::Tensor>> AdamW::named_state() const {
  std::vector<std::pair<std::string, at::Tensor>> named;
  for (const auto g : c10::irange(updates().groups.size())) {
    const auto& states = updates().groups[g].states;
    for (const auto i : c10::irange(states.size())) {
      const std::string prefix = std::to_string(g) + "." + std::to_string(i) + ".";
      named.emplace_back(prefix + "step", states[i].step);
      named.emplace_back(prefix + "exp_avg", states[i].exp_avg);
      named.emplace_back(prefix + "exp_avg_sq", states[i].exp_avg_sq);
      if (states[i].max_exp_avg_sq.defined()) {
        named.emplace_back(prefix + "max_exp_avg_sq", states[i].max_exp_avg_sq);
      }
    }
  }
  return named;
}

void AdamW::load_state(const std::vector<std::pair<std::string, at::Tensor>>& state) {
  const auto own = named_state();
  std::unordered_map<std::string, at::Tensor> given(state.begin(), state.end());
  if (given.size() != own.size() || state.size() != own.size()) {
    throw UsageError("AdamW::load_state: " + std::to_string(state.size()) + " tensors were given, but the state has " +
                     std::to_string(own.size()) + "; pass the result of named_state() for the same parameters");
  }
  for (const auto& [name, tensor] : own) {
    const auto found = given.find(name);
    if (found == given.end() || !found->second.defined() || found->second.sizes() != tensor.sizes()) {
      throw UsageError("AdamW::load_state: \"" + name +
                       "\" is missing or has another shape; pass the result of named_state() for the same parameters");
    }
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, tensor] : own) {
    tensor.copy_(given.at(name));
  }
}

}  // namespace sidestream
