// Rows that a team of up to 256 threads holds in registers. If there are few rows, a team has up to
// 1024 threads, or up to 8 blocks of 256. A team is one thread, a part of a warp, a warp, several
// warps or a cluster of blocks, and may have several rows at a time. All arrays are aligned to
// packs, except in traced programs. The checks that RowsKernel makes for each pack are not needed
// here, and loads go straight to registers.
//
// In most programs a team works on one row, or on several short rows at a time, and then exits. No
// rows are loaded ahead: blocks of other rows run beside it instead. With several short rows, each
// thread has as many loads in flight as with a long row. In a program with sums over rows, teams
// take rows round-robin, load the next row ahead and keep row vectors in registers.
//
// 16-bit rows whose length is a multiple of four, but not of eight, consist of packs of 8 bytes
// (except in traced programs). Few long rows whose length is not a multiple of a 16-byte pack
// consist of single elements. Other rows whose length is not a multiple of a pack have edges: they
// begin or end within a pack. Threads hold the packs that lie wholly in such a row. Its head and
// tail elements, those before and after these packs, are spread over the lanes, one or a few for
// each. So nothing is computed for elements of other rows. Row vectors are loaded element by
// element. Earlier, threads held the packs around a row, and masked what was outside it. Softmax of
// 160 MB, and the kernel of its gradient for two arrays of this size, earlier and now, in us (a
// copy takes 78):
//             bf16                     f32
//   columns   softmax   its gradient   softmax   its gradient
//   77        158 113   168 154        94  98    128 114
//   257       120  83   130 121       101  83    114 115
//   577       110  96   125 116        94  93    114 113
//   1025      122  80   131 114       101  82    114 114
//
// Traced programs know the length of rows, and therefore which packs need no check. They have no
// Neutral: the terms of packs and elements that a thread does not have are left out. Their arrays
// may have several types, and need not be aligned.
//
// Rows of a thread share the row vectors that it loads, and packs that all lanes have are not
// masked: when this was added, layer norm of bf16 400000 x 100 took 53 us instead of 64, rms norm
// 52 instead of 58 (a copy takes 38, XLA 47 and 42).
//
// What was tried: loads that bypass the L1 cache, at first 6 % slower in gradients (LoadWhole says
// which do now); blocks of 128 threads, 2 to 21 % slower; registers for six blocks, which spill;
// rows with edges copied to shared memory and read element by element, 78 us instead of 47 for bf16
// 40000 x 1001, bound by instructions, or read in pairs, with the next rows copied meanwhile:
// softmax of bf16 78048 x 1025 95 us, 311284 x 257 93 us; row vectors of rows with edges loaded as
// whole packs and shifted, which is slower for fewer than 512 columns.
//
// Handles the programs of rows.cuh.
#pragma once

#include "cuda/rows.cuh"

JOF_NAMESPACE_BEGIN

inline constexpr int kWholeRowsThreads = 256;

struct WholeRowsPlan {
  int64_t rows;
  int64_t teams;  // if there are sums over rows: each has every teams-th row
  int n;
  int lanes;  // threads of a team, or of each of its blocks: a power of two
  // For traced programs: whether all arrays and row vectors are aligned to 16 bytes.
  bool is_packed;
  // The blocks that have rows. Others run the side of a program.
  int64_t row_blocks = 0;
};

// The properties of a program that its kernel instances depend on.
struct WholeRowsTraits {
  int inputs = 1, vectors = 0, sums = 0;
  int pack = 1;           // elements of a pack
  bool is_short = false;  // packs are of 8 bytes
  int most = 8;           // packs that registers of a thread can hold, of all its rows
  int most_rows = 8;      // rows that a thread may have
  bool is_traced = false;
  bool has_outputs = true;
  bool names = false;  // as Program::kNames
  int reductions = 1;
};

// Rows of teams of several blocks have at least kClusterColumns elements; such a team has at most
// kMostBlocks.
inline constexpr int kClusterColumns = 4096, kMostBlocks = 8;

// How many head and tail elements a lane may have. A row has up to pack - 1 of each.
JOF_HOST_DEVICE constexpr int EdgesOf(int pack, int lanes) {
  return (2 * (pack - 1) + lanes - 1) / lanes;
}

// An instance of WholeRowsKernel: how many packs of each row a thread holds, and how many rows, in
// teams of at least `least_lanes`. With fewer lanes, a warp would have too many rows at a time,
// which slows down stores, or, in rows with edges, a thread too many head and tail elements. Traced
// programs ignore it for rows with edges: they have at least 4 lanes, or 1 for very short rows.
struct WholeRowsShape {
  int held, rows, least_lanes;
  int threads;              // the most in a block
  bool is_cluster = false;  // a team is a cluster of blocks

  JOF_HOST_DEVICE constexpr WholeRowsShape(int held = 0, int rows = 0, int least_lanes = 0,
                                           int threads = kWholeRowsThreads)
      : held(held), rows(rows), least_lanes(least_lanes), threads(threads) {}
  JOF_HOST_DEVICE static constexpr WholeRowsShape OfCluster(int held) {
    WholeRowsShape shape(held, 1);
    shape.is_cluster = true;
    return shape;
  }
  JOF_HOST_DEVICE constexpr int LeastLanes(const WholeRowsTraits& traits, bool has_edges,
                                           int64_t n) const {
    if (!has_edges || !traits.is_traced) return least_lanes > 1 ? least_lanes : 1;
    return n <= 2 * traits.pack && traits.inputs <= 2 ? 1 : 4;
  }
  // Whether its kernel has the side of a program.
  JOF_HOST_DEVICE constexpr bool MayHaveSide() const {
    return is_cluster || threads > kWholeRowsThreads;
  }
  // Whether it is a shape, and not too large for a program.
  JOF_HOST_DEVICE constexpr bool Fits(const WholeRowsTraits& traits) const {
    return rows > 0 && held * rows <= traits.most && rows <= traits.most_rows;
  }
  JOF_HOST_DEVICE constexpr bool operator==(const WholeRowsShape& other) const {
    return held == other.held && rows == other.rows && least_lanes == other.least_lanes &&
           threads == other.threads && is_cluster == other.is_cluster;
  }
};
struct WholeRowsShapes {
  static constexpr int kMost = 6;
  WholeRowsShape of[kMost];  // unused if it has 0 rows
};

