// Shared by the tests of CUDA kernels: checked runtime calls, and memory between guard zones.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <cstring>
#include <vector>

#include "check.h"

#define CHECK_CUDA(expression)                                                           \
  do {                                                                                   \
    const cudaError_t status = (expression);                                             \
    JOF_CHECK(status == cudaSuccess, "%s: %s", #expression, cudaGetErrorString(status)); \
  } while (false)

constexpr int64_t kGuardBytes = 64;
constexpr uint8_t kGuard = 0xa5;

// Poisoned device memory whose payload begins `offset` bytes after a 16-byte boundary.
class DeviceArray {
 public:
  DeviceArray(int64_t bytes, int64_t offset)
      : begin_(kGuardBytes + offset), bytes_(bytes), host_(size_t(bytes + offset) + 128, kGuard) {
    CHECK_CUDA(cudaMalloc(&data_, host_.size()));
    CHECK_CUDA(cudaMemcpy(data_, host_.data(), host_.size(), cudaMemcpyHostToDevice));
  }
  template <typename T>
  DeviceArray(const std::vector<T>& values, int64_t offset)
      : DeviceArray(static_cast<int64_t>(values.size() * sizeof(T)), offset) {
    if (!values.empty()) {
      CHECK_CUDA(cudaMemcpy(data(), values.data(), size_t(bytes_), cudaMemcpyHostToDevice));
    }
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  void* data() { return static_cast<uint8_t*>(data_) + begin_; }

  // Returns the payload on the host, after checking the guard zones.
  template <typename T>
  const T* CopyToHost() {
    CHECK_CUDA(cudaMemcpy(host_.data(), data_, host_.size(), cudaMemcpyDeviceToHost));
    for (int64_t i = 0; i < static_cast<int64_t>(host_.size()); ++i) {
      const bool inside = i >= begin_ && i < begin_ + bytes_;
      JOF_CHECK(inside || host_[size_t(i)] == kGuard, "guard overwritten at %ld of %ld bytes",
                long(i - begin_), long(bytes_));
    }
    payload_.resize(size_t(bytes_) + 1);
    std::memcpy(payload_.data(), host_.data() + begin_, size_t(bytes_));
    return reinterpret_cast<const T*>(payload_.data());
  }

 private:
  int64_t begin_, bytes_;
  std::vector<uint8_t> host_, payload_;
  void* data_;
};
