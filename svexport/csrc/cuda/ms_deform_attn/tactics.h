// The planner of ms_deform_attn: problem, tactics and cost function. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "fields.h"
#include "planner.h"

namespace svexport::ms_deform {

struct Figures;

// value is (images, S, heads, channels). A row is one (query, head) of an image; samples: levels * points per row.
struct Problem {
  static constexpr const char* kOp = "ms_deform_attn";
  using Figures = ms_deform::Figures;
  int32_t backward = 0;
  int64_t images = 1, rows = 0, channels = 0, samples = 1;  // channels 0: not known, of a kernel compiled ahead of time
  int32_t item_size = 4;                                    // bytes per element of value: 1, 2 or 4
  int32_t alignment = 16;  // alignment in bytes of value's channels, if these are contiguous; at most 16

  SVEXPORT_EACH(backward, images, rows, channels, samples, item_size, alignment)
};

constexpr int kWarps = 4;  // per block
constexpr int kLanes = 32;

// width: channels that a lane reads at once. lanes: a power of two of lanes share a row, in several passes if need be.
struct Tactic {
  int32_t width = 1;
  int32_t lanes = 1;

  int32_t id() const { return width; }

  SVEXPORT_EACH(width, lanes)
};

// Constants of the cost function; [0] forward, [1] backward. In nanoseconds of a multiprocessor where not stated.
struct Figures {
  float launch[1];   // fixed cost of a kernel, in microseconds
  float lines[2];    // to look up the corners of a sample in one cache line of 128 bytes
  float issue[2];    // to issue a whole warp's instructions for the corners of a sample
  float pass[2];     // to locate a sample, in every pass
  float corners[2];  // multiple of the time to move the corners, or what is added to them, through memory

  SVEXPORT_EACH(launch, lines, issue, pass, corners)
};

// The widest read. The gradient has four channels, 16 bytes of sums, so that a warp's additions go to whole sectors.
inline int32_t full_width(const Problem& p) { return p.backward ? std::min(4, 16 / p.item_size) : 16 / p.item_size; }

// How often the lanes of a row read its samples.
inline int64_t passes(const Problem& p, const Tactic& t) {
  const int64_t at_once = int64_t{t.lanes} * t.width;
  return std::max<int64_t>(1, (p.channels + at_once - 1) / at_once);
}

// A block has rows of one image only.
inline Launch launch(const Problem& p, const Tactic& t, const Gpu&) {
  Launch l;
  l.per_block = kWarps * kLanes / t.lanes;
  l.work = p.images * ((p.rows + l.per_block - 1) / l.per_block) * l.per_block;
  l.block[0] = kWarps * kLanes;
  return l;
}

// As many lanes as read all channels of a row in one pass; else those of which the fewest idle in up to four passes.
inline int32_t lanes_of(const Problem& p, int32_t width) {
  int32_t lanes = 1;
  while (lanes < kLanes && int64_t{lanes} * width < p.channels) lanes *= 2;
  const auto seats = [&](int32_t n) { return n * passes(p, {width, n}); };
  if (passes(p, {width, lanes}) == 1) return lanes;
  int32_t best = lanes;
  for (int32_t n : {lanes / 2, lanes / 4}) {
    if (passes(p, {width, n}) <= 4 && seats(n) < seats(best)) best = n;
  }
  return best;
}

inline Few<Tactic> tactics(const Problem& p, const Gpu&) {
  Few<Tactic> found;
  const int32_t full = full_width(p);
  for (int32_t width : {full, full == 16 ? 8 : 0, 1}) {
    const bool vectors = width > 1 && p.channels && p.channels % width == 0 && p.alignment % (width * p.item_size) == 0;
    if (width == 1 || vectors) found.add({width, lanes_of(p, width)});
  }
  return found;
}

// Microseconds: the longest of moving the corners, looking up their lines and issuing the warps' instructions; plus the
// time to locate the samples in every pass.
inline double cost(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const double samples = 1.0 * p.images * p.rows * p.samples, turns = static_cast<double>(passes(p, t));
  const int64_t at_once = std::min<int64_t>(int64_t{t.lanes} * t.width, std::max<int64_t>(p.channels, 1));
  const double lines = turns * static_cast<double>((at_once * p.item_size + 127) / 128);
  const double each = std::max(lines * f.lines[p.backward], turns * t.lanes / kLanes * f.issue[p.backward]);
  const double shared = samples / gpu.multiprocessors / 1000;  // thousands of samples per multiprocessor
  const double bytes = samples * 4 * static_cast<double>(p.channels) * (p.backward ? 4 : p.item_size);
  // With few threads, nothing hides the latency of 16 codes per thread; with 8, 16 samples are done 1.3 us earlier.
  const bool alone = t.width == 16 && 1.0 * p.images * p.rows * t.lanes < 128.0 * gpu.multiprocessors;
  return f.launch[0] + (alone ? 0.08 * static_cast<double>(p.samples) : 0) + std::max(bytes / gpu.bandwidth * f.corners[p.backward], shared * each) +
         shared * turns * f.pass[p.backward];
}

}  // namespace svexport::ms_deform
