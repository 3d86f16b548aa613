// The CUDA kernels of scatters, sums of grids and gathers on pointers at every offset within 16
// bytes that their type allows, between guard zones that must stay untouched, with ids and orders
// that are out of range, or unsorted although they are declared sorted. Needs a GPU; `make
// gpu-check` runs it. The argument `brief`, for compute-sanitizer, runs a part; `brief f16` runs
// that part for one type and `brief gather` for gathers, because racecheck takes half a minute per
// type.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cuda/fast_atomic_add.cuh"
#include "cuda/grid_sums.h"
#include "cuda/scatter.h"
#include "device.h"

using namespace jof;

bool g_brief = false;
int64_t g_launches = 0;

template <typename T>
T Make(int64_t value) {
  return Accumulator<T>::Store(static_cast<Compute<T>>(value));
}

// The value of rows without updates: -0, which must not become +0, or 7 for integers.
template <typename T>
T Untouched() {
  if constexpr (std::is_integral_v<Compute<T>>) return T{7};
  return Accumulator<T>::Store(static_cast<Compute<T>>(-0.0));
}

// Small integers, whose sums and partial sums are exact in every type.
int64_t Value(int64_t i) { return (i * 7 + i / 13) % 3 - 1; }

enum class Way {
  kSorted,
  kOrdered,
  kPrivate,
  kPrivateInOrder,
  kPrivateSmall,
  kAtomic,
  kAtomicScratch,
  kColumns,
  kTiles,
  kFew
};
constexpr Reducer kReducers[] = {Reducer::kAdd, Reducer::kMax, Reducer::kMin, Reducer::kMultiply};
enum class Ids { kSpread, kHot, kOneRow, kDropped, kBroken };

struct Shape {
  int64_t batch, size, rows, inner, splits;
};

struct Trial {
  Way way;
  Ids kind;
  int index_bytes;
  bool has_operand, shared_ids, wrap, clip;
  int64_t in_offset, out_offset;
  Reducer reducer;
  bool is_signed;
};

// Combines integers that all types represent; compared as unsigned, negative integers are largest.
int64_t Combined(const Trial& t, int64_t a, int64_t b) {
  const bool is_less = t.is_signed ? a < b : static_cast<uint64_t>(a) < static_cast<uint64_t>(b);
  switch (t.reducer) {
    case Reducer::kAdd:
      return a + b;
    case Reducer::kMultiply:
      return a * b;
    default:
      return is_less == (t.reducer == Reducer::kMax) ? b : a;
  }
}

bool IsSorted(Way way) { return way == Way::kSorted || way == Way::kOrdered; }

// Odd rows get no updates.
std::vector<int64_t> MakeIds(const Shape& s, const Trial& t) {
  std::vector<int64_t> ids;
  const int64_t even = (s.size + 1) / 2;
  const int64_t count = t.way == Way::kColumns ? s.rows * s.inner : s.rows;
  for (int64_t b = 0; b < (t.shared_ids ? 1 : s.batch); ++b) {
    for (int64_t n = 0; n < count; ++n) {
      const int64_t spread = (n * 7919 + b * 31 + n / 5) % even * 2;
      int64_t id = spread;
      if (t.kind == Ids::kHot && n % 8 != 0) id = even / 2 * 2;
      if (t.kind == Ids::kOneRow) id = (s.size - 1) / 2 * 2;
      if (t.kind == Ids::kDropped) id = s.size + n % 3;
      if (t.kind == Ids::kSpread && n % 11 == 0) id = s.size;
      if (t.wrap && n % 3 == 0) id -= s.size;
      if (t.clip && n % 7 == 0) id = -3 * s.size;
      if (t.kind == Ids::kBroken) id = spread - (t.index_bytes == 2 ? 0 : s.size / 2);
      ids.push_back(id);
    }
    if (IsSorted(t.way) && t.kind != Ids::kBroken) std::sort(ids.end() - s.rows, ids.end());
  }
  return ids;
}

std::vector<uint8_t> Stored(const std::vector<int64_t>& values, int bytes) {
  std::vector<uint8_t> result(values.size() * size_t(bytes));
  for (size_t i = 0; i < values.size(); ++i) {
    std::memcpy(&result[i * size_t(bytes)], &values[i], size_t(bytes));  // little endian
  }
  return result;
}

