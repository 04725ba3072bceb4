// The planner of grid_sample and bilinear_sample: problem, tactics and cost function. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "fields.h"
#include "planner.h"

namespace svexport::sampler {

struct Figures;

struct Problem {
  static constexpr const char* kOp = "grid_sample";
  using Figures = sampler::Figures;
  int64_t images = 1, channels = 1, points = 0;    // points: per image
  int64_t width = 1, height = 1, depth = 1;        // size of an image, in pixels
  int64_t across = 1;        // points along x
  int32_t taps = 4;          // pixels per point: 1 nearest, 4 bilinear, 8 trilinear, 16 bicubic
  int32_t item_size = 4;     // bytes per element of the image: 1, 2 or 4
  int32_t alignment = 0;     // channels-last: alignment of a pixel's contiguous channels in bytes, at most 16;
                             // 0: the channels are not contiguous
  int32_t row_alignment = 4; // alignment of the rows of a plane in bytes: 2, 4 or 8
  int32_t output_last = 0;   // whether the output is channels-last: its channels are contiguous, not its points
  int32_t output_vectors = 1;  // if output_last: whether the channels of a point begin at multiples of 16 bytes
  int32_t planes = 0;        // whether kPlanes and kSampled can read this image and grid and write this output
  int32_t dense = 0;         // whether a plane has no gaps between its rows
  int32_t pairs = 0;         // whether one access can move the results, or the coordinates, of two points
  int32_t workspace = 0;     // whether the caller provides memory for a copy of the image

  int64_t pixels() const { return width * height * depth; }
  int64_t results() const { return images * channels * points; }

  SVEXPORT_EACH(images, channels, points, width, height, depth, across, taps, item_size, alignment, row_alignment,
                output_last, output_vectors, planes, dense, pairs, workspace)
};

constexpr int kThreads = 256;          // per block, except for kPlanes and kSampled
constexpr int kSampledThreads = 1024;  // per block of kSampled, which may hold whole planes in shared memory
constexpr int kBoxChannels = 64, kBoxMemory = 48 << 10;  // per block of kBoxes; more channels are better
constexpr int kMostGridYZ = 65535;

// kPoints: a thread computes some channels of a point, of any strides: one at a time, 16 bytes of float32 or int8, or 4
// bytes of int8. kVectors: a thread reads 16 bytes of channels; a block locates its points once. kNarrow: adjacent
// lanes read one or two channels each. kPlanes: a thread computes one or two points from planes in global memory.
// kSampled: the same, or from planes in shared memory if a sample of the points lies far apart. kBoxes: a block copies
// the pixels of a tile of points to shared memory; images whose points scatter are copied to channels-last.
enum class Kernel : int32_t { kPoints, kVectors, kNarrow, kPlanes, kSampled, kBoxes };
constexpr const char* kKernelNames[] = {"points", "vectors", "narrow", "planes", "sampled", "boxes"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }

// How many loads a thread keeps in flight where points scatter. With many threads, L2 delivers more if each has fewer.
enum Pace : int32_t { kSome, kChannel, kRow };

struct Tactic {
  Kernel kernel = Kernel::kPoints;
  int32_t width = 1;  // channels per read of a thread; for kPlanes and kSampled, adjacent points per thread
  int32_t shift = 0;  // log2 of the lanes that share a point
  int32_t chunk = 1;  // channels per thread; for kNarrow, per block
  int32_t tile = kThreads;  // points per block
  int32_t pace = kSome;

  int32_t id() const { return kernel == Kernel::kPoints ? width : 32 + static_cast<int32_t>(kernel); }

  SVEXPORT_EACH(kernel, width, shift, chunk, tile, pace)
};

// Time of a kernel as a multiple of the time to move its bytes: [0] where it is at home (at_home), [1] elsewhere. The
// order of the kernels is as measured; the distances between them are not fitted.
struct Figures {
  float launch[1];  // fixed cost of a kernel, in microseconds
  float points[2], vectors[2], narrow[2], planes[2], sampled[2], boxes[2];
  float singles[2];  // kPoints that reads one channel at a time

