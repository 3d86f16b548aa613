// The FFI signature of a search among sorted edges, for both backends. Takes edges (N,) and queries
// of the same type and any shape, and returns the positions of the queries as int32 or uint32.
#pragma once

#include <cstdint>

#include "ffi/decode.h"
#include "ops/searchsorted.h"

namespace jof {

inline constexpr char kSearch[] = "jof_searchsorted";

template <typename Backend>
ffi::Error Search(typename Backend::Stream stream, ffi::AnyBuffer edges, ffi::AnyBuffer queries,
                  ffi::Result<ffi::AnyBuffer> result, bool right) {
  const DType type = DTypeOf(edges.element_type());
  if (!Contains<Sortable>(type) || queries.element_type() != edges.element_type()) {
    return InvalidArgument(kSearch,
                           ": edges and queries must have one element type of f16, bf16, f32, f64 "
                           "and the integers of 32 and 64 bits");
  }
  const auto e = edges.dimensions();
  if (e.size() != 1 || e[0] > INT32_MAX) {
    return InvalidArgument(kSearch, ": edges must have shape (N) with N < 2^31, got ",
                           ShapeString(e));
  }
  const DType positions = DTypeOf(result->element_type());
  if ((positions != DType::kS32 && positions != DType::kU32) || !SameShape(queries, *result)) {
    return InvalidArgument(kSearch, ": the result must be int32 or uint32 of the queries' shape, ",
                           ShapeString(queries.dimensions()), ", got shape ",
                           ShapeString(result->dimensions()));
  }
  const SearchCall call{edges.untyped_data(),
                        queries.untyped_data(),
                        result->untyped_data(),
                        static_cast<uint32_t>(e[0]),
                        static_cast<int64_t>(queries.element_count()),
                        type,
                        right};
  if (call.count == 0) return ffi::Error::Success();
  return Backend::Status(kSearch, LaunchSearch(call, stream));
}

template <typename Backend>
auto SearchBinding() {
  return BufferBinding<Backend, 2, 1>().template Attr<bool>("right");
}

}  // namespace jof
