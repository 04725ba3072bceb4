// A CUDA runtime that interprets PTX on the CPU: what of a CUDA source can be tested where there is no GPU.
//
// Programs linked with it instead of libcudart find their kernels' PTX in their own fat binaries, so these are compiled
// for a virtual architecture and uncompressed (-gencode arch=compute_90a,code=compute_90a --no-compress). Device memory
// is the process's, as far as `emulation_allow` has named it; streams run at once. Blocks run one after another, their
// warps in turn, and the lanes of a warp together as far as they are at the same place. Reported, as the result of the
// launch and by `emulation_report`: accesses outside of allowed memory or not aligned, races in shared memory (of what no
// barrier orders, of asynchronous copies too), barriers and shuffles that not all threads reach, unknown instructions.
// Shared memory that nobody has written is NaN.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cctype>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

constexpr int kWarp = 32;
constexpr uint64_t kShared = 1ull << 56, kLocal = 2ull << 56, kParameters = 3ull << 56;  // tags of generic addresses
constexpr uint64_t kStatic = 1ull << 24;  // where in shared memory, behind that of the launch, the kernel's own begins
constexpr uint8_t kPoison = 0xff;  // of memory that nobody has written: NaN as a number
constexpr int kQuantum = 20000;  // instructions after which it is the next warp's turn
constexpr int kMostIdle = 100;   // turns of all warps in which they do nothing but to ask whether they may go on

struct Fault : std::runtime_error {
  using std::runtime_error::runtime_error;
};

[[noreturn]] void fail(const std::string& text) { throw Fault(text); }

// ---------------------------------------------------------------------------------------------- numbers

struct BFloat16 {
  uint16_t bits;
  BFloat16() = default;
  BFloat16(float x) {
    const auto u = std::bit_cast<uint32_t>(x);
    bits = std::isnan(x) ? 0x7fff : static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
  }
  operator float() const { return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16); }
};

using Half = _Float16;

template <class T>
constexpr bool kFloats = std::is_same_v<T, float> || std::is_same_v<T, double> || std::is_same_v<T, Half> ||
                         std::is_same_v<T, BFloat16>;

enum class Type { u8, u16, u32, u64, s8, s16, s32, s64, f16, bf16, f32, f64, f16x2, bf16x2, pred, none };

std::optional<Type> type_of(std::string_view s) {
  static const std::unordered_map<std::string_view, Type> types = {
      {"u8", Type::u8},    {"u16", Type::u16},   {"u32", Type::u32},     {"u64", Type::u64},       {"s8", Type::s8},
      {"s16", Type::s16},  {"s32", Type::s32},   {"s64", Type::s64},     {"b8", Type::u8},         {"b16", Type::u16},
      {"b32", Type::u32},  {"b64", Type::u64},   {"f16", Type::f16},     {"bf16", Type::bf16},     {"f32", Type::f32},
      {"f64", Type::f64},  {"f16x2", Type::f16x2}, {"bf16x2", Type::bf16x2}, {"pred", Type::pred}};
  const auto found = types.find(s);
  return found == types.end() ? std::nullopt : std::optional(found->second);
}

// f(T()) of the type, those of two halves apart.
template <class F>
auto with_type(Type type, F f) {
  switch (type) {
    case Type::pred:
    case Type::u8: return f(uint8_t());
    case Type::u16: return f(uint16_t());
    case Type::u32: return f(uint32_t());
    case Type::u64: return f(uint64_t());
    case Type::s8: return f(int8_t());
    case Type::s16: return f(int16_t());
    case Type::s32: return f(int32_t());
    case Type::s64: return f(int64_t());
    case Type::f16: return f(Half());
    case Type::bf16: return f(BFloat16());
    case Type::f32: return f(float());
    case Type::f64: return f(double());
    default: fail("no scalar type");
  }
}

int size_of(Type type) {
  if (type == Type::f16x2 || type == Type::bf16x2) return 4;
  return with_type(type, [](auto x) { return static_cast<int>(sizeof(x)); });
}

template <class T>
using Bits = std::conditional_t<sizeof(T) == 1, uint8_t,
                                std::conditional_t<sizeof(T) == 2, uint16_t,
                                                   std::conditional_t<sizeof(T) == 4, uint32_t, uint64_t>>>;

template <class T>
T from_bits(uint64_t x) {
  return std::bit_cast<T>(static_cast<Bits<T>>(x));
}

template <class T>
uint64_t to_bits(T x) {
  if constexpr (std::is_integral_v<T>) {
    return static_cast<uint64_t>(x);  // signs extended: loads widen
  } else {
    return std::bit_cast<Bits<T>>(x);
  }
}

// ---------------------------------------------------------------------------------------------- memory

std::map<uintptr_t, uintptr_t> allowed;  // begin -> end

void check_global(uint64_t address, size_t bytes) {
  auto next = allowed.upper_bound(address);
  if (next != allowed.begin() && address + bytes <= std::prev(next)->second) return;
  fail("an access outside of what is allowed");
}

// Until when what each thread, and the engine of each barrier in memory, has done is known: times of their warps, and
// phases. Behind these, in kernels that use the copy engine, the same of what it may know of.
using Clock = std::vector<uint32_t>;

void join(Clock& to, const Clock& from) {
  if (to.size() < from.size()) to.resize(from.size());
  for (size_t k = 0; k < from.size(); ++k) to[k] = std::max(to[k], from[k]);
}

// Lanes of a warp that have read a byte at the same time.
struct Readers {
  int warp;
  uint32_t time, lanes;
};

// What was last done to a byte of shared memory, to find races. Where nothing has been done to a part of a word, its first
// byte stands for all four.
struct Byte {
  uint64_t block = 0;  // which the rest is of
  int writer = -1;     // a thread, or behind them an engine
  uint32_t written = 0;
  int changer = -1;  // by an atomic operation, behind that
  uint32_t changed = 0;
  bool filled = false, split = false;
  bool coming = false;  // a copy to there is under way
  uint32_t going = 0;   // copies from there that are under way
  std::vector<Readers> readers;  // since; none of whom another one knows of
};

// ---------------------------------------------------------------------------------------------- programs