// The candidate instances for rows of this many packs, in order of preference.
//
// Measured on an H200 over 60 row sizes, without edges: what counts most is that few packs of the
// threads are empty. So there are instances with 5 to 10 packs: softmax of bf16 takes 42 us for
// 151515 x 264 with five packs of each of 8 lanes, 50 with three of each of 16; cross entropy of
// 400000 x 100 33 us with seven packs of 8 bytes, 46 with four of each of two rows. Then,
//  - the more packs a thread has, the fewer steps a reduction takes: programs without outputs
//    prefer instances with many packs;
//  - warps access as many places in memory as they have rows, which slows down stores: f32 softmax
//    of 666666 x 60 takes 85 us with four packs, 137 with eight;
//  - row vectors are loaded once for all rows of a thread: rms norm of bf16 344827 x 116 takes 46
//    us with two packs of each of four rows, 50 with four of two. Layer norm has too few registers
//    for that: 400000 x 100 takes 51 us with two rows, 59 with four.
JOF_HOST_DEVICE constexpr WholeRowsShapes WholeRowsShapesOf(const WholeRowsTraits& traits,
                                                            bool has_edges, int64_t packs) {
  const bool is_narrow = traits.pack > 4, has_vectors = traits.vectors > 0;
  if (traits.pack == 1) return {};
  // Whether registers hold nothing but the elements of one array.
  const bool has_room = !has_vectors && traits.inputs == 1;
  const int other = is_narrow ? 3 : 8;
  // Measured for up to 320 packs only.
  if (packs > 320 && traits.inputs == 1 && traits.sums == 0 && !has_edges) {
    if (traits.is_short) return {{{8, 1}, {6, 1}}};
    if (is_narrow || has_vectors) return {{{4, 1}, {other, 1}}};
    return {{{8, 1}, {4, 1}, {6, 1}}};
  }
  if (traits.is_short) {
    if (traits.sums > 0) return {{{4, 1}}};
    if (traits.inputs > 1) return {{{4, 1}, {5, 1}, {3, 2}}};
    // Instances with one row of each thread also serve arrays with few rows.
    if (!traits.has_outputs) return {{{8, 1}, {7, 1}, {6, 1}, {10, 1}}};
    if (has_vectors && (packs > 32 || traits.reductions > 1)) {
      return {{{4, 2}, {3, 2}, {8, 1, 8}, {6, 1, 8}}};
    }
    if (has_vectors) return {{{2, 4}, {4, 2}, {3, 2}, {8, 1, 8}, {6, 1, 8}}};
    if (traits.names || packs > 32) return {{{8, 1, 4}, {7, 1, 4}, {6, 1, 4}, {10, 1, 4}}};
    return {{{4, 2}, {3, 2}, {8, 1, 4}, {7, 1, 4}, {6, 1, 4}, {10, 1, 4}}};
  }
  if (traits.sums > 0) return {{{3, 1}, {2, 1}}};
  if (traits.inputs > 2) {
    const int least_lanes = !has_edges ? 0 : is_narrow ? 16 : 8;
    return {{{is_narrow ? 2 : 4, 1, least_lanes}, {is_narrow ? 1 : 2, 1, least_lanes}}};
  }
  if (has_edges && is_narrow) {
    return {{{4, 1, 16}, {3, 1, 16}, {has_room ? 4 : 3, 1, 8}, {3, 1, 4}}};
  }
  if (has_edges && has_room) return {{{8, 1, 8}, {6, 1, 8}, {4, 1, 8}, {8, 1, 4}}};
  if (has_edges) return {{{4, 1, 8}, {6, 1, 8}, {8, 1, 8}}};
  if (packs <= 2 && (is_narrow || !has_room)) return {{{1, 4}, {2, 2}, {4, 1}, {other, 1}}};
  if (traits.inputs == 1 && !traits.is_traced) {
    if (has_vectors && !is_narrow) return {{{2, 2}, {3, 2, 8}, {4, 1}, {8, 1}}};
    if (has_vectors && packs <= 8) return {{{2, 2}, {4, 1}, {3, 1}}};
    if (has_vectors) return {{{4, 1}, {3, 1}, {5, 1, 4}}};
  }
  const bool stores = traits.has_outputs && !traits.names;
  if (has_room && is_narrow && stores && packs <= 8) return {{{2, 2}, {4, 1}, {3, 1}, {5, 1, 4}}};
  if (has_room && is_narrow) return {{{4, 1}, {3, 1}, {5, 1, 4}}};
  if (has_room && !traits.has_outputs) return {{{8, 1}, {7, 1}, {6, 1}, {5, 1}, {4, 1}}};
  if (has_room && packs > 12) return {{{8, 1, 8}, {4, 1}, {7, 1, 4}, {6, 1, 4}, {5, 1, 4}}};
  if (has_room && traits.names) return {{{3, 2}, {4, 1, 2}}};
  if (has_room) return {{{3, 2}, {2, 2}, {4, 1, 2}}};
  if (packs <= 8) return {{{2, 2}, {1, 4}, {4, 1}, {other, 1}}};
  return {{{4, 1}, {other, 1}}};
}

// The instances for few rows, in blocks of up to kFewRowsThreads. Each thread has few packs, so
// that loads and arithmetic are spread over many threads: softmax of f32 220 x 1024 takes 2.0 us on
// an H200, 3.1 with the instances above, layer norm of bf16 4096 x 512 4.3 instead of 5.1, and of
// 6000 x 60, in packs of 8 bytes, 2.1 instead of 3.4.
inline constexpr int kFewRowsThreads = 1024;

JOF_HOST_DEVICE constexpr WholeRowsShapes WholeRowsShapesOfFew(const WholeRowsTraits& traits,
                                                               bool has_edges) {
  constexpr int kMost = kFewRowsThreads;
  const int least_lanes = !has_edges ? 0 : traits.pack > 4 ? 16 : 8;
  if (traits.sums > 0 || traits.pack == 1) return {};
  // More would not fit in the registers of so many threads.
  const bool are_large = traits.inputs > (has_edges ? 1 : 2) && traits.pack > 4;
  if (are_large) return {{{1, 1, least_lanes, kMost}}};
  if (traits.inputs > 1 || has_edges) {
    return {{{1, 1, least_lanes, kMost}, {2, 1, least_lanes, kMost}}};
  }
  return {{{1, 1, 0, kMost}, {2, 1, 0, kMost}, {4, 1, 0, kMost}}};
}

