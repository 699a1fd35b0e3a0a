#pragma once
#include <cstddef>
#include <cstdint>
#include <string>

#include <fmt/format.h>

namespace sidestream::cli {

/// 1234567 as "1,234,567".
inline std::string grouped(std::int64_t number) {
  std::string text;
  const std::string digits = fmt::format("{}", number);
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) {
      text += ',';
    }
    text += digits[i];
  }
  return text;
}

/// "1 step", "1,024 steps", "2 microbatches".
inline std::string counted(std::int64_t number, const std::string& noun) {
  const bool ends_with_ch = noun.size() > 2 && noun.compare(noun.size() - 2, 2, "ch") == 0;
  return grouped(number) + " " + noun + (number == 1 ? "" : ends_with_ch ? "es" : "s");
}

}  // namespace sidestream::cli