struct Operand {
  int reg = -1;  // or a number:
  uint64_t number = 0;
};

struct Warp;
struct Instruction;
using Run = std::function<void(Warp&, const Instruction&, uint32_t)>;

enum class Kind { plain, branch, leave, barrier, together };

struct Instruction {
  Kind kind = Kind::plain;
  Run run;
  int predicate = -1;
  bool negated = false;
  std::vector<Operand> to, from;
  int target = -1;        // of a branch; its label's place
  Operand members;        // of what lanes do together
  bool waits = true;      // of a barrier, else it only arrives
  int reduction = 0;      // 1 popc, 2 and, 3 or
  std::string text;
};

enum class Special { tid_x, tid_y, tid_z, ntid_x, ntid_y, ntid_z, ctaid_x, ctaid_y, ctaid_z, nctaid_x, nctaid_y, nctaid_z,
                     laneid, warpid, lanemask_lt, lanemask_le, lanemask_gt, lanemask_ge, lanemask_eq };

struct Parameter {
  size_t offset, size;
};

struct Function {
  std::vector<Instruction> code;
  std::vector<Parameter> parameters;
  size_t parameter_bytes = 0, shared_bytes = 0, local_bytes = 0;
  bool has_engine = false;  // copies by the engine, or barriers in memory
  int registers = 0;
  std::vector<std::pair<int, Special>> specials;
};

struct Program {
  std::string text;
  std::unordered_map<std::string, size_t> entries;     // places in the text
  std::unordered_map<std::string, size_t> callees;     // of functions that kernels call
  std::unordered_map<std::string, std::string> shared;  // declarations outside of functions
  std::unordered_map<std::string, std::unique_ptr<Function>> functions;
};

// ---------------------------------------------------------------------------------------------- running blocks

struct Block;

struct Group {
  int at;
  uint32_t lanes;
  bool blocked = false;
  bool yields = false;  // until the warp's next turn
};

struct Copy {
  int lane, group, bytes, given;
  uint64_t to, from;
  uint64_t order = 0;  // among those of a warp
  uint32_t time = 0;   // of the first late arrival behind it
};

struct Warp {
  Block* block;
  int number, threads;
  uint32_t alive;
  std::vector<uint64_t> registers;  // (registers, lanes)
  std::vector<Group> groups;
  std::vector<uint8_t> local;  // (lanes, bytes)
  std::vector<Copy> copies, puts;  // puts: by the copy engine, from shared memory
  uint64_t copied = 0;
  std::vector<std::pair<uint64_t, int>> multiplied;  // where in shared memory wgmma reads, and how many bytes
  std::array<int, kWarp> commits{}, put_commits{};
  uint32_t time = 1;
  Clock known;                    // to all lanes
  std::array<Clock, kWarp> more;  // that one of them knows
  bool yields = false;

  uint64_t bits(const Operand& x, int lane) const { return x.reg < 0 ? x.number : registers[x.reg * kWarp + lane]; }
  template <class T>
  T get(const Operand& x, int lane) const {
    return from_bits<T>(bits(x, lane));
  }
  template <class T>
  void put(const Operand& to, int lane, T x) {
    if (to.reg >= 0) registers[to.reg * kWarp + lane] = to_bits(x);
  }
  // how: r, w or a (atomic); aligned: to so many bytes, if not to `bytes`.
  inline uint8_t* at(uint64_t address, size_t bytes, int lane, char how, size_t aligned = 0);

  int thread(int lane) const { return number * kWarp + lane; }
  bool knows(int lane, size_t at, uint32_t time) const {
    return known[at] >= time || (!more[lane].empty() && more[lane][at] >= time);
  }
  // What lanes know and have done, for others.
  void release(uint32_t lanes, Clock& to) {
    join(to, known);
    for (; lanes; lanes &= lanes - 1) {
      const int lane = std::countr_zero(lanes);
      join(to, more[lane]);
      to[thread(lane)] = time;
    }
    ++time;
  }
  void acquire(uint32_t lanes, const Clock& from) {
    if (!(alive & ~lanes)) return join(known, from);
    for (; lanes; lanes &= lanes - 1) join(more[std::countr_zero(lanes)], from);
  }
  void synchronize(uint32_t lanes) {
    Clock all;
    release(lanes, all);
    acquire(lanes, all);
    if (alive & ~lanes) return;
    for (auto& one : more) one.clear();
  }
};

struct Barrier {
  int arrived = 0, expected = 0, counted = 0, ones = 0;
  Clock clock;
  struct Waiting {
    Warp* warp;
    int at;
    uint32_t lanes;
    Operand to;
    int reduction;
  };
  std::vector<Waiting> waiting;
};

// An arrival when the copies are there that a lane has begun before.
struct LateArrival {
  Warp* warp;
  int lane;
  uint64_t order;
  Clock clock;
};

// A barrier in shared memory: a phase of it ends with all arrivals and bytes.
struct MemoryBarrier {
  int engine = 0;
  uint32_t count = 0, pending = 0, phase = 0;
  int64_t bytes = 0;  // expected, less those that have come
  Clock arrived, done;  // done: of the phases that have ended
  std::vector<Copy> copies;
  std::vector<LateArrival> late;
};

constexpr int kEngines = 128;  // barriers in memory of a block

struct Block {
  const Function& function;
  std::vector<uint8_t> parameters, shared, dynamic;
  std::vector<Byte>&shared_bytes, &dynamic_bytes;
  uint64_t number;
  std::array<Barrier, 16> barriers;
  std::map<uint64_t, MemoryBarrier> memory_barriers;
  std::vector<Warp> warps;
  int threads = 0, left = 0;
  int known = 0;        // threads and engines
  uint64_t events = 0;  // of which others may have waited

