#include "conformance/fixture.h"

#include <ATen/Context.h>

namespace sidestream::conformance {

void ConformanceTest::SetUp() {
  const at::Context& context = at::globalContext();
  deterministic_ = context.deterministicAlgorithms();
  warns_only_ = context.deterministicAlgorithmsWarnOnly();
  fills_ = context.deterministicFillUninitializedMemory();
  if (!subject().missing.empty()) {
    GTEST_SKIP() << subject().missing;
  }
  at::globalContext().setDeterministicAlgorithms(on_gpu(), /*warn_only=*/false);
  at::globalContext().setDeterministicFillUninitializedMemory(false);
}

void ConformanceTest::TearDown() {
  at::globalContext().setDeterministicAlgorithms(deterministic_, warns_only_);
  at::globalContext().setDeterministicFillUninitializedMemory(fills_);
}

}  // namespace sidestream::conformance
