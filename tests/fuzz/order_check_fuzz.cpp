#include <array>
#include <bitset>
#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "fuzz/target.h"
#include "observe/order_check.h"
#include "sidestream/journal.h"

// The order check against one that forgets nothing: for each operation the set of all before it, for each byte every access.
// Four bytes are an operation: kind and stream, event, and two accesses of up to seven of sixteen bytes.

namespace {

using sidestream::Journal;
using sidestream::JournalAccess;
using sidestream::JournalKind;
using sidestream::JournalOperation;

constexpr std::size_t kOperations = 96;
constexpr std::size_t kStreams = 4;
constexpr std::size_t kMemory = 16;
using Before = std::bitset<kOperations>;

JournalAccess access_of(std::uint8_t byte) {
  return {byte & 15U, static_cast<std::uint64_t>(byte >> 4) & 7U, byte >= 128};
}

Journal journal_of(const std::uint8_t* data, std::size_t size) {
  Journal journal;
  journal.streams.assign(kStreams, "stream");
  for (std::size_t at = 0; at + 4 <= size && journal.operations.size() < kOperations; at += 4) {
    JournalOperation operation;
    operation.kind = static_cast<JournalKind>((data[at] >> 2) % 9);
    operation.stream = data[at] % kStreams;
    operation.event = data[at + 1] % 4;
    operation.first_access = journal.accesses.size();
    operation.accesses = 2;
    journal.accesses.push_back(access_of(data[at + 2]));
    journal.accesses.push_back(access_of(data[at + 3]));
    journal.operations.push_back(operation);
  }
  return journal;
}

bool accesses_memory(JournalKind kind) {
  return kind == JournalKind::compute || kind == JournalKind::copy_to_host || kind == JournalKind::copy_to_device ||
         kind == JournalKind::host_access;
}

/// Whether any two accesses are unordered, or any wait is for an event never recorded.
bool faulty(const Journal& journal) {
  struct Touch {
    std::size_t operation;
    bool write;
  };
  std::array<Before, kStreams> streams;
  Before host;
  std::map<std::uint32_t, Before> events;
  std::array<std::vector<Touch>, kMemory + 8> touches;
  for (std::size_t index = 0; index < journal.operations.size(); ++index) {
    const JournalOperation& operation = journal.operations[index];
    Before& own = operation.kind == JournalKind::host_access ? host : streams[operation.stream];
    own |= host;
    if (operation.kind == JournalKind::record) {
      events[operation.event] = own;
    } else if (operation.kind == JournalKind::wait) {
      if (events.count(operation.event) == 0) {
        return true;
      }
      own |= events[operation.event];
    } else if (operation.kind == JournalKind::host_waits_event) {
      host |= events.count(operation.event) != 0 ? events[operation.event] : Before();
    } else if (operation.kind == JournalKind::host_waits_stream) {
      host |= own;
    } else if (operation.kind == JournalKind::host_waits_device) {
      for (const Before& stream : streams) {
        host |= stream;
      }
    }
    if (!accesses_memory(operation.kind)) {
      continue;
    }
    for (std::size_t i = 0; i < operation.accesses; ++i) {
      const JournalAccess& access = journal.accesses[operation.first_access + i];
      for (std::size_t byte = access.begin; byte < access.begin + access.bytes; ++byte) {
        for (const Touch& earlier : touches[byte]) {
          if (earlier.operation != index && (earlier.write || access.write) && !own[earlier.operation]) {
            return true;
          }
        }
        touches[byte].push_back({index, access.write});
      }
    }
    own.set(index);
  }
  return false;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const Journal journal = journal_of(data, size);
  sidestream::OrderChecker checker;
  checker.read(journal);
  sidestream::fuzz::require(checker.findings().empty() != faulty(journal), "a finding is there where a fault is");
  for (const sidestream::OrderFinding& finding : checker.findings()) {
    sidestream::fuzz::require(!sidestream::describe(journal, finding).empty(), "a finding has a text");
  }
  return 0;
}
