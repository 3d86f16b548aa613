// sources: csrc/cpu/*.cc
// Runs the CPU kernels tile by tile in random order, on pointers of every alignment. No tile may
// write another tile's elements or read beyond the operand.
#include <algorithm>
#include <cstring>
#include <memory>

#include "cpu/kernels.h"
#include "cpu/permute_launch.h"
#include "guarded.h"
#include "permute_problem.h"

using namespace jof;

void TestPermute(const PermuteProblem& p, std::mt19937* random) {
  const int64_t size = Product(p.shape), bytes = size * p.element_bytes;
  if (size == 0) return;
  const CpuPermute tiles = PermuteTilesOf(Plan(p), 1 + (*random)() % 8);

  // The operand ends where its memory does, so that the address sanitizer sees reads beyond it.
  const int64_t offset = p.alignment % 16;
  const auto memory = std::make_unique<uint8_t[]>(static_cast<size_t>(offset + bytes));
  uint8_t* in = memory.get() + offset;
  for (int64_t i = 0; i < bytes; ++i) in[i] = static_cast<uint8_t>(i * 37 + i / 251);
  Guarded y(bytes, offset);
  const auto* out = static_cast<const uint8_t*>(y.data());

  std::vector<int64_t> order(static_cast<size_t>(tiles.tiles));
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), *random);
  // Most tiles run in separate calls, the last three in one call.
  const int64_t together = std::min<int64_t>(tiles.tiles, 3);
  for (const int64_t tile : order) {
    if (tile < tiles.tiles - together) {
      BestCpuKernels().PermuteTiles(tiles, in, y.data(), tile, tile + 1);
    } else if (tile == tiles.tiles - 1) {
      BestCpuKernels().PermuteTiles(tiles, in, y.data(), tiles.tiles - together, tiles.tiles);
    }
  }
  const auto element = static_cast<size_t>(p.element_bytes);
  ForEachElement(p, [&](int64_t i, int64_t o) {
    JOF_CHECK(std::memcmp(in + i * p.element_bytes, out + o * p.element_bytes, element) == 0,
              "output %ld of %d-byte elements, rank %ld", long(o), p.element_bytes, long(Rank(p)));
  });
  y.CheckGuards();
}

int main() {
  std::mt19937 random(1);
  const auto test = [&](std::vector<int64_t> shape, std::vector<int64_t> axes) {
    for (const int element_bytes : {1, 2, 4, 8, 16}) {
      TestPermute({shape, axes, element_bytes, element_bytes}, &random);
    }
  };
  // Numbers of rows and columns around those of a block, and numbers of channels.
  for (int64_t rows = 1; rows <= 70; rows += rows < 36 ? 1 : 7) {
    for (const int64_t cols : {1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65}) {
      test({rows, cols}, {1, 0});
      if (rows < 9 || cols < 9) test({3, rows, cols}, {0, 2, 1});
      if (rows < 9 || cols < 9) test({rows, 2, cols}, {2, 1, 0});
    }
  }
  // More than one tile.
  test({300, 290}, {1, 0});
  test({3, 130, 190}, {2, 0, 1});
  test({9, 11, 70, 13}, {2, 0, 3, 1});
  test({20, 30, 100}, {1, 0, 2});
  // Strides that cause cache conflicts: in the input, in the output, in both.
  test({40, 2048}, {1, 0});
  test({2048, 40}, {1, 0});
  test({3, 128, 8, 16, 2}, {3, 0, 4, 2, 1});
  test({64, 2, 2048}, {2, 1, 0});
  test({17, 128, 48}, {2, 1, 0});
  // Long rows, some of many bytes; a copy; many dimensions.
  test({3, 5, 700}, {1, 0, 2});
  test({2, 3, 20000}, {1, 0, 2});
  test({100000}, {0});
  test(std::vector<int64_t>(12, 2), {11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0});
  test({3, 3, 3, 3, 3, 3, 3}, {1, 0, 3, 2, 5, 4, 6});

  for (int i = 0; i < 400; ++i) TestPermute(RandomPermuteProblem(&random, 20000), &random);
}
