// What is asked of einsum, the ways to run it and which is the cheapest. Host C++, no CUDA.
#pragma once

#include <algorithm>
#include <cmath>

#include "fields.h"
#include "planner.h"

namespace svexport::einsum {

struct Figures;

// Three tensors that share dimensions in pairs: x (S, O, K, T, V) and z (S, O, M, T, W), both large, and y (S, K, V, M, W),
// small; y or z is what is asked for. Where S, V and W are 1, K and M are channels, and T positions.
struct Problem {
  static constexpr const char* kOp = "einsum";
  using Figures = einsum::Figures;
  int32_t sums = 0;  // whether y is asked for, the sum of x z over O and T; else z, that of x y over K and V
  int64_t shared = 1, outer = 1, rows = 1;  // S, O, T
  int64_t x_count = 1, x_width = 1;         // K, V
  int64_t z_count = 1, z_width = 1;         // M, W
  int32_t item_size = 4;
  int32_t whole = 0;    // whether every 32 rows of x and z begin and end at multiples of 16 bytes
  int32_t pairs = 0;    // whether every two neighbours of their rows lie within the same 4 bytes
  int32_t aligned = 1;  // positions, 4 at most, at a multiple of whose bytes as many begin

  SVEXPORT_EACH(sums, shared, outer, rows, x_count, x_width, z_count, z_width, item_size, whole, pairs, aligned)
};

// Of large and small, whose warps each have tiles of rows in shared memory.
constexpr int kRows = 32;       // of a tile
constexpr int kMostStages = 4;  // tiles of a warp that are under way
constexpr int kLargeWarps = 16, kSmallWarps = 8;           // of a block, at most
constexpr int kLargestWidth = 64, kLargestCount = 8;       // of V and W, and of K and M
constexpr int kFewSums = 3;  // tiles of 16 of K times V that a warp adds up, where there are few rows

// Of the kernels of channels.
constexpr int kMostChannels = 4096;
constexpr int kPositions = 32, kTogether = 4;      // of a warp of channel_product; warps of a team
constexpr int kRun = kTogether * kPositions;       // positions of a team
constexpr int kResults = 16;                       // columns that it stores at once
constexpr int kTall = 128, kNarrow = 64;           // rows and columns of a block of channel_correlation
constexpr int kFetchPieces = 8;                         // of 16 bytes of positions, in one of its fetches
constexpr int kSlots = 6;                          // fetches in shared memory
constexpr int kCorrelating = 512;                  // threads

// Of large and small the elements of M or K: a warp has them all, or blocks apart read tiles of x again.
enum class Of : int32_t { kOne, kApart };
constexpr const char* kOfNames[] = {"one", "apart"};
inline const char* name_of(Of e) { return kOfNames[static_cast<int>(e)]; }

// matrices: a product of matrices, of copies where an operand lies in another order; cuBLAS's in torch, else matmul.h's.
enum class Kernel : int32_t { kLarge, kSmall, kChannelProduct, kChannelCorrelation, kMatrices };
constexpr const char* kKernelNames[] = {"large", "small", "channel_product", "channel_correlation", "matrices"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }

struct Tactic {
  Kernel kernel = Kernel::kMatrices;
  Of of = Of::kOne;
  int32_t columns = 0;  // of large and small tiles of 8 that a warp multiplies at once; of channel_product, of a block
  int32_t sums = 0;     // of small: tiles of 16 of K times V that a warp adds up
  bool engine = false;  // whether the copy engine fetches tiles of large and small

  int32_t id() const {
    const int32_t detail = kernel == Kernel::kSmall ? sums : kernel == Kernel::kChannelProduct ? columns / 32 : 0;
    return 1 + 64 * static_cast<int32_t>(kernel) + 16 * static_cast<int32_t>(of) + detail;
  }

  SVEXPORT_EACH(kernel, of, columns, sums, engine)
};

// Of the cost function, microseconds unless it says otherwise; where there are two, of float32 and of half types.
struct Figures {
  float launch[1];        // of a kernel that is not small
  float large[2];         // of a warp for a tile of rows and 8 columns
  float apart[1];         // time over that of the estimate, of blocks apart
  float small[4];         // of a launch, of a block, until a tile is there, of a product in the sum over warps
  float small_product[2];  // of a warp for a product of 16 by 8 by 32 rows
  float small_read[2];     // for reading 8 of its rows or columns
  float small_byte[1];     // for fetching one
  float small_parts[2];    // of the kernel that adds parts up; for one of their floats
  float small_time[2];     // time over that of the estimate: of crowded registers; of 2 sums
  float usual[2];  // time over that of the estimate of sums that are not the usual ones; where it is a single one
  float channel[2];         // of a multiprocessor for a channel of one turn of 64 columns
  float columns32[2];       // beside all turns of 32 columns, and for each, as of one of 64
  float correlation[2];     // time over that of reading; of adding parts up
  float matrices[2];        // of products of matrices beside their work; time over that of copying all tensors once

