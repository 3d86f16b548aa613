// Checks the planner against its definitions, on examples and on random problems.
#include <algorithm>

#include "permute_problem.h"

using namespace jof;

constexpr int64_t kPlanSize = 3000;

bool SamePlan(const PermutePlan& a, const PermutePlan& b) {
  bool same = a.strategy == b.strategy && a.unit_bytes == b.unit_bytes &&
              a.index_bytes == b.index_bytes && a.units == b.units && a.rank == b.rank &&
              a.in_run == b.in_run && a.out_run == b.out_run;
  for (int d = 0; same && d < a.rank; ++d) {
    same = a.dims[d].size == b.dims[d].size && a.dims[d].in_stride == b.dims[d].in_stride &&
           a.dims[d].out_stride == b.dims[d].out_stride && a.in_order[d] == b.in_order[d] &&
           a.tile[d] == b.tile[d];
  }
  return same;
}

// The plan's merged dimensions as a separate problem.
PermuteProblem Merged(const PermutePlan& plan, int64_t alignment) {
  const auto rank = static_cast<size_t>(plan.rank);
  PermuteProblem p{std::vector<int64_t>(rank), std::vector<int64_t>(rank), plan.unit_bytes,
                   std::max<int64_t>(alignment, plan.unit_bytes)};
  for (size_t k = 0; k < rank; ++k) {
    const auto d = static_cast<size_t>(plan.in_order[k]);
    p.shape[k] = plan.dims[d].size;
    p.axes[d] = static_cast<int64_t>(k);
  }
  return p;
}

// A tile covers all of each dimension in a run, except the run's slowest dimension, and one element
// of every dimension outside the runs.
void CheckTile(const PermutePlan& plan) {
  bool in_a_run[kMaxPermuteRank] = {};
  const auto check_run = [&](int run, const auto& fastest) {
    JOF_CHECK(run >= 1 && run <= plan.rank, "a run of %d dimensions", run);
    for (int k = 0; k < run; ++k) {
      const int d = fastest(k);
      in_a_run[d] = true;
      JOF_CHECK(k == run - 1 || plan.tile[d] == plan.dims[d].size, "a part of dimension %d", d);
    }
  };
  check_run(plan.in_run, [&](int k) { return plan.fastest_in(k); });
  check_run(plan.out_run, [&](int k) { return plan.fastest_out(k); });
  for (int d = 0; d < plan.rank; ++d) {
    JOF_CHECK(plan.tile[d] >= 1 && plan.tile[d] <= plan.dims[d].size, "tile of %ld of %ld",
              long(plan.tile[d]), long(plan.dims[d].size));
    JOF_CHECK(in_a_run[d] || plan.tile[d] == 1, "dimension %d is in no run", d);
  }
  // A block's shared memory holds the tile with up to 61 bytes of padding after each row.
  int64_t row = plan.unit_bytes;
  for (int k = 0; k < plan.in_run; ++k) row *= plan.tile[plan.fastest_in(k)];
  const int64_t bytes = plan.tile_units() * plan.unit_bytes / row * (row + 61);
  JOF_CHECK(bytes + 48 <= 48 << 10, "a tile of %ld bytes", long(bytes));
}

// No dimension is in both runs, and these are long enough.
void CheckTileRuns(const PermutePlan& plan) {
  const bool is_small = plan.strategy == PermuteStrategy::kSmallTile;
  bool in_a_run[kMaxPermuteRank] = {};
  for (int k = 0; k < plan.in_run; ++k) in_a_run[plan.fastest_in(k)] = true;
  for (int k = 0; k < plan.out_run; ++k) {
    JOF_CHECK(!in_a_run[plan.fastest_out(k)], "dimension %d twice", plan.fastest_out(k));
  }
  const TileRuns runs = RunsOf(plan);
  JOF_CHECK(plan.in_run > 0 && plan.out_run > 0 && plan.in_run <= kMostJoined &&
                plan.out_run <= kMostJoined &&
                plan.rank - plan.in_run - plan.out_run + 2 <= kMostTiled,
            "runs of %d and %d of %d dimensions", plan.in_run, plan.out_run, plan.rank);
  const int64_t least = is_small ? 8 : 64 / plan.unit_bytes;
  JOF_CHECK(runs.in.units >= least && runs.out.units >= least, "runs of %ld and %ld units",
            long(runs.in.units), long(runs.out.units));
  JOF_CHECK(plan.index_bytes == 4 || plan.in_run + plan.out_run == 2, "%d and %d dimensions",
            plan.in_run, plan.out_run);
  if (!is_small) return;
  const SmallTileShape shape = SmallTileShapeOf(runs);
  JOF_CHECK(shape.in * shape.out == kSmallTileUnits, "tiles of %d x %d units", shape.in, shape.out);
  const int64_t y = (runs.in.units + shape.in - 1) / shape.in;
  const int64_t z = plan.units / (runs.in.units * runs.out.units);
  JOF_CHECK(y < 1 << 16 && z < 1 << 16, "a grid of %ld x %ld blocks", long(y), long(z));
}

