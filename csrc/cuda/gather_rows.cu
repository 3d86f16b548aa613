// Gathers rows of a table, in words of 16 bytes if the length of rows and the alignment of pointers
// allow, else in smaller words. Bytes: each gathered row is read once and written once.
#include <algorithm>
#include <cstring>

#include "common/fast_divide.h"
#include "cuda/launch.cuh"
#include "cuda/scatter.h"

JOF_NAMESPACE_BEGIN
namespace {

constexpr int kItemsOfMany = 4;
// Up to this number of words, a thread moves one. GatherWordsKernel needs more than a quarter of
// it.
constexpr int64_t kFewWords = 1 << 18;

// A thread moves kItems words that are kBlockSize apart. It loads all of their ids before it uses
// one, then all of their rows. With one word per thread, memory would idle while threads wait for
// ids; but if there are few words, more threads load at once. Offset is uint32_t or uint64_t, wide
// enough to index the words of the result.
template <int kBytes, int kItems, typename Index, typename Offset>
__global__ void __launch_bounds__(kBlockSize)
    GatherKernel(IndexRule rule, Offset items, bool shared_ids, FastDivider<Offset> by_inner,
                 FastDivider<Offset> by_rows, Word<kBytes> fill,
                 const Word<kBytes>* __restrict__ table, const Index* __restrict__ ids,
                 Word<kBytes>* __restrict__ result) {
  const Offset first = Offset{blockIdx.x} * (kBlockSize * kItems) + threadIdx.x;
  Index found[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const Offset row = by_inner.Divide(min(first + k * kBlockSize, items - 1));
    Offset n;
    by_rows.DivMod(row, &n);
    found[k] = ids[shared_ids ? n : row];
  }
  const Word<kBytes>* source[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    Offset d;
    const Offset b = by_rows.Divide(by_inner.DivMod(min(first + k * kBlockSize, items - 1), &d));
    const int64_t id = rule.Resolve(found[k]);
    source[k] = id < 0 ? nullptr : table + (b * rule.size + id) * by_inner.divisor() + d;
  }
  Word<kBytes> word[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    word[k] = fill;
    if (source[k] != nullptr) word[k] = __ldg(source[k]);
  }
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    const Offset i = first + k * kBlockSize;
    if (i < items) __stcs(result + i, word[k]);
  }
}

// For many rows of one short word: neighbouring ids are loaded, and words stored, in one access.
// 15M f16 take 24 us on an H200, and 38 with GatherKernel.
template <int kBytes, int kItems, typename Index>
__global__ void __launch_bounds__(kBlockSize)
    GatherWordsKernel(IndexRule rule, int64_t items, Word<kBytes> fill,
                      const Word<kBytes>* __restrict__ table, const Index* __restrict__ ids,
                      Word<kBytes>* __restrict__ result) {
  const int64_t first = ItemIndex<int64_t>() * kItems;
  if (first >= items) return;
  const bool is_whole = first + kItems <= items;
  Pack<Index, kItems> own;
  if (is_whole) {
    own = LoadPack<kItems>(ids + first);
  } else {
#pragma unroll
    for (int k = 0; k < kItems; ++k) own.elem[k] = ids[min(first + k, items - 1)];
  }
  int64_t row[kItems];
#pragma unroll
  for (int k = 0; k < kItems; ++k) row[k] = rule.Resolve(own.elem[k]);
  Pack<Word<kBytes>, kItems> words;
#pragma unroll
  for (int k = 0; k < kItems; ++k) {
    words.elem[k] = fill;
    if (row[k] >= 0) words.elem[k] = __ldg(table + row[k]);
  }
  if (is_whole) {
    StorePackStreaming<kItems>(result + first, words);
  } else {
#pragma unroll
    for (int k = 0; k < kItems; ++k) {
      if (first + k < items) result[first + k] = words.elem[k];
    }
  }
}

