#pragma once
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "graphs/guards/call_spec.h"
#include "graphs/sandbox/sandbox.h"
#include "observe/external_reads.h"
#include "observe/operator_observer.h"
#include "offload/exclusions.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// Watches the eager passes of a sequence's bodies. Gives the sandbox the tensors and generators that the passes change. Refuses by
/// name what a graph would silently freeze or lose.
/// Threads: `before` and `after` as an observer's; the rest one thread.
class PassWatch {
 public:
  /// Adds to `exclusions` the storages that bodies read and did not make: they must not be offloaded. Adds to `met` the storages that
  /// the passes touched and that are alive, the last of them at its end. All three must outlive this object.
  PassWatch(c10::Device device, Sandbox& sandbox, Exclusions& exclusions, WeakStorageSet& met);
  PassWatch(const PassWatch&) = delete;
  PassWatch& operator=(const PassWatch&) = delete;
  ~PassWatch();

  /// Call before the passes of the body of `spec` on `inputs`. Both must live until the next call of `enter`. `may_be_offloaded`: for
  /// each input, whether tensors that are saved of it may be offloaded.
  /// Throws: UsageError for an input on another device.
  void enter(const CallSpec& spec, const std::vector<at::Tensor>& inputs, const std::vector<bool>& may_be_offloaded);
  void before(const OperatorAccess& access);
  void after(const OperatorAccess& access);
  /// What the passes since `enter` read and did not make.
  [[nodiscard]] const ExternalReads& reads() const noexcept { return reads_; }
  /// Also for a body that failed: LibTorch refuses to write a leaf in place.
  /// Throws: CaptureError if an input was written in place.
  void check_inputs() const;
  /// Throws: CaptureError for an input that was written in place, for tensors on other devices, for draws on the CPU, and for draws from
  /// a generator that the call does not name.
  void check() const;

 private:
  struct Foreign {
    const c10::StorageImpl* storage;  // `reads_` keeps it
    std::string what;
  };

  [[nodiscard]] std::string name() const { return "graphed call \"" + spec_->name + "\""; }
  [[nodiscard]] std::string registered_name(const at::Tensor& tensor) const;
  /// True for a generator of a device that the call does not name.
  [[nodiscard]] bool is_unnamed(const at::Generator* generator) const;
  void forget_reads();
  void note_foreign(const at::Tensor& tensor, const OperatorAccess& access);

  c10::Device device_;
  Sandbox& sandbox_;
  Exclusions& exclusions_;
  WeakStorageSet& met_;
  const CallSpec* spec_ = nullptr;
  const std::vector<at::Tensor>* inputs_ = nullptr;
  ExternalReads reads_;
  std::vector<Foreign> foreign_;
  std::string written_input_;  ///< the first one, and what to do; empty if there is none
  const char* unnamed_draw_ = nullptr;
  const char* cpu_draw_ = nullptr;
  bool cpu_draw_nested_ = false;
  GeneratorState cpu_;  ///< kept only if a body draws: draws of other threads must not be undone
};

}  // namespace sidestream
