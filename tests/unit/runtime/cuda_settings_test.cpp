#include "runtime/cuda/settings.h"

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "sidestream/error.h"

namespace sidestream::cuda {
namespace {

TEST(CudaSettings, TheDefaultsAreNotRefused) {
  EXPECT_NO_THROW(check_settings(Settings(), /*graphs=*/true));
  EXPECT_NO_THROW(check_settings(Settings(), /*graphs=*/false));
}

TEST(CudaSettings, AnotherAllocatorIsRefusedByName) {
  for (const char* name : {"cudaMallocAsync", "pluggable"}) {
    Settings settings;
    settings.allocator = name;
    for (const bool graphs : {true, false}) {
      EXPECT_THROWS(UsageError, std::string("the allocator \"") + name, check_settings(settings, graphs));
    }
  }
}

TEST(CudaSettings, NoCachingIsRefused) {
  Settings settings;
  settings.caching = false;
  EXPECT_THROWS(UsageError, "PYTORCH_NO_CUDA_MEMORY_CACHING is set; unset it", check_settings(settings, false));
}

// Both free cached blocks of a pool inside a capture.
TEST(CudaSettings, WhatFreesInsideACaptureIsRefusedForGraphsAlone) {
  Settings split;
  split.max_split_bytes = 128 << 20;
  Settings collected;
  collected.garbage_collection_threshold = 0.8;
  EXPECT_THROWS(UsageError, "max_split_size_mb lets", check_settings(split, true));
  EXPECT_THROWS(UsageError, "garbage_collection_threshold lets", check_settings(collected, true));
  EXPECT_NO_THROW(check_settings(split, false));
  EXPECT_NO_THROW(check_settings(collected, false));
}

}  // namespace
}  // namespace sidestream::cuda
