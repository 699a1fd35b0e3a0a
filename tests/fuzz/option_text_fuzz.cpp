#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fuzz/target.h"
#include "offload/name_pattern.h"
#include "sidestream/error.h"
#include "sidestream/testing/schedule.h"

// Text of options: name patterns (first line) against a name (second line), by a second matcher; schedules, read and written.

namespace {

using sidestream::fuzz::require;

/// Whether a pattern of `pattern_size` items matches `size` items: which of their first so many can be matched, item by item.
template <class IsRun, class Matches>
bool matches_all(std::size_t pattern_size, std::size_t size, const IsRun& is_run, const Matches& matches) {
  std::vector<bool> reached(size + 1);
  reached[0] = true;
  for (std::size_t p = 0; p < pattern_size; ++p) {
    std::vector<bool> next(size + 1);
    next[0] = is_run(p) && reached[0];
    for (std::size_t i = 0; i < size; ++i) {
      next[i + 1] = is_run(p) ? reached[i + 1] || next[i] : reached[i] && matches(p, i);
    }
    reached = std::move(next);
  }
  return reached[size];
}

bool stars_match(std::string_view pattern, std::string_view component) {
  return matches_all(
      pattern.size(), component.size(), [&](std::size_t p) { return pattern[p] == '*'; },
      [&](std::size_t p, std::size_t i) { return pattern[p] == component[i]; });
}

std::vector<std::string_view> split(std::string_view text, char at) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t end = text.find(at);
    parts.push_back(text.substr(0, end));
    text = end == std::string_view::npos ? std::string_view() : text.substr(end + 1);
  }
  return parts;
}

/// The dots of ranges are no ends of components.
std::vector<std::string_view> components(std::string_view pattern) {
  std::vector<std::string_view> parts;
  std::size_t begin = 0;
  for (std::size_t i = 0; i <= pattern.size(); ++i) {
    const std::string_view before = pattern.substr(0, i);
    const bool inside = before.rfind('{') != std::string_view::npos &&
                        (before.rfind('}') == std::string_view::npos || before.rfind('}') < before.rfind('{'));
    if (i == pattern.size() || (pattern[i] == '.' && !inside)) {
      parts.push_back(pattern.substr(begin, i - begin));
      begin = i + 1;
    }
  }
  return parts;
}

/// As numbers, by their digits: a shorter one is less.
bool not_above(std::string_view a, std::string_view b) { return a.size() != b.size() ? a.size() < b.size() : a <= b; }

bool is_number(std::string_view text) {
  constexpr std::string_view kMost = "18446744073709551615";
  return !text.empty() && text.find_first_not_of("0123456789") == std::string_view::npos &&
         (text.size() == 1 || text.front() != '0') && not_above(text, kMost);
}

/// Every text that an alternative stands for in a component: itself, or the numbers of a range that are in the component.
std::vector<std::string> texts_of(std::string_view alternative, std::string_view component) {
  const std::size_t dots = alternative.find("..");
  if (dots == std::string_view::npos) {
    return {std::string(alternative)};
  }
  std::vector<std::string> numbers;
  for (std::size_t i = 0; i < component.size(); ++i) {
    for (std::size_t size = 1; size <= component.size() - i; ++size) {
      const std::string_view part = component.substr(i, size);
      if (is_number(part) && not_above(alternative.substr(0, dots), part) &&
          not_above(part, alternative.substr(dots + 2))) {
        numbers.emplace_back(part);
      }
    }
  }
  return numbers;
}

/// With each alternative written in place of the braces.
bool component_matches(std::string_view pattern, std::string_view component) {
  const std::size_t open = pattern.find('{');
  if (open == std::string_view::npos) {
    return stars_match(pattern, component);
  }
  const std::size_t close = pattern.find('}');
  for (std::string_view alternative : split(pattern.substr(open + 1, close - open - 1), ',')) {
    while (alternative.find_first_of(" \t") == 0) {
      alternative.remove_prefix(1);
    }
    while (alternative.find_last_of(" \t") == alternative.size() - 1) {
      alternative.remove_suffix(1);
    }
    for (const std::string& text : texts_of(alternative, component)) {
      const std::string written = std::string(pattern.substr(0, open)) + text + std::string(pattern.substr(close + 1));
      if (stars_match(written, component)) {
        return true;
      }
    }
  }
  return false;
}

bool pattern_matches(std::string_view text, std::string_view name_text) {
  const std::vector<std::string_view> pattern = components(text);
  const std::vector<std::string_view> name = split(name_text, '.');
  return matches_all(
      pattern.size(), name.size(), [&](std::size_t p) { return pattern[p] == "**"; },
      [&](std::size_t p, std::size_t i) { return component_matches(pattern[p], name[i]); });
}

/// Names have no empty components.
bool is_name(std::string_view text) {
  return !text.empty() && text.front() != '.' && text.back() != '.' && text.find("..") == std::string_view::npos;
}

void try_patterns(std::string_view list, std::string_view name) {
  sidestream::NamePatterns patterns;
  try {
    patterns = sidestream::NamePatterns::parse(list);
  } catch (const sidestream::UsageError&) {
    return;
  }
  try {
    patterns.require_each_matches({std::string(name), "blocks.0.core_attn"});
  } catch (const sidestream::UsageError&) {
  }
  if (!is_name(name)) {
    (void)patterns.matches(name);
    return;
  }
  bool expected = false;
  for (const std::string& pattern : patterns.patterns()) {
    expected = expected || pattern_matches(pattern == "all" ? "**" : pattern, name);
  }
  require(patterns.matches(name) == expected, "a name matches as the rules say");
}

void try_schedule(const std::string& text) {
  try {
    const auto schedule = sidestream::Schedule::parse(text);
    const auto again = sidestream::Schedule::parse(schedule.name());
    require(again.name() == schedule.name() && again.kind() == schedule.kind(), "a schedule's name is read as it");
  } catch (const sidestream::UsageError&) {
  }
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  const std::size_t line = text.find('\n');
  const std::string_view first = text.substr(0, line);
  // With more the list of near names that an error gives takes most of the time.
  if (size <= 256) {
    try_patterns(first, line == std::string_view::npos ? std::string_view() : text.substr(line + 1));
  }
  try_schedule(std::string(first));
  return 0;
}
