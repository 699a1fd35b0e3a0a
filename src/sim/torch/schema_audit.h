#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <ATen/core/stack.h>
#include <c10/util/SmallVector.h>

#include "sim/torch/operator_info.h"

namespace sidestream::sim {

/// Turns the audit of all threads on or off: each operator's sim arguments that neither its schema nor the table of known
/// liars marks as written are hashed before and after it. Slow; for tests and for new operators.
void set_schema_audit(bool on) noexcept;
/// What the audit found since it was turned on, one line for each operator and argument.
[[nodiscard]] std::vector<std::string> schema_audit_findings();

/// One operator call under the audit; does nothing while the audit is off.
class SchemaAudit {
 public:
  SchemaAudit(const OperatorInfo& info, const torch::jit::Stack& stack, std::size_t base);
  /// After the kernel: reports the arguments whose bytes changed.
  void compare();

 private:
  const OperatorInfo& info_;
  struct Snapshot {
    std::size_t argument;
    at::Tensor tensor;
    std::uint64_t hash;
  };
  c10::SmallVector<Snapshot, 2> snapshots_;
};

}  // namespace sidestream::sim
