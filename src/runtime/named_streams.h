#pragma once
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/util/SmallVector.h>

#include "sidestream/detail/export.h"

/// Streams that a program named with `at::Tensor::record_stream`, by storage. LibTorch's allocators keep them with the memory and tell
/// nobody. Memory that takes the place of a storage's, as a reload, is kept for the same streams.
/// Threads: any.
namespace sidestream::named_streams {

/// Backends: a program named `stream` for `storage`.
SIDESTREAM_API void add(const c10::Storage& storage, c10::Stream stream);
/// Those that were named for `storage`. Until a program names any, it costs one load.
[[nodiscard]] c10::SmallVector<c10::Stream, 2> of(const c10::Storage& storage);

}  // namespace sidestream::named_streams
