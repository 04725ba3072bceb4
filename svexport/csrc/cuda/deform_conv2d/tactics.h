// What is asked of deform_conv2d, the ways to make its columns and which is the cheapest. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "fields.h"
#include "planner.h"

namespace svexport::deform {

struct Figures;

struct Problem {
  static constexpr const char* kOp = "deform_conv2d";
  using Figures = deform::Figures;
  int64_t images = 1, pixels = 0;  // pixels: of an output
  int64_t taps = 1, channels = 1, offset_groups = 1;
  int64_t input_bytes = 0;
  int32_t packed = 0;  // whether the input is packed as it is
  int32_t runs = 1;    // whether packing is of runs of 16 bytes and more, or of zeros mostly
  int32_t planes = 1;  // whether the kernel of planes counts the elements of an image: below 2^32

  SVEXPORT_EACH(images, pixels, taps, channels, offset_groups, input_bytes, packed, runs, planes)
};

constexpr int kThreads = 256;     // of a block
constexpr int kPixels = 32;       // output pixels of a block, packed; of planes a thread has one
constexpr int kOffsetGroups = 8;  // at most, of a block

// Channels last in runs of 16 bytes, copied so where they are not; or planes as they lie, up to 8 channels a thread.
enum class Kernel : int32_t { kPacked, kPlanes };
constexpr const char* kKernelNames[] = {"packed", "planes"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }

struct Tactic {
  Kernel kernel = Kernel::kPacked;

  int32_t id() const { return 1 + static_cast<int32_t>(kernel); }

  SVEXPORT_EACH(kernel)
};

// Of the cost function, microseconds.
struct Figures {
  float launch[1];  // of a kernel beside its work
  float pack[1];    // of packing input and weight, beside moving the input
  float packed[1];  // of a multiprocessor for a channel of a tap, packed
  float planes[1];  // as it lies

  SVEXPORT_EACH(launch, pack, packed, planes)
};

// Channels of a thread of planes. Where each has offsets of its own, of as many offset groups; else of one.
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
