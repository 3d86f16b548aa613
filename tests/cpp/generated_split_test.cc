// Which elements of a generated kernel's call are packed: arrays at every byte within a pack, all
// element sizes, lengths around packs; and random calls of many operands.
#include "cuda/generated_split.h"

#include <random>
#include <vector>

#include "check.h"

using namespace jof;

struct Operand {
  OperandKind kind;  // outputs are arrays
  int64_t bytes;     // of an element
  int64_t offset;    // bytes from 16-byte alignment; nothing is read
};

struct Problem {
  std::vector<Operand> inputs, outputs;
  int64_t n, row;
};

// Whether `size` elements from `element` on move as words.
bool IsWord(const Operand& array, int64_t element, int64_t size) {
  return (array.offset + element * array.bytes) % std::min<int64_t>(16, size * array.bytes) == 0;
}

GeneratedCall Split(const Problem& p) {
  GeneratedCall call{};
  call.n = p.n;
  call.row_length = FastDivider<uint64_t>(static_cast<uint64_t>(p.row));
  std::vector<int64_t> kinds, element_bytes;
  const auto at = [](int64_t offset) { return reinterpret_cast<void*>(4096 + offset); };
  for (const Operand& in : p.inputs) {
    call.inputs[kinds.size()] = at(in.offset);
    kinds.push_back(static_cast<int64_t>(in.kind));
    element_bytes.push_back(in.bytes);
  }
  for (size_t k = 0; k < p.outputs.size(); ++k) {
    call.outputs[k] = at(p.outputs[k].offset);
    element_bytes.push_back(p.outputs[k].bytes);
  }
  SplitIntoPacks(p.inputs.size(), p.outputs.size(), kinds.data(), element_bytes.data(), &call);
  return call;
}

#define CHECK_SPLIT(condition)                                                                     \
  JOF_CHECK(condition,                                                                             \
            "n %ld, row %ld, pack %ld, input of %ld bytes at %ld, output of %ld at %ld",           \
            long(p.n), long(p.row), long(size), long(p.inputs[0].bytes), long(p.inputs[0].offset), \
            long(p.outputs[0].bytes), long(p.outputs[0].offset))

void Check(const Problem& p) {
  const GeneratedCall call = Split(p);
  int64_t size = 16;
  for (const Operand& out : p.outputs) size = std::min(size, 16 / out.bytes);
  CHECK_SPLIT(call.head >= 0 && call.head <= p.n && call.packs >= 0 && call.lone >= 0);

  // Every element once, where ComputeItem has the packs and the lone elements.
  std::vector<int> computed(static_cast<size_t>(p.n));
  const auto compute = [&](int64_t first, int64_t count) {
    CHECK_SPLIT(first >= 0 && first + count <= p.n);
    for (int64_t i = first; i < first + count; ++i) ++computed[static_cast<size_t>(i)];
  };
  for (int64_t pack = 0; pack < call.packs; ++pack) compute(call.head + pack * size, size);
  for (int64_t lone = 0; lone < call.lone; ++lone) {
    compute(lone < call.head ? lone : lone + call.packs * size, 1);
  }
  for (const int count : computed) CHECK_SPLIT(count == 1);

  // All packs are words of all arrays, and there could not be more of them.
  const auto is_pack = [&](int64_t first) {
    bool words = size > 1 && first + size <= p.n;
    for (const Operand& in : p.inputs) {
      words = words && (in.kind != OperandKind::kArray || IsWord(in, first, size));
    }
    for (const Operand& out : p.outputs) words = words && IsWord(out, first, size);
    return words;
  };
  for (int64_t pack = 0; pack < call.packs; ++pack) {
    CHECK_SPLIT(is_pack(call.head + pack * size));
  }
  for (int64_t i = 0; i < call.head; ++i) CHECK_SPLIT(!is_pack(i));
  CHECK_SPLIT(call.packs == 0 || p.n - call.head - call.packs * size < size);

  // Packs of a row are words within it, and such rows are found at least where nothing is lone.
  for (size_t k = 0; k < 32; ++k) {
    const bool is_packed = call.packed_rows >> k & 1;
    const bool is_row = k < p.inputs.size() && p.inputs[k].kind == OperandKind::kRow;
    CHECK_SPLIT(is_row || !is_packed);
    if (!is_row || call.packs == 0) continue;
    bool words = true;
    for (int64_t pack = 0; pack < call.packs; ++pack) {
      const int64_t column = (call.head + pack * size) % p.row;
      words = words && column + size <= p.row && IsWord(p.inputs[k], column, size);
    }
    CHECK_SPLIT(words || !is_packed);
    // A single row may have packs though its length is no multiple of them.
    CHECK_SPLIT(is_packed || !words || call.lone > 0);
  }
}

