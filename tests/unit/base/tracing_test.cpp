#include "base/tracing.h"

#include <gtest/gtest.h>

namespace sidestream::tracing {
namespace {

TEST(Tracing, WithoutAToolScopesMayNestAndUnlabelledNamesServe) {
  const Name name("blocks.0");
  const Scope outer(Range::capture_forward, name);
  const Scope inner(Range::offload, Name());
  SUCCEED();
}

}  // namespace
}  // namespace sidestream::tracing
