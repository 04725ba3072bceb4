// The problem einsum solves, the tactics that solve it and what each of them costs. Host C++, no CUDA.
#pragma once

#include <algorithm>
#include <cmath>

#include "fields.h"
#include "planner.h"

namespace svexport::einsum {

struct Figures;

// Three tensors that share dimensions in pairs: x (S, O, K, T, V) and z (S, O, M, T, W) are large, y (S, K, V, M, W) is
// small. The result is y or z. Where S, V and W are 1, K and M are channels and T is positions.
struct Problem {
  static constexpr const char* kOp = "einsum";
  using Figures = einsum::Figures;
  int32_t sums = 0;  // whether the result is y, the sum of x z over O and T; else it is z, the sum of x y over K and V
  int64_t shared = 1, outer = 1, rows = 1;  // S, O, T
  int64_t x_count = 1, x_width = 1;         // K, V
  int64_t z_count = 1, z_width = 1;         // M, W
  int32_t item_size = 4;
  int32_t whole = 0;    // whether every 32 rows of x and z begin and end at multiples of 16 bytes
  int32_t pairs = 0;    // whether every row of x and z begins and ends at a multiple of 4 bytes
  int32_t aligned = 1;  // the most positions, up to 4, that lie in aligned words of their joint size

  SVEXPORT_EACH(sums, shared, outer, rows, x_count, x_width, z_count, z_width, item_size, whole, pairs, aligned)
};

// Constants of large and small, in which every warp keeps tiles of rows in shared memory.
constexpr int kRows = 32;       // rows of a tile
constexpr int kMostStages = 4;  // most tiles of a warp in flight
constexpr int kLargeWarps = 16, kSmallWarps = 8;      // most warps of a block
constexpr int kLargestWidth = 64, kLargestCount = 8;  // largest V and W; largest K and M
constexpr int kFewSums = 3;  // tiles of 16 of the K * V sums that a warp adds up where rows are few

// Constants of channel_product and channel_correlation.
constexpr int kMostChannels = 4096;
constexpr int kPositions = 32, kTogether = 4;      // positions of a warp of channel_product; warps of a team
constexpr int kRun = kTogether * kPositions;       // positions of a team
constexpr int kResults = 16;                       // columns that a team stores at once
constexpr int kTall = 128, kNarrow = 64;           // rows and columns of a block of channel_correlation
constexpr int kFetchPieces = 8;                    // pieces of 16 bytes in one fetch of channel_correlation
constexpr int kSlots = 6;                          // fetches that fit in shared memory
constexpr int kCorrelating = 512;                  // threads of a block

// Whether one warp does all elements of M or K, or separate blocks do one each and read the other tensor's tiles again.
enum class Of : int32_t { kOne, kApart };
constexpr const char* kOfNames[] = {"one", "apart"};
inline const char* name_of(Of e) { return kOfNames[static_cast<int>(e)]; }

// matrices: a matrix product, on copies of operands that lie in another order; torch runs cuBLAS's, others matmul.h's.
enum class Kernel : int32_t { kLarge, kSmall, kChannelProduct, kChannelCorrelation, kMatrices };
constexpr const char* kKernelNames[] = {"large", "small", "channel_product", "channel_correlation", "matrices"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }

struct Tactic {
  Kernel kernel = Kernel::kMatrices;
  Of of = Of::kOne;
  int32_t columns = 0;  // large, small: tiles of 8 columns that a warp multiplies at once; channel_product: of a block
  int32_t sums = 0;     // small: tiles of 16 of the K * V sums that a warp adds up
  bool engine = false;  // large, small: whether the copy engine fetches the tiles

  int32_t id() const {
    const int32_t detail = kernel == Kernel::kSmall ? sums : kernel == Kernel::kChannelProduct ? columns / 32 : 0;
    return 1 + 64 * static_cast<int32_t>(kernel) + 16 * static_cast<int32_t>(of) + detail;
  }

