#include "base/site.h"

#include <gtest/gtest.h>

namespace sidestream {
namespace {

TEST(Site, WithoutAToolSitesMayNestAndUnlabelledNamesServe) {
  const SiteName name("blocks.0");
  const SiteName unlabelled;
  const Site outer(Activity::capture_forward, name);
  const Site inner(Activity::offload, unlabelled);
  EXPECT_EQ(Site::innermost(), &inner);
  EXPECT_EQ(inner.phase(), "offload");
  EXPECT_EQ(inner.name(), "");
}

TEST(Site, TheInnermostOneWithAPhaseCounts) {
  EXPECT_EQ(Site::innermost(), nullptr);
  const SiteName name("blocks.0");
  {
    const Site outer(Activity::launch_backward, name);
    const Site without_phase(Activity::sizing, name);
    EXPECT_EQ(Site::innermost(), &outer);
    EXPECT_EQ(outer.phase(), "backward");
    EXPECT_EQ(outer.name(), "blocks.0");
  }
  EXPECT_EQ(Site::innermost(), nullptr);
}

}  // namespace
}  // namespace sidestream
