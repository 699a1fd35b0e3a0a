// Conformance tests run on a GPU here.
#include "conformance/fixture.h"
#include "runtime/runtime.h"
#include "sidestream/device.h"
#include "sidestream/error.h"
#include "tested_gpu.h"

namespace sidestream::conformance {

const Subject& subject() {
  static const Subject gpu = []() -> Subject {
    try {
      return {make_runtime(testing_model::tested_gpu())->device(), ""};
    } catch (const Error& error) {
      return {find_device("sim"), error.what()};
    }
  }();
  return gpu;
}

}  // namespace sidestream::conformance
