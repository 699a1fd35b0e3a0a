#include "observe/order_check.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>

#include <unistd.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

constexpr std::uint32_t kHost = 0;

std::uint32_t queue_of(const JournalOperation& operation) {
  return operation.kind == JournalKind::host_access ? kHost : operation.stream + 1;
}

}  // namespace

std::uint64_t OrderChecker::half_of_memory() {
  return static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE)) / 2 /
         sizeof(Clock::value_type);
}

void OrderChecker::grow(Clock& clock, std::size_t entries) {
  if (clock.size() >= entries) {
    return;
  }
  const std::size_t more = entries - clock.size();
  if (more > room_) {
    throw UsageError("the journal has " + std::to_string(clocks_.size()) + " streams and " +
                     std::to_string(events_.size()) +
                     " events; to check it would take more memory than this machine has. Check fewer steps");
  }
  room_ -= more;
  clock.resize(entries);
}

void OrderChecker::join(Clock& clock, const Clock& other) {
  grow(clock, other.size());
  work_ += other.size();
  for (std::size_t i = 0; i < other.size(); ++i) {
    clock[i] = std::max(clock[i], other[i]);
  }
}

OrderChecker::Clock& OrderChecker::clock_of(std::uint32_t queue) {
  if (queue >= clocks_.size()) {
    clocks_.resize(queue + 1);
    host_seen_.resize(queue + 1);
  }
  grow(clocks_[queue], std::size_t{queue} + 1);
  return clocks_[queue];
}

void OrderChecker::read(const Journal& journal) {
  for (; next_ < journal.operations.size(); ++next_) {
    operation(journal, next_);
  }
}

void OrderChecker::operation(const Journal& journal, std::size_t index) {
  const JournalOperation& operation = journal.operations[index];
  clock_of(kHost);
  const std::uint32_t queue = queue_of(operation);
  clock_of(queue);
  if (queue != kHost && host_seen_[queue] != host_version_) {
    // Issued after all that the host has seen and done.
    join(clocks_[queue], clocks_[kHost]);
    host_seen_[queue] = host_version_;
  }
  switch (operation.kind) {
    case JournalKind::record: {
      Clock& at_record = events_[operation.event];
      grow(at_record, clocks_[queue].size());
      at_record = clocks_[queue];
      return;
    }
    case JournalKind::wait: {
      const auto recorded = events_.find(operation.event);
      if (recorded == events_.end()) {
        OrderFinding finding;
        finding.kind = OrderFinding::Kind::never_recorded;
        finding.first = finding.second = index;
        report(journal, finding);
        return;
      }
      join(clocks_[queue], recorded->second);
      return;
    }
    case JournalKind::host_waits_event:
      if (const auto recorded = events_.find(operation.event); recorded != events_.end()) {
        join(clocks_[kHost], recorded->second);
        ++host_version_;
      }
      return;
    case JournalKind::host_waits_stream:
      join(clocks_[kHost], clocks_[queue]);
      ++host_version_;
      return;
    case JournalKind::host_waits_device:
      for (std::size_t other = 1; other < clocks_.size(); ++other) {
        join(clocks_[kHost], clocks_[other]);
      }
      ++host_version_;
      return;
    case JournalKind::freed_behind:
      for (std::uint64_t i = 0; i < operation.accesses; ++i) {
        forget(journal.accesses[operation.first_access + i], queue);
      }
      return;
    case JournalKind::host_access:
      ++host_version_;
      break;
    case JournalKind::compute:
    case JournalKind::copy_to_host:
    case JournalKind::copy_to_device:
      break;
  }
  ++clock_of(queue)[queue];
  // Reads first: what an operation reads and writes is no conflict with itself.
  for (const bool write : {false, true}) {
    for (std::uint64_t i = 0; i < operation.accesses; ++i) {
      const JournalAccess& touched = journal.accesses[operation.first_access + i];
      if (touched.write == write && touched.bytes > 0) {
        access(journal, index, touched, queue);
      }
    }
  }
}

bool OrderChecker::ordered(const Mark& earlier, std::uint32_t queue) const {
  const Clock& clock = clocks_[queue];
  return earlier.queue == queue || (earlier.queue < clock.size() && earlier.time <= clock[earlier.queue]);
}

OrderChecker::Ranges::iterator OrderChecker::split_at(std::uint64_t address) {
  const auto after = ranges_.lower_bound(address);
  if (after != ranges_.begin()) {
    const auto before = std::prev(after);
    if (before->second.end > address) {
      Range upper = before->second;
      before->second.end = address;
      return ranges_.emplace_hint(after, address, std::move(upper));
    }
  }
  return after;
}

// The allocator has ordered these accesses before all later ones.
void OrderChecker::forget(const JournalAccess& freed, std::uint32_t queue) {
  if (freed.bytes == 0) {
    return;
  }
  const std::uint64_t end = freed.begin + freed.bytes;
  auto range = split_at(freed.begin);
  split_at(end);
  for (; range != ranges_.end() && range->first < end; ++range) {
    ++work_;
    Range& known = range->second;
    known.written = known.written && !ordered(known.writer, queue);
    std::erase_if(known.readers, [&](const Mark& reader) { return ordered(reader, queue); });
  }
}

