#pragma once
#include <cstdint>
#include <iosfwd>
#include <map>
#include <string>
#include <vector>

#include "habits/action.h"

namespace sidestream::habits {

/// What programs did, as counts that add up. Keys: "programs", "actions", "milliseconds", "offloaded bytes", "replayed", "not replayed",
/// "replays without gradients", "bucketed calls replayed", "bucketed calls run", "whole steps replayed", "whole steps run",
/// "calls in chunks replayed", "calls in chunks run", what kSeen in statistics.cpp lists, "calls NAME", "action NAME",
/// "pair FIRST LATER", "refused NAME: MESSAGE", "agreed errors".
class Statistics {
 public:
  void add(const std::string& key, std::int64_t count = 1) { counts_[key] += count; }
  Statistics& operator+=(const Statistics& other);
  [[nodiscard]] std::int64_t count(const std::string& key) const;
  /// Of all keys that begin with `prefix`.
  [[nodiscard]] std::int64_t total(const std::string& prefix) const;

  /// One line a key; `read` adds to what is there.
  void write(std::ostream& out) const;
  void read(std::istream& in);

  /// For people.
  void print(std::ostream& out) const;
  struct Demand {
    std::string name;
    std::vector<std::string> breaches;  ///< empty: it holds
  };
  /// That the programs did not pass by doing nothing. A pair of actions is one behind the other in a program.
  [[nodiscard]] std::vector<Demand> demands(const std::vector<Kind>& drawn) const;

 private:
  std::map<std::string, std::int64_t> counts_;
};

}  // namespace sidestream::habits