// The instances for few long rows, whose teams are clusters of blocks. Rows that begin or end
// within packs consist of packs of one element: then all elements are alike, and loads of row
// vectors have no gaps. On an H200, in us, and with the instances above or WideRowsKernel:
//   layer norm of bf16 1 x 16384 2.6 (5.8), 1 x 14255 3.3 (6.0); of f32 4 x 9759 2.9 (8.5)
//   rms norm of bf16 30 x 8975 3.0 (6.7); of f32 37 x 16384 3.2 (5.1), 64 x 32768 8.2 (12.6)
//   softmax of bf16 1 x 9443 2.6 (4.0), 1 x 16384 2.4 (3.1); of f32 4 x 32768 3.0 (3.8)
JOF_HOST_DEVICE constexpr WholeRowsShapes WholeRowsShapesOfClusters(const WholeRowsTraits& traits,
                                                                    bool has_edges) {
  const auto of = [](int held) { return WholeRowsShape::OfCluster(held); };
  if (traits.is_traced || traits.sums > 0 || traits.is_short || has_edges) return {};
  if (traits.pack == 1) return {{of(8), of(16)}};
  // More would not fit in registers.
  const bool are_large = traits.inputs > 2 && traits.pack > 4;
  return {{of(2), are_large ? WholeRowsShape() : of(4)}};
}

// All instances for a program are in these lists.
inline constexpr int kWholeRowsLists = 8;
JOF_HOST_DEVICE constexpr WholeRowsShapes WholeRowsList(const WholeRowsTraits& traits,
                                                        bool has_edges, int list) {
  constexpr int kPacks[] = {2, 8, 12, 32, 33, 321}, kLast = kWholeRowsLists - 1;
  static_assert(sizeof(kPacks) == (kLast - 1) * sizeof(int));
  if (list == kLast) return WholeRowsShapesOfClusters(traits, has_edges);
  if (list == kLast - 1) return WholeRowsShapesOfFew(traits, has_edges);
  return WholeRowsShapesOf(traits, has_edges, kPacks[list]);
}

// The cheapest instance, and the lanes of its teams.
struct WholeRowsTeam {
  WholeRowsShape shape;
  int lanes;       // of a block; 0: no instance handles these rows
  int blocks = 1;  // of a team
};

// The instance for few rows: lanes are added until there are `few` threads, or half as many where a
// team has several warps. There is none if there are many rows, or if a thread would hold too many
// packs.
JOF_HOST_DEVICE constexpr WholeRowsTeam TeamOfFewRows(const WholeRowsTraits& traits, bool has_edges,
                                                      int64_t n, int64_t rows, int64_t few) {
  // WideRowsKernel is better for longer rows, except for f32 norms: rms norm of 37 x 16384
  // takes 4.1 us here and 5.9 there. With edges, vectors are loaded element by element: rms norm of
  // bf16 30 x 8975 takes 8.5 us here.
  const bool is_f32_norm = traits.vectors > 0 && traits.pack <= 4 && !has_edges;
  if (n > 8192 && !is_f32_norm) return {};
  const int64_t packs = n / traits.pack;
  // Softmax of bf16 60 x 4004 takes 2.8 us with 1024 lanes, 2.6 with 256.
  if (traits.is_short && traits.vectors == 0 && packs > kWholeRowsThreads) return {};
  const WholeRowsShapes shapes = WholeRowsShapesOfFew(traits, has_edges);
  int lanes = has_edges ? shapes.of[0].least_lanes : 1;
  while (lanes < kFewRowsThreads && lanes < packs &&
         rows * lanes < (lanes < internal::kWarpSize ? few : few / 2)) {
    lanes *= 2;
  }
  const auto find = [&] {
    for (const WholeRowsShape& one : shapes.of) {
      if (one.Fits(traits) && one.held * lanes >= packs) return one;
    }
    return WholeRowsShape();
  };
  // If no instance holds so many packs, norms still take less time with more lanes: the gradient of
  // layer norm of f32 500 x 2001 takes 5.7 us, 7.9 otherwise; but softmax of f32 400 x 3000 5.3
  // instead of 4.5.
  while (traits.vectors > 0 && lanes < kFewRowsThreads && find().rows == 0) lanes *= 2;
  if (rows * lanes >= 2 * few || find().rows == 0) return {};
  return {find(), lanes};
}

// The instance for few long rows: blocks are added until a thread has at most two packs, or eight
// single elements. There is none if there would be too many threads, or too many packs for one.
// Rows of up to 8192 elements have an instance only if every block gets a multiprocessor: layer
// norm of bf16 256 x 8192 takes 7.2 us on an H200, 5.7 with one block for each row.
JOF_HOST_DEVICE constexpr WholeRowsTeam TeamOfCluster(const WholeRowsTraits& traits, bool has_edges,
                                                      int64_t n, int64_t rows, int64_t few) {
  const int64_t packs = n / traits.pack, aim = traits.pack == 1 ? 8 : 2;
  int blocks = 1;
  const auto threads = [&] { return int64_t{blocks} * kWholeRowsThreads; };
  while (blocks < kMostBlocks && packs > aim * threads()) blocks *= 2;
  if (blocks == 1 || rows * threads() > (n > 8192 ? 2 * few : few / 2)) return {};
  const WholeRowsShapes shapes = WholeRowsShapesOfClusters(traits, has_edges);
  for (const WholeRowsShape& one : shapes.of) {
    if (one.Fits(traits) && one.held * threads() >= packs) return {one, kWholeRowsThreads, blocks};
  }
  return {};
}

inline constexpr int64_t kManyRows = int64_t{1} << 40;

