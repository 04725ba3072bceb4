// The planner of grid_sample's and bilinear_sample's gradients: problem, tactics, cost function. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "grid_sample/tactics.h"

namespace svexport::sampler::gradient {

struct Figures;

struct Problem : sampler::Problem {
  static constexpr const char* kOp = "grid_sample_backward";
  using Figures = gradient::Figures;
  int32_t volume = 0;     // whether images have depth
  int32_t input = 1, grid = 1;  // whether the gradients of these are wanted
  int32_t deterministic = 0;    // whether sums must be added in a fixed order
  int32_t last = 0;  // whether the channels of a pixel are contiguous and begin at multiples of 16 bytes
                     // (here `dense` says whether the pixels of a channel are contiguous, also in volumes)
  int32_t near = 1;  // whether a channel of the output's gradient is less than 2^32 bytes

  int64_t elements() const { return images * channels * pixels(); }
  int64_t vector() const { return 16 / item_size; }

  template <class Visitor>
  void each(Visitor&& visit) {
    sampler::Problem::each(visit);
    visit("volume", volume);
    visit("input", input);
    visit("grid", grid);
    visit("deterministic", deterministic);
    visit("last", last);
    visit("near", near);
  }
};

constexpr int kPlaneThreads = 512, kPlanePixels = 28000;  // shared memory of a large multiprocessor holds two blocks
constexpr int kTileAcross = 32, kTileDown = 16;  // points of a tile of the box kernel

// How the gradient of the image is summed. kNone: it is not wanted. kOrdered: a thread per channel adds one point after
// the other. kPlane: a block sums a channel, or a part of it, in shared memory. kPixels: atomics. kPairs: atomics on
// pairs of adjacent pixels, which are merged afterwards. kLists: points are listed by tile of pixels and each pixel is
// written once; images whose points scatter too far are left to atomics.
enum class Sums : int32_t { kNone, kOrdered, kPlane, kPixels, kPairs, kLists };
constexpr const char* kSumsNames[] = {"none", "ordered", "plane", "pixels", "pairs", "lists"};
inline const char* name_of(Sums e) { return kSumsNames[static_cast<int>(e)]; }

struct Tactic {
  Sums sums = Sums::kPixels;
  bool vectors = false;  // image and sums in channels-last, 16 bytes of a point per thread; else a thread per point
  bool boxes = false;    // the grid's gradient of listed images comes from pixels in shared memory

  int32_t id() const { return 1 + static_cast<int32_t>(sums) + 8 * vectors + 16 * boxes; }
  bool adds() const { return sums == Sums::kPixels || sums == Sums::kPairs || sums == Sums::kLists; }

  SVEXPORT_EACH(sums, vectors, boxes)
};

struct Figures {
  float launch[1];  // fixed cost of a kernel, in microseconds
  float other[1];   // penalty for each part of a tactic that differs from the one measured to be the fastest for such
                    // sizes, as a multiple of the time to move all bytes; the distances are not fitted

  SVEXPORT_EACH(launch, other)
};

// Sizes of the lists of bilinear points, one list per tile of 1 << log_width x 1 << log_height pixels.
struct ListSizes {
  int height;  // rows of an image
  int across, tiles, log_width, log_height;
  int length;  // capacity of a list
  int most;    // most runs of an image whose points still count as close together

  static constexpr int kFull = 1 << 30, kApart = 32;

