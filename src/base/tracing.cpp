#include "base/tracing.h"

#include <array>
#include <map>
#include <mutex>
#include <string>

#include <nvtx3/nvToolsExt.h>

namespace sidestream::tracing {
namespace {

constexpr std::array kRangeNames = {"warmup",          "capture forward", "capture backward", "launch forward",
                                    "launch backward", "offload",         "reload",           "sizing"};
static_assert(kRangeNames.size() == static_cast<std::size_t>(Range::sizing) + 1);

using RegisteredNames = std::array<nvtxStringHandle_t, kRangeNames.size()>;

/// Null when no tool is attached: NVTX decides that once, at the first call of the process.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("sidestream");
  return handle;
}

RegisteredNames register_names(const std::string& label) {
  RegisteredNames names{};
  for (std::size_t kind = 0; kind < names.size(); ++kind) {
    const std::string text = label.empty() ? kRangeNames[kind] : std::string(kRangeNames[kind]) + ' ' + label;
    names[kind] = nvtxDomainRegisterStringA(domain(), text.c_str());
  }
  return names;
}

/// NVTX has no way to unregister a string, so one table a label is kept, however many Names ask for it.
const RegisteredNames& names_of(const char* label) {
  static std::mutex mutex;
  static std::map<std::string, RegisteredNames> tables;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = tables.find(label);
  return found != tables.end() ? found->second : tables.emplace(label, register_names(label)).first->second;
}

}  // namespace

Name::Name(const char* label) {
  if (domain() != nullptr) {
    registered_ = &names_of(label);
  }
}

Scope::Scope(Range kind, const Name& name) noexcept {
  if (domain() == nullptr) {
    return;
  }
  static const RegisteredNames& unlabelled = names_of("");
  const auto& names = name.registered_ != nullptr ? *static_cast<const RegisteredNames*>(name.registered_) : unlabelled;
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = names[static_cast<std::size_t>(kind)];
  nvtxDomainRangePushEx(domain(), &attributes);
}

Scope::~Scope() {
  if (domain() != nullptr) {
    nvtxDomainRangePop(domain());
  }
}

}  // namespace sidestream::tracing
