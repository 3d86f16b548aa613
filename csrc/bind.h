// What both native modules hand to Python: `targets()`, a dict of FFI target names and capsules (or
// dicts of these for the stages of a call), and the version of the FFI headers that the module was
// built with.
#pragma once

#include <pybind11/pybind11.h>

#include "ffi/target.h"

namespace jof {

inline void BindTargets(pybind11::module_& m) {
  m.attr("ffi_api_version") = pybind11::make_tuple(XLA_FFI_API_MAJOR, XLA_FFI_API_MINOR);
  m.def("targets", [] {
    const auto capsule = [](Handler* handler) {
      return pybind11::capsule(reinterpret_cast<void*>(handler), "xla._CUSTOM_CALL_TARGET");
    };
    pybind11::dict targets;
    for (const Target& target : Targets()) {
      if (target.instantiate == nullptr) {
        targets[target.name] = capsule(target.execute);
        continue;
      }
      pybind11::dict stages;
      stages["instantiate"] = capsule(target.instantiate);
      stages["execute"] = capsule(target.execute);
      targets[target.name] = stages;
    }
    return targets;
  });
}

}  // namespace jof
