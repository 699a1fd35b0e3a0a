#include "sim/rerun/recording_journal.h"

#include <algorithm>
#include <unordered_map>
#include <utility>

#include "observe/order_check.h"
#include "sim/device/state.h"

namespace sidestream::sim {
namespace {

JournalKind journal_kind(Work::Kind kind) {
  switch (kind) {
    case Work::Kind::copy_to_host:
      return JournalKind::copy_to_host;
    case Work::Kind::copy_to_device:
      return JournalKind::copy_to_device;
    case Work::Kind::compute:
    case Work::Kind::poison:
    case Work::Kind::event_record:
    case Work::Kind::event_wait:
      return JournalKind::compute;
  }
  return JournalKind::compute;
}

/// Indices of texts, each kept once.
class Texts {
 public:
  explicit Texts(std::vector<std::string>& texts) : texts_(texts) {}
  std::uint32_t index(const std::string& text) {
    if (text.empty()) {
      return 0;
    }
    const auto [found, is_new] = indices_.try_emplace(text, static_cast<std::uint32_t>(texts_.size()));
    if (is_new) {
      texts_.push_back(text);
    }
    return found->second;
  }

 private:
  std::vector<std::string>& texts_;
  std::unordered_map<std::string, std::uint32_t> indices_;
};

std::string queue_name(c10::StreamId queue, std::size_t number) {
  if (queue == host_queue) {
    return "the host";
  }
  return queue == 0 ? std::string("the default stream") : "stream " + std::to_string(number);
}

JournalAccess common_bytes(const Access& a, const Access& b) {
  const auto begin = std::max(reinterpret_cast<std::uint64_t>(a.begin), reinterpret_cast<std::uint64_t>(b.begin));
  const auto end =
      std::min(reinterpret_cast<std::uint64_t>(a.begin) + a.bytes, reinterpret_cast<std::uint64_t>(b.begin) + b.bytes);
  return {begin, end > begin ? end - begin : 0, false};
}

}  // namespace

RecordingJournal::RecordingJournal(const std::vector<RecordedWork>& works) : works_(works) {
  Texts names(journal_.names);
  std::unordered_map<c10::StreamId, std::uint32_t> queues;
  std::unordered_map<std::uint32_t, std::uint32_t> sites;
  // Work that another stream's work is ordered after records an event of its own.
  std::vector<bool> awaited(works.size(), false);
  for (const RecordedWork& work : works) {
    for (const std::uint32_t before : work.after) {
      awaited[before] = awaited[before] || works[before].queue != work.queue;
    }
  }
  const auto add = [&](std::uint32_t work, const JournalOperation& operation) {
    journal_.operations.push_back(operation);
    work_of_.push_back(work);
  };
  for (std::uint32_t i = 0; i < works.size(); ++i) {
    const RecordedWork& recorded = works[i];
    const auto [queue, is_new] =
        queues.try_emplace(recorded.queue, static_cast<std::uint32_t>(journal_.streams.size()));
    if (is_new) {
      journal_.streams.push_back(queue_name(recorded.queue, journal_.streams.size()));
    }
    JournalOperation operation;
    operation.stream = queue->second;
    const std::uint32_t place = names.index(recorded.work->place);
    const auto [site, is_new_site] = sites.try_emplace(place, static_cast<std::uint32_t>(journal_.sites.size()));
    if (is_new_site) {
      journal_.sites.push_back({place, 0, 0});
    }
    operation.site = place == 0 ? 0 : site->second;
    for (const std::uint32_t before : recorded.after) {
      if (works[before].queue != recorded.queue) {
        operation.kind = JournalKind::wait;
        operation.event = before + 1;
        add(i, operation);
      }
    }
    operation.event = 0;
    operation.kind = journal_kind(recorded.work->kind);
    operation.name = names.index(recorded.work->name);
    operation.first_access = journal_.accesses.size();
    operation.accesses = static_cast<std::uint32_t>(recorded.work->accesses.size());
    for (const Access& access : recorded.work->accesses) {
      journal_.accesses.push_back({reinterpret_cast<std::uint64_t>(access.begin), access.bytes, access.write,
                                   !Device::get().owns(access.begin)});
    }
    operation_of_.push_back(static_cast<std::uint32_t>(journal_.operations.size()));
    add(i, operation);
    if (awaited[i]) {
      operation.kind = JournalKind::record;
      operation.event = i + 1;
      operation.accesses = 0;
      add(i, operation);
    }
  }
}

std::vector<std::pair<std::uint32_t, std::uint32_t>> RecordingJournal::unordered() const {
  OrderChecker checker;
  checker.read(journal_);
  std::vector<std::pair<std::uint32_t, std::uint32_t>> pairs;
  for (const OrderFinding& finding : checker.findings()) {
    pairs.emplace_back(work_of_[finding.first], work_of_[finding.second]);
  }
  return pairs;
}

std::string RecordingJournal::describe_pair(std::uint32_t first, std::uint32_t second) const {
  OrderFinding finding;
  finding.first = operation_of_[first];
  finding.second = operation_of_[second];
  for (const Access& a : works_[first].work->accesses) {
    for (const Access& b : works_[second].work->accesses) {
      const JournalAccess common = common_bytes(a, b);
      if (common.bytes > finding.bytes && (a.write || b.write)) {
        finding.begin = common.begin;
        finding.bytes = common.bytes;
        finding.first_writes = a.write;
        finding.second_writes = b.write;
        finding.pinned = !Device::get().owns(a.begin);
      }
    }
  }
  return describe(journal_, finding);
}

}  // namespace sidestream::sim
