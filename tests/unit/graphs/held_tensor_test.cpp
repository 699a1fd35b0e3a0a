// Tensors that a capture reads and nothing registers: caches that modules make on first use and replace.
#include <memory>
#include <string>
#include <thread>

#include <ATen/Functions.h>
#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <gtest/gtest.h>
#include <torch/csrc/autograd/custom_function.h>

#include "expect_throws.h"
#include "models/body_model.h"
#include "sidestream/device.h"
#include "sidestream/engine.h"
#include "sidestream/error.h"
#include "sidestream/graphed_callable.h"

namespace sidestream::testing_model {
namespace {

class HeldTensorTest : public testing::Test {
 protected:
  [[nodiscard]] Options options() const { return Options(device_).graph("blocks.*").min_bytes(256); }

  c10::Device device_ = find_device("sim");
};

/// As attention caches its sliding-window mask: one for the latest length.
at::Tensor masked(BodyBlock& block, const at::Tensor& x) {
  const std::int64_t length = x.size(1);
  if (!block.other.defined() || block.other.size(0) != length) {
    const at::NoGradGuard no_grad;
    const at::Tensor i = at::arange(length, x.options());
    block.other = ((i.unsqueeze(1) - i.unsqueeze(0)).abs() < 4).to(x.scalar_type());
  }
  const at::Tensor h = at::matmul(x, block.weight);
  return at::matmul(at::softmax(at::matmul(h, h.transpose(1, 2)) * block.other, -1), h).tanh();
}

/// A rope table that grows to the longest length seen.
at::Tensor rotated(BodyBlock& block, const at::Tensor& x) {
  const std::int64_t length = x.size(1);
  if (!block.other.defined() || block.other.size(0) < length) {
    const at::NoGradGuard no_grad;
    block.other = at::outer(at::arange(length, x.options()), at::arange(x.size(2), x.options()) * 0.1).cos();
  }
  return (at::matmul(x, block.weight) * block.other.narrow(0, 0, length)).sin();
}

void expect_lengths(BodyTwins& twins, OffloadEngine& engine, std::initializer_list<std::int64_t> lengths) {
  std::int64_t s = 0;
  for (const std::int64_t length : lengths) {
    twins.expect_plain(engine, s, s + 1, length);
    ++s;
  }
}

TEST_F(HeldTensorTest, AMaskThatAShorterSequenceReplacedIsStillRead) {
  BodyTwins twins(device_, {masked, masked});
  OffloadEngine engine(twins.mine, options().offload("blocks.*"));
  expect_lengths(twins, engine, {8, 8, 8, 5, 8, 5, 5, 8, 8, 5, 12, 8, 12, 5, 8});
  EXPECT_GT(engine.report().replays, 0);
}

TEST_F(HeldTensorTest, AGrowingTableIsStillReadWhereItWasSmaller) {
  BodyTwins twins(device_, {rotated, rotated});
  OffloadEngine engine(twins.mine, options());
  expect_lengths(twins, engine, {5, 5, 8, 5, 8, 12, 5, 8, 12, 12, 5});
  EXPECT_GT(engine.report().replays, 0);
}

/// Computes a part of its result on a thread of its own.
at::Tensor on_a_thread(BodyBlock& block, const at::Tensor& x) {
  at::Tensor mask;
  std::thread([&] { mask = (x.detach() > 0).to(x.scalar_type()); }).join();
  return (at::matmul(x, block.weight) * mask).tanh();
}

TEST_F(HeldTensorTest, WhatAnotherThreadMakesMeanwhileIsRefused) {
  BodyModel model(device_, {on_a_thread});
  OffloadEngine engine(model, options());
  (void)model.step(&engine, 0);
  EXPECT_THROWS(CaptureError, "another thread makes the tensor during the call", (void)model.step(&engine, 1));
}

at::Tensor keeps_a_mean(BodyBlock& block, const at::Tensor& x) {
  const at::Tensor h = at::matmul(x, block.weight).tanh();
  block.other = h.detach().mean();
  return h;
}

TEST_F(HeldTensorTest, TheReportNotesWhatACallKeeps) {
  BodyTwins twins(device_, {masked, keeps_a_mean});
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 4);
  EXPECT_EQ(twins.mine.block(1).other.item<float>(), twins.plain.block(1).other.item<float>());
  std::string notes;
  for (const std::string& note : engine.report().notes) {
    notes += note + "\n";
  }
  EXPECT_NE(notes.find("\"blocks.1\" keeps tensors that it makes (4 bytes)"), std::string::npos) << notes;
  EXPECT_EQ(notes.find("\"blocks.0\" keeps"), std::string::npos) << notes;
}

TEST_F(HeldTensorTest, AMaskMadeInTheSizingPassIsHeld) {
  BodyModel model(device_, {masked});
  BodyModel plain(device_, {masked});
  OffloadEngine engine(model, Options(device_).offload("masked").min_bytes(256));
  const std::shared_ptr<BodyBlock> block = model.blocks->ptr<BodyBlock>(0);
  for (const std::int64_t warmups : {0, 2}) {
    block->other = at::Tensor();
    const auto graphed = make_graphed_callables(
        engine, {{"masked", [](BodyBlock& of, const Tensors& in) { return Tensors{of.forward(in[0])}; }, block}},
        {{model.data(0, 8, 2)}}, GraphOptions().num_warmup_iters(warmups))[0];
    EXPECT_GT(engine.report().external_bytes, 0);
    for (std::int64_t s = 0; s < 4; ++s) {
      (void)block->forward(model.data(s, 5, 2));  // a validation batch: the mask of length 8 is gone
      const at::Tensor noise = at::full({8, 8}, 3.0, block->weight.options());  // and its memory is used again
      const auto run = [&](BodyModel& of, const at::Tensor& y) {
        clear_gradients(of);
        (y * model.data(s, 8, 2, 1)).sum().backward();
        return gradients(of);
      };
      const auto mine = run(model, graphed({model.data(s, 8, 2)})[0]);
      EXPECT_TRUE(same(mine, run(plain, plain.block(0).forward(model.data(s, 8, 2)))));
    }
  }
}

TEST_F(HeldTensorTest, AMaskMadeInACaptureIsThereForWhoReadsItNext) {
  BodyTwins twins(device_, {masked, masked});
  OffloadEngine engine(twins.mine, options());
  const auto train = [](BodyModel& model, OffloadEngine* in, std::int64_t s) {
    return train_step(model, in, [&] {
      // Two lengths by turns: each capture makes the mask that the one before has replaced.
      (model.forward(model.data(s, 8, 2)).sum() + model.forward(model.data(s, 5, 2)).sum()).backward();
    });
  };
  const auto validate = [](BodyModel& model, OffloadEngine* in, std::int64_t length) {
    at::Tensor result;
    in_step(in, [&] {
      const at::NoGradGuard no_grad;
      result = model.forward(model.data(70, length, 2)).cpu();
    });
    return result;
  };
  EXPECT_TRUE(same(train(twins.mine, &engine, 0), train(twins.plain, nullptr, 0)));
  EXPECT_TRUE(at::equal(validate(twins.mine, &engine, 5), validate(twins.plain, nullptr, 5))) << "behind the capture";
  for (std::int64_t s = 1; s < 5; ++s) {
    EXPECT_TRUE(same(train(twins.mine, &engine, s), train(twins.plain, nullptr, s))) << "step " << s;
    twins.expect_plain(engine, 10 + s, 11 + s, s % 2 == 0 ? 8 : 5, 3);  // another batch: captured on its own
  }
}

TEST_F(HeldTensorTest, AMaskMadeInACaptureHasItsValueBeforeTheFirstReplay) {
  BodyModel model(device_, {masked});
  BodyModel plain(device_, {masked});
  OffloadEngine engine(model, Options(device_));
  const std::shared_ptr<BodyBlock> block = model.blocks->ptr<BodyBlock>(0);
  const auto run = [](BodyBlock& of, const Tensors& in) { return Tensors{of.forward(in[0])}; };
  const auto of_two = make_graphed_callables(engine, {{"long", run, block}, {"short", run, block}},
                                             {{model.data(0, 8, 2)}, {model.data(0, 5, 2)}});
  const auto expect_eager = [&](std::int64_t length) {
    const at::NoGradGuard no_grad;
    const at::Tensor x = model.data(3, length, 2);
    EXPECT_TRUE(at::equal(block->forward(x).cpu(), plain.block(0).forward(x).cpu()));
  };
  expect_eager(5);  // reads the mask that the last capture made: nothing has replayed yet
  const auto of_one = make_graphed_callables(engine, {{"again", run, block}}, {{model.data(0, 5, 2)}})[0];
  expect_eager(8);  // replaces it
  for (std::int64_t s = 0; s < 3; ++s) {
    const at::Tensor x = model.data(s, 5, 2);
    EXPECT_TRUE(at::equal(of_one({x})[0].detach().cpu(), plain.block(0).forward(x).detach().cpu()));
  }
}

TEST_F(HeldTensorTest, WhatAModuleKeepsToLookAtIsAsInPlainTraining) {
  const auto looks = [](BodyBlock& block, const at::Tensor& x) {
    block.kept = at::softmax(at::matmul(x, block.weight), -1).detach();
    return x + at::matmul(x, block.weight).tanh();
  };
  BodyTwins twins(device_, {looks, looks});
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 5);  // `kept` is compared
  EXPECT_GT(engine.report().replays, 0);
}