  SVEXPORT_EACH(launch, points, singles, vectors, narrow, planes, sampled, boxes)
  const float* of(const Tactic& t) const {
    const float* const all[] = {t.width == 1 ? singles : points, vectors, narrow, planes, sampled, boxes};
    return all[static_cast<int>(t.kernel)];
  }
};

// ------------------------------------------------------------------------------------------- what a launch is made of

inline int32_t images_of(const Problem& p) { return static_cast<int32_t>(std::min<int64_t>(p.images, kMostGridYZ)); }
inline int64_t enough_blocks(const Gpu& gpu) { return 8 * int64_t{gpu.multiprocessors}; }

// kVectors: points in flight per thread and per block, and the shared memory of a block in bytes: a tile of results,
// and the taps of its points, at 8 bytes (offset and weight) per pixel.
constexpr int vectors_together(int taps) { return taps <= 4 ? 2 : 1; }
constexpr int vectors_at_once(int taps, int shift) { return vectors_together(taps) * (kThreads >> shift); }
constexpr int vectors_memory(int taps, int tile) { return vectors_together(taps) * kThreads * 16 + tile * 8 * taps; }

// kNarrow: channels of a point that its lanes read at once, and the pitch in elements between channels in the tile of
// results, which lets adjacent lanes write to different banks.
constexpr int kNarrowParts = 2;  // reads per lane, one after the other
inline int32_t narrow_together(const Tactic& t) { return kNarrowParts * t.width << t.shift; }
inline int32_t narrow_pitch(const Problem& p, const Tactic& t) {
  return t.tile + std::max(std::max(1, 4 / p.item_size / t.width), (32 >> t.shift) / t.width);
}

// kBoxes: the points as `down` rows of `across`, and the tile of a block: 1 << half threads across, for twice as many
// points, and `height` threads down.
struct BoxTiles {
  int64_t across, down;
  int32_t half, height;

  explicit BoxTiles(const Problem& p) : across(p.across), down(p.points / std::max<int64_t>(1, p.across)) {
    if (across < 16) across *= down, down = 1;
    half = down == 1 ? 8 : 4;
    height = kThreads >> half;
  }
  int64_t count_across() const { return ceil_of(across, int64_t{2} << half); }
  int64_t count_down() const { return ceil_of(down, height); }
  int64_t count() const { return count_across() * count_down(); }
};

// How kSampled divides its work. From global memory: blocks of points x chunks of channels x images. From shared
// memory: parts of `part` points x groups of `group` planes x bands of `band` rows x images. A plane in shared memory
// has rows `pitch` bytes apart, 16 bytes of zeros at `zeros`, and `bytes` bytes in all.
struct Shares {
  int32_t unit, pitch = 0, bands = 1, band = 0, copied = 0, zeros = 0, bytes = 0, blocks = 1;  // copied: rows per band
  int32_t chunk = 1, chunks = 1, group = 1, groups = 1, part = 1, parts = 1;
  float far = 0;  // distance in rows from which adjacent points count as far apart
  bool fit = false;

  Shares(const Problem& p, const Gpu& gpu) : unit(p.row_alignment) {
    const int64_t row = p.width * p.item_size, memory = gpu.shared_memory;
    if (row > memory) return;
    const auto across = static_cast<int32_t>(row);
    pitch = across + (across / unit % 2 == 0 ? unit : 0);  // rows begin in different banks
    const int64_t most = (memory - 32) / pitch;            // rows; a band also holds the first row of the next
    bands = p.height <= most ? 1 : 2;
    const int64_t all = ceil_of(p.height, bands) + bands - 1;
    if (all > most) return;
    fit = true;
    copied = static_cast<int32_t>(all);
    band = copied - bands + 1;
    zeros = static_cast<int32_t>(ceil_of(int64_t{pitch} * copied, 16) * 16);
    bytes = zeros + 16;
  }