  // Where a thread may do something to a byte only behind what others have done.
  void check(const Byte& b, const Warp& w, int lane, char how) {
    const int thread = w.thread(lane);
    if (b.coming) fail("a race: a copy to there is under way");
    const auto known = [&](int who, uint32_t when) { return who < 0 || who == thread || w.knows(lane, who, when); };
    if (!known(b.writer, b.written) || (how != 'a' && !known(b.changer, b.changed))) {
      const int who = known(b.writer, b.written) ? b.changer : b.writer;
      fail((how == 'r' ? "a race: another thread writes what is read" : "a race: another thread writes there as well") +
           (" (" + std::to_string(who) + ")"));
    }
    if (how == 'r') return;
    if (b.going) fail("a race: a copy from there is under way");
    for (const Readers& r : b.readers) {
      for (uint32_t lanes = r.lanes; lanes; lanes &= lanes - 1) {
        const int reader = r.warp * kWarp + std::countr_zero(lanes);
        if (!known(reader, r.time)) fail("a race: another thread reads what is written (" + std::to_string(reader) + ")");
      }
    }
  }

  void note(Byte& b, const Warp& w, int lane, char how) {
    check(b, w, lane, how);
    if (how == 'r') {
      for (Readers& r : b.readers) {
        if (r.warp != w.number || r.time != w.time) continue;
        r.lanes |= 1u << lane;
        return;
      }
      std::erase_if(b.readers, [&](Readers& r) {
        for (uint32_t lanes = r.lanes; lanes; lanes &= lanes - 1) {
          const int other = std::countr_zero(lanes), reader = r.warp * kWarp + other;
          if (reader == w.thread(lane) || w.knows(lane, reader, r.time)) r.lanes &= ~(1u << other);
        }
        return !r.lanes;
      });
      b.readers.push_back({w.number, w.time, 1u << lane});
    } else if (how == 'w') {
      wrote(b, w.thread(lane), w.time);
    } else {
      b.readers.clear();
      b.changer = w.thread(lane);
      b.changed = w.time;
    }
  }

  static void wrote(Byte& b, int who, uint32_t when) {
    b.readers.clear();
    b.writer = who;
    b.written = when;
    b.changer = -1;
    b.filled = true;
  }

  // Calls f with what is known of bytes at a place in shared memory; same: f leaves them alike. Returns the place.
  template <class F>
  uint8_t* for_bytes(uint64_t offset, size_t bytes, bool same, F f) {
    auto& memory = offset < kStatic ? dynamic : shared;
    auto& noted = offset < kStatic ? dynamic_bytes : shared_bytes;
    if (offset >= kStatic) offset -= kStatic;
    if (offset + bytes > memory.size()) fail("an access outside of shared memory");
    for (size_t i = offset; i < offset + bytes;) {
      Byte* const word = &noted[i & ~size_t{3}];
      if (word->block != number) {
        word->readers.clear();
        *word = {.block = number, .readers = std::move(word->readers)};
      }
      const bool whole = i % 4 == 0 && offset + bytes - i >= 4;
      if (!word->split && !whole) {
        word->split = true;
        for (int k = 1; k < 4; ++k) word[k] = word[0];
      }
      if (!whole) {
        f(noted[i++]);
        continue;
      }
      f(word[0]);
      for (int k = 1; k < 4 && word->split; ++k) f(word[k]);
      word->split = word->split && !same;
      i += 4;
    }
    return memory.data() + offset;
  }

  uint8_t* shared_at(uint64_t offset, size_t bytes, const Warp& w, int lane, char how) {
    return for_bytes(offset, bytes, how == 'w', [&](Byte& b) { note(b, w, lane, how); });
  }

  void release(Barrier& barrier) {
    for (const auto& one : barrier.waiting) {
      one.warp->acquire(one.lanes, barrier.clock);
      one.warp->groups.push_back({one.at, one.lanes});
      const uint32_t result = one.reduction == 1   ? barrier.ones
                              : one.reduction == 2 ? barrier.ones == barrier.counted
                                                   : barrier.ones > 0;
      for (int lane = 0; one.reduction && lane < kWarp; ++lane) {
        if (one.lanes >> lane & 1) one.warp->put<uint32_t>(one.to, lane, result);
      }
    }
    barrier = {};
  }

  void check(Barrier& barrier) {
    if (barrier.arrived && barrier.arrived >= (barrier.expected ? barrier.expected : left)) release(barrier);
  }

  void arrive(Warp& w, const Instruction& i, uint32_t lanes, int next) {
    const int first = std::countr_zero(lanes);
    const auto number = i.from.empty() ? 0 : w.get<uint32_t>(i.from[0], first);
    if (number >= barriers.size()) fail("no barrier has this number");
    Barrier& barrier = barriers[number];
    const bool counted = i.from.size() > (i.reduction ? 2u : 1u);
    if (counted) barrier.expected = w.get<uint32_t>(i.from[1], first);
    barrier.arrived += std::popcount(lanes);
    w.release(lanes, barrier.clock);
    ++events;
    if (i.reduction) {
      barrier.counted += std::popcount(lanes);
      for (int lane = 0; lane < kWarp; ++lane) {
        if (lanes >> lane & 1) barrier.ones += w.get<uint8_t>(i.from.back(), lane) & 1;
      }
    }
    if (i.waits) {
      barrier.waiting.push_back({&w, next, lanes, i.to.empty() ? Operand() : i.to[0], i.reduction});
    } else {
      w.groups.push_back({next, lanes});
    }
    check(barrier);
  }
};

uint8_t* Warp::at(uint64_t address, size_t bytes, int lane, char how, size_t aligned) {
  if (address % (aligned ? aligned : bytes)) fail("an access that is not aligned");
  const uint64_t offset = address & (kShared - 1);
  switch (address & ~(kShared - 1)) {
    case kShared: return block->shared_at(offset, bytes, *this, lane, how);
    case kLocal:
      if (offset + bytes > block->function.local_bytes) fail("an access outside of local memory");
      return local.data() + lane * block->function.local_bytes + offset;
    case kParameters:
      if (offset + bytes > block->parameters.size() || how != 'r') fail("an access outside of the parameters");
      return block->parameters.data() + offset;
    default: check_global(address, bytes); return reinterpret_cast<uint8_t*>(address);
  }
}

template <class F>
void each(uint32_t lanes, F f) {
  if (lanes == ~0u) {
    for (int lane = 0; lane < kWarp; ++lane) f(lane);
    return;
  }
  for (; lanes; lanes &= lanes - 1) f(std::countr_zero(lanes));
}

