#include <sidestream/testing/schedule.h>

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
constexpr std::pair<std::string_view, Schedule::Kind> numbered[] = {
    {"seed:", Schedule::Kind::seed},
    {"starve:", Schedule::Kind::starve},
    {"hold:", Schedule::Kind::hold},
};

}  // namespace

Schedule Schedule::parse(const std::string& text) {
  for (const auto& [name, kind] : named) {
    if (text == name) {
      return Schedule(kind);
    }
  }
  for (const auto& [prefix, kind] : numbered) {
    if (text.compare(0, prefix.size(), prefix) != 0) {
      continue;
    }
    std::uint64_t number = 0;
    const char* begin = text.data() + prefix.size();
    const char* end = text.data() + text.size();
    const auto read = std::from_chars(begin, end, number);
    if (begin != end && read.ec == std::errc() && read.ptr == end) {
      return Schedule(kind, number);
    }
  }
  throw UsageError("schedule \"" + text +
                   "\" is unknown; use early, late, d2h-early, d2h-late, seed:N, starve:N or hold:N with N a number");
}

std::string Schedule::name() const {
  for (const auto& [name, kind] : named) {
    if (kind_ == kind) {
      return std::string(name);
    }
  }
  for (const auto& [prefix, kind] : numbered) {
    if (kind_ == kind) {
      return std::string(prefix) + std::to_string(number_);
    }
  }
  return {};
}

}  // namespace sidestream
