// sanitizers: plain
// Tests which elements of an elementwise call are packed on a GPU, and how broadcast operands are
// read: arrays at every byte offset within a pack, all element sizes, lengths around packs; and
// random calls with many operands.
#include "cuda/pack_split.h"

#include <random>
#include <vector>

#include "check.h"

using namespace jof;

struct Input {
  OperandKind kind;  // broadcast operands use the problem's inner and count
  int64_t bytes;     // of an element
  int64_t offset;    // bytes after a 16-byte boundary; no memory is read
};

struct Problem {
  std::vector<Input> inputs, outputs;
  int64_t n, inner, count;
};

// Whether `size` elements from `element` on can move as aligned words.
bool IsWord(const Input& array, int64_t element, int64_t size) {
  return (array.offset + element * array.bytes) % std::min<int64_t>(16, size * array.bytes) == 0;
}

ElementwiseCall Split(const Problem& p) {
  ElementwiseCall call{};
  call.n = p.n;
  call.broadcasts[0] = {FastDivider<uint64_t>(static_cast<uint64_t>(p.inner)),
                        FastDivider<uint64_t>(static_cast<uint64_t>(p.count))};
  std::vector<int64_t> element_bytes;
  const auto at = [](int64_t offset) { return reinterpret_cast<void*>(4096 + offset); };
  for (size_t k = 0; k < p.inputs.size(); ++k) {
    call.inputs[k] = at(p.inputs[k].offset);
    call.kinds[k] = static_cast<uint8_t>(p.inputs[k].kind);
    element_bytes.push_back(p.inputs[k].bytes);
  }
  for (size_t k = 0; k < p.outputs.size(); ++k) {
    call.outputs[k] = at(p.outputs[k].offset);
    element_bytes.push_back(p.outputs[k].bytes);
  }
  SplitIntoPacks(p.inputs.size(), p.outputs.size(), element_bytes.data(), &call);
  return call;
}

#define CHECK_SPLIT(condition)                                                                 \
  JOF_CHECK(condition,                                                                         \
            "n %ld, index %ld %ld, pack %ld, input of %ld bytes at %ld, output of %ld at %ld", \
            long(p.n), long(p.inner), long(p.count), long(size), long(p.inputs[0].bytes),      \
            long(p.inputs[0].offset), long(p.outputs[0].bytes), long(p.outputs[0].offset))

void Check(const Problem& p) {
  const ElementwiseCall call = Split(p);
  const PackSplit& split = call.split;
  int64_t size = 16;
  for (const Input& out : p.outputs) size = std::min(size, 16 / out.bytes);
  CHECK_SPLIT(split.head >= 0 && split.head <= p.n && split.packs >= 0 && split.singles >= 0);

  // Packs and single elements, numbered as in ComputeItem, cover every element once.
  std::vector<int> computed(static_cast<size_t>(p.n));
  const auto compute = [&](int64_t first, int64_t count) {
    CHECK_SPLIT(first >= 0 && first + count <= p.n);
    for (int64_t i = first; i < first + count; ++i) ++computed[static_cast<size_t>(i)];
  };
  for (int64_t pack = 0; pack < split.packs; ++pack) compute(split.head + pack * size, size);
  for (int64_t single = 0; single < split.singles; ++single) {
    compute(single < split.head ? single : single + split.packs * size, 1);
  }
  for (const int count : computed) CHECK_SPLIT(count == 1);

  // Every pack is aligned in all arrays, and the number of packs is maximal.
  const auto is_pack = [&](int64_t first) {
    bool words = size > 1 && first + size <= p.n;
    for (const Input& in : p.inputs) {
      words = words && (in.kind != kArray || IsWord(in, first, size));
    }
    for (const Input& out : p.outputs) words = words && IsWord(out, first, size);
    return words;
  };
  for (int64_t pack = 0; pack < split.packs; ++pack) {
    CHECK_SPLIT(is_pack(split.head + pack * size));
  }
  for (int64_t i = 0; i < split.head; ++i) CHECK_SPLIT(!is_pack(i));
  CHECK_SPLIT(split.packs == 0 || p.n - split.head - split.packs * size < size);

  // A broadcast operand is read as splats or packs only if that is right for all packs, and must be
  // if there are several packs and no single elements.
  for (size_t k = 0; k < p.inputs.size(); ++k) {
    if (p.inputs[k].kind != kBroadcast || split.packs == 0) continue;
    bool splats = true, words = true;
    for (int64_t pack = 0; pack < split.packs; ++pack) {
      const int64_t first = split.head + pack * size;
      const int64_t column = first / p.inner % p.count;
      words = words && column + size <= p.count && IsWord(p.inputs[k], column, size);
      for (int64_t j = 0; j < size; ++j) {
        splats = splats && (first + j) / p.inner % p.count == column;
        words = words && (first + j) / p.inner % p.count == column + j;
      }
    }
    const Access access = call.access[k];
    CHECK_SPLIT(splats || access != Access::kBroadcastSplat);
    CHECK_SPLIT(words || access != Access::kBroadcastPack);
    const bool all = split.singles == 0 && split.packs > 1;
    CHECK_SPLIT(!all || !splats || p.inner == 1 || p.count == 1 ||
                access == Access::kBroadcastSplat);
    CHECK_SPLIT(!all || !words || p.count == 1 || access == Access::kBroadcastPack);
  }
}