void OrderChecker::access(const Journal& journal, std::size_t index, const JournalAccess& touched,
                          std::uint32_t queue) {
  const std::uint64_t end = touched.begin + touched.bytes;
  const Mark mark{queue, clocks_[queue][queue], index};
  const auto conflict = [&](const Mark& earlier, bool writes, std::uint64_t from, std::uint64_t to) {
    report(journal, {OrderFinding::Kind::unordered, earlier.operation, index, from, to - from, writes, touched.write,
                     touched.pinned});
  };
  const auto first = split_at(touched.begin);
  split_at(end);
  if (touched.write) {
    auto range = first;
    for (; range != ranges_.end() && range->first < end; ++range) {
      work_ += 1 + range->second.readers.size();
      if (range->second.written && !ordered(range->second.writer, queue)) {
        conflict(range->second.writer, true, range->first, range->second.end);
      }
      for (const Mark& reader : range->second.readers) {
        if (!ordered(reader, queue)) {
          conflict(reader, false, range->first, range->second.end);
        }
      }
    }
    const auto hint = ranges_.erase(first, range);
    ranges_.emplace_hint(hint, touched.begin, Range{end, true, mark, {}});
    return;
  }
  std::uint64_t at = touched.begin;
  for (auto range = first; at < end; ++range) {
    if (range == ranges_.end() || range->first > at) {
      // Never written as far as the journal tells.
      const std::uint64_t gap_end = range == ranges_.end() ? end : std::min(end, range->first);
      range = ranges_.emplace_hint(range, at, Range{gap_end, false, {}, {mark}});
      at = gap_end;
      continue;
    }
    Range& known = range->second;
    work_ += 1 + known.readers.size();
    if (known.written && !ordered(known.writer, queue)) {
      conflict(known.writer, true, range->first, known.end);
    }
    const auto same = std::find_if(known.readers.begin(), known.readers.end(),
                                   [&](const Mark& reader) { return reader.queue == queue; });
    if (same != known.readers.end()) {
      *same = mark;
    } else {
      known.readers.push_back(mark);
    }
    at = known.end;
  }
}

void OrderChecker::report(const Journal& journal, const OrderFinding& finding) {
  const JournalOperation& a = journal.operations[finding.first];
  const JournalOperation& b = journal.operations[finding.second];
  const JournalSite& at_a = journal.sites[a.site];
  const JournalSite& at_b = journal.sites[b.site];
  // The same places in another step are the same fault.
  if (reported_.insert({a.name, b.name, at_a.name, at_a.phase, at_b.name, at_b.phase, a.stream, b.stream}).second) {
    findings_.push_back(finding);
  }
}

namespace {

std::string place(const Journal& journal, const JournalOperation& operation) {
  const JournalSite& site = journal.sites[operation.site];
  std::string text = journal.names[operation.name];
  if (operation.kind == JournalKind::host_access) {
    text += " by the host";
  } else {
    text += " on " + journal.streams[operation.stream];
  }
  if (site.phase != 0 || site.name != 0) {
    text +=
        " (" + journal.names[site.phase] + (site.phase != 0 && site.name != 0 ? " of " : "") + journal.names[site.name];
    text += site.step != 0 ? ", step " + std::to_string(site.step) + ")" : ")";
  } else if (site.step != 0) {
    text += " (step " + std::to_string(site.step) + ")";
  }
  return text;
}

}  // namespace

std::vector<std::string> check_order(const Journal& journal) {
  OrderChecker checker;
  checker.read(journal);
  std::vector<std::string> texts;
  for (const OrderFinding& finding : checker.findings()) {
    texts.push_back(describe(journal, finding));
  }
  return texts;
}

std::string describe(const Journal& journal, const OrderFinding& finding) {
  const JournalOperation& second = journal.operations[finding.second];
  if (finding.kind == OrderFinding::Kind::never_recorded) {
    return place(journal, second) + ": waits for event " + std::to_string(second.event) +
           ", which was never recorded; such a wait has no effect. Record the event first";
  }
  const JournalOperation& first = journal.operations[finding.first];
  char range[96];
  std::snprintf(range, sizeof(range), "%s[0x%" PRIx64 ", +%" PRIu64 " bytes)",
                finding.pinned ? "pinned host memory " : "", finding.begin, finding.bytes);
  std::string text = place(journal, first) + (finding.first_writes ? " writes " : " reads ") + range + ", and " +
                     place(journal, second) + (finding.second_writes ? " writes" : " reads") +
                     " them, but nothing orders the second after the first; fix: ";
  const bool by_host = second.kind == JournalKind::host_access;
  const bool of_host = first.kind == JournalKind::host_access;
  if (of_host) {
    return text + "issue the second operation after the host's access";
  }
  return text + (by_host ? std::string("the host") : journal.streams[second.stream]) + " must wait for an event that " +
         journal.streams[first.stream] + " records after the first operation";
}

}  // namespace sidestream