  SVEXPORT_EACH(kernel, of, columns, sums, engine)
};

// Constants of the cost function, in microseconds unless stated otherwise. Pairs are for float32 and half types.
struct Figures {
  float launch[1];        // launch of any kernel but small
  float large[2];         // of a warp, for a tile of rows and 8 columns
  float apart[1];         // factor on the estimate where blocks are apart
  float small[4];         // a launch; a block; until a tile is there; a product in the sum over warps
  float small_product[2];  // of a warp, for a product of 16 by 8 by 32 rows
  float small_read[2];     // of a warp, for reading 8 of the product's rows or columns
  float small_byte[1];     // of a warp, for fetching one byte
  float small_parts[2];    // the kernel that adds parts up; one float of these parts
  float small_time[2];     // factors on the estimate: for crowded registers; for 2 sums
  float usual[2];  // factors on the estimate for sums other than the usual: in general; where S is 1
  float channel[2];         // of a multiprocessor, for a channel of one turn of 64 columns
  float columns32[2];       // for 32 columns: all turns together, each turn; in turns of 64 columns
  float correlation[2];     // factor on the time of reading; adding parts up
  float matrices[2];        // overhead of products of matrices; factor on the time of copying all tensors once

  SVEXPORT_EACH(launch, large, apart, small, small_product, small_read, small_byte, small_parts, small_time, usual,
                channel, columns32, correlation, matrices)
};

inline int int_of(int64_t n) { return static_cast<int>(n); }
inline int half_of(const Problem& p) { return p.item_size == 4 ? 0 : 1; }  // index into a pair of Figures

// Bytes in shared memory of a tile, for one element of K or M.
inline int pitch_of(int64_t width, int64_t item_size) { return int_of(kRows * width * item_size) + 32; }

// Floats between rows of the sums that a warp of small keeps in shared memory; lanes then store to different banks.
constexpr int sum_pitch(int columns) { return columns % 2 ? 8 * columns : 8 * columns + 8; }

inline int64_t tiles_of(const Problem& p) { return p.outer * ceil_of(p.rows, kRows); }  // of one element of S

// Blocks that a multiprocessor holds at once.
inline int resident(const Gpu& gpu, int warps, int registers, int bytes) {
  const int by_memory = (gpu.shared_memory + 1024) / (bytes + 1024);
  return std::max(1, std::min(by_memory, 65536 / (int_of(ceil_of(registers, 8)) * 256 * warps)));
}

// How large divides its work.
struct Division {
  int apart, count;           // elements of M in separate blocks, or 1; elements of M that a warp does
  int columns;                // tiles of 8 columns that a warp does at once
  int steps, groups, before;  // steps of the product over K and V; groups of the M * W columns; bytes before the warps'
  int pieces, workers = 0;    // most tiles of a block for one element of S; warps that have tiles
  int stages = 0, warp = 0;   // tiles of a warp in flight; bytes of a warp in shared memory
  int64_t shared, tiles;      // S times `apart`; tiles of each of these
  bool even = false;          // whether every block works on one element of S only
  bool fits;

  Division(const Problem& p, Of of, const Gpu& gpu)
      : apart(of == Of::kApart ? int_of(p.z_count) : 1),
        count(of == Of::kOne ? int_of(p.z_count) : 1),
        shared(p.shared * apart),
        tiles(tiles_of(p)) {
    const int size = p.item_size, K = int_of(p.x_count), half_width = int_of(ceil_of(p.x_width, 2));
    // Every group of columns reads the rows again, which takes as long as 4 tiles of columns. Only half types have a
    // kernel for 7 tiles.
    const auto all = int_of(ceil_of(count * p.z_width, 8));
    const auto time = [&](int n) { return ceil_of(all, n) * (4 + n); };
    columns = 2;
    for (const int n : {3, 4, 5, 7}) {
      if ((n <= 5 || size == 2) && time(n) < time(columns)) columns = n;
    }
    groups = int_of(ceil_of(all, columns));
    steps = int_of(ceil_of(int64_t{K} * half_width, size == 4 ? 4 : 8));
    const int fragment = size == 4 ? 16 : 8;  // bytes that a lane holds for a step; floats are in two parts
    before = groups * columns * 32 * (steps * fragment + 1) + steps * 32;
    const int stage = K * pitch_of(p.x_width, size), results = count * pitch_of(p.z_width, size);
    const int room = gpu.shared_memory - before;
    const auto bytes_of = [&](int n) { return int_of(ceil_of(n * (stage + 8), 16)) * 16 + results; };
    // More warps hide more latency than more tiles in flight do.
    stages = room / bytes_of(2) >= 12 ? 2 : 1;
    while (stages < kMostStages && room / bytes_of(stages + 1) >= kLargeWarps) ++stages;
    pieces = int_of(std::min(tiles, ceil_of(tiles * shared, gpu.multiprocessors)));
    fits = room / bytes_of(stages) >= 2 && tiles * shared <= INT32_MAX / 2;
    if (!fits) return;
    workers = std::min(kLargeWarps, room / bytes_of(stages));
    if (shared <= gpu.multiprocessors) {  // if one wave does all tiles, let a block read one element's factors only
      const int64_t most = ceil_of(tiles, gpu.multiprocessors / shared);
      even = most <= workers;
      if (even) pieces = int_of(most);
    }
    workers = std::min(workers, pieces);
    stages = std::min(stages, int_of(ceil_of(pieces, workers)));
    warp = bytes_of(stages);
  }

