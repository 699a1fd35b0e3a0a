#include "sidestream/version.h"

#include <string>

#include <gtest/gtest.h>

namespace sidestream {
namespace {

TEST(Version, OfTheLibraryIsThatOfItsHeadersAndTheirParts) {
  const std::string parts = std::to_string(SIDESTREAM_VERSION_MAJOR) + '.' + std::to_string(SIDESTREAM_VERSION_MINOR) +
                            '.' + std::to_string(SIDESTREAM_VERSION_PATCH);
  EXPECT_EQ(version(), parts);
  EXPECT_STREQ(version(), SIDESTREAM_VERSION);
}

}  // namespace
}  // namespace sidestream
