"""Other libraries, on the memory of the same JAX arrays. A module needs its library only in use."""
