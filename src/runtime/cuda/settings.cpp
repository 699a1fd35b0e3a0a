#include "runtime/cuda/settings.h"

#include <cstdlib>

#include <c10/core/AllocatorConfig.h>

#include "runtime/cuda/libtorch.h"
#include "sidestream/error.h"

namespace sidestream::cuda {

Settings current_settings() {
  using Config = c10::CachingAllocator::AcceleratorAllocatorConfig;
  Settings settings;
  settings.allocator = libtorch::allocator_name();
  settings.caching = std::getenv("PYTORCH_NO_CUDA_MEMORY_CACHING") == nullptr;  // LibTorch asks only whether it is set
  settings.max_split_bytes = Config::max_split_size();
  settings.garbage_collection_threshold = Config::garbage_collection_threshold();
  return settings;
}

void check_settings(const Settings& settings, bool graphs) {
  const std::string needs = "graphs and offload need LibTorch's own caching allocator (backend:native), ";
  if (settings.allocator != "native") {
    throw UsageError(
        needs + "but this process uses the allocator \"" + settings.allocator +
        "\"; remove backend from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF, and load no pluggable allocator");
  }
  if (!settings.caching) {
    throw UsageError(needs + "but PYTORCH_NO_CUDA_MEMORY_CACHING is set; unset it");
  }
  if (!graphs) {
    return;
  }
  const std::string gives_back =
      " lets the allocator release memory during a capture that earlier graphs still use. If you capture graphs, "
      "remove it from PYTORCH_ALLOC_CONF and PYTORCH_CUDA_ALLOC_CONF; expandable_segments:True helps against "
      "fragmentation and may stay";
  if (settings.max_split_bytes != std::numeric_limits<std::size_t>::max()) {
    throw UsageError("max_split_size_mb" + gives_back);
  }
  if (settings.garbage_collection_threshold > 0) {
    throw UsageError("garbage_collection_threshold" + gives_back);
  }
}

}  // namespace sidestream::cuda
