#pragma once
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "graphs/guards/tensor_facts.h"
#include "sidestream/detail/module_forward.h"

namespace sidestream {

/// A tree of modules at one moment: which modules, parameters and buffers are registered where, their flags and options, and how the
/// tensors lie in memory. Holds all of the modules, and the tensors if it is made with them, so that none of their addresses can be used
/// again by another.
///
/// Threads: one at a time. Comparing allocates nothing.
class ModuleFacts {
 public:
  ModuleFacts() = default;
  /// As it is now. `with_tensors`: the tensors' own facts too, not only which are registered.
  explicit ModuleFacts(std::shared_ptr<const torch::nn::Module> root, bool with_tensors = true);

  [[nodiscard]] FactsChange change() const noexcept;
  /// Of which modules, parameters and buffers are registered where, alone.
  [[nodiscard]] FactsChange members_change() const noexcept;
  /// From now on `change` looks at the members of those modules that have one of `read`, and at the path to them from the root. It looks
  /// at training flags and options of all modules. Otherwise a plain function, which may reach all modules of its model, would cost each
  /// call a look at all of them.
  void attend_to(const std::vector<TensorFacts>& read);
  [[nodiscard]] bool attends() const noexcept { return attends_; }
  /// `change`, and the members of all modules, whatever it attends to.
  [[nodiscard]] FactsChange change_of_all() const noexcept;
  /// Null if there is no root.
  [[nodiscard]] const torch::nn::Module* root() const noexcept {
    return entries_.empty() ? nullptr : entries_.front().module.get();
  }
  /// Of the tensors alone, which are held: no module is looked at.
  [[nodiscard]] FactsChange tensors_change() const noexcept;
  /// Takes the flags (training, requires_grad) that `earlier` has of the same modules and tensors.
  void take_flags(const ModuleFacts& earlier) noexcept;
  /// The same tree as it is now, with the training flags of this one.
  [[nodiscard]] ModuleFacts as_now(bool with_tensors = true) const;
  /// What changed, by its name: "fc1.weight" is frozen, was trained. Empty if nothing changed. Allocates.
  [[nodiscard]] std::string difference() const;
  /// Each tensor once.
  [[nodiscard]] const std::vector<TensorFacts>& tensors() const noexcept { return tensors_; }
  /// The name of a registered tensor below the root; empty if it is none.
  [[nodiscard]] std::string name_of(const at::Tensor& tensor) const;

 private:
  friend class ModelFlagsGuard;
  /// A number among the options of one of LibTorch's own modules, which a forward reads and schedules change: a dropout rate, a momentum,
  /// a bound. It lives as long as its module.
  struct Option {
    const char* name;
    const double* number;                   ///< null if the option is optional
    const std::optional<double>* optional;  ///< null if it is not
    std::optional<double> before;

    [[nodiscard]] std::optional<double> now() const { return number != nullptr ? std::optional(*number) : *optional; }
    /// A NaN is the same as itself.
    [[nodiscard]] bool same() const noexcept;
  };
  struct Entry {
    std::shared_ptr<const torch::nn::Module> module;
    std::string name;
    bool training;
    std::vector<Option> options;
    std::vector<const void*> children;
    std::vector<const void*> tensors;  ///< parameters, then buffers
    std::size_t parameters;
  };
  /// A place among the submodules of one.
  struct Place {
    std::size_t parent = 0;  ///< among the entries
    std::size_t child = 0;   ///< among its children
    bool operator==(const Place& other) const noexcept = default;
  };
  /// A module's training flag, which lives as long as the module.
  struct Flag {
    const bool* now = nullptr;
    bool before = false;
  };
  /// Of a module as it is now; none for a class that is not known.
  [[nodiscard]] static std::vector<Option> options_of(const torch::nn::Module& module);
  /// Allocates nothing.
  [[nodiscard]] static bool same_options(const Entry& entry) noexcept;
  void add(const std::shared_ptr<const torch::nn::Module>& module, const std::string& name, bool with_tensors);
  /// The training flags alone of what take_flags takes.
  void take_training(const ModuleFacts& earlier) noexcept;
  [[nodiscard]] static bool same_members(const Entry& entry) noexcept;
  [[nodiscard]] bool same_child(const Place& place) const noexcept;
  void attend_to_way(std::size_t index);
  [[nodiscard]] FactsChange attended_change() const noexcept;

  std::vector<Entry> entries_;  ///< each module once, parents first
  std::vector<TensorFacts> tensors_;
  // See attend_to: indices of entries.
  bool attends_ = false;
  std::vector<std::size_t> attended_;
  std::vector<Place> ways_;
  std::vector<std::size_t> with_options_;
  std::vector<Flag> flags_;
};

/// For its lifetime, modules train and leaves require gradients as `facts` say.
class [[nodiscard]] ModelFlagsGuard {
 public:
  explicit ModelFlagsGuard(const ModuleFacts& facts);
  ModelFlagsGuard(const ModelFlagsGuard&) = delete;
  ModelFlagsGuard& operator=(const ModelFlagsGuard&) = delete;
  ~ModelFlagsGuard();

 private:
  std::vector<std::shared_ptr<const torch::nn::Module>> modules_;  ///< that were in the other mode
  std::vector<at::Tensor> tensors_;                                ///< that had the other flag
};

}  // namespace sidestream
