#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Bytes that an operation touched. Device and pinned host memory share one address space.
struct JournalAccess {
  std::uint64_t begin = 0;  ///< address of the first byte
  std::uint64_t bytes = 0;  ///< number of bytes
  bool write = false;       ///< false: only read
  bool pinned = false;      ///< pinned host memory, from or to which the device copies
};

/// What an operation does. Each `record` makes a new version of its event, and a `wait` waits for the version that is current then.
enum class JournalKind : std::uint8_t {
  compute,            ///< an operator
  copy_to_host,       ///< a copy from the device to the host
  copy_to_device,     ///< a copy from the host to the device
  record,             ///< `stream` records `event`
  wait,               ///< `stream` waits for `event`
  host_access,        ///< the host itself reads or writes
  host_waits_event,   ///< the host waited for `event`; everything issued later comes after it
  host_waits_stream,  ///< the host waited for all work of `stream`
  host_waits_device,  ///< the host waited for all work
  freed_behind,       ///< the bytes of its accesses were freed; they are reused only after `stream`'s work on them
};

/// Where in the program an operation was issued.
struct JournalSite {
  std::uint32_t name = 0;   ///< index in Journal::names: a call or group; 0: none
  std::uint32_t phase = 0;  ///< index in Journal::names: "launch forward", "offload", ...
  std::uint64_t step = 0;   ///< number of the step, from 1; 0: none
};

/// One operation. A graph's launch is written out as the operations of its capture. Each fork in a graph appears as a separate stream,
/// which is the same in each launch.
struct JournalOperation {
  JournalKind kind = JournalKind::compute;  ///< what it does
  std::uint32_t stream = 0;                 ///< index in Journal::streams
  std::uint32_t event = 0;                  ///< for records and waits: a number that identifies the event
  std::uint32_t name = 0;                   ///< index in Journal::names: operator or call
  std::uint32_t site = 0;                   ///< index in Journal::sites
  std::uint64_t first_access = 0;           ///< index in Journal::accesses of its first access
  std::uint32_t accesses = 0;               ///< number of its accesses
};

/// The work that a device was given, as plain data. The order checker reads it.
struct Journal {
  std::vector<std::string> names{std::string()};  ///< entry 0 is empty
  std::vector<std::string> streams;               ///< names of streams
  std::vector<JournalSite> sites{JournalSite()};  ///< entry 0 is no place
  std::vector<JournalOperation> operations;       ///< in the order of issue
  std::vector<JournalAccess> accesses;            ///< of all operations
};

/// Finds accesses that nothing orders, and waits for events that nothing recorded. Returns one line for each.
///
/// A line names both operations with stream, place and step, the bytes, and the wait that would fix it. Equal findings are given once.
/// Threads: any.
[[nodiscard]] SIDESTREAM_API std::vector<std::string> check_order(const Journal& journal);

/// The content of a journal file. docs/journal.md describes the format.
[[nodiscard]] SIDESTREAM_API std::string journal_bytes(const Journal& journal);
/// Reads a journal file.  Throws: UsageError, with the remedy, for a file that cannot be read, is not a journal, has a newer version, or
/// is truncated or damaged. Also for a file that would not fit into this machine's memory; the message gives its size.
[[nodiscard]] SIDESTREAM_API Journal read_journal(const std::string& path);
/// Reads the content of a journal file. `source` names it in errors.  Throws: as read_journal.
[[nodiscard]] SIDESTREAM_API Journal parse_journal(std::string_view content, const std::string& source);

}  // namespace sidestream
