#include <cerrno>
#include <cstring>
#include <fstream>
#include <limits>
#include <string_view>

#include <unistd.h>

#include "sidestream/error.h"
#include "sidestream/journal.h"

namespace sidestream {
namespace {

constexpr std::string_view kMagic = "sidestream journal\n";
constexpr std::uint32_t kVersion = 2;  // 1 had no pinned accesses and no freed_behind; else it is the same
constexpr std::uint64_t kSiteBytes = 16;
constexpr std::uint64_t kOperationBytes = 29;
constexpr std::uint64_t kAccessBytes = 17;
// What an access's byte of flags is made of.
constexpr std::uint8_t kWrite = 1;
constexpr std::uint8_t kPinned = 2;
/// Bytes in memory for one in a file, rounded up: what a file is refused by before it is read.
constexpr std::uint64_t kGrowth = 3;

std::uint64_t checksum(std::string_view bytes) {
  std::uint64_t hash = 14695981039346656037ULL;  // FNV-1a
  for (const char byte : bytes) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211ULL;
  }
  return hash;
}

class Writer {
 public:
  template <class Number>
  void number(Number value) {
    for (std::size_t i = 0; i < sizeof(Number); ++i) {
      bytes_.push_back(static_cast<char>(static_cast<std::uint64_t>(value) >> (8 * i)));
    }
  }
  void text(std::string_view value) { bytes_.append(value); }
  void texts(const std::vector<std::string>& values) {
    number<std::uint64_t>(values.size());
    for (const std::string& value : values) {
      number<std::uint32_t>(static_cast<std::uint32_t>(value.size()));
      text(value);
    }
  }
  [[nodiscard]] std::string finish() {
    number(checksum(bytes_));
    return std::move(bytes_);
  }

 private:
  std::string bytes_;
};

class Reader {
 public:
  Reader(std::string_view bytes, std::string path) : bytes_(bytes), path_(std::move(path)) {}

  template <class Number>
  Number number() {
    const std::string_view from = text(sizeof(Number));
    std::uint64_t value = 0;
    for (std::size_t i = 0; i < sizeof(Number); ++i) {
      value |= static_cast<std::uint64_t>(static_cast<unsigned char>(from[i])) << (8 * i);
    }
    return static_cast<Number>(value);
  }
  std::string_view text(std::size_t count) {
    if (count > bytes_.size()) {
      refuse("is truncated");
    }
    const std::string_view value = bytes_.substr(0, count);
    bytes_.remove_prefix(count);
    return value;
  }
  /// How many items of at least `least` bytes follow.
  std::size_t count(std::uint64_t least) {
    const auto items = number<std::uint64_t>();
    if (items > bytes_.size() / least) {
      refuse("is truncated");
    }
    return static_cast<std::size_t>(items);
  }
  std::vector<std::string> texts() {
    std::vector<std::string> values(count(sizeof(std::uint32_t)));
    for (std::string& value : values) {
      value = text(number<std::uint32_t>());
    }
    return values;
  }
  /// `value`, which must be below `limit`.
  template <class Number>
  Number index(Number value, std::size_t limit) {
    if (value >= limit) {
      refuse("is damaged: it refers to entries that it does not contain");
    }
    return value;
  }
  [[nodiscard]] bool empty() const noexcept { return bytes_.empty(); }
  [[noreturn]] void refuse(const std::string& what) const {
    throw UsageError("journal '" + path_ + "' " + what + "; write it again: journal_bytes gives its content");
  }

 private:
  std::string_view bytes_;
  std::string path_;
};

std::string content_of(const std::string& path) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  const std::streamoff size = file ? static_cast<std::streamoff>(file.tellg()) : -1;
  // A folder opens and then has a length that nothing could have.
  if (!file || size < 0 || size == std::numeric_limits<std::streamoff>::max()) {
    throw UsageError("journal '" + path + "' cannot be read: " + (errno != 0 ? std::strerror(errno) : "it is no file") +
                     "; name a file that has the result of journal_bytes");
  }
  const auto bytes = static_cast<std::uint64_t>(size);
  const auto memory =
      static_cast<std::uint64_t>(sysconf(_SC_PHYS_PAGES)) * static_cast<std::uint64_t>(sysconf(_SC_PAGESIZE));
  if (bytes > memory / kGrowth) {
    throw UsageError("journal '" + path + "' has " + std::to_string(bytes) + " bytes, but this machine has only " +
                     std::to_string(memory) + " bytes of memory; check fewer steps");
  }
  std::string content(static_cast<std::size_t>(bytes), 0);
  file.seekg(0);
  if (!file.read(content.data(), static_cast<std::streamsize>(bytes))) {
    throw UsageError("journal '" + path + "' cannot be read to its end: " + std::strerror(errno));
  }
  return content;
}

}  // namespace

