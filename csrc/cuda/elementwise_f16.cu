#include "cuda/elementwise_launchers.cuh"

namespace jof {
template const ElementwiseLauncher* ElementwiseLaunchers<Half>();
}  // namespace jof
