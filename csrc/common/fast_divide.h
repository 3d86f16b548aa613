// Division by a divisor known on the host, as one high multiplication, one addition and one shift.
//
// Granlund and Montgomery, "Division by Invariant Integers using Multiplication" (PLDI 1994), in
// the form for dividends below half of the word's range: with s = ceil(log2 d) and
// m = floor(2^w * (2^s - d) / d) + 1, n / d = (mulhi(n, m) + n) >> s for all n < 2^(w-1), since
// then mulhi(n, m) + n cannot overflow. A 32-bit quotient costs 3 instructions on a GPU; the
// division instruction sequence costs about 20.
#pragma once

#include "common/integers.h"
#include "common/macros.h"

// Everything here is always inlined, so it needs no namespace for each instruction set: see
// common/macros.h.
namespace jof {

JOF_HOST_DEVICE JOF_INLINE uint32_t MulHigh(uint32_t a, uint32_t b) {
#ifdef __CUDA_ARCH__
  return __umulhi(a, b);
#else
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
#endif
}

JOF_HOST_DEVICE JOF_INLINE uint64_t MulHigh(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  __extension__ using uint128 = unsigned __int128;
  return static_cast<uint64_t>((static_cast<uint128>(a) * b) >> 64);
#endif
}

// Index is uint32_t or uint64_t. Dividends and the divisor must be below half of its range.
template <typename Index>
class FastDivider {
 public:
  static constexpr int kBits = 8 * sizeof(Index);
  // Dividends must be smaller than this.
  static constexpr Index kLimit = Index{1} << (kBits - 1);

#ifndef __CUDACC_RTC__
  JOF_INLINE FastDivider() : FastDivider(1) {}

  JOF_INLINE explicit FastDivider(Index divisor) : divisor_(divisor), shift_(0) {
    while ((Index{1} << shift_) < divisor) ++shift_;
    __extension__ using uint128 = unsigned __int128;
    const uint128 word = uint128{1} << kBits;
    const uint128 excess = (uint128{1} << shift_) - divisor;
    multiplier_ = static_cast<Index>(word * excess / divisor + 1);
  }
#endif

  JOF_HOST_DEVICE JOF_INLINE Index divisor() const { return divisor_; }

  JOF_HOST_DEVICE JOF_INLINE Index Divide(Index n) const {
    return (MulHigh(n, multiplier_) + n) >> shift_;
  }

  // Returns n / divisor and sets *remainder to n % divisor.
  JOF_HOST_DEVICE JOF_INLINE Index DivMod(Index n, Index* remainder) const {
    const Index quotient = Divide(n);
    *remainder = n - quotient * divisor_;
    return quotient;
  }

  // The same in 32 bits, for dividends and a divisor below 2^31.
  JOF_HOST_DEVICE JOF_INLINE uint32_t NarrowDivMod(uint32_t n, uint32_t* remainder) const {
    const uint32_t multiplier = static_cast<uint32_t>((multiplier_ - 1) >> (kBits - 32)) + 1;
    const uint32_t quotient = (MulHigh(n, multiplier) + n) >> shift_;
    *remainder = n - quotient * static_cast<uint32_t>(divisor_);
    return quotient;
  }

 private:
  Index divisor_;
  Index multiplier_;
  int shift_;
};

}  // namespace jof
