#include "grid_sample.h"

#include <algorithm>

#include "grid_sample_box.cuh"
#include "grid_sample_direct.cuh"
#include "grid_sample_narrow.cuh"
#include "grid_sample_point.cuh"
#include "grid_sample_sampled.cuh"
#include "grid_sample_vector.cuh"

namespace svexport {
namespace {

using namespace forward;

// ------------------------------------------------------------------------------------------------------ the choice

// Whether an image is read by planes: NCHW, with rows that need not be aligned.
bool dense_planes(const Tensor& input) {
  int64_t pixel = 1;
  return input.rank == 4 && Space::evenly_spaced(input, 2, 3, pixel) && pixel == 1;
}

// Whether an NCHW image has so many points that they are gathered from boxes, or from a copy in channels-last.
bool many_points(const Tensor& input, int64_t points, int mode) {
  const int64_t channels = input.sizes[1], pixels = input.sizes[2] * input.sizes[3];
  return mode == kBilinear && dense_planes(input) && channels * input.item_size() % 16 == 0 &&
         channels >= 32 && 2 * points >= pixels && points < (1 << 30) &&
         input.sizes[0] * channels * points >= (1 << 22) && pixels * channels < INT32_MAX;
}

// Tiles of 32 x 16 points, or 512 after each other.
Tiles tiles_of(int64_t across, int64_t down) {
  if (across < 16) across *= down, down = 1;
  const int half = down == 1 ? 8 : 4, height = kThreads >> half;
  return {static_cast<int>(across), static_cast<int>(down), half, height,
          static_cast<int>(ceil_div<int64_t>(down, height)), Divider(ceil_div<int64_t>(across, 2 << half)), false};
}

template <class T, int TAPS, int PADDING>
cudaError_t launch_vector(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, int enough, const bool* only, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  int shift = 0;
  while (shift < 3 && (V << shift) < channels) ++shift;
  const int tile = kTogether<TAPS> * (kThreads >> shift), across = ceil_div(channels, V << shift);
  const unsigned images = batch < 65535 ? batch : 65535;
  int width = 0;
  if (output.channel != 1) {
    width = output.point == 1 ? pixel_width<T>(output.data, output.image, output.channel, tile / 8) : 1;
  } else if ((reinterpret_cast<uintptr_t>(output.data) | (s.points > 1 ? output.point * sizeof(T) : 0) |
              (batch > 1 ? output.image * sizeof(T) : 0)) % 16) {
    return cudaErrorNotSupported;
  }
  int steps = kThreads / tile > 1 ? kThreads / tile : 1;
  if (only) steps *= 4;  // most often there is nothing to do: few blocks
  while (steps > 1 && static_cast<int64_t>(ceil_div(s.points, steps * tile)) * across * images < enough) steps /= 2;
  return launch(vector_kernel<T, TAPS, PADDING>, dim3(ceil_div(s.points, steps * tile), across, images), kThreads,
                vector_memory<TAPS>(shift, steps), stream, only != nullptr, s, data, image, output, batch, channels,
                shift, steps, width, only);
}

// Whether point_kernel is faster than vector_kernel: where threads are few and would wait for each other, and where the
// first cache keeps what points side by side have in common. parts: of 16 bytes, of a point and of all points.
template <int TAPS>
bool each_by_itself(int parts_of_point, int64_t parts, int64_t bytes_of_image, bool crowded) {
  const bool cached = bytes_of_image <= 192 << 10;
  if (parts_of_point == 1 || TAPS == 1) return true;
  if (TAPS == 4) return parts_of_point == 2 || parts <= 1 << 15 || (cached && crowded);
  return TAPS == 8 && cached && parts >= 1 << 15;
}

// Whether narrow_kernel is faster than direct_kernel, which reads a point's pixels again and again where these are
// large and far apart. bytes: of an image.
template <int TAPS>
bool side_by_side(int channels, int64_t bytes, int64_t results, int64_t pixels, int64_t points) {
  if (bytes <= 1 << 16 || results < 1 << 14) return false;
  if (TAPS == 4) return channels >= 24 ? points <= 4 * pixels : channels >= 12 && 4 * points <= pixels;
  return TAPS == 8 && (channels >= 24 || (channels >= 12 && points <= pixels));
}

constexpr int64_t kManyThreads = 3 << 15;  // then each does more

template <class T, int TAPS, int PADDING>
cudaError_t launch_points(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, cudaStream_t stream) {
  constexpr int V = 16 / sizeof(T);
  const int64_t parts = static_cast<int64_t>(s.points) * (channels / V);
  int chunk = V;
  while (chunk < 4 * V && chunk < channels && batch * parts * V >= kManyThreads * chunk) chunk *= 2;
  const int64_t blocks = ceil_div<int64_t>(static_cast<int64_t>(s.points) * ceil_div(channels, chunk), kThreads);
  return launch(point_kernel<T, TAPS, PADDING>, dim3(blocks, batch < 65535 ? batch : 65535), kThreads, 0, stream, false,
                s, data, image, output, batch, channels, chunk, Divider(s.points));
}

template <class T, int TAPS, int W>
cudaError_t launch_narrow(const Space& s, const T* data, int64_t image, int batch, int channels,
                          const Output<T>& output, int enough, cudaStream_t stream) {
  const int widest = W == 1 && channels >= 128 ? 5 : 4;
  int shift = 1, tile = 6;
  while (shift < widest && (kParts * W << shift) < channels) ++shift;
  const int together = kParts * W << shift, images = batch < 65535 ? batch : 65535;
  const auto blocks = [&](int chunk) {
    return static_cast<int64_t>(ceil_div(s.points, 1 << tile)) * ceil_div(channels, chunk) * images;
  };
  while (tile > 4 && blocks(together) < enough / 4) --tile;
  int chunk = together;
  while (chunk < 4 * together && blocks(2 * chunk) >= enough) chunk *= 2;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  // Lanes side by side write into different banks.
  const int pitch = (1 << tile) + std::max<int>(std::max<int>(1, 4 / sizeof(T) / W), (32 >> shift) / W);
  const int bytes = (sizeof(Taps<TAPS>) << tile) + together * pitch * sizeof(T);
  return launch(narrow_kernel<T, TAPS, W>, dim3(ceil_div(s.points, 1 << tile), ceil_div(channels, chunk), images),
                kThreads, bytes, stream, false, s, data, image, output, batch, channels, shift, chunk, tile, pitch);
}

// Gathers from boxes; where points scatter, from a copy in channels-last.
template <class T, int PADDING>
cudaError_t launch_boxes(const Tensor& input, const Space& s, const Output<T>& output, int enough, void* workspace,
                         cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const int pixels = s.size[0] * s.size[1], images = batch < 65535 ? batch : 65535;
  const T* data = static_cast<const T*>(input.data);
  Tiles tiles = tiles_of(s.across.d, s.points / s.across.d);
  tiles.pairs = output.point == 1 &&
                (sizeof(T) == 4 || ((reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image |
                                     output.channel | tiles.across) % 2 == 0));
  const int count = tiles.count_across.d * tiles.count_down;
  constexpr int kChannels = 64, kMemory = 48 << 10;  // of a block: the more channels in it the better
  T* copy = static_cast<T*>(workspace);
  bool* copied = reinterpret_cast<bool*>(copy + input.numel());
  bool* scattered = copied + batch;

  const auto kernel = box_kernel<T, PADDING>;
  cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kMemory);
  if (status != cudaSuccess) return status;
  status = launch(kernel, dim3(count, ceil_div(channels, kChannels), images), kThreads, kMemory, stream, false, s, data,
                  image, channel, output, tiles, batch, channels, kChannels, kMemory,
                  unit_of(data, image, channel, pixels), scattered);
  if (status != cudaSuccess) return status;
  status = launch(copy_scattered_kernel<T>, dim3(ceil_div(enough, images), images), kThreads, 0, stream, true, data,
                  image, channel, copy, scattered, count, copied, batch, channels, pixels,
                  pixel_width<T>(data, image, channel));
  if (status != cudaSuccess) return status;
  Space last = s;
  last.stride[0] = channels;
  last.stride[1] = channels * s.size[0];
  return launch_vector<T, 4, PADDING>(last, copy, static_cast<int64_t>(pixels) * channels, batch, channels, output,
                                      enough, copied, stream);
}

constexpr int kSmallPlane = 4096;  // bytes of a plane that the first cache keeps, whatever the points
constexpr int kTinyPlane = 2048;   // then also beside many others
// Results for which sampled_kernel is worth its sample; with more of them boxes are faster.
constexpr int kLeastSampled = 1 << 20, kMostSampled = 3 << 22;

// A thread for each point, or for two of one channel.
template <class T, class G, int PADDING>
cudaError_t launch_planes(const Tensor& input, const Space& s, const Output<T>& output, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const uint64_t pairs = reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image | s.points |
                         reinterpret_cast<uintptr_t>(s.grid.data) / (2 * sizeof(G));
  const int points = channels == 1 && pairs % 2 == 0 ? 2 : 1, all = ceil_div(s.points, points);
  const int processors = std::max(1, of_device(cudaDevAttrMultiProcessorCount));
  // All points of a plane in a block, many only where there are blocks enough.
  const int most = static_cast<int64_t>(batch) * ceil_div(channels, 4) < processors ? 640 : 1024;
  const int threads = all <= most ? ceil_div(all, 32) * 32 : kThreads, blocks = ceil_div(all, threads);
  const int of_processor = std::max(1, of_device(cudaDevAttrMaxThreadsPerMultiProcessor) / threads);  // blocks
  const int64_t of_channel = static_cast<int64_t>(blocks) * batch;
  const int64_t plane = static_cast<int64_t>(s.size[0]) * s.size[1] * sizeof(T);
  const int cache = of_device(cudaDevAttrMaxSharedMemoryPerMultiprocessor);  // in the same memory
  const int64_t second_cache = of_device(cudaDevAttrL2CacheSize);
  int chunk = ceil_div<int64_t>(channels, std::max<int64_t>(1, processors * of_processor / of_channel));
  chunk = std::max(chunk, 4);  // each has to find its pixels
  if (blocks == 1) {           // the points of a plane meet in the first cache, if it has room for all planes in use
    const int64_t used = std::min<int64_t>(of_processor, ceil_div<int64_t>(batch * ceil_div(channels, 4), processors));
    chunk = std::min<int64_t>(chunk, cache / (used * plane));
    chunk = std::max(chunk, 1);
  }
  const dim3 grid(blocks, ceil_div(channels, chunk), batch);
  if (grid.y > 65535 || grid.z > 65535) return cudaErrorNotSupported;
  const bool crowded = blocks > 1 && 2 * of_channel * grid.y >= processors * of_processor;
  // Planes that are read at the same time stay in a cache.
  const bool single = sizeof(T) == 4 && points == 1;
  const bool stays = 10 * plane <= 7 * cache || (single && 4 * plane * batch * channels <= 3 * second_cache);
  const Pace pace = !crowded ? kSome : stays ? kChannel : kRow;
  const auto kernel = points == 2 ? planes_kernel<T, G, PADDING, 2> : planes_kernel<T, G, PADDING, 1>;
  return launch(kernel, grid, threads, 0, stream, false, s, static_cast<const T*>(input.data), input.strides[0],
                input.strides[1], output, channels, chunk, pace);
}

// By planes in shared memory, or from memory. Not for planes that do not fit in there.
template <class T, class G, int PADDING>
cudaError_t launch_sampled(const Tensor& input, const Space& s, const Output<T>& output, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const int across = s.size[0] * static_cast<int>(sizeof(T));
  const int memory = of_device(cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const uint64_t odd = reinterpret_cast<uintptr_t>(output.data) / sizeof(T) | output.image | output.channel | s.points |
                       reinterpret_cast<uintptr_t>(s.grid.data) / (2 * sizeof(G));
  const int points = odd % 2 == 0 ? 2 : 1;
  const uint64_t all = reinterpret_cast<uintptr_t>(input.data) | image * sizeof(T) | channel * sizeof(T) |
                       s.stride[1] * sizeof(T) | across;
  Work work;
  work.batch = batch;
  work.unit = all % 8 == 0 ? 8 : all % 4 == 0 ? 4 : 2;
  work.pitch = across + (across / work.unit % 2 == 0 ? work.unit : 0);  // rows begin in different banks
  const int fit = std::max(0, memory - 32) / work.pitch;  // rows; a band has one of the next
  work.bands = s.size[1] <= fit ? 1 : 2;
  work.band = ceil_div(s.size[1], work.bands);
  work.rows = Divider(work.band + work.bands - 1);
  if (static_cast<int>(work.rows.d) > fit) return cudaErrorNotSupported;
  work.zeros = ceil_div(work.pitch * static_cast<int>(work.rows.d), 16) * 16;
  work.bytes = work.zeros + 16;
  work.blocks = ceil_div(s.points, kSampledThreads * points);

  // The least time, in clocks as measured on an H200. Waves: of blocks, one for each multiprocessor.
  const int slots = std::max(1, of_device(cudaDevAttrMultiProcessorCount));
  const auto waves = [&](int64_t items) { return static_cast<float>(ceil_div<int64_t>(items, slots)); };
  constexpr int kWaves = 4, kMostPlanes = 64;
  float near = 1e30f, far = 1e30f;
  for (int i = 1; i <= kWaves; ++i) {
    const int most = std::max(1, std::min(ceil_div(channels, 4), i * slots / (work.blocks * batch)));
    const int chunk = ceil_div(channels, most), chunks = ceil_div(channels, chunk);
    const float time = waves(static_cast<int64_t>(work.blocks) * chunks * batch) * points * (1500 + 350.0f * chunk);
    if (time < near) near = time, work.chunk = chunk, work.chunks = chunks;
  }
  for (int group = 1; group <= std::min(channels, kMostPlanes) && group * work.bytes <= memory; ++group) {
    const int groups = ceil_div(channels, group), others = groups * work.bands * batch;
    for (int i = 1; i <= kWaves; ++i) {
      const int part = ceil_div(ceil_div(s.points, std::max(1, i * slots / others)), 64) * 64;
      const int parts = ceil_div(s.points, part);
      const float time = waves(static_cast<int64_t>(others) * parts) *
                         (500 + group * work.bytes / 24.0f + part * std::max(1.05f, 0.55f * group));
      if (time < far) far = time, work.group = group, work.groups = groups, work.part = part, work.parts = parts;
    }
  }
  const float results = static_cast<float>(batch) * channels * s.points;
  work.tilted = 0.1f;
  work.far = std::min(0.8f, std::max(0.15f, (far - near) * slots / (1.6f * results)));

  const auto kernel = points == 2 ? sampled_kernel<T, G, PADDING, 2> : sampled_kernel<T, G, PADDING, 1>;
  const int dynamic = work.group * work.bytes;
  const cudaError_t status = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, dynamic);
  if (status != cudaSuccess) return status;
  return launch(kernel, slots, kSampledThreads, dynamic, stream, false, s, static_cast<const T*>(input.data), image,
                channel, output, channels, work);
}

template <class T, int TAPS, int PADDING>
cudaError_t run(const Tensor& input, const Space& s, const Output<T>& output, void* workspace, cudaStream_t stream) {
  const int batch = static_cast<int>(input.sizes[0]), channels = static_cast<int>(input.sizes[1]);
  const int64_t image = input.strides[0], channel = input.strides[1];
  const T* data = static_cast<const T*>(input.data);
  const int enough = 8 * of_device(cudaDevAttrMultiProcessorCount);  // blocks
  constexpr int V = 16 / sizeof(T);
  const int64_t results = static_cast<int64_t>(batch) * channels * s.points;
  int64_t pixels = 1;
  for (int a = 0; a < s.axes; ++a) pixels *= s.size[a];
  const int64_t bytes = pixels * channels * sizeof(T);
  const bool transposed = output.channel != 1;
  if (channels % V == 0 && input.aligned(1, 16)) {
    if (transposed && results / V <= INT32_MAX &&
        each_by_itself<TAPS>(channels / V, results / V, bytes, s.points >= 2 * pixels)) {
      return launch_points<T, TAPS, PADDING>(s, data, image, batch, channels, output, stream);
    }
    return launch_vector<T, TAPS, PADDING>(s, data, image, batch, channels, output, enough, nullptr, stream);
  }
  if constexpr (TAPS == 4 || TAPS == 8) {
    if (transposed && channel == 1 && side_by_side<TAPS>(channels, bytes, results, pixels, s.points)) {
      const bool pairs = channels % 2 == 0 && input.aligned(1, 2 * sizeof(T));
      const auto narrow = pairs ? launch_narrow<T, TAPS, 2> : launch_narrow<T, TAPS, 1>;
      return narrow(s, data, image, batch, channels, output, enough, stream);
    }
  }

  if constexpr (TAPS == 4) {
    const bool many = workspace && many_points(input, s.points, kBilinear);
    const int64_t plane = pixels;
    const bool small = plane * sizeof(T) <= kSmallPlane;
    const bool sampled = channels >= 8 && s.points >= 4 * kSampledThreads && 2LL * s.points >= plane &&
                         plane * sizeof(T) > kTinyPlane && results >= kLeastSampled && results <= kMostSampled;
    if (s.stride[0] == 1 && output.point == 1 && s.grid_dense && s.grid_pairs) {
      const auto of = [&](auto* g, auto padding) {
        using G = element_t<decltype(g)>;
        if (sampled) {
          const cudaError_t status = launch_sampled<T, G, padding.value>(input, s, output, stream);
          if (status != cudaErrorNotSupported) return status;
        }
        if (many && !small) return cudaErrorNotSupported;
        return launch_planes<T, G, padding.value>(input, s, output, stream);
      };
      const auto with = [&](auto padding) {
        if (s.grid.dtype == input.dtype) return of(static_cast<T*>(nullptr), padding);
        if (s.grid.dtype == DType::kFloat32) return of(static_cast<float*>(nullptr), padding);
        return cudaErrorNotSupported;
      };
      cudaError_t status;
      if constexpr (PADDING != kAnyPadding) {
        status = with(std::integral_constant<int, PADDING>());
      } else {
        status = s.padding == kBorder ? with(std::integral_constant<int, kBorder>())
                                      : with(std::integral_constant<int, kReflection>());
      }
      if (status != cudaErrorNotSupported) return status;
    }
    if (many) return launch_boxes<T, PADDING>(input, s, output, enough, workspace, stream);
  }
  int64_t extent = 1;
  for (int a = 0; a < s.axes; ++a) extent += static_cast<int64_t>(s.size[a] - 1) * s.stride[a];
  if (extent * sizeof(T) > UINT32_MAX) return cudaErrorNotSupported;
  const int blocks = ceil_div(s.points, kThreads);
  int chunk = 32;
  const int least = static_cast<int64_t>(batch) * s.points < (1 << 15) ? 4 : 8;  // each has to find its pixels
  while (chunk > least && static_cast<int64_t>(blocks) * batch * ceil_div(channels, chunk) < enough) chunk /= 2;
  while (ceil_div(channels, chunk) > 65535) chunk *= 2;
  const dim3 grid(blocks, ceil_div(channels, chunk), batch < 65535 ? batch : 65535);
  const auto with = [&](auto kernel) {
    return launch(kernel, grid, kThreads, 0, stream, false, s, data, image, channel, output, batch, channels, chunk);
  };
  if constexpr (TAPS <= 4) {
    if (channels == 3 && channel == 1) return with(direct_kernel<T, TAPS, PADDING, 3>);
    if (channels <= 3) return with(direct_kernel<T, TAPS, PADDING, 1>);
  }
  return with(direct_kernel<T, TAPS, PADDING>);
}

}  // namespace

