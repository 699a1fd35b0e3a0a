#include <sidestream/testing/schedule_check.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <set>
#include <unordered_set>

#include <c10/core/AutogradState.h>
#include <sidestream/error.h>
#include <sidestream/journal.h>

#include "sim/rerun/recording.h"
#include "sim/rerun/recording_journal.h"

namespace sidestream {
namespace {

using Order = std::vector<std::uint32_t>;

/// Backward on the calling thread while it lives.
class OneThreadBackward {
 public:
  OneThreadBackward() : before_(c10::AutogradState::get_tls_state().get_multithreading_enabled()) { set(false); }
  OneThreadBackward(const OneThreadBackward&) = delete;
  OneThreadBackward& operator=(const OneThreadBackward&) = delete;
  ~OneThreadBackward() { set(before_); }

 private:
  static void set(bool enabled) { c10::AutogradState::get_tls_state().set_multithreading_enabled(enabled); }
  bool before_;
};

constexpr std::size_t most_divergences = 16;

/// FNV-1a over the positions.
std::uint64_t fingerprint(const Order& order) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const std::uint32_t work : order) {
    hash = (hash ^ work) * 0x100000001b3U;
  }
  return hash;
}

/// The first `taken` works of `order`, then the others as they were issued.
Order begin_of(const Order& order, std::size_t taken) {
  Order mixed(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(taken));
  std::vector<bool> done(order.size(), false);
  for (const std::uint32_t work : mixed) {
    done[work] = true;
  }
  for (std::uint32_t work = 0; work < order.size(); ++work) {
    if (!done[work]) {
      mixed.push_back(work);
    }
  }
  return mixed;
}

}  // namespace

struct ScheduleCheck::State {
  /// How a run's results compare with those of the order of issue.
  struct Outcome {
    std::int64_t bytes = 0;
    std::size_t first = 0;  ///< index of the first result that differs
    std::string error;
    [[nodiscard]] bool differs() const noexcept { return bytes > 0 || !error.empty(); }
  };

  [[nodiscard]] Outcome run(const Order& order) {
    Outcome outcome;
    try {
      recording.rerun(order);
    } catch (const c10::Error& thrown) {
      outcome.error = thrown.what_without_backtrace();
      return outcome;
    } catch (const std::exception& thrown) {
      outcome.error = thrown.what();
      return outcome;
    }
    for (std::size_t i = 0; i < results.size(); ++i) {
      const auto* now = static_cast<const std::byte*>(results[i].second.const_data_ptr());
      const std::vector<std::byte>& then = expected[i];
      if (std::memcmp(now, then.data(), then.size()) == 0) {
        continue;
      }
      outcome.first = outcome.bytes == 0 ? i : outcome.first;
      for (std::size_t at = 0; at < then.size(); ++at) {
        outcome.bytes += now[at] != then[at] ? 1 : 0;
      }
    }
    return outcome;
  }

  /// The two works of a diverging order whose exchange alone makes the difference. Invariant of both halvings: the lower order
  /// gives the expected bytes, the upper one does not.
  [[nodiscard]] std::pair<std::uint32_t, std::uint32_t> shrink(const Order& bad) {
    std::size_t good = 0;
    std::size_t wrong = bad.size();
    while (wrong - good > 1) {
      const std::size_t middle = good + (wrong - good) / 2;
      (run(begin_of(bad, middle)).differs() ? wrong : good) = middle;
    }
    // One work, brought forward to position `good`, makes the difference: past which of the others?
    const std::uint32_t moved = bad[good];
    Order order = begin_of(bad, good);
    const auto from = std::find(order.begin(), order.end(), moved);
    std::size_t late = static_cast<std::size_t>(from - order.begin());
    order.erase(from);
    std::size_t early = good;
    while (late - early > 1) {
      const std::size_t middle = early + (late - early) / 2;
      Order tried = order;
      tried.insert(tried.begin() + static_cast<std::ptrdiff_t>(middle), moved);
      (run(tried).differs() ? early : late) = middle;
    }
    return {order[early], moved};
  }

  [[nodiscard]] std::optional<Divergence> try_order(const Schedule& schedule, const Order& order) {
    const Outcome outcome = run(order);
    if (!outcome.differs()) {
      return std::nullopt;
    }
    return Divergence{
        schedule, outcome.bytes, outcome.bytes > 0 ? results[outcome.first].first : std::string(), outcome.error, {}};
  }

  void require_stopped() const {
    if (!journal) {
      throw UsageError("a schedule check whose recording still runs; call stop() with the results to compare first");
    }
  }

  std::optional<OneThreadBackward> one_thread{std::in_place};
  sim::Recording recording;
  std::optional<sim::RecordingJournal> journal;
  Results results;
  std::vector<std::vector<std::byte>> expected;
};

