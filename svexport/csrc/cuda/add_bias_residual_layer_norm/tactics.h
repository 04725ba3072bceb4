// What is asked of add_bias_residual_layer_norm, the ways to run it and which is the cheapest. Host C++, no CUDA.
#pragma once

#include <algorithm>

#include "fields.h"
#include "planner.h"

namespace svexport::norm {

struct Figures;

// x, residual, extra, the outputs, and in the gradient dy and ds: (rows, columns). bias, weight, norm_bias: (columns).
struct Problem {
  static constexpr const char* kOp = "add_bias_residual_layer_norm";
  using Figures = norm::Figures;
  int32_t backward = 0;
  int64_t rows = 0, columns = 0;    // columns 0: not known, of a kernel that is compiled ahead of time
  int32_t item_size = 4;            // of an element of x, 2 or 4
  int32_t addresses = 16;           // bytes of which all addresses of (rows, columns) are multiples, 16 at most
  int32_t strides = 16;             // the same of what lies between rows
  int32_t parameters = 16;          // the same of the addresses of bias, weight, norm_bias
  int32_t dense = 1;                // whether rows lie one behind the other in all tensors
  int32_t extra = 0;                // whether there is one
  int32_t gradients = 3;            // backward: of those of x, residual, extra, how many are wanted
  int32_t sums = 1;                 // backward: whether a gradient of bias, weight or norm_bias is wanted

  SVEXPORT_EACH(backward, rows, columns, item_size, addresses, strides, parameters, dense, extra, gradients, sums)
};

// Who does a row, with how many columns of it in the registers of a thread: a warp, a block, or a block that goes over a
// row of any length several times.
enum class Kernel : int32_t { kWarp8, kBlock8, kBlock32, kLong };
constexpr int kKernels = 4;
constexpr const char* kKernelNames[kKernels] = {"warp8", "block8", "block32", "long"};
inline const char* name_of(Kernel e) { return kKernelNames[static_cast<int>(e)]; }
constexpr int kKernelColumns[kKernels] = {8, 8, 32, 8};

// How a thread reads and writes: vectors of 16 bytes in place; the same of rows of any length that lie one behind the
// other, at multiples of 16 bytes, which may begin before the row; pairs of elements; single elements.
enum class Access : int32_t { kVector, kShifted, kPair, kSingle };
constexpr int kAccesses = 4;
constexpr const char* kAccessNames[kAccesses] = {"vector", "shifted", "pair", "single"};
inline const char* name_of(Access e) { return kAccessNames[static_cast<int>(e)]; }

constexpr int kLanes = 32;
constexpr int kRowThreads = 512;         // of a block that does a row
constexpr int kWarpThreads = 128;        // of a block whose warps do rows, forward
constexpr int kWarpBlocks = 7;           // of those, on a multiprocessor, where blocks do one row after another
constexpr int kBackwardWarps = 8;        // of a block whose warps do rows, backward
constexpr int kBackwardColumns = 8;      // of a thread of the kernel of sums over long rows
constexpr int kLongRow = 8 * kRowThreads;  // columns, above which there are rows that no registers hold
constexpr int kStaticMemory = 1024;      // bytes that the kernels of blocks have beside the dynamic ones, at most
constexpr int kKept = 3;                 // floats per column in shared memory, where there are any
constexpr int kStatistics = 32;          // bytes that the gradient of a long row leaves for the sums

struct Tactic {
  Kernel kernel = Kernel::kLong;
  Access access = Access::kSingle;
  bool resident = false;  // blocks do one row after another, as many as stay on the device; else each has one

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

// Of the cost function: as tuning.h has them for a GPU. Microseconds, but for the factors.
struct Figures {
  float launch[1];  // of a kernel beside its rows, one behind the other
  float turn[1];    // of an access of a thread, one behind the other
  float part[1];    // for each block's sums over rows, in the kernel that adds them up
  float share[1];   // until a block has its columns of the vectors in shared memory
  float again[2];   // of a gradient's block that goes over its row again: what is in registers, what is not
  // Time over that of moving the bytes that have to be moved: [half, float][vector, shifted, pair, single].
  float forward[kKernels][2 * kAccesses], backward[kKernels][2 * kAccesses];
  float one_row[2];  // a further factor where each warp has one row, forward: half, float

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

// How far a row can begin behind a multiple of n columns, if rows of d lie one behind the other.
inline int64_t most_shifted(int64_t d, int n) { return d % n ? n - (d & -d) : 0; }

// Columns that the threads of a row see.
inline int64_t seen_columns(const Problem& p, const Tactic& t) {
  return p.columns + (t.access == Access::kShifted ? most_shifted(p.columns, t.width(p.item_size)) : 0);
}

// Blocks of the sums over long rows: as many as are resident, of two rows a warp at least.
inline int64_t parts_of(const Problem& p, const Gpu& gpu) {
  const int64_t blocks = ceil_of(p.columns, kLanes * kBackwardColumns), most = ceil_of(p.rows, 2 * kBackwardWarps);
  return std::min<int64_t>(most, std::max<int64_t>(1, 2 * gpu.multiprocessors / blocks));
}

// As many blocks as stay on the device, so that a thread of shifted rows keeps its columns: rows a multiple of n apart.
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
  // Fewer rows than that each have a block, and then a thread has one row.
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
    // The sums of the gradient, and columns that a thread keeps, are those of one row after another.
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

// The columns that the threads of a row have over those that it has: idle lanes take as long.
inline double idle_lanes(const Problem& p, const Tactic& t) {
  if (t.kernel == Kernel::kLong || !p.columns) return 1;
  const int64_t at_once = int64_t{t.columns()} * kLanes, warps = t.is_warp() ? 1 : ceil_of(seen_columns(p, t), at_once);
  return static_cast<double>(warps * at_once) / static_cast<double>(p.columns);
}

// Microseconds: the bytes at the bandwidth of the memory, times what a tactic takes longer than that, and its kernels.
inline double forward_cost(const Problem& p, const Tactic& t, double tensor, const Figures& f) {
  const int is_float = p.item_size == 4, at = is_float * kAccesses + static_cast<int>(t.access);
  // Of warps with idle lanes it is better that each has several rows, in float32 too.
  const double idle = idle_lanes(p, t), one_row = t.is_warp() && !t.resident ? f.one_row[is_float && idle < 2] : 1;
  const bool is_long = t.kernel == Kernel::kLong, shares = t.kernel == Kernel::kBlock32 && t.access == Access::kShifted;
  const int width = t.width(p.item_size);
  const double turns = is_long ? 3.0 * static_cast<double>(ceil_of(p.columns, kRowThreads * width)) : t.columns() / width;
  return f.launch[0] + turns * f.turn[0] + shares * f.share[0] +
         tensor * (4 + p.extra) * f.forward[t.index()][at] * idle * one_row;
}

// Of the sums over rows either every block leaves its own, or a second kernel reads everything again.
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

// Bytes of scratch of a gradient with sums over rows: enough for every tactic.
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
