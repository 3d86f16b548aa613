#include "cuda/elementwise_launchers.cuh"

namespace jof {
template const ElementwiseLauncher* ElementwiseLaunchers<BFloat16>();
}  // namespace jof