std::string journal_bytes(const Journal& journal) {
  Writer out;
  out.text(kMagic);
  out.number(kVersion);
  out.texts(journal.names);
  out.texts(journal.streams);
  out.number<std::uint64_t>(journal.sites.size());
  for (const JournalSite& site : journal.sites) {
    out.number(site.name);
    out.number(site.phase);
    out.number(site.step);
  }
  out.number<std::uint64_t>(journal.operations.size());
  for (const JournalOperation& operation : journal.operations) {
    out.number(static_cast<std::uint8_t>(operation.kind));
    out.number(operation.stream);
    out.number(operation.event);
    out.number(operation.name);
    out.number(operation.site);
    out.number(operation.first_access);
    out.number(operation.accesses);
  }
  out.number<std::uint64_t>(journal.accesses.size());
  for (const JournalAccess& access : journal.accesses) {
    out.number(access.begin);
    out.number(access.bytes);
    out.number(static_cast<std::uint8_t>((access.write ? kWrite : 0) | (access.pinned ? kPinned : 0)));
  }
  return out.finish();
}

Journal read_journal(const std::string& path) {
  errno = 0;
  return parse_journal(content_of(path), path);
}

Journal parse_journal(std::string_view content, const std::string& source) {
  Reader in(content, source);
  if (content.compare(0, kMagic.size(), kMagic) != 0) {
    in.refuse("is not a journal");
  }
  (void)in.text(kMagic.size());
  if (const auto version = in.number<std::uint32_t>(); version < 1 || version > kVersion) {
    in.refuse("is of version " + std::to_string(version) + ", and this program reads those up to " +
              std::to_string(kVersion));
  }
  Journal journal;
  journal.names = in.texts();
  journal.streams = in.texts();
  journal.sites.resize(in.count(kSiteBytes));
  for (JournalSite& site : journal.sites) {
    site.name = in.index(in.number<std::uint32_t>(), journal.names.size());
    site.phase = in.index(in.number<std::uint32_t>(), journal.names.size());
    site.step = in.number<std::uint64_t>();
  }
  journal.operations.resize(in.count(kOperationBytes));
  for (JournalOperation& operation : journal.operations) {
    const auto kind = in.number<std::uint8_t>();
    operation.kind = static_cast<JournalKind>(in.index(kind, static_cast<std::size_t>(JournalKind::freed_behind) + 1));
    operation.stream = in.number<std::uint32_t>();
    if (operation.kind != JournalKind::host_access) {
      in.index(operation.stream, journal.streams.size());
    }
    operation.event = in.number<std::uint32_t>();
    operation.name = in.index(in.number<std::uint32_t>(), journal.names.size());
    operation.site = in.index(in.number<std::uint32_t>(), journal.sites.size());
    operation.first_access = in.number<std::uint64_t>();
    operation.accesses = in.number<std::uint32_t>();
  }
  journal.accesses.resize(in.count(kAccessBytes));
  for (JournalAccess& access : journal.accesses) {
    access.begin = in.number<std::uint64_t>();
    access.bytes = in.number<std::uint64_t>();
    const auto flags = in.number<std::uint8_t>();
    if (flags > (kWrite | kPinned)) {
      in.refuse("is damaged: an access neither reads nor writes");
    }
    access.write = (flags & kWrite) != 0;
    access.pinned = (flags & kPinned) != 0;
    if (access.bytes > std::numeric_limits<std::uint64_t>::max() - access.begin) {
      in.refuse("is damaged: an access goes beyond all addresses");
    }
  }
  for (const JournalOperation& operation : journal.operations) {
    const std::uint64_t held = journal.accesses.size();
    if (operation.first_access > held || operation.accesses > held - operation.first_access) {
      in.refuse("is damaged: it refers to entries that it does not contain");
    }
  }
  const auto expected = checksum(content.substr(0, content.size() - sizeof(std::uint64_t)));
  if (in.number<std::uint64_t>() != expected || !in.empty()) {
    in.refuse("is damaged: its checksum differs");
  }
  return journal;
}

}  // namespace sidestream
