// The planner of camera_sample: problem, tactics and cost function. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "fields.h"
#include "planner.h"

namespace svexport::camera {

struct Figures;

// An image has `queries` of `points` each, which are sampled on `levels` of maps with `channels`.
struct Problem {
  static constexpr const char* kOp = "camera_sample";
  using Figures = camera::Figures;
  int64_t images = 1, queries = 0, points = 1, levels = 1, channels = 0;  // channels 0: not known ahead of time
  int32_t item_size = 4;                                                  // bytes per element of the output
  int32_t vectors = 0;  // whether a group's channels are whole, aligned vectors of 16 bytes
  int32_t planes = 0;   // whether the kernel of planes supports these maps, weights and attributes

  SVEXPORT_EACH(images, queries, points, levels, channels, item_size, vectors, planes)
};

constexpr int kThreads = 128;           // per block of kVectors and kChannels
constexpr int kPasses = 2;              // channels per thread of kChannels
constexpr int kPlaneThreads = 1024;     // per block of kPlanes
constexpr int kPlaneChannels = 2;       // per block of kPlanes
constexpr int64_t kLeastQueries = 256;  // per block of kPlanes: with fewer, queries share too little in L1

// kVectors, kChannels: a block computes one query. It reads vectors of 16 bytes of channels, or single channels of any
// strides. kPlanes: a block computes two channels of many queries, and reads their pixels plane by plane.
enum class Kernel : int32_t { kVectors, kChannels, kPlanes };
constexpr const char* kKernelNames[] = {"vectors", "channels", "planes"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }

struct Tactic {
  Kernel kernel = Kernel::kChannels;
  int32_t row_shift = 0;  // log2 of the threads that read a sample together; for kPlanes, of the threads per query
  int32_t chunk = 1;      // channels per block

  int32_t id() const { return 1 + static_cast<int32_t>(kernel); }

  SVEXPORT_EACH(kernel, row_shift, chunk)
};

// Constants of the cost function, in microseconds.
struct Figures {
  float launch[1];    // fixed cost of kVectors and kChannels
  float vectors[1];   // kVectors: one multiprocessor, per channel of a point on a level
  float channels[1];  // kChannels: the same
  float planes[3];    // kPlanes: fixed cost; per wave of its blocks; per point in a wave

  SVEXPORT_EACH(launch, vectors, channels, planes)
};

inline int32_t log2_ceil(int64_t x) {
  int32_t shift = 0;
  while ((int64_t{1} << shift) < x) ++shift;
  return shift;
}

// kPlanes: how many blocks divide the queries of an image, and how many queries a block works on at once.
struct Parts {
  int64_t count, at_once;

  Parts(const Problem& p, const Gpu& gpu) {
    const int64_t pairs = std::max<int64_t>(1, ceil_of(p.channels, kPlaneChannels) * p.images);
    count = std::max<int64_t>(1, std::min(gpu.multiprocessors / pairs, p.queries / kLeastQueries));
    const int64_t queries = std::max<int64_t>(1, ceil_of(p.queries, count));
    at_once = ceil_of(queries, ceil_of(queries, kPlaneThreads));
    count = std::max<int64_t>(1, std::min(count, ceil_of(p.queries, at_once)));
  }
};

inline Few<Tactic> tactics(const Problem& p, const Gpu& gpu) {
  Few<Tactic> found;
  const auto rows = [&](Kernel kernel, int64_t threads, int64_t channels) {  // threads: as many as cover all channels
    const int32_t shift = log2_ceil(p.channels ? std::min<int64_t>(threads, kThreads) : kThreads);
    found.add({kernel, shift, static_cast<int32_t>(channels << shift)});
  };
  const int64_t vector = 16 / p.item_size;
  if (p.vectors && p.channels) rows(Kernel::kVectors, p.channels / vector, vector);
  rows(Kernel::kChannels, std::max<int64_t>(2, 2 * p.channels), 1);  // two threads read kPasses channels
  if (p.planes && p.channels && p.queries >= kLeastQueries) {
    int32_t shift = 0;
    while (2 * Parts(p, gpu).at_once << shift <= kPlaneThreads) ++shift;
    found.add({Kernel::kPlanes, shift, kPlaneChannels});
  }
  return found;
}

inline Launch launch(const Problem& p, const Tactic& t, const Gpu& gpu) {
  Launch l;
  const int64_t chunks = std::max<int64_t>(1, ceil_of(p.channels, t.chunk));
  if (t.kernel == Kernel::kPlanes) {
    l.work = chunks;
    l.grid_y = static_cast<int32_t>(Parts(p, gpu).count);
    l.grid_z = static_cast<int32_t>(p.images);
    l.block[0] = kPlaneThreads;
  } else {
    l.work = std::max<int64_t>(1, p.queries);
    l.grid_y = static_cast<int32_t>(p.images);
    l.grid_z = static_cast<int32_t>(chunks);
    l.block[0] = kThreads;
  }
  return l;
}

inline double cost(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const double points = 1.0 * p.queries * p.points;
  if (t.kernel == Kernel::kPlanes) {
    const Parts parts(p, gpu);
    const int64_t blocks = ceil_of(p.channels, kPlaneChannels) * p.images * parts.count;
    const auto waves = static_cast<double>(ceil_of(blocks, gpu.multiprocessors));
    return f.planes[0] + waves * (f.planes[1] + f.planes[2] * points / static_cast<double>(parts.count));
  }
  const double read = points * p.levels * p.channels * p.images / gpu.multiprocessors;
  return f.launch[0] + read * (t.kernel == Kernel::kVectors ? f.vectors[0] : f.channels[0]);
}

}  // namespace svexport::camera