template <typename T>
void TestScatter(const Shape& s, DType type, const Trial& t) {
  const std::vector<int64_t> ids = MakeIds(s, t);
  const IndexRule rule{s.size, t.wrap, t.clip};
  std::vector<int64_t> order;
  for (int64_t n = 0; t.way == Way::kOrdered && n < s.rows; ++n) {
    order.push_back(t.kind == Ids::kBroken ? n * 1000003 - 5000 : s.rows - 1 - n);
  }
  std::vector<T> updates;
  for (int64_t i = 0; i < s.batch * s.rows * s.inner; ++i) updates.push_back(Make<T>(Value(i)));
  const int64_t outputs = s.batch * s.size * s.inner;
  std::vector<int64_t> want(size_t(outputs), 0);
  for (size_t o = 0; t.has_operand && o < want.size(); ++o) want[o] = static_cast<int64_t>(o % 3);
  std::vector<bool> is_hit(size_t(outputs), false);
  for (int64_t i = 0; i < s.batch * s.rows && t.kind != Ids::kBroken; ++i) {
    const int64_t b = i / s.rows, n = i % s.rows;
    const int64_t row = t.way == Way::kOrdered ? order[size_t(n)] : i;
    for (int64_t d = 0; d < s.inner; ++d) {
      const int64_t of_id = t.way == Way::kColumns ? i * s.inner + d : t.shared_ids ? n : i;
      const int64_t id = rule.Resolve(ids[size_t(of_id)]);
      if (id < 0) continue;
      const auto o = size_t((b * s.size + id) * s.inner + d);
      want[o] = Combined(t, want[o], Value(row * s.inner + d));
      is_hit[o] = true;
    }
  }
  std::vector<T> operand(size_t(outputs), Untouched<T>());
  for (size_t o = 0; o < operand.size(); ++o) {
    if (is_hit[o]) operand[o] = Make<T>(static_cast<int64_t>(o % 3));
  }

  DeviceArray in(updates, t.in_offset);
  DeviceArray out(outputs * static_cast<int64_t>(sizeof(T)), t.out_offset);
  if (t.has_operand) {
    CHECK_CUDA(
        cudaMemcpy(out.data(), operand.data(), operand.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Ids, too, form 16-byte packs only at some offsets.
  const int order_bytes = t.index_bytes == 8 ? 8 : 4;
  DeviceArray index(Stored(ids, t.index_bytes), t.in_offset / t.index_bytes * t.index_bytes);
  DeviceArray permutation(Stored(order, order_bytes), 0);
  const bool has_scratch =
      t.way == Way::kPrivate || t.way == Way::kPrivateInOrder || t.way == Way::kAtomicScratch;
  const ScatterProblem problem{s.batch, s.rows, s.inner, rule, t.shared_ids, t.index_bytes};
  const int64_t splits = t.way == Way::kTiles ? std::min(s.splits, CountTiles(problem)) : s.splits;
  int64_t sums = IsSorted(t.way) ? s.batch * s.splits * 2 * s.inner
                 : has_scratch   ? s.splits * outputs
                                 : 0;
  if (t.way == Way::kTiles) {
    ScatterCall of_tiles{};
    of_tiles.problem = problem;
    of_tiles.splits = splits;
    const int64_t list = TileListLength(TileListRows(s.size)) / 2;
    sums = TileListsOffset(of_tiles) + CountTiles(problem) * list;
  }
  DeviceArray scratch(sums * static_cast<int64_t>(sizeof(Compute<T>)), 0);
  const ScatterCall call{{t.has_operand ? out.data() : nullptr, in.data(), index.data(),
                          order.empty() ? nullptr : permutation.data(), out.data(),
                          sums == 0 ? nullptr : scratch.data()},
                         problem,
                         type,
                         t.reducer,
                         t.is_signed && std::is_integral_v<Compute<T>>,
                         order_bytes,
                         t.way == Way::kAtomic         ? 1
                         : t.way == Way::kPrivateSmall ? 0
                                                       : splits,
                         t.way == Way::kPrivateInOrder,
                         false};
  const bool is_private =
      t.way == Way::kPrivate || t.way == Way::kPrivateInOrder || t.way == Way::kPrivateSmall;
  CHECK_CUDA(LaunchScatter(IsSorted(t.way)          ? ScatterStrategy::kSorted
                           : is_private             ? ScatterStrategy::kPrivate
                           : t.way == Way::kColumns ? ScatterStrategy::kColumns
                           : t.way == Way::kTiles   ? ScatterStrategy::kTiles
                           : t.way == Way::kFew     ? ScatterStrategy::kFew
                                                    : ScatterStrategy::kAtomic,
                           call, nullptr));
  ++g_launches;
  const T* const got = out.CopyToHost<T>();
  in.CopyToHost<T>();
  index.CopyToHost<uint8_t>();
  scratch.CopyToHost<uint8_t>();
  for (size_t o = 0; o < want.size() && t.kind != Ids::kBroken; ++o) {
    const T exact = is_hit[o] ? Make<T>(want[o]) : t.has_operand ? operand[o] : Make<T>(0);
    const bool same = std::memcmp(&got[o], &exact, sizeof(T)) == 0;
    // A sum of 0 may have either sign.
    const bool equal = Accumulator<T>::Load(got[o]) == Accumulator<T>::Load(exact);
    JOF_CHECK(same || (is_hit[o] && equal),
              "reducer %d, way %d, ids %d of %d bytes, type %d, B %ld S %ld N %ld D %ld splits "
              "%ld, operand %d "
              "shared %d wrap %d clip %d, offsets %ld %ld: output %ld is %g, want %g",
              int(t.reducer), int(t.way), int(t.kind), t.index_bytes, int(type), long(s.batch),
              long(s.size), long(s.rows), long(s.inner), long(s.splits), t.has_operand,
              t.shared_ids, t.wrap, t.clip, long(t.in_offset), long(t.out_offset), long(o),
              double(Accumulator<T>::Load(got[o])), double(Accumulator<T>::Load(exact)));
  }
}

// How many updates a thread or a warp takes makes a difference only to atomics. With this number of
// updates, there are few trials.
constexpr int64_t kMany = 70001, kMore = 4 * kMany, kMost = 8 * kMany;

// One trial for each way, kind of ids and pair of offsets; the other parameters cycle.
template <typename T>
void TestScatters(DType type) {
  const Shape shapes[] = {
      {1, 7, 150, 1, 1},       {1, 9, 150, 3, 5},        {1, 7, 100, 8, 2},
      {1, 5, 60, 21, 40},      {2, 7, 150, 1, 3},        {3, 6, 90, 4, 7},
      {1, 5, 40, 150, 3},      {1, 3, 9, 2500, 2},       {500, 7, 9, 1, 1},
      {300, 5, 33, 3, 1},      {1, 64, 9000, 1, 3},      {1, 300, 17, 2, 1},
      {1, 33, 2000, 8, 16},    {1, 1, 77, 1, 4},         {1, 33, 700, 16, 7},
      {1, 1000, 300, 1, 2},    {1, 5, 9001, 1, 128},     {2, 12, 33, 33, 33},
      {1, 20013, kMore, 8, 2}, {3, 1200, 40, 70, 1},     {1, 50, 9000, 20, 3},
      {2, 9, 300, 68, 2},      {1, 20013, kMore, 24, 2}, {9, 4096, 9000, 1, 3},
      {300, 1500, 4200, 1, 2}, {1, 40, 50, 24, 2},       {1, 40, 700, 24, 2},
      {1, 3000, kMany, 4, 2},  {2, 3001, kMany, 40, 2},  {1, 20013, kMore, 16, 2},
      {1, 20013, kMost, 4, 2},
  };
  const auto step = static_cast<int64_t>(sizeof(T));
  unsigned turn = 0;
  for (const Shape& s : shapes) {
    for (const Way way :
         {Way::kSorted, Way::kOrdered, Way::kPrivate, Way::kPrivateInOrder, Way::kPrivateSmall,
          Way::kAtomic, Way::kAtomicScratch, Way::kColumns, Way::kTiles, Way::kFew}) {
      if (s.batch > 1 && way == Way::kOrdered) continue;
      // The per-warp tables and their tags must fit into shared memory.
      const int64_t table = s.size * s.inner * 9;
      if (way == Way::kPrivate && s.size * s.inner * 8 > kPrivateBytes) continue;
      if (way == Way::kPrivateInOrder && table > kPrivateBytes) continue;
      if (way == Way::kColumns && s.size * 8 > kPrivateBytes >> kLogLeastColumns) continue;
      if (way == Way::kFew && s.rows > kFewUpdates) continue;
      if (way == Way::kTiles && (s.inner != 1 || !std::is_same_v<Compute<T>, float>)) continue;
      if (way == Way::kPrivateSmall && s.size * s.inner * 8 > kSmallProblemBytes) continue;
      for (const Ids kind : {Ids::kSpread, Ids::kHot, Ids::kOneRow, Ids::kDropped, Ids::kBroken}) {
        if (kind == Ids::kBroken && !IsSorted(way)) continue;
        if (s.rows >= kMany && !(way == Way::kAtomic && kind == Ids::kSpread) &&
            !(way == Way::kAtomicScratch && kind == Ids::kHot)) {
          continue;
        }
        for (int64_t offset = 0; offset < 16; offset += g_brief ? 16 - step : step) {
          if (s.rows >= kMany && offset > step) break;
          for (const bool opposite : {false, true}) {
            if (s.rows >= kMany && opposite != (offset > 0)) continue;
            ++turn;
            Trial t{way,
                    kind,
                    (turn + turn / 32) % 2 ? 4 : 8,
                    turn / 2 % 2 != 0,
                    turn / 4 % 2 != 0,
                    false,
                    false,
                    offset,
                    opposite ? 16 - step - offset : offset,
                    kReducers[turn % 5 % 4],
                    !std::is_integral_v<Compute<T>> || turn % 7 < 4};
            if (t.reducer == Reducer::kMultiply && !IsSorted(way) && way != Way::kFew) {
              t.reducer = Reducer::kMin;
            }
            if (way == Way::kAtomic || way == Way::kColumns || way == Way::kTiles) {
              t.reducer = Reducer::kAdd;
            }
            if (way == Way::kColumns || way == Way::kTiles) t.shared_ids = way == Way::kTiles;
            t.has_operand |= t.reducer != Reducer::kAdd;
            if (IsSorted(way)) {
              if (turn % 3 == 0) t.index_bytes = 2;
            } else {
              t.wrap = turn / 8 % 2 != 0;
              t.clip = turn / 16 % 2 != 0;
              // Clipping would turn ids beyond the range into rows. Clipping and wrapping would
              // give one row so many updates that its sum is not exact in 16 bits.
              if (kind == Ids::kDropped || s.rows >= kMany) t.clip = false;
              if (s.rows >= kMany) t.wrap = false;
              if (s.rows >= kMany && offset == 0) t.reducer = Reducer::kAdd;
            }
            TestScatter<T>(s, type, t);
            if (g_brief) break;
          }
        }
      }
    }
  }
}

// ---- one element at a time ----

// Every thread adds to one element, except to the middle one of every three.
template <typename T>
__global__ void AddToElements(T* base, int64_t length, int64_t times) {
  const int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i >= length * times || i % length % 3 == 1) return;
  FastAtomicAdd(base, i % length, length, Accumulator<T>::Store(static_cast<Compute<T>>(2)));
}

template <typename T>
void TestFastAtomicAdd() {
  constexpr int64_t kTimes = 37;
  for (const int64_t length : {1, 2, 3, 4, 5, 6, 7, 8, 9, 31, 1001}) {
    for (int64_t offset = 0; offset < 16; offset += static_cast<int64_t>(sizeof(T))) {
      std::vector<T> values(size_t(length), Untouched<T>());
      for (size_t i = 0; i < values.size(); ++i) {
        if (i % 3 != 1) values[i] = Make<T>(static_cast<int64_t>(i % 5));
      }
      DeviceArray array(values, offset);
      const auto blocks = static_cast<unsigned>((length * kTimes + 255) / 256);
      AddToElements<<<blocks, 256>>>(static_cast<T*>(array.data()), length, kTimes);
      CHECK_CUDA(cudaGetLastError());
      ++g_launches;
      const T* const got = array.CopyToHost<T>();
      for (size_t i = 0; i < values.size(); ++i) {
        const T want = i % 3 == 1 ? values[i] : Make<T>(static_cast<int64_t>(i % 5) + 2 * kTimes);
        JOF_CHECK(std::memcmp(&got[i], &want, sizeof(T)) == 0,
                  "element %ld of %ld of %ld bytes, offset %ld", long(i), long(length),
                  long(sizeof(T)), long(offset));
      }
    }
  }
}

// ---- gathers ----

void TestGather(const Shape& s, int element_bytes, int index_bytes, bool shared, bool wrap,
                bool clip, int64_t in_offset, int64_t out_offset) {
  std::vector<int64_t> ids;
  for (int64_t i = 0; i < (shared ? 1 : s.batch) * s.rows; ++i) {
    ids.push_back((i * 7919 + i / 3) % (4 * s.size + 3) - 2 * s.size);
  }
  const int64_t row_bytes = s.inner * element_bytes;
  std::vector<uint8_t> table(size_t(s.batch * s.size * row_bytes));
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<uint8_t>(i * 37 + i / 251);
  uint8_t fill[16];
  for (int i = 0; i < 16; ++i) fill[i] = static_cast<uint8_t>(200 + i);
  DeviceArray in(table, in_offset), index(Stored(ids, index_bytes), in_offset / 8 * 8);
  DeviceArray out(s.batch * s.rows * row_bytes, out_offset);
  const IndexRule rule{s.size, wrap, clip};
  const ScatterProblem problem{s.batch, s.rows, s.inner, rule, shared, index_bytes};
  const GatherCall call{problem, element_bytes, in.data(), index.data(), fill, out.data()};
  CHECK_CUDA(LaunchGatherRows(call, nullptr));
  ++g_launches;
  const uint8_t* const got = out.CopyToHost<uint8_t>();
  for (int64_t i = 0; i < s.batch * s.rows * row_bytes; ++i) {
    const int64_t row = i / row_bytes, byte = i % row_bytes;
    const int64_t id = rule.Resolve(ids[size_t(shared ? row % s.rows : row)]);
    const int64_t from = (row / s.rows * s.size + id) * row_bytes + byte;
    const uint8_t want = id < 0 ? fill[byte % element_bytes] : table[size_t(from)];
    JOF_CHECK(got[i] == want, "byte %ld of row %ld: %ld elements of %d bytes, offsets %ld %ld",
              long(byte), long(row), long(s.inner), element_bytes, long(in_offset),
              long(out_offset));
  }
}

void TestGathers() {
  unsigned turn = 0;
  for (const Shape& s :
       {Shape{1, 7, 150, 1, 0}, Shape{2, 5, 33, 3, 0}, Shape{1, 300, 40, 4, 0},
        Shape{3, 4, 9, 21, 0}, Shape{1, 9, 30, 128, 0}, Shape{2, 50, 8001, 21, 0}}) {
    for (const int bytes : {1, 2, 4, 8, 16}) {
      for (int64_t offset = 0; offset < 16; offset += g_brief ? 16 : bytes) {
        for (const int64_t other : {offset, 16 - bytes - offset}) {
          ++turn;
          TestGather(s, bytes, turn % 2 ? 4 : 8, turn / 2 % 2 != 0, turn / 4 % 2 != 0,
                     turn / 8 % 2 != 0, offset, other);
        }
      }
    }
  }
}

// ---- sums of grids ----

struct Grid {
  int64_t outer, m, n, rows, columns, inner;
};

// Every third row and column has no updates, and some ids are out of range. Row 1 has most updates.
std::vector<int64_t> IdsOfGrid(int64_t count, int64_t size, bool is_hot) {
  std::vector<int64_t> ids;
  for (int64_t k = 0; k < count; ++k) {
    int64_t id = (k * 7919 + k / 3) % (2 * size + 3) - size / 2;
    if (id % 3 == 0) id = size;
    ids.push_back(is_hot && k % 4 != 0 ? 1 % size : id);
  }
  return ids;
}

template <typename T>
void TestGrid(DType type, const Grid& g, int index_bytes, bool is_hot, bool wrap, bool clip,
              int64_t in_offset, int64_t out_offset) {
  const std::vector<int64_t> i = IdsOfGrid(g.m, g.rows, is_hot),
                             j = IdsOfGrid(g.n, g.columns, is_hot);
  const IndexRule rule_of_rows{g.rows, wrap, clip}, rule_of_columns{g.columns, wrap, clip};
  std::vector<T> updates;
  for (int64_t k = 0; k < g.outer * g.m * g.n * g.inner; ++k) updates.push_back(Make<T>(Value(k)));
  std::vector<int64_t> want(size_t(g.outer * g.rows * g.columns * g.inner), 0);
  for (int64_t k = 0; k < static_cast<int64_t>(updates.size()); ++k) {
    const int64_t d = k % g.inner, n = k / g.inner % g.n, m = k / g.inner / g.n % g.m;
    const int64_t a = rule_of_rows.Resolve(i[size_t(m)]), b = rule_of_columns.Resolve(j[size_t(n)]);
    if (a < 0 || b < 0) continue;
    const int64_t o = k / (g.inner * g.n * g.m);
    want[size_t(((o * g.rows + a) * g.columns + b) * g.inner + d)] += Value(k);
  }
  DeviceArray in(updates, in_offset);
  DeviceArray ids(Stored(i, index_bytes), 8), other_ids(Stored(j, index_bytes), 0);
  DeviceArray out(static_cast<int64_t>(want.size() * sizeof(T)), out_offset);
  GridSumCall call{g.outer,
                   g.inner,
                   {{rule_of_rows, g.m, ids.data()}, {rule_of_columns, g.n, other_ids.data()}},
                   index_bytes,
                   type,
                   in.data(),
                   out.data(),
                   nullptr};
  DeviceArray lists(GridLists(call) * int64_t{sizeof(int32_t)}, 4);
  call.lists = static_cast<int32_t*>(lists.data());
  CHECK_CUDA(LaunchGridSum(call, nullptr));
  ++g_launches;
  const T* const got = out.CopyToHost<T>();
  in.CopyToHost<T>();
  lists.CopyToHost<int32_t>();
  for (size_t o = 0; o < want.size(); ++o) {
    // Sums are rounded once. Those of 16 bits may be too large to be exact.
    JOF_CHECK(Accumulator<T>::Load(got[o]) == Accumulator<T>::Load(Make<T>(want[o])),
              "type %d, grid %ld x %ld x %ld x %ld into %ld x %ld, hot %d wrap %d clip %d, offsets "
              "%ld %ld: output %ld is %g, want %ld",
              int(type), long(g.outer), long(g.m), long(g.n), long(g.inner), long(g.rows),
              long(g.columns), is_hot, wrap, clip, long(in_offset), long(out_offset), long(o),
              double(Accumulator<T>::Load(got[o])), long(want[o]));
  }
}

template <typename T>
void TestGrids(DType type) {
  unsigned turn = 0;
  for (const Grid& g :
       {Grid{2, 9, 12, 5, 6, 8}, Grid{1, 40, 70, 3, 2, 16}, Grid{3, 1, 33, 4, 70, 1},
        Grid{1, 100, 2, 8192, 1, 3}, Grid{1, 8192, 1, 5, 3, 1}, Grid{2, 0, 5, 3, 4, 4},
        Grid{1, 65, 64, 33, 1, 7}}) {
    for (int64_t offset = 0; offset < 16; offset += g_brief ? 16 : int64_t{sizeof(T)}) {
      for (const bool is_hot : {false, true}) {
        ++turn;
        TestGrid<T>(type, g, turn % 2 ? 4 : 8, is_hot, turn / 2 % 2 != 0, turn / 4 % 2 != 0, offset,
                    turn / 8 % 2 ? offset : 16 - int64_t{sizeof(T)} - offset);
      }
    }
  }
}

template <typename T>
void TestType(DType type) {
  TestFastAtomicAdd<T>();
  TestScatters<T>(type);
  TestGrids<T>(type);
}

int main(int argc, char** argv) {
  g_brief = argc > 1;
  const auto wanted = [=](const char* part) { return argc < 3 || std::strcmp(argv[2], part) == 0; };
  if (wanted("f16")) TestType<Half>(DType::kF16);
  if (wanted("bf16")) TestType<BFloat16>(DType::kBF16);
  if (wanted("f32")) TestType<float>(DType::kF32);
  if (wanted("f64")) TestType<double>(DType::kF64);
  if (wanted("i32")) TestType<uint32_t>(DType::kU32);
  if (wanted("i64")) TestType<uint64_t>(DType::kU64);
  if (wanted("gather")) TestGathers();
  CHECK_CUDA(cudaDeviceSynchronize());
  std::printf("%ld launches right\n", long(g_launches));
}
