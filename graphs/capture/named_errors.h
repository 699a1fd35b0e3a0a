#pragma once
#include <string>
#include <typeinfo>

#include "sidestream/error.h"

namespace sidestream {

/// Runs `part`. What the device or the rules of capture refuse says where that was; what the user's code throws is left as it is.
template <class Part>
void naming(const std::string& where, const Part& part) {
  const auto named = [&](const Error& error) {
    const std::string text = error.what();
    return text.find(where) == std::string::npos ? where + ": " + text : text;
  };
  try {
    part();
  } catch (const CaptureError& error) {
    if (typeid(error) != typeid(CaptureError)) {
      throw;
    }
    throw CaptureError(named(error));
  } catch (const DeviceError& error) {
    if (typeid(error) != typeid(DeviceError)) {
      throw;
    }
    throw DeviceError(named(error), error.status());
  }
}

}  // namespace sidestream
