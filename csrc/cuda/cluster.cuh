// Clusters of blocks: their barriers, and stores to the shared memory of another block.
// Architectures before sm_90 have no clusters; nothing here is called there.
#pragma once

#include "common/types.h"
#include "cuda/async_copy.cuh"

JOF_NAMESPACE_BEGIN
namespace internal {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasClusters = true;
#else
inline constexpr bool kHasClusters = false;
#endif

__device__ __forceinline__ unsigned ClusterRank() {
  unsigned rank = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
#endif
  return rank;
}

__device__ __forceinline__ unsigned ClusterSize() {
  unsigned size = 1;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));
#endif
  return size;
}

// The number of this cluster in a one-dimensional grid.
__device__ __forceinline__ unsigned ClusterId() {
  unsigned id = 0;
#if __CUDA_ARCH__ >= 900
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(id));
#endif
  return id;
}

// After WaitForCluster, all threads of the cluster have arrived, so all of its blocks exist. Each
// thread calls ArriveAtCluster once, and then WaitForCluster once. Arriving releases nothing: the
// barriers in shared memory have their own fence.
__device__ __forceinline__ void ArriveAtCluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();  // for .aligned
  asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
#endif
}
__device__ __forceinline__ void WaitForCluster() {
#if __CUDA_ARCH__ >= 900
  __syncwarp();
  asm volatile("barrier.cluster.wait.aligned;" ::: "memory");
#endif
}

// Barriers in shared memory. Each completes when the expected number of bytes has been stored by
// StoreAsync. Unlike a cluster barrier, it does not wait for the threads' outstanding accesses to
// global memory.
//
// One thread makes both. If two threads made one each, nvcc would predicate that, and
// compute-sanitizer would report races on an address that the other threads do not use.
__device__ __forceinline__ void InitBarriers(uint64_t (&barriers)[2]) {
#if __CUDA_ARCH__ >= 900
  if (threadIdx.x != 0) return;
  JOF_UNROLL
  for (uint64_t& barrier : barriers) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(SharedAddress(&barrier))
                 : "memory");
  }
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

__device__ __forceinline__ void ExpectBytes(uint64_t* barrier, int bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(SharedAddress(barrier)),
      "r"(bytes)
      : "memory");
#endif
}

__device__ __forceinline__ void WaitForBytes(uint64_t* barrier, bool phase) {
#if __CUDA_ARCH__ >= 900
  asm volatile(
      "{\n.reg .pred done;\n"
      "again: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(SharedAddress(barrier)),
      "r"(static_cast<unsigned>(phase))
      : "memory");
#endif
}

// Stores to the same shared variables of block `rank` of the cluster, and counts at its barrier. If
// kIsAligned, they are aligned to 16 bytes, and four values of 4 bytes are one store.
template <bool kIsAligned, typename C, int kCount>
__device__ __forceinline__ void StoreAsync(C* shared, uint64_t* barrier, unsigned rank,
                                           const C (&values)[kCount]) {
#if __CUDA_ARCH__ >= 900
  uint32_t address, counter;
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(address)
      : "r"(SharedAddress(shared)), "r"(rank));
  asm("mapa.shared::cluster.u32 %0, %1, %2;"
      : "=r"(counter)
      : "r"(SharedAddress(barrier)), "r"(rank));
  if constexpr (kIsAligned && sizeof(C) == 4 && kCount == 4) {
    asm volatile(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%0], {%1, %2, %3, %4}, "
        "[%5];" ::"r"(address),
        "r"(FloatToBits(values[0])), "r"(FloatToBits(values[1])), "r"(FloatToBits(values[2])),
        "r"(FloatToBits(values[3])), "r"(counter)
        : "memory");
  } else {
    JOF_UNROLL
    for (int i = 0; i < kCount; ++i) {
      const uint32_t at = address + i * static_cast<int>(sizeof(C));
      if constexpr (sizeof(C) == 8) {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [%0], %1, [%2];" ::"r"(at),
            "l"(FloatToBits(values[i])), "r"(counter)
            : "memory");
      } else {
        asm volatile(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];" ::"r"(at),
            "r"(FloatToBits(values[i])), "r"(counter)
            : "memory");
      }
    }
  }
#endif
}

}  // namespace internal
JOF_NAMESPACE_END
