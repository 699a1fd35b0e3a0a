// Weights and buffers that calls have captured get other memory.
#include <sstream>

#include <ATen/Functions.h>
#include <gtest/gtest.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include "call_fixture.h"
#include "expect_throws.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"

namespace sidestream::testing_model {
namespace {

TEST_F(CallTest, RelocatedWeightsAreCapturedAgainOrRefused) {
  {
    OffloadEngine engine(model_, options());
    expect_plain(engine, 0, 3);
    relocate(model_);
    expect_plain(engine, 3, 5);
    EXPECT_EQ(engine.report().recaptures, 4);
  }
  OffloadEngine engine(model_, options(GraphOptions().on_relocated_weights(OnRelocatedWeights::error)));
  expect_plain(engine, 5, 7);
  relocate(model_);
  EXPECT_THROWS(UsageError, "were relocated", (void)engine.step());
  engine.reset();
  expect_plain(engine, 7, 9);
}

TEST_F(CallTest, LoadedWeightsAreCapturedAgain) {
  OffloadEngine engine(model_, options());
  std::stringstream saved;
  {
    torch::serialize::OutputArchive archive;
    model_.save(archive);
    archive.save_to(saved);
  }
  expect_plain(engine, 0, 3);
  for (BlockModel* model : {&model_, &plain_}) {
    saved.seekg(0);
    torch::serialize::InputArchive archive;
    archive.load_from(saved);
    model->load(archive);
  }
  expect_plain(engine, 3, 5);
  EXPECT_EQ(engine.report().recaptures, 4);
}

// The blocks read a buffer of the model around them.
TEST_F(CallTest, ARelocatedBufferOfAnotherModuleIsCapturedAgain) {
  OffloadEngine engine(model_, options());
  expect_plain(engine, 0, 3);
  for (BlockModel* model : {&model_, &plain_}) {
    at::Tensor positions = model->named_buffers()["positions"];
    positions.set_data(positions.mul(-2));
  }
  expect_plain(engine, 3, 5);
  EXPECT_EQ(engine.report().recaptures, 4);
}

}  // namespace
}  // namespace sidestream::testing_model
