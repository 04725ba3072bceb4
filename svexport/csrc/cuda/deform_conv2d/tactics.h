// The planner of deform_conv2d: the problem, the tactics that make its columns, the cost function. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "fields.h"
#include "planner.h"

namespace svexport::deform {

struct Figures;

struct Problem {
  static constexpr const char* kOp = "deform_conv2d";
  using Figures = deform::Figures;
  int64_t images = 1, pixels = 0;  // pixels: per output image
  int64_t taps = 1, channels = 1, offset_groups = 1;
  int64_t input_bytes = 0;
  int32_t packed = 0;  // whether the input is packed already
  int32_t runs = 1;    // whether runs have 16 bytes or more, so that packing does not mostly add zeros
  int32_t planes = 1;  // whether the kernel of planes can count an image's elements: fewer than 2^32

  SVEXPORT_EACH(images, pixels, taps, channels, offset_groups, input_bytes, packed, runs, planes)
};

constexpr int kThreads = 256;     // per block
constexpr int kPixels = 32;       // kPacked: output pixels per block; kPlanes: a thread has one
constexpr int kOffsetGroups = 8;  // per block, at most

// kPacked: 16 bytes of packed channels per read, after a copy if needed. kPlanes: no copy, up to 8 channels a thread.
enum class Kernel : int32_t { kPacked, kPlanes };
constexpr const char* kKernelNames[] = {"packed", "planes"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }

struct Tactic {
  Kernel kernel = Kernel::kPacked;

  int32_t id() const { return 1 + static_cast<int32_t>(kernel); }

  SVEXPORT_EACH(kernel)
};

// Constants of the cost function, in microseconds.
struct Figures {
  float launch[1];  // fixed cost of a kernel
  float pack[1];    // fixed cost of packing input and weight
  float packed[1];  // kPacked: one multiprocessor, per channel of a tap
  float planes[1];  // kPlanes: the same

  SVEXPORT_EACH(launch, pack, packed, planes)
};

// kPlanes: channels per thread. They lie in one offset group, or in one each if every channel has its own offsets.
inline int64_t together(const Problem& p) { return p.channels / p.offset_groups < 8 ? 4 : 8; }

inline Launch launch(const Problem& p, const Tactic& t, const Gpu&) {
  Launch l;
  l.work = std::max<int64_t>(1, p.images * p.pixels);
  l.block[0] = kThreads;
  if (t.kernel == Kernel::kPacked) {
    l.per_block = kPixels;
    l.grid_y = static_cast<int32_t>(p.taps * ceil_of(p.offset_groups, kOffsetGroups));
  } else {
    l.per_block = kThreads;
    l.grid_y = static_cast<int32_t>(p.taps);
    const int64_t each = p.channels / p.offset_groups;
    l.grid_z = static_cast<int32_t>(each == 1 ? ceil_of(p.channels, together(p))
                                              : p.offset_groups * ceil_of(each, together(p)));
  }
  return l;
}

inline Few<Tactic> tactics(const Problem& p, const Gpu& gpu) {
  Few<Tactic> found;
  const auto add = [&](Kernel kernel) {
    const Launch l = launch(p, {kernel}, gpu);
    if (l.grid_y <= 65535 && l.grid_z <= 65535) found.add(Tactic{kernel});
  };
  if (p.planes) add(Kernel::kPlanes);
  if (p.runs || !found.size()) add(Kernel::kPacked);
  return found;
}

inline double cost(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const double read = 1.0 * p.images * p.pixels * p.taps * p.channels / gpu.multiprocessors;
  if (t.kernel == Kernel::kPlanes) return f.launch[0] + read * f.planes[0];
  const double pack = p.packed ? 0 : f.pack[0] + 2.0 * p.input_bytes / gpu.bandwidth;
  return f.launch[0] + pack + read * f.packed[0];
}

}  // namespace svexport::deform