  // Whether one block a multiprocessor, each warp with one tile at most, does all tiles.
  bool at_once(const Gpu& gpu) const { return pieces <= workers && shared <= gpu.multiprocessors; }
};

// Most tiles of 16 of the K * V sums that a warp adds up for `columns` tiles of 8: registers hold each sum twice.
constexpr int most_sums(int columns) { return columns > 7 ? 2 : columns > 5 ? 3 : columns > 4 ? 4 : 5; }

inline int columns_of_small(const Problem& p) {
  const int columns = std::max(2, int_of(ceil_of(p.z_width, 8)));
  return columns == 7 ? 8 : columns;  // 7 tiles have no kernel of their own
}

// Whether rows are so few that reading them more often, for fewer sums each time, takes less time.
inline bool few_rows(const Problem& p, const Gpu& gpu) {
  return p.shared * tiles_of(p) <= int64_t{kSmallWarps} * gpu.multiprocessors;
}
inline int few_sums(const Problem& p) { return std::min(most_sums(columns_of_small(p)), kFewSums); }
inline int usual_sums(const Problem& p, const Gpu& gpu) {
  return few_rows(p, gpu) ? few_sums(p) : most_sums(columns_of_small(p));
}

// How small divides its work.
struct Sums {
  int64_t shared;     // S, or S * K where the elements of K are apart
  int count;          // K, or 1 where they are apart
  int groups, parts;  // groups of y; parts of the sum over rows
  int each;           // tiles of a part
  int stage, stages = 0, warps = 0, warp = 0;  // bytes of a stage; stages of a warp; warps of a block; bytes of a warp

  Sums(const Problem& p, const Tactic& t, const Gpu& gpu)
      : shared(p.shared * (t.of == Of::kApart ? p.x_count : 1)),
        count(t.of == Of::kApart ? 1 : int_of(p.x_count)) {
    const int V = int_of(p.x_width), rows = 16 * t.sums, size = p.item_size;
    groups = int_of(ceil_of(int64_t{count} * V, rows));
    const int64_t tiles = tiles_of(p), blocks_each = shared * groups, processors = gpu.multiprocessors;
    // Choose the number of parts whose waves of blocks leave the fewest multiprocessors idle.
    const int64_t most_parts = std::max<int64_t>(1, tiles / kSmallWarps);
    int64_t best = std::max<int64_t>(1, std::min(most_parts, processors / blocks_each));
    for (int64_t i = best + 1; i <= std::min<int64_t>(most_parts, 8); ++i) {
      if (ceil_of(blocks_each * i, processors) * best < ceil_of(blocks_each * best, processors) * i) best = i;
    }
    parts = int_of(best);
    each = int_of(ceil_of(tiles, parts));
    stage = std::min(count, (rows - 2) / V + 2) * pitch_of(p.x_width, size) + pitch_of(p.z_width, size);
    const int sums = rows * sum_pitch(t.columns) * 4;
    for (int n = kMostStages; n > 0; --n) {  // prefer the most tiles in flight
      // The sums overwrite the tiles but never the barriers behind them.
      const int bytes = std::max(n * stage, sums) + int_of(ceil_of(n * 8, 16)) * 16;
      const int fit = std::min(kSmallWarps, gpu.shared_memory / bytes), used = std::min(fit, each);
      if (fit < 2 || std::min(used * n, each) < std::min(warps * stages, each)) continue;
      warps = used;
      stages = n;
      warp = bytes;
    }
  }
  bool fits() const { return warps > 0 && shared <= 65535; }
};

// How channel_product divides its work, with `columns` columns of z in a block.
constexpr int channels_of_fetch(int item_size) { return 64 / item_size; }
constexpr int channel_pitch(int item_size) { return (kRun + 8) * item_size; }  // padded against bank conflicts
constexpr int result_pitch(int item_size) { return kRun * item_size + 16; }
constexpr int stages_of_team(int columns) { return columns == 64 ? 3 : 4; }  // stages, one of which is being read
constexpr int most_teams(int columns) { return columns > 32 ? 3 : 4; }  // limited by registers
constexpr int team_bytes(int columns, int item_size) {
  return stages_of_team(columns) * channels_of_fetch(item_size) * channel_pitch(item_size) +
         2 * kResults * result_pitch(item_size);
}

struct Teams {
  int64_t units;      // units of kRun positions
  int factor, count;  // bytes of y in shared memory; teams of a block
  int groups;         // groups of columns; a block does one of them
  int64_t blocks;     // blocks of one group

