#include "graphs/guards/module_facts.h"

#include <algorithm>
#include <cstring>
#include <sstream>
#include <type_traits>
#include <utility>

#include <torch/nn/module.h>
#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/container/any_module_holder.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/rnn.h>

namespace sidestream {

/// Names the specialisation below.
struct MembersOfModules {};

}  // namespace sidestream

// A module's public functions copy its dictionaries at each call, and set training flags of whole trees only. Its own fields can
// be read without allocation; the template befriended for this purpose by torch::nn::Module is this one.
template <>
struct torch::nn::AnyModuleHolder<sidestream::MembersOfModules> {
  static const auto& children(const Module& module) noexcept { return module.children_.items(); }
  static const auto& parameters(const Module& module) noexcept { return module.parameters_.items(); }
  static const auto& buffers(const Module& module) noexcept { return module.buffers_.items(); }
  static const bool& training(const Module& module) noexcept { return module.is_training_; }
  static void set_training(const Module& module, bool on) noexcept { const_cast<Module&>(module).is_training_ = on; }
};

namespace sidestream {
namespace {

using HeldMembers = torch::nn::AnyModuleHolder<MembersOfModules>;

const void* identity(const at::Tensor& tensor) noexcept { return tensor.unsafeGetTensorImpl(); }

template <class Items, class Identity>
bool same_items(const Items& items, const void* const* expected, const Identity& of) noexcept {
  for (const auto& item : items) {
    if (of(item.value()) != *expected++) {
      return false;
    }
  }
  return true;
}

std::string joined(const std::string& prefix, const std::string& name) {
  return prefix.empty() ? name : prefix + "." + name;
}

/// Reads `module` if it is of one of the classes.
template <class... Classes, class Read>
bool read_as(const torch::nn::Module& module, const Read& read) {
  const auto try_one = [&](const auto* found) {
    if (found != nullptr) {
      read(*found);
    }
    return found != nullptr;
  };
  return (try_one(dynamic_cast<const Classes*>(&module)) || ...);
}

std::string text_of(const std::optional<double>& number) {
  std::ostringstream text;
  if (!number) {
    return "none";
  }
  text << *number;
  return text.str();
}

}  // namespace

ModuleFacts::ModuleFacts(std::shared_ptr<const torch::nn::Module> root, bool with_tensors) {
  if (root != nullptr) {
    add(root, "", with_tensors);
  }
}

void ModuleFacts::add(const std::shared_ptr<const torch::nn::Module>& module, const std::string& name,
                      bool with_tensors) {
  if (std::any_of(entries_.begin(), entries_.end(), [&](const Entry& entry) { return entry.module == module; })) {
    return;
  }
  const auto watch = [&](const at::Tensor& tensor) {
    if (with_tensors && std::none_of(tensors_.begin(), tensors_.end(),
                                     [&](const TensorFacts& known) { return known.tensor().is_same(tensor); })) {
      tensors_.emplace_back(tensor);
    }
  };
  Entry entry{module, name, HeldMembers::training(*module),         options_of(*module),
              {},     {},   HeldMembers::parameters(*module).size()};
  for (const auto* items : {&HeldMembers::parameters(*module), &HeldMembers::buffers(*module)}) {
    for (const auto& item : *items) {
      entry.tensors.push_back(identity(item.value()));
      watch(item.value());
    }
  }
  for (const auto& item : HeldMembers::children(*module)) {
    entry.children.push_back(item.value().get());
  }
  entries_.push_back(std::move(entry));
  for (const auto& item : HeldMembers::children(*module)) {
    if (item.value() != nullptr) {
      add(item.value(), joined(name, item.key()), with_tensors);
    }
  }
}

std::vector<ModuleFacts::Option> ModuleFacts::options_of(const torch::nn::Module& module) {
  namespace nn = torch::nn;
  std::vector<Option> options;
  const auto add = [&](const char* name, const auto& number) {
    if constexpr (std::is_same_v<std::decay_t<decltype(number)>, double>) {
      options.push_back({name, &number, nullptr, number});
    } else {
      options.push_back({name, nullptr, &number, number});
    }
  };
  const auto rate = [&](const auto& of) { add("p", of.options.p()); };
  const auto momentum = [&](const auto& of) { add("momentum", of.options.momentum()); };
  const auto bounds = [&](const auto& of) {
    add("lower", of.options.lower());
    add("upper", of.options.upper());
  };
  (void)(read_as<nn::DropoutImpl, nn::Dropout2dImpl, nn::Dropout3dImpl, nn::AlphaDropoutImpl,
                 nn::FeatureAlphaDropoutImpl>(module, rate) ||
         read_as<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl,
                 nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl>(module, momentum) ||
         read_as<nn::MultiheadAttentionImpl>(module, [&](const auto& of) { add("dropout", of.options.dropout()); }) ||
         read_as<nn::RReLUImpl>(module, bounds) ||
         read_as<nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl>(
             module, [&](const auto& of) { add("dropout", of.options_base.dropout()); }));
  return options;
}

bool ModuleFacts::Option::same() const noexcept {
  const std::optional<double> value = now();
  return value.has_value() == before.has_value() && (!value || std::memcmp(&*value, &*before, sizeof *value) == 0);
}

bool ModuleFacts::same_options(const Entry& entry) noexcept {
  return std::all_of(entry.options.begin(), entry.options.end(), [](const Option& option) { return option.same(); });
}

bool ModuleFacts::same_members(const Entry& entry) noexcept {
  const torch::nn::Module& module = *entry.module;
  const auto& children = HeldMembers::children(module);
  const auto& parameters = HeldMembers::parameters(module);
  const auto& buffers = HeldMembers::buffers(module);
  return children.size() == entry.children.size() && parameters.size() == entry.parameters &&
         parameters.size() + buffers.size() == entry.tensors.size() &&
         same_items(children, entry.children.data(), [](const auto& child) -> const void* { return child.get(); }) &&
         same_items(parameters, entry.tensors.data(), identity) &&
         same_items(buffers, entry.tensors.data() + entry.parameters, identity);
}

FactsChange ModuleFacts::members_change() const noexcept {
  FactsChange change;
  change.identity = !std::all_of(entries_.begin(), entries_.end(), same_members);
  return change;
}

bool ModuleFacts::same_child(const Place& place) const noexcept {
  const Entry& parent = entries_[place.parent];
  const auto& children = HeldMembers::children(*parent.module);
  return children.size() == parent.children.size() &&
         children[place.child].value().get() == parent.children[place.child];
}

void ModuleFacts::attend_to(const std::vector<TensorFacts>& read) {
  attends_ = true;
  for (std::size_t i = 0; i < entries_.size(); ++i) {
    const Entry& entry = entries_[i];
    flags_.push_back({&HeldMembers::training(*entry.module), entry.training});
    if (!entry.options.empty()) {
      with_options_.push_back(i);
    }
    if (std::any_of(read.begin(), read.end(), [&](const TensorFacts& tensor) {
          return std::find(entry.tensors.begin(), entry.tensors.end(), identity(tensor.tensor())) !=
                 entry.tensors.end();
        })) {
      attended_.push_back(i);
      attend_to_way(i);
    }
  }
}

void ModuleFacts::attend_to_way(std::size_t index) {
  for (std::size_t parent = 0; parent < entries_.size(); ++parent) {
    const std::vector<const void*>& children = entries_[parent].children;
    for (std::size_t child = 0; child < children.size(); ++child) {
      const Place place{parent, child};
      if (children[child] == entries_[index].module.get() &&
          std::find(ways_.begin(), ways_.end(), place) == ways_.end()) {
        ways_.push_back(place);
        attend_to_way(parent);
      }
    }
  }
}

FactsChange ModuleFacts::attended_change() const noexcept {
  FactsChange change;
  if (!std::all_of(ways_.begin(), ways_.end(), [&](const Place& place) { return same_child(place); }) ||
      !std::all_of(attended_.begin(), attended_.end(), [&](std::size_t i) { return same_members(entries_[i]); })) {
    change.identity = true;
    return change;  // what stood there may not be looked at
  }
  for (const Flag& flag : flags_) {
    change.training = change.training || *flag.now != flag.before;
  }
  for (const std::size_t i : with_options_) {
    change.options = change.options || !same_options(entries_[i]);
  }
  change |= tensors_change();
  return change;
}

FactsChange ModuleFacts::change() const noexcept {
  if (attends_) {
    return attended_change();
  }
  FactsChange change;
  for (const Entry& entry : entries_) {
    if (!same_members(entry)) {
      change.identity = true;
      return change;  // what stood there may not be looked at
    }
    change.training = change.training || HeldMembers::training(*entry.module) != entry.training;
    change.options = change.options || !same_options(entry);
  }
  change |= tensors_change();
  return change;
}

FactsChange ModuleFacts::change_of_all() const noexcept {
  FactsChange all = change();
  if (attends_) {
    all |= members_change();
  }
  return all;
}

FactsChange ModuleFacts::tensors_change() const noexcept {
  FactsChange change;
  TensorFacts::add_changes(tensors_, change);
  return change;
}

void ModuleFacts::take_training(const ModuleFacts& earlier) noexcept {
  for (const Entry& before : earlier.entries_) {
    for (Entry& entry : entries_) {
      if (entry.module == before.module) {
        entry.training = before.training;
      }
    }
  }
}

void ModuleFacts::take_flags(const ModuleFacts& earlier) noexcept {
  take_training(earlier);
  for (const TensorFacts& before : earlier.tensors_) {
    for (TensorFacts& tensor : tensors_) {
      if (tensor.tensor().is_same(before.tensor())) {
        tensor.expect_requires_grad(before.requires_grad());
      }
    }
  }
}

ModuleFacts ModuleFacts::as_now(bool with_tensors) const {
  if (entries_.empty()) {
    return {};
  }
  ModuleFacts now(entries_.front().module, with_tensors);
  now.take_training(*this);
  return now;
}

std::string ModuleFacts::name_of(const at::Tensor& tensor) const {
  for (const Entry& entry : entries_) {
    for (const auto* items : {&HeldMembers::parameters(*entry.module), &HeldMembers::buffers(*entry.module)}) {
      for (const auto& item : *items) {
        if (item.value().is_same(tensor)) {
          return joined(entry.name, item.key());
        }
      }
    }
  }
  return {};
}

std::string ModuleFacts::difference() const {
  const auto quoted = [](const Entry& entry) { return entry.name.empty() ? "the module" : "\"" + entry.name + "\""; };
  for (const Entry& entry : entries_) {
    if (!same_members(entry)) {
      return quoted(entry) + " has other submodules, parameters or buffers";
    }
  }
  for (const bool layout : {true, false}) {  // what says most comes first
    for (const TensorFacts& tensor : tensors_) {
      const std::string what = tensor.difference();
      if (!what.empty() && (!layout || tensor.change().layout)) {
        return "\"" + name_of(tensor.tensor()) + "\" " + what;
      }
    }
  }
  for (const Entry& entry : entries_) {
    if (HeldMembers::training(*entry.module) != entry.training) {
      return quoted(entry) + (entry.training ? " is in eval mode, was training" : " is training, was in eval mode");
    }
    for (const Option& option : entry.options) {
      if (!option.same()) {
        return quoted(entry) + ": its option " + option.name + " is " + text_of(option.now()) + ", was " +
               text_of(option.before);
      }
    }
  }
  return {};
}

ModelFlagsGuard::ModelFlagsGuard(const ModuleFacts& facts) {
  for (const ModuleFacts::Entry& entry : facts.entries_) {
    if (HeldMembers::training(*entry.module) != entry.training) {
      HeldMembers::set_training(*entry.module, entry.training);
      modules_.push_back(entry.module);
    }
  }
  for (const TensorFacts& facts_of : facts.tensors_) {
    const at::Tensor& tensor = facts_of.tensor();
    if (tensor.defined() && tensor.is_leaf() && tensor.requires_grad() != facts_of.requires_grad()) {
      tensor.set_requires_grad(facts_of.requires_grad());
      tensors_.push_back(tensor);
    }
  }
}

ModelFlagsGuard::~ModelFlagsGuard() {
  for (const auto& module : modules_) {
    HeldMembers::set_training(*module, !HeldMembers::training(*module));
  }
  for (const at::Tensor& tensor : tensors_) {
    if (tensor.is_leaf()) {
      tensor.set_requires_grad(!tensor.requires_grad());
    }
  }
}

}  // namespace sidestream
