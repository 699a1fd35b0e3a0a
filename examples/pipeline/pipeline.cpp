#include "pipeline.h"

#include <utility>

#include <ATen/ops/empty_like.h>

namespace ss = sidestream;

namespace pipeline {

Pipeline::Pipeline(const ss::PipelineShape& shape, c10::intrusive_ptr<c10d::Backend> ranks, const at::Tensor& boundary)
    : shape_(shape),
      ranks_(std::move(ranks)),
      boundary_(boundary),
      order_(ss::pipeline_order(shape, ranks_->getRank())) {}

at::Tensor Pipeline::step(const Stage& run, const WeightGradients& weight_gradients) {
  loss_ = at::Tensor();
  chunks_.clear();  // of a step that failed
  for (const ss::PipelineStep& work : order_) {
    switch (work.kind) {
      case ss::PipelineStep::Kind::forward:
        forward(work, run);
        break;
      case ss::PipelineStep::Kind::backward:
        backward(work);
        break;
      case ss::PipelineStep::Kind::weight_gradients:
        if (weight_gradients) {
          weight_gradients(work.stage, work.microbatch);
        }
        break;
    }
  }
  return loss_;
}

void Pipeline::forward(const ss::PipelineStep& work, const Stage& run) {
  const std::int64_t own = part(work.stage);
  Chunk chunk;
  if (own > 0) {
    chunk.input = receive(own, own - 1, work.microbatch).requires_grad_();
  }
  chunk.output = run(work.stage, work.microbatch, chunk.input);
  if (own + 1 < parts()) {
    send(chunk.output, own, own + 1, work.microbatch);
  } else {
    loss_ = loss_.defined() ? loss_ + chunk.output.detach() : chunk.output.detach();
  }
  chunks_[{work.stage, work.microbatch}] = std::move(chunk);
}

void Pipeline::backward(const ss::PipelineStep& work) {
  const std::int64_t own = part(work.stage);
  const auto chunk = chunks_.extract({work.stage, work.microbatch});  // in flight until the end of this function
  const auto& [input, output] = chunk.mapped();
  output.backward(own + 1 < parts() ? receive(own, own + 1, work.microbatch) : at::Tensor());
  if (own > 0) {
    send(input.grad(), own, own - 1, work.microbatch);
  }
}

void Pipeline::send(const at::Tensor& tensor, std::int64_t part, std::int64_t to_part, std::int64_t microbatch) {
  std::vector<at::Tensor> host{tensor.detach().to(at::kCPU)};
  const std::int64_t tag = 2 * (microbatch * parts() + to_part) + (to_part > part ? 0 : 1);
  ranks_->send(host, static_cast<int>(to_part % shape_.ranks), static_cast<int>(tag))->wait();
}

at::Tensor Pipeline::receive(std::int64_t part, std::int64_t from_part, std::int64_t microbatch) {
  std::vector<at::Tensor> host{at::empty_like(boundary_, boundary_.options().device(at::kCPU))};
  const std::int64_t tag = 2 * (microbatch * parts() + part) + (part > from_part ? 0 : 1);
  ranks_->recv(host, static_cast<int>(from_part % shape_.ranks), static_cast<int>(tag))->wait();
  return host.front().to(boundary_.device());
}

}  // namespace pipeline
