#include "runtime/backend.h"

#include <string>

#include <gtest/gtest.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

constexpr c10::DeviceType kUnused = c10::DeviceType::HPU;

Availability never() { return {Availability::State::absent, "it is made up"}; }
std::shared_ptr<Runtime> refuse(c10::Device /*device*/) { throw DeviceError("it is made up"); }
void hear_nothing() {}

std::string message_of(c10::Device device) {
  try {
    (void)make_runtime(device);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(BackendTest, ThoseThatAreLinkedAreKnownByNameAndType) {
  for (const char* name : {"cuda", "sim"}) {
    const Backend* backend = find_backend(name);
    ASSERT_NE(backend, nullptr) << name;
    EXPECT_EQ(find_backend(backend->type), backend);
  }
  EXPECT_FALSE(find_backend("cuda")->simulated);
  EXPECT_TRUE(find_backend("sim")->simulated);
  EXPECT_EQ(find_backend("sim")->availability().state, Availability::State::usable);
  EXPECT_EQ(find_backend("tpu"), nullptr);
  EXPECT_EQ(find_backend(c10::DeviceType::XPU), nullptr);
}

TEST(BackendTest, TheSimulatorThatIsLinkedIsNotLoadedAgain) { EXPECT_EQ(&load_simulator(), find_backend("sim")); }

TEST(BackendTest, TheFirstOfATypeCounts) {
  const BackendRegistration first({"made_up", kUnused, false, never, refuse, hear_nothing});
  const BackendRegistration second({"made_up_again", kUnused, false, never, refuse, hear_nothing});
  ASSERT_NE(find_backend(kUnused), nullptr);
  EXPECT_STREQ(find_backend(kUnused)->name, "made_up");
  EXPECT_EQ(find_backend("made_up_again"), nullptr);
  EXPECT_THROW((void)make_runtime(c10::Device(kUnused, 0)), DeviceError);
}

TEST(BackendTest, ADeviceWithoutABackendIsRefusedWithThoseThereAre) {
  const std::string message = message_of(c10::Device(c10::DeviceType::XPU, 0));
  EXPECT_NE(message.find("xpu:0 has no runtime"), std::string::npos) << message;
  EXPECT_NE(message.find("sim"), std::string::npos) << message;
  EXPECT_NE(message.find("find_device"), std::string::npos) << message;
}

}  // namespace
}  // namespace sidestream
