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

bool component_matches(std::string_view pattern, std::string_view component) {
  return matches_all(
      pattern.size(), component.size(), [&](std::size_t p) { return pattern[p] == '*'; },
      [&](std::size_t p, std::size_t i) { return pattern[p] == component[i]; });
}

std::vector<std::string_view> components(std::string_view text) {
  std::vector<std::string_view> parts;
  while (!text.empty()) {
    const std::size_t dot = text.find('.');
    parts.push_back(text.substr(0, dot));
    text = dot == std::string_view::npos ? std::string_view() : text.substr(dot + 1);
  }
  return parts;
}

bool pattern_matches(std::string_view text, std::string_view name_text) {
  const std::vector<std::string_view> pattern = components(text);
  const std::vector<std::string_view> name = components(name_text);
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
