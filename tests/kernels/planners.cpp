// Planners as functions: random problems on described GPUs, and what must hold of the tactics and the choice.
#include <cmath>
#include <cstdio>
#include <random>
#include <set>
#include <string>

#include "add_bias_residual_layer_norm/tactics.h"
#include "camera_sample/tactics.h"
#include "deform_conv2d/pieces.h"
#include "deform_conv2d/tactics.h"
#include "einsum/tactics.h"
#include "grid_sample/gradient.h"
#include "grid_sample/tactics.h"
#include "ms_deform_attn/tactics.h"
#include "tuned.h"

namespace svexport {
namespace {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t among(int64_t first, int64_t last) { return std::uniform_int_distribution<int64_t>(first, last)(engine_); }
  bool chance(double p) { return std::uniform_real_distribution<>(0, 1)(engine_) < p; }
  // As often from 1 to 10 as from 10 to 100.
  int64_t magnitude(double most) {
    return static_cast<int64_t>(std::exp(std::uniform_real_distribution<>(0, std::log(most))(engine_)));
  }
  int32_t power_of_two(int32_t least, int32_t most) {
    int32_t n = least;
    while (n < most && chance(0.6)) n *= 2;
    return n;
  }

 private:
  std::mt19937_64 engine_;
};

// What is wrong with a launch, whatever the op: CUDA's limits, and those of the device.
std::string wrong(const Launch& l, const Gpu& gpu) {
  if (l.blocks() < 1 || l.blocks() > INT32_MAX) return "grid.x is " + std::to_string(l.blocks());
  if (l.grid_y < 1 || l.grid_y > 65535 || l.grid_z < 1 || l.grid_z > 65535) return "grid.y or grid.z";
  if (l.threads() < 32 || l.threads() > 1024) return "a block of " + std::to_string(l.threads()) + " threads";
  if (l.shared_memory < 0 || l.shared_memory > gpu.shared_memory) return "shared memory";
  return {};
}

// What must hold of every planner.
template <class Problem, class Check>
std::string wrong(const Problem& problem, const Gpu& gpu, const Check& check) {
  const auto costs = costs_of(problem, gpu);
  const auto all = tactics(problem, gpu);
  if (all.size() == 0) return "no tactic";
  std::set<int32_t> ids;
  double least = INFINITY;
  for (const auto& t : all) {
    const auto named = [&](const std::string& why) { return "tactic " + std::to_string(t.id()) + ": " + why; };
    if (t.id() <= 0 || !ids.insert(t.id()).second) return named("its id is not its own");
    if (cheapest(all, t.id(), costs).id() != t.id()) return named("is not taken where it is asked for");
    const double here = costs(t);
    if (!std::isfinite(here) || here <= 0) return named("costs " + std::to_string(here));
    if (here < least) least = here;
    const Launch l = launch(problem, t, gpu);
    if (const std::string why = wrong(l, gpu); !why.empty()) return named(why);
    if (const std::string why = check(t, l); !why.empty()) return named(why);
  }
  if (costs(cheapest(all, 0, costs)) != least) return "the choice is not the cheapest";
  if (cheapest(all, INT32_MAX, costs).id() != cheapest(all, 0, costs).id()) return "an unknown tactic is not the choice";
  for (int32_t id : worth_timing(problem, gpu)) {
    if (!ids.count(id)) return "a tactic to time is none of them";
  }
  return {};
}

norm::Problem random_norm(Random& random) {
  norm::Problem p;
  p.backward = random.chance(0.5);
  p.rows = random.magnitude(2e6);
  p.columns = random.chance(0.4) ? 8 * random.magnitude(4e3) : random.magnitude(1e5);
  p.item_size = random.chance(0.5) ? 2 : 4;
  p.addresses = random.power_of_two(p.item_size, 16);
  p.dense = random.chance(0.8);
  const int64_t row = p.columns * p.item_size;
  p.strides = p.dense ? static_cast<int32_t>((row | 16) & -(row | 16)) : random.power_of_two(p.item_size, 16);
  p.parameters = random.power_of_two(2, 16);
  p.extra = random.chance(0.3);
  p.gradients = static_cast<int32_t>(random.among(0, 3));
  p.sums = random.chance(0.8);
  return p;
}

std::string check_norm(const norm::Problem& p, const norm::Tactic& t, const Launch& l, const Gpu& gpu) {
  const int bytes = t.width(p.item_size) * p.item_size;
  if (bytes > p.addresses) return "reads vectors at addresses that are none";
  const bool shifted = t.access == norm::Access::kShifted;
  if (!shifted && (bytes > p.strides || p.columns % t.width(p.item_size))) return "reads vectors across rows";
  if (shifted && !p.dense) return "reads beyond its rows";
  const int64_t rows_at_once = l.blocks() * l.per_block;
  const bool steps = t.resident || t.kernel == norm::Kernel::kLong;
  if (rows_at_once < p.rows && !steps) return "leaves rows out";
  // A thread of shifted rows keeps its columns from row to row.
  const bool keeps = shifted && t.kernel != norm::Kernel::kLong;
  if (keeps && rows_at_once < p.rows && rows_at_once % t.width(p.item_size)) return "comes to rows with another shift";
  if (t.kernel != norm::Kernel::kLong) {
    const int threads = t.is_warp() ? 32 : l.threads();
    const int behind = shifted ? t.width(p.item_size) - 1 : 0;
    const int most_behind = p.columns % t.width(p.item_size) ? behind : 0;
    // Rows begin at multiples of the largest power of two in columns behind a vector.
    const int64_t power = p.columns & -p.columns;
    const int64_t seen = p.columns + (most_behind ? most_behind + 1 - std::min<int64_t>(power, most_behind + 1) : 0);
    if (int64_t{threads} * t.columns() < seen) return "leaves columns out";
  }
  if (p.backward && p.sums) {
    const int64_t parts = t.kernel == norm::Kernel::kLong ? norm::parts_of(p, gpu) : l.blocks();
    const int64_t statistics = t.kernel == norm::Kernel::kLong ? p.rows * 32 : 0;
    norm::Problem any = p;  // of the same sizes in any layout
    any.addresses = any.parameters = any.strides = 16;
    any.dense = true;
    if (norm::workspace(any, gpu) < parts * 3 * p.columns * 4 + statistics) return "needs more scratch than is asked for";
  }
  return {};
}

ms_deform::Problem random_ms_deform(Random& random) {
  ms_deform::Problem p;
  p.backward = random.chance(0.5);
  p.images = random.magnitude(64);
  p.rows = random.magnitude(1e6);
  p.channels = random.chance(0.05) ? 0 : random.magnitude(3000);
  p.samples = random.magnitude(1000);
  p.item_size = random.chance(0.5) ? 2 : 4;
  if (!p.backward && random.chance(0.3)) p.item_size = 1;
  p.alignment = random.power_of_two(p.item_size, 16);
  return p;
}

std::string check_ms_deform(const ms_deform::Problem& p, const ms_deform::Tactic& t, const Launch& l, const Gpu&) {
  if (t.width > 1 && (t.width * p.item_size > p.alignment || p.channels % t.width)) return "reads vectors that are none";
  if (t.width * p.item_size > 16) return "reads more than 16 bytes at once";
  if (t.lanes < 1 || t.lanes > 32 || (t.lanes & (t.lanes - 1))) return "lanes are no power of two within a warp";
  // A block is within one image, and takes 32 / lanes rows with each of its warps.
  const int64_t rows = l.threads() / t.lanes, per_image = l.blocks() / p.images;
  if (l.blocks() % p.images || per_image * rows < p.rows) return "leaves rows out";
  if ((per_image - 1) * rows >= p.rows) return "has blocks without rows";
  return {};
}

camera::Problem random_camera(Random& random) {
  camera::Problem p;
  p.images = random.magnitude(1000);
  p.queries = random.magnitude(1e5);
  p.points = random.magnitude(100);
  p.levels = random.among(1, 8);
  p.channels = random.chance(0.05) ? 0 : random.magnitude(1e5);
  p.item_size = random.chance(0.5) ? 2 : 4;
  p.vectors = p.channels % (16 / p.item_size) == 0 && random.chance(0.7);
  p.planes = random.chance(0.5);
  return p;
}

std::string check_camera(const camera::Problem& p, const camera::Tactic& t, const Launch& l, const Gpu& gpu) {
  if (t.kernel == camera::Kernel::kPlanes) {
    const camera::Parts parts(p, gpu);
    if (!p.planes) return "reads planes that are none";
    if (l.blocks() * camera::kPlaneChannels < p.channels) return "leaves channels out";
    if (parts.at_once << t.row_shift > camera::kPlaneThreads) return "has more queries at once than threads";
    if ((parts.count - 1) * parts.at_once >= p.queries) return "has blocks without queries";
    return {};
  }
  if (t.kernel == camera::Kernel::kVectors && !p.vectors) return "reads vectors that are none";
  if ((1 << t.row_shift) > l.threads()) return "has more threads for a sample than a block";
  const int of_thread = t.kernel == camera::Kernel::kVectors ? 16 / p.item_size : 1;
  if (t.chunk != of_thread << t.row_shift) return "has threads without channels";
  if (l.blocks() < p.queries || l.grid_y < p.images) return "leaves queries out";
  if (int64_t{l.grid_z} * t.chunk < p.channels || (l.grid_z - 1) * int64_t{t.chunk} > p.channels) return "channels";
  return {};
}

deform::Problem random_deform_conv2d(Random& random) {
  deform::Problem p;
  p.images = random.magnitude(100);
  p.pixels = random.magnitude(1e6);
  p.taps = random.magnitude(100);
  p.offset_groups = random.magnitude(200);
  p.channels = p.offset_groups * random.magnitude(100);
  p.input_bytes = p.images * p.pixels * p.channels * 2;
  p.packed = random.chance(0.3);
  p.runs = p.packed || random.chance(0.7);
  p.planes = random.chance(0.9);
  return p;
}

std::string check_deform_conv2d(const deform::Problem& p, const deform::Tactic& t, const Launch& l, const Gpu&) {
  const bool packed = t.kernel == deform::Kernel::kPacked;
  if (!packed && !p.planes) return "cannot count the elements of an image";
  if (l.blocks() * (packed ? deform::kPixels : l.threads()) < p.images * p.pixels) return "leaves pixels out";
  const int64_t each = p.channels / p.offset_groups;
  const int64_t channels = packed      ? l.grid_y / p.taps * deform::kOffsetGroups * each
                           : each == 1 ? int64_t{l.grid_z} * deform::together(p)
                                       : l.grid_z / p.offset_groups * deform::together(p) * p.offset_groups;
  return channels < p.channels ? "leaves channels out" : "";
}

// What is wrong with the pieces of a random output, or nothing.
std::string wrong_pieces(Random& random) {
  deform::Columns c{random.magnitude(30), random.magnitude(300), random.magnitude(2000), 0, 0};
  c.row = c.width * random.magnitude(20'000);
  const int64_t copies = random.magnitude(1e9);
  c.more = (random.chance(0.5) ? random.magnitude(1e9) : 0) - copies;
  const int64_t all = c.images * c.height * c.row, limit = std::clamp(all + c.more, deform::kLeastColumns, deform::kMostColumns);
  std::string shown = "deform_conv2d in pieces";
  for (const int64_t n : {c.images, c.height, c.width, c.row, c.more}) shown += " " + std::to_string(n);
  int64_t first = 0, row = 0, largest = 0, count = 0;
  for (const auto& p : c.pieces()) {
    if (p.first != first || p.row != row || p.images < 1 || p.rows < 1) return shown + ": pixels twice or left out";
    if (p.rows < c.height && p.images > 1) return shown + ": rows of several images";
    const int64_t bytes = p.images * p.rows * c.row;
    if (bytes > c.bytes() || (bytes > limit && bytes > c.row)) return shown + ": too large";
    if (count++ > 0 && bytes > largest) return shown + ": larger than the first";
    if (p.rows > 8 && row * c.width % 8) return shown + ": not aligned";
    largest = std::max(largest, bytes);
    row = (row + p.rows) % c.height;
    first += row ? 0 : p.images;
  }
  if (first != c.images || row) return shown + ": pixels left out";
  if (all <= limit && count > 1) return shown + ": could be whole";
  deform::Columns less = c;
  for (int64_t* n : {&less.images, &less.height}) *n -= random.among(0, *n - 1);
  if (less.bytes() > c.bytes()) return shown + ": more for a smaller output";
  less = c;
  const int64_t fewer = random.among(0, copies);
  less.more += fewer;
  return less.bytes() - fewer > c.bytes() ? shown + ": more beside smaller copies" : "";
}

einsum::Problem random_einsum(Random& random) {
  einsum::Problem p;
  p.sums = random.chance(0.5);
  p.item_size = random.chance(0.5) ? 2 : 4;
  const bool channels = random.chance(0.3);
  p.shared = channels || random.chance(0.4) ? 1 : random.magnitude(5000);
  p.outer = random.magnitude(2000);
  p.rows = random.magnitude(channels ? 1e6 : 1e4);
  const auto count = [&] { return channels ? random.magnitude(6000) : random.chance(0.9) ? random.among(1, 8) : 9; };
  p.x_count = count();
  p.z_count = random.chance(0.5) ? 1 : count();
  p.x_width = channels ? 1 : random.among(1, 66);
  p.z_width = channels ? 1 : random.among(1, 66);
  p.whole = random.chance(0.3);
  p.pairs = p.whole || random.chance(0.3);
  p.aligned = random.power_of_two(1, 4);
  return p;
}

std::string check_einsum(const einsum::Problem& p, const einsum::Tactic& t, const Launch& l, const Gpu& gpu) {
  using einsum::Kernel;
  if (t.kernel == Kernel::kMatrices) return workspace(p, t, gpu) ? "needs scratch of nobody's" : "";
  if (t.engine && (gpu.capability < 90 || !p.whole)) return "has no copy engine, or no whole tiles for it";
  if (p.sums != (t.kernel == Kernel::kSmall || t.kernel == Kernel::kChannelCorrelation)) return "is of the other tensor";
  const int64_t tiles = p.outer * ceil_of(p.rows, 32), runs = p.outer * ceil_of(p.rows, 128);
  if (t.kernel == Kernel::kLarge) {
    const einsum::Division d(p, t.of, gpu);
    if (int64_t{d.apart} * d.count != p.z_count || d.columns * d.groups * 8 < d.count * p.z_width) return "leaves columns out";
    if (d.workers < 1 || d.workers * 32 > l.threads() || l.threads() > 512) return "has too many warps";
    if (d.before + d.workers * d.warp > l.shared_memory) return "has too little shared memory";
    if (l.blocks() > tiles * d.shared) return "has blocks without tiles";
    if (t.columns > (p.item_size == 4 ? 5 : 7) || t.columns == 6) return "has no kernel of so many columns";
  } else if (t.kernel == Kernel::kSmall) {
    const einsum::Sums s(p, t, gpu);
    if (p.z_count != 1) return "sums for several of M";
    if (int64_t{s.groups} * 16 * t.sums < s.count * p.x_width || t.columns * 8 < p.z_width) return "leaves sums out";
    if (s.shared * s.count != p.shared * p.x_count) return "leaves K out";
    if (t.sums > einsum::most_sums(t.columns) || t.sums < 2) return "has no kernel of so many sums";
    if (s.warp < s.stages * (s.stage + 8)) return "has too little memory for its stages";
    if (s.warp < 64 * t.sums * einsum::sum_pitch(t.columns)) return "has too little memory for its sums";
    if (l.blocks() > std::max<int64_t>(1, tiles)) return "has parts without tiles";
    const size_t parts = sizeof(float) * l.blocks() * p.shared * p.x_count * p.x_width * p.z_width;
    if (l.blocks() > 1 && workspace(p, t, gpu) != parts) return "needs another scratch than is asked for";
  } else if (t.kernel == Kernel::kChannelProduct) {
    const einsum::Teams teams(p, t.columns, gpu);
    if (gpu.capability != 90) return "is of 9.0 alone";
    if (teams.units != runs || teams.blocks > runs) return "has blocks without positions";
    if (int64_t{teams.groups} * t.columns < p.z_count) return "leaves columns out";
    if (l.blocks() != teams.blocks * teams.groups || l.threads() % 128) return "launches others than it divides";
  } else {
    if (gpu.capability != 90) return "is of 9.0 alone";
    const int64_t rows = std::max(p.x_count, p.z_count), columns = std::min(p.x_count, p.z_count);
    if (l.grid_y * int64_t{128} * 64 < rows * columns) return "leaves sums out";
    if (workspace(p, t, gpu) != sizeof(float) * l.blocks() * rows * columns) return "needs another scratch than is asked for";
  }
  return {};
}

sampler::Problem random_grid_sample(Random& random) {
  sampler::Problem p;
  const bool volume = random.chance(0.2);
  p.images = random.magnitude(random.chance(0.02) ? 1e5 : 100);
  p.channels = random.chance(0.3) ? 8 * random.magnitude(100) : random.magnitude(2000);
  p.width = random.magnitude(3000), p.height = random.magnitude(3000);
  p.depth = volume ? random.magnitude(100) : 1;
  p.across = random.magnitude(3000);
  p.points = random.chance(0.02) ? 0 : p.across * random.magnitude(3000);
  p.taps = random.chance(0.2) ? 1 : volume ? 8 : random.chance(0.2) ? 16 : 4;
  p.item_size = random.chance(0.1) ? 1 : random.chance(0.5) ? 2 : 4;
  if (random.chance(0.5)) {
    const int64_t pixel = p.channels * p.item_size;
    p.alignment = std::min(random.power_of_two(p.item_size, 16), static_cast<int32_t>((pixel | 16) & -(pixel | 16)));
  }
  p.output_last = random.chance(0.3);
  p.output_vectors = random.chance(0.8);
  p.dense = !volume && (p.alignment == 0 || p.channels == 1) && random.chance(0.8);
  p.planes = p.dense && p.item_size > 1 && p.taps == 4 && random.chance(0.8);
  p.pairs = p.planes && p.points % 2 == 0 && random.chance(0.8);
  p.row_alignment = random.power_of_two(2, 8);
  if (p.item_size == 1) p.width += p.width % 2;
  if (p.row_alignment < p.item_size) p.row_alignment = p.item_size;
  while (p.width * p.item_size % p.row_alignment) p.row_alignment /= 2;
  p.workspace = random.chance(0.8);
  return p;
}

std::string check_grid_sample(const sampler::Problem& p, const sampler::Tactic& t, const Launch& l, const Gpu& gpu) {
  using sampler::Kernel;
  const bool points = t.kernel == Kernel::kPoints;
  const int64_t of_point = points ? l.work / std::max<int64_t>(1, p.points) : 1;  // threads
  const int64_t channels = points                          ? (of_point >> t.shift) * t.chunk
                           : t.kernel == Kernel::kSampled ? p.channels
                                                          : int64_t{l.grid_y} * t.chunk;
  if (p.points && channels < p.channels) return "leaves channels out";
  const bool vectors = t.kernel == Kernel::kVectors || (points && t.width > 1);
  if (vectors && t.width * p.item_size > p.alignment) return "reads vectors that are none";
  if (points && t.chunk % (t.width << t.shift)) return "has lanes without channels";
  if (t.kernel == Kernel::kVectors && p.output_last && !p.output_vectors) return "writes vectors that are none";
  if (t.kernel == Kernel::kNarrow && t.width * p.item_size > p.alignment) return "reads channels that are elsewhere";
  const bool planes = t.kernel == Kernel::kPlanes || t.kernel == Kernel::kSampled;
  if (planes && (!p.planes || (t.width == 2 && !p.pairs))) return "reads planes or pairs that are none";
  if (t.kernel == Kernel::kPlanes && t.width > 1 && p.channels > 1) return "has pairs of one channel only";
  if (t.kernel == Kernel::kBoxes) {
    const sampler::BoxTiles tiles(p);
    if (!p.workspace || !p.dense) return "has boxes of what is none";
    if (tiles.across * tiles.down != p.across * (p.points / p.across)) return "leaves points out";
    if (sampler::workspace(p) < p.images * (p.pixels() * p.channels * p.item_size + 1 + l.blocks())) return "memory";
    return {};
  }
  if (t.kernel == Kernel::kSampled) {
    sampler::Shares s(p, gpu);
    s.divide(p, t.width, gpu);
    if (int64_t{s.chunk} * s.chunks < p.channels || int64_t{s.group} * s.groups < p.channels) return "channels";
    if (int64_t{s.part} * s.parts < p.points) return "leaves points out";
    if (int64_t{s.blocks} * sampler::kSampledThreads * t.width < p.points) return "leaves points out";
    if (int64_t{s.band} * s.bands < p.height || s.copied < s.band) return "leaves rows out";
    if (s.pitch < p.width * p.item_size || s.pitch * s.copied > s.zeros || s.pitch % s.unit) return "rows overlap";
    return {};
  }
  return l.blocks() * l.per_block < p.points * of_point ? "leaves points out" : "";
}

sampler::gradient::Problem random_gradient(Random& random) {
  sampler::gradient::Problem p;
  static_cast<sampler::Problem&>(p) = random_grid_sample(random);
  p.points = std::max<int64_t>(1, p.points), p.item_size = std::max(2, p.item_size);
  while (p.pixels() > INT32_MAX) p.height = std::max<int64_t>(1, p.height / 10), p.depth = 1;
  p.volume = p.taps == 8 || (p.taps == 1 && random.chance(0.3));
  p.input = random.chance(0.8), p.grid = !p.input || random.chance(0.7);
  p.deterministic = random.chance(0.1);
  p.last = p.alignment == 16 && p.channels * p.item_size % 16 == 0, p.dense = !p.last && random.chance(0.7);
  p.near = random.chance(0.95);
  return p;
}

std::string check_gradient(const sampler::gradient::Problem& p, const sampler::gradient::Tactic& t, const Launch& l,
                           const Gpu& gpu) {
  using sampler::gradient::Sums;
  if ((t.sums == Sums::kNone) != !p.input) return "computes another gradient than what is wanted";
  if ((t.sums == Sums::kOrdered) != (p.input && p.deterministic)) return "adds up in another order";
  if (t.vectors && (p.channels * p.item_size % 16 || (!p.last && !p.dense))) return "reads vectors that are none";
  if (t.sums == Sums::kLists && (p.taps != 4 || p.volume || !p.near)) return "lists points that it cannot";
  if (t.boxes && (t.sums != Sums::kLists || !p.dense)) return "has boxes of what is none";
  const sampler::gradient::Workspace memory(p, t);
  const bool apart = t.adds() && (t.vectors || p.item_size == 2);  // sums that are not the output itself
  if (apart && memory.sums < p.elements() * 4) return "has no memory for its sums";
  if (t.vectors && p.grid && !p.last && p.taps > 1 && memory.copy < p.elements() * p.item_size) return "nor for its copy";
  if (t.sums == Sums::kLists && memory.lists < sampler::gradient::lists_of(p, t).bytes(p.images)) return "nor for lists";
  if (t.sums == Sums::kPlane) {
    const int64_t tile = l.shared_memory / 4, tiles = l.blocks() / (p.images * p.channels);
    if (tile * tiles < p.pixels() || (tiles - 1) * tile >= p.pixels()) return "leaves pixels out";
    return 2 * l.shared_memory > gpu.shared_memory ? "has one block of a multiprocessor" : "";
  }
  return l.blocks() * l.per_block < p.points ? "leaves points out" : "";
}

// One of the problems that `make` makes, on each GPU.
template <class Problem, class Check>
std::string try_one(Problem (*make)(Random&), const Check& check, Random& random, const Gpu* gpus,
                    const char* const* names, int count) {
  Problem p = make(random);
  for (int g = 0; g < count; ++g) {
    Gpu gpu = gpus[g];
    gpu.table = table_of(names[g]);
    const auto checked = [&](const auto& t, const Launch& l) { return check(p, t, l, gpu); };
    const std::string found = wrong(p, gpu, checked);
    if (found.empty()) continue;
    std::string shown = std::string(p.kOp) + " on " + names[g];
    p.each([&](const char* name, auto value) { shown += std::string(" ") + name + "=" + std::to_string(value); });
    return shown + ": " + found;
  }
  return {};
}

}  // namespace
}  // namespace svexport

// The number of problems of each op that were tried on each GPU; -1, and why, where something does not hold.
extern "C" int64_t check_planners(const svexport::Gpu* gpus, const char* const* names, int count, uint64_t seed,
                                  int64_t problems, char* why, int size) {
  using namespace svexport;
  Random random(seed);
  std::string found;
  const auto fails = [&](auto make, const auto& check) {
    found = try_one(make, check, random, gpus, names, count);
    return !found.empty();
  };
  for (int64_t i = 0; i < problems; ++i) {
    found = i % 10 ? "" : wrong_pieces(random);
    if (!found.empty() || fails(random_norm, check_norm) || fails(random_camera, check_camera) ||
        fails(random_deform_conv2d, check_deform_conv2d) || fails(random_einsum, check_einsum) ||
        fails(random_grid_sample, check_grid_sample) || fails(random_gradient, check_gradient) ||
        fails(random_ms_deform, check_ms_deform)) {
      std::snprintf(why, size, "%s", found.c_str());
      return -1;
    }
  }
  return problems;
}
