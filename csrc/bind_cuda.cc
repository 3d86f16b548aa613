#include "bind.h"

PYBIND11_MODULE(_cuda, m) {
  jof::BindHandlers(m);
  m.attr("architectures") = JOF_CUDA_ARCHITECTURES;
}
