#include "offload/name_pattern.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <utility>

#include "sidestream/error.h"

namespace sidestream {

namespace {

constexpr std::size_t names_shown = 24;

// The first component of `rest`, which is moved past it. Names have no empty components, so an empty rest is the end.
std::string_view take_component(std::string_view& rest) noexcept {
  const std::size_t dot = rest.find('.');
  const std::string_view component = rest.substr(0, dot);
  rest = dot == std::string_view::npos ? std::string_view() : rest.substr(dot + 1);
  return component;
}

// `*` within one component, by going back to the last star only.
bool component_matches(std::string_view pattern, std::string_view text) noexcept {
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

// "blocks.3.fc1" as "blocks.*.fc1", so that a list of names stays short.
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

std::string nearest(const std::string& pattern, const std::vector<std::string>& names,
                    const std::vector<std::string>& known) {
  std::string anywhere = "**." + pattern;
  if (std::any_of(known.begin(), known.end(), [&](const std::string& name) { return name_matches(anywhere, name); })) {
    return anywhere;
  }
  std::string best;
  std::size_t best_distance = std::max<std::size_t>(2, pattern.size() / 3) + 1;
  for (const std::string& name : names) {
    if (const std::size_t distance = edit_distance(pattern, name); distance < best_distance) {
      best = name;
      best_distance = distance;
    }
  }
  return best;
}

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t");
  return begin == std::string_view::npos ? std::string_view()
                                         : text.substr(begin, text.find_last_not_of(" \t") - begin + 1);
}

}  // namespace

bool name_matches(std::string_view pattern, std::string_view name) noexcept {
  std::string_view after_stars, resume;
  bool stars = false;
  for (;;) {
    std::string_view pattern_rest = pattern;
    const std::string_view want = take_component(pattern_rest);
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
  for (std::string& pattern : patterns_) {
    if (pattern == "all") {
      pattern = "**";
    }
    if (pattern.empty() || pattern.front() == '.' || pattern.back() == '.' || pattern.find("..") != std::string::npos) {
      throw UsageError("name pattern \"" + pattern +
                       "\" has an empty component; write names such as blocks.*.core_attn");
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
    const std::size_t comma = list.find(',');
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

void NamePatterns::require_each_matches(const std::vector<std::string>& known) const {
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
    std::string message = "name pattern \"" + pattern + "\" matches no scope";
    if (const std::string near = nearest(pattern, names, known); !near.empty()) {
      message += "; did you mean \"" + near + "\"?";
    }
    if (names.empty()) {
      throw UsageError(message + "; the step had no scopes at all");
    }
    message += message.back() == '?' ? " The names are: " : "; the names are: ";
    for (std::size_t i = 0; i < std::min(names.size(), names_shown); ++i) {
      message += (i > 0 ? ", " : "") + names[i];
    }
    if (names.size() > names_shown) {
      message += " and " + std::to_string(names.size() - names_shown) + " more";
    }
    throw UsageError(message);
  }
}

}  // namespace sidestream
