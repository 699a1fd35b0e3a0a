#include <algorithm>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "fuzz/target.h"

// A fuzz target without its fuzzer: every file of a corpus as it is, cut off after each byte, and with each byte changed.
// Usage: replay FOLDER. A case a file, in the Test Anything Protocol; what a target finds ends the program.

namespace {

/// The bytes that a corpus file stands for: those of a .hex file in pairs of digits, `#` to the end of a line left out.
std::string input_of(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (path.extension() != ".hex") {
    return text;
  }
  std::string digits;
  bool comment = false;
  for (const char c : text) {
    comment = c == '#' || (comment && c != '\n');
    if (!comment && std::strchr("0123456789abcdef", c) != nullptr) {
      digits.push_back(c);
    }
  }
  std::string bytes;
  for (std::size_t i = 0; i + 1 < digits.size(); i += 2) {
    bytes.push_back(static_cast<char>(std::stoi(digits.substr(i, 2), nullptr, 16)));
  }
  return bytes;
}

void run(std::string_view input) {
  // A copy of exactly this size, so that a sanitizer sees what is read beyond it.
  const std::vector<std::uint8_t> bytes(input.begin(), input.end());
  LLVMFuzzerTestOneInput(bytes.data(), bytes.size());
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) {
    std::fprintf(stderr, "usage: replay FOLDER\n");
    return 2;
  }
  std::vector<std::filesystem::path> files;
  for (const auto& entry : std::filesystem::directory_iterator(argv[1])) {
    files.push_back(entry.path());
  }
  std::sort(files.begin(), files.end());
  std::printf("1..%zu\n", files.size());
  for (std::size_t number = 0; number < files.size(); ++number) {
    const std::string input = input_of(files[number]);
    run(input);
    for (std::size_t i = 0; i < input.size(); ++i) {
      run(std::string_view(input).substr(0, i));
      for (const int mask : {0x01, 0x41, 0x80, 0xff}) {
        std::string changed = input;
        changed[i] = static_cast<char>(changed[i] ^ mask);
        run(changed);
      }
    }
    std::printf("ok %zu - %s\n", number + 1, files[number].filename().c_str());
    std::fflush(stdout);
  }
  return files.empty() ? 1 : 0;
}