/// Its backward leaves a tensor of its forward with autograd's thread, which frees it when its next backward begins: as late as the
/// thread may free the last tensors of any backward.
struct FreedLate : torch::autograd::Function<FreedLate> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& x) {
    context->saved_data["cosine"] = x.cos();
    return x.sin();
  }
  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list& grads) {
    held = context->saved_data["cosine"].toTensor();
    return {grads[0] * held};
  }
  static std::unique_ptr<at::ObserverContext> free(const at::RecordFunction& /*node*/) {
    held = at::Tensor();
    return nullptr;
  }
  static at::Tensor held;
};
at::Tensor FreedLate::held;

TEST_F(HeldTensorTest, WhatAutogradsThreadFreesLateIsNotKept) {
  const at::CallbackHandle handle =
      at::addGlobalCallback(at::RecordFunctionCallback(&FreedLate::free).scopes({at::RecordScope::BACKWARD_FUNCTION}));
  BodyModel model(device_, {masked});
  OffloadEngine engine(model, Options(device_));
  // The weight alone needs a gradient, so no other wait for autograd's thread comes after the capture of the backward.
  const auto graphed = make_graphed_callables(
      engine,
      {{"late",
        [](BodyBlock& of, const Tensors& in) { return Tensors{at::matmul(in[0], FreedLate::apply(of.weight))}; },
        model.blocks->ptr<BodyBlock>(0)}},
      {{model.data(0, 8, 2)}})[0];
  at::removeCallback(handle);
  EXPECT_FALSE(FreedLate::held.defined());
  for (const std::string& note : engine.report().notes) {
    EXPECT_EQ(note.find("keeps tensors"), std::string::npos) << note;
  }
}

