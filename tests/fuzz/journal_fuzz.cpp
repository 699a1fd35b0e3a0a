#include <string>
#include <string_view>

#include "fuzz/target.h"
#include "sidestream/error.h"
#include "sidestream/journal.h"

// What is read is written as the same bytes, and the order check takes whatever could be read.

namespace {

/// Without magic, version (older ones are read as well) and checksum.
std::string_view body_of(std::string_view content) { return content.substr(23, content.size() - 31); }

void try_content(std::string_view content) {
  sidestream::Journal journal;
  try {
    journal = sidestream::parse_journal(content, "input");
  } catch (const sidestream::UsageError&) {
    return;
  }
  const std::string written = sidestream::journal_bytes(journal);
  sidestream::fuzz::require(body_of(written) == body_of(content), "a journal that was read is written alike");
  try {
    (void)sidestream::check_order(journal);
  } catch (const sidestream::UsageError&) {
    // Needs more memory than the machine has.
  }
}

std::string with_checksum(std::string_view body) {
  std::uint64_t hash = 14695981039346656037ULL;
  for (const char byte : body) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 1099511628211ULL;
  }
  std::string content(body);
  for (int shift = 0; shift < 64; shift += 8) {
    content.push_back(static_cast<char>(hash >> shift));
  }
  return content;
}

}  // namespace

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view content(reinterpret_cast<const char*>(data), size);
  try_content(content);
  // No fuzzer guesses a checksum.
  try_content(with_checksum(content));
  return 0;
}
