#pragma once
#include <cstddef>

namespace sidestream {

/// Anonymous memory of whole pages, touched by several threads, so that a driver that locks it afterwards finds every page there:
/// the system makes pages far faster on many threads than a driver does on one, and of 2 MiB where it may (transparent huge
/// pages), else of 4 KiB. Zeroed. Ends with `unmap_pages`.
///
/// `bytes`: rounded up to whole pages of 4 KiB; nothing beyond them is touched. The result starts at a multiple of 2 MiB.
/// Null where the system has no such memory. Capture: legal (no driver call). Threads: any.
[[nodiscard]] std::byte* map_pages(std::size_t bytes) noexcept;
/// `data` and `bytes` as map_pages was given them.
void unmap_pages(std::byte* data, std::size_t bytes) noexcept;

}  // namespace sidestream
