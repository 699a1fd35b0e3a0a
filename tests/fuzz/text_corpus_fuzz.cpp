#include <string>

#include <sys/mman.h>
#include <unistd.h>

#include "fuzz/target.h"
#include "sidestream/error.h"
#include "tools/cli/text_corpus.h"

// The text that a run trains on: any bytes. The first two ask for a window and a batch.

int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using sidestream::cli::TextCorpus;
  using sidestream::fuzz::require;
  if (size < 2) {
    return 0;
  }
  const std::size_t text_bytes = size - 2;
  const int file = memfd_create("text", 0);
  require(file >= 0 && write(file, data + 2, text_bytes) == static_cast<ssize_t>(text_bytes), "the input is written");
  const std::string path = "/proc/self/fd/" + std::to_string(file);
  try {
    const TextCorpus corpus = TextCorpus::read({path, path}, "input");
    require(corpus.bytes() == 2 * text_bytes && corpus.train().size() + corpus.held_out().size() == corpus.bytes(),
            "every byte is trained on or held out");
    const double entropy = corpus.byte_entropy();
    require(entropy >= -1e-9 && entropy < 5.5452, "the entropy of bytes is at most the logarithm of 256");
    const std::size_t window = data[0];
    const std::size_t batch = data[1];
    try {
      corpus.require_windows(window, batch);
      require(corpus.held_out().size() >= window && corpus.train().size() >= window * batch, "the windows have room");
    } catch (const sidestream::UsageError&) {
    }
  } catch (const sidestream::UsageError&) {
    require(text_bytes == 0, "only an empty text is refused");
  }
  close(file);
  return 0;
}
