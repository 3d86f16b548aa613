#include <pybind11/stl.h>

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "bind.h"
#include "cpu/kernels.h"
#include "ops/permute_plan.h"

namespace {

// In the order of jof::PermuteStrategy.
constexpr const char* kStrategyNames[] = {"copy",         "gather", "rows",       "interleave",
                                          "deinterleave", "tile",   "small tile", "runs"};

pybind11::dict DescribePermute(const std::vector<int64_t>& shape, const std::vector<int64_t>& axes,
                               int itemsize, int64_t alignment) {
  std::vector<int64_t> sorted = axes;
  std::sort(sorted.begin(), sorted.end());
  for (size_t i = 0; i < sorted.size(); ++i) {
    if (sorted[i] != static_cast<int64_t>(i)) {
      throw std::invalid_argument("permute_plan: axes must be a permutation");
    }
  }
  jof::PermutePlan plan;
  if (axes.size() != shape.size() ||
      !jof::PlanPermute(shape.data(), axes.data(), static_cast<int64_t>(shape.size()), itemsize,
                        alignment, &plan)) {
    throw std::invalid_argument("permute_plan: wrong number of axes or too many dimensions");
  }
  std::vector<int64_t> sizes, order(static_cast<size_t>(plan.rank)), tile;
  for (int d = 0; d < plan.rank; ++d) {
    sizes.push_back(plan.dims[d].size);
    tile.push_back(plan.tile[d]);
    order[static_cast<size_t>(plan.in_order[d])] = d;
  }
  pybind11::dict result;
  result["strategy"] = kStrategyNames[static_cast<int>(plan.strategy)];
  result["unit_bytes"] = plan.unit_bytes;
  result["index_bytes"] = plan.index_bytes;
  result["shape"] = sizes;
  result["axes"] = order;
  result["tile"] = tile;
  result["in_run"] = plan.in_run;
  result["out_run"] = plan.out_run;
  return result;
}

}  // namespace

PYBIND11_MODULE(_cpu, m) {
  jof::BindTargets(m);
  m.def("instruction_set", [] { return jof::BestCpuKernels().name; });
  m.def("permute_plan", DescribePermute, pybind11::arg("shape"), pybind11::arg("axes"),
        pybind11::arg("itemsize"), pybind11::arg("alignment") = 16);
}
