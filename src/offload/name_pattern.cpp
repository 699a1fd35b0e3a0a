#include "offload/name_pattern.h"

#include <algorithm>
#include <charconv>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <optional>
#include <utility>

#include "sidestream/error.h"

namespace sidestream {

namespace {

constexpr std::size_t names_shown = 24;

// The part of `rest` before `end`, which is an index into it or npos; `rest` is moved past both.
std::string_view take(std::string_view& rest, std::size_t end) noexcept {
  const std::string_view part = rest.substr(0, end);
  rest = end == std::string_view::npos ? std::string_view() : rest.substr(end + 1);
  return part;
}

// Names have no empty components, so an empty rest is the end.
std::string_view take_component(std::string_view& name) noexcept { return take(name, name.find('.')); }

// The first `wanted` that does not stand between braces, or npos. A brace that is never closed encloses all that follows.
std::size_t find_outside_braces(std::string_view pattern, char wanted) noexcept {
  bool inside = false;
  for (std::size_t i = 0; i < pattern.size(); ++i) {
    if (!inside && pattern[i] == wanted) {
      return i;
    }
    inside = inside ? pattern[i] != '}' : pattern[i] == '{';
  }
  return std::string_view::npos;
}

std::string_view take_pattern_component(std::string_view& pattern) noexcept {
  return take(pattern, find_outside_braces(pattern, '.'));
}

std::string_view trimmed(std::string_view text) noexcept {
  const std::size_t begin = text.find_first_not_of(" \t");
  return begin == std::string_view::npos ? std::string_view()
                                         : text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

// Decimal digits without a sign or leading zeros, as containers name their modules.
std::optional<std::uint64_t> integer(std::string_view text) noexcept {
  std::uint64_t value = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  const bool whole = error == std::errc() && end == text.data() + text.size();
  return whole && (text.size() == 1 || text.front() != '0') ? std::optional(value) : std::nullopt;
}

// `*` within one component, by going back to the last star only.
bool stars_match(std::string_view pattern, std::string_view text) noexcept {
  std::size_t p = 0, t = 0, star = std::string_view::npos, resume = 0;
  while (t < text.size()) {
    if (p < pattern.size() && pattern[p] == '*') {
      star = p++;
      resume = t;
    } else if (p < pattern.size() && pattern[p] == text[t]) {
      ++p;
      ++t;
    } else if (star != std::string_view::npos) {
      p = star + 1;
      t = ++resume;
    } else {
      return false;
    }
  }
  while (p < pattern.size() && pattern[p] == '*') {
    ++p;
  }
  return p == pattern.size();
}

bool alternative_matches(std::string_view alternative, std::string_view text) noexcept {
  const std::size_t dots = alternative.find("..");
  if (dots == std::string_view::npos) {
    return stars_match(alternative, text);
  }
  const auto first = integer(alternative.substr(0, dots)), last = integer(alternative.substr(dots + 2));
  const auto value = integer(text);
  return first && last && value && *first <= *value && *value <= *last;
}

bool any_alternative_matches(std::string_view alternatives, std::string_view text) noexcept {
  while (!alternatives.empty()) {
    if (alternative_matches(trimmed(take(alternatives, alternatives.find(','))), text)) {
      return true;
    }
  }
  return false;
}

// One component has one pair of braces at most: what stands in them matches some part of the text.
bool component_matches(std::string_view pattern, std::string_view text) noexcept {
  const std::size_t open = pattern.find('{'), close = pattern.find('}');
  if (open == std::string_view::npos || close == std::string_view::npos || close < open) {
    return stars_match(pattern, text);
  }
  const std::string_view before = pattern.substr(0, open), after = pattern.substr(close + 1);
  const std::string_view alternatives = pattern.substr(open + 1, close - open - 1);
  for (std::size_t begin = 0; begin <= text.size(); ++begin) {
    if (!stars_match(before, text.substr(0, begin))) {
      continue;
    }
    for (std::size_t end = begin; end <= text.size(); ++end) {
      if (stars_match(after, text.substr(end)) &&
          any_alternative_matches(alternatives, text.substr(begin, end - begin))) {
        return true;
      }
    }
  }
  return false;
}

[[noreturn]] void refuse(const std::string& pattern, const std::string& why) {
  throw UsageError("name pattern \"" + pattern + "\" " + why);
}

void check_alternative(const std::string& pattern, const std::string& alternative) {
  const std::size_t dots = alternative.find("..");
  if (alternative.empty()) {
    refuse(pattern, "has an empty alternative in its braces; write names or ranges, such as {0,4..20}");
  }
  if (dots == std::string::npos) {
    if (alternative.find('.') != std::string::npos) {
      refuse(pattern,
             "has a dot in its braces, which enclose a part of one component; write one pattern for each name");
    }
    return;
  }
  const auto first = integer(alternative.substr(0, dots)), last = integer(alternative.substr(dots + 2));
  if (!first || !last) {
    refuse(pattern, "has the range \"" + alternative +
                        "\"; a range has an integer without leading zeros on either side, such as {4..20}");
  }
  if (*first > *last) {
    refuse(pattern, "has the range \"" + alternative + "\", which is empty; write {" + std::to_string(*last) + ".." +
                        std::to_string(*first) + "}");
  }
}

void check_component(const std::string& pattern, std::string_view component) {
  if (component.empty()) {
    refuse(pattern, "has an empty component; write names such as blocks.*.core_attn");
  }
  const std::size_t open = component.find('{'), close = component.find('}');
  if (open == std::string_view::npos && close == std::string_view::npos) {
    return;
  }
  if (open == std::string_view::npos || close == std::string_view::npos || close < open) {
    refuse(pattern, "has an opening or closing brace without the other; write both, such as blocks.{4..20}.mlp");
  }
  if (component.find('{', open + 1) != std::string_view::npos ||
      component.find('}', close + 1) != std::string_view::npos) {
    refuse(pattern, "has more than one pair of braces in one component; write one pattern for each alternative");
  }
  std::string_view alternatives = component.substr(open + 1, close - open - 1);
  for (bool more = true; more;) {
    more = alternatives.find(',') != std::string_view::npos;
    check_alternative(pattern, std::string(trimmed(take(alternatives, alternatives.find(',')))));
  }
}

void check_pattern(const std::string& pattern) {
  std::string_view rest = pattern;
  for (bool more = true; more;) {
    more = find_outside_braces(rest, '.') != std::string_view::npos;
    check_component(pattern, take_pattern_component(rest));
  }
}

// The stars of "blocks.*.fc1" as the range of numbers that the known names have there, "blocks.{0..23}.fc1".
std::string stars_as_ranges(std::string_view general, const std::vector<std::string>& known) {
  struct Range {
    std::uint64_t first = UINT64_MAX, last = 0;
  };
  std::vector<Range> ranges(1 + static_cast<std::size_t>(std::count(general.begin(), general.end(), '.')));
  for (const std::string& name : known) {
    if (numbers_as_stars(name) != general) {
      continue;
    }
    std::string_view rest = name;
    for (Range& range : ranges) {
      if (const auto number = integer(take_component(rest))) {
        range = {std::min(range.first, *number), std::max(range.last, *number)};
      }
    }
  }
  std::string out;
  for (const Range& range : ranges) {
    const std::string_view component = take_component(general);
    out += out.empty() ? "" : ".";
    out += range.first > range.last ? std::string(component)
                                    : "{" + std::to_string(range.first) + ".." + std::to_string(range.last) + "}";
  }
  return out;
}

std::size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<std::size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < a.size(); ++i) {
    std::size_t diagonal = row[0];
    row[0] = i + 1;
    for (std::size_t j = 0; j < b.size(); ++j) {
      const std::size_t change = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({change, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// False for a name with braces or commas of its own, which mean something else in a pattern.
bool matches_when_given(const std::string& name, const std::vector<std::string>& known) {
  try {
    const NamePatterns patterns = NamePatterns::parse(name);
    return std::any_of(known.begin(), known.end(), [&](const std::string& each) { return patterns.matches(each); });
  } catch (const UsageError&) {
    return false;
  }
}

std::string nearest(const std::string& pattern, const std::vector<std::string>& names,
                    const std::vector<std::string>& known) {
  std::string anywhere = "**." + pattern;
  if (std::any_of(known.begin(), known.end(), [&](const std::string& name) { return name_matches(anywhere, name); })) {
    return anywhere;
  }
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, pattern.size() / 3) + 1;
  for (const std::string& name : names) {
    const std::size_t distance = edit_distance(pattern, name);
    const bool nothing_in_common = distance == std::max(pattern.size(), name.size());
    if (distance < best_distance && !nothing_in_common && matches_when_given(name, known)) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

}  // namespace

std::string numbers_as_stars(std::string_view name) {
  std::string out;
  while (!name.empty()) {
    const std::string_view component = take_component(name);
    if (!out.empty()) {
      out += '.';
    }
    out += component.find_first_not_of("0123456789") == std::string_view::npos ? std::string_view("*") : component;
  }
  return out;
}

bool name_matches(std::string_view pattern, std::string_view name) noexcept {
  std::string_view after_stars, resume;
  bool stars = false;
  for (;;) {
    std::string_view pattern_rest = pattern;
    const std::string_view want = take_pattern_component(pattern_rest);
    if (want == "**") {
      if (pattern_rest.empty()) {
        return true;
      }
      stars = true;
      after_stars = pattern = pattern_rest;
      resume = name;
      continue;
    }
    std::string_view name_rest = name;
    const std::string_view have = take_component(name_rest);
    if (!pattern.empty() && !name.empty() && component_matches(want, have)) {
      pattern = pattern_rest;
      name = name_rest;
    } else if (pattern.empty() && name.empty()) {
      return true;
    } else if (stars && !resume.empty()) {
      take_component(resume);
      pattern = after_stars;
      name = resume;
    } else {
      return false;
    }
  }
}

NamePatterns::NamePatterns(std::vector<std::string> patterns) : patterns_(std::move(patterns)) {
  for (auto pattern = patterns_.begin(); pattern != patterns_.end(); ++pattern) {
    if (*pattern == "all") {
      *pattern = "**";
    }
    check_pattern(*pattern);
    if (std::find(patterns_.begin(), pattern, *pattern) != pattern) {
      throw UsageError("name pattern \"" + *pattern + "\" is given twice; give each pattern once");
    }
  }
}

NamePatterns NamePatterns::parse(std::string_view list) {
  list = trimmed(list);
  if (list.empty() || list == "off") {
    return {};
  }
  std::vector<std::string> patterns;
  for (;;) {
    const std::size_t comma = find_outside_braces(list, ',');
    const std::string_view pattern = trimmed(list.substr(0, comma));
    if (pattern == "off") {
      throw UsageError("\"off\" cannot be combined with other name patterns");
    }
    patterns.emplace_back(pattern);
    if (comma == std::string_view::npos) {
      break;
    }
    list = list.substr(comma + 1);
  }
  return NamePatterns(std::move(patterns));
}

bool NamePatterns::matches(std::string_view name) const noexcept {
  return std::any_of(patterns_.begin(), patterns_.end(),
                     [name](const std::string& pattern) { return name_matches(pattern, name); });
}

void NamePatterns::require_each_matches(const std::vector<std::string>& known, NameKind kind) const {
  for (const std::string& pattern : patterns_) {
    if (std::any_of(known.begin(), known.end(), [&](const std::string& name) { return name_matches(pattern, name); })) {
      continue;
    }
    std::vector<std::string> names;
    for (const std::string& name : known) {
      if (std::string general = numbers_as_stars(name); std::find(names.begin(), names.end(), general) == names.end()) {
        names.push_back(std::move(general));
      }
    }
    const bool of_calls = kind == NameKind::call;
    std::string message = "name pattern \"" + pattern + "\" " + (of_calls ? "matches no call" : "matches no scope");
    if (const std::string near = nearest(pattern, names, known); !near.empty()) {
      message += "; did you mean \"" + near + "\"?";
    }
    if (pattern.find('{') != std::string::npos) {  // which numbers there are may be what is wrong
      std::transform(names.begin(), names.end(), names.begin(),
                     [&](const std::string& name) { return stars_as_ranges(name, known); });
    }
    const char* const if_later =
        ". If the first step was given up or ran less than later ones, call OffloadEngine::reset";
    if (names.empty()) {
      throw UsageError(message +
                       (of_calls ? "; the step had no calls at all: call what is to be graphed with ss::call"
                                 : "; the step had no scopes at all") +
                       if_later);
    }
    message += message.back() == '?' ? " The names are: " : "; the names are: ";
    for (std::size_t i = 0; i < std::min(names.size(), names_shown); ++i) {
      message += (i > 0 ? ", " : "") + names[i];
    }
    if (names.size() > names_shown) {
      message += " and " + std::to_string(names.size() - names_shown) + " more";
    }
    throw UsageError(message + if_later);
  }
}

}  // namespace sidestream