// Runs a warp until all its lanes have ended or wait, or its time is over; whether anything was done.
bool advance(Warp& w) {
  bool done = false;
  int left = kQuantum;
  auto& groups = w.groups;
  for (auto& group : groups) group.yields = false;
  while (!groups.empty() && left > 0) {
    std::sort(groups.begin(), groups.end(), [](const Group& a, const Group& b) { return a.at < b.at; });
    size_t n = 0;
    for (size_t k = 1; k < groups.size(); ++k) {
      if (groups[k].at == groups[n].at) {
        groups[n].lanes |= groups[k].lanes;
        groups[n].blocked = false;
        groups[n].yields = groups[n].yields && groups[k].yields;
      } else {
        groups[++n] = groups[k];
      }
    }
    groups.resize(n + 1);
    const auto found = std::find_if(groups.begin(), groups.end(), [](const Group& g) { return !g.blocked && !g.yields; });
    if (found == groups.end()) break;
    Group g = *found;
    const int until = found + 1 == groups.end() ? std::numeric_limits<int>::max() : found[1].at;
    const int least = groups.size() == 1 ? -1 : groups.front().at;
    groups.erase(found);
    while (left-- > 0 && g.lanes && g.at < until) {
      const Instruction& i = w.block->function.code[g.at];
      uint32_t lanes = g.lanes;
      if (i.predicate >= 0) {
        uint32_t holds = 0;
        each(lanes, [&](int lane) { holds |= (w.registers[i.predicate * kWarp + lane] & 1u) << lane; });
        lanes &= i.negated ? ~holds : holds;
      }
      try {
        if (i.kind == Kind::plain) {
          if (lanes) i.run(w, i, lanes);
          ++g.at;
          if (w.yields) {
            w.yields = false;
            g.yields = true;
            break;
          }
        } else if (i.kind == Kind::branch) {
          if (lanes == g.lanes) {
            g.at = i.target;
            if (g.at < until && g.at > least && groups.empty()) continue;
          } else {
            if (lanes) groups.push_back({i.target, lanes});
            g.lanes &= ~lanes;
            ++g.at;
          }
          break;
        } else if (!lanes) {
          ++g.at;
        } else if (i.kind == Kind::leave) {
          w.alive &= ~lanes;
          w.block->left -= std::popcount(lanes);
          ++w.block->events;
          g.lanes &= ~lanes;
          ++g.at;
          for (auto& other : groups) other.blocked = false;
          for (auto& barrier : w.block->barriers) w.block->check(barrier);
          break;
        } else if (i.kind == Kind::barrier) {
          const int next = g.at + 1;
          g.lanes &= ~lanes;
          if (g.lanes) groups.push_back({next, g.lanes});
          g.lanes = 0;
          w.block->arrive(w, i, lanes, next);
          break;
        } else {
          const auto members = w.get<uint32_t>(i.members, std::countr_zero(lanes));
          if (lanes & ~members) fail("lanes that are not of the mask");
          if (members & w.alive & ~lanes) {
            if (lanes != g.lanes) groups.push_back({g.at + 1, g.lanes & ~lanes});
            g.lanes = lanes;
            g.blocked = true;
            break;
          }
          if (i.run) i.run(w, i, lanes);
          ++g.at;
        }
      } catch (const Fault& fault) {
        const int lane = std::countr_zero(lanes);
        fail(std::string(fault.what()) + ": " + i.text + " (warp " + std::to_string(w.number) + ", a lane from " +
             std::to_string(lane) + ")");
      }
      done = true;
    }
    if (g.blocked) {
      groups.push_back(g);
      continue;
    }
    done = true;
    if (g.lanes) groups.push_back(g);
  }
  return done;
}

uint64_t special(Special which, dim3 grid, dim3 threads, dim3 block, int thread) {
  const uint32_t lane = thread % kWarp, x = thread % threads.x, y = thread / threads.x % threads.y,
                 z = thread / threads.x / threads.y;
  const uint32_t below = (1u << lane) - 1;
  switch (which) {
    case Special::tid_x: return x;
    case Special::tid_y: return y;
    case Special::tid_z: return z;
    case Special::ntid_x: return threads.x;
    case Special::ntid_y: return threads.y;
    case Special::ntid_z: return threads.z;
    case Special::ctaid_x: return block.x;
    case Special::ctaid_y: return block.y;
    case Special::ctaid_z: return block.z;
    case Special::nctaid_x: return grid.x;
    case Special::nctaid_y: return grid.y;
    case Special::nctaid_z: return grid.z;
    case Special::laneid: return lane;
    case Special::warpid: return thread / kWarp;
    case Special::lanemask_lt: return below;
    case Special::lanemask_le: return below | 1u << lane;
    case Special::lanemask_gt: return ~(below | 1u << lane);
    case Special::lanemask_ge: return ~below;
    case Special::lanemask_eq: return 1u << lane;
    default: return 0;
  }
}

