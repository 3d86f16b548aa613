"""Kernels that are compiled at run time, from the user's function or C++ to the FFI call.

signature      parameters, their names and dtypes
text           bodies that are C++ text
traced         bodies that are jaxprs of scalars, and their C++
scalars        turns a jaxpr of arrays into a function of scalars
parts          divides a jaxpr of arrays into elementwise parts and the rest
definition     signature, body and the derivatives that were given
derive         derivatives of traced bodies
source         the C++ source of a value or of a derivative
row_source     the C++ source of row kernels
edges          the C++ source of message kernels
compilers      NVRTC and the system's C++ compiler
messages       compiler errors at the user's lines
cache          compiled code, in memory and on disk
primitive      the elementwise primitive, its rules and its FFI call
row_primitive  the primitive of row kernels
"""