  SVEXPORT_EACH(launch, large, apart, small, small_product, small_read, small_byte, small_parts, small_time, usual,
                channel, columns32, correlation, matrices)
};

inline int int_of(int64_t n) { return static_cast<int>(n); }
inline int half_of(const Problem& p) { return p.item_size == 4 ? 0 : 1; }  // the place in a pair of figures

// Bytes in shared memory of a tile of one of K or M.
inline int pitch_of(int64_t width, int64_t item_size) { return int_of(kRows * width * item_size) + 32; }

// Floats from row to row of the sums of a warp of small in shared memory: its lanes store to different banks.
constexpr int sum_pitch(int columns) { return columns % 2 ? 8 * columns : 8 * columns + 8; }

inline int64_t tiles_of(const Problem& p) { return p.outer * ceil_of(p.rows, kRows); }  // of one of S

// Blocks that a multiprocessor has at once.
inline int resident(const Gpu& gpu, int warps, int registers, int bytes) {
  const int by_memory = (gpu.shared_memory + 1024) / (bytes + 1024);
  return std::max(1, std::min(by_memory, 65536 / (int_of(ceil_of(registers, 8)) * 256 * warps)));
}

// How large divides its work.
struct Division {
  int apart, count;           // 1 or, of M, those that are apart, and those that a warp does
  int columns;                // of 8, that a warp does at once
  int steps, groups, before;  // of the product over K and V; of the columns, M times W; bytes in front of what warps have
  int pieces, workers = 0;    // of a block, of one of S; warps that have any
  int stages = 0, warp = 0;   // tiles of a warp that are under way, and bytes of all it has
  int64_t shared, tiles;      // S, times those that are apart; of one of these
  bool even = false;          // whether no block works on two of S
  bool fits;

  Division(const Problem& p, Of of, const Gpu& gpu)
      : apart(of == Of::kApart ? int_of(p.z_count) : 1),
        count(of == Of::kOne ? int_of(p.z_count) : 1),
        shared(p.shared * apart),
        tiles(tiles_of(p)) {
    const int size = p.item_size, K = int_of(p.x_count), half_width = int_of(ceil_of(p.x_width, 2));
    // For every group of columns the rows are read anew, which takes as long as 4 tiles of columns. 7 are for half types
    // alone.
    const auto all = int_of(ceil_of(count * p.z_width, 8));
    const auto time = [&](int n) { return ceil_of(all, n) * (4 + n); };
    columns = 2;
    for (const int n : {3, 4, 5, 7}) {
      if ((n <= 5 || size == 2) && time(n) < time(columns)) columns = n;
    }
    groups = int_of(ceil_of(all, columns));
    steps = int_of(ceil_of(int64_t{K} * half_width, size == 4 ? 4 : 8));
    const int fragment = size == 4 ? 16 : 8;  // bytes of a lane of a step, floats in two parts
    before = groups * columns * 32 * (steps * fragment + 1) + steps * 32;
    const int stage = K * pitch_of(p.x_width, size), results = count * pitch_of(p.z_width, size);
    const int room = gpu.shared_memory - before;
    const auto bytes_of = [&](int n) { return int_of(ceil_of(n * (stage + 8), 16)) * 16 + results; };
    // Warps hide more than tiles under way.
    stages = room / bytes_of(2) >= 12 ? 2 : 1;
    while (stages < kMostStages && room / bytes_of(stages + 1) >= kLargeWarps) ++stages;
    pieces = int_of(std::min(tiles, ceil_of(tiles * shared, gpu.multiprocessors)));
    fits = room / bytes_of(stages) >= 2 && tiles * shared <= INT32_MAX / 2;
    if (!fits) return;
    workers = std::min(kLargeWarps, room / bytes_of(stages));
    if (shared <= gpu.multiprocessors) {  // where all tiles are done at once, factors are better read once than by all
      const int64_t most = ceil_of(tiles, gpu.multiprocessors / shared);
      even = most <= workers;
      if (even) pieces = int_of(most);
    }
    workers = std::min(workers, pieces);
    stages = std::min(stages, int_of(ceil_of(pieces, workers)));
    warp = bytes_of(stages);
  }

