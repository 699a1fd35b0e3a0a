#pragma once
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/ArrayRef.h>

namespace sidestream {

/// The memory of `storage` is not handed out again before what `streams` have queued by then is done. It may be another stream's memory. In
/// plain training a saved tensor keeps its memory until backward, so that stream need not have waited for the forward.
inline void keep_for(const c10::Storage& storage, c10::ArrayRef<c10::Stream> streams) {
  if (storage) {
    const auto* guard = c10::impl::getDeviceGuardImpl(storage.device_type());
    for (const c10::Stream stream : streams) {
      guard->recordDataPtrOnStream(storage.data_ptr(), stream);
    }
  }
}

}  // namespace sidestream
