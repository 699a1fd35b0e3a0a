#pragma once
#include <cstddef>
#include <memory>
#include <vector>

#include "base/site.h"
#include "offload/saved_storage.h"
#include "runtime/handles.h"

namespace sidestream {

/// How a storage, or a part of it, is offloaded and reloaded: fixed addresses, known from the captures of its call's two graphs.
struct CapturedCopy {
  std::byte* host = nullptr;
  const void* source = nullptr;  ///< where the forward graph writes it
  void* target = nullptr;        ///< where the backward graph reads it
  std::size_t bytes = 0;
  std::size_t storage = 0;   ///< among CapturedCopies::storages
  std::size_t at = 0;        ///< where in the storage it begins
  bool for_weights = false;  ///< see StorageProfile
};

/// The copies that one captured forward offloads, group after group. Each group has the events that the graph records when its storages
/// are ready, one for every stream that saved any of them. The graph owns it, and with it the host leases, for life.
struct CapturedCopies {
  struct Group {
    SiteName site;
    std::vector<ExternalEvent> ready;
    std::size_t end = 0;  ///< one past the index of its last copy
  };
  std::vector<Group> groups;
  std::vector<CapturedCopy> copies;
  std::vector<std::shared_ptr<SavedStorage>> storages;  ///< one or several copies each
  std::size_t bytes = 0;
  std::size_t for_weights = 0;  ///< of these bytes: reloaded for the graph of delayed parameters, not for the backward
  std::vector<std::shared_ptr<HostArena>>
      arenas;  ///< those that copies inside of the graph use, which are the graph's own

  [[nodiscard]] bool empty() const noexcept { return copies.empty(); }
};

}  // namespace sidestream
