#pragma once
#include <c10/core/Storage.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include "offload/saved_storage.h"

namespace sidestream {

/// The memory of `storage` is not handed out again before what `streams` have queued by then is done.
inline void keep_for(const c10::Storage& storage, const Streams& streams) {
  if (streams.size() > 1 && storage) {
    const auto* guard = c10::impl::getDeviceGuardImpl(storage.device_type());
    for (const c10::Stream stream : streams) {
      guard->recordDataPtrOnStream(storage.data_ptr(), stream);
    }
  }
}

}  // namespace sidestream
