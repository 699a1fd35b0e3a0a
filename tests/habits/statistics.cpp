#include "habits/statistics.h"

#include <algorithm>
#include <istream>
#include <ostream>
#include <sstream>
#include <utility>

namespace sidestream::habits {
namespace {

bool begins_with(const std::string& text, const std::string& prefix) {
  return text.compare(0, prefix.size(), prefix) == 0;
}

/// What steps of chunks and delayed weight gradients must show, and the action that shows it.
constexpr std::pair<Kind, const char*> kSeen[] = {
    {Kind::chunks, "chunks"},
    {Kind::chunks, "chunks open at once"},
    {Kind::chunks, "chunks given up"},
    {Kind::chunks, "forwards alone"},
    {Kind::order, "steps with an order"},
    {Kind::deviate, "deviations refused"},
    {Kind::weights, "delayed weight gradients"},
    {Kind::weights, "forgotten weight gradients"},
};

std::string percent(std::int64_t part, std::int64_t whole) {
  std::ostringstream text;
  text.precision(3);
  text << (whole == 0 ? 0.0 : 100.0 * static_cast<double>(part) / static_cast<double>(whole)) << "%";
  return text.str();
}

}  // namespace

Statistics& Statistics::operator+=(const Statistics& other) {
  for (const auto& [key, count] : other.counts_) {
    counts_[key] += count;
  }
  return *this;
}

std::int64_t Statistics::count(const std::string& key) const {
  const auto found = counts_.find(key);
  return found == counts_.end() ? 0 : found->second;
}

std::int64_t Statistics::total(const std::string& prefix) const {
  std::int64_t sum = 0;
  for (auto item = counts_.lower_bound(prefix); item != counts_.end() && begins_with(item->first, prefix); ++item) {
    sum += item->second;
  }
  return sum;
}

void Statistics::write(std::ostream& out) const {
  for (const auto& [key, count] : counts_) {
    out << count << ' ' << key << '\n';
  }
}

void Statistics::read(std::istream& in) {
  std::int64_t count = 0;
  std::string key;
  while (in >> count && in.get() == ' ' && std::getline(in, key)) {
    counts_[key] += count;
  }
}

void Statistics::print(std::ostream& out) const {
  const std::int64_t programs = count("programs");
  out << programs << " programs, " << count("actions") << " actions, "
      << (programs == 0 ? 0 : count("milliseconds") / programs) << " ms a program, " << count("offloaded bytes")
      << " bytes offloaded\n";
  out << "calls after their capture: " << percent(count("replayed"), count("replayed") + count("not replayed"))
      << " of " << count("replayed") + count("not replayed") << " replayed\n";
  for (const auto& [key, number] : counts_) {
    if ((begins_with(key, "calls ") && !begins_with(key, "calls in chunks")) || begins_with(key, "agreed")) {
      out << "  " << key << ": " << number << '\n';
    }
  }
  for (const char* key : {"replays without gradients", "bucketed calls replayed", "bucketed calls run",
                          "whole steps replayed", "whole steps run"}) {
    out << "  " << key << ": " << count(key) << '\n';
  }
  for (const char* key : {"calls in chunks replayed", "calls in chunks run"}) {
    out << "  " << key << ": " << count(key) << '\n';
  }
  for (const auto& [kind, key] : kSeen) {
    out << "  " << key << ": " << count(key) << '\n';
  }
  out << "refused: " << percent(total("refused "), count("actions")) << " of the actions\n";
  for (const auto& [key, number] : counts_) {
    if (begins_with(key, "refused ")) {
      out << "  " << number << " x " << key.substr(8) << '\n';
    }
  }
}

std::vector<Statistics::Demand> Statistics::demands(const std::vector<Kind>& drawn) const {
  std::vector<Demand> result;
  const auto demand = [&](const std::string& name, bool holds, const std::string& seen) {
    result.push_back({name, holds ? std::vector<std::string>() : std::vector<std::string>{seen}});
  };
  const std::int64_t known = count("replayed") + count("not replayed");
  demand("nine in ten calls replay once they are captured", known > 0 && count("replayed") * 10 >= known * 9,
         percent(count("replayed"), known) + " of " + std::to_string(known));
  demand("bytes leave the device", count("offloaded bytes") > 0, "none");
  demand("fewer than one action in twenty is refused", total("refused ") * 20 < count("actions"),
         percent(total("refused "), count("actions")));
  const auto draws = [&](Kind kind) { return std::find(drawn.begin(), drawn.end(), kind) != drawn.end(); };
  const auto demand_both = [&](const std::string& what) {
    const std::int64_t replayed = count(what + " replayed");
    const std::int64_t run = count(what + " run");
    demand(what + ": more than half replay, and some run", run > 0 && replayed > run,
           std::to_string(replayed) + " replayed, " + std::to_string(run) + " run");
  };
  if (draws(Kind::buckets)) {
    demand_both("bucketed calls");
  }
  if (draws(Kind::whole_step)) {
    demand_both("whole steps");
  }
  if (draws(Kind::chunks)) {
    demand_both("calls in chunks");
  }
  Demand seen{"chunks, orders and delayed weight gradients occur", {}};
  for (const auto& [kind, key] : kSeen) {
    if (draws(kind) && count(key) == 0) {
      seen.breaches.emplace_back(key);
    }
  }
  result.push_back(seen);
  Demand each{"every action occurs", {}};
  Demand pairs{"of a thousand pairs of actions all but one occur", {}};
  for (const Kind first : drawn) {
    const std::string name = habit(first).name;
    if (count("action " + name) == 0) {
      each.breaches.push_back(name);
    }
    for (const Kind second : drawn) {
      const std::string pair = name + ' ' + habit(second).name;
      if (count("pair " + pair) == 0) {
        pairs.breaches.push_back(pair);
      }
    }
  }
  if (pairs.breaches.size() * 1000 <= drawn.size() * drawn.size()) {
    pairs.breaches.clear();
  }
  result.push_back(each);
  result.push_back(pairs);
  return result;
}

}  // namespace sidestream::habits
