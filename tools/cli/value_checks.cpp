#include "tools/cli/value_checks.h"

#include <cerrno>
#include <cstdlib>
#include <set>
#include <string>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>

namespace sidestream::cli {
namespace {

/// By their types in the help.
const std::set<std::string> kNumbers{"N", "K", "R", "MIB", "MS", "GB/S", "PART"};
const std::set<std::string> kPaths{"FILE", "DIR"};

std::string refuse_empty(const std::string& value) {
  return value.empty() ? "the value is empty; give a number, or leave out the option" : std::string();
}

std::string refuse_empty_path(const std::string& value) {
  return value.empty() ? "the name is empty; give a name, or leave out the option" : std::string();
}

/// CLI11 reads the integer 010 as 8.
std::string refuse_other_base(const std::string& value) {
  const std::size_t first = value.find_first_not_of("+-");
  return first != std::string::npos && value[first] == '0' && first + 1 < value.size() && value[first + 1] != '.'
             ? value + " begins with a zero; give a decimal number without it"
             : std::string();
}

/// `read`: strtoll or strtoull.
template <class Read>
std::string refuse_beyond(const std::string& value, Read read) {
  errno = 0;
  (void)read(value.c_str(), nullptr, 0);
  return errno == ERANGE ? value + " is beyond 64 bits; give a number that fits" : std::string();
}

std::string refuse_beyond_signed(const std::string& value) { return refuse_beyond(value, std::strtoll); }
std::string refuse_beyond_unsigned(const std::string& value) { return refuse_beyond(value, std::strtoull); }

}  // namespace

void check_values(CLI::App& command) {
  for (CLI::Option* option : command.get_options()) {
    const std::string type = option->get_type_name();
    const std::string base = type.substr(0, type.find(':'));  // the descriptions of its checks follow
    if (kNumbers.count(base) != 0) {
      option->check(refuse_empty);
      option->check(refuse_other_base);
      option->check(option->check_lname("seed") ? refuse_beyond_unsigned : refuse_beyond_signed);
    }
    if (kPaths.count(base) != 0) {
      option->check(refuse_empty_path);
    }
  }
}

void require_range(CLI::Option& option, double least, double most) {
  option.check([least, most](const std::string& value) {
    const double number = std::strtod(value.c_str(), nullptr);
    return value.empty() || (number >= least && number <= most)
               ? std::string()
               : fmt::format("{} is out of range; give {} to {}", value, least, most);
  });
}

}  // namespace sidestream::cli