void TestExamples() {
  const auto expect = [](const Problem& p, int64_t head, int64_t packs, Access access) {
    const ElementwiseCall call = Split(p);
    JOF_CHECK(call.split.head == head && call.split.packs == packs &&
                  call.split.singles == p.n - packs * 4 && call.access[1] == access,
              "got %ld %ld %ld %d", long(call.split.head), long(call.split.packs),
              long(call.split.singles), int(call.access[1]));
  };
  const Input row{kBroadcast, 2, 8}, scalar{kScalar, 8, 1};
  const auto pack = Access::kBroadcastPack, splat = Access::kBroadcastSplat,
             elements = Access::kBroadcastElements;
  expect({{{kArray, 4, 0}, row, scalar}, {{kArray, 4, 0}}, 24, 1, 12}, 0, 6, pack);
  expect({{{kArray, 4, 0}, row, scalar}, {{kArray, 4, 0}}, 24, 1, 6}, 0, 6, elements);
  expect({{{kArray, 4, 0}, row, scalar}, {{kArray, 4, 0}}, 24, 12, 2}, 0, 6, splat);
  expect({{{kArray, 4, 0}, row, scalar}, {{kArray, 4, 0}}, 24, 6, 4}, 0, 6, elements);
  expect({{{kArray, 4, 4}, row, scalar}, {{kArray, 4, 4}}, 24, 1, 12}, 3, 5, elements);
  expect({{{kArray, 4, 4}, row, scalar}, {{kArray, 4, 4}}, 24, 12, 2}, 3, 5, elements);
  expect({{{kArray, 2, 6}, row, scalar}, {{kArray, 4, 12}}, 6, 1, 6}, 1, 1, elements);
  expect({{{kArray, 4, 4}, row, scalar}, {{kArray, 4, 8}}, 24, 1, 12}, 24, 0, elements);
}

// One array and one output of every element size and byte offset, and a broadcast operand.
void TestEveryOffset() {
  for (const int64_t in_bytes : {1, 2, 4, 8, 16}) {
    for (const int64_t out_bytes : {1, 2, 4, 8, 16}) {
      for (int64_t in = 0; in < 16; ++in) {
        for (int64_t out = 0; out < 16; ++out) {
          for (const int64_t n : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 30, 31, 32, 33, 48, 67, 96}) {
            for (const int64_t row : {1, 3, 8, 16, 32, 48, 96}) {
              if (n % row != 0 || n == 0) continue;
              const Input operand{kBroadcast, in_bytes, (in + out) % 16};
              Check({{{kArray, in_bytes, in}, operand}, {{kArray, out_bytes, out}}, n, 1, row});
              Check(
                  {{{kArray, in_bytes, in}, operand}, {{kArray, out_bytes, out}}, n, row, n / row});
            }
          }
        }
      }
    }
  }
}

// In most of these calls one head aligns all arrays.
void TestRandomCalls() {
  std::mt19937_64 random(1);
  const auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  for (int i = 0; i < 200000; ++i) {
    const int64_t common = below(17);  // a common offset in elements; 16 means none
    const auto operand = [&](OperandKind kind) {
      const int64_t bytes = int64_t{1} << below(kind == kArray ? 4 : 5);
      return Input{kind, bytes, common < 16 ? common * bytes % 16 : below(16 / bytes) * bytes};
    };
    Problem p;
    for (int64_t k = below(4); k >= 0; --k) {
      p.inputs.push_back(operand(static_cast<OperandKind>(below(3))));
    }
    for (int64_t k = below(2); k >= 0; --k) p.outputs.push_back(operand(kArray));
    p.inner = below(2) ? 1 : 1 + below(20);
    p.count = 1 + below(40);
    p.n = p.inner * p.count * below(5);
    Check(p);
  }
}

int main() {
  TestExamples();
  TestEveryOffset();
  TestRandomCalls();
}
