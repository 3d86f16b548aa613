// The CUDA kernels of permute on random problems, with every strategy that supports them, on
// pointers at every offset within 16 bytes, between guard zones that must stay untouched. Needs a
// GPU; `make gpu-check` runs it.
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "cuda/permute.h"
#include "device.h"

using namespace jof;

constexpr int64_t kMostBytes = int64_t{1} << 26, kMostRandomBytes = int64_t{1} << 22;
constexpr int kMostRank = 12;
constexpr int kStrategies = 8;

struct Problem {
  std::vector<int64_t> shape, axes;
  int bytes;                      // of an element
  int64_t in_offset, out_offset;  // of the pointers, in bytes after a 16-byte boundary
};

__global__ void Fill(uint8_t* x, int64_t n, uint32_t seed) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= n) return;
  uint32_t hash = (static_cast<uint32_t>(i) + seed) * 2654435761u;
  hash = (hash ^ hash >> 15) * 2246822519u;
  x[i] = static_cast<uint8_t>(hash >> 24);
}

// The output's axes with the input's strides.
struct Reference {
  int rank;
  int64_t sizes[kMostRank], strides[kMostRank];
};

// Counts the wrong bytes of y, including the guard zones.
__global__ void Compare(Reference reference, int bytes, const uint8_t* x, const uint8_t* y,
                        int64_t size, unsigned long long* wrong) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x - kGuardBytes;
  if (i >= size + kGuardBytes) return;
  uint8_t want = kGuard;
  if (i >= 0 && i < size) {
    int64_t rest = i / bytes, source = 0;
    for (int d = reference.rank - 1; d >= 0; --d) {
      source += rest % reference.sizes[d] * reference.strides[d];
      rest /= reference.sizes[d];
    }
    want = x[source * bytes + i % bytes];
  }
  if (y[i] != want) atomicAdd(wrong, 1ull);
}

class Tester {
 public:
  Tester() {
    CHECK_CUDA(cudaMalloc(&x_, kMostBytes + 2 * kGuardBytes + 16));
    CHECK_CUDA(cudaMalloc(&y_, kMostBytes + 2 * kGuardBytes + 16));
    CHECK_CUDA(cudaMalloc(&wrong_, sizeof(*wrong_)));
  }
  ~Tester() {
    cudaFree(x_);
    cudaFree(y_);
    cudaFree(wrong_);
  }

  // Counts the launches of each strategy.
  void Run(const Problem& p, int64_t (&launches)[kStrategies]) {
    int64_t size = p.bytes;
    for (const int64_t n : p.shape) size *= n;
    JOF_CHECK(size <= kMostBytes, "%ld bytes", long(size));
    uint8_t* x = x_ + kGuardBytes + p.in_offset;
    uint8_t* y = y_ + kGuardBytes + p.out_offset;
    const int64_t offsets = p.in_offset | p.out_offset | 16;
    const int rank = static_cast<int>(p.shape.size());
    const int64_t alignment = offsets & -offsets;
    PermutePlan plan;
    JOF_CHECK(PlanPermute(p.shape.data(), p.axes.data(), rank, p.bytes, alignment, &plan),
              "rank %d", rank);
    Reference reference{rank, {}, {}};
    for (int i = 0; i < rank; ++i) {
      reference.sizes[i] = p.shape[p.axes[i]];
      reference.strides[i] = 1;
      for (int64_t j = p.axes[i] + 1; j < rank; ++j) reference.strides[i] *= p.shape[j];
    }
    const auto blocks = [](int64_t n) { return static_cast<unsigned>((n + 255) / 256); };
    Fill<<<blocks(size), 256>>>(x, size, ++seed_);
    for (int i = 0; i < kStrategies; ++i) {
      const auto strategy = static_cast<PermuteStrategy>(i);
      if (!internal::Applies(strategy, plan, alignment)) {
        JOF_CHECK(plan.strategy != strategy, "%d does not apply", i);
        continue;
      }
      PermutePlan other = plan;
      internal::SetStrategy(&other, strategy, alignment);
      CHECK_CUDA(cudaMemset(y - kGuardBytes, kGuard, size + 2 * kGuardBytes));
      CHECK_CUDA(cudaMemset(wrong_, 0, sizeof(*wrong_)));
      CHECK_CUDA(LaunchPermute(other, x, y, 0));
      Compare<<<blocks(size + 2 * kGuardBytes), 256>>>(reference, p.bytes, x, y, size, wrong_);
      unsigned long long wrong = 0;
      CHECK_CUDA(cudaMemcpy(&wrong, wrong_, sizeof(wrong), cudaMemcpyDeviceToHost));
      if (wrong != 0) {
        std::fprintf(stderr, "shape, axes:");
        for (const int64_t n : p.shape) std::fprintf(stderr, " %ld", long(n));
        std::fprintf(stderr, ",");
        for (const int64_t a : p.axes) std::fprintf(stderr, " %ld", long(a));
        std::fprintf(stderr, "\n");
      }
      JOF_CHECK(wrong == 0, "%llu bytes of %ld are wrong: %d-byte elements, offsets %ld %ld, %d",
                wrong, long(size), p.bytes, long(p.in_offset), long(p.out_offset), i);
      ++launches[i];
    }
  }

 private:
  uint8_t *x_, *y_;
  unsigned long long* wrong_;
  uint32_t seed_ = 0;
};

