// Shared by the tests of elementwise CUDA kernels: launches with arrays at chosen offsets, scalars
// and broadcast operands, compared with a reference on the host. Everything outside the elements
// that a call should write must stay untouched.
#pragma once

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/types.h"
#include "device.h"
#include "elementwise_values.h"

using jof::Accumulator;
using jof::Compute;

constexpr int64_t kPool = (1 << 14) + 64;  // elements
constexpr int kMaxArrays = 4;

inline bool g_brief = false;  // under compute-sanitizer
inline int64_t g_launches = 0;

class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) {
    CHECK_CUDA(cudaMalloc(&data_, static_cast<size_t>(bytes > 0 ? bytes : 1)));
  }
  ~DeviceMemory() { cudaFree(data_); }
  DeviceMemory(const DeviceMemory&) = delete;
  uint8_t* data() const { return static_cast<uint8_t*>(data_); }

 private:
  void* data_;
};

template <typename T>
double ToValue(T x) {
  return static_cast<double>(Accumulator<T>::Load(x));
}

// ---- a kernel, its inputs and its reference ----

// The expected bytes of an element of each output, and the tolerances: see IsClose.
struct Wanted {
  alignas(16) uint8_t bytes[kMaxArrays][16];
  double slack[kMaxArrays];
};

struct Case {
  int64_t n;
  int64_t in_offsets[kMaxArrays];  // elements after a 64-byte boundary
  int64_t out_offsets[kMaxArrays];
  unsigned scalars = 0;     // one bit per input
  unsigned unwanted = 0;    // one bit per output
  unsigned broadcasts = 0;  // one bit per input: element i reads (i / inner) % count
  int64_t inner = 1, count = 1;
};

inline Case Common(int64_t n, int64_t offset, unsigned scalars = 0, unsigned unwanted = 0) {
  return {n, {offset, offset, offset, offset}, {offset, offset, offset, offset}, scalars, unwanted};
}

class Subject {
 public:
  using Launch = std::function<cudaError_t(const Case&, const void* const* in, void* const* out)>;
  // Takes one element of each input; `packed` tells whether it should be part of a pack.
  using Reference = std::function<void(const void* const* in, bool packed, Wanted* wanted)>;
  using Compare = std::function<bool(const uint8_t* got, const uint8_t* want, double slack)>;

  std::string name;
  int pack;  // elements
  std::vector<int64_t> out_bytes;
  int64_t pool = kPool;  // the number of elements of each input
  std::vector<std::vector<uint8_t>> inputs;
  Launch launch;
  Reference reference;
  Compare compare;

  // Launches all cases, then checks all outputs. They share an allocation, with guards in between.
  void Run(const std::vector<Case>& cases) {
    if (pools_.empty()) Upload();
    std::vector<int64_t> starts;  // of each wanted output of each case
    int64_t total = kGuardBytes;
    for (const Case& c : cases) {
      for (size_t k = 0; k < out_bytes.size(); ++k) {
        starts.push_back(total + c.out_offsets[k] * out_bytes[k]);
        if (c.unwanted >> k & 1) continue;
        total = starts.back() + c.n * out_bytes[k] + kGuardBytes;
        total = (total + 63) / 64 * 64;
      }
    }
    const DeviceMemory arena(total);
    CHECK_CUDA(cudaMemset(arena.data(), kGuard, static_cast<size_t>(total)));
    std::vector<std::unique_ptr<DeviceMemory>> exact;
    size_t slot = 0;
    for (const Case& c : cases) {
      const void* in[kMaxArrays] = {};
      void* out[kMaxArrays] = {};
      for (size_t k = 0; k < inputs.size(); ++k) in[k] = InputOf(c, k, &exact);
      for (size_t k = 0; k < out_bytes.size(); ++k, ++slot) {
        if (!(c.unwanted >> k & 1)) out[k] = arena.data() + starts[slot];
      }
      const cudaError_t status = launch(c, in, out);
      JOF_CHECK(status == cudaSuccess, "%s of %ld elements: %s", name.c_str(), long(c.n),
                cudaGetErrorString(status));
      ++g_launches;
    }
    std::vector<uint8_t> host(static_cast<size_t>(total));
    CHECK_CUDA(cudaMemcpy(host.data(), arena.data(), host.size(), cudaMemcpyDeviceToHost));
    slot = 0;
    for (const Case& c : cases) {
      Check(c, host.data(), &starts[slot]);
      slot += out_bytes.size();
    }
    // Check() has overwritten the outputs with guard bytes.
    for (int64_t i = 0; i < total; ++i) {
      JOF_CHECK(host[static_cast<size_t>(i)] == kGuard, "%s wrote outside of its outputs",
                name.c_str());
    }
  }

