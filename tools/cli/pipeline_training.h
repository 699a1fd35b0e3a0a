#pragma once
#include "tools/cli/text_corpus.h"
#include "tools/cli/training_options.h"

namespace sidestream::cli {

/// `sidestream train --pp N`. If RANK is set, this process is that rank. Else it starts all ranks on this machine and waits for them.
/// The last rank prints. Returns the exit code.
/// Throws: UsageError for environment variables that do not fit. Error that names the rank, if one fails or ends.
[[nodiscard]] int train_in_pipeline(TrainingOptions options, const TextCorpus& corpus);

}  // namespace sidestream::cli
