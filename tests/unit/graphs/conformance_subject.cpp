// Conformance tests run on the simulated device here.
#include "conformance/fixture.h"
#include "sidestream/device.h"

namespace sidestream::conformance {

const Subject& subject() {
  static const Subject sim{find_device("sim"), ""};
  return sim;
}

}  // namespace sidestream::conformance