// For many rows of short words, such as 17 bf16, of which each would take as many instructions as a
// word of 16 bytes. A thread stores kPackBytes of the result, from a row and the one after it. Rows
// have at least kWords words.
template <int kBytes, typename Index, typename Offset>
__global__ void __launch_bounds__(kBlockSize)
    GatherPacksKernel(IndexRule rule, Offset items, bool shared_ids, FastDivider<Offset> by_inner,
                      FastDivider<Offset> by_rows, Word<kBytes> fill,
                      const Word<kBytes>* __restrict__ table, const Index* __restrict__ ids,
                      Word<kBytes>* __restrict__ result) {
  constexpr int kWords = kPackBytes / kBytes;
  const Offset first = ItemIndex<Offset>() * kWords, inner = by_inner.divisor();
  if (first >= items) return;
  const auto source = [&](Offset row) -> const Word<kBytes>* {
    Offset n;
    const Offset b = by_rows.DivMod(row, &n);
    const int64_t id = rule.Resolve(ids[shared_ids ? n : row]);
    return id < 0 ? nullptr : table + (b * rule.size + id) * inner;
  };
  Offset d;
  const Offset row = by_inner.DivMod(first, &d);
  const int own = static_cast<int>(min(Offset{kWords}, inner - d));  // words of the first row
  const Word<kBytes>* const from = source(row);
  const bool has_next = own < kWords && first + own < items;
  const Word<kBytes>* const next = has_next ? source(row + 1) : from;
  Word<kBytes> words[kWords];
#pragma unroll
  for (int k = 0; k < kWords; ++k) {
    const Word<kBytes>* const at = k < own ? from : next;
    words[k] = fill;
    if (at != nullptr) words[k] = __ldg(at + (k < own ? d + k : Offset(k - own)));
  }
  if (first + kWords <= items) {
    Word<kPackBytes> pack;
    memcpy(&pack, words, kPackBytes);
    __stcs(reinterpret_cast<Word<kPackBytes>*>(result + first), pack);
  } else {
#pragma unroll
    for (int k = 0; k < kWords; ++k) {
      if (first + k < items) __stcs(result + first + k, words[k]);
    }
  }
}

template <int kBytes, typename Index>
cudaError_t Gather(const GatherCall& call, cudaStream_t stream) {
  using Unit = Word<kBytes>;
  const ScatterProblem& p = call.problem;
  unsigned char bytes[kBytes];
  for (int i = 0; i < kBytes; ++i) {
    bytes[i] = static_cast<const unsigned char*>(call.fill)[i % call.element_bytes];
  }
  Unit filler;
  std::memcpy(&filler, bytes, kBytes);
  const int64_t inner = p.inner * call.element_bytes / kBytes, items = p.batch * p.rows * inner;
  const auto launch = [&](auto kernel, auto offset, int items_of_thread) {
    using Offset = decltype(offset);
    return LaunchItems(kernel, (items + items_of_thread - 1) / items_of_thread, stream, p.rule,
                       static_cast<Offset>(items), p.shared_ids,
                       FastDivider<Offset>(static_cast<Offset>(inner)),
                       FastDivider<Offset>(static_cast<Offset>(p.rows)), filler,
                       static_cast<const Unit*>(call.table), static_cast<const Index*>(call.ids),
                       static_cast<Unit*>(call.result));
  };
  if constexpr (kBytes <= 8) {
    constexpr int kItems = std::min(8, kPackBytes / kBytes);
    const auto* const ids = static_cast<const Index*>(call.ids);
    auto* const result = static_cast<Unit*>(call.result);
    if (inner == 1 && p.batch == 1 && items > kFewWords / 4 && IsAligned(result, kItems * kBytes) &&
        IsAligned(ids, std::min<int64_t>(kItems * sizeof(Index), kPackBytes))) {
      return LaunchItems(GatherWordsKernel<kBytes, kItems, Index>, (items + kItems - 1) / kItems,
                         stream, p.rule, items, filler, static_cast<const Unit*>(call.table), ids,
                         result);
    }
  }
  if (items <= kFewWords) return launch(GatherKernel<kBytes, 1, Index, uint32_t>, uint32_t{}, 1);
  const auto launch_many = [&](auto offset) {
    using Offset = decltype(offset);
    if constexpr (kBytes <= 4) {
      constexpr int kWords = kPackBytes / kBytes;
      if (inner >= kWords && IsAligned(call.result, kPackBytes)) {
        return launch(GatherPacksKernel<kBytes, Index, Offset>, offset, kWords);
      }
    }
    return launch(GatherKernel<kBytes, kItemsOfMany, Index, Offset>, offset, kItemsOfMany);
  };
  const bool is_small = items + kBlockSize * kItemsOfMany < FastDivider<uint32_t>::kLimit;
  return is_small ? launch_many(uint32_t{}) : launch_many(uint64_t{});
}

}  // namespace

cudaError_t LaunchGatherRows(const GatherCall& call, cudaStream_t stream) {
  int word = kPackBytes;
  while (call.problem.inner * call.element_bytes % word != 0 || !IsAligned(call.table, word) ||
         !IsAligned(call.result, word)) {
    word /= 2;
  }
  const auto launch = [&](auto bytes) {
    constexpr int kBytes = decltype(bytes)::value;
    return call.problem.index_bytes == 4 ? Gather<kBytes, int32_t>(call, stream)
                                         : Gather<kBytes, int64_t>(call, stream);
  };
  switch (word) {
    case 1:
      return launch(std::integral_constant<int, 1>());
    case 2:
      return launch(std::integral_constant<int, 2>());
    case 4:
      return launch(std::integral_constant<int, 4>());
    case 8:
      return launch(std::integral_constant<int, 8>());
    default:
      return launch(std::integral_constant<int, 16>());
  }
}

JOF_NAMESPACE_END
