// A driver that is installed and does not work: what CUDA's runtime asks of libcuda.so.1 fails with CUDA_ERROR_UNKNOWN.
#include <cstring>

extern "C" {

__attribute__((visibility("default"))) int cuDriverGetVersion(int* version) {
  *version = 13000;
  return 0;
}

__attribute__((visibility("default"))) int cuInit(unsigned int /*flags*/) { return 999; }

__attribute__((visibility("default"))) int cuGetProcAddress_v2(const char* symbol, void** function, int /*version*/,
                                                               unsigned long long /*flags*/, int* status) {
  if (status != nullptr) {
    *status = 0;
  }
  *function = reinterpret_cast<void*>(&cuInit);
  if (std::strcmp(symbol, "cuDriverGetVersion") == 0) {
    *function = reinterpret_cast<void*>(&cuDriverGetVersion);
  } else if (std::strcmp(symbol, "cuGetProcAddress") == 0) {
    *function = reinterpret_cast<void*>(&cuGetProcAddress_v2);
  }
  return 0;
}
}
