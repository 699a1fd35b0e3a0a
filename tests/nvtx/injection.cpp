#include "nvtx/injection.h"

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

#include <nvtx3/nvToolsExt.h>

// A tool in NVTX's sense: loaded by NVTX itself from NVTX_INJECTION64_PATH at the first NVTX call of a process.

namespace {

struct Domain {
  bool ours = false;
};

struct Trace {
  std::mutex mutex;
  std::deque<std::string> lines;
  std::deque<std::string> registered;  // handles are addresses of these

  /// SIDESTREAM_NVTX_LOG names a file that gets the lines when the process ends.
  ~Trace() {
    const char* path = std::getenv("SIDESTREAM_NVTX_LOG");
    std::FILE* file = path != nullptr ? std::fopen(path, "w") : nullptr;
    if (file != nullptr) {
      for (const std::string& line : lines) {
        std::fprintf(file, "%s\n", line.c_str());
      }
      std::fclose(file);
    }
  }
};

Trace& trace() {
  static Trace instance;
  return instance;
}

Domain our_domain{true};
Domain other_domain;
thread_local std::size_t depth = 0;

bool ours(nvtxDomainHandle_t domain) { return domain == reinterpret_cast<nvtxDomainHandle_t>(&our_domain); }

nvtxDomainHandle_t NVTX_API domain_create(const char* name) {
  return reinterpret_cast<nvtxDomainHandle_t>(std::strcmp(name, "sidestream") == 0 ? &our_domain : &other_domain);
}

nvtxStringHandle_t NVTX_API register_string(nvtxDomainHandle_t /*domain*/, const char* text) {
  const std::lock_guard<std::mutex> lock(trace().mutex);
  return reinterpret_cast<nvtxStringHandle_t>(&trace().registered.emplace_back(text));
}

int NVTX_API range_push(nvtxDomainHandle_t domain, const nvtxEventAttributes_t* attributes) {
  if (ours(domain)) {
    const bool by_handle = attributes->messageType == NVTX_MESSAGE_TYPE_REGISTERED;
    const std::string name =
        by_handle ? *reinterpret_cast<const std::string*>(attributes->message.registered) : "unregistered name";
    const std::lock_guard<std::mutex> lock(trace().mutex);
    trace().lines.push_back(std::string(2 * depth, ' ') + name);
    ++depth;
  }
  return 0;
}

int NVTX_API range_pop(nvtxDomainHandle_t domain) {
  if (ours(domain)) {
    const std::lock_guard<std::mutex> lock(trace().mutex);
    if (depth == 0) {
      trace().lines.emplace_back("unmatched pop");
    } else {
      --depth;
    }
  }
  return 0;
}

template <typename Function>
void set(NvtxFunctionTable table, NvtxCallbackIdCore2 slot, Function function) {
  *table[slot] = reinterpret_cast<NvtxFunctionPointer>(function);
}

}  // namespace

extern "C" {

__attribute__((visibility("default"))) int InitializeInjectionNvtx2(NvtxGetExportTableFunc_t get_export_table) {
  const auto* callbacks = static_cast<const NvtxExportTableCallbacks*>(get_export_table(NVTX_ETID_CALLBACKS));
  NvtxFunctionTable table = nullptr;
  unsigned int size = 0;
  if (callbacks == nullptr || callbacks->GetModuleFunctionTable(NVTX_CB_MODULE_CORE2, &table, &size) == 0 ||
      size <= NVTX_CBID_CORE2_DomainCreateA) {
    return 0;
  }
  trace();
  set(table, NVTX_CBID_CORE2_DomainCreateA, &domain_create);
  set(table, NVTX_CBID_CORE2_DomainRegisterStringA, &register_string);
  set(table, NVTX_CBID_CORE2_DomainRangePushEx, &range_push);
  set(table, NVTX_CBID_CORE2_DomainRangePop, &range_pop);
  return 1;
}

std::size_t sidestream_nvtx_lines() {
  const std::lock_guard<std::mutex> lock(trace().mutex);
  return trace().lines.size();
}

const char* sidestream_nvtx_line(std::size_t index) {
  const std::lock_guard<std::mutex> lock(trace().mutex);
  return trace().lines.at(index).c_str();
}

std::size_t sidestream_nvtx_depth() { return depth; }

}  // extern "C"
