#pragma once
#include "offload/saved_storage.h"

namespace sidestream {

/// Offloads nothing: the sizing pass of one layer, whose backward follows at once.
class SizingMover : public StorageMover {
 public:
  void group_ended(Group& /*group*/) override {}
  c10::Storage fetch(SavedStorage& storage) override { return storage.device; }
  void dropped(SavedStorage& /*storage*/) noexcept override {}
};

}  // namespace sidestream
