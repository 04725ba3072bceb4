// How a warp holds NC/32HW32, shared by to_chw32 and from_chw32.
#pragma once

#include "device.cuh"

namespace svexport {

// The 32 channels of a pixel are kLanes words of at least 4 bytes, one per lane, so that a warp writes and reads whole
// pixels. A lane does kPixels pixels of its channels, which are contiguous in NCHW: what it exchanges with memory there
// are vectors along the pixels, at least one whole sector in all.
template <class T>
struct Chw32 {
  static constexpr int kChannels = sizeof(T) < 4 ? 4 / sizeof(T) : 1;  // of a lane
  static constexpr int kLanes = 32 / kChannels;
  static constexpr int kVector = 16 / sizeof(T);
  static constexpr int kPixels = sizeof(T) < 4 ? kVector : 32 / sizeof(T);
  static constexpr int kWarpPixels = kPixels * (32 / kLanes);
  static constexpr int kThreads = 256;

  int64_t pixel;    // the lane's first
  int64_t channel;  // the lane's first of kChannels
  int64_t n, block;

  // Of a grid of one warp per (image, block of channels, kWarpPixels), the last fastest.
  __device__ __forceinline__ Chw32(int64_t blocks, int64_t parts) {
    const int64_t warp = blockIdx.x * static_cast<int64_t>(kThreads / 32) + threadIdx.x / 32;
    const int lane = threadIdx.x % 32;
    pixel = warp % parts * kWarpPixels + lane / kLanes * kPixels;
    block = warp / parts % blocks;
    n = warp / parts / blocks;
    channel = block * 32 + lane % kLanes * kChannels;
  }
  // Where the lane's word of its first pixel is among contiguous ones; the next pixel's is 32 elements on.
  __device__ __forceinline__ int64_t word(int64_t blocks, int64_t pixels) const {
    return ((n * blocks + block) * pixels + pixel) * 32 + channel % 32;
  }
  static int64_t parts(int64_t pixels) { return ceil_div<int64_t>(pixels, kWarpPixels); }
  static int64_t grid(int64_t n, int64_t blocks, int64_t pixels) {
    return ceil_div<int64_t>(n * blocks * parts(pixels), kThreads / 32);
  }
};

}  // namespace svexport