ScheduleCheck::ScheduleCheck(c10::Device sim) {
  if (!sim.is_privateuseone()) {
    throw UsageError("schedules are the sim device's: a GPU has its own order; use find_device(\"sim\")");
  }
  state_ = std::make_unique<State>();
}

ScheduleCheck::~ScheduleCheck() = default;

void ScheduleCheck::stop(Results results) {
  State& check = *state_;
  check.recording.stop();
  check.one_thread.reset();
  for (const auto& [name, tensor] : results) {
    if (!tensor.defined() || !tensor.device().is_privateuseone() || !tensor.is_contiguous()) {
      throw UsageError("the result \"" + name +
                       "\" is not a contiguous tensor on the sim device; compare a clone of it");
    }
    const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
    check.expected.emplace_back(data, data + tensor.nbytes());
  }
  check.results = std::move(results);
  Order issued(check.recording.works().size());
  for (std::uint32_t i = 0; i < issued.size(); ++i) {
    issued[i] = i;
  }
  const State::Outcome outcome = check.run(issued);
  if (outcome.differs()) {
    throw Error("the recorded work, run again as it was issued, does not give the same " +
                (outcome.error.empty() ? check.results[outcome.first].first : "bytes: " + outcome.error) +
                "; host code must not write what the recorded work reads or returns");
  }
  check.journal.emplace(check.recording.works());
}

std::int64_t ScheduleCheck::works() const { return static_cast<std::int64_t>(state_->recording.works().size()); }

std::int64_t ScheduleCheck::streams() const {
  state_->require_stopped();
  return static_cast<std::int64_t>(state_->journal->journal().streams.size());
}

std::int64_t ScheduleCheck::result_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& expected : state_->expected) {
    bytes += static_cast<std::int64_t>(expected.size());
  }
  return bytes;
}

std::vector<std::string> ScheduleCheck::findings() const {
  state_->require_stopped();
  return check_order(state_->journal->journal());
}

std::optional<Divergence> ScheduleCheck::run(const Schedule& schedule) {
  State& check = *state_;
  check.require_stopped();
  const Order order = check.recording.order(schedule);
  std::optional<Divergence> found = check.try_order(schedule, order);
  if (found) {
    const auto [first, second] = check.shrink(order);
    found->pair = check.journal->describe_pair(first, second);
  }
  return found;
}

ScheduleSearch ScheduleCheck::search(std::int64_t schedules, const std::function<bool(std::int64_t)>& go_on) {
  State& check = *state_;
  check.require_stopped();
  if (schedules < 1) {
    throw UsageError("a search of " + std::to_string(schedules) + " schedules; it must be 1 or more");
  }
  const auto begin = std::chrono::steady_clock::now();
  ScheduleSearch found;
  std::unordered_set<std::uint64_t> known;
  std::set<std::pair<std::uint32_t, std::uint32_t>> pairs;
  bool stopped = false;
  const auto attempt = [&](const Schedule& schedule, std::int64_t& count) {
    if (stopped || found.tried() == schedules) {
      return;
    }
    ++count;
    const Order order = check.recording.order(schedule);
    if (known.insert(fingerprint(order)).second) {
      std::optional<Divergence> divergence = check.try_order(schedule, order);
      found.diverged += divergence ? 1 : 0;
      if (divergence && found.divergences.size() < most_divergences) {
        const auto pair = check.shrink(order);
        if (pairs.insert(pair).second) {
          divergence->pair = check.journal->describe_pair(pair.first, pair.second);
          found.divergences.push_back(std::move(*divergence));
        }
      }
    }
    stopped = go_on && !go_on(found.tried());
  };
  using Kind = Schedule::Kind;
  for (const Kind kind : {Kind::early, Kind::late, Kind::d2h_early, Kind::d2h_late}) {
    attempt(Schedule(kind), found.named);
  }
  for (std::int64_t stream = 0; stream < streams(); ++stream) {
    attempt(Schedule(Kind::starve, static_cast<std::uint64_t>(stream)), found.starved);
  }
  std::vector<bool> was_held(check.recording.works().size(), false);
  for (const auto& [first, second] : check.journal->unordered()) {
    attempt(Schedule(Kind::hold, first), found.held);
    was_held[first] = true;
  }
  // If a piece of work is held back until all work that is not ordered after it has run, it runs after each of its unordered partners.
  std::uint64_t seed = 0;
  for (std::uint32_t work = 0; work < was_held.size(); ++work) {
    if (check.recording.works()[work].work->run && !was_held[work]) {
      attempt(Schedule(Kind::hold, work), found.held);
      attempt(Schedule(Kind::seed, seed++), found.seeds);
    }
  }
  while (!stopped && found.tried() < schedules) {
    attempt(Schedule(Kind::seed, seed++), found.seeds);
  }
  found.orders = static_cast<std::int64_t>(known.size());
  found.seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  return found;
}

}  // namespace sidestream
