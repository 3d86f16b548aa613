// What both native modules hand to Python: `targets()`, a dict of FFI target names and capsules (or
// dicts of these for the stages of a call),
// and the version of the FFI headers that the module was built with. A module defines
// JOF_FOR_EACH_OWN_HANDLER, the targets that only it has.
#pragma once

#include <pybind11/pybind11.h>

#include "ffi/handlers.h"

namespace jof {

inline void BindHandlers(pybind11::module_& m) {
  m.attr("ffi_api_version") = pybind11::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", [] {
    const auto capsule = [](XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*)) {
      return pybind11::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
    };
    pybind11::dict targets;
#define JOF_ADD_TARGET(name) targets[#name] = capsule(name);
    JOF_FOR_EACH_HANDLER(JOF_ADD_TARGET)
    JOF_FOR_EACH_OWN_HANDLER(JOF_ADD_TARGET)
#define JOF_ADD_ELEMENTWISE_TARGET(target, ...) JOF_ADD_TARGET(jof_##target)
    JOF_ELEMENTWISE_OPS(JOF_ADD_ELEMENTWISE_TARGET)
    pybind11::dict stages;
    stages["instantiate"] = capsule(jof_compiled_instantiate);
    stages["execute"] = capsule(jof_compiled);
    targets["jof_compiled"] = stages;
#undef JOF_ADD_ELEMENTWISE_TARGET
#undef JOF_ADD_TARGET
    return targets;
  });
}

}  // namespace jof