// Chooses the instance. If there would be fewer than `few` threads, each one gets less to do.
JOF_HOST_DEVICE constexpr WholeRowsTeam WholeRowsTeamOf(const WholeRowsTraits& traits,
                                                        bool has_edges, int64_t n, int64_t rows,
                                                        int64_t few, bool has_clusters = false) {
  constexpr int kWarp = internal::kWarpSize;
  WholeRowsTeam team{};
  if (has_clusters && n >= kClusterColumns) team = TeamOfCluster(traits, has_edges, n, rows, few);
  if (team.lanes == 0) team = TeamOfFewRows(traits, has_edges, n, rows, few);
  if (team.lanes > 0) return team;
  const int64_t pack = traits.pack;
  const int64_t packs = n / pack;
  if (packs * pack > 8192) return team;  // WideRowsKernel has longer rows
  const WholeRowsShapes shapes = WholeRowsShapesOf(traits, has_edges, packs);
  int64_t least_cost = 0;
  for (const WholeRowsShape& one : shapes.of) {
    if (!one.Fits(traits)) continue;
    int needed = one.LeastLanes(traits, has_edges, n);
    while (needed < kWholeRowsThreads && one.held * needed < packs) needed *= 2;
    if (one.held * needed < packs || (one.rows > 1 && rows * needed < one.rows * few)) continue;
    // With edges, threads skip packs that nobody has. What a thread does once per row takes as long
    // as about ten 16-bit elements or five 32-bit elements.
    const int64_t held = has_edges ? (packs + needed - 1) / needed : one.held;
    const int64_t once = has_edges ? EdgesOf(traits.pack, needed) + (pack > 4 ? 10 : 5) : 0;
    const int64_t cost = needed * (held * pack + once);
    if (team.lanes > 0 && cost >= least_cost) continue;
    team = {one, needed};
    least_cost = cost;
  }
  if (team.lanes == 0) return team;
  // If there are few rows, they have more lanes, with fewer packs each.
  while (team.lanes < kWarp && team.lanes < packs && rows * team.lanes < few) team.lanes *= 2;
  // Of the instances that are large enough, take the one with the fewest packs.
  for (const WholeRowsShape& one : shapes.of) {
    if (one.rows == 1 && one.held < team.shape.held && one.held * team.lanes >= packs &&
        team.lanes >= one.LeastLanes(traits, has_edges, n)) {
      team.shape = one;
    }
  }
  return team;
}

namespace internal {

// Adds up, for each column, the values that the teams of a block have in shared memory, `step`
// apart, in a fixed order. Several threads share a column if rows are short: when each column's 128
// teams were added one after the other, the gradient of 72 x 16 f16 took 27 us on an H200 instead
// of 5.
template <typename C>
__device__ __forceinline__ void AddTeams(const C* shared, int teams, int step, int columns,
                                         C* target) {
  const int threads = static_cast<int>(blockDim.x);
  int sharers = 1;
  while (sharers < kWarpSize && 2 * sharers * columns <= threads) sharers *= 2;
  for (int begin = 0; begin < columns; begin += threads / sharers) {
    const int c = begin + static_cast<int>(threadIdx.x) / sharers, lane = threadIdx.x % sharers;
    C sum = 0;
    for (int t = c < columns ? lane : teams; t < teams; t += sharers) sum += shared[t * step + c];
    for (int offset = sharers / 2; offset > 0; offset /= 2) {
      sum += __shfl_xor_sync(0xffffffffu, sum, offset);
    }
    if (c < columns && lane == 0) target[c] = sum;
  }
}

// Sets an element of a pack of up to 16 bytes, whose bits must be 0.
template <typename T>
__device__ __forceinline__ void SetElement(int j, T value, uint4* pack) {
  constexpr int kEach = 4 / static_cast<int>(sizeof(T));  // elements of a word
  const uint32_t bits = uint32_t{BitCast<typename Word<sizeof(T)>::type>(value)}
                        << (j % kEach * 8 * sizeof(T));
  if (j / kEach == 0) pack->x |= bits;
  if (j / kEach == 1) pack->y |= bits;
  if (j / kEach == 2) pack->z |= bits;
  if (j / kEach == 3) pack->w |= bits;
}

// Loads 16 bytes that are not read again.
__device__ __forceinline__ uint4 LoadOnce(const void* source) {
  uint4 pack;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(pack.x), "=r"(pack.y), "=r"(pack.z), "=r"(pack.w)
               : "l"(source));
  return pack;
}

}  // namespace internal

// A thread holds kHeld packs of V elements of each of kRows rows, or fewer. If rows have edges, it
// also holds kEdges head and tail elements, or fewer.
template <typename Program, int V, int kHeld, int kRows, int kEdges,
          int kThreads = kWholeRowsThreads, bool kIsCluster = false>
class WholeRowsBody {
 public:
  using T = typename Program::Element;
  using C = typename Program::Word;
  using Row = typename Program::Row;
  static constexpr int kInputs = Program::kInputs;
  static constexpr int kOutputs = Program::kOutputs, kReductions = Program::kReductions;
  static constexpr int kVectors = Program::kVectors, kColumnSums = Program::kColumnSums;
  static constexpr bool kHasMap = kOutputs > 0 || kColumnSums > 0;
  static constexpr bool kHasEdges = kEdges > 0;
  // Whether head and tail elements are loaded first. Measured: in 32-bit programs this takes 2 to 5
  // % less time. In 16-bit ones some kernels take up to 1.3 times as long: they wait longer for
  // their loads.
  static constexpr bool kEdgesFirst = Program::kPack <= 4;
  static constexpr bool kIsWide = V == Program::kPack;  // packs are of 16 bytes
  // How many sums a thread has. With one only, each addition would wait for the one before.
  static constexpr int kWays = V == 1 ? 4 : V < 4 ? V : kRows > 1 || !kIsWide ? 2 : 4;
  // Whether row vectors are loaded once for all rows of a thread. They are usually f32, and need no
  // other checks then.
  static constexpr bool kShares =
      !Program::kIsTraced && !kHasEdges && kInputs == 1 && kVectors > 0 && kColumnSums == 0;
  // Whether a thread loads its row vectors before it reduces, so that it waits for memory only
  // once, and keeps them. With more words, blocks of 1024 threads would spill registers; head and
  // tail elements take some, too.
  static constexpr int kWords = kHeld * V * (kInputs + kVectors) + (kHasEdges ? 16 : 0);
  static constexpr bool kKeeps = kColumnSums > 0 || (kVectors > 0 && kRows == 1 &&
                                                     (kIsCluster || (kHeld <= 2 && kWords <= 48)));
  static_assert(kRows == 1 || (!kHasEdges && kColumnSums == 0));
  static_assert(!kHasEdges || kColumnSums == 0);  // SetEdges is for one row
  static_assert(kIsWide || !kHasEdges);
  static_assert(!kIsCluster || (kRows == 1 && kColumnSums == 0 && !kHasEdges));

