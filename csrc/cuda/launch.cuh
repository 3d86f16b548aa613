// How every kernel is launched: one thread per item, 256 threads per block unless a kernel has a
// reason for another number, and no grid-stride loop. On an H200, 2x upsampling of an f32 image
// runs at 4.06 TB/s with one 16-byte pack per thread, and at 4.00 and 3.94 with two and four: the
// hardware's block scheduler is better than a loop.
#pragma once

#ifndef __CUDACC_RTC__
#include <cuda_runtime.h>
#endif

#include "common/integers.h"
#include "common/macros.h"
#include "common/pack.h"

JOF_NAMESPACE_BEGIN

inline constexpr int kBlockSize = 256;

// The index of this thread's item; items at or beyond the count have nothing to do.
template <typename Index, int kThreads = kBlockSize>
__device__ __forceinline__ Index ItemIndex() {
  return static_cast<Index>(blockIdx.x) * kThreads + threadIdx.x;
}

#ifndef __CUDACC_RTC__
template <int kThreads = kBlockSize, typename... Params, typename... Args>
cudaError_t LaunchBlocks(void (*kernel)(Params...), int64_t blocks, int64_t shared_bytes,
                         cudaStream_t stream, Args... args) {
  if (blocks == 0) return cudaSuccess;
  kernel<<<static_cast<unsigned>(blocks), kThreads, static_cast<size_t>(shared_bytes), stream>>>(
      args...);
  return cudaGetLastError();
}

template <int kThreads = kBlockSize, typename... Params, typename... Args>
cudaError_t LaunchItems(void (*kernel)(Params...), int64_t items, cudaStream_t stream,
                        Args... args) {
  return LaunchBlocks<kThreads>(kernel, (items + kThreads - 1) / kThreads, 0, stream, args...);
}

// What launchers ask of the current device. A block may have this much shared memory; 99 KB on
// devices for desktops.
struct DeviceLimits {
  int multiprocessors, shared_bytes;
};

inline cudaError_t GetDeviceLimits(DeviceLimits* limits) {
  int device = 0;
  cudaError_t status = cudaGetDevice(&device);
  const auto get = [&](int* value, cudaDeviceAttr attribute) {
    if (status == cudaSuccess) status = cudaDeviceGetAttribute(value, attribute, device);
  };
  get(&limits->multiprocessors, cudaDevAttrMultiProcessorCount);
  get(&limits->shared_bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  return status;
}

inline bool IsAligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}
#endif

namespace internal {
template <int kBytes>
struct Word;
template <>
struct Word<1> {
  using type = uint8_t;
};
template <>
struct Word<2> {
  using type = uint16_t;
};
template <>
struct Word<4> {
  using type = uint32_t;
};
template <>
struct Word<8> {
  using type = uint2;
};
template <>
struct Word<16> {
  using type = uint4;
};
}  // namespace internal

// The unsigned word of kBytes bytes, as which data of any type is moved.
template <int kBytes>
using Word = typename internal::Word<kBytes>::type;

// Loads sizeof(T) * N bytes in one access, to which the pointer must be aligned. Loads of more than
// 16 bytes are several accesses of 16.
template <int N, typename T>
__device__ __forceinline__ Pack<T, N> LoadPack(const T* pointer) {
  if constexpr (sizeof(T) * N > kPackBytes) {
    constexpr int kPart = kPackSize<T>;
    Pack<T, N> pack;
    JOF_UNROLL
    for (int k = 0; k < N; k += kPart) {
      const Pack<T, kPart> part = LoadPack<kPart>(pointer + k);
      JOF_UNROLL
      for (int j = 0; j < kPart; ++j) pack.elem[k + j] = part.elem[j];
    }
    return pack;
  } else {
    union {
      Word<sizeof(T) * N> word;
      Pack<T, N> pack;
    };
    word = __ldg(reinterpret_cast<const Word<sizeof(T) * N>*>(pointer));
    return pack;
  }
}

template <int N, typename T>
__device__ __forceinline__ Word<sizeof(T) * N> AsWord(const Pack<T, N>& value) {
  union {
    Word<sizeof(T) * N> word;
    Pack<T, N> pack;
  };
  pack = value;
  return word;
}

// Stores of 8 and 16 bytes are in assembly: nvcc may split a plain store of a value that it holds
// in two parts.
template <int N, typename T>
__device__ __forceinline__ void StorePack(T* pointer, const Pack<T, N>& value) {
  const Word<sizeof(T) * N> word = AsWord(value);
  if constexpr (sizeof(T) * N == 16) {
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(pointer), "r"(word.x),
                 "r"(word.y), "r"(word.z), "r"(word.w)
                 : "memory");
  } else if constexpr (sizeof(T) * N == 8) {
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(pointer), "r"(word.x), "r"(word.y)
                 : "memory");
  } else {
    *reinterpret_cast<Word<sizeof(T) * N>*>(pointer) = word;
  }
}

// A store that marks its line as the first to evict from the L2 cache, for output that is not read
// soon. It gains 0.5 to 0.8 % if a kernel writes more than it reads.
template <int N, typename T>
__device__ __forceinline__ void StorePackStreaming(T* pointer, const Pack<T, N>& value) {
  __stcs(reinterpret_cast<Word<sizeof(T) * N>*>(pointer), AsWord(value));
}

// Prefetches into the L2 cache the input of the block that is kPrefetchDistance ahead. Blocks must
// read consecutive runs of a 16-byte aligned array, block_bytes_256 / 256 bytes each.
//
// Early reads in runs of kilobytes avoid switches of the memory between reading and writing. On an
// H200 a kernel that writes four bytes for each byte that it reads gains 1.5 to 3 % (the same for
// distances of 256 to 2048 blocks, less for longer runs), and a copy gains 0.8 %. A kernel that
// mostly reads loses 6 %. A kernel of few blocks prefetches nothing.
inline constexpr unsigned kPrefetchDistance = 512;

__device__ __forceinline__ void PrefetchAhead(const void* array, size_t array_bytes,
                                              size_t block_bytes_256) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x != 0) return;
  const size_t block = size_t{blockIdx.x} + kPrefetchDistance;
  // The instruction takes whole 16-byte units.
  const size_t begin = block * block_bytes_256 / 256 & ~size_t{15};
  const size_t end = (block + 1) * block_bytes_256 / 256 & ~size_t{15};
  if (begin == end || end > array_bytes || reinterpret_cast<uintptr_t>(array) % 16 != 0) return;
  asm volatile(
      "cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(static_cast<const char*>(array) + begin),
      "r"(static_cast<unsigned>(end - begin))
      : "memory");
#endif
}

JOF_NAMESPACE_END
