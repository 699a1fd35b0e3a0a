#pragma once
#include <cstdint>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include <c10/core/Device.h>

#include "observe/sync_finder.h"
#include "sidestream/report.h"

namespace sidestream {

/// Finds what makes the host wait in an engine's steps, by graphed call and scope (Options::find_syncs). Threads: the step's.
class StepSyncs {
 public:
  explicit StepSyncs(c10::DeviceType type);

  /// Finds while `step` lives. `captures`: made by the engine so far; where there are new ones, or few steps since, the allocator is
  /// still to take what steps need.
  void begin_step(std::optional<SyncFinder::Step>& step, std::int64_t captures);
  void add_to(Report& report) const { finder_.add_to(report); }

  /// While it lives, the calling thread runs the graphed call `name` eagerly, which must outlive the engine's steps. Calls inside of it
  /// are parts of it.
  class [[nodiscard]] InCall {
   public:
    /// `syncs`: null does nothing.
    InCall(StepSyncs* syncs, const std::string& name) : syncs_(syncs), before_(current_) {
      if (syncs_ != nullptr) {
        enter(name);
      }
    }
    InCall(const InCall&) = delete;
    InCall& operator=(const InCall&) = delete;
    ~InCall() {
      if (syncs_ != nullptr) {
        leave();
      }
    }
    [[nodiscard]] static const std::string* current() noexcept { return current_; }

   private:
    void enter(const std::string& name);
    void leave();

    StepSyncs* syncs_;
    const std::string* before_;
    static thread_local constinit const std::string* current_;
  };

 private:
  /// From this autograd node of the step's thread on, nodes were made there.
  struct Made {
    std::uint64_t node;
    const std::string* call;
    const std::string* scope;
  };

  [[nodiscard]] WaitPlace place() const;
  /// The nodes that the step's thread makes from number `from` on are made where it is now. Other threads' are not kept.
  void mark(std::uint64_t from);
  /// A node of the user's own is numbered before its first operator begins, so it is made in the same place.
  void pass(SyncFinder::OperatorEdge edge);

  SyncFinder finder_;
  mutable std::mutex mutex_;
  std::vector<Made> made_;        ///< in this step
  std::uint64_t made_by_ = 0;     ///< LibTorch's number of the step's thread
  std::uint64_t made_until_ = 0;  ///< the next node's number when the last operator there ended
  std::int64_t captures_ = 0;
  std::int64_t steps_alike_ = 0;  ///< since the first one, or since a capture
};

}  // namespace sidestream
