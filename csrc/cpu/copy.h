// Copies of rows whose length is known only at run time.
#pragma once

#include <stdint.h>
#include <string.h>

#include <type_traits>

#include "common/macros.h"
#include "cpu/lanes.h"

JOF_NAMESPACE_BEGIN

constexpr int kLaneBytes = 16;

// Copies n bytes, fewer than a lane has.
JOF_INLINE void CopyShort(const uint8_t* in, int64_t n, uint8_t* out) {
  const auto ends = [&](auto word) {
    decltype(word) first, last;
    memcpy(&first, in, sizeof(word));
    memcpy(&last, in + n - sizeof(word), sizeof(word));
    memcpy(out, &first, sizeof(word));
    memcpy(out + n - sizeof(word), &last, sizeof(word));
  };
  if (n >= 8) return ends(uint64_t{});
  if (n >= 4) return ends(uint32_t{});
  if (n >= 2) return ends(uint16_t{});
  if (n == 1) *out = *in;
}

// Copies n bytes. Inlined, since copying a row often takes less time than a call: upsampling pixels
// of 8 channels of f32 took four times as long with memcpy. For some KB memcpy uses a string
// instruction, which is slow on pages that are touched for the first time.
template <int kBytes = kVectorBytes>
JOF_INLINE void CopyRow(const uint8_t* in, int64_t n, uint8_t* out) {
  if (n >= kBytes) {
    for (int64_t i = 0;; i += kBytes) {
      if (i + kBytes > n) {
        if (i == n) return;
        i = n - kBytes;
      }
      typename Vector<uint8_t, kBytes>::type piece;
      memcpy(&piece, in + i, kBytes);
      memcpy(out + i, &piece, kBytes);
    }
  } else if constexpr (kBytes > kLaneBytes) {
    CopyRow<kBytes / 2>(in, n, out);
  } else {
    CopyShort(in, n, out);
  }
}

// A row of kWord to 2 * kWord bytes in registers.
template <int kWord>
class ShortRow {
 public:
  JOF_INLINE ShortRow(const uint8_t* in, int64_t bytes) : last_at_(bytes - kWord) {
    memcpy(&first_, in, kWord);
    memcpy(&last_, in + last_at_, kWord);
  }
  JOF_INLINE void Store(uint8_t* out) const {
    memcpy(out, &first_, kWord);
    memcpy(out + last_at_, &last_, kWord);
  }

 private:
  typename Vector<uint8_t, kWord>::type first_, last_;
  int64_t last_at_;
};

// Calls visit(integral constant) with the word of a ShortRow of so many bytes, or with 0 if the row
// is shorter or longer.
template <typename Visitor>
JOF_INLINE void DispatchShortRow(int64_t bytes, const Visitor& visit) {
  if (bytes < 8 || bytes > 64) return visit(std::integral_constant<int, 0>());
  if (bytes <= 16) return visit(std::integral_constant<int, 8>());
  if (bytes <= 32) return visit(std::integral_constant<int, 16>());
  visit(std::integral_constant<int, 32>());
}

JOF_NAMESPACE_END