  Teams(const Problem& p, int columns, const Gpu& gpu) : units(p.outer * ceil_of(p.rows, kRun)) {
    const int chunk = channels_of_fetch(p.item_size);
    factor = int_of(ceil_of(p.x_count, chunk)) * chunk * columns * (p.item_size == 4 ? 8 : 2);  // floats in two parts
    count = std::min(most_teams(columns), (gpu.shared_memory - factor) / team_bytes(columns, p.item_size));
    groups = int_of(ceil_of(p.z_count, columns));
    blocks = std::min<int64_t>(units, std::max(1, gpu.multiprocessors / groups));
  }
  bool fits() const { return count >= 2 && units <= INT32_MAX / 2; }
  int64_t turns() const { return ceil_of(units, blocks * std::max(count, 1)); }  // most units of one team
};

constexpr double kFetchTime = 160000;  // floats of parts that are added up in the time of one fetch

// How channel_correlation divides its work. Its rows are the channels of the side that has more.
struct Correlated {
  int64_t fetches, tiles;
  int parts;

  Correlated(const Problem& p, const Gpu& gpu) {
    const int64_t rows = std::max(p.x_count, p.z_count), columns = std::min(p.x_count, p.z_count);
    fetches = p.outer * ceil_of(p.rows * p.item_size, kFetchPieces * 16);
    tiles = ceil_of(columns, kNarrow) * ceil_of(rows, kTall);
    // At most one wave of blocks. If kFetchTime floats of parts add up in the time of one fetch, a block's fetches and
    // the sum of all parts together take the least time at `best`.
    const int64_t most = std::min<int64_t>(gpu.multiprocessors / tiles, fetches);
    const auto best = static_cast<int64_t>(std::sqrt(kFetchTime * static_cast<double>(fetches) / static_cast<double>(rows * columns)));
    parts = int_of(std::max<int64_t>(1, std::min(most, best)));
  }
};
constexpr int slot_bytes(int item_size) {
  return kFetchPieces * (kTall * 16 + 16) + kFetchPieces * (kNarrow * 16 + 16) * (item_size == 4 ? 2 : 1);
}

// Registers of a thread of large, as nvcc 13 compiles it for sm_90.
inline int registers_of_large(const Tactic& t) { return t.columns == 2 ? 96 : t.columns == 3 ? 112 : 128; }

inline Launch launch(const Problem& p, const Tactic& t, const Gpu& gpu) {
  Launch l;
  l.work = 1;
  l.block[0] = 32;
  if (t.kernel == Kernel::kLarge) {
    const Division d(p, t.of, gpu);
    const int warps = d.at_once(gpu) ? kLargeWarps : std::max(d.workers, kLargeWarps / 2);
    l.shared_memory = d.before + d.workers * d.warp;
    const int blocks = d.at_once(gpu) ? 1 : resident(gpu, warps, registers_of_large(t), l.shared_memory);
    l.work = std::min(d.tiles * d.shared, int64_t{blocks} * gpu.multiprocessors);
    // Where it costs little, every block works on one element of S only.
    if (const int64_t even = l.work / d.shared * d.shared; d.even || even * 16 > l.work * 15) l.work = even;
    l.block[0] = warps * 32;
  } else if (t.kernel == Kernel::kSmall) {
    const Sums s(p, t, gpu);
    l.work = s.parts;
    l.grid_y = int_of(s.shared);
    l.grid_z = s.groups;  // the last groups, often smaller ones, come behind all others
    l.block[0] = s.warps * 32;
    l.shared_memory = s.warps * s.warp;
  } else if (t.kernel == Kernel::kChannelProduct) {
    const Teams teams(p, t.columns, gpu);
    l.work = teams.blocks * teams.groups;
    l.block[0] = teams.count * kTogether * 32;
    l.shared_memory = teams.factor + teams.count * team_bytes(t.columns, p.item_size);
  } else if (t.kernel == Kernel::kChannelCorrelation) {
    const Correlated c(p, gpu);
    l.work = c.parts;
    l.grid_y = int_of(c.tiles);
    l.block[0] = kCorrelating;
    l.shared_memory = kSlots * (slot_bytes(p.item_size) + 24);  // 24 bytes of barriers each
  }
  return l;
}

inline Few<Tactic> tactics(const Problem& p, const Gpu& gpu) {
  Few<Tactic> found;
  const bool empty = p.shared <= 0 || p.outer <= 0 || p.rows <= 0 || p.x_count <= 0 || p.x_width <= 0 || p.z_count <= 0 ||
                     p.z_width <= 0;
  const auto fit = [](int64_t count, int64_t width) { return count <= kLargestCount && width <= kLargestWidth; };
  const bool engine = p.whole && gpu.capability >= 90;
  // For compute capability 9.0 only: these kernels multiply by warp groups.
  if (!empty && gpu.capability == 90 && p.shared == 1 && p.x_width == 1 && p.z_width == 1 && p.x_count <= kMostChannels &&
      p.z_count <= kMostChannels) {
    if (p.sums && p.outer * ceil_of(p.rows * p.item_size, kFetchPieces * 16) <= INT32_MAX / 2) {
      found.add({Kernel::kChannelCorrelation});
    }
    for (const int columns : {64, 32}) {
      if (p.sums || !Teams(p, columns, gpu).fits() || (columns > 32 && p.z_count <= columns / 2)) continue;  // half idle
      found.add({Kernel::kChannelProduct, Of::kOne, columns});
    }
  }
  if (!empty && gpu.capability >= 80 && fit(p.x_count, p.x_width) && fit(p.z_count, p.z_width) &&
      tiles_of(p) * p.shared <= INT32_MAX / 2) {
    for (const Of of : {Of::kOne, Of::kApart}) {
      if (p.sums || (of != Of::kOne && p.z_count == 1)) continue;
      const Division d(p, of, gpu);
      if (d.fits) found.add({Kernel::kLarge, of, d.columns, 0, engine});
    }
    const int usual = usual_sums(p, gpu), few = few_sums(p);
    const auto add = [&](Of of, int sums) {
      const Tactic t{Kernel::kSmall, of, columns_of_small(p), sums, engine};
      if (Sums(p, t, gpu).fits()) found.add(t);
    };
    if (p.sums && p.z_count == 1) {
      if (usual != few) add(Of::kOne, usual);
      add(Of::kOne, few);
      if (p.x_count > 1) add(Of::kApart, few);
    }
  }
  if (found.size() == 0) found.add(Tactic{});
  return found;
}

// A warp does its tiles one after the other. For each group of columns it reads the rows again, which takes as long as
// 4 tiles of columns; fetching or storing a tile takes as long as 8.
inline double cost_of_large(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const Division d(p, t.of, gpu);
  const double tile = d.groups * (4.0 + d.columns) + 8.0 * (1 + d.count);
  const double turns = static_cast<double>(ceil_of(d.pieces, d.workers));
  const double waves = std::max(1.0, static_cast<double>(d.shared) / gpu.multiprocessors);
  // Separate blocks leave a following sum no room to begin early.
  const double way = t.of == Of::kApart ? f.apart[0] : 1;
  return f.launch[0] + f.large[half_of(p)] * turns * tile * waves * way;
}

// Time of the waves of blocks. A block waits for its tiles, or for the tensor cores that all resident blocks share.
inline double cost_of_small(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const Sums s(p, t, gpu);
  const int V = int_of(p.x_width), rows = 16 * t.sums, all = s.count * V, half = half_of(p);
  const double products = t.sums * t.columns;
  const double blocks = static_cast<double>(s.shared * s.groups) * s.parts / gpu.multiprocessors;
  int fetched = 0;  // elements of K that all groups fetch
  for (int i = 0; i < s.groups; ++i) fetched += (std::min(all, (i + 1) * rows) - 1) / V - i * rows / V + 1;
  const double bytes = static_cast<double>(fetched) / s.groups * pitch_of(V, p.item_size) + pitch_of(p.z_width, p.item_size);
  const double tile = f.small_product[half] * products + f.small_read[half] * (2 * t.sums + t.columns) + f.small_byte[0] * bytes;
  const auto registers = static_cast<int>(std::min(255.0, half ? 60 + 6 * products : 40 + 11.5 * products));
  const double here = std::min<double>(resident(gpu, s.warps, registers, s.warps * s.warp), std::ceil(blocks));
  const double block =
      f.small[1] +
      static_cast<double>(ceil_of(s.each, s.warps)) * std::max(tile * std::max(1.0, here * s.warps / 4), tile + f.small[2] / s.stages) +
      f.small[3] * products * s.warps * std::max(1.0, here / 2);
  const double waves = blocks / here;
  double time = f.small[0] + std::max(1.0, (std::ceil(waves) + waves) / 2) * block;
  if (s.parts > 1) {
    time += f.small_parts[0] + f.small_parts[1] * s.parts * static_cast<double>(p.shared * p.x_count * V * p.z_width);
  }
  time *= (!half && products > 16 ? f.small_time[0] : t.sums == 2 ? f.small_time[1] : 1);
  if (t.of == Of::kOne && t.sums == usual_sums(p, gpu)) return time;
  // A single sum of many rows is bound by memory. A single sum of few narrow rows begins before the preceding gradient
  // has ended.
  return time * (p.shared == 1 && (!few_rows(p, gpu) || t.columns <= 5) ? f.usual[1] : f.usual[0]);
}

inline double cost(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const double positions = 1.0 * p.shared * p.outer * p.rows;
  const double elements = positions * static_cast<double>(p.x_count * p.x_width + p.z_count * p.z_width);
  const double reading = elements * p.item_size / gpu.bandwidth;
  if (t.kernel == Kernel::kLarge) return cost_of_large(p, t, gpu, f);
  if (t.kernel == Kernel::kSmall) return cost_of_small(p, t, gpu, f);
  if (t.kernel == Kernel::kChannelProduct) {
    const auto turns = static_cast<double>(Teams(p, t.columns, gpu).turns());
    const double all = t.columns == 32 ? f.columns32[0] + f.columns32[1] * turns : turns;
    return f.launch[0] + f.channel[half_of(p)] * static_cast<double>(p.x_count) * all;
  }
  if (t.kernel == Kernel::kChannelCorrelation) return f.launch[0] + f.correlation[0] * reading + f.correlation[1];
  return f.matrices[0] + f.matrices[1] * reading;
}

// Bytes of the parts of sums that a tactic writes.
inline size_t workspace(const Problem& p, const Tactic& t, const Gpu& gpu) {
  const auto y = static_cast<size_t>(p.shared * p.x_count * p.x_width * p.z_count * p.z_width);
  if (t.kernel == Kernel::kChannelCorrelation) return sizeof(float) * y * Correlated(p, gpu).parts;
  if (t.kernel != Kernel::kSmall) return 0;
  const int parts = Sums(p, t, gpu).parts;
  return parts == 1 ? 0 : sizeof(float) * parts * y;
}

}  // namespace svexport::einsum
