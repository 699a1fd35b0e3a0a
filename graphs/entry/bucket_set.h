#pragma once
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "graphs/calls/engine_counts.h"
#include "graphs/entry/bucket_pass.h"
#include "graphs/guards/call_modes.h"
#include "sidestream/bucketed_callables.h"
#include "sidestream/engine.h"
#include "sidestream/graphed_callable.h"

namespace sidestream {

/// Callables that were captured together, once for each bucket of shapes; what their BucketedCallables share.
/// Threads: one at a time.
class BucketSet {
 public:
  /// Captures a bucket of each of `samples`, the largest first. Throws: as make_bucketed_callables.
  BucketSet(const OffloadEngine& engine, std::vector<Callable> callables,
            const std::vector<std::vector<std::vector<Sample>>>& samples, const BucketOptions& options);

  /// A call of callable `index`: the bucket that fits, or what the options say.
  /// `options`: null for none.
  Tensors run(std::size_t index, const Tensors& inputs, const ReplayOptions* options);
  [[nodiscard]] Tensors in_order(std::size_t index, c10::ArrayRef<NamedInput> inputs) const;
  /// Drops its graphs in all buckets.
  void reset(std::size_t index);
  [[nodiscard]] const std::string& name(std::size_t index) const { return callables_[index].name(); }
  [[nodiscard]] std::size_t callables() const noexcept { return callables_.size(); }

 private:
  struct Bucket {
    std::vector<GraphedCallable> callables;
    std::uint64_t used_at = 0;
  };

  void capture(const std::vector<std::vector<Sample>>& samples, const GraphOptions& options);
  /// The pass that was noted becomes a bucket, if that is possible now.
  void capture_pass();
  void drop_least_used();
  [[nodiscard]] Bucket* fitting(std::size_t index, const Tensors& inputs);
  /// Throws where inputs that fit no bucket are refused; warns once where they are to be told of.
  void check_unknown(std::size_t index);
  /// Notes the call for a capture, where it is of a pass whose first inputs fit no bucket.
  bool note(std::size_t index, const Tensors& inputs);
  void warn(std::size_t index, const char* why);
  /// True where one bucket more may be captured. Warns once, or throws, where not.
  bool has_room(std::size_t index);
  [[nodiscard]] EagerCause cause_of_eager_run(bool fits) const;
  [[nodiscard]] bool is_pending() const;
  [[nodiscard]] bool is_in_other_mode() const;
  [[nodiscard]] CallModes modes() const;

  OffloadEngine engine_;
  std::vector<Callable> callables_;
  BucketOptions options_;
  bool gradients_;                      ///< false: forwards alone
  std::vector<GraphedCallable> first_;  ///< of the first bucket: for runs that are no replays, also when it was dropped
  std::vector<Bucket> buckets_;
  std::uint64_t clock_ = 0;
  std::vector<bool> dropped_;  ///< by callables: reset by the user
  std::vector<bool> warned_;   ///< by callables: of inputs that fit none
  bool warned_of_bound_ = false;
  BucketPass pass_;
  CallModes modes_;             ///< that the pass began in
  bool first_replays_ = false;  ///< the latest call of the first callable did
};

}  // namespace sidestream
