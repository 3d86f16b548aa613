#define JOF_FOR_EACH_OWN_HANDLER JOF_FOR_EACH_CPU_HANDLER
#include "bind.h"
#include "cpu/kernels.h"

PYBIND11_MODULE(_cpu, m) {
  jof::BindHandlers(m);
  m.def("instruction_set", [] { return jof::BestCpuKernels().name; });
}
