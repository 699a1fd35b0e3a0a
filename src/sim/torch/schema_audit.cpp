#include "sim/torch/schema_audit.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <mutex>
#include <string_view>

#include "sim/torch/aliases.h"

namespace sidestream::sim {
namespace {

struct Findings {
  std::atomic<bool> on{false};
  std::mutex mutex;
  std::vector<std::string> lines;
};

Findings& findings() {
  static auto* const instance = new Findings();
  return *instance;
}

std::uint64_t hash_of(const at::Tensor& tensor) {
  const Access bytes = extent(tensor, false);
  return std::hash<std::string_view>{}({reinterpret_cast<const char*>(bytes.begin), bytes.bytes});
}

}  // namespace

void set_schema_audit(bool on) noexcept {
  Findings& state = findings();
  const std::lock_guard<std::mutex> lock(state.mutex);
  if (on) {
    state.lines.clear();
  }
  state.on = on;
}

std::vector<std::string> schema_audit_findings() {
  Findings& state = findings();
  const std::lock_guard<std::mutex> lock(state.mutex);
  return state.lines;
}

SchemaAudit::SchemaAudit(const OperatorInfo& info, const torch::jit::Stack& stack, std::size_t base) : info_(info) {
  if (!findings().on.load(std::memory_order_relaxed)) {
    return;
  }
  std::vector<Access> written;
  const auto each = [&](std::size_t i, auto action) {
    const c10::IValue& value = stack[base + i];
    if (value.isTensor()) {
      action(value);
    } else if (value.isTensorList() || value.isOptionalTensorList()) {
      for (const auto& element : value.toListRef()) {
        action(element);
      }
    }
  };
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    each(i, [&](const c10::IValue& value) {
      if (info.arguments[i].written && value.isTensor() && is_sim(value.toTensor())) {
        written.push_back(extent(value.toTensor(), true));
      }
    });
  }
  for (std::size_t i = 0; i < info.arguments.size(); ++i) {
    each(i, [&](const c10::IValue& value) {
      if (info.arguments[i].written || !value.isTensor() || !is_sim(value.toTensor())) {
        return;
      }
      const Access bytes = extent(value.toTensor(), false);
      // Bytes that a written argument covers may change: the same storage given twice (self and out) is no finding.
      if (std::none_of(written.begin(), written.end(), [&](const Access& other) { return overlap(bytes, other); })) {
        snapshots_.push_back({i, value.toTensor(), hash_of(value.toTensor())});
      }
    });
  }
}

void SchemaAudit::compare() {
  for (const Snapshot& snapshot : snapshots_) {
    if (hash_of(snapshot.tensor) != snapshot.hash) {
      std::string line = std::string(info_.name) + " writes argument " + std::to_string(snapshot.argument) +
                         ", which its schema does not mark";
      Findings& state = findings();
      const std::lock_guard<std::mutex> lock(state.mutex);
      if (std::find(state.lines.begin(), state.lines.end(), line) == state.lines.end()) {
        state.lines.push_back(std::move(line));
      }
    }
  }
}

}  // namespace sidestream::sim
