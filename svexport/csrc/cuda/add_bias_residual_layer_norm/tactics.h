// The problem add_bias_residual_layer_norm solves, the tactics that solve it and their costs. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "fields.h"
#include "planner.h"

namespace svexport::norm {

struct Figures;

// x, residual, extra, the outputs and, backward, dy and ds: (rows, columns). bias, weight, norm_bias: (columns).
struct Problem {
  static constexpr const char* kOp = "add_bias_residual_layer_norm";
  using Figures = norm::Figures;
  int32_t backward = 0;
  int64_t rows = 0, columns = 0;    // columns 0: unknown, for a kernel that is compiled ahead of time
  int32_t item_size = 4;            // of x in bytes, 2 or 4
  int32_t addresses = 16;           // bytes, 16 at most, of which the addresses of all (rows, columns) are multiples
  int32_t strides = 16;             // the same for the distances between rows
  int32_t parameters = 16;          // the same for the addresses of bias, weight, norm_bias
  int32_t dense = 1;                // whether rows follow each other without gaps in all tensors
  int32_t extra = 0;                // whether there is an `extra`
  int32_t gradients = 3;            // backward: how many of the gradients of x, residual and extra are wanted
  int32_t sums = 1;                 // backward: whether a gradient of bias, weight or norm_bias is wanted

  SVEXPORT_EACH(backward, rows, columns, item_size, addresses, strides, parameters, dense, extra, gradients, sums)
};

// What does a row: a warp or a block, each thread with 8 or 32 columns in registers, or (long) a block that goes over a
// row of any length several times.
enum class Kernel : int32_t { kWarp8, kBlock8, kBlock32, kLong };
constexpr int kKernels = 4;
constexpr const char* kKernelNames[kKernels] = {"warp8", "block8", "block32", "long"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }
constexpr int kKernelColumns[kKernels] = {8, 8, 32, 8};

// How a thread reads and writes: aligned vectors of 16 bytes; the same for rows of any length without gaps between
// them, where a vector may begin before the row (shifted); pairs of elements; single elements.
enum class Access : int32_t { kVector, kShifted, kPair, kSingle };
constexpr int kAccesses = 4;
constexpr const char* kAccessNames[kAccesses] = {"vector", "shifted", "pair", "single"};
inline const char* name_of(Access e) { return kAccessNames[static_cast<int>(e)]; }

constexpr int kLanes = 32;
constexpr int kRowThreads = 512;         // threads of a block that does a row
constexpr int kWarpThreads = 128;        // threads of a block whose warps do rows, forward
constexpr int kWarpBlocks = 7;           // such blocks on a multiprocessor, where they do one row after another
constexpr int kBackwardWarps = 8;        // warps of a block whose warps do rows, backward
constexpr int kBackwardColumns = 8;      // columns of a thread, in the kernel of sums over long rows
constexpr int kLongRow = 8 * kRowThreads;  // columns above which some accesses cannot keep a row in registers
constexpr int kStaticMemory = 1024;      // most bytes of static shared memory in the kernels of blocks
constexpr int kKept = 3;                 // floats per column in shared memory, if parameters are kept there
constexpr int kStatistics = 32;          // bytes that the gradient of a long row leaves for the sums

struct Tactic {
  Kernel kernel = Kernel::kLong;
  Access access = Access::kSingle;
  bool resident = false;  // whether only as many blocks run as fit on the device, each doing row after row

  int32_t id() const { return 1 + index() + kKernels * (static_cast<int>(access) + kAccesses * resident); }
  int index() const { return static_cast<int>(kernel); }
  bool is_warp() const { return kernel == Kernel::kWarp8; }
  int columns() const { return kKernelColumns[index()]; }
  // Elements that are read at a time.
  int width(int item_size) const {
    return access <= Access::kShifted ? 16 / item_size : access == Access::kPair ? 2 : 1;
  }

  SVEXPORT_EACH(kernel, access, resident)
};

// Constants of the cost function, from tuning.h for each GPU: microseconds, or factors.
struct Figures {
  float launch[1];  // a kernel apart from its rows; kernels run one behind the other
  float turn[1];    // an access of a thread; accesses run one behind the other
  float part[1];    // each block's sums over rows, in the kernel that adds them up
  float share[1];   // until a block has its columns of the vectors in shared memory
  float again[2];   // a gradient's block going over its row again: from registers, from memory
  // Factors on the time of moving the bytes that must move: [half, float][vector, shifted, pair, single].
  float forward[kKernels][2 * kAccesses], backward[kKernels][2 * kAccesses];
  float one_row[2];  // further factor, forward, where each warp has one row: half, float

