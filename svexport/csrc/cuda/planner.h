// What planners of all ops share. A planner says which ways there are to run an op on a GPU, its tactics, and which of
// them is the cheapest. Host C++ without CUDA: the launchers, the plugins and, compiled by planner.cpp, Python ask it.
//
// An op has in cuda/<op>/tactics.h
//   Problem                       what is asked: sizes, layout, types; with the op's name, kOp
//   Tactic                        a kernel and its template constants; `id` is what plans of TensorRT keep
//   Figures                       the numbers of its cost function, from tuning.h
//   tactics(problem, gpu)         those that are valid
//   launch(problem, tactic, gpu)  grid, block and shared memory
//   cost(problem, tactic, gpu, figures)  microseconds
// From these, tuned.h has the choice.
#pragma once

#include <cstdint>

namespace svexport {

// A GPU as far as choices depend on it.
struct Gpu {
  int32_t capability = 75;   // 87, 90
  int32_t multiprocessors = 1;
  int32_t shared_memory = 49152;  // bytes that a block can have
  int32_t l2_megabytes = 4;
  int32_t table = 0;         // of tuning.h: of this GPU, or the first one
  float bandwidth = 1e6;     // of its memory, bytes per microsecond
};

// Threads that a multiprocessor can have at once, and its memory that is first cache and shared memory alike, in bytes.
inline int32_t resident_threads(const Gpu& gpu) {
  switch (gpu.capability) {
    case 75: return 1024;
    case 86:
    case 87:
    case 89:
    case 110:
    case 120: return 1536;
    default: return 2048;
  }
}
inline int64_t first_cache(const Gpu& gpu) { return gpu.shared_memory + (gpu.capability >= 80 ? 1024 : 0); }

inline int64_t ceil_of(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Of a kernel. `blocks` is ceil(work / per_block), at most `most`: grid.x where the work is known.
struct Launch {
  int64_t work = 0;
  int64_t per_block = 1, most = INT32_MAX;
  int32_t grid_y = 1, grid_z = 1;
  int32_t block[3] = {1, 1, 1};
  int32_t shared_memory = 0;  // dynamic, bytes

  int64_t blocks() const {
    const int64_t wanted = ceil_of(work, per_block);
    return wanted < most ? wanted : most;
  }
  int32_t threads() const { return block[0] * block[1] * block[2]; }
};

// The largest power of two of bytes, 16 at most, of which all that was added are multiples.
class Multiple {
 public:
  void add(const void* address) { all_ |= reinterpret_cast<uintptr_t>(address); }
  void add(int64_t bytes) { all_ |= static_cast<uint64_t>(bytes); }
  int32_t bytes() const { return static_cast<int32_t>((all_ | 16) & -(all_ | 16)); }

 private:
  uint64_t all_ = 0;
};

// Not more than kMost values, without memory of their own: planners run at every launch.
template <class T, int kMost = 64>
class Few {
 public:
  void add(const T& value) {
    if (count_ < kMost) at_[count_++] = value;
  }
  const T* begin() const { return at_; }
  const T* end() const { return at_ + count_; }
  int size() const { return count_; }
  const T& operator[](int i) const { return at_[i]; }

 private:
  T at_[kMost];
  int count_ = 0;
};

// The cheapest, or the one with this id where it is valid: a plan may have been timed at other sizes. There has to be one.
template <class Tactic, class Cost>
Tactic cheapest(const Few<Tactic>& tactics, int32_t forced, const Cost& cost) {
  const Tactic* best = tactics.begin();
  double least = 0;
  for (const Tactic& tactic : tactics) {
    if (forced && tactic.id() == forced) return tactic;
    const double here = cost(tactic);
    if (&tactic == tactics.begin() || here < least) best = &tactic, least = here;
  }
  return *best;
}

}  // namespace svexport
