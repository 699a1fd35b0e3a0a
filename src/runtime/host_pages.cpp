#include "runtime/host_pages.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdint>
#include <exception>
#include <thread>
#include <vector>

namespace sidestream {
namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kHugePage = std::size_t{2} << 20;
constexpr std::size_t kShare = std::size_t{64} << 20;  ///< below, a thread is not worth its start
constexpr std::size_t kThreads = 16;

std::size_t rounded_up(std::size_t value, std::size_t to) { return (value + to - 1) / to * to; }

void touch(std::byte* begin, std::byte* end) noexcept {
  for (volatile std::byte* page = begin; page < end; page += kPage) {
    *page = std::byte{0};
  }
}

void touch_on_threads(std::byte* data, std::size_t bytes) noexcept {
  const std::size_t wanted = std::clamp<std::size_t>(std::thread::hardware_concurrency(), 1, kThreads);
  const std::size_t parts = std::clamp<std::size_t>(bytes / kShare, 1, wanted);
  const std::size_t share = rounded_up((bytes + parts - 1) / parts, kHugePage);
  std::byte* const end = data + bytes;
  std::byte* next = data + std::min(share, bytes);  // the first share is this thread's
  std::vector<std::thread> threads;
  try {
    threads.reserve(parts);
    for (; next < end; next += std::min<std::size_t>(share, static_cast<std::size_t>(end - next))) {
      threads.emplace_back([begin = next, last = std::min(next + share, end)] { touch(begin, last); });
    }
  } catch (const std::exception&) {  // no more threads: the rest is touched here
    touch(next, end);
  }
  touch(data, data + std::min(share, bytes));
  for (std::thread& thread : threads) {
    thread.join();
  }
}

}  // namespace

std::byte* map_pages(std::size_t bytes) noexcept {
  const std::size_t length = rounded_up(bytes, kPage);
  // A place with room to begin at a huge page; what lies around it is given back.
  void* const place = mmap(nullptr, length + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (place == MAP_FAILED) {
    return nullptr;
  }
  auto* const begin = static_cast<std::byte*>(place);
  const std::size_t before = (kHugePage - reinterpret_cast<std::uintptr_t>(begin) % kHugePage) % kHugePage;
  std::byte* const data = begin + before;
  if (before > 0) {
    (void)munmap(begin, before);
  }
  (void)munmap(data + length, kHugePage - before);
  (void)madvise(data, length, MADV_HUGEPAGE);  // where they are off, pages are small
  touch_on_threads(data, length);
  return data;
}

void unmap_pages(std::byte* data, std::size_t bytes) noexcept { (void)munmap(data, rounded_up(bytes, kPage)); }

}  // namespace sidestream
