#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <vector>

#include <c10/core/Device.h>

#include "graphs/sequence/graph_sequence.h"
#include "graphs/verify/verified_call.h"
#include "sidestream/detail/call_request.h"
#include "sidestream/detail/module_forward.h"
#include "sidestream/options.h"
#include "sidestream/report.h"

namespace sidestream {

class CallContext;

/// Runs some calls eagerly beside their replays and compares the two (Options::verify_replays): the first replays of each capture,
/// then one of so many. One call a step at most, so that the peak grows by one call's eager activations; those that had to wait
/// come first in the steps after.
/// Threads: the step's.
class ReplayVerification {
 public:
  /// Both must outlive this object.
  ReplayVerification(const Options& options, const torch::nn::Module& model, CallContext& context);
  ReplayVerification(const ReplayVerification&) = delete;
  ReplayVerification& operator=(const ReplayVerification&) = delete;
  ~ReplayVerification() = default;

  /// Replays the forward of `call`, and compares it if it is its turn. Throws: VerificationError, what the call throws, and as
  /// GraphSequence::forward.
  void forward(const std::shared_ptr<GraphSequence>& sequence, std::size_t call, const detail::CallRequest& request,
               detail::TensorBuffer& outputs);
  void begin_step() noexcept;
  /// An eager run whose backward did not come is let go.
  void end_step() noexcept;
  void add_to(Report& report) const;

 private:
  /// Of one captured call.
  struct Turns {
    std::uint64_t replays = 0;
    std::uint64_t verified = 0;
    std::uint64_t latest = 0;  ///< which replay was verified last
    std::uint64_t round = 0;   ///< in which it replayed last
  };
  [[nodiscard]] bool takes_turn(Turns& turns);
  [[nodiscard]] bool due(const Turns& turns) const noexcept;
  /// A round is a step; outside of steps, until a call comes a second time.
  void next_round() noexcept;
  [[nodiscard]] std::shared_ptr<VerifiedCall> run_eagerly(GraphSequence& sequence, std::size_t call,
                                                          const detail::CallRequest& request);

  static constexpr std::uint64_t kAny = std::numeric_limits<std::uint64_t>::max();

  const torch::nn::Module& model_;
  CallContext& context_;
  c10::Device device_;
  std::uint64_t first_;
  std::uint64_t every_;
  double tolerance_;
  std::map<std::weak_ptr<const GraphSequence>, std::vector<Turns>, std::owner_less<>> turns_;
  std::uint64_t round_ = 1;
  std::uint64_t limit_ = kAny;  ///< calls that were verified more often than this wait
  std::uint64_t least_ = kAny;  ///< how often the least verified one that is due in this round was
  bool taken_ = false;          ///< this round's turn
  bool in_step_ = false;
  std::weak_ptr<VerifiedCall> latest_;
  std::shared_ptr<VerifiedCall::Counts> counts_ = std::make_shared<VerifiedCall::Counts>();
};

}  // namespace sidestream
