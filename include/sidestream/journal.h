#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "sidestream/detail/export.h"

namespace sidestream {

/// Bytes that an operation touched. Device and pinned host memory share one address space.
struct JournalAccess {
  std::uint64_t begin = 0;
  std::uint64_t bytes = 0;
  bool write = false;
  bool pinned = false;  ///< host memory that the device copies from or to
};

/// What an operation does. Each `record` makes a new version of its event; a `wait` is for the version current at its place.
enum class JournalKind : std::uint8_t {
  compute,
  copy_to_host,
  copy_to_device,
  record,             ///< `stream` records `event`
  wait,               ///< `stream` waits for `event`
  host_access,        ///< the host itself reads or writes
  host_waits_event,   ///< the host has seen `event`: all that is issued later is behind it
  host_waits_stream,  ///< the host has seen all that `stream` was given
  host_waits_device,  ///< the host has seen everything
  freed_behind,       ///< its accesses name memory that was freed and is lent again only behind what `stream` did to it
};

/// Where in the program an operation was issued.
struct JournalSite {
  std::uint32_t name = 0;   ///< a call or group, in Journal::names; 0: outside of any
  std::uint32_t phase = 0;  ///< "launch forward", "offload", ..., in Journal::names
  std::uint64_t step = 0;   ///< counted from 1; 0: outside of any
};

/// One operation in the order of issue. A graph's launch is written out: what its capture held, each fork as a stream of its
/// own that goes on from launch to launch.
struct JournalOperation {
  JournalKind kind = JournalKind::compute;
  std::uint32_t stream = 0;  ///< in Journal::streams
  std::uint32_t event = 0;   ///< for records and waits: a number, the same for the same event
  std::uint32_t name = 0;    ///< operator or call, in Journal::names
  std::uint32_t site = 0;    ///< in Journal::sites
  std::uint64_t first_access = 0;
  std::uint32_t accesses = 0;  ///< so many from `first_access` in Journal::accesses
};

/// What a device was asked to do. Plain data: what the order checker reads. Entry 0 of `names` is empty, of `sites` nowhere.
struct Journal {
  std::vector<std::string> names{std::string()};
  std::vector<std::string> streams;
  std::vector<JournalSite> sites{JournalSite()};
  std::vector<JournalOperation> operations;
  std::vector<JournalAccess> accesses;
};

/// Accesses that nothing orders and waits for events that nothing recorded, one line each: both operations with stream, place
/// and step, the bytes, and the edge that would fix it. Like findings are given once. Threads: any.
[[nodiscard]] SIDESTREAM_API std::vector<std::string> check_order(const Journal& journal);

/// The journal as the content of a file; docs/journal.md says how it is laid out.
[[nodiscard]] SIDESTREAM_API std::string journal_bytes(const Journal& journal);
/// Reads such a file. Throws: UsageError, with the remedy, for a file that cannot be read, is no journal, is of a newer
/// version, is truncated or damaged, or (with its size) would not fit into this machine's memory.
[[nodiscard]] SIDESTREAM_API Journal read_journal(const std::string& path);
/// The same of such a file's content; `source` names it in errors.
[[nodiscard]] SIDESTREAM_API Journal parse_journal(std::string_view content, const std::string& source);

}  // namespace sidestream
