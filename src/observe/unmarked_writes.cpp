#include "observe/unmarked_writes.h"

#include <algorithm>
#include <array>

namespace sidestream {
namespace {

struct UnmarkedWrites {
  std::string_view name;
  std::array<std::string_view, 2> arguments;
  std::string_view flag;
};

constexpr std::array<std::string_view, 2> statistics{"running_mean", "running_var"};

constexpr std::array<UnmarkedWrites, 10> table{{
    {"aten::native_batch_norm", statistics, "training"},
    {"aten::_batch_norm_impl_index", statistics, "training"},
    {"aten::batch_norm", statistics, "training"},
    {"aten::cudnn_batch_norm", statistics, "training"},
    {"aten::miopen_batch_norm", statistics, "training"},
    {"aten::instance_norm", statistics, "use_input_stats"},
    {"aten::batch_norm_update_stats", statistics, ""},
    {"aten::batch_norm_gather_stats", statistics, ""},
    {"aten::batch_norm_gather_stats_with_counts", statistics, ""},
    {"aten::_copy_from", {"dst", "dst"}, ""},
}};

}  // namespace

bool writes_unmarked(std::string_view name, std::string_view argument, std::string_view* flag) noexcept {
  const auto found = std::find_if(table.begin(), table.end(), [&](const UnmarkedWrites& writes) {
    return writes.name == name &&
           std::find(writes.arguments.begin(), writes.arguments.end(), argument) != writes.arguments.end();
  });
  if (found == table.end()) {
    return false;
  }
  if (flag != nullptr) {
    *flag = found->flag;
  }
  return true;
}

}  // namespace sidestream
