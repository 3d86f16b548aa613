// The sort of positions by the rows that their ids name on a GPU, compared with std::stable_sort:
// numbers of positions around the limits of the kernels, problems of a batch, each rule of ids, and
// keys of 1 to 31 bits, between guard zones. Needs a GPU; `make gpu-check` runs it. The argument
// `brief`, for compute-sanitizer, runs a part.
#include <algorithm>
#include <numeric>
#include <random>
#include <vector>

#include "cuda/scatter.h"
#include "device.h"

using namespace jof;

template <typename Index, typename Key>
void TestKeys(int64_t batch, int64_t rows, int64_t size, bool wrap, bool clip) {
  const int64_t n = batch * rows;
  std::mt19937_64 random(static_cast<uint64_t>(n + size));
  std::uniform_int_distribution<int64_t> draw(-size - 2, 2 * size + 2);
  std::vector<Index> ids(static_cast<size_t>(n));
  for (Index& id : ids) {
    id = static_cast<Index>(random() % 4 == 0 ? size / 2 : draw(random));
    if (sizeof(Index) == 8 && random() % 16 == 0) id = static_cast<Index>(random());
  }
  const IndexRule rule{size, wrap, clip};
  std::vector<int32_t> keys(ids.size()), order(ids.size());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t id = rule.Resolve(ids[size_t(i)]);
    keys[size_t(i)] = static_cast<int32_t>(id < 0 ? batch * size : i / rows * size + id);
  }
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return keys[size_t(a)] < keys[size_t(b)]; });

  DeviceArray from(ids, sizeof(Index)), sorted(int64_t{sizeof(Key)} * n, 4), positions(4 * n, 8);
  DeviceArray scratch(4 * SortScratchWords(n), 12);
  SortCall call{};
  call.problem = {batch, rows, 1, rule, false, sizeof(Index)};
  call.ids = from.data();
  call.keys = sorted.data();
  call.order = positions.data();
  call.scratch = scratch.data();
  call.key_bytes = sizeof(Key);
  CHECK_CUDA(LaunchSortRows(call, nullptr));
  CHECK_CUDA(cudaDeviceSynchronize());
  const auto* const found = positions.CopyToHost<int32_t>();
  const auto* const found_keys = sorted.CopyToHost<Key>();
  scratch.CopyToHost<int32_t>();
  for (int64_t i = 0; i < n; ++i) {
    const int32_t position = order[size_t(i)];
    const auto key = static_cast<int32_t>(found_keys[i]);
    JOF_CHECK(found[i] == position && key == keys[size_t(position)],
              "%ld x %ld positions, %ld rows, at %ld: position %d of row %d, not %d of %d",
              long(batch), long(rows), long(size), long(i), found[i], key, position,
              keys[size_t(position)]);
  }
}

template <typename Index>
void Test(int64_t batch, int64_t rows, int64_t size, bool wrap, bool clip) {
  if (batch * size < 1 << 16) TestKeys<Index, uint16_t>(batch, rows, size, wrap, clip);
  TestKeys<Index, uint32_t>(batch, rows, size, wrap, clip);
}

int main(int argc, char**) {
  const bool is_brief = argc > 1;
  std::vector<int64_t> counts = {1, 31, 1000, 1024, 1025, 4096, 4097, 8191, 8192, 8193, 20000};
  if (!is_brief) counts.insert(counts.end(), {65537, 300001, 1000000, 5000011});
  for (const int64_t n : counts) {
    for (const int64_t size : {int64_t{1}, int64_t{2}, int64_t{300}, int64_t{65535},
                               int64_t{1} << 17, int64_t{1} << 24, (int64_t{1} << 31) - 2}) {
      for (int rules = 0; rules < (is_brief ? 1 : 4); ++rules) {
        Test<int32_t>(1, n, size, rules & 1, rules & 2);
        Test<int64_t>(1, n, size, rules & 1, rules & 2);
      }
    }
    for (const int64_t batch : {2, 7, 100}) {
      if (n > batch) Test<int32_t>(batch, n / batch, 1000, true, false);
    }
    Test<int64_t>(1, n, 0, true, false);
  }
  return 0;
}
