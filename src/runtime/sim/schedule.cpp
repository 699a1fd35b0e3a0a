#include <sidestream/schedule.h>

#include <charconv>
#include <string_view>
#include <utility>

#include <sidestream/error.h>

namespace sidestream {
namespace {

constexpr std::pair<std::string_view, Schedule::Kind> named[] = {
    {"early", Schedule::Kind::early},
    {"late", Schedule::Kind::late},
    {"d2h-early", Schedule::Kind::d2h_early},
    {"d2h-late", Schedule::Kind::d2h_late},
};
constexpr std::string_view seed_prefix = "seed:";

}  // namespace

Schedule Schedule::parse(const std::string& text) {
  for (const auto& [name, kind] : named) {
    if (text == name) {
      return Schedule(kind);
    }
  }
  if (text.compare(0, seed_prefix.size(), seed_prefix) == 0) {
    std::uint64_t seed = 0;
    const char* begin = text.data() + seed_prefix.size();
    const char* end = text.data() + text.size();
    const auto read = std::from_chars(begin, end, seed);
    if (begin != end && read.ec == std::errc() && read.ptr == end) {
      return Schedule(Kind::seed, seed);
    }
  }
  throw UsageError("schedule \"" + text +
                   "\" is unknown; use early, late, d2h-early, d2h-late or seed:N with N a number");
}

std::string Schedule::name() const {
  for (const auto& [name, kind] : named) {
    if (kind_ == kind) {
      return std::string(name);
    }
  }
  return std::string(seed_prefix) + std::to_string(seed_);
}

}  // namespace sidestream
