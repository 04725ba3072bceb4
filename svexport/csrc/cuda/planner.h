// Shared by the planners of all ops. A planner lists the ways to run an op on a GPU, its tactics, and chooses the
// cheapest. Host C++ without CUDA: the launchers, the plugins and, through planner.cpp, Python call it.
//
// An op defines in cuda/<op>/tactics.h
//   Problem                       sizes, layouts and types of a call; kOp is the op's name
//   Tactic                        a kernel and its template constants; TensorRT's plans keep its `id`
//   Figures                       the numbers of its cost function, from tuning.h
//   tactics(problem, gpu)         the valid tactics
//   launch(problem, tactic, gpu)  grid, block and shared memory
//   cost(problem, tactic, gpu, figures)  microseconds
// tuned.h chooses from these.
#pragma once

#include <cstdint>

namespace svexport {

// What the choices depend on of a GPU.
struct Gpu {
  int32_t capability = 75;   // compute capability without its point: 87, 90
  int32_t multiprocessors = 1;
  int32_t shared_memory = 49152;  // bytes per block, at most
  int32_t l2_megabytes = 4;
  int32_t table = 0;         // index of this GPU's table in tuning.h; 0: the table of any GPU
  float bandwidth = 1e6;     // memory bandwidth, bytes per microsecond
};

// Most resident threads of a multiprocessor; bytes of its memory that serves as both L1 and shared memory.
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

// The launch of a kernel. blocks(), which is grid.x, is ceil(work / per_block), at most `most`.
struct Launch {
  int64_t work = 0;
  int64_t per_block = 1, most = INT32_MAX;
  int32_t grid_y = 1, grid_z = 1;
  int32_t block[3] = {1, 1, 1};
  int32_t shared_memory = 0;  // dynamic shared memory, bytes

  int64_t blocks() const {
    const int64_t wanted = ceil_of(work, per_block);
    return wanted < most ? wanted : most;
  }
  int32_t threads() const { return block[0] * block[1] * block[2]; }
};

// The largest power of two, at most 16, that divides all added addresses and byte counts.
class Multiple {
 public:
  void add(const void* address) { all_ |= reinterpret_cast<uintptr_t>(address); }
  void add(int64_t bytes) { all_ |= static_cast<uint64_t>(bytes); }
  int32_t bytes() const { return static_cast<int32_t>((all_ | 16) & -(all_ | 16)); }

 private:
  uint64_t all_ = 0;
};

// A list of at most kMost values without allocation, because planners run at every launch.
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

// The tactic of id `forced` if it is listed (plans may be from other sizes), else the cheapest. One must be listed.
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