 private:
  int64_t InBytes(size_t k) const { return static_cast<int64_t>(inputs[k].size()) / pool; }

  void Upload() {
    for (const auto& input : inputs) {
      pools_.push_back(std::make_unique<DeviceMemory>(static_cast<int64_t>(input.size())));
      CHECK_CUDA(
          cudaMemcpy(pools_.back()->data(), input.data(), input.size(), cudaMemcpyHostToDevice));
    }
  }

  // A scalar is element k + 1 of input k, whatever the offset.
  int64_t ElementOf(const Case& c, size_t k, int64_t i) const {
    if (c.scalars >> k & 1) return static_cast<int64_t>(k) + 1;
    return c.in_offsets[k] + (c.broadcasts >> k & 1 ? i / c.inner % c.count : i);
  }

  const void* InputOf(const Case& c, size_t k, std::vector<std::unique_ptr<DeviceMemory>>* exact) {
    const int64_t first = ElementOf(c, k, 0) * InBytes(k);
    const uint8_t* source = pools_[k]->data() + first;
    if (!g_brief) return source;
    const int64_t elements = c.scalars >> k & 1 ? 1 : c.broadcasts >> k & 1 ? c.count : c.n;
    const int64_t bytes = elements * InBytes(k);
    exact->push_back(std::make_unique<DeviceMemory>(first + bytes));
    uint8_t* copy = exact->back()->data() + first;
    CHECK_CUDA(cudaMemcpy(copy, source, static_cast<size_t>(bytes), cudaMemcpyDeviceToDevice));
    return copy;
  }

  // Whether the template should compute element i in a pack. Packs begin after the shortest head
  // that aligns every array to its packs, or to 16 bytes if its packs are longer.
  bool IsPacked(const Case& c, int64_t i) const {
    for (int64_t head = 0; head < pack && head + pack <= c.n && pack > 1; ++head) {
      bool aligned = true;
      const auto visit = [&](int64_t bytes, int64_t offset) {
        if ((offset + head) * bytes % std::min<int64_t>(bytes * pack, 16) != 0) aligned = false;
      };
      for (size_t k = 0; k < inputs.size(); ++k) {
        if (!((c.scalars | c.broadcasts) >> k & 1)) visit(InBytes(k), c.in_offsets[k]);
      }
      for (size_t k = 0; k < out_bytes.size(); ++k) {
        if (!(c.unwanted >> k & 1)) visit(out_bytes[k], c.out_offsets[k]);
      }
      if (aligned) return i >= head && i < head + (c.n - head) / pack * pack;
    }
    return false;
  }

  Wanted Compute(const Case& c, int64_t i) const {
    const void* in[kMaxArrays];
    for (size_t k = 0; k < inputs.size(); ++k) {
      in[k] = inputs[k].data() + ElementOf(c, k, i) * InBytes(k);
    }
    Wanted wanted{};
    reference(in, IsPacked(c, i), &wanted);
    return wanted;
  }

