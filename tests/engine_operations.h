#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include <c10/core/Device.h>

namespace sidestream::testing_model {

/// What the engine itself asks of the device for the model of models/scoped_waves.h in the second step after planning and capture, by the
/// journal: one line a site, streams as letters in the order they are first met, "A.record B.wait B.copy_to_host". What operators do is
/// left out: it is the backend's.
[[nodiscard]] std::vector<std::string> engine_operations(c10::Device device, std::int64_t side_streams);

/// The same for every backend.
[[nodiscard]] std::vector<std::string> expected_engine_operations(std::int64_t side_streams);

}  // namespace sidestream::testing_model
