#include <cuda_runtime_api.h>

#include "bind.h"

namespace {

// The newest CUDA version that the driver supports, as 1000 * major + 10 * minor; 0 without a
// driver. It does not initialise CUDA.
int DriverVersion() {
  int version = 0;
  return cudaDriverGetVersion(&version) == cudaSuccess ? version : 0;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  jof::BindTargets(m);
  m.attr("architectures") = JOF_CUDA_ARCHITECTURES;
  m.attr("runtime_version") = CUDART_VERSION;
  m.def("driver_version", DriverVersion);
}
