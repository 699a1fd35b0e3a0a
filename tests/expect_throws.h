#pragma once
#include <exception>
#include <string>

#include <gtest/gtest.h>

namespace sidestream::testing_model {

/// The message of the `E` that `body` throws; what came instead otherwise.
template <class E, class Body>
std::string message_of(const Body& body) {
  try {
    body();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    return std::string("another exception came: ") + error.what();
  }
  return "nothing was thrown";
}

}  // namespace sidestream::testing_model

/// `statement` throws an Error whose message holds `text`.
#define EXPECT_THROWS(Error, text, statement) \
  EXPECT_PRED_FORMAT2(testing::IsSubstring, text, ::sidestream::testing_model::message_of<Error>([&] { statement; }))