TEST_F(HeldTensorTest, AStateThatTheBodyReplacesIsRefusedByName) {
  const auto moving = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor h = at::matmul(x, block.weight);
    block.kept = (block.kept.defined() ? block.kept * 0.9 : at::zeros({16}, x.options().requires_grad(false))) +
                 h.detach().mean(at::IntArrayRef{0, 1}) * 0.1;
    return h - block.kept;
  };
  BodyTwins twins(device_, {moving});
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 1);
  EXPECT_THROWS(CaptureError, "graphed call \"blocks.0\": it reads a tensor of 64 bytes that it keeps",
                (void)engine.step());
}

/// A penalty in a member, for the trainer to add to the loss. Its backward needs nothing that was saved.
at::Tensor with_a_mean(BodyBlock& block, const at::Tensor& x) {
  const at::Tensor h = x + block.weight.select(0, 0);
  block.other = h.mean();
  return at::matmul(h, block.weight).tanh();
}

/// The same; its backward meets what the capture's own backward has freed.
at::Tensor with_a_square(BodyBlock& block, const at::Tensor& x) {
  const at::Tensor h = at::matmul(x, block.weight).tanh();
  block.other = h.square().mean();
  return h;
}

TEST_F(HeldTensorTest, ABackwardThroughATensorThatABodyKeepsIsRefused) {
  for (const auto& body : {with_a_mean, with_a_square}) {
    for (const std::int64_t verified : {0, 100}) {
      BodyModel model(device_, {body, body});
      OffloadEngine engine(model, options().verify_replays(verified));
      const auto train = [&](std::int64_t s, bool with_penalty) {
        clear_gradients(model);
        const auto step = engine.step();
        at::Tensor loss = model.forward(model.data(s, 8, 2)).square().mean();
        if (with_penalty) {
          loss = loss + model.block(1).other;
        }
        loss.backward();
      };
      train(0, true);
      train(1, false);
      EXPECT_THROWS(UsageError,
                    "graphed call \"blocks.1\": a backward pass reaches a tensor that the call made and keeps",
                    train(2, true));
      train(3, false);
    }
  }
}

TEST_F(HeldTensorTest, AnIndexThatABodyMakesOnTheHostIsCaptured) {
  const auto turned = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor turn = at::arange(16, at::kLong).flip(0);
    return at::index(at::matmul(x, block.weight), {{}, {}, turn}).tanh();
  };
  BodyTwins twins(device_, {turned, turned});
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 4);
  EXPECT_GT(engine.report().replays, 0);
}

TEST_F(HeldTensorTest, AStateThatIsAnOutputAsWellIsRefusedWhereTheBodyReplacesIt) {
  const auto next = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor h = at::matmul(x, block.weight);
    const at::Tensor state = block.kept.defined() ? block.kept * 0.9 + h : h + 0;
    block.kept = state.detach();
    return state;
  };
  BodyTwins twins(device_, {next});
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 1);
  EXPECT_THROWS(CaptureError, "graphed call \"blocks.0\": it reads a tensor of 1024 bytes that it keeps",
                (void)engine.step());
}

