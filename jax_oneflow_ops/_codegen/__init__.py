"""Kernels that are compiled at run time, from what is written to what XLA calls.

signature    parameters, their names and dtypes
text         a body that is text, and C++ as it is written
definition   signature, body and the derivatives that were given
source       the C++ source of a value or of a derivative
compilers    NVRTC and the system's C++ compiler
messages     their errors at the user's lines
cache        compiled code, in memory and on disk
primitive    the primitive, its rules and its FFI call
"""
