#pragma once
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace sidestream {

/// One group as a sizing pass saw it: the tensors that autograd saved inside one named scope.
struct GroupProfile {
  std::string name;
  bool selected = false;            ///< the options name it
  bool needed_immediately = false;  ///< backward needs it immediately: it stays whatever the options say
  bool captured_later = false;      ///< saved by a call that a graph takes over: its sequence plans it
  std::uint32_t budget = 0;         ///< 1 + its index in `budgets`; 0 for none
};

/// Bounds what is offloaded of some groups. The smaller bound holds.
struct OffloadBudget {
  std::uint64_t bytes = std::numeric_limits<std::uint64_t>::max();
  double fraction = 1;  ///< of what would be offloaded without the budget
};

/// One storage as a sizing pass saw it.
struct StorageProfile {
  std::uint64_t bytes = 0;
  std::vector<std::uint32_t> savers;  ///< indices of groups, the first saver first
  /// The program holds it itself, or other calls saved it too: offloading it would free nothing.
  bool held_elsewhere = false;
  bool counted_elsewhere = false;  ///< and the profile of another call counts its bytes
  bool static_output = false;      ///< graphs write it anew, and keep its memory: it stays, and has no place in a pass
  bool for_weights = false;        ///< of the backward's graphs, only the one of delayed parameters reads it
  std::uint32_t runs = 1;          ///< of its sequence that are offloaded to its place on the host, in turn
  bool marked = false;             ///< the program marked it after it was saved: it stays
};

/// The tensors that stay on the device for one reason, whatever the options say.
struct StayingTensors {
  std::string reason;  ///< in words
  std::uint64_t tensors = 0;
  std::uint64_t bytes = 0;  ///< of the whole storages, counted each time
};

/// Plain data: groups and storages in the order in which the forward pass met them.
struct Profile {
  std::vector<GroupProfile> groups;
  std::vector<StorageProfile> storages;
  std::vector<OffloadBudget> budgets;
  std::vector<StayingTensors> staying;  ///< not in the storages; without those of calls that are captured later
};

/// Whether a storage is offloaded, and why not.
enum class Fate : std::uint8_t {
  offloaded,
  not_selected,
  needed_immediately,
  held_back,
  held_elsewhere,
  marked,
  static_output,
  over_budget,
  over_cap,
  not_pinned
};

/// For one storage of the profile.
struct Decision {
  Fate fate = Fate::not_selected;
  std::uint32_t held_by = 0;  ///< for `held_back`: the group that keeps it
};

/// Plain data, made once; `decisions[i]` is about `storages[i]` of its profile.
struct Plan {
  std::vector<Decision> decisions;
  std::uint64_t offloaded_bytes = 0;
  std::vector<std::string> notes;  ///< for the report: storages held back, groups over the cap or not pinned
};

/// Decides which storages are offloaded: those whose savers' groups are all selected, and none of these groups is needed immediately.
/// Of the groups of a budget, those that fit are offloaded, in order. A storage counts there once for each of its runs.
/// Groups are taken whole, in order (the earliest live longest), while `room_bytes` of pinned memory last, each storage rounded up to
/// `alignment` bytes.
/// Pure; linear in the profile.
[[nodiscard]] Plan make_plan(const Profile& profile, std::uint64_t room_bytes, std::uint64_t alignment);

/// Reverts the decision to offload storages of `group`: the system would not pin memory for them, though the cap has room. `why` is the
/// system's reason, for the note.
void keep_unpinned(Plan& plan, const Profile& profile, std::uint32_t group, const std::string& why);

}  // namespace sidestream