  // One block a processor has all its tiles.
  bool at_once(const Gpu& gpu) const { return pieces <= workers && shared <= gpu.multiprocessors; }
};

// Tiles of 16 of K times V that a warp adds up at most, with so many of 8 columns: as registers hold twice.
constexpr int most_sums(int columns) { return columns > 7 ? 2 : columns > 5 ? 3 : columns > 4 ? 4 : 5; }

inline int columns_of_small(const Problem& p) {
  const int columns = std::max(2, int_of(ceil_of(p.z_width, 8)));
  return columns == 7 ? 8 : columns;  // for which there is no kernel of its own
}

// Whether rows are so few that it takes less time to read them more often, each time for fewer sums.
inline bool few_rows(const Problem& p, const Gpu& gpu) {
  return p.shared * tiles_of(p) <= int64_t{kSmallWarps} * gpu.multiprocessors;
}
inline int few_sums(const Problem& p) { return std::min(most_sums(columns_of_small(p)), kFewSums); }
inline int usual_sums(const Problem& p, const Gpu& gpu) {
  return few_rows(p, gpu) ? few_sums(p) : most_sums(columns_of_small(p));
}

// How small divides its work.
struct Sums {
  int64_t shared;     // S or, where each of K is apart, times K
  int count;          // K, or 1
  int groups, parts;  // of y; of the sum over rows
  int each;           // tiles of a part
  int stage, stages = 0, warps = 0, warp = 0;  // bytes of a stage; stages of a warp; warps; bytes of a warp

