#include "cuda/elementwise_launchers.cuh"

namespace jof {
template const ElementwiseLauncher* ElementwiseLaunchers<double>();
}  // namespace jof
