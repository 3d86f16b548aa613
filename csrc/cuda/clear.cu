// Clears memory with a kernel instead of cudaMemsetAsync: profilers that record only kernels, such
// as the clock of the benchmarks, would not count a memset.
#include "cuda/clear.h"

#include <algorithm>

#include "cuda/launch.cuh"

JOF_NAMESPACE_BEGIN
namespace {

// A thread writes one pack of 16 bytes, or one of the bytes before the first or after the last.
__global__ void __launch_bounds__(kBlockSize)
    ZeroKernel(char* data, int64_t head, int64_t packs, int64_t singles) {
  const int64_t item = ItemIndex<int64_t>(), single = item - packs;
  if (item < packs) {
    StorePack(data + head + item * kPackBytes, Pack<char, kPackBytes>{});
  } else if (single < singles) {
    data[single < head ? single : single + packs * kPackBytes] = 0;
  }
}

}  // namespace

cudaError_t Clear(void* data, int64_t bytes, cudaStream_t stream) {
  const auto beyond = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kPackBytes);
  const int64_t head = std::min((kPackBytes - beyond) % kPackBytes, bytes);
  const int64_t packs = (bytes - head) / kPackBytes, singles = bytes - packs * kPackBytes;
  return LaunchItems(ZeroKernel, packs + singles, stream, static_cast<char*>(data), head, packs,
                     singles);
}

JOF_NAMESPACE_END