  __device__ __forceinline__ WholeRowsBody(const Program& program, const WholeRowsPlan& plan)
      : program_(program), plan_(plan) {
    lane_ = threadIdx.x & (Lanes() - 1);
    step_ = V * Lanes();
    if constexpr (kIsCluster) {
      lane_ += static_cast<int>(internal::ClusterRank()) * Lanes();
      step_ *= Blocks();
      if constexpr (kReductions > 0) {
        internal::InitBarriers(Exchange()->barriers);
        internal::ArriveAtCluster();
      }
    }
    if constexpr (kShares) {
      are_plain_ = true;
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        const RowVector& vector = program_.vectors[i];
        are_plain_ &= vector.data != nullptr ? vector.is_f32 : i > 0;
      }
    }
  }

  __device__ __forceinline__ void Run() {
    const int shift = __ffs(Lanes()) - 1;  // divisions would hold up the first loads
    const int team_here = threadIdx.x >> shift, teams_here = Threads() >> shift;
    const unsigned block = kIsCluster ? internal::ClusterId() : blockIdx.x;
    int64_t row = int64_t{block} * (teams_here * kRows) + team_here;
    first_ = lane_ * V;
    if constexpr (kHasEdges) SetEdges(row);
    if constexpr (kColumnSums == 0) {
      Row facts[kRows];
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) Fetch(row + i * teams_here, i);
      if constexpr (kKeeps) {
        JOF_UNROLL
        for (int k = 0; k < kHeld; ++k) {
          if (NobodyHas(k)) break;
          LoadVectors(k, vectors_[k]);
        }
        JOF_UNROLL
        for (int e = 0; e < kEdges; ++e) LoadEdgeVectors(e, edge_vectors_[e]);
      }
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) facts[i] = BeginRow(row + i * teams_here);
      Unpack();
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) Start(&facts[i]);
      if constexpr (kIsCluster && kReductions > 0) internal::WaitForCluster();
      Reduce<0>(facts);
      Finish(row, teams_here, facts);
    } else {
      Fetch(row, 0);
      Row next = BeginRow(row);
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) LoadVectors(k, vectors_[k]);
      for (; row - team_here < plan_.rows; row += plan_.teams) {
        Row facts[1] = {next};
        Start(&facts[0]);
        next = BeginRow(row + plan_.teams);
        Unpack();
        Fetch(row + plan_.teams, 0);
        Reduce<0>(facts);
        Finish(row, 0, facts);
        // Slow threads may still be reading the exchanged values.
        if (Lanes() > internal::kWarpSize) __syncthreads();
      }
      StoreColumnSums();
    }
  }

 private:
  // In a traced program, a pack of the widest type has 16 bytes.
  using Whole = Word<Program::kIsTraced ? kPackBytes : sizeof(T) * V>;

  __device__ __forceinline__ int Width() const { return internal::WidthOf<Program>(plan_); }
  __device__ __forceinline__ int Lanes() const {
    if constexpr (Program::kIsTraced) {
      return Program::kWhole.lanes;
    } else {
      return plan_.lanes;
    }
  }

  // Blocks of a team.
  __device__ __forceinline__ static int Blocks() {
    return kIsCluster ? static_cast<int>(internal::ClusterSize()) : 1;
  }

  __device__ __forceinline__ static int Threads() {
    return kThreads > kWholeRowsThreads ? static_cast<int>(blockDim.x) : kWholeRowsThreads;
  }

  // The first column of a pack, and whether the row has the pack.
  __device__ __forceinline__ int PackAt(int k) const { return first_ + k * step_; }
  __device__ __forceinline__ bool Has(int k) const {
    return AllHave(k) || PackAt(k) + (kHasEdges ? V - 1 : 0) < Width();
  }
  // Whether all threads have the pack, as far as it is known at compile time.
  __device__ __forceinline__ bool AllHave(int k) const {
    return Program::kIsTraced && (k + 1) * step_ + (kHasEdges ? V - 1 : 0) <= Width();
  }
  // Whether no thread has the pack. This is worth a branch if rows may have any length.
  __device__ __forceinline__ bool NobodyHas(int k) const {
    return (kHasEdges || Program::kIsTraced || V == 1) &&
           k * step_ + (kHasEdges ? V - 1 : 0) >= Width();
  }

  // Sets the columns of this thread's packs, and of its head and tail elements.
  __device__ __forceinline__ void SetEdges(int64_t row) {
    const int before = min(static_cast<int>(-row * Width() & (V - 1)), Width());
    const int after = Width() - ((Width() - before) & (V - 1));
    first_ += before;
    JOF_UNROLL
    for (int e = 0; e < kEdges; ++e) {
      const int i = lane_ + e * Lanes();
      const int column = i < V - 1 ? i : after + i - (V - 1);
      edge_at_[e] = column < (i < V - 1 ? before : Width()) ? column : -1;
    }
  }
  __device__ __forceinline__ bool HasEdge(int e) const { return edge_at_[e] >= 0; }
  // Whether a thread of this warp may have one.
  __device__ __forceinline__ bool MayHaveEdge(int e) const {
    return (lane_ & -internal::kWarpSize) + e * Lanes() < 2 * (V - 1);
  }

  // The k-th pack of this thread. An unsigned offset takes fewer instructions to add, but makes
  // programs of two inputs slower (the gradient of softmax by 5 %).
  template <typename Array>
  __device__ __forceinline__ Array* PackOf(Array* first, int k) const {
    if constexpr (kShares) return first + static_cast<uint32_t>(k * step_);
    return first + k * step_;
  }

  // A function, because a pointer to the exchange would take a register.
  __device__ __forceinline__ static auto* Exchange() {
    __shared__ internal::Exchange<C, kRows * Program::kValues> exchange;
    return &exchange;
  }

  __device__ __forceinline__ Row BeginRow(int64_t row) const {
    return row < plan_.rows ? program_.Begin(row) : Row{};
  }
  __device__ __forceinline__ void Start(Row* facts) const {
    if constexpr (Program::kIsTraced) program_.Start(facts);
  }

  // Loads bypass the L1 cache in programs that have no outputs or that load a row ahead, unless
  // other rows have a part of the same sector, or a thread has several short rows, whose label's
  // element is read again: cross entropy of bf16 1250000 x 32 takes 38 us on an H200, 49 if that
  // read misses.
  template <typename Array>
  __device__ __forceinline__ static auto LoadWhole(const Array* pack) {
    constexpr bool kBypasses = kColumnSums > 0 || (kOutputs == 0 && kRows == 1);
    if constexpr (kBypasses && V * sizeof(Array) == kPackBytes) {
      return internal::LoadOnce(pack);
    } else {
      return AsWord(LoadPack<V>(pack));
    }
  }

  __device__ __forceinline__ void Fetch(int64_t row, int i) {
    if (row >= plan_.rows) return;
    if constexpr (kEdgesFirst) FetchEdges(row);
    bool is_packed = true;
    if constexpr (Program::kIsTraced) {
      is_packed = plan_.is_packed;
      if (!is_packed) FetchElements(row, i);
    }
    if (is_packed) FetchPacks(row, i);
    if constexpr (!kEdgesFirst) FetchEdges(row);
  }

  __device__ __forceinline__ void FetchPacks(int64_t row, int i) {
    internal::ForEachIndex<kInputs>([&](auto index) {
      constexpr int a = decltype(index)::value;
      using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
      const Array* source = InputOf<a>(program_) + row * Width() + first_;
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (!Has(k)) continue;
        const Array* pack = PackOf(source, k);
        auto* target = reinterpret_cast<Word<V * sizeof(Array)>*>(&ahead_[i][k][a]);
        if constexpr (kHasEdges) {
          *target = AsWord(LoadPack<V>(pack));  // another row may read a part of the same sector
        } else {
          *target = LoadWhole(pack);
        }
      }
    });
  }

  __device__ __forceinline__ void FetchEdges(int64_t row) {
    internal::ForEachIndex<kInputs>([&](auto index) {
      constexpr int a = decltype(index)::value;
      using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
      const Array* source = InputOf<a>(program_) + row * Width();
      JOF_UNROLL
      for (int e = 0; e < kEdges; ++e) {
        Array element{};
        if (HasEdge(e)) element = source[edge_at_[e]];
        internal::At<a>(edges_[e][0]) = Accumulator<Array>::Load(element);
      }
    });
  }

  // Loads packs element by element, for unaligned arrays. Loops keep the code short, so that it
  // compiles fast.
  __device__ __forceinline__ void FetchElements(int64_t row, int i) {
    internal::ForEachIndex<kInputs>([&](auto index) {
      constexpr int a = decltype(index)::value;
      const auto* source = InputOf<a>(program_) + row * Width() + first_;
#pragma unroll 1
      for (int k = 0; k < kHeld; ++k) {
        uint4 pack{};
#pragma unroll 1
        for (int j = 0; j < V; ++j) {
          if (Has(k)) internal::SetElement(j, source[k * step_ + j], &pack);
        }
        JOF_UNROLL
        for (int held = 0; held < kHeld; ++held) {
          if (held == k) ahead_[i][held][a] = pack;
        }
      }
    });
  }

  __device__ __forceinline__ void Unpack() {
    JOF_UNROLL
    for (int i = 0; i < kRows; ++i) {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        internal::ForEachIndex<kInputs>([&](auto index) {
          constexpr int a = decltype(index)::value;
          using Array = decltype(ElementOfPointer(InputOf<a>(program_)));
          Compute<Array> x[V];
          internal::LoadShared<Array>(&ahead_[i][k][a], x);
          JOF_UNROLL
          for (int j = 0; j < V; ++j) internal::At<a>(x_[i][k][j]) = x[j];
        });
        JOF_UNROLL
        for (int j = 0; j < V; ++j) program_.Prepare(x_[i][k][j]);
      }
    }
    JOF_UNROLL
    for (int e = 0; e < kEdges; ++e) program_.Prepare(edges_[e][0]);
  }

  template <typename S>
  __device__ __forceinline__ void LoadVectorOf(const void* data, int k, C (&v)[V]) const {
    if (!Has(k)) return;
    const S* source = static_cast<const S*>(data) + PackAt(k);
    if constexpr (kHasEdges) {
      JOF_UNROLL
      for (int j = 0; j < V; ++j) v[j] = static_cast<C>(Accumulator<S>::Load(source[j]));
    } else {
      const Pack<S, V> pack = LoadPack<V>(source);
      JOF_UNROLL
      for (int j = 0; j < V; ++j) v[j] = static_cast<C>(Accumulator<S>::Load(pack.elem[j]));
    }
  }
  __device__ __forceinline__ void LoadVectors(int k, C (&v)[V][kVectors + 1]) const {
    if constexpr (kVectors > 0) {
      if constexpr (kShares) {
        if (are_plain_) {  // one branch for most checks
          const int column = Has(k) ? PackAt(k) : 0;
          JOF_UNROLL
          for (int i = 0; i < kVectors; ++i) {
            const auto* data = static_cast<const float*>(program_.vectors[i].data);
            if (i == 0 || data != nullptr) {
              const Pack<float, V> pack = LoadPack<V>(data + column);
              JOF_UNROLL
              for (int j = 0; j < V; ++j) v[j][i] = pack.elem[j];
            } else {
              JOF_UNROLL
              for (int j = 0; j < V; ++j) v[j][i] = program_.Missing(i);
            }
          }
          return;
        }
      }
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        C columns[V];
        if constexpr (Program::kIsTraced) {
          const internal::PackPlace<V> pack{PackAt(k), Width()};
          const bool is_packed = !kHasEdges && plan_.is_packed && Has(k);
          if (!NobodyHas(k)) program_.LoadVector(i, pack, is_packed, columns);
        } else {
          const RowVector& vector = program_.vectors[i];
          JOF_UNROLL
          for (int j = 0; j < V; ++j) columns[j] = program_.Missing(i);
          if (vector.is_f32 && vector.data != nullptr) {
            LoadVectorOf<float>(vector.data, k, columns);
          } else if (vector.data != nullptr) {
            LoadVectorOf<T>(vector.data, k, columns);
          }
        }
        JOF_UNROLL
        for (int j = 0; j < V; ++j) v[j][i] = columns[j];
      }
    }
  }

  __device__ __forceinline__ void LoadEdgeVectors(int e, C (&v)[1][kVectors + 1]) const {
    if constexpr (kVectors > 0) {
      JOF_UNROLL
      for (int i = 0; i < kVectors; ++i) {
        C value[1];
        const internal::PackPlace<1> place{edge_at_[e], Width()};
        if constexpr (Program::kIsTraced) {
          program_.LoadVector(i, place, false, value);
        } else {
          internal::LoadVector<T>(program_.vectors[i], place, program_.Missing(i), value);
        }
        v[0][i] = value[0];
      }
    }
  }

  // Writes the results of rows that are `apart`.
  __device__ __forceinline__ void Finish(int64_t row, int apart, const Row (&facts)[kRows]) {
    if constexpr (kShares) {
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        if (NobodyHas(k)) break;
        C v[V][kVectors + 1];
        if constexpr (!kKeeps) LoadVectors(k, v);
        JOF_UNROLL
        for (int i = 0; i < kRows; ++i) {
          Map(row + i * apart, row + i * apart < plan_.rows, i, k, facts[i],
              kKeeps ? vectors_[k] : v);
        }
      }
    }
    JOF_UNROLL
    for (int i = 0; i < kRows; ++i) {
      const int64_t here = row + i * apart;
      if (here >= plan_.rows) continue;
      if constexpr (kHasMap && !kShares) {
        JOF_UNROLL
        for (int k = 0; k < kHeld; ++k) {
          if (NobodyHas(k)) break;
          C v[V][kVectors + 1];
          if constexpr (!kKeeps) LoadVectors(k, v);
          Map(here, true, i, k, facts[i], kKeeps ? vectors_[k] : v);
        }
        JOF_UNROLL
        for (int e = 0; e < kEdges; ++e) {
          if (MayHaveEdge(e)) MapEdge(here, e, facts[i]);
        }
      }
      if (lane_ == 0) program_.End(here, facts[i]);
    }
  }

  __device__ __forceinline__ void Map(int64_t row, bool exists, int i, int k, const Row& facts,
                                      const C (&v)[V][kVectors + 1]) {
    C sums[V][kColumnSums + 1];
    typename ResultsOf<Program>::type y[V];
    JOF_UNROLL
    for (int j = 0; j < V; ++j) {
      program_.Map(facts, PackAt(k) + j, x_[i][k][j], v[j], y[j], sums[j]);
      JOF_UNROLL
      for (int s = 0; s < kColumnSums; ++s) column_sums_[k][s][j] += sums[j][s];
    }
    internal::MapNamed<V>(program_, facts, PackAt(k), x_[i][k], y);
    internal::ForEachIndex<kOutputs>([&](auto index) {
      constexpr int o = decltype(index)::value;
      using Array = decltype(ElementOfPointer(OutputOf<o>(program_)));
      Pack<Array, V> out;
      JOF_UNROLL
      for (int j = 0; j + 1 < V; j += 2) {
        Accumulator<Array>::Store2(internal::At<o>(y[j]), internal::At<o>(y[j + 1]), &out.elem[j]);
      }
      if constexpr (V == 1) out.elem[0] = Accumulator<Array>::Store(internal::At<o>(y[0]));
      Array* target = PackOf(OutputOf<o>(program_) + row * Width() + first_, k);
      if (!exists || !Has(k)) return;
      if (!Program::kIsTraced || plan_.is_packed) {
        StorePack(target, out);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) target[j] = out.elem[j];
      }
    });
  }

  __device__ __forceinline__ void MapEdge(int64_t row, int e, const Row& facts) {
    if (!HasEdge(e)) return;
    C v[1][kVectors + 1], sums[kColumnSums + 1];
    if constexpr (!kKeeps) LoadEdgeVectors(e, v);
    typename ResultsOf<Program>::type y[1];
    program_.Map(facts, edge_at_[e], edges_[e][0], (kKeeps ? edge_vectors_[e] : v)[0], y[0], sums);
    internal::MapNamed<1>(program_, facts, edge_at_[e], edges_[e], y);
    internal::ForEachIndex<kOutputs>([&](auto index) {
      constexpr int o = decltype(index)::value;
      using Array = decltype(ElementOfPointer(OutputOf<o>(program_)));
      OutputOf<o>(program_)[row * Width() + edge_at_[e]] =
          Accumulator<Array>::Store(internal::At<o>(y[0]));
    });
  }

  // Sets elements that this thread does not have to values that do not affect the reduction.
  template <int r>
  __device__ __forceinline__ void Mask(int i, const Row& facts) {
    // All threads have all packs, wherever the row begins.
    const bool has_all = kHasEdges && kHeld * step_ + V - 1 <= Width();
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (has_all || NobodyHas(k)) break;
      // All threads take the same branch.
      if (kShares && (k + 1) * step_ <= Width()) continue;
      if (Has(k)) continue;
      // A branch, as in Reduce, unless this is done once.
      if constexpr (!kHasEdges && !Program::KeepsNeutral()) asm volatile("");
      JOF_UNROLL
      for (int j = 0; j < V; ++j) {
        JOF_UNROLL
        for (int a = 0; a < kInputs; ++a) {
          x_[i][k][j][a] = program_.template Neutral<r>(facts, a);
        }
      }
    }
    JOF_UNROLL
    for (int e = 0; e < kEdges; ++e) {
      JOF_UNROLL
      for (int a = 0; a < kInputs; ++a) {
        if (!HasEdge(e)) edges_[e][0][a] = program_.template Neutral<r>(facts, a);
      }
    }
  }

  // Accumulates the elements that this thread has of a row.
  template <int r, int kCount>
  __device__ __forceinline__ void Accumulate(int i, const Row& facts, C (&sum)[kCount]) {
    C values[kWays][kCount];
    internal::Clear<r>(program_, values);
    [[maybe_unused]] const auto has_element = [](int) { return false; };  // of an absent pack
    JOF_UNROLL
    for (int k = 0; k < kHeld; ++k) {
      if (NobodyHas(k)) break;
      C v[V][kVectors + 1];
      if constexpr (!kKeeps) {
        if (Program::UsesVectors(r)) LoadVectors(k, v);
      }
      if constexpr (Program::kIsTraced) {
        internal::AccumulatePack<r>(program_, facts, PackAt(k), x_[i][k], kKeeps ? vectors_[k] : v,
                                    Has(k), has_element, values);
      } else {
        JOF_UNROLL
        for (int j = 0; j < V; ++j) {
          program_.template Accumulate<r>(facts, x_[i][k][j], kKeeps ? vectors_[k][j] : v[j],
                                          values[(k * V + j) % kWays]);
        }
      }
    }
    JOF_UNROLL
    for (int e = 0; e < kEdges; ++e) {
      if (!MayHaveEdge(e)) break;
      C v[1][kVectors + 1];
      if constexpr (!kKeeps) {
        if (Program::UsesVectors(r)) LoadEdgeVectors(e, v);
      }
      const auto& of_edge = kKeeps ? edge_vectors_[e] : v;
      if constexpr (Program::kIsTraced) {
        internal::AccumulatePack<r>(program_, facts, edge_at_[e], edges_[e], of_edge, HasEdge(e),
                                    has_element, values);
      } else {
        program_.template Accumulate<r>(facts, edges_[e][0], of_edge[0], values[e % kWays]);
      }
    }
    internal::CombineWays<r>(program_, values);
    JOF_UNROLL
    for (int c = 0; c < kCount; ++c) sum[c] = values[0][c];
  }

  template <int r>
  __device__ __forceinline__ void Reduce(Row (&facts)[kRows]) {
    if constexpr (r < kReductions) {
      constexpr int kCount = Program::ValuesOf(r);
      union {  // the values per row, and all of them as one array
        C of_rows[kRows][kCount];
        C all[kRows * kCount];
      };
      if constexpr (!Program::kIsTraced) {
        constexpr bool kMasks = r == 0 || !Program::KeepsNeutral();
        if (kMasks && (kHasEdges || kHeld * step_ > plan_.n)) {
          asm volatile("");  // a branch, not a select for each element
          JOF_UNROLL
          for (int i = 0; i < kRows; ++i) Mask<r>(i, facts[i]);
        }
      }
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) Accumulate<r>(i, facts[i], of_rows[i]);
      unsigned turn = r;
      internal::ReduceTeam<kIsCluster>({Lanes(), 0, 0, Blocks(), 0}, Exchange(), &turn, all,
                                       internal::CombineEach<r, Program>{program_});
      JOF_UNROLL
      for (int i = 0; i < kRows; ++i) {
        program_.template Finish<r>(of_rows[i], static_cast<C>(Width()), &facts[i]);
      }
      Reduce<r + 1>(facts);
    }
  }

  __device__ __forceinline__ void StoreColumnSums() const {
    __shared__ alignas(kPackBytes) C shared[kWholeRowsThreads * V];
    C* target = program_.partial_sums + int64_t{blockIdx.x} * program_.wanted_sums * Width();
    JOF_UNROLL
    for (int s = 0; s < kColumnSums; ++s) {
      if (!program_.WantsSum(s)) continue;
      JOF_UNROLL
      for (int k = 0; k < kHeld; ++k) {
        __syncthreads();
        JOF_UNROLL
        for (int j = 0; j < V; ++j) shared[threadIdx.x * V + j] = column_sums_[k][s][j];
        __syncthreads();
        internal::AddTeams(shared, static_cast<int>(blockDim.x) / Lanes(), step_,
                           min(step_, Width() - k * step_), target + k * step_);
      }
      target += Width();
    }
  }

  const Program& program_;
  const WholeRowsPlan& plan_;
  int lane_;                // in the team
  int first_;               // column of this thread's first pack
  int step_;                // columns from one pack of this thread to the next
  bool are_plain_ = false;  // the first row vector is f32, the others are f32 or absent
  Whole ahead_[kRows][kHeld][kInputs];
  typename Program::Values x_[kRows][kHeld][V];
  int edge_at_[kEdges + 1];                        // columns of head and tail elements; -1: none
  typename Program::Values edges_[kEdges + 1][1];  // their values, each as a pack of one
  C vectors_[kKeeps ? kHeld : 1][V][kVectors + 1];
  C edge_vectors_[kEdges + 1][1][kVectors + 1];  // if kKeeps
  C column_sums_[kHeld][kColumnSums + 1][V] = {};
};

