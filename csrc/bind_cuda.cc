#define JOF_FOR_EACH_OWN_HANDLER JOF_FOR_EACH_CUDA_HANDLER
#include "bind.h"

PYBIND11_MODULE(_cuda, m) {
  jof::BindHandlers(m);
  m.attr("architectures") = JOF_CUDA_ARCHITECTURES;
}
