#pragma once
#include <cstddef>
#include <vector>

#include "graphs/guards/call_spec.h"

namespace sidestream {

/// The outputs whose memory goes back to the pool before the last capture. For each, the index of the first graph that may use the
/// memory again. Knows which outputs no graph has overwritten since they were given out.
class ReleasedOutputs {
 public:
  /// While graphs are captured: in the order of their graph indices. `index`: among the output storages of `call`.
  void add(std::size_t graph_index, std::size_t call, std::size_t index) {
    all_.push_back({graph_index, {call, index}});
  }
  /// Before the launch of the graph at `graph_index`: calls `overwrite(output)` for each output whose memory that graph is the first to
  /// use again. If a call throws, the next launch repeats it.
  template <class Overwrite>
  void before_launch(std::size_t graph_index, const Overwrite& overwrite) {
    while (next_ > 0 && all_[next_ - 1].graph_index > graph_index) {  // a pass begins anew
      --next_;
    }
    for (; next_ < all_.size() && all_[next_].graph_index <= graph_index; ++next_) {
      overwrite(all_[next_].output);
    }
  }
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const Released& released : all_) {
      visit(released.output);
    }
  }
  /// Forgets the outputs of `call`.
  void drop(std::size_t call) noexcept {
    for (std::size_t i = all_.size(); i-- > 0;) {
      if (all_[i].output.call == call) {
        all_.erase(all_.begin() + static_cast<std::ptrdiff_t>(i));
        next_ -= i < next_ ? 1 : 0;
      }
    }
  }
  void clear() noexcept {
    all_.clear();
    next_ = 0;
  }

 private:
  struct Released {
    std::size_t graph_index;
    Link output;
  };
  std::vector<Released> all_;
  std::size_t next_ = 0;  ///< all before it have been overwritten, or were not given out since
};

}  // namespace sidestream