constexpr OperandKind kArray = OperandKind::kArray, kScalar = OperandKind::kScalar,
                      kRow = OperandKind::kRow;

void TestExamples() {
  const auto expect = [](const Problem& p, int64_t head, int64_t packs, uint32_t packed_rows) {
    const GeneratedCall call = Split(p);
    JOF_CHECK(call.head == head && call.packs == packs && call.lone == p.n - packs * 4 &&
                  call.packed_rows == packed_rows,
              "got %ld %ld %ld %u", long(call.head), long(call.packs), long(call.lone),
              call.packed_rows);
  };
  const Operand row{kRow, 2, 8}, scalar{kScalar, 8, 1};
  expect({{{kArray, 4, 0}, row, scalar}, {{kArray, 4, 0}}, 24, 12}, 0, 6, 2);
  expect({{{kArray, 4, 0}, row, scalar}, {{kArray, 4, 0}}, 24, 6}, 0, 6, 0);
  expect({{{kArray, 4, 4}, row, scalar}, {{kArray, 4, 4}}, 24, 12}, 3, 5, 0);
  expect({{{kArray, 2, 6}, row, scalar}, {{kArray, 4, 12}}, 6, 6}, 1, 1, 0);
  expect({{{kArray, 4, 4}, row, scalar}, {{kArray, 4, 8}}, 24, 12}, 24, 0, 0);
}

// One array and one output of every size at every byte, and a row.
void TestEveryOffset() {
  for (const int64_t in_bytes : {1, 2, 4, 8, 16}) {
    for (const int64_t out_bytes : {1, 2, 4, 8, 16}) {
      for (int64_t in = 0; in < 16; ++in) {
        for (int64_t out = 0; out < 16; ++out) {
          for (const int64_t n : {0, 1, 2, 3, 7, 8, 9, 15, 16, 17, 30, 31, 32, 33, 48, 67, 96}) {
            for (const int64_t row : {1, 3, 8, 16, 32, 48, 96}) {
              if (n % row != 0) continue;
              const Operand vector{kRow, in_bytes, (in + out) % 16};
              Check({{{kArray, in_bytes, in}, vector}, {{kArray, out_bytes, out}}, n, row});
            }
          }
        }
      }
    }
  }
}

// Half of these have arrays that one head aligns.
void TestRandomCalls() {
  std::mt19937_64 random(1);
  const auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  for (int i = 0; i < 200000; ++i) {
    const int64_t common = below(17);  // elements, or none
    const auto operand = [&](OperandKind kind) {
      const int64_t bytes = int64_t{1} << below(kind == kArray ? 4 : 5);
      return Operand{kind, bytes, common < 16 ? common * bytes % 16 : below(16 / bytes) * bytes};
    };
    Problem p;
    for (int64_t k = below(4); k >= 0; --k) {
      p.inputs.push_back(operand(static_cast<OperandKind>(below(3))));
    }
    for (int64_t k = below(2); k >= 0; --k) p.outputs.push_back(operand(kArray));
    p.row = 1 + below(40);
    p.n = p.row * below(5);
    Check(p);
  }
}

int main() {
  TestExamples();
  TestEveryOffset();
  TestRandomCalls();
}
