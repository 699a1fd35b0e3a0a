#include "base/site.h"

#include <array>
#include <map>
#include <mutex>
#include <string>
#include <utility>

#include <nvtx3/nvToolsExt.h>

namespace sidestream {
namespace {

constexpr std::array kActivityNames = {"warmup",         "capture forward", "capture backward", "capture weights",
                                       "launch forward", "launch backward", "launch weights",   "offload",
                                       "reload",         "sizing"};
static_assert(kActivityNames.size() == static_cast<std::size_t>(Activity::sizing) + 1);

using RegisteredNames = std::array<nvtxStringHandle_t, kActivityNames.size()>;

/// Null when no tool is attached: NVTX decides that once, at the first call of the process.
nvtxDomainHandle_t domain() noexcept {
  static const nvtxDomainHandle_t handle = nvtxDomainCreateA("sidestream");
  return handle;
}

RegisteredNames register_names(const std::string& label) {
  RegisteredNames names{};
  for (std::size_t activity = 0; activity < names.size(); ++activity) {
    const std::string text =
        label.empty() ? kActivityNames[activity] : std::string(kActivityNames[activity]) + ' ' + label;
    names[activity] = nvtxDomainRegisterStringA(domain(), text.c_str());
  }
  return names;
}

/// NVTX has no way to unregister a string, so one table a label is kept, however many SiteNames ask for it.
const RegisteredNames& names_of(const std::string& label) {
  static std::mutex mutex;
  static std::map<std::string, RegisteredNames> tables;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto found = tables.find(label);
  return found != tables.end() ? found->second : tables.emplace(label, register_names(label)).first->second;
}

}  // namespace

thread_local constinit const Site* Site::innermost_ = nullptr;

SiteName::SiteName(std::string text) : text_(std::move(text)) {
  if (domain() != nullptr) {
    registered_ = &names_of(text_);
  }
}

NvtxRange::NvtxRange(Activity activity, const SiteName& name) noexcept {
  if (domain() == nullptr) {
    return;
  }
  static const RegisteredNames& unlabelled = names_of("");
  const auto& names = name.registered_ != nullptr ? *static_cast<const RegisteredNames*>(name.registered_) : unlabelled;
  nvtxEventAttributes_t attributes{};
  attributes.version = NVTX_VERSION;
  attributes.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  attributes.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
  attributes.message.registered = names[static_cast<std::size_t>(activity)];
  nvtxDomainRangePushEx(domain(), &attributes);
}

NvtxRange::~NvtxRange() {
  if (domain() != nullptr) {
    nvtxDomainRangePop(domain());
  }
}

}  // namespace sidestream