  template <class Visitor>
  void each(Visitor&& visit) {
    visit("launch", launch), visit("turn", turn), visit("part", part);
    visit("share", share), visit("again", again), visit("one_row", one_row);
    for (int k = 0; k < kKernels; ++k) {
      visit((std::string("forward_") + kKernelNames[k]).c_str(), forward[k]);
      visit((std::string("backward_") + kKernelNames[k]).c_str(), backward[k]);
    }
  }
};

// How far behind a multiple of n columns a row can begin, if rows of d columns have no gaps between them.
inline int64_t most_shifted(int64_t d, int n) { return d % n ? n - (d & -d) : 0; }

// Columns that the threads of a row cover, including what vectors cover beside a shifted row.
inline int64_t seen_columns(const Problem& p, const Tactic& t) {
  return p.columns + (t.access == Access::kShifted ? most_shifted(p.columns, t.width(p.item_size)) : 0);
}

// Parts of the sums over long rows: as many as there are resident blocks for, with two rows a warp at least.
inline int64_t parts_of(const Problem& p, const Gpu& gpu) {
  const int64_t blocks = ceil_of(p.columns, kLanes * kBackwardColumns), most = ceil_of(p.rows, 2 * kBackwardWarps);
  return std::min<int64_t>(most, std::max<int64_t>(1, 2 * gpu.multiprocessors / blocks));
}

// As many blocks as stay on the device, a multiple of n: rows a multiple of n apart leave a thread its columns.
inline int64_t resident_blocks(int64_t most, int n) { return std::max<int64_t>(n, most / n * n); }

inline Launch launch(const Problem& p, const Tactic& t, const Gpu& gpu) {
  Launch l;
  l.work = p.rows;
  const int period = t.access == Access::kShifted ? t.width(p.item_size) : 1, columns = t.columns();
  const int64_t seen = seen_columns(p, t);
  if (t.kernel == Kernel::kLong) {
    const bool kept = p.backward && p.columns <= 16 * kRowThreads;  // the row stays in registers
    l.block[0] = kept ? static_cast<int>(ceil_of(p.columns, 16 * kLanes)) * kLanes : p.columns ? kRowThreads : 256;
  } else if (t.is_warp()) {
    l.per_block = p.backward ? kBackwardWarps : kWarpThreads / kLanes;
    l.block[0] = p.backward ? kLanes : kWarpThreads;
    l.block[1] = p.backward ? kBackwardWarps : 1;
    const int blocks = p.backward ? kRowThreads / (kLanes * kBackwardWarps) : kWarpBlocks;
    if (t.resident) l.most = resident_blocks(int64_t{blocks} * gpu.multiprocessors, p.backward ? 1 : period);
  } else {
    l.block[0] = static_cast<int>(ceil_of(seen, columns * kLanes)) * kLanes;
    const int together = p.backward || columns > 8 ? kRowThreads : 2 * kRowThreads;
    if (t.resident) l.most = resident_blocks(gpu.multiprocessors * std::max(1, together / l.block[0]), period);
    if (t.access == Access::kShifted && columns > 8) l.shared_memory = kKept * columns * l.block[0] * 4;
  }
  // If there are fewer rows than that, every block, and so every thread, has one row.
  return l;
}

inline bool is_valid(const Problem& p, const Tactic& t, const Gpu& gpu) {
  const int n = t.width(p.item_size), bytes = n * p.item_size;
  const auto fits = [](int64_t given, int wanted) { return given % wanted == 0; };
  if (t.access == Access::kShifted) {
    if (!p.dense || !fits(p.addresses, 16) || (p.backward && t.kernel == Kernel::kLong)) return false;
  } else if (t.access != Access::kSingle) {
    if (!fits(p.columns, n) || !fits(p.addresses, bytes) || !fits(p.strides, bytes)) return false;
    if (!fits(p.parameters, std::min(n, 4) * 4)) return false;
  }
  const bool wide = t.access <= Access::kShifted, many = t.columns() > 8;
  if (t.kernel == Kernel::kLong) {
    return !t.resident && (p.columns ? p.columns > kLongRow : t.access == Access::kSingle);
  }
  if (!p.columns || (many && (!wide || p.backward))) return false;
  const int64_t seen = seen_columns(p, t);
  if (t.is_warp()) {
    if (seen > t.columns() * kLanes) return false;
    // Summing gradients over rows, or keeping a thread's shifted columns, takes blocks that do row after row.
    if (!t.resident && (p.backward || t.access == Access::kShifted)) return false;
  } else {
    if (seen <= t.columns() * kLanes || seen > int64_t{t.columns()} * kRowThreads) return false;
    if (t.resident != (p.backward || t.access == Access::kShifted)) return false;
  }
  const int memory = launch(p, t, gpu).shared_memory;
  return !memory || memory + kStaticMemory <= gpu.shared_memory;
}

inline Few<Tactic> tactics(const Problem& p, const Gpu& gpu) {
  Few<Tactic> found;
  for (int k = 0; k < kKernels; ++k) {
    for (int a = 0; a < kAccesses; ++a) {
      for (bool resident : {true, false}) {
        const Tactic t{static_cast<Kernel>(k), static_cast<Access>(a), resident};
        if (is_valid(p, t, gpu)) found.add(t);
      }
    }
  }
  return found;
}

// Columns that the threads of a row can hold, over those that it has: idle lanes take as long as others.
inline double idle_lanes(const Problem& p, const Tactic& t) {
  if (t.kernel == Kernel::kLong || !p.columns) return 1;
  const int64_t at_once = int64_t{t.columns()} * kLanes, warps = t.is_warp() ? 1 : ceil_of(seen_columns(p, t), at_once);
  return static_cast<double>(warps * at_once) / static_cast<double>(p.columns);
}

// Microseconds: the bytes at the memory's bandwidth, times the tactic's factor, plus the overhead of its kernels.
inline double forward_cost(const Problem& p, const Tactic& t, double tensor, const Figures& f) {
  const int is_float = p.item_size == 4, at = is_float * kAccesses + static_cast<int>(t.access);
  // Warps with idle lanes do better with several rows each, in float32 too.
  const double idle = idle_lanes(p, t), one_row = t.is_warp() && !t.resident ? f.one_row[is_float && idle < 2] : 1;
  const bool is_long = t.kernel == Kernel::kLong, shares = t.kernel == Kernel::kBlock32 && t.access == Access::kShifted;
  const int width = t.width(p.item_size);
  const double turns = is_long ? 3.0 * static_cast<double>(ceil_of(p.columns, kRowThreads * width)) : t.columns() / width;
  return f.launch[0] + turns * f.turn[0] + shares * f.share[0] +
         tensor * (4 + p.extra) * f.forward[t.index()][at] * idle * one_row;
}

// For the sums over rows, either every block leaves its part or a second kernel reads everything again.
inline double backward_cost(const Problem& p, const Tactic& t, double tensor, const Gpu& gpu, const Figures& f) {
  const int at = (p.item_size == 4) * kAccesses + static_cast<int>(t.access);
  const double factor = f.backward[t.index()][at] * idle_lanes(p, t), rows = tensor * (4 + p.extra + p.gradients);
  if (t.kernel == Kernel::kLong) {
    const bool kept = p.columns <= 16 * kRowThreads;
    const int kernels = 1 + p.sums * (1 + (parts_of(p, gpu) > 1));
    const double more = kept ? f.again[0] : f.again[1] + 2 * tensor * (3 + p.extra) * factor;
    return kernels * f.launch[0] + rows * factor + more + p.sums * tensor * (4 + p.extra) * factor;
  }
  const double blocks = static_cast<double>(launch(p, t, gpu).blocks()), partials = blocks * 3 * p.columns * 4;
  const double sums = p.sums * (f.launch[0] + 2 * partials / gpu.bandwidth + blocks * f.part[0]);
  return f.launch[0] + rows * factor + sums + t.columns() / t.width(p.item_size) * f.turn[0];
}

inline double cost(const Problem& p, const Tactic& t, const Gpu& gpu, const Figures& f) {
  const double tensor = 1.0 * p.rows * std::max<int64_t>(p.columns, 1) * p.item_size / gpu.bandwidth;
  return p.backward ? backward_cost(p, t, tensor, gpu, f) : forward_cost(p, t, tensor, f);
}

// Bytes of scratch that are enough for a gradient with sums over rows by any tactic.
inline int64_t workspace(const Problem& p, const Gpu& gpu) {
  if (!p.rows || !p.columns || !p.sums) return 0;
  int64_t most = 0;
  for (const Tactic& t : tactics(p, gpu)) {
    const bool is_long = t.kernel == Kernel::kLong;
    const int64_t parts = is_long ? parts_of(p, gpu) : launch(p, t, gpu).blocks();
    most = std::max<int64_t>(most, parts * 3 * (p.columns + 16) * 4 + (is_long ? p.rows * kStatistics : 0));
  }
  return most;
}

}  // namespace svexport::norm
