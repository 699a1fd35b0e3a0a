#pragma once
#include <algorithm>
#include <functional>
#include <vector>

#include <ATen/core/Generator.h>
#include <c10/util/ArrayRef.h>

namespace sidestream::cuda {

/// The generators that a graph draws from, each once.
class GeneratorSet {
 public:
  GeneratorSet() = default;
  GeneratorSet(const at::Generator& of_device, c10::ArrayRef<at::Generator> others) : generators_(others.vec()) {
    generators_.push_back(of_device);
    std::sort(generators_.begin(), generators_.end(), [](const at::Generator& a, const at::Generator& b) {
      return std::less<>()(a.unsafeGetGeneratorImpl(), b.unsafeGetGeneratorImpl());
    });
    generators_.erase(std::unique(generators_.begin(), generators_.end()), generators_.end());
  }

  /// Holds the locks of all, which kernels take one at a time.
  class [[nodiscard]] Lock {
   public:
    explicit Lock(const GeneratorSet& set) : generators_(set.generators_) {
      for (const at::Generator& generator : generators_) {
        generator.unsafeGetGeneratorImpl()->mutex_.lock();
      }
    }
    Lock(const Lock&) = delete;
    Lock& operator=(const Lock&) = delete;
    ~Lock() {
      for (const at::Generator& generator : generators_) {
        generator.unsafeGetGeneratorImpl()->mutex_.unlock();
      }
    }

   private:
    const std::vector<at::Generator>& generators_;
  };

 private:
  std::vector<at::Generator> generators_;  ///< by address: whoever locks several does so in this order
};

}  // namespace sidestream::cuda
