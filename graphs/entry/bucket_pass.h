#pragma once
#include <cstddef>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

#include "graphs/guards/call_spec.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// What callables are given in one pass over them, each once and in order, kept until they are captured with it.
/// Threads: one at a time.
class BucketPass {
 public:
  explicit BucketPass(c10::Device device) noexcept : device_(device) {}

  /// `links[i]`: the arguments of callable i; those that are outputs are taken as such where they are it in the pass too.
  void expect(std::vector<std::vector<Sample>> links) { links_ = std::move(links); }
  /// The first callable is about to be called: what was noted before is forgotten.
  void begin();
  /// True while callable `index` is the next one.
  [[nodiscard]] bool awaits(std::size_t index) const noexcept {
    return begun_ && noted_.size() == index && given_.size() == index;
  }
  /// It is, with `inputs`: copies to the host those that are no outputs of the pass.
  /// Throws: what the copies throw; nothing is noted then.
  void note(const Tensors& inputs);
  /// What it gave.
  void gave(const Tensors& outputs);
  /// True when all callables have been called.
  [[nodiscard]] bool complete() const noexcept { return begun_ && given_.size() == links_.size(); }
  /// Samples for a capture, on the device; the pass is over.
  [[nodiscard]] std::vector<std::vector<Sample>> take();
  void stop() noexcept;

 private:
  struct Argument {
    CallInput input;             ///< a sample; undefined for an undefined argument
    bool is_leaf = true;         ///< the argument itself was
    std::int64_t callable = -1;  ///< whose output it is; -1 for a sample
    std::int64_t output = 0;
  };
  [[nodiscard]] bool is_output(const at::Tensor& input, const Sample& link) const;

  c10::Device device_;
  std::vector<std::vector<Sample>> links_;
  std::vector<std::vector<Argument>> noted_;
  std::vector<std::vector<c10::weak_intrusive_ptr<c10::TensorImpl>>> given_;
  bool begun_ = false;
};

}  // namespace sidestream
