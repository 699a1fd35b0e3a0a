#pragma once
#include <cstddef>

namespace sidestream {

/// Anonymous memory of whole pages, zeroed. Several threads touch it, so a driver that locks it afterwards finds every page present: the
/// system makes pages far faster on many threads than a driver does on one. Pages are of 2 MiB if the system allows (transparent huge
/// pages), else of 4 KiB. Ends with `unmap_pages`.
///
/// `bytes`: rounded up to whole pages of 4 KiB; nothing beyond them is touched. The result starts at a multiple of 2 MiB.
/// Null if the system has no such memory. Capture: legal (no driver call). Threads: any.
[[nodiscard]] std::byte* map_pages(std::size_t bytes) noexcept;
/// `data` and `bytes` as map_pages was given them.
void unmap_pages(std::byte* data, std::size_t bytes) noexcept;

}  // namespace sidestream