  // scattered: use lists also where points lie far apart.
  ListSizes(const Problem& p, bool scattered) : height(static_cast<int>(p.pixels() / p.width)) {
    const int64_t pixels = p.width * height;
    int log = 9;  // log2 of the pixels of a tile: evenly spread, at most 512 points per tile, 340 per large tile
    for (int64_t n = p.points; log > 7 && n > pixels; n /= 2) --log;
    for (int64_t n = 2 * p.points; log < 12 && (log < 10 ? n : n + n / 2) <= pixels; n *= 2) ++log;
    log_width = log == 7 ? 5 : 6;
    while (log_width > 1 && 1 << (log_width - 1) >= p.width) --log_width;
    log_height = log - log_width;
    across = static_cast<int>(ceil_of(p.width, int64_t{1} << log_width));
    tiles = across * static_cast<int>(ceil_of(height, int64_t{1} << log_height));
    length = log > 10 ? 512 : 1024;
    most = scattered ? kFull - 1 : static_cast<int>(p.points / 4);
  }
  int64_t counters(int64_t batch) const { return batch * (int64_t{tiles} * kApart + 1); }
  int64_t bytes(int64_t batch) const { return (counters(batch) + batch * tiles * length) * 4; }
};

// With vectors, atomics are faster for points that scatter, unless there are few channels.
inline ListSizes lists_of(const Problem& p, const Tactic& t) { return ListSizes(p, !t.vectors || p.channels <= 4); }

// Pixels per block of plane_kernel. If there are few planes, each is divided among several blocks.
inline int64_t plane_tile(const Problem& p, const Gpu& gpu) {
  const int64_t apart = ceil_of(gpu.multiprocessors, p.images * p.channels);
  const int64_t share = std::max<int64_t>(ceil_of(p.pixels(), apart), 1 << 11);
  return std::min({p.pixels(), share, int64_t{kPlanePixels}, int64_t{gpu.shared_memory / 2 - 512} / 4});
}

// Whether there are enough tiles of points for the box kernel to fill the device; as measured, float32 needs fewer.
inline bool many_tiles(const Problem& p, int64_t item, const Gpu& gpu) {
  const int64_t down = p.points / std::max<int64_t>(1, p.across);
  return p.across >= 16 && ceil_of(p.across, kTileAcross) * ceil_of(down, kTileDown) * p.images >=
                               8 / item * gpu.multiprocessors;
}

// The parts of the scratch memory, in this order, in bytes.
struct Workspace {
  int64_t sums = 0, lists = 0, copy = 0;

