#include "habits/captured_trainer.h"

#include "habits/trainer.h"

namespace sidestream::habits {

CapturedTrainer::CapturedTrainer(const Setup& setup, c10::Device device, bool with_engine)
    : setup_(setup),
      device_(device),
      with_engine_(with_engine),
      model_(std::make_shared<CapturedModel>(setup, device)) {
  if (with_engine_) {
    Options options(device_);
    options.min_bytes(1);
    const Form& form = forms()[static_cast<std::size_t>(setup_.form)];
    if (*form.offload != '\0') {
      options.offload("**");
    }
    engine_ = std::make_unique<OffloadEngine>(*model_, options);
  }
}

CapturedTrainer::~CapturedTrainer() = default;

void CapturedTrainer::prepare() {
  if (!with_engine_ || (captured_ && switches_ == Switches::now())) {
    return;
  }
  captured_ = false;
  drop_captures();
  capture();
  switches_ = Switches::now();
  captured_ = true;
}

NamedTensors CapturedTrainer::state() const {
  NamedTensors all = state_of(*model_);
  for (std::size_t i = 0; i < results_.size(); ++i) {
    all.emplace_back("result " + std::to_string(i), results_[i]);
  }
  return all;
}

void CapturedTrainer::become(const CapturedTrainer& other) {
  copy_state(*model_, *other.model_);
  results_.clear();
  for (const at::Tensor& tensor : other.results_) {
    results_.push_back(tensor.clone());
  }
}

}  // namespace sidestream::habits
