"""Kernels that are compiled at run time, from what is written to what XLA calls.

signature    parameters, their names and dtypes
text         a body that is text, and C++ as it is written
traced       a body that is a jaxpr of scalars, and its C++
scalars      from a jaxpr of arrays to one of scalars
parts        what of a jaxpr of arrays is elementwise
derive       derivatives of traced bodies
definition   signature, body and the derivatives that were given
source       the C++ source of a value or of a derivative
compilers    NVRTC and the system's C++ compiler
messages     their errors at the user's lines
cache        compiled code, in memory and on disk
primitive    the primitive, its rules and its FFI call
"""
