#pragma once
#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "sidestream/detail/export.h"
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
  bool pinned = false;  ///< they are host memory
};

/// Finds unordered accesses with vector clocks. Pure: no device, no LibTorch.
///
/// Cost: near-linear in operations; a wait costs the number of streams, an access the logarithm of the live ranges.
/// Like findings (the same two names, places and streams, in whatever step) are reported once.
class SIDESTREAM_API OrderChecker {
 public:
  /// `clock_entries`: how many 8-byte entries the clocks of streams and events may take together; by default half of the
  /// machine's memory. Each stream and each recorded event has one entry a stream at most.
  explicit OrderChecker(std::uint64_t clock_entries = half_of_memory()) : room_(clock_entries) {}
  /// Reads the operations from `next` to the end of `journal`; call again when it has grown.
  /// Throws: UsageError when the clocks would take more than they may.
  void read(const Journal& journal);
  [[nodiscard]] const std::vector<OrderFinding>& findings() const noexcept { return findings_; }
  [[nodiscard]] std::size_t operations() const noexcept { return next_; }
  /// Ranges, readers and clock entries looked at so far: the time grows with them.
  [[nodiscard]] std::uint64_t work() const noexcept { return work_; }

 private:
  using Clock = std::vector<std::uint64_t>;
  /// One access: by whom and when.
  struct Mark {
    std::uint32_t queue = 0;
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
  void access(const Journal& journal, std::size_t index, const JournalAccess& access, std::uint32_t queue);
  Ranges::iterator split_at(std::uint64_t address);
  [[nodiscard]] bool ordered(const Mark& earlier, std::uint32_t queue) const;
  void forget(const JournalAccess& freed, std::uint32_t queue);
  void report(const Journal& journal, const OrderFinding& finding);
  Clock& clock_of(std::uint32_t queue);
  void join(Clock& clock, const Clock& other);
  void grow(Clock& clock, std::size_t entries);
  [[nodiscard]] static std::uint64_t half_of_memory();

  std::uint64_t room_;  ///< entries that clocks may still grow by
  std::size_t next_ = 0;
  std::vector<Clock> clocks_;  ///< the first is the host's, then one for each stream
  std::vector<std::uint64_t> host_seen_;
  std::uint64_t host_version_ = 1;
  /// Of those recorded. A journal may number them as it likes, so no table up to the highest.
  std::unordered_map<std::uint32_t, Clock> events_;
  Ranges ranges_;
  std::vector<OrderFinding> findings_;
  /// Names, places and streams of both sides.
  using Pair = std::array<std::uint32_t, 8>;
  std::set<Pair> reported_;
  std::uint64_t work_ = 0;
};

/// One line for people: both operations with stream, place, direction and step, the bytes, and the edge that would fix it.
[[nodiscard]] SIDESTREAM_API std::string describe(const Journal& journal, const OrderFinding& finding);

}  // namespace sidestream
