#include "observe/call_stack.h"

#include <algorithm>
#include <cstdio>
#include <string_view>

#include <dlfcn.h>
#include <execinfo.h>
#include <sys/auxv.h>

#include <c10/util/Type.h>

namespace sidestream {
namespace {

struct Frame {
  std::string_view module;  ///< its file, without the folders
  const void* base = nullptr;
  std::uintptr_t address = 0;  ///< of the call, not of where it returns to
  const char* symbol = nullptr;
};

Frame frame_of(void* address) {
  Frame frame;
  frame.address = reinterpret_cast<std::uintptr_t>(address) - 1;
  Dl_info info{};
  if (dladdr(reinterpret_cast<void*>(frame.address), &info) != 0) {  // NOLINT: an address of code
    frame.base = info.dli_fbase;
    frame.symbol = info.dli_sname;
    frame.module = info.dli_fname != nullptr ? info.dli_fname : "";
    frame.module.remove_prefix(std::min(frame.module.size(), frame.module.rfind('/') + 1));
  }
  return frame;
}

const void* base_of_program() {
  Dl_info info{};
  return dladdr(reinterpret_cast<void*>(getauxval(AT_ENTRY)), &info) != 0 ? info.dli_fbase : nullptr;  // NOLINT
}

bool begins_with(std::string_view text, std::string_view part) { return text.compare(0, part.size(), part) == 0; }

// A program that is linked with the rooms themselves, as tests are, has frames of its own beside the library's.
bool is_own(const Frame& frame) {
  return frame.base != base_of_program() &&
         (begins_with(frame.module, "libsidestream.so") || begins_with(frame.module, "libsidestream_sim.so"));
}

bool is_below(const Frame& frame) {
  constexpr std::string_view kParts[] = {"libtorch", "libc10", "libcuda", "libcupti", "libsidestream"};
  return std::any_of(std::begin(kParts), std::end(kParts),
                     [&](std::string_view part) { return begins_with(frame.module, part); });
}

std::string text_of(const Frame& frame) {
  constexpr std::size_t kLongest = 240;
  char offset[32];
  if (frame.symbol == nullptr) {
    const auto base = reinterpret_cast<std::uintptr_t>(frame.base);
    std::snprintf(offset, sizeof offset, "+0x%zx", static_cast<std::size_t>(frame.address - base));
    return std::string(frame.module) + offset;
  }
  std::string name = c10::demangle(frame.symbol);
  if (name.size() > kLongest) {
    name.resize(kLongest);
    name.append("...");
  }
  return name.append(" (").append(frame.module).append(")");
}

}  // namespace

CallStack CallStack::here(int skip) {
  CallStack stack;
  std::array<void*, kMost> all{};
  const int depth = backtrace(all.data(), static_cast<int>(all.size()));
  const int first = std::min(depth, skip + 1);
  stack.depth_ = static_cast<std::size_t>(depth - first);
  std::copy(all.begin() + first, all.begin() + depth, stack.addresses_.begin());
  constexpr std::uint64_t kPrime = 0x100000001b3;
  stack.hash_ = 0xcbf29ce484222325;
  for (std::size_t i = 0; i < stack.depth_; ++i) {
    stack.hash_ = (stack.hash_ ^ reinterpret_cast<std::uintptr_t>(stack.addresses_[i])) * kPrime;
  }
  return stack;
}

std::vector<std::string> CallStack::frames(std::size_t most) const {
  std::vector<Frame> all;
  for (std::size_t i = 0; i < depth_; ++i) {
    all.push_back(frame_of(addresses_[i]));
  }
  auto first = std::find_if(all.begin(), all.end(), [](const Frame& frame) { return !is_own(frame); });
  // A thread of autograd has no frames but its own: then LibTorch's frames are all that can be named.
  if (const auto others = std::find_if(first, all.end(), [](const Frame& frame) { return !is_below(frame); });
      others != all.end() && others != first && std::next(others) != all.end()) {
    first = std::prev(others);
  }
  std::vector<std::string> texts;
  for (; first != all.end() && texts.size() < most; ++first) {
    texts.push_back(text_of(*first));
  }
  return texts;
}

}  // namespace sidestream