void CheckPlan(const PermuteProblem& p) {
  const PermutePlan plan = Plan(p);
  const int64_t size = Product(p.shape);
  JOF_CHECK(plan.units * plan.unit_bytes == size * p.element_bytes, "%ld units of %d bytes",
            long(plan.units), plan.unit_bytes);
  JOF_CHECK(p.alignment % plan.unit_bytes == 0, "units of %d bytes, alignment %ld", plan.unit_bytes,
            long(p.alignment));
  JOF_CHECK((plan.rank <= 1) == (plan.strategy == PermuteStrategy::kCopy), "rank %d", plan.rank);
  JOF_CHECK((plan.in_run > 0) == (plan.strategy >= PermuteStrategy::kTile), "run %d", plan.in_run);
  if (plan.strategy == PermuteStrategy::kTile || plan.strategy == PermuteStrategy::kSmallTile) {
    CheckTileRuns(plan);
  }
  JOF_CHECK((plan.gathered > 0) == (plan.strategy <= PermuteStrategy::kGather), "%d units",
            plan.gathered);
  JOF_CHECK(p.alignment % std::max(1, plan.gathered * plan.unit_bytes) == 0, "%d units",
            plan.gathered);

  // Strides and orders are right, and no dimensions are left to merge.
  std::vector<bool> seen(static_cast<size_t>(plan.rank));
  int64_t in_stride = 1, out_stride = 1;
  for (int k = 0; k < plan.rank; ++k) {
    const PermuteDim &in = plan.dims[plan.fastest_in(k)], &out = plan.dims[plan.fastest_out(k)];
    JOF_CHECK(in.size > 1 && in.in_stride == in_stride, "input stride %ld", long(in.in_stride));
    JOF_CHECK(out.out_stride == out_stride, "output stride %ld", long(out.out_stride));
    in_stride *= in.size;
    out_stride *= out.size;
    JOF_CHECK(!seen[static_cast<size_t>(plan.fastest_in(k))], "dimension %d twice",
              plan.fastest_in(k));
    seen[static_cast<size_t>(plan.fastest_in(k))] = true;
    JOF_CHECK(k == 0 || plan.fastest_in(k) != plan.fastest_in(k - 1) - 1, "unmerged %d", k);
  }

  // The plan moves every element to its place.
  ForEachElement(p, [&](int64_t i, int64_t o) {
    int64_t unit = o * p.element_bytes / plan.unit_bytes, from = 0;
    for (int d = 0; d < plan.rank; ++d) {
      from += unit / plan.dims[d].out_stride % plan.dims[d].size * plan.dims[d].in_stride;
    }
    const int64_t byte = from * plan.unit_bytes + o * p.element_bytes % plan.unit_bytes;
    JOF_CHECK(byte == i * p.element_bytes, "output %ld is read from byte %ld", long(o), long(byte));
  });

  JOF_CHECK(SamePlan(plan, Plan(Merged(plan, p.alignment))), "another plan of what was merged");
}

PermutePlan PlanOf(std::vector<int64_t> shape, std::vector<int64_t> axes, int element_bytes,
                   int64_t alignment = 16) {
  return Plan({std::move(shape), std::move(axes), element_bytes, alignment});
}

void CheckStrategy(const PermutePlan& plan, PermuteStrategy want, int rank, int unit_bytes) {
  JOF_CHECK(plan.strategy == want && plan.rank == rank && plan.unit_bytes == unit_bytes,
            "strategy %d, rank %d, units of %d bytes", static_cast<int>(plan.strategy), plan.rank,
            plan.unit_bytes);
}

