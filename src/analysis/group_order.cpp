#include "analysis/group_order.h"

#include <algorithm>
#include <deque>
#include <limits>

namespace sidestream {
namespace {

constexpr std::size_t kNever = std::numeric_limits<std::size_t>::max();

/// The events of one group.
struct Life {
  std::size_t ended = kNever;
  std::size_t freed = kNever;  ///< its sources, as later ones need the lag
  std::size_t used = kNever;
};

/// An offloaded group trails until its sources are freed, used or not: its copy may still be running. A group that stays is free after
/// its use.
std::vector<Life> lives(const std::vector<GroupEvent>& order, const std::vector<GroupBytes>& groups,
                        const CopyWindow& window) {
  std::vector<Life> result(groups.size());
  std::deque<std::uint32_t> trailing;
  std::uint64_t held = 0;
  for (std::size_t event = 0; event < order.size(); ++event) {
    const std::uint32_t group = order[event].group;
    Life& life = result[group];
    if (order[event].kind == GroupEvent::Kind::used) {
      life.used = event;
      const auto found = std::find(trailing.begin(), trailing.end(), group);
      if (found != trailing.end() && groups[group].offloaded == 0) {
        trailing.erase(found);
        held -= groups[group].held;
      }
      continue;
    }
    life.ended = event;
    if (groups[group].held == 0) {
      continue;
    }
    trailing.push_back(group);
    held += groups[group].held;
    while (!trailing.empty() && (held > window.lag || trailing.size() > window.in_flight)) {
      result[trailing.front()].freed = event;
      held -= groups[trailing.front()].held;
      trailing.pop_front();
    }
  }
  return result;
}

/// The latest event after which the group used at `use` is reloaded: one with a group's work before the use. Between the end of a
/// forward's last group and the first use after it there is next to no work.
std::size_t latest_reload(const std::vector<GroupEvent>& order, std::size_t use) {
  return order[use - 1].kind == GroupEvent::Kind::used || use < 2 ? use - 1 : use - 2;
}

}  // namespace

std::vector<bool> needed_immediately_within(const std::vector<GroupEvent>& order,
                                            const std::vector<std::uint64_t>& bytes, const CopyWindow& window) {
  CopyWindow least = window;
  least.in_flight = std::max<std::size_t>(1, window.in_flight);
  std::vector<GroupBytes> groups;
  for (const std::uint64_t each : bytes) {
    groups.push_back({each, 0});
  }
  std::vector<bool> result;
  for (const Life& life : lives(order, groups, least)) {
    result.push_back(life.ended != kNever && life.used != kNever && life.freed == kNever);
  }
  return result;
}

std::vector<GroupReload> group_reloads(const std::vector<GroupEvent>& order, const std::vector<GroupBytes>& groups,
                                       const CopyWindow& window) {
  const std::vector<Life> all = lives(order, groups, window);
  std::vector<std::uint64_t> on_device(order.size());  // after each event
  const auto stays = [&](std::size_t first, std::size_t end, std::uint64_t bytes) {
    for (std::size_t event = first; event < std::min(end, order.size()); ++event) {
      on_device[event] += bytes;
    }
  };
  for (std::size_t group = 0; group < groups.size(); ++group) {
    const Life& life = all[group];
    if (life.ended != kNever) {
      const std::size_t end = life.freed != kNever ? life.freed : life.used == kNever ? kNever : life.used + 1;
      stays(life.ended, end, groups[group].held);
    }
  }
  const std::uint64_t most = window.room();
  std::vector<GroupReload> reloads;
  std::size_t previous = 0;
  for (std::size_t use = 0; use < order.size(); ++use) {
    const std::uint32_t group = order[use].group;
    const Life& life = all[group];
    if (order[use].kind == GroupEvent::Kind::ended || groups[group].offloaded == 0 || life.freed >= use) {
      continue;
    }
    std::size_t begin = std::max({latest_reload(order, use), life.freed, previous});
    while (begin > std::max(previous, life.freed + 1) && on_device[begin - 1] + groups[group].offloaded <= most) {
      --begin;
    }
    stays(begin, use + 1, groups[group].offloaded);
    reloads.push_back({begin, group});
    previous = begin;
  }
  return reloads;
}

}  // namespace sidestream