// The blocks that a multiprocessor must have enough registers for.
template <typename Program, int V, int kHeld, int kRows, int kEdges, bool kIsCluster = false>
JOF_HOST_DEVICE constexpr int WholeRowsBlocks() {
  constexpr bool kNarrow = Program::kPack > 4;
  if (kIsCluster) return 2;
  if (Program::kColumnSums > 0) return V * kHeld * Program::kInputs <= 32 ? 2 : 1;
  if (Program::kInputs > 1) return 2;
  // With 4 instead of 3, log_softmax of bf16 610687 x 131 takes 107 us instead of 125.
  if (kEdges > 0) return kNarrow && Program::kVectors == 0 ? 4 : 3;
  if (Program::kVectors > 0 && V * kHeld * kRows > 32) return 3;  // with 4, values would spill
  // With more blocks, layer norm of 400000 x 100 takes 55 us instead of 60.
  const bool shares = !Program::kIsTraced && V < Program::kPack && Program::kVectors > 0;
  const bool has_few = !kNarrow || kRows == 1 || shares;
  return has_few && !Program::NeedsRegisters() ? 4 : 3;
}

template <typename Program, int V, int kHeld, int kRows, int kEdges, int kThreads, bool kIsCluster>
__global__ void __launch_bounds__(
    kThreads, kThreads > kWholeRowsThreads
                  ? 1
                  : WholeRowsBlocks<Program, V, kHeld, kRows, kEdges, kIsCluster>())
    WholeRowsKernel(const __grid_constant__ Program program,
                    const __grid_constant__ WholeRowsPlan plan) {
  if constexpr (!kIsCluster || internal::kHasClusters) {  // other cases are never planned
    if constexpr (Program::HasSide() && (kIsCluster || kThreads > kWholeRowsThreads)) {
      if (blockIdx.x >= plan.row_blocks) {
        program.RunSide(static_cast<int>(blockIdx.x - plan.row_blocks));
        return;
      }
    }
    WholeRowsBody<Program, V, kHeld, kRows, kEdges, kThreads, kIsCluster>(program, plan).Run();
  }
}

JOF_NAMESPACE_END