  // Divides the work among blocks for the least estimated time, in clocks as measured on an H200.
  void divide(const Problem& p, int32_t width, const Gpu& gpu) {
    const auto points = static_cast<int32_t>(p.points), batch = static_cast<int32_t>(p.images);
    const auto channels = static_cast<int32_t>(p.channels);
    blocks = static_cast<int32_t>(ceil_of(points, kSampledThreads * width));
    constexpr int32_t kWaves = 4, kMostPlanes = 64;  // a wave: one block per multiprocessor
    const int32_t memory = gpu.shared_memory, slots = gpu.multiprocessors;
    const auto waves = [&](int64_t items) { return static_cast<float>(ceil_of(items, slots)); };
    float near_time = 1e30f, far_time = 1e30f;
    for (int32_t i = 1; i <= kWaves; ++i) {
      const auto wanted = std::min<int64_t>(ceil_of(channels, 4), i * slots / (int64_t{blocks} * batch));
      const auto of = static_cast<int32_t>(ceil_of(channels, std::max<int64_t>(1, wanted)));
      const auto count = static_cast<int32_t>(ceil_of(channels, of));
      const float time = waves(int64_t{blocks} * count * batch) * width * (1500 + 350.0f * of);
      if (time < near_time) near_time = time, chunk = of, chunks = count;
    }
    for (int32_t n = 1; n <= std::min(channels, kMostPlanes) && int64_t{n} * bytes <= memory; ++n) {
      const auto count = static_cast<int32_t>(ceil_of(channels, n));
      const int64_t others = int64_t{count} * bands * batch;
      for (int32_t i = 1; i <= kWaves; ++i) {
        const auto of = static_cast<int32_t>(ceil_of(ceil_of(points, std::max<int64_t>(1, i * slots / others)), 64) * 64);
        const auto all_parts = static_cast<int32_t>(ceil_of(points, of));
        const float time = waves(others * all_parts) * (500 + n * bytes / 24.0f + of * std::max(1.05f, 0.55f * n));
        if (time < far_time) far_time = time, group = n, groups = count, part = of, parts = all_parts;
      }
    }
    const float results = static_cast<float>(batch) * channels * points;
    far = std::min(0.8f, std::max(0.15f, (far_time - near_time) * slots / (1.6f * results)));
  }
};

// ------------------------------------------------------------------------------------------------------- the tactics

// Where there are many threads, each takes more channels, because each has to locate its pixels.
inline Tactic points(const Problem& p, int32_t width, const Gpu& gpu) {
  Tactic t{Kernel::kPoints, width};
  int64_t many = 768 * int64_t{gpu.multiprocessors}, most = 4 * width;
  t.chunk = width;
  if (p.item_size == 1) {  // adjacent lanes read 32 bytes together
    t.shift = width == 16 && p.channels > width;
    t.chunk = std::max(width << t.shift, 4);
    most = std::max(2 * t.chunk, 16);
  } else if (width == 1) {
    t.chunk = p.images * p.points < (1 << 15) ? 4 : 8;
    many = enough_blocks(gpu) * kThreads, most = 32;
  }
  const auto threads = [&](int64_t chunk) { return p.points * ceil_of(p.channels, chunk) << t.shift; };
  while (t.chunk < most && t.chunk < p.channels && p.images * threads(2 * t.chunk) >= many) t.chunk *= 2;
  while (threads(t.chunk) > INT32_MAX - kThreads && t.chunk < p.channels) t.chunk *= 2;
  return t;
}

// turns: multiplies the most steps of a block; above 1 for launches in which most blocks have nothing to do.
inline Tactic vectors(const Problem& p, const Gpu& gpu, int turns = 1) {
  Tactic t{Kernel::kVectors, 16 / p.item_size};
  while (t.shift < 3 && (t.width << t.shift) < p.channels) ++t.shift;
  t.chunk = t.width << t.shift;
  const int at_once = vectors_at_once(p.taps, t.shift);
  const int64_t others = ceil_of(p.channels, t.chunk) * images_of(p);
  int steps = std::max(1, kThreads / at_once) * turns;
  while (steps > 1 && ceil_of(p.points, steps * at_once) * others < enough_blocks(gpu)) steps /= 2;
  t.tile = steps * at_once;
  return t;
}

inline Tactic narrow(const Problem& p, const Gpu& gpu) {
  Tactic t{Kernel::kNarrow, p.alignment >= 2 * p.item_size ? 2 : 1, 1};
  const int widest = t.width == 1 && p.channels >= 128 ? 5 : 4;
  while (t.shift < widest && narrow_together(t) < p.channels) ++t.shift;
  const int together = narrow_together(t);
  const auto blocks = [&](int chunk) { return ceil_of(p.points, t.tile) * ceil_of(p.channels, chunk) * images_of(p); };
  t.tile = 64;
  while (t.tile > 16 && blocks(together) < enough_blocks(gpu) / 4) t.tile /= 2;
  t.chunk = together;
  while (t.chunk < 4 * together && blocks(2 * t.chunk) >= enough_blocks(gpu)) t.chunk *= 2;
  while (ceil_of(p.channels, t.chunk) > kMostGridYZ) t.chunk *= 2;
  return t;
}

inline Tactic planes(const Problem& p, const Gpu& gpu) {
  Tactic t{Kernel::kPlanes, p.channels == 1 && p.pairs ? 2 : 1};
  const int64_t all = ceil_of(p.points, t.width), processors = gpu.multiprocessors;
  // A block takes all points of a plane if there are at most `most`, which is lower where there are few blocks.
  const int64_t most = p.images * ceil_of(p.channels, 4) < processors ? 640 : 1024;
  const auto threads = static_cast<int32_t>(all <= most ? ceil_of(std::max<int64_t>(1, all), 32) * 32 : kThreads);
  t.tile = threads * t.width;
  const int64_t blocks = ceil_of(p.points, t.tile), of_channel = blocks * p.images;
  const int64_t of_processor = std::max(1, resident_threads(gpu) / threads);  // resident blocks
  const int64_t plane = p.width * p.height * p.item_size;
  const int64_t cache = first_cache(gpu), second_cache = int64_t{gpu.l2_megabytes} << 20;
  int64_t chunk = ceil_of(p.channels, std::max<int64_t>(1, processors * of_processor / std::max<int64_t>(1, of_channel)));
  chunk = std::max<int64_t>(chunk, 4);  // every chunk locates the pixels again
  if (blocks == 1) {  // the points of a plane share it in L1, if L1 has room for all planes in use
    const int64_t used = std::min(of_processor, ceil_of(p.images * ceil_of(p.channels, 4), processors));
    chunk = std::max<int64_t>(1, std::min(chunk, cache / std::max<int64_t>(1, used * plane)));
  }
  t.chunk = static_cast<int32_t>(chunk);
  const bool crowded = blocks > 1 && 2 * of_channel * ceil_of(p.channels, chunk) >= processors * of_processor;
  // stays: the planes that are read at the same time stay in a cache.
  const bool single = p.item_size == 4 && t.width == 1;
  const bool stays = 10 * plane <= 7 * cache || (single && 4 * plane * p.images * p.channels <= 3 * second_cache);
  t.pace = !crowded ? kSome : stays ? kChannel : kRow;
  return t;
}

// Whether there are enough points to gather them from boxes, or from a channels-last copy.
inline bool many_points(const Problem& p) {
  return p.taps == 4 && p.dense && p.item_size > 1 && p.channels * p.item_size % 16 == 0 && p.channels >= 32 &&
         2 * p.points >= p.pixels() && p.points < (1 << 30) && p.results() >= (1 << 22) &&
         p.pixels() * p.channels < INT32_MAX;
}

inline bool has_vectors(const Problem& p) { return p.alignment == 16 && (!p.output_last || p.output_vectors); }

// Bytes of workspace: a copy of the images, a flag per image that is copied, a flag per tile whose points scatter.
inline int64_t workspace(const Problem& p) {
  if (!many_points(p) || p.alignment == 16) return 0;
  return p.images * (p.pixels() * p.channels * p.item_size + 1 + BoxTiles(p).count());
}

inline Launch launch(const Shares& shares, const Gpu& gpu) {
  Launch l;
  l.work = gpu.multiprocessors;
  l.block[0] = kSampledThreads;
  l.shared_memory = shares.group * shares.bytes;
  return l;
}

inline Launch launch(const Problem& p, const Tactic& t, const Gpu& gpu) {
  Launch l;
  l.work = std::max<int64_t>(1, p.points);
  l.per_block = t.tile;
  l.block[0] = kThreads;
  const auto chunks = static_cast<int32_t>(std::max<int64_t>(1, ceil_of(p.channels, t.chunk)));
  l.grid_y = chunks;
  l.grid_z = images_of(p);
  switch (t.kernel) {
    case Kernel::kPoints:
      l.work = l.work * chunks << t.shift;
      l.grid_y = images_of(p), l.grid_z = 1;
      break;
    case Kernel::kVectors: l.shared_memory = vectors_memory(p.taps, t.tile); break;
    case Kernel::kNarrow:
      l.shared_memory = 8 * p.taps * t.tile + narrow_together(t) * narrow_pitch(p, t) * p.item_size;
      break;
    case Kernel::kPlanes: l.block[0] = t.tile / t.width; break;
    case Kernel::kSampled: {
      Shares shares(p, gpu);
      shares.divide(p, t.width, gpu);
      return launch(shares, gpu);
    }
    case Kernel::kBoxes:
      l.work = BoxTiles(p).count(), l.per_block = 1;
      l.shared_memory = kBoxMemory;
  }
  return l;
}

inline Few<Tactic> tactics(const Problem& p, const Gpu& gpu) {
  Few<Tactic> found;
  const auto add = [&](const Tactic& t) {
    const Launch l = launch(p, t, gpu);
    if (l.blocks() * l.per_block >= l.work && l.blocks() < INT32_MAX && l.grid_y <= kMostGridYZ) found.add(t);
  };
  add(points(p, 1, gpu));
  for (int32_t bytes : {4, 16}) {  // 4 and 16 of int8, 16 of float32; for half types kVectors and kNarrow do as well
    const bool read = p.item_size == 1 || (p.item_size == 4 && bytes == 16);
    if (read && p.alignment >= bytes) add(points(p, bytes / p.item_size, gpu));
  }
  if (p.item_size == 1) return found;
  if (has_vectors(p)) add(vectors(p, gpu));
  if ((p.taps == 4 || p.taps == 8) && !p.output_last && p.alignment >= p.item_size) add(narrow(p, gpu));
  if (p.taps == 4 && p.planes) {
    if (p.images <= kMostGridYZ) add(planes(p, gpu));
    // Parts of the work are counted in 32 bits.
    const Tactic t{Kernel::kSampled, p.pairs ? 2 : 1};
    if (p.results() < (1 << 30) && p.points > 0 && Shares(p, gpu).fit) found.add(t);
  }
  if (p.workspace && workspace(p)) add({Kernel::kBoxes, 1, 0, kBoxChannels});
  return found;
}

// ---------------------------------------------------------------------------------------------------------- the cost

// Whether a kernel was measured to be the fastest for such a problem.
inline bool at_home(const Problem& p, const Tactic& t) {
  const int64_t results = p.results(), pixels = p.pixels(), bytes = pixels * p.channels * p.item_size;
  switch (t.kernel) {
    case Kernel::kPoints: {  // threads are few and would wait for each other, or L1 keeps what neighbours share
      if (p.item_size == 1) return t.width == (p.alignment >= 16 ? 16 : p.alignment >= 4 ? 4 : 1);
      if (t.width == 1 || p.output_last) return false;
      const int64_t parts_of_point = p.channels / t.width, parts = results / t.width;
      const bool cached = bytes <= 192 << 10;
      if (parts_of_point == 1 || p.taps == 1) return true;
      if (p.taps == 4) return parts_of_point == 2 || parts <= 1 << 15 || (cached && p.points >= 2 * pixels);
      return p.taps == 8 && cached && parts >= 1 << 15;
    }
    case Kernel::kNarrow:  // pixels are large and far apart, and other kernels would read a point's again and again
      if (p.alignment == 16 || bytes <= 1 << 16 || results < 1 << 14) return false;
      if (p.taps == 4) return p.channels >= 24 ? p.points <= 4 * pixels : p.channels >= 12 && 4 * p.points <= pixels;
      return p.channels >= 24 || (p.channels >= 12 && p.points <= pixels);
    case Kernel::kPlanes: {  // there are few points, or L1 holds a whole plane wherever they are
      constexpr int64_t kSmallPlane = 4096;
      return !p.workspace || !many_points(p) || pixels * p.item_size <= kSmallPlane;
    }
    case Kernel::kSampled: {  // worth its sample, too small for kBoxes to be faster; L1 holds the smallest planes
      constexpr int64_t kTinyPlane = 2048, kLeast = 1 << 20, kMost = 3 << 22;
      return p.channels >= 8 && p.points >= 4 * kSampledThreads && 2 * p.points >= pixels &&
             pixels * p.item_size > kTinyPlane && results >= kLeast && results <= kMost;
    }
    default: return true;
  }
}

inline double cost(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const int64_t read = std::min(p.pixels(), p.points * p.taps);
  const double bytes = 1.0 * p.images * p.channels * (read + p.points) * p.item_size + 8.0 * p.images * p.points;
  return f.launch[0] + bytes / gpu.bandwidth * f.of(t)[at_home(p, t) ? 0 : 1];
}

}  // namespace svexport::sampler