// Checks that kTile joins so many dimensions of the input and of the output.
void CheckRuns(const PermutePlan& plan, int in, int out) {
  JOF_CHECK(plan.strategy == PermuteStrategy::kTile && plan.in_run == in && plan.out_run == out,
            "strategy %d, runs of %d and %d dimensions", static_cast<int>(plan.strategy),
            plan.in_run, plan.out_run);
}

void CheckRows(const PermutePlan& plan, OutRows want) {
  JOF_CHECK(plan.strategy == PermuteStrategy::kTile && OutRowsOf(plan, RunsOf(plan), true) == want,
            "strategy %d, rows %d", static_cast<int>(plan.strategy),
            static_cast<int>(OutRowsOf(plan, RunsOf(plan), true)));
}

int main() {
  // Permutations that move nothing: an identity, dimensions of size 1, a scalar, an empty array.
  CheckStrategy(PlanOf({6, 1, 35}, {1, 0, 2}, 4), PermuteStrategy::kCopy, 1, 8);
  CheckStrategy(PlanOf({64}, {0}, 1), PermuteStrategy::kCopy, 1, 16);
  CheckStrategy(PlanOf({1, 1}, {1, 0}, 2), PermuteStrategy::kCopy, 0, 2);
  CheckStrategy(PlanOf({}, {}, 2), PermuteStrategy::kCopy, 0, 2);
  JOF_CHECK(PlanOf({3, 0, 5}, {2, 1, 0}, 4).units == 0, "an empty array");
  // Small arrays.
  CheckStrategy(PlanOf({39, 64}, {1, 0}, 4), PermuteStrategy::kGather, 2, 4);
  CheckStrategy(PlanOf({4, 128, 16, 64}, {0, 2, 1, 3}, 2), PermuteStrategy::kGather, 4, 16);
  // Adjacent dimensions merge, even across a dimension of size 1.
  CheckStrategy(PlanOf({2048, 1, 3, 683}, {2, 3, 1, 0}, 4), PermuteStrategy::kTile, 2, 4);
  // Whole rows, in units as wide as their length and the alignment allow.
  for (const int64_t alignment : {2, 4, 8, 16}) {
    CheckStrategy(PlanOf({4, 2048, 16, 64}, {0, 2, 1, 3}, 2, alignment),
                  alignment == 2 ? PermuteStrategy::kRows : PermuteStrategy::kGather, 4,
                  static_cast<int>(alignment));
  }
  CheckStrategy(PlanOf({4, 512, 16, 66}, {0, 2, 1, 3}, 2), PermuteStrategy::kGather, 4, 4);
  CheckStrategy(PlanOf({4, 512, 16, 65}, {0, 2, 1, 3}, 2), PermuteStrategy::kRows, 4, 2);
  // A last dimension of one unit is dropped.
  CheckStrategy(PlanOf({640, 640, 4}, {1, 0, 2}, 4), PermuteStrategy::kTile, 2, 16);
  CheckStrategy(PlanOf({640, 640, 4}, {1, 0, 2}, 4, 4), PermuteStrategy::kRuns, 3, 4);
  // Images.
  CheckStrategy(PlanOf({8, 224, 224, 3}, {0, 3, 1, 2}, 2), PermuteStrategy::kDeinterleave, 3, 2);
  CheckStrategy(PlanOf({8, 3, 224, 224}, {0, 2, 3, 1}, 2), PermuteStrategy::kInterleave, 3, 2);
  CheckStrategy(PlanOf({32768, 644, 4}, {0, 2, 1}, 2), PermuteStrategy::kDeinterleave, 3, 2);
  CheckStrategy(PlanOf({8, 224, 224, 64}, {0, 3, 1, 2}, 1), PermuteStrategy::kTile, 3, 1);
  // Short dimensions on both sides are joined with their neighbours, unless both would take one.
  CheckRuns(PlanOf({1000, 50, 7, 9}, {3, 1, 2, 0}, 1), 2, 1);
  CheckRuns(PlanOf({19, 169, 8, 2, 7, 512}, {3, 5, 0, 1, 4, 2}, 1), 1, 3);
  CheckRuns(PlanOf({1795, 13, 3, 64, 3}, {4, 3, 0, 1, 2}, 2), 2, 1);
  CheckRuns(PlanOf({37, 1024, 128}, {2, 1, 0}, 2), 1, 2);
  CheckRuns(PlanOf({30, 5, 7, 40, 3, 50}, {5, 4, 3, 2, 0, 1}, 2), 3, 2);
  CheckStrategy(PlanOf({20, 100000, 30}, {2, 1, 0}, 1), PermuteStrategy::kRuns, 3, 1);
  // So that rows of the output are whole packs, a third dimension of 4 joins 249 x 8.
  CheckRuns(PlanOf({5, 249, 8, 4, 154, 13}, {0, 5, 4, 3, 2, 1}, 1), 2, 3);
  // A longer run whose rows are apart would have emptier tiles.
  CheckRuns(PlanOf({45, 120, 5, 200}, {2, 1, 3, 0}, 8), 1, 1);
  // Large arrays of unaligned rows have long parts, unless the last part of a row would be short.
  CheckRows(PlanOf({4101, 4103}, {1, 0}, 2), OutRows::kLong);
  CheckRows(PlanOf({4081, 4103}, {1, 0}, 2), OutRows::kApart);
  CheckRows(PlanOf({1501, 1503}, {1, 0}, 4), OutRows::kLong);
  CheckRows(PlanOf({33, 65, 129, 127}, {2, 0, 3, 1}, 4), OutRows::kJoined);
  CheckRows(PlanOf({113, 30001}, {1, 0}, 4), OutRows::kApart);
  // Tiles that would be half empty.
  CheckStrategy(PlanOf({4, 3, 32768, 30}, {1, 0, 3, 2}, 4), PermuteStrategy::kRuns, 4, 4);
  // Tiles that rows of this length fill.
  CheckStrategy(PlanOf({97, 1 << 20}, {1, 0}, 1), PermuteStrategy::kTile, 2, 1);
  CheckStrategy(PlanOf({45, 1000003}, {1, 0}, 4), PermuteStrategy::kTile, 2, 4);
  // Small arrays are gathered if warps use most of the sectors that they read.
  CheckStrategy(PlanOf({70804, 7}, {1, 0}, 1), PermuteStrategy::kGather, 2, 1);
  // Otherwise they take small tiles, except narrow units in whole packs.
  CheckStrategy(PlanOf({16, 23, 1024}, {2, 1, 0}, 4), PermuteStrategy::kSmallTile, 3, 4);
  CheckStrategy(PlanOf({1023, 1025}, {1, 0}, 8), PermuteStrategy::kSmallTile, 2, 8);
  CheckStrategy(PlanOf({1025, 1025}, {1, 0}, 8), PermuteStrategy::kTile, 2, 8);
  CheckStrategy(PlanOf({1023, 1025}, {1, 0}, 1), PermuteStrategy::kSmallTile, 2, 1);
  CheckStrategy(PlanOf({1025, 1025}, {1, 0}, 1), PermuteStrategy::kTile, 2, 1);
  CheckStrategy(PlanOf({512, 1 << 10}, {1, 0}, 1), PermuteStrategy::kTile, 2, 1);
  CheckStrategy(PlanOf({512, 1 << 10}, {1, 0}, 1, 1), PermuteStrategy::kSmallTile, 2, 1);
  CheckStrategy(PlanOf({4096, 51}, {1, 0}, 1), PermuteStrategy::kSmallTile, 2, 1);
  CheckStrategy(PlanOf({260, 263}, {1, 0}, 1), PermuteStrategy::kSmallTile, 2, 1);
  CheckStrategy(PlanOf({1709, 25}, {1, 0}, 1), PermuteStrategy::kGather, 2, 1);
  CheckStrategy(PlanOf({97, 1824}, {1, 0}, 1), PermuteStrategy::kGather, 2, 1);
  // So are all arrays of up to 3 MB in units of 16 bytes.
  CheckStrategy(PlanOf({41, 4096}, {1, 0}, 16), PermuteStrategy::kGather, 2, 16);
  CheckStrategy(PlanOf({71, 32, 7, 4}, {3, 1, 0, 2}, 16), PermuteStrategy::kGather, 4, 16);
  CheckStrategy(PlanOf({256, 1024}, {1, 0}, 16), PermuteStrategy::kTile, 2, 16);
  // Pixels are deinterleaved into long rows. Rows of partial packs are gathered if they are short;
  // if they are long, pixels of four elements take kRuns.
  CheckStrategy(PlanOf({64, 3000, 4}, {0, 2, 1}, 2), PermuteStrategy::kDeinterleave, 3, 2);
  CheckStrategy(PlanOf({300000, 33, 4}, {0, 2, 1}, 2), PermuteStrategy::kGather, 3, 2);
  CheckStrategy(PlanOf({3000, 3001, 4}, {0, 2, 1}, 2), PermuteStrategy::kRuns, 3, 2);
  CheckStrategy(PlanOf({3000, 3001, 3}, {0, 2, 1}, 1), PermuteStrategy::kDeinterleave, 3, 1);
  CheckStrategy(PlanOf({3000, 1201, 3}, {0, 2, 1}, 1), PermuteStrategy::kGather, 3, 1);
  // Rows are interleaved only if a warp has whole packs of each; others are gathered.
  CheckStrategy(PlanOf({20000, 3, 255}, {0, 2, 1}, 2), PermuteStrategy::kGather, 3, 2);
  CheckStrategy(PlanOf({20000, 3, 257}, {0, 2, 1}, 2), PermuteStrategy::kInterleave, 3, 2);
  // A warp reads 64 bytes, two whole sectors, of each of 8 long rows. Of 6 rows it reads 84 bytes
  // each, parts of sectors, and kRuns is faster.
  CheckStrategy(PlanOf({8, 1 << 20}, {1, 0}, 2), PermuteStrategy::kGather, 2, 2);
  CheckStrategy(PlanOf({6, 1 << 20}, {1, 0}, 2), PermuteStrategy::kRuns, 2, 2);
  // If the threads of a warp share the sectors that they read, each thread takes half a pack.
  JOF_CHECK(PlanOf({4096, 333, 4}, {0, 2, 1}, 2).gathered == 4, "pixels of four units");
  JOF_CHECK(PlanOf({8, 1 << 20}, {1, 0}, 2).gathered == 8, "eight rows");
  // Plans with 2^31 units or more use 64-bit indices.
  const int64_t half = int64_t{1} << 15;
  JOF_CHECK(PlanOf({half - 1, 2 * half}, {1, 0}, 1).index_bytes == 4, "below 2^31");
  JOF_CHECK(PlanOf({half, 2 * half}, {1, 0}, 1).index_bytes == 8, "2^31");
  JOF_CHECK(PlanOf({half, half, 16}, {1, 0, 2}, 1).index_bytes == 4, "2^30 wider units");
  // The largest supported number of dimensions, and more.
  std::vector<int64_t> many(42, 2), axes(42);
  for (size_t i = 0; i < axes.size(); ++i) axes[i] = static_cast<int64_t>(axes.size() - 1 - i);
  PermutePlan plan;
  JOF_CHECK(!PlanPermute(many.data(), axes.data(), 42, 1, 1, &plan), "42 dimensions");
  many.resize(40);
  axes.erase(axes.begin(), axes.begin() + 2);
  JOF_CHECK(PlanPermute(many.data(), axes.data(), 40, 1, 1, &plan) && plan.rank == 40 &&
                plan.index_bytes == 8,
            "40 dimensions");
  CheckTile(plan);

  std::mt19937 random(1);
  for (int i = 0; i < 3000; ++i) CheckPlan(RandomPermuteProblem(&random, kPlanSize));
  for (int64_t size = kPlanSize; size < int64_t{1} << 40; size *= 4) {
    for (int i = 0; i < 300; ++i) {
      const PermuteProblem p = RandomPermuteProblem(&random, size);
      PermutePlan runs = Plan(p);
      if (runs.rank <= 1) continue;
      internal::SetStrategy(&runs, PermuteStrategy::kRuns, p.alignment);
      CheckTile(runs);
      for (const auto strategy : {PermuteStrategy::kTile, PermuteStrategy::kSmallTile}) {
        if (!internal::Applies(strategy, runs, p.alignment)) continue;
        internal::SetStrategy(&runs, strategy, p.alignment);
        CheckTileRuns(runs);
      }
    }
  }
}