  Sums(const Problem& p, const Tactic& t, const Gpu& gpu)
      : shared(p.shared * (t.of == Of::kApart ? p.x_count : 1)),
        count(t.of == Of::kApart ? 1 : int_of(p.x_count)) {
    const int V = int_of(p.x_width), rows = 16 * t.sums, size = p.item_size;
    groups = int_of(ceil_of(int64_t{count} * V, rows));
    const int64_t tiles = tiles_of(p), blocks_each = shared * groups, processors = gpu.multiprocessors;
    // As many parts as leave the fewest processors idle, in fewer or shorter waves of blocks.
    const int64_t most_parts = std::max<int64_t>(1, tiles / kSmallWarps);
    int64_t best = std::max<int64_t>(1, std::min(most_parts, processors / blocks_each));
    for (int64_t i = best + 1; i <= std::min<int64_t>(most_parts, 8); ++i) {
      if (ceil_of(blocks_each * i, processors) * best < ceil_of(blocks_each * best, processors) * i) best = i;
    }
    parts = int_of(best);
    each = int_of(ceil_of(tiles, parts));
    stage = std::min(count, (rows - 2) / V + 2) * pitch_of(p.x_width, size) + pitch_of(p.z_width, size);
    const int sums = rows * sum_pitch(t.columns) * 4;
    for (int n = kMostStages; n > 0; --n) {  // the most tiles under way
      // Barriers stay what they are: sums take the place of tiles alone.
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

// How channel_product divides its work, with so many columns of z in a block.
constexpr int channels_of_fetch(int item_size) { return 64 / item_size; }
constexpr int channel_pitch(int item_size) { return (kRun + 8) * item_size; }  // of what was fetched: lanes meet in no bank
constexpr int result_pitch(int item_size) { return kRun * item_size + 16; }
constexpr int stages_of_team(int columns) { return columns == 64 ? 3 : 4; }  // fetches under way, one being read
constexpr int most_teams(int columns) { return columns > 32 ? 3 : 4; }  // as registers allow
constexpr int team_bytes(int columns, int item_size) {
  return stages_of_team(columns) * channels_of_fetch(item_size) * channel_pitch(item_size) +
         2 * kResults * result_pitch(item_size);
}

struct Teams {
  int64_t units;      // of kRun positions
  int factor, count;  // bytes of y; teams of a block
  int groups;         // of columns, one of which a block does
  int64_t blocks;     // of one of these

  Teams(const Problem& p, int columns, const Gpu& gpu) : units(p.outer * ceil_of(p.rows, kRun)) {
    const int chunk = channels_of_fetch(p.item_size);
    factor = int_of(ceil_of(p.x_count, chunk)) * chunk * columns * (p.item_size == 4 ? 8 : 2);  // floats in two parts
    count = std::min(most_teams(columns), (gpu.shared_memory - factor) / team_bytes(columns, p.item_size));
    groups = int_of(ceil_of(p.z_count, columns));
    blocks = std::min<int64_t>(units, std::max(1, gpu.multiprocessors / groups));
  }
  bool fits() const { return count >= 2 && units <= INT32_MAX / 2; }
  int64_t turns() const { return ceil_of(units, blocks * std::max(count, 1)); }  // units of a team, at most
};

constexpr double kFetchTime = 160000;  // floats of parts that are added up in the time of a fetch

// How channel_correlation divides its work. The side with more channels is that of the rows.
struct Correlated {
  int64_t fetches, tiles;
  int parts;

  Correlated(const Problem& p, const Gpu& gpu) {
    const int64_t rows = std::max(p.x_count, p.z_count), columns = std::min(p.x_count, p.z_count);
    fetches = p.outer * ceil_of(p.rows * p.item_size, kFetchPieces * 16);
    tiles = ceil_of(columns, kNarrow) * ceil_of(rows, kTall);
    // As many parts as there are blocks at once, at most. A block's fetches and the sum of all parts take the least time
    // together where one fetch takes as long as to add up so many floats of parts.
    const int64_t most = std::min<int64_t>(gpu.multiprocessors / tiles, fetches);
    const auto best = static_cast<int64_t>(std::sqrt(kFetchTime * static_cast<double>(fetches) / static_cast<double>(rows * columns)));
    parts = int_of(std::max<int64_t>(1, std::min(most, best)));
  }
};
constexpr int slot_bytes(int item_size) {
  return kFetchPieces * (kTall * 16 + 16) + kFetchPieces * (kNarrow * 16 + 16) * (item_size == 4 ? 2 : 1);
}

// Of large, as nvcc 13 compiles it for sm_90.
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
    // Where it costs little, no block is to work on two of S.
    if (const int64_t even = l.work / d.shared * d.shared; d.even || even * 16 > l.work * 15) l.work = even;
    l.block[0] = warps * 32;
  } else if (t.kernel == Kernel::kSmall) {
    const Sums s(p, t, gpu);
    l.work = s.parts;
    l.grid_y = int_of(s.shared);
    l.grid_z = s.groups;  // the last of y, often smaller ones, behind all others
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
    l.shared_memory = kSlots * (slot_bytes(p.item_size) + 24);  // with the barriers
  }
  return l;
}

inline Few<Tactic> tactics(const Problem& p, const Gpu& gpu) {
  Few<Tactic> found;
  const bool empty = p.shared <= 0 || p.outer <= 0 || p.rows <= 0 || p.x_count <= 0 || p.x_width <= 0 || p.z_count <= 0 ||
                     p.z_width <= 0;
  const auto fit = [](int64_t count, int64_t width) { return count <= kLargestCount && width <= kLargestWidth; };
  const bool engine = p.whole && gpu.capability >= 90;
  // Of compute capability 9.0 alone: groups of warps multiply.
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

// A warp does its tiles one after the other: for each group of columns it reads the rows anew, which takes as long as 4
// tiles of columns; to fetch or to store a tile takes as long as 8.
inline double cost_of_large(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const Division d(p, t.of, gpu);
  const double tile = d.groups * (4.0 + d.columns) + 8.0 * (1 + d.count);
  const double turns = static_cast<double>(ceil_of(d.pieces, d.workers));
  const double waves = std::max(1.0, static_cast<double>(d.shared) / gpu.multiprocessors);
  // Blocks apart leave a sum that follows no room to begin early.
  const double way = t.of == Of::kApart ? f.apart[0] : 1;
  return f.launch[0] + f.large[half_of(p)] * turns * tile * waves * way;
}

// Waves of blocks; a block waits for its tiles, or for the tensor cores that the warps of all blocks here share.
inline double cost_of_small(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const Sums s(p, t, gpu);
  const int V = int_of(p.x_width), rows = 16 * t.sums, all = s.count * V, half = half_of(p);
  const double products = t.sums * t.columns;
  const double blocks = static_cast<double>(s.shared * s.groups) * s.parts / gpu.multiprocessors;
  int fetched = 0;  // of K, by all groups
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
  // A single sum of many rows is bound by memory; that of few narrow ones begins before the gradient that it follows has
  // ended.
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

// Bytes that a tactic leaves parts of sums in.
inline size_t workspace(const Problem& p, const Tactic& t, const Gpu& gpu) {
  const auto y = static_cast<size_t>(p.shared * p.x_count * p.x_width * p.z_count * p.z_width);
  if (t.kernel == Kernel::kChannelCorrelation) return sizeof(float) * y * Correlated(p, gpu).parts;
  if (t.kernel != Kernel::kSmall) return 0;
  const int parts = Sums(p, t, gpu).parts;
  return parts == 1 ? 0 : sizeof(float) * parts * y;
}

}  // namespace svexport::einsum
