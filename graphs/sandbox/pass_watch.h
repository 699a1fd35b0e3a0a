#pragma once
#include <string>
#include <vector>

#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>

#include "graphs/guards/call_spec.h"
#include "graphs/sandbox/written_storages.h"
#include "observe/external_reads.h"
#include "observe/operator_observer.h"
#include "offload/exclusions.h"
#include "runtime/weak_storage_set.h"

namespace sidestream {

/// Watches the eager passes of a sequence's bodies: what they write and did not make is as before when this object dies, and what
/// a graph would freeze or lose without a word is refused by name.
/// Threads: `before` and `after` as an observer's; the rest one thread.
class PassWatch {
 public:
  /// What bodies read from elsewhere is not to be offloaded: `exclusions` hears of it. `met` gets, at last when this object dies,
  /// the storages that were touched and that live.
  PassWatch(c10::Device device, Exclusions& exclusions, WeakStorageSet& met);
  PassWatch(const PassWatch&) = delete;
  PassWatch& operator=(const PassWatch&) = delete;
  ~PassWatch();

  /// Passes of the body of `spec` on `inputs` begin; both must live until the next ones do. What is saved of an input may be
  /// offloaded if `may_be_offloaded` says so.
  /// Throws: UsageError for an input on another device.
  void enter(const CallSpec& spec, const std::vector<at::Tensor>& inputs, const std::vector<bool>& may_be_offloaded);
  void before(const OperatorAccess& access);
  void after(const OperatorAccess& access);
  /// What the passes since `enter` read from elsewhere.
  [[nodiscard]] const ExternalReads& reads() const noexcept { return reads_; }
  /// An input was written in place: throws CaptureError. For a body that failed as well, since LibTorch refuses it at leaves.
  void check_inputs() const;
  /// Throws: CaptureError for what else cannot be captured: tensors on other devices, draws on the CPU, draws from a generator that
  /// the call does not name.
  void check() const;

 private:
  struct Foreign {
    const c10::StorageImpl* storage;  // `reads_` keeps it
    std::string what;
  };

  struct Unnamed {
    at::Generator generator;
    at::Tensor state;
  };

  [[nodiscard]] std::string name() const { return "graphed call \"" + spec_->name + "\""; }
  [[nodiscard]] std::string registered_name(const at::Tensor& tensor) const;
  /// One of a device that the call does not name.
  [[nodiscard]] bool is_unnamed(const at::Generator* generator) const;
  void keep_state(at::Generator generator);
  void forget_reads();
  void note_foreign(const at::Tensor& tensor, const OperatorAccess& access);

  c10::Device device_;
  Exclusions& exclusions_;
  WeakStorageSet& met_;
  const CallSpec* spec_ = nullptr;
  const std::vector<at::Tensor>* inputs_ = nullptr;
  ExternalReads reads_;
  std::vector<Foreign> foreign_;
  std::string written_input_;     ///< what was found first; empty for nothing
  std::vector<Unnamed> unnamed_;  ///< generators that calls draw from and do not name
  const char* unnamed_draw_ = nullptr;
  const char* cpu_draw_ = nullptr;
  bool cpu_draw_nested_ = false;
  WrittenStorages written_;
  at::Generator cpu_generator_;
  at::Tensor cpu_state_;
};

}  // namespace sidestream
