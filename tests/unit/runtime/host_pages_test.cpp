#include "runtime/host_pages.h"

#include <sys/mman.h>

#include <cstdint>
#include <vector>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

constexpr std::size_t kPage = 4096;

/// Pages of [data, data + bytes) that are in memory.
std::size_t resident(std::byte* data, std::size_t bytes) {
  std::vector<unsigned char> pages(bytes / kPage);
  if (mincore(data, bytes, pages.data()) != 0) {
    return 0;
  }
  std::size_t count = 0;
  for (const unsigned char page : pages) {
    count += page & 1U;
  }
  return count;
}

TEST(HostPages, EachPageIsThereZeroedAndItsOwn) {
  // One that several threads touch, with a last share that is smaller and a last page that is not full.
  for (const std::size_t bytes : {std::size_t{1}, std::size_t{3} << 20, (std::size_t{200} << 20) + 12345}) {
    std::byte* const data = map_pages(bytes);
    ASSERT_NE(data, nullptr);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(data) % (std::size_t{2} << 20), 0U);
    const std::size_t whole = (bytes + kPage - 1) / kPage * kPage;
    EXPECT_EQ(resident(data, whole), whole / kPage);
    EXPECT_EQ(data[0], std::byte{0});
    EXPECT_EQ(data[bytes - 1], std::byte{0});
    data[bytes - 1] = std::byte{7};
    unmap_pages(data, bytes);
    EXPECT_EQ(resident(data, whole), 0U) << "given back";
  }
}

TEST(HostPages, WhatCannotBeMappedIsNull) { EXPECT_EQ(map_pages(std::size_t{1} << 55), nullptr); }

}  // namespace
}  // namespace sidestream