void run_block(const Function& f, const std::vector<uint8_t>& parameters, dim3 grid, dim3 threads, dim3 at,
               size_t dynamic, std::vector<Warp>& warps) {
  static std::vector<Byte> shared_bytes, dynamic_bytes;
  static uint64_t number = 0;
  shared_bytes.resize(std::max(shared_bytes.size(), f.shared_bytes + 4));
  dynamic_bytes.resize(std::max(dynamic_bytes.size(), dynamic + 4));
  Block block{.function = f, .parameters = parameters, .shared_bytes = shared_bytes, .dynamic_bytes = dynamic_bytes,
              .number = ++number};
  block.shared.assign(f.shared_bytes, kPoison);
  block.dynamic.assign(dynamic, kPoison);
  block.threads = block.left = static_cast<int>(threads.x * threads.y * threads.z);
  const int count = (block.threads + kWarp - 1) / kWarp;
  block.known = count * kWarp + (f.has_engine ? kEngines : 0);
  warps.resize(count);
  for (int n = 0; n < count; ++n) {
    Warp& w = warps[n];
    w.block = &block;
    w.number = n;
    w.threads = std::min(kWarp, block.threads - n * kWarp);
    w.alive = w.threads == kWarp ? ~0u : (1u << w.threads) - 1;
    w.registers.resize(static_cast<size_t>(f.registers) * kWarp);
    w.groups.assign(1, {0, w.alive});
    w.local.assign(f.local_bytes * kWarp, kPoison);
    w.copies.clear();
    w.puts.clear();
    w.multiplied.clear();
    w.commits = w.put_commits = {};
    w.time = 1;
    w.known.assign(block.known * (f.has_engine ? 2 : 1), 0);
    for (auto& one : w.more) one.clear();
    for (const auto& [reg, which] : f.specials) {
      for (int lane = 0; lane < w.threads; ++lane) {
        w.registers[reg * kWarp + lane] = special(which, grid, threads, at, n * kWarp + lane);
      }
    }
  }
  for (int idle = 0; block.left > 0;) {
    bool done = false, working = false;
    const uint64_t events = block.events;
    for (Warp& w : warps) {
      done |= advance(w);
      for (const Group& g : w.groups) working |= !g.blocked && !g.yields;
    }
    idle = working || block.events != events ? 0 : idle + 1;
    if (!done || idle > kMostIdle) fail("a deadlock: threads wait for others that do not come");
  }
  for (const auto& [at, barrier] : block.memory_barriers) {
    if (!barrier.copies.empty()) fail("a copy to shared memory that nobody has waited for");
  }
  for (const Warp& w : warps) {
    if (!w.puts.empty()) fail("a copy from shared memory that nobody has waited for");
  }
}

// ---------------------------------------------------------------------------------------------- reading PTX

std::string trimmed(std::string_view s) {
  const auto begin = s.find_first_not_of(" \t\n\r"), end = s.find_last_not_of(" \t\n\r");
  return begin == s.npos ? std::string() : std::string(s.substr(begin, end - begin + 1));
}

std::vector<std::string> split(std::string_view s, char by) {
  std::vector<std::string> parts;
  int depth = 0;
  size_t begin = 0;
  for (size_t k = 0; k <= s.size(); ++k) {
    if (k < s.size() && (s[k] == '{' || s[k] == '[' || s[k] == '(')) ++depth;
    if (k < s.size() && (s[k] == '}' || s[k] == ']' || s[k] == ')')) --depth;
    if (k == s.size() || (s[k] == by && depth == 0)) {
      if (auto part = trimmed(s.substr(begin, k - begin)); !part.empty()) parts.push_back(std::move(part));
      begin = k + 1;
    }
  }
  return parts;
}

// Without comments and what is said of source lines.
std::string cleaned(std::string_view text) {
  std::string out;
  for (size_t begin = 0; begin < text.size();) {
    auto end = text.find('\n', begin);
    if (end == text.npos) end = text.size();
    auto line = text.substr(begin, end - begin);
    line = line.substr(0, line.find("//"));
    const auto first = line.find_first_not_of(" \t");
    const auto start = first == line.npos ? std::string_view() : line.substr(first);
    if (start.starts_with(".section")) break;
    if (!start.starts_with(".loc") || start.starts_with(".local")) out.append(line).push_back('\n');
    begin = end + 1;
  }
  return out;
}

// The size of a declaration: ".shared .align 4 .b8 name[128]", and its name.
struct Declared {
  std::string name;
  size_t bytes, alignment;
  bool open;  // as large as the launch says
};

Declared declared(const std::string& text) {
  Declared d{"", 1, 1, false};
  size_t item = 1, at = 0;
  while (at < text.size()) {
    at = text.find_first_not_of(" \t\n", at);
    if (at == text.npos) break;
    const auto end = text.find_first_of(" \t\n", at);
    const auto word = text.substr(at, end == text.npos ? end : end - at);
    if (word == ".align") {
      d.alignment = std::stoul(text.substr(end));
      at = text.find_first_of("0123456789", end);
      at = text.find_first_not_of("0123456789", at);
      continue;
    }
    if (word[0] == '.') {
      if (const auto type = type_of(word.substr(1))) item = size_of(*type);
    } else {
      d.name = word.substr(0, word.find('['));
      const auto count = word.find('[');
      d.open = count != word.npos && word[count + 1] == ']';
      d.bytes = count == word.npos ? item : d.open ? 0 : item * std::stoul(word.substr(count + 1));
      break;
    }
    at = end;
  }
  d.alignment = std::max(d.alignment, item);
  return d;
}

// What is before the body of a function: "(.param .b32 result) name(.param .b32 x, ...)", both lists maybe absent.
struct Callee {
  std::string name;
  std::vector<std::string> results, parameters;  // declarations

  explicit Callee(std::string_view text) {
    for (size_t at = 0, open; (open = text.find('(', at)) != text.npos;) {
      if (trimmed(text.substr(at, open - at)).size()) name = trimmed(text.substr(at, open - at));
      at = text.find(')', open) + 1;
      (name.empty() ? results : parameters) = split(text.substr(open + 1, at - open - 2), ',');
    }
    if (name.empty()) name = trimmed(text);
    name = name.substr(0, name.find_first_of(" \t\n"));
  }
};

#include "instructions.h"
#include "matrices.h"

class Reader {
 public:
  Reader(Program& program, const std::string& name) : program_(program) {
    const std::string& text = program.text;
    size_t at = program.entries.at(name);
    const auto body = text.find('{', at), open = text.find('(', at);
    if (open < body) parameters(text.substr(open + 1, text.find(')', open) - open - 1));
    body_at(body + 1);
    function_->registers = registers_;
  }
  std::unique_ptr<Function> take() { return std::move(function_); }

 private:
  void body_at(size_t at) {
    read(at);
    for (auto& [place, label] : names_.jumps) {
      if (!names_.labels.count(label)) fail("no label " + label);
      function_->code[place].target = names_.labels[label];
    }
  }

