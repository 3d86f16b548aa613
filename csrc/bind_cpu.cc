#include "bind.h"
#include "cpu/kernels.h"

PYBIND11_MODULE(_cpu, m) {
  jof::BindHandlers(m);
  m.def("instruction_set", [] { return jof::BestCpuKernels().name; });
}