  Workspace(const Problem& p, const Tactic& t) {
    const auto padded = [](int64_t bytes) { return ceil_of(bytes, 256) * 256; };
    if (t.sums == Sums::kPairs) {
      sums = padded(2 * (p.elements() + p.elements() / p.width) * 4);
    } else if ((t.adds() && t.vectors) || (p.input && t.sums != Sums::kPlane && p.item_size == 2)) {
      sums = padded(p.elements() * 4);
    } else if (t.sums == Sums::kOrdered && t.vectors) {
      sums = padded(p.elements() * 4);
    }
    if (t.sums == Sums::kLists) lists = padded(lists_of(p, t).bytes(p.images));
    if (t.vectors && !p.last && p.grid && p.taps > 1) copy = padded(p.elements() * p.item_size);
  }
  int64_t all() const { return sums + lists + copy; }
};

// The launch of plane_kernel, or of the kernel that computes the grid's gradient.
inline Launch launch(const Problem& p, const Tactic& t, const Gpu& gpu) {
  Launch l;
  l.block[0] = t.sums == Sums::kPlane ? kPlaneThreads : kThreads;
  if (t.sums == Sums::kPlane) {
    const int64_t tile = plane_tile(p, gpu);
    l.work = p.images * p.channels * ceil_of(p.pixels(), tile);
    l.shared_memory = static_cast<int32_t>(tile * 4);
    return l;
  }
  l.work = std::max<int64_t>(1, p.points);
  l.per_block = kThreads >> (t.vectors ? sampler::vectors(p, gpu).shift : 0);
  l.grid_z = images_of(p);
  return l;
}

inline bool valid(const Problem& p, const Tactic& t) {
  const bool bilinear = p.taps == 4 && !p.volume;
  if ((t.sums == Sums::kNone) != !p.input) return false;
  if (p.input && (t.sums == Sums::kOrdered) != (p.deterministic != 0)) return false;
  // A channels-last copy is not worth it for the grid's gradient alone.
  if (t.vectors && (t.sums == Sums::kPlane || (t.sums == Sums::kNone && !p.last))) return false;
  if (t.vectors && (p.channels % p.vector() || p.pixels() * p.channels >= INT32_MAX || !(p.last || p.dense))) return false;
  switch (t.sums) {
    case Sums::kPlane:
      if (p.images * p.channels * ceil_of(p.pixels(), 1 << 11) >= INT32_MAX) return false;
      break;
    case Sums::kPairs:
      if ((p.taps != 4 && p.taps != 8) || t.vectors) return false;
      if (p.elements() > (1 << 28)) return false;  // the last kernel has a thread per element
      break;
    case Sums::kLists:
      if (!bilinear || !p.near || p.points >= ListSizes::kFull) return false;
      break;
    default: break;
  }
  return !t.boxes || (t.sums == Sums::kLists && t.vectors && !p.last && p.dense && p.grid);
}

// Whether planes in shared memory take less time than atomics, whose sums have to be cleared before and, for half
// types, rounded after. Both times are as measured, in microseconds on 132 multiprocessors. With more than one channel,
// a separate kernel computes the grid's gradient.
inline bool few_points(const Problem& p, int taps, const Gpu& gpu) {
  const int64_t tile = plane_tile(p, gpu), blocks = p.images * p.channels * ceil_of(p.pixels(), tile);
  if (4 * p.points * ceil_of(p.pixels(), kPlanePixels) > p.pixels()) return false;
  const int64_t resident = gpu.multiprocessors * std::min<int64_t>(4, 2 * kPlanePixels / tile);
  const auto turns = static_cast<double>(ceil_of(blocks, resident) * ceil_of(p.points, kPlaneThreads));
  const double sums = static_cast<double>(p.results() * taps), all = static_cast<double>(blocks * tile);
  return (p.grid && p.channels > 1 ? 4 : 0) + turns * (0.6 + 0.25 * taps) <=
         2 + 2e-5 * sums + (p.item_size == 2 ? 2 + 2.3e-6 * all : 0);
}

// The tactic that was measured to be the fastest on an H200.
inline Tactic fastest(const Problem& p, const Gpu& gpu) {
  Tactic t;
  const bool half = p.item_size == 2;
  const int64_t pixels = p.pixels(), points = p.points, results = p.results();
  const bool large = results >= (1 << 19);  // large enough to pay for three or four kernels
  const bool dense = p.dense && 2 * points >= pixels;
  // Whether many points add to each pixel.
  const bool crowded = points >= 4 * pixels && results >= (1 << 17);
  t.vectors = !p.input                  ? p.last && p.channels > 4
              : large && p.channels > 4 ? p.last || dense
                                        : crowded && (p.last || p.dense);
  // A nearest point adds once and reads nothing.
  if (p.taps == 1) t.vectors = t.vectors && (points > 2 * pixels || (half && p.channels >= 16));
  t.vectors = t.vectors && valid(p, {!p.input ? Sums::kNone : p.deterministic ? Sums::kOrdered : Sums::kPixels, true});
  if (!p.input || p.deterministic) {
    t.sums = p.input ? Sums::kOrdered : Sums::kNone;
    return t;
  }
  if (few_points(p, p.volume ? 8 : 4, gpu) && (p.taps != 1 || few_points(p, 1, gpu))) {
    t.sums = Sums::kPlane, t.vectors = false;
    return t;
  }
  // Half types: sums of pixels that hardly any point adds to cost five times what the pixels cost.
  const bool sparse = half && pixels >= 3 * points && pixels <= 256 * points;
  bool listed = points <= 4 * pixels &&
                (sparse ? p.elements() >= (1 << 21)
                        : pixels <= 32 * points && large && (results >= (1 << 23) || p.elements() >= (1 << 22)));
  // With one channel, the lists cost more than the atomics that they save.
  listed = listed && !(half && p.channels == 1 && !sparse);
  // Where few channels are enlarged, adjacent points add to the same pixels.
  listed = listed && !(!half && p.channels <= 4 && 2 * points >= 5 * pixels);
  listed = listed && valid(p, {Sums::kLists, t.vectors});
  const bool few = half ? 2 * points >= pixels && p.elements() <= (1 << 21) : crowded && p.elements() <= (1 << 20);
  const bool pairs = !t.vectors && !listed && few && valid(p, {Sums::kPairs});
  t.sums = listed ? Sums::kLists : pairs ? Sums::kPairs : Sums::kPixels;
  t.boxes = t.vectors && listed && many_tiles(p, p.item_size, gpu) && valid(p, {t.sums, true, true});
  return t;
}

inline Few<Tactic> tactics(const Problem& p, const Gpu&) {
  Few<Tactic> found;
  for (int sums = 0; sums <= static_cast<int>(Sums::kLists); ++sums) {
    for (int rest = 0; rest < 4; ++rest) {
      const Tactic t{static_cast<Sums>(sums), (rest & 1) != 0, (rest & 2) != 0};
      if (valid(p, t)) found.add(t);
    }
  }
  return found;
}

inline double cost(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const Tactic best = fastest(p, gpu);
  const int others = (t.sums != best.sums) + (t.vectors != best.vectors) + (t.boxes != best.boxes);
  const double bytes = 1.0 * (p.elements() * (1 + p.input) + p.results()) * p.item_size;
  return f.launch[0] + (1 + bytes / gpu.bandwidth) * (1 + others * f.other[0]);
}

}  // namespace svexport::sampler::gradient
