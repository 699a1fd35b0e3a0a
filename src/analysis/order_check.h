#pragma once
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "sidestream/journal.h"

namespace sidestream {

/// Two operations that touch the same bytes, at least one of them writing, which no chain of stream order, events and host
/// waits orders; or a wait for an event that nothing has recorded.
struct OrderFinding {
  enum class Kind : std::uint8_t { unordered, never_recorded };
  Kind kind = Kind::unordered;
  std::size_t first = 0;    ///< index of the operation issued first; unused for `never_recorded`
  std::size_t second = 0;   ///< of the later one, or of the wait
  std::uint64_t begin = 0;  ///< the bytes that both touch
  std::uint64_t bytes = 0;
  bool first_writes = false;
  bool second_writes = false;
};

/// Finds unordered accesses with vector clocks. Pure: no device, no LibTorch.
///
/// Cost: near-linear in operations; a wait costs the number of streams, an access the logarithm of the live ranges.
/// Like findings (the same two names, places and streams) are reported once.
class OrderChecker {
 public:
  /// Reads the operations from `next` to the end of `journal`; call again when it has grown.
  void read(const Journal& journal);
  [[nodiscard]] const std::vector<OrderFinding>& findings() const noexcept { return findings_; }
  [[nodiscard]] std::size_t operations() const noexcept { return next_; }

 private:
  using Clock = std::vector<std::uint64_t>;
  /// One access: by whom and when.
  struct Mark {
    std::uint32_t lane = 0;
    std::uint64_t time = 0;
    std::size_t operation = 0;
  };
  /// The latest write to [key, end), and the reads since.
  struct Range {
    std::uint64_t end = 0;
    bool written = false;
    Mark writer;
    std::vector<Mark> readers;
  };
  using Ranges = std::map<std::uint64_t, Range>;

  void operation(const Journal& journal, std::size_t index);
  void access(const Journal& journal, std::size_t index, const JournalAccess& access, std::uint32_t lane);
  Ranges::iterator split_at(std::uint64_t address);
  [[nodiscard]] bool ordered(const Mark& earlier, std::uint32_t lane) const;
  void report(const Journal& journal, const Mark& earlier, bool earlier_writes, std::size_t index, std::uint64_t begin,
              std::uint64_t end, bool writes);
  Clock& clock_of(std::uint32_t lane);
  static void join(Clock& clock, const Clock& other);

  std::size_t next_ = 0;
  std::vector<Clock> lanes_;  ///< lane 0 is the host, lane n+1 stream n
  std::vector<std::uint64_t> host_seen_;
  std::uint64_t host_version_ = 1;
  std::vector<Clock> events_;
  std::vector<bool> recorded_;
  Ranges ranges_;
  std::vector<OrderFinding> findings_;
  using Pair = std::tuple<std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t, std::uint32_t>;
  std::set<Pair> reported_;
};

/// One line for people: both operations with stream, place, direction and step, the bytes, and the edge that would cure it.
[[nodiscard]] std::string describe(const Journal& journal, const OrderFinding& finding);

}  // namespace sidestream