  // "(result), name, (argument, ...)": the function's code, here; what it is given and returns is in local memory.
  void call(const std::vector<std::string>& operands) {
    const auto list = [](const std::string& s) { return split(std::string_view(s).substr(1, s.size() - 2), ','); };
    size_t next = 0;
    const auto results = operands[0][0] == '(' ? list(operands[next++]) : std::vector<std::string>();
    const std::string& name = operands.at(next++);
    const auto given = next < operands.size() ? list(operands[next]) : std::vector<std::string>();
    const auto found = program_.callees.find(name);
    if (found == program_.callees.end()) fail("a call of what has no code: " + name);
    const auto body = program_.text.find('{', found->second);
    const Callee callee(std::string_view(program_.text).substr(found->second, body - found->second));
    Names inner;
    const auto bind = [&](const auto& declarations, const auto& values) {
      for (size_t k = 0; k < values.size(); ++k) {
        inner.symbols[declared(declarations.at(k)).name] = operand(values[k]).number;
      }
    };
    bind(callee.results, results);
    bind(callee.parameters, given);
    std::swap(inner, names_);
    ++calls_;
    body_at(body + 1);
    --calls_;
    const int end = static_cast<int>(function_->code.size());
    for (const size_t place : names_.returns) function_->code[place].target = end;
    std::swap(inner, names_);
  }

  void parameters(const std::string& text) {
    for (const auto& one : split(text, ',')) {
      const Declared d = declared(one);
      size_t& bytes = function_->parameter_bytes;
      bytes = (bytes + d.alignment - 1) / d.alignment * d.alignment;
      function_->parameters.push_back({bytes, d.bytes});
      names_.symbols[d.name] = kParameters + bytes;
      bytes += d.bytes;
    }
  }

  void read(size_t at) {
    const std::string& text = program_.text;
    std::string statement;
    int depth = 1, inside = 0;
    for (; depth > 0; ++at) {
      const char c = text.at(at);
      const bool blank = statement.find_first_not_of(" \t\n\r") == statement.npos;
      if (c == '{' && blank) {
        ++depth;
        names_.scopes.emplace_back();
        statement.clear();
      } else if (c == '}' && blank) {
        --depth;
        if (!names_.scopes.empty()) names_.scopes.pop_back();
        statement.clear();
      } else if (c == ';' && !inside) {
        one(trimmed(statement));
        statement.clear();
      } else if (c == ':' && text[at + 1] != ':' && label(statement)) {
        names_.labels[trimmed(statement)] = static_cast<int>(function_->code.size());
        statement.clear();
      } else {
        inside += c == '{' ? 1 : c == '}' ? -1 : 0;
        statement.push_back(c);
      }
    }
  }

  static bool label(const std::string& statement) {
    const auto s = trimmed(statement);
    return !s.empty() && s[0] != '.' && s[0] != '@' &&
           std::all_of(s.begin(), s.end(), [](char c) { return std::isalnum(c) || c == '_' || c == '$'; });
  }

  void one(const std::string& s) {
    if (s.empty() || s.starts_with(".pragma")) return;
    if (s.starts_with(".reg")) {
      for (auto name : split(s.substr(s.find_first_of(" \t", s.find('.', 4))), ',')) {
        const auto many = name.find('<');
        if (many == name.npos) {
          (names_.scopes.empty() ? names_.registers : names_.scopes.back())[name] = registers_++;
        } else {
          const int count = std::stoi(name.substr(many + 1));
          for (int k = 0; k < count; ++k) names_.registers[name.substr(0, many) + std::to_string(k)] = registers_++;
        }
      }
    } else if (s.starts_with(".shared") || s.starts_with(".extern .shared")) {
      place(s);
    } else if (s.starts_with(".local") || s.starts_with(".param")) {  // .param: of a call
      const Declared d = declared(s);
      size_t& bytes = function_->local_bytes;
      bytes = (bytes + d.alignment - 1) / d.alignment * d.alignment;
      names_.symbols[d.name] = kLocal + bytes;
      bytes += d.bytes;
    } else if (s[0] == '.') {
      fail("unknown: " + s);
    } else {
      instruction(s);
    }
  }

  void place(const std::string& declaration) {
    const Declared d = declared(declaration);
    size_t& bytes = function_->shared_bytes;
    if (!d.open) bytes = (bytes + d.alignment - 1) / d.alignment * d.alignment;
    names_.symbols[d.name] = kShared + (d.open ? 0 : kStatic + bytes);
    bytes += d.bytes;
  }

  int special(const std::string& name) {
    static const std::unordered_map<std::string, Special> known = {
        {"%tid.x", Special::tid_x},         {"%tid.y", Special::tid_y},         {"%tid.z", Special::tid_z},
        {"%ntid.x", Special::ntid_x},       {"%ntid.y", Special::ntid_y},       {"%ntid.z", Special::ntid_z},
        {"%ctaid.x", Special::ctaid_x},     {"%ctaid.y", Special::ctaid_y},     {"%ctaid.z", Special::ctaid_z},
        {"%nctaid.x", Special::nctaid_x},   {"%nctaid.y", Special::nctaid_y},   {"%nctaid.z", Special::nctaid_z},
        {"%laneid", Special::laneid},       {"%warpid", Special::warpid},       {"%lanemask_lt", Special::lanemask_lt},
        {"%lanemask_le", Special::lanemask_le}, {"%lanemask_gt", Special::lanemask_gt},
        {"%lanemask_ge", Special::lanemask_ge}, {"%lanemask_eq", Special::lanemask_eq}};
    const auto found = known.find(name);
    if (found == known.end()) return -1;
    function_->specials.emplace_back(registers_, found->second);
    return names_.registers[name] = registers_++;
  }

  Operand operand(const std::string& s) {
    if (s == "_") return {};
    for (auto scope = names_.scopes.rbegin(); scope != names_.scopes.rend(); ++scope) {
      if (const auto found = scope->find(s); found != scope->end()) return {found->second};
    }
    if (const auto found = names_.registers.find(s); found != names_.registers.end()) return {found->second};
    if (s[0] == '%') {
      if (const int reg = special(s); reg >= 0) return {reg};
      fail("no register " + s);
    }
    if (s.starts_with("0f") || s.starts_with("0F")) return {-1, std::stoull(s.substr(2), nullptr, 16)};
    if (s.starts_with("0d") || s.starts_with("0D")) return {-1, std::stoull(s.substr(2), nullptr, 16)};
    if (std::isdigit(s[0])) return {-1, std::stoull(s, nullptr, 0)};
    if (s[0] == '-') return {-1, 0 - std::stoull(s.substr(1), nullptr, 0)};
    if (s == "WARP_SZ") return {-1, kWarp};
    if (!names_.symbols.count(s)) {
      const auto shared = program_.shared.find(s);
      if (shared == program_.shared.end()) fail("unknown: " + s);
      place(shared->second);
    }
    return {-1, names_.symbols[s]};
  }

