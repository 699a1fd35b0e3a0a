#include "sim/torch/operator_info.h"

#include <algorithm>
#include <array>
#include <deque>
#include <mutex>
#include <string>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "observe/unmarked_writes.h"

namespace sidestream::sim {
namespace {

/// Operators whose result, or its shape, the host must know before it goes on.
constexpr std::array host_needs{
    std::string_view{"aten::equal"},
    std::string_view{"aten::is_nonzero"},
    std::string_view{"aten::embedding_renorm_"},
    std::string_view{"aten::nonzero"},
    std::string_view{"aten::masked_select"},
    std::string_view{"aten::bincount"},
    std::string_view{"aten::_unique"},
    std::string_view{"aten::_unique2"},
    std::string_view{"aten::unique_dim"},
    std::string_view{"aten::unique_consecutive"},
    std::string_view{"aten::unique_dim_consecutive"},
    std::string_view{"aten::_assert_async"},
    std::string_view{"aten::_linalg_check_errors"},
};

/// Random operators whose number of draws is known only after they have run. They draw until a sample fits, or only for some elements.
/// Or they draw normal samples one by one. These come in pairs, and the generator may still hold the second of a pair.
constexpr std::array varying_draws{
    std::string_view{"aten::poisson"},          std::string_view{"aten::binomial"},
    std::string_view{"aten::_standard_gamma"},  std::string_view{"aten::_sample_dirichlet"},
    std::string_view{"aten::rrelu_with_noise"}, std::string_view{"aten::rrelu_with_noise_"},
    std::string_view{"aten::normal"},           std::string_view{"aten::normal_"},
    std::string_view{"aten::log_normal_"},
};

OperatorInfo::Kind kind_of(const c10::Type& type) {
  using Kind = OperatorInfo::Kind;
  if (const auto* optional = type.castRaw<c10::OptionalType>()) {
    return kind_of(*optional->getElementType());
  }
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      return Kind::tensor;
    case c10::TypeKind::GeneratorType:
      return Kind::generator;
    case c10::TypeKind::DeviceObjType:
      return Kind::device;
    case c10::TypeKind::ListType: {
      const auto& element = *type.expectRef<c10::ListType>().getElementType();
      if (element.kind() == c10::TypeKind::TensorType) {
        return Kind::tensor_list;
      }
      const auto* optional = element.castRaw<c10::OptionalType>();
      return optional != nullptr && optional->getElementType()->kind() == c10::TypeKind::TensorType
                 ? Kind::optional_tensor_list
                 : Kind::plain;
    }
    default:  // c10::TypeKind has dozens of kinds; only those above carry device memory or state
      return Kind::plain;
  }
}

/// One string for each operator that is ever used, for as long as the process: works and errors point to it.
/// Under the lock of `shared_info`.
const char* lasting(std::string text) {
  static auto* const texts = new std::unordered_set<std::string>();
  return texts->insert(std::move(text)).first->c_str();
}

OperatorInfo make_info(const c10::OperatorHandle& op) {
  const c10::FunctionSchema& schema = op.schema();
  OperatorInfo info;
  info.key = op.operator_name();
  info.name = lasting(c10::toString(op.operator_name()));
  for (const c10::Argument& argument : schema.arguments()) {
    OperatorInfo::Argument entry;
    entry.kind = kind_of(*argument.type());
    entry.written = argument.alias_info() != nullptr && argument.alias_info()->isWrite();
    entry.may_resize = entry.written && argument.is_out();
    entry.written |= writes_unmarked(schema.name(), argument.name());
    info.takes_generator |= entry.kind == OperatorInfo::Kind::generator;
    info.arguments.push_back(entry);
  }
  for (const c10::Argument& result : schema.returns()) {
    int source = -1;
    const c10::AliasInfo* alias = result.alias_info();
    if (alias != nullptr) {
      info.returns_view |= !alias->isWrite();
      for (std::size_t i = 0; i < schema.arguments().size() && source < 0; ++i) {
        const c10::AliasInfo* from = schema.arguments()[i].alias_info();
        if (alias->isWrite() && from != nullptr && from->isWrite() && from->beforeSets() == alias->beforeSets()) {
          source = static_cast<int>(i);
        }
      }
    }
    info.returns.push_back(source);
  }
  info.has_cpu_kernel = op.hasComputedKernelForDispatchKey(c10::DispatchKey::CPU);
  info.random = op.hasTag(at::Tag::nondeterministic_seeded) || info.takes_generator;
  const bool of_libtorch = schema.name().compare(0, 6, "aten::") == 0;
  const bool varies = std::find(varying_draws.begin(), varying_draws.end(), schema.name()) != varying_draws.end();
  info.draws_vary = info.random && (varies || !of_libtorch);  // of other libraries' operators nothing is known
  info.host_needs_result = std::find(host_needs.begin(), host_needs.end(), schema.name()) != host_needs.end();
  if (schema.name() == "aten::repeat_interleave" && !schema.arguments().empty() &&
      schema.arguments()[0].name() == "repeats") {
    info.host_needs_result = true;
  }
  info.waits_on_devices = info.host_needs_result && schema.name() != "aten::_assert_async";
  return info;
}

// The address of a schema is a fast key, but a library that is unloaded gives it to another operator: the name decides.
// Entries are never removed, because works point to their names.
const OperatorInfo& shared_info(const c10::OperatorHandle& op) {
  static auto* const mutex = new std::mutex();
  static auto* const infos = new std::deque<OperatorInfo>();
  static auto* const table = new std::unordered_map<const c10::FunctionSchema*, const OperatorInfo*>();
  const std::lock_guard<std::mutex> lock(*mutex);
  const OperatorInfo*& entry = (*table)[&op.schema()];
  if (entry == nullptr || entry->key != op.operator_name()) {
    entry = &infos->emplace_back(make_info(op));
  }
  return *entry;
}

}  // namespace

const OperatorInfo& info_of(const c10::OperatorHandle& op) {
  thread_local std::unordered_map<const c10::FunctionSchema*, const OperatorInfo*> seen;
  const OperatorInfo*& entry = seen[&op.schema()];
  if (entry == nullptr || entry->key != op.operator_name()) {
    entry = &shared_info(op);
  }
  return *entry;
}

}  // namespace sidestream::sim
