#include "unit/sim/rerun/every_order.h"

#include <c10/core/AutogradState.h>
#include <gtest/gtest.h>

namespace sidestream::sim {

OneThread::OneThread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(false); }
OneThread::~OneThread() { c10::AutogradState::get_tls_state().set_multithreading_enabled(true); }

std::vector<std::byte> raw_bytes(const std::vector<at::Tensor>& tensors) {
  std::size_t size = 0;
  for (const at::Tensor& tensor : tensors) {
    size += tensor.defined() ? tensor.nbytes() : 0;
  }
  std::vector<std::byte> bytes;
  bytes.reserve(size);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.defined()) {
      const auto* data = static_cast<const std::byte*>(tensor.const_data_ptr());
      bytes.insert(bytes.end(), data, data + tensor.nbytes());
    }
  }
  return bytes;
}

void expect_same_in_every_order(Recording& recording, const std::vector<at::Tensor>& tensors,
                                const std::vector<std::byte>& expected, std::uint64_t seeds) {
  const auto expect_same = [&](const Schedule& schedule) {
    recording.rerun(schedule);
    EXPECT_EQ(raw_bytes(tensors) == expected, true) << schedule.name();
  };
  for (const char* name : {"early", "late", "d2h-early", "d2h-late"}) {
    expect_same(Schedule::parse(name));
  }
  for (std::uint64_t seed = 0; seed < seeds && !testing::Test::HasFailure(); ++seed) {
    expect_same(Schedule(Schedule::Kind::seed, seed));
  }
}

std::vector<bool> up_to_last_work(const Recording& recording, c10::Stream stream) {
  const std::vector<RecordedWork>& works = recording.works();
  std::vector<bool> before(works.size(), false);
  bool found = false;
  for (std::size_t i = works.size(); i-- > 0;) {
    if (!found && works[i].queue == stream.id()) {
      found = before[i] = true;
    }
    if (before[i]) {
      for (const std::uint32_t earlier : works[i].after) {
        before[earlier] = true;
      }
    }
  }
  EXPECT_TRUE(found) << "no work of the stream";
  return before;
}

bool last_work_is_behind_all_copies(const Recording& recording, c10::Stream stream) {
  const std::vector<RecordedWork>& works = recording.works();
  const std::vector<bool> before = up_to_last_work(recording, stream);
  for (std::size_t i = 0; i < works.size(); ++i) {
    const Work::Kind kind = works[i].work->kind;
    if (!before[i] && (kind == Work::Kind::copy_to_host || kind == Work::Kind::copy_to_device)) {
      return false;
    }
  }
  return true;
}

}  // namespace sidestream::sim