  // "[base+4]" as two operands.
  void address(const std::string& s, std::vector<Operand>& to) {
    const auto inner = trimmed(std::string_view(s).substr(1, s.size() - 2));
    const auto plus = inner.find('+', 1);
    to.push_back(operand(trimmed(inner.substr(0, plus))));
    to.push_back({-1, plus == inner.npos ? 0 : operand(trimmed(inner.substr(plus + 1))).number});
  }

  void instruction(std::string s) {
    Instruction i;
    i.text = s;
    if (s[0] == '@') {
      const auto end = s.find_first_of(" \t");
      i.negated = s[1] == '!';
      i.predicate = operand(s.substr(i.negated ? 2 : 1, end - (i.negated ? 2 : 1))).reg;
      s = trimmed(s.substr(end));
    }
    const auto end = s.find_first_of(" \t");
    const auto parts = split(s.substr(0, end), '.');
    const auto operands = end == s.npos ? std::vector<std::string>() : split(s.substr(end), ',');
    if (parts[0] == "bra") {
      i.kind = Kind::branch;
      names_.jumps.emplace_back(function_->code.size(), operands.at(0));
    } else if (parts[0] == "call") {
      if (i.predicate >= 0) fail("a call of some threads: " + i.text);
      return call(operands);
    } else if (parts[0] == "ret" && calls_) {
      i.kind = Kind::branch;
      names_.returns.push_back(function_->code.size());
    } else if (parts[0] == "ret" || parts[0] == "exit") {
      i.kind = Kind::leave;
    } else {
      // Stores, reductions and barriers have no result.
      static const std::vector<std::string_view> without = {"st", "red", "bar", "barrier", "cp", "membar", "fence",
                                                            "griddepcontrol", "nanosleep", "prefetch", "discard",
                                                            "applypriority", "trap"};
      bool result = std::find(without.begin(), without.end(), parts[0]) == without.end();
      if (parts[0] == "wgmma" && parts[1] != "mma_async") result = false;
      if (parts[0] == "bar" && parts.size() > 1 && parts[1] == "red") result = true;
      for (size_t k = 0; k < operands.size(); ++k) {
        auto& list = k == 0 && result && operands[0][0] != '[' ? i.to : i.from;
        const std::string& o = operands[k];
        if (o[0] == '[') {
          address(o, list);
        } else if (o[0] == '{') {
          for (const auto& one : split(o.substr(1, o.size() - 2), ',')) list.push_back(operand(one));
        } else if (const auto bar = o.find('|'); bar != o.npos) {
          list.push_back(operand(trimmed(o.substr(0, bar))));
          list.push_back(operand(trimmed(o.substr(bar + 1))));
        } else if (o[0] == '!') {
          list.push_back(negated(operand(o.substr(1))));
        } else {
          list.push_back(operand(o));
        }
      }
      try {
        function_->has_engine |= parts[0] == "mbarrier" || parts[0] == "wgmma" || s.starts_with("cp.async.bulk");
        if (!build_matrices(i, parts)) build(i, parts);
      } catch (const Fault& fault) {  // only where it is run
        i.run = [what = std::string(fault.what())](Warp&, const Instruction&, uint32_t) { fail(what + " instruction"); };
      }
    }
    function_->code.push_back(std::move(i));
  }

  // A predicate's opposite, in a register of its own.
  Operand negated(Operand x) {
    const Operand y{registers_++};
    Instruction i;
    i.to = {y};
    i.from = {x};
    i.run = [](Warp& w, const Instruction& i, uint32_t lanes) {
      each(lanes, [&](int l) { w.put<uint8_t>(i.to[0], l, !(w.get<uint8_t>(i.from[0], l) & 1)); });
    };
    function_->code.push_back(std::move(i));
    return y;
  }

  Program& program_;
  std::unique_ptr<Function> function_ = std::make_unique<Function>();
  struct Names {  // of a body
    std::unordered_map<std::string, int> registers;
    std::vector<std::unordered_map<std::string, int>> scopes;
    std::unordered_map<std::string, uint64_t> symbols;  // addresses
    std::unordered_map<std::string, int> labels;
    std::vector<std::pair<size_t, std::string>> jumps;
    std::vector<size_t> returns;
  };
  Names names_;
  int registers_ = 0, calls_ = 0;
};

// ---------------------------------------------------------------------------------------------- the runtime

// Declarations of shared memory outside of functions, and where functions are.
void index(Program& program) {
  const std::string& text = program.text;
  int depth = 0;
  for (size_t at = 0; at < text.size();) {
    const auto end = text.find_first_of(";{}", at);
    if (end == text.npos) break;
    if (text[end] == '{') {
      const auto statement = std::string_view(text).substr(at, end - at);
      if (const auto entry = statement.find(".entry"); depth == 0 && entry != statement.npos) {
        const auto name = trimmed(statement.substr(entry + 6, statement.find('(', entry) - entry - 6));
        program.entries[name.substr(0, name.find_first_of(" \t\n"))] = at + entry;
      } else if (const auto function = statement.find(".func"); depth == 0 && function != statement.npos) {
        program.callees[Callee(statement.substr(function + 5)).name] = at + function + 5;
      }
      ++depth;
    } else if (text[end] == '}') {
      --depth;
    } else if (depth == 0) {
      const auto statement = trimmed(std::string_view(text).substr(at, end - at));
      if (const auto shared = statement.find(".shared"); shared != statement.npos) {
        const auto declaration = statement.substr(shared);
        program.shared[declared(declaration).name] = declaration;
      }
    }
    at = end + 1;
  }
}

std::map<const void*, std::pair<Program*, std::string>> kernels;  // by the host's function
std::deque<Program> programs;
std::string report_text;
cudaError_t last_error = cudaSuccess;
int multiprocessor_count = 132;
struct Configuration {
  dim3 grid, block;
  size_t shared;
  cudaStream_t stream;
};
std::vector<Configuration> configurations;
std::map<std::string, int> launches;