int main(int argc, char**) {
  const bool brief = argc > 1;  // under compute-sanitizer
  Tester tester;
  std::mt19937 random(1);
  int64_t launches[kStrategies] = {};
  const auto run = [&](const Problem& p) { tester.Run(p, launches); };

  // Problems for every kernel, at every pair of equal or opposite offsets.
  const std::vector<std::pair<std::vector<int64_t>, std::vector<int64_t>>> known = {
      {{7, 5, 64}, {1, 0, 2}},
      {{7, 5, 129}, {1, 0, 2}},
      {{96, 160}, {1, 0}},
      {{3, 130, 67}, {0, 2, 1}},
      {{2, 65, 3, 127}, {2, 0, 3, 1}},
      {{150, 301}, {1, 0}},
      {{2, 3, 16, 16}, {0, 2, 3, 1}},
      {{2, 3, 15, 17}, {0, 2, 3, 1}},
      {{2, 16, 16, 3}, {0, 3, 1, 2}},
      {{2, 15, 17, 3}, {0, 3, 1, 2}},
      {{2, 4, 129}, {0, 2, 1}},
      {{40, 3, 67}, {0, 2, 1}},
      {{40, 67, 4}, {0, 2, 1}},
      {{2, 32, 2, 5, 14}, {3, 1, 4, 2, 0}},
      {{23, 129}, {1, 0}},
      {{33, 70}, {1, 0}},
      {{81, 70}, {1, 0}},
      {{101, 130}, {1, 0}},
      {{130, 2}, {1, 0}},
      {{21, 33, 3}, {1, 0, 2}},
      {{21, 33, 3}, {2, 1, 0}},
      {{1, 37, 1}, {2, 1, 0}},
      {{2, 3, 4, 5, 6}, {4, 3, 2, 1, 0}},
      // An output run of several rows: of one dimension and of two; cut on either side.
      {{3, 5, 256, 2, 8}, {0, 3, 1, 4, 2}},
      {{5, 3, 7, 32, 4, 4}, {4, 2, 0, 5, 3, 1}},
      {{70, 9, 3, 64}, {3, 1, 0, 2}},
      // Tiles over runs of several dimensions.
      {{29, 13, 3, 64, 3}, {4, 3, 0, 1, 2}},
      {{19, 13, 8, 2, 7, 64}, {3, 5, 0, 1, 4, 2}},
      {{5, 29, 8, 4, 14, 13}, {0, 5, 4, 3, 2, 1}},
      {{60, 4, 33, 32}, {2, 3, 1, 0}},
      // Rows and columns of a tile that would map to one shared-memory bank.
      {{2, 10, 64, 64}, {2, 0, 3, 1}},
      {{16, 20, 8, 16}, {2, 1, 3, 0}},
      {{7, 16, 3, 4, 5, 32}, {2, 4, 0, 3, 5, 1}},
      {{2, 3, 2, 2, 3, 2, 2, 5, 2, 2}, {9, 0, 8, 1, 7, 2, 6, 3, 5, 4}}};
  for (const auto& [shape, axes] : known) {
    for (const int bytes : {1, 2, 4, 8, 16}) {
      for (int64_t offset = 0; offset < 16; offset += brief ? 16 : bytes) {
        run({shape, axes, bytes, offset, offset});
        run({shape, axes, bytes, offset, 16 - bytes - offset});
      }
    }
  }

  // Large arrays of unaligned rows, which have tiles of their own.
  for (const int64_t offset : {0, 4, 8}) {
    if (brief && offset > 0) break;
    run({{4103, 4111}, {1, 0}, 2, offset, 12 - offset});
    run({{4103, 4112}, {1, 0}, 2, 0, offset});
    run({{5, 821, 4112}, {2, 1, 0}, 2, offset, offset});
    run({{4112, 3, 1371}, {2, 1, 0}, 2, 0, offset});
    run({{1503, 1505}, {1, 0}, 4, offset, 12 - offset});
    run({{1443, 3, 1509}, {2, 1, 0}, 4, offset, 0});
    run({{5, 301, 1504}, {2, 1, 0}, 4, 0, offset});
    run({{1503, 300, 5}, {2, 1, 0}, 4, offset, offset});
  }

  // Small tiles: nearly as many blocks along z as a grid may have.
  run({{8, 255, 257, 8}, {3, 2, 1, 0}, 1, 0, 0});

  // Random problems, with sizes around those of packs and tiles.
  constexpr int64_t kSizes[] = {1,  1,  2,  3,  4,  5,  7,   8,   12,  15,  16,  17,  31, 32,
                                33, 48, 63, 64, 65, 96, 127, 128, 129, 256, 257, 500, 512};
  for (int trial = 0; trial < (brief ? 100 : 6000); ++trial) {
    Problem p;
    const size_t rank = 1 + random() % kMostRank;
    p.bytes = 1 << random() % 5;
    int64_t left = (brief ? kMostRandomBytes / 32 : kMostRandomBytes) / p.bytes;
    for (size_t i = 0; i < rank; ++i) {
      int64_t size = kSizes[random() % (sizeof(kSizes) / sizeof(*kSizes))];
      if (size > left) size = 1;
      left /= size;
      p.shape.push_back(size);
      p.axes.push_back(static_cast<int64_t>(i));
    }
    std::shuffle(p.shape.begin(), p.shape.end(), random);
    std::shuffle(p.axes.begin(), p.axes.end(), random);
    p.in_offset = random() % 2 == 0 ? 0 : static_cast<int64_t>(random() % 16) / p.bytes * p.bytes;
    p.out_offset = random() % 2 == 0 ? 0 : static_cast<int64_t>(random() % 16) / p.bytes * p.bytes;
    run(p);
  }
  int64_t total = 0;
  for (const int64_t n : launches) {
    JOF_CHECK(n > 0, "a strategy was never run");
    total += n;
  }
  std::printf("%ld launches right\n", long(total));
}
