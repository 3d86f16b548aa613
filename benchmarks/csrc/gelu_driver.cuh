// What the host needs of a library of kernels beside its Launch(variant, in, out, n).
#pragma once

#include <cuda_runtime.h>

extern "C" int Synchronize() { return cudaDeviceSynchronize(); }

// Launches variants 0, 1, ... once each on n elements: a program for a profiler to look at.
extern "C" int RunEach(int variants, long long n) {
  void* arrays[2];
  for (void*& array : arrays) {
    if (const cudaError_t error = cudaMalloc(&array, n * sizeof(float))) return error;
    if (const cudaError_t error = cudaMemset(array, 0, n * sizeof(float))) return error;
  }
  for (int variant = 0; variant < variants; ++variant) {
    if (const int error = Launch(variant, arrays[0], arrays[1], n)) return error;
  }
  return cudaDeviceSynchronize();
}