TEST_F(HeldTensorTest, AStateThatIsGivenOutAndReplacedIsRefused) {
  const auto latest = [](BodyBlock& block, const Tensors& in) {
    const at::Tensor h = at::matmul(in[0], block.weight).tanh();
    const at::Tensor before = block.other.defined() ? block.other : at::zeros_like(h.detach());
    block.other = before * 0.9 + h.detach() * 0.1;
    return Tensors{h, before};
  };
  BodyModel model(device_, {masked});
  OffloadEngine engine(model, Options(device_));
  EXPECT_THROWS(CaptureError, "\"latest\": it reads a tensor of 1024 bytes that it keeps",
                (void)make_graphed_callables(engine, {{"latest", latest, model.blocks->ptr<BodyBlock>(0)}},
                                             {{model.data(0, 8, 2)}}));
}

TEST_F(HeldTensorTest, AnOutputThatTheModuleKeepsHasItsValueBeforeTheFirstReplay) {
  const auto looks = [](BodyBlock& block, const at::Tensor& x) {
    const at::Tensor h = at::matmul(x, block.weight).tanh();
    block.kept = h.detach();
    return h;
  };
  BodyModel model(device_, {looks});
  BodyModel plain(device_, {looks});
  OffloadEngine engine(model, Options(device_));
  const std::shared_ptr<BodyBlock> block = model.blocks->ptr<BodyBlock>(0);
  const at::Tensor x = model.data(0, 8, 2);
  const auto graphed = make_graphed_callables(
      engine, {{"looks", [](BodyBlock& of, const Tensors& in) { return Tensors{of.forward(in[0])}; }, block}},
      {{x}})[0];
  (void)plain.block(0).forward(x);
  EXPECT_TRUE(at::equal(block->kept.cpu(), plain.block(0).kept.cpu())) << "of the sample: nothing has replayed yet";
  for (std::int64_t s = 1; s < 4; ++s) {
    const at::Tensor out = graphed({model.data(s, 8, 2)})[0];
    (void)plain.block(0).forward(model.data(s, 8, 2));
    EXPECT_TRUE(at::equal(block->kept.cpu(), plain.block(0).kept.cpu())) << "call " << s;
  }
}

TEST_F(HeldTensorTest, AStateThatTheCallGivesOutAndTheTrainerReplacesIsFoundByVerification) {
  const auto states = [](BodyBlock& block, const at::Tensor& x) {
    if (!block.other.defined()) {
      block.other = at::full({16}, 2.0, x.options().requires_grad(false));
    }
    block.kept = block.other;
    return at::matmul(x, block.weight) * block.other;
  };
  BodyTwins twins(device_, {states});
  OffloadEngine engine(twins.mine, options().verify_replays(100));
  twins.expect_plain(engine, 0, 3);
  for (BodyModel* model : {&twins.mine, &twins.plain}) {
    model->block(0).other = at::full({16}, 3.0, model->first.options().requires_grad(false));
  }
  EXPECT_THROWS(VerificationError, "graphed call \"blocks.0\": replayed, its output 0 differs",
                (void)twins.mine.step(&engine, 3));
}

TEST_F(HeldTensorTest, WhatACaptureMadeIsNotHeld) {
  BodyTwins twins(device_, {rotated, masked});
  OffloadEngine engine(twins.mine, options());
  twins.expect_plain(engine, 0, 3);
  EXPECT_EQ(engine.report().external_bytes, (8 * 16 + 8 * 8) * 4) << "the table and the mask";
}

TEST_F(HeldTensorTest, AFrozenTableOfAnotherModuleIsCapturedAgainWhereItIsRelocated) {
  const auto shared = [](BodyModel& model) {
    return model.register_buffer("table", at::ones({16}, model.first.options().requires_grad(false)) * 0.5);
  };
  at::Tensor mine_table;
  at::Tensor plain_table;
  const auto reads = [](const at::Tensor& table) {
    return [&table](BodyBlock& block, const at::Tensor& x) { return (at::matmul(x, block.weight) * table).tanh(); };
  };
  BodyModel mine(device_, {reads(mine_table)});
  BodyModel plain(device_, {reads(plain_table)});
  mine_table = shared(mine);
  plain_table = shared(plain);
  OffloadEngine engine(mine, options());
  for (std::int64_t s = 0; s < 6; ++s) {
    if (s == 3) {
      mine_table.set_data(mine_table * 2);
      plain_table.set_data(plain_table * 2);
    }
    EXPECT_TRUE(same(mine.step(&engine, s), plain.step(nullptr, s))) << "step " << s;
  }
  EXPECT_GT(engine.report().recaptures, 0);
}

}  // namespace
}  // namespace sidestream::testing_model