  void Check(const Case& c, uint8_t* host, const int64_t* starts) const {
    for (int64_t i = 0; i < c.n; ++i) {
      const Wanted wanted = Compute(c, i);
      for (size_t k = 0; k < out_bytes.size(); ++k) {
        if (c.unwanted >> k & 1) continue;
        uint8_t* got = host + starts[k] + i * out_bytes[k];
        const bool same = std::memcmp(got, wanted.bytes[k], static_cast<size_t>(out_bytes[k])) == 0;
        JOF_CHECK(same || (compare && compare(got, wanted.bytes[k], wanted.slack[k])),
                  "%s: element %ld of %ld of output %ld, offsets %ld %ld %ld %ld -> %ld %ld, "
                  "scalars %u, broadcasts %u by %ld, %ld: got %s, want %s",
                  name.c_str(), long(i), long(c.n), long(k), long(c.in_offsets[0]),
                  long(c.in_offsets[1]), long(c.in_offsets[2]), long(c.in_offsets[3]),
                  long(c.out_offsets[0]), long(c.out_offsets[1]), c.scalars, c.broadcasts,
                  long(c.inner), long(c.count), Hex(got, out_bytes[k]).c_str(),
                  Hex(wanted.bytes[k], out_bytes[k]).c_str());
        std::memset(got, kGuard, static_cast<size_t>(out_bytes[k]));
      }
    }
  }

  static std::string Hex(const uint8_t* bytes, int64_t n) {
    std::string text;
    for (int64_t i = n - 1; i >= 0; --i) {
      char digits[3];
      std::snprintf(digits, sizeof(digits), "%02x", bytes[i]);
      text += digits;
    }
    return text;
  }

  std::vector<std::unique_ptr<DeviceMemory>> pools_;
};

template <typename T, typename Make>
std::vector<uint8_t> Pool(const Make& make, int64_t pool = kPool) {
  std::vector<uint8_t> bytes(static_cast<size_t>(pool) * sizeof(T));
  for (int64_t i = 0; i < pool; ++i) {
    const T x = make(i);
    std::memcpy(bytes.data() + static_cast<size_t>(i) * sizeof(T), &x, sizeof(T));
  }
  return bytes;
}

template <typename T>
T Read(const void* bytes) {
  T x;
  std::memcpy(&x, bytes, sizeof(T));
  return x;
}

// Small integers that all types represent.
template <typename T>
T SmallInteger(int k, int64_t i) {
  return FromValue<T>(static_cast<double>(Hash(uint64_t(i * 4 + k)) % 23));
}

// Lengths around multiples of packs and blocks. All arrays have the same offset within a pack.
inline std::vector<Case> CommonOffsets(int pack) {
  std::vector<Case> cases;
  for (int64_t offset = 0; offset < pack; ++offset) {
    const bool is_first_or_last = offset <= 1 || offset == pack - 1;
    if (g_brief && !is_first_or_last) continue;
    for (int64_t n = 0; n <= 67; n += g_brief ? 21 : 1) cases.push_back(Common(n, offset));
    if (!is_first_or_last) continue;
    for (int64_t power = g_brief ? 2048 : 128; power <= (g_brief ? 2048 : 1 << 14); power *= 2) {
      for (int64_t n = power - 1; n <= power + 1; ++n) cases.push_back(Common(n, offset));
    }
  }
  return cases;
}

// Every array at its own offset within a pack: all combinations, or about `limit` of them.
inline std::vector<Case> OwnOffsets(int pack, int inputs, int outputs, int64_t limit) {
  int64_t combinations = 1;
  for (int k = 0; k < inputs + outputs; ++k) combinations *= pack;
  if (g_brief) limit = 8;
  std::vector<Case> cases;
  for (int64_t j = 0; j < combinations && j < limit; ++j) {
    auto digits = combinations <= limit
                      ? static_cast<uint64_t>(j)
                      : Hash(static_cast<uint64_t>(j)) % static_cast<uint64_t>(combinations);
    Case c{};
    const auto next = [&] {
      const auto offset = static_cast<int64_t>(digits % static_cast<uint64_t>(pack));
      digits /= static_cast<uint64_t>(pack);
      return offset;
    };
    for (int k = 0; k < inputs; ++k) c.in_offsets[k] = next();
    for (int k = 0; k < outputs; ++k) c.out_offsets[k] = next();
    for (const int64_t n : {1, 7, 16, 33, 67, 300}) {
      c.n = n;
      cases.push_back(c);
    }
  }
  return cases;
}
