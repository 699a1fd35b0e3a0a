#pragma once
#include <cstddef>
#include <cstdint>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Stream.h>

#include "sim/rerun/recording.h"

namespace sidestream::sim {

/// Backward on the calling thread while it lives: autograd's device thread frees tensors after backward has returned, and an
/// order that is to be run again must reproduce.
class [[nodiscard]] OneThread {
 public:
  OneThread();
  OneThread(const OneThread&) = delete;
  OneThread& operator=(const OneThread&) = delete;
  ~OneThread();
};

/// The bytes of all defined `tensors` as they lie in device memory, waiting for nothing.
[[nodiscard]] std::vector<std::byte> raw_bytes(const std::vector<at::Tensor>& tensors);

/// Runs `recording` again under the named schedules and `seeds` seeds: `tensors` hold `expected` after each.
void expect_same_in_every_order(Recording& recording, const std::vector<at::Tensor>& tensors,
                                const std::vector<std::byte>& expected, std::uint64_t seeds);

/// For each work of `recording`: whether it is the last one of `stream`, or one that this one waits for. A failure if there is none.
[[nodiscard]] std::vector<bool> up_to_last_work(const Recording& recording, c10::Stream stream);
/// True if the last work of `stream` in `recording` is ordered behind every copy of it.
[[nodiscard]] bool last_work_is_behind_all_copies(const Recording& recording, c10::Stream stream);

}  // namespace sidestream::sim
