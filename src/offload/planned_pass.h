#pragma once
#include <cstddef>
#include <unordered_map>
#include <vector>

#include "analysis/planner.h"

namespace sidestream {

struct ScopeNode;

/// A plan's decision about one storage.
struct PlannedStorage {
  std::size_t bytes = 0;
  bool to_offload = false;
  bool for_weights = false;  ///< see StorageProfile
};

/// A plan's decisions about one group, in the order in which it first saves storages.
struct PlannedGroup {
  std::vector<PlannedStorage> storages;
  /// Whether storages that the plan does not know are offloaded too, if there is room: true if any of the known ones is.
  bool offloads = false;
  bool needed_immediately = false;  ///< it stays, as backward needs it immediately
};

/// A plan's decisions about a forward pass: for each scope, for each time that it is entered and saves something, its group.
using PlannedPass = std::unordered_map<const ScopeNode*, std::vector<PlannedGroup>>;

/// Lays out the decisions on one pass's storages (`decisions[i]` for `profile.storages[i]`) for matching; `scopes` are those
/// of the profile's groups. Those of calls that are captured have no place: where such a call runs eagerly after all, what it
/// saves is new to the plan.
/// Nor have static outputs: graphs keep them, and what saves them is not told.
[[nodiscard]] PlannedPass lay_out(const Profile& profile, const std::vector<const ScopeNode*>& scopes,
                                  const Decision* decisions);

/// Matches what one group saves with its plan: by order and size, and where one is missing or new, the others still match.
class PlannedPlaces {
 public:
  PlannedPlaces() = default;
  explicit PlannedPlaces(const PlannedGroup* planned) { begin(planned); }

  /// No place is taken. `planned`, which may be null, must outlive this object's use.
  void begin(const PlannedGroup* planned) {
    planned_ = planned;
    taken_.assign(planned == nullptr ? 0 : planned->storages.size(), false);
    next_ = 0;
  }

  /// Takes the next place of that size. Null if there is none.
  [[nodiscard]] const PlannedStorage* take(std::size_t bytes);

 private:
  [[nodiscard]] const PlannedStorage* take_between(std::size_t first, std::size_t last, std::size_t bytes);

  const PlannedGroup* planned_ = nullptr;
  std::vector<bool> taken_;
  std::size_t next_ = 0;  ///< after the latest that was taken
};

}  // namespace sidestream
