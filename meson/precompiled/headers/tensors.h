// What most sources of src/ with LibTorch include, compiled once. A file still includes what it names: a build with -Db_pch=false shows it.
// g++ instantiates the templates that LibTorch's headers left pending in each source again, so a header that few need costs more than it
// saves.
#include <algorithm>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>
#include <ATen/core/Tensor.h>