size_t sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  if (grid.numel() == 0 || !many_points(input, grid.numel() / grid.sizes[0] / 2, mode)) return 0;
  if (input.sizes[1] % (16 / input.item_size()) == 0 && input.aligned(1, 16)) return 0;
  const Tiles tiles = tiles_of(grid.sizes[2], grid.sizes[1]);
  return input.numel() * input.item_size() + input.sizes[0] * (1 + int64_t{tiles.count_across.d} * tiles.count_down);
}

cudaError_t sample(const Tensor& input, const Tensor& grid, const Tensor& output, const Tensor& mask,
                   const Sampling& sampling, cudaStream_t stream, void* workspace) {
  Space s(grid);
  if (output.numel() == 0 && mask.data == nullptr) return cudaSuccess;
  if (output.numel() == 0 || input.sizes[0] > INT32_MAX || input.sizes[1] > INT32_MAX || !is_float(grid) ||
      !Space::of(input, grid, sampling, s)) {
    return cudaErrorNotSupported;
  }
  int64_t point = 1;
  if (!Space::evenly_spaced(output, 2, output.rank - 1, point)) return cudaErrorNotSupported;
  return dispatch_float(input.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const Output<T> to{static_cast<T*>(output.data), output.strides[0], output.strides[1], point,
                       static_cast<T*>(mask.data)};
    return dispatch_taps(sampling.mode, s.axes, [&](auto taps) {
      if constexpr (taps.value == 4) {
        if (s.padding == kZeros) return run<T, 4, kZeros>(input, s, to, workspace, stream);
        if (s.padding == kPixels) return run<T, 4, kPixels>(input, s, to, workspace, stream);
      }
      return run<T, taps.value, kAnyPadding>(input, s, to, workspace, stream);
    });
  });
}

size_t grid_sample_workspace(const Tensor& input, const Tensor& grid, int mode) {
  return input.dtype == DType::kInt8 ? 0 : sample_workspace(input, grid, mode);
}

cudaError_t grid_sample(const Tensor& input, const Tensor& grid, const Tensor& output, int mode, int padding,
                        bool align_corners, float scale, cudaStream_t stream, void* workspace) {
  const Sampling sampling{mode, padding, align_corners};
  if (input.dtype == DType::kInt8) return sample_int8(input, grid, output, sampling, scale, stream);
  return sample(input, grid, output, Tensor{}, sampling, stream, workspace);
}

}  // namespace svexport
