#pragma once
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace sidestream {

/// What has the names, for errors.
enum class NameKind : std::uint8_t { scope, call };

/// Patterns over dotted scope names such as "blocks.3.core_attn".
///
/// `*` matches one whole component, `**` any number of components or none. Inside of a component `*` matches any run of characters
/// ("fc*"). "all" is `**`. A pattern matches whole names: "blocks.3" does not match "blocks.3.fc1". Braces hold alternatives and
/// inclusive ranges of integers: "blocks.{0,4..20}.fc*". A component has one pair of braces at most. An integer of a name is decimal,
/// without leading zeros.
/// Threads: const calls from any.
class NamePatterns {
 public:
  /// No pattern: matches nothing.
  NamePatterns() = default;
  /// Throws: UsageError for an empty pattern or component ("a..b"), and for a pattern that is given twice. Also for braces that are not
  /// closed, are nested, or hold an empty alternative, a dot or no range ("{4..}", "{20..4}").
  explicit NamePatterns(std::vector<std::string> patterns);
  /// From a comma list, blanks around the names dropped; commas in braces do not split it. "" and "off" give no pattern.
  /// Throws: as the constructor.
  [[nodiscard]] static NamePatterns parse(std::string_view list);

  [[nodiscard]] bool empty() const noexcept { return patterns_.empty(); }
  [[nodiscard]] const std::vector<std::string>& patterns() const noexcept { return patterns_; }

  /// True if any pattern matches. Allocates nothing.
  [[nodiscard]] bool matches(std::string_view name) const noexcept;

  /// Every pattern must match one of `known`, the names of scopes or of calls. Throws: UsageError that names the first pattern that does
  /// not, the nearest name and the names there are (shortened when many).
  void require_each_matches(const std::vector<std::string>& known, NameKind kind = NameKind::scope) const;

 private:
  std::vector<std::string> patterns_;
};

/// One pattern against one name; see NamePatterns.
[[nodiscard]] bool name_matches(std::string_view pattern, std::string_view name) noexcept;

/// "blocks.3.fc1" as "blocks.*.fc1": layers of one kind have one name.
[[nodiscard]] std::string numbers_as_stars(std::string_view name);

}  // namespace sidestream
