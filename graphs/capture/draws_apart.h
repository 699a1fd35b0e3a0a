#pragma once
#include <ATen/core/Generator.h>
#include <ATen/core/Tensor.h>
#include <c10/core/Device.h>

namespace sidestream {

/// While it lives, the default generator of `device` stands elsewhere: on a sequence of its own, which goes on from one of these to
/// the next. At its end it stands where it stood, whatever was drawn. So what a warm-up draws does not count. Another thread's operator that
/// draws meanwhile, begun before anything could hold it back, has numbers of that sequence: they come once, as all others.
///
/// Graphs draw from where the generator stood when they were captured: what they take is put back as well.
/// The thread has the device's CaptureTurn.  Threads: ends on the thread it began on.
class [[nodiscard]] DrawsApart {
 public:
  explicit DrawsApart(c10::Device device);
  DrawsApart(const DrawsApart&) = delete;
  DrawsApart& operator=(const DrawsApart&) = delete;
  ~DrawsApart();

 private:
  at::Generator generator_;
  at::Generator stood_;  ///< the state that the generator had, which graphs share
  at::Tensor before_;    ///< its value
};

}  // namespace sidestream
