#include "graphs/guards/module_options.h"

#include <algorithm>
#include <cstring>
#include <sstream>

#include <torch/nn/modules/activation.h>
#include <torch/nn/modules/batchnorm.h>
#include <torch/nn/modules/dropout.h>
#include <torch/nn/modules/instancenorm.h>
#include <torch/nn/modules/rnn.h>

namespace sidestream {

/// Finds the options of a module by its class.
class OptionReader {
 public:
  OptionReader(const torch::nn::Module& module, ModuleOptions& options) : module_(module), options_(options) {}

  void read() {
    namespace nn = torch::nn;
    const auto rate = [&](const auto& of) { add("p", of.options.p()); };
    const auto momentum = [&](const auto& of) { add("momentum", of.options.momentum()); };
    const bool found =
        any<nn::DropoutImpl, nn::Dropout2dImpl, nn::Dropout3dImpl, nn::AlphaDropoutImpl, nn::FeatureAlphaDropoutImpl>(
            rate) ||
        any<nn::BatchNorm1dImpl, nn::BatchNorm2dImpl, nn::BatchNorm3dImpl, nn::InstanceNorm1dImpl,
            nn::InstanceNorm2dImpl, nn::InstanceNorm3dImpl>(momentum) ||
        any<nn::MultiheadAttentionImpl>([&](const auto& of) { add("dropout", of.options.dropout()); });
    if (!found) {
      (void)any<nn::RReLUImpl>([&](const auto& of) {
        add("lower", of.options.lower());
        add("upper", of.options.upper());
      });
      (void)any<nn::RNNImpl, nn::LSTMImpl, nn::GRUImpl>(
          [&](const auto& of) { add("dropout", of.options_base.dropout()); });
    }
  }

 private:
  template <class... Classes, class Read>
  bool any(const Read& read) {
    const auto try_one = [&](const auto* module) {
      if (module != nullptr) {
        read(*module);
      }
      return module != nullptr;
    };
    return (try_one(dynamic_cast<const Classes*>(&module_)) || ...);
  }
  void add(const char* name, const double& number) { options_.numbers_.push_back({name, &number, number}); }
  void add(const char* name, const std::optional<double>& number) {
    options_.optional_numbers_.push_back({name, &number, number});
  }

  const torch::nn::Module& module_;
  ModuleOptions& options_;
};

namespace {

/// A NaN is the same as itself.
bool same_number(double a, double b) noexcept { return std::memcmp(&a, &b, sizeof a) == 0; }
bool same_number(const std::optional<double>& a, const std::optional<double>& b) noexcept {
  return a.has_value() == b.has_value() && (!a || same_number(*a, *b));
}

std::string text_of(double number) {
  std::ostringstream text;
  text << number;
  return text.str();
}
std::string text_of(const std::optional<double>& number) { return number ? text_of(*number) : "none"; }

template <class Entries>
std::string first_difference(const Entries& entries) {
  for (const auto& entry : entries) {
    if (!same_number(*entry.at, entry.was)) {
      return std::string(entry.name) + " is " + text_of(*entry.at) + ", was " + text_of(entry.was);
    }
  }
  return {};
}

template <class Entries>
bool all_same(const Entries& entries) noexcept {
  return std::all_of(entries.begin(), entries.end(),
                     [](const auto& entry) { return same_number(*entry.at, entry.was); });
}

}  // namespace

ModuleOptions::ModuleOptions(const torch::nn::Module& module) { OptionReader(module, *this).read(); }

bool ModuleOptions::same() const noexcept { return all_same(numbers_) && all_same(optional_numbers_); }

std::string ModuleOptions::difference() const {
  const std::string difference = first_difference(numbers_);
  return difference.empty() ? first_difference(optional_numbers_) : difference;
}

}  // namespace sidestream