cudaError_t launch(const void* host, dim3 grid, dim3 threads, void** arguments, size_t dynamic) {
  std::string name = "a kernel";
  try {
    const auto found = kernels.find(host);
    if (found == kernels.end()) return last_error = cudaErrorInvalidDeviceFunction;
    name = found->second.second;
    if (!grid.x || !grid.y || !grid.z || grid.y > 65535 || grid.z > 65535 || threads.x * threads.y * threads.z == 0 ||
        threads.x * threads.y * threads.z > 1024 || dynamic > 227 * 1024) {
      return last_error = cudaErrorInvalidConfiguration;
    }
    Program& program = *found->second.first;
    auto& function = program.functions[name];
    if (!function) function = Reader(program, name).take();
    std::vector<uint8_t> parameters(function->parameter_bytes);
    for (size_t k = 0; k < function->parameters.size(); ++k) {
      const auto& p = function->parameters[k];
      std::memcpy(parameters.data() + p.offset, arguments[k], p.size);
    }
    ++launches[name];
    std::vector<Warp> warps;
    for (uint32_t z = 0; z < grid.z; ++z) {
      for (uint32_t y = 0; y < grid.y; ++y) {
        for (uint32_t x = 0; x < grid.x; ++x) {
          run_block(*function, parameters, grid, threads, dim3(x, y, z), dynamic, warps);
        }
      }
    }
    return cudaSuccess;
  } catch (const std::exception& error) {
    if (report_text.empty()) report_text = name + ": " + error.what();
    return last_error = cudaErrorLaunchFailure;
  }
}

}  // namespace

extern "C" {

// Memory that kernels may read and write; none of `bytes` 0.
void emulation_allow(void* begin, size_t bytes) {
  const auto at = reinterpret_cast<uintptr_t>(begin);
  if (bytes) {
    allowed[at] = at + bytes;
  } else {
    allowed.erase(at);
  }
}

// What went wrong first since the last call; empty if nothing.
const char* emulation_report() {
  static std::string text;
  text = std::exchange(report_text, "");
  last_error = cudaSuccess;
  return text.c_str();
}

// The kernels launched since the last call, a name and how often a line.
const char* emulation_launches() {
  static std::string text;
  text.clear();
  for (const auto& [name, count] : launches) text += name + " " + std::to_string(count) + "\n";
  launches.clear();
  return text.c_str();
}

void emulation_multiprocessors(int count) { multiprocessor_count = count; }

void** __cudaRegisterFatBinary(void* wrapper) {
  struct Wrapper {
    int magic, version;
    const uint8_t* data;
  };
  const uint8_t* const data = static_cast<Wrapper*>(wrapper)->data;
  const auto number = [&](size_t at, size_t bytes) {
    uint64_t x = 0;
    std::memcpy(&x, data + at, bytes);
    return x;
  };
  Program& program = programs.emplace_back();
  const size_t header = number(6, 2), end = header + number(8, 8);
  for (size_t at = header; at < end;) {
    const size_t entry_header = number(at + 4, 4), bytes = number(at + 8, 8);
    if (number(at, 2) == 1) {
      const auto* text = reinterpret_cast<const char*>(data + at + entry_header);
      program.text = cleaned(std::string_view(text, strnlen(text, bytes)));
    }
    at += entry_header + bytes;
  }
  index(program);
  return reinterpret_cast<void**>(&program);
}

void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}

void __cudaRegisterFunction(void** program, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                            int*) {
  kernels[host] = {reinterpret_cast<Program*>(program), name};
}

void __cudaRegisterVar(void**, char*, char*, const char*, int, size_t, int, int) {}

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
  configurations.push_back({grid, block, shared, stream});
  return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3* grid, dim3* block, size_t* shared, void* stream) {
  const Configuration last = configurations.back();
  configurations.pop_back();
  *grid = last.grid;
  *block = last.block;
  *shared = last.shared;
  *static_cast<cudaStream_t*>(stream) = last.stream;
  return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t* kernel, const void* host) {
  *kernel = reinterpret_cast<cudaKernel_t>(const_cast<void*>(host));
  return cudaSuccess;
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return launch(kernel, grid, block, arguments, shared);
}

cudaError_t cudaLaunchKernel(const void* host, dim3 grid, dim3 block, void** arguments, size_t shared, cudaStream_t) {
  return launch(host, grid, block, arguments, shared);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* c, const void* host, void** arguments) {
  return launch(host, c->gridDim, c->blockDim, arguments, c->dynamicSmemBytes);
}

cudaError_t cudaGetLastError() { return std::exchange(last_error, cudaSuccess); }
cudaError_t cudaPeekAtLastError() { return last_error; }
const char* cudaGetErrorString(cudaError_t) { return "an error of the emulation"; }
cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

// Those of an H200.
cudaError_t cudaGetDeviceCount(int* count) {
  *count = 1;
  return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) {
  *properties = {};
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = multiprocessor_count; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 * 1024; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = 228 * 1024; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrL2CacheSize: *value = 50 << 20; break;
    default: return cudaErrorInvalidValue;
  }
  return cudaSuccess;
}

cudaError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void*) {
  *attributes = {};
  attributes->maxThreadsPerBlock = 1024;
  return cudaSuccess;
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return cudaSuccess; }

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int, size_t, unsigned) {
  *blocks = 1;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t) {
  try {
    if (bytes) check_global(reinterpret_cast<uint64_t>(to), bytes);
  } catch (const Fault& fault) {
    if (report_text.empty()) report_text = std::string("cudaMemsetAsync: ") + fault.what();
    return cudaErrorInvalidValue;
  }
  std::memset(to, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  try {
    if (bytes) check_global(reinterpret_cast<uint64_t>(to), bytes), check_global(reinterpret_cast<uint64_t>(from), bytes);
  } catch (const Fault& fault) {
    if (report_text.empty()) report_text = std::string("cudaMemcpyAsync: ") + fault.what();
    return cudaErrorInvalidValue;
  }
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

}  // extern "C"
