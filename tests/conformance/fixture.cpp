#include "conformance/fixture.h"

#include <ATen/Context.h>

namespace sidestream::conformance {

void ConformanceTest::SetUp() {
  if (!subject().missing.empty()) {
    GTEST_SKIP() << subject().missing;
  }
  at::globalContext().setDeterministicAlgorithms(on_gpu(), /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

void ConformanceTest::TearDown() { at::globalContext().setDeterministicAlgorithms(false, /*warn_only=*/false); }

}  // namespace sidestream::conformance
