#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sidestream {

/// Where the nodes of one graph come from: in which scope each was captured, and by which operator.
class NodeNames {
 public:
  /// Both are empty if it is not known; only `work` if no operator captured the node (a record of an event).
  struct Name {
    std::string_view scope;
    std::string_view work;
  };

  /// The nodes from `first` on, up to the next mark's. A mark at the place of the latest replaces it.
  void mark(std::size_t first, std::uint32_t scope, std::uint32_t work) {
    const Mark mark{static_cast<std::uint32_t>(first), scope, work};
    if (!marks_.empty() && marks_.back().first >= mark.first) {
      marks_.back().scope = scope;
      marks_.back().work = work;
    } else if (marks_.empty() || marks_.back().scope != scope || marks_.back().work != work) {
      marks_.push_back(mark);
    }
  }
  /// For `mark`.
  std::uint32_t add(std::string_view text) {
    texts_.emplace_back(text);
    return static_cast<std::uint32_t>(texts_.size() - 1);
  }
  [[nodiscard]] Name of(std::size_t node) const noexcept {
    const auto after = std::upper_bound(marks_.begin(), marks_.end(), node,
                                        [](std::size_t sought, const Mark& mark) { return sought < mark.first; });
    return after == marks_.begin() ? Name() : Name{texts_[(after - 1)->scope], texts_[(after - 1)->work]};
  }

 private:
  struct Mark {
    std::uint32_t first;
    std::uint32_t scope;
    std::uint32_t work;
  };
  std::vector<Mark> marks_;  ///< by `first`, rising
  std::vector<std::string> texts_;
};

}  // namespace sidestream
