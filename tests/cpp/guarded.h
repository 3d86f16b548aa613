// Memory between guard zones, at a chosen offset from 16-byte alignment.
#pragma once

#include <cstdint>
#include <vector>

#include "check.h"

constexpr uint8_t kGuard = 0xa5;
constexpr int64_t kGuardBytes = 64;

// `bytes` writable bytes, `offset` bytes after a 16-byte boundary, between guard zones.
class Guarded {
 public:
  Guarded(int64_t bytes, int64_t offset)
      : bytes_(bytes), storage_(static_cast<size_t>(bytes + 2 * kGuardBytes + 32), kGuard) {
    const auto base = reinterpret_cast<uintptr_t>(storage_.data()) + kGuardBytes;
    begin_ = kGuardBytes + static_cast<int64_t>((16 - base % 16) % 16) + offset;
  }
  void* data() { return storage_.data() + begin_; }
  void CheckGuards() const {
    for (int64_t i = 0; i < static_cast<int64_t>(storage_.size()); ++i) {
      if (i == begin_) i += bytes_;
      JOF_CHECK(storage_[static_cast<size_t>(i)] == kGuard, "guard overwritten at %ld",
                long(i - begin_));
    }
  }

 private:
  int64_t bytes_, begin_;
  std::vector<uint8_t> storage_;
};
