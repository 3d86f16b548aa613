// The FFI signature of row kernels that are compiled at run time: jof_compiled_rows. The attributes
// code, id, name and element_bytes and the loaded kernels are those of ffi/compiled.h. Other
// attributes:
//   kinds    of each operand, then of each result: see RowKind
//   width    elements of a row
//   layout   what the kernel was compiled for: the first 6 members of TracedRowsLayout
#pragma once

#include "ffi/compiled.h"
#include "ops/traced_rows.h"

namespace jof {

// Sums are one result, (parts, sums, width), of elements of TracedRowsLayout::word_bytes bytes.
enum RowKind : int64_t { kRowArray, kRowVector, kRowValue, kRowScalar, kRowSums };

inline ffi::Error DecodeCompiledRows(std::string_view name, ffi::RemainingArgs args,
                                     ffi::RemainingRets rets, ffi::Span<const int64_t> kinds,
                                     ffi::Span<const int64_t> element_bytes, int64_t width,
                                     ffi::Span<const int64_t> layout, TracedRowsLayout* traits,
                                     TracedRowsCall* call) {
  const size_t inputs = args.size(), outputs = rets.size(), all = inputs + outputs;
  if (inputs == 0 || inputs > kMaxRowInputs || outputs == 0 || outputs > kMaxRowOutputs) {
    return InvalidArgument(name, ": expected from 1 to ", kMaxRowInputs, " operands and to ",
                           kMaxRowOutputs, " results, got ", inputs, " and ", outputs);
  }
  if (kinds.size() != all || element_bytes.size() != all || layout.size() != 6 || width < 1) {
    return InvalidArgument(name, ": kinds and element_bytes must have ", all,
                           " entries, layout 6, and width must be positive");
  }
  for (int64_t fact : layout) {
    if (fact < 0 || fact > 512) return InvalidArgument(name, ": layout is not that of a kernel");
  }
  *traits = {static_cast<int>(layout[0]), static_cast<int>(layout[1]), static_cast<int>(layout[2]),
             static_cast<int>(layout[3]), static_cast<int>(layout[4]), static_cast<int>(layout[5])};
  if (traits->pack < 1 || traits->held < 1 || traits->threads < 32 ||
      (traits->word_bytes != 4 && traits->word_bytes != 8)) {
    return InvalidArgument(name, ": layout is not that of a kernel");
  }
  *call = {};
  call->n = width;
  call->rows = -1;
  int64_t last = kRowArray;
  for (size_t k = 0; k < all; ++k) {
    const bool is_input = k < inputs;
    const size_t i = is_input ? k : k - inputs;
    const ffi::AnyBuffer buffer =
        is_input ? *args.get<ffi::AnyBuffer>(i) : **rets.get<ffi::AnyBuffer>(i);
    const int64_t count = static_cast<int64_t>(buffer.element_count()), kind = kinds.begin()[k];
    const char* what = is_input ? "operand " : "result ";
    if (k == inputs) last = kRowArray;
    // Arrays come first, so the number of rows is known before other kinds need it.
    if (kind < last || kind > (is_input ? kRowScalar : kRowSums) ||
        (!is_input && (kind == kRowVector || kind == kRowScalar)) ||
        (k == 0 && kind != kRowArray)) {
      return InvalidArgument(name, ": ", what, i, " has a kind that it cannot have there");
    }
    last = kind;
    if (MovableBytes(buffer.element_type()) != element_bytes.begin()[k]) {
      return InvalidArgument(name, ": ", what, i, " must have elements of ",
                             element_bytes.begin()[k], " bytes");
    }
    if (k == 0) call->rows = count / width;
    int64_t expected = 1;
    if (kind == kRowArray) expected = call->rows * width;
    if (kind == kRowVector) expected = width;
    if (kind == kRowValue) expected = call->rows;
    if (kind == kRowSums) {
      const int64_t one = traits->sums * width;
      call->parts = one == 0 ? 0 : count / one;
      expected = call->parts * one;
      if (call->parts < 1 || k + 1 != all || element_bytes.begin()[k] != traits->word_bytes) {
        return InvalidArgument(name, ": ", what, i, " must be sums of at least one part");
      }
    }
    if (count != expected) {
      return InvalidArgument(name, ": ", what, i, " must have ", expected, " elements, got ",
                             count);
    }
    if (is_input) {
      call->inputs[i] = buffer.untyped_data();
      traits->arrays += kind == kRowArray;
      traits->vectors += kind == kRowVector;
    } else {
      call->outputs[i] = buffer.untyped_data();
      traits->results += kind == kRowArray;
    }
  }
  if ((call->parts > 0) != (traits->sums > 0)) {
    return InvalidArgument(name, ": sums must be a result if and only if there are any");
  }
  return ffi::Error::Success();
}

inline auto CompiledRowsInstantiateBinding() {
  return WithCompiledAttributes(ffi::Ffi::BindInstantiate().RemainingArgs().RemainingRets())
      .Attr<int64_t>("width")
      .Attr<ffi::Span<const int64_t>>("layout");
}

template <typename Backend>
auto CompiledRowsBinding() {
  return WithCompiledAttributes(
             ffi::Ffi::Bind().Ctx<typename Backend::Context>().RemainingArgs().RemainingRets())
      .template Attr<int64_t>("width")
      .template Attr<ffi::Span<const int64_t>>("layout");
}

template <typename Backend>
ffi::Error InstantiateCompiledRows(ffi::RemainingArgs args, ffi::RemainingRets rets,
                                   ffi::Span<const uint8_t> code, int64_t id, std::string_view name,
                                   ffi::Span<const int64_t> kinds,
                                   ffi::Span<const int64_t> element_bytes, int64_t,
                                   ffi::Span<const int64_t>) {
  return InstantiateCompiled<Backend>(args, rets, code, id, name, kinds, element_bytes);
}

template <typename Backend>
ffi::Error ExecuteCompiledRows(typename Backend::Stream stream, ffi::RemainingArgs args,
                               ffi::RemainingRets rets, ffi::Span<const uint8_t> code, int64_t id,
                               std::string_view name, ffi::Span<const int64_t> kinds,
                               ffi::Span<const int64_t> element_bytes, int64_t width,
                               ffi::Span<const int64_t> layout) {
  TracedRowsLayout traits;
  TracedRowsCall call;
  ffi::Error error =
      DecodeCompiledRows(name, args, rets, kinds, element_bytes, width, layout, &traits, &call);
  if (error.failure()) return error;
  if (call.rows == 0) return InvalidArgument(name, ": there must be a row");
  const typename Backend::CompiledKernel* kernel;
  if (error = GetLoaded<Backend>(code, id, name, &kernel); error.failure()) return error;
  return Backend::Status(name, LaunchCompiledRows(*kernel, traits, call, stream));
}

}  // namespace jof
