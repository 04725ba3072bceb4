// The decoder for half and bfloat16, 256 channels in 8 heads, on devices of compute capability 9.0: one kernel does all
// that lies between the cameras' maps and the results.
//
// A cluster of two blocks keeps sixteen rows (queries of a scene) in shared memory through all layers. Each block
// computes half of the outputs of every linear layer and gives them to the other. A product is outputs x rows, because
// wgmma wants 64 rows of its first matrix, the weights. These come through a ring in shared memory, which a warp of its
// own fills some products ahead, by tensor maps. Keys and values take the same way.
//
// The host makes a list of steps, and the kernel executes it in a loop, because code that runs only once is fetched
// from far away. Between layers, queries need the keys and values of all others of their scene. If all clusters are
// resident (a cooperative launch), one launch does all layers: the warp that fetches waits for keys and values by a
// counter while the other warps compute the box branch. If twice as many clusters can be resident, the box branch,
// which the cameras need but the attention does not, has clusters of its own, beside the next layer's attention; they
// sample the first cameras, too. If not all are resident, or another kernel samples, launches end where blocks would
// wait.
// A previous launch copies maps from NCHW to channels-last; this one begins as it ends.
#include <algorithm>

#include "gemm.h"
#include "overlap.cuh"
#include "transformer_decoder.cuh"

#if CUDART_VERSION >= 12010  // st.async, and parameters of more than 4 KB
#include "transformer_decoder_fused_launch.cuh"
#endif

namespace svexport {

#if CUDART_VERSION < 12010

size_t fused_decoder_workspace(const TransformerDecoder&, const DecoderSizes&) { return 0; }

cudaError_t fused_decoder(const TransformerDecoder&, const DecoderSizes&, void*, cudaStream_t) {
  return cudaErrorNotSupported;
}

#else

namespace {

// ---------------------------------------------------------------- copies of maps

// A map of 256 channels of 2 bytes, to be copied to channels-last.
struct MapCopy {
  const uint16_t* from;
  uint16_t* to;
  int64_t batch, cam, channel, y, x;  // strides of `from`
  int width, pixels;
  unsigned first_block;
  bool pairs;  // whether pixels are contiguous, so that two can be read at once
};

struct Copies {
  MapCopy map[kMaxCameraLevels];
  int maps = 0, cams;
  unsigned* counters;  // to be cleared
  int64_t num_counters;
};

constexpr int kCopyThreads = 256, kCopyPixels = 64, kCopyChannels = 128;

__global__ void __launch_bounds__(kCopyThreads) copy_maps(const __grid_constant__ Copies a) {
  start_next();
  __shared__ uint32_t tile[kCopyChannels][kCopyPixels / 2 + 1];
  constexpr int kCopyWarps = kCopyThreads / 32;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  if (blockIdx.x == 0) {
    for (int64_t i = threadIdx.x; i < a.num_counters; i += kCopyThreads) a.counters[i] = 0;
  }
  int which = 0;
  while (which + 1 < a.maps && blockIdx.x >= a.map[which + 1].first_block) ++which;
  const MapCopy& m = a.map[which];
  const unsigned tiles = (m.pixels + kCopyPixels - 1) / kCopyPixels, block = blockIdx.x - m.first_block;
  const int image = block / tiles / (kChannels / kCopyChannels);
  const int channel0 = block / tiles % (kChannels / kCopyChannels) * kCopyChannels;
  const int pixel0 = block % tiles * kCopyPixels, pixel = pixel0 + 2 * lane;
  const uint16_t* from = m.from + image / a.cams * m.batch + image % a.cams * m.cam + (channel0 + warp) * m.channel;
  uint32_t words[kCopyChannels / kCopyWarps];
  if (m.pairs) {
    UNROLL for (int i = 0; i < kCopyChannels / kCopyWarps; ++i) {
      words[i] =
          pixel < m.pixels ? __ldg(reinterpret_cast<const uint32_t*>(from + i * kCopyWarps * m.channel + pixel)) : 0;
    }
  } else {
    const int next = pixel + 1;
    const int64_t at[2] = {pixel / m.width * m.y + pixel % m.width * m.x, next / m.width * m.y + next % m.width * m.x};
    UNROLL for (int i = 0; i < kCopyChannels / kCopyWarps; ++i) {
      const uint16_t* row = from + i * kCopyWarps * m.channel;
      words[i] = (pixel < m.pixels ? __ldg(row + at[0]) : 0) |
                 static_cast<uint32_t>(next < m.pixels ? __ldg(row + at[1]) : 0) << 16;
    }
  }
  UNROLL for (int i = 0; i < kCopyChannels / kCopyWarps; ++i) tile[warp + i * kCopyWarps][lane] = words[i];
  __syncthreads();
  uint16_t* to = m.to + (static_cast<int64_t>(image) * m.pixels + pixel0) * kChannels + channel0 + 2 * lane;
  UNROLL for (int pair = warp; pair < kCopyPixels / 2; pair += kCopyWarps) {
    UNROLL for (int channel = 0; channel < kCopyChannels; channel += 64) {
      const uint32_t low = tile[channel + 2 * lane][pair], high = tile[channel + 2 * lane + 1][pair];
      uint32_t* there = reinterpret_cast<uint32_t*>(to + static_cast<int64_t>(2 * pair) * kChannels + channel);
      if (pixel0 + 2 * pair < m.pixels) there[0] = __byte_perm(low, high, 0x5410);
      if (pixel0 + 2 * pair + 1 < m.pixels) there[kChannels / 2] = __byte_perm(low, high, 0x7632);
    }
  }
}

// ---------------------------------------------------------------- launching

// copied: d with the copies of maps, for a sampling kernel of its own.
template <class T>
cudaError_t launch_all(const TransformerDecoder& d, const DecoderSizes& n, const TransformerDecoder& copied,
                       const FusedBuffers& b, Fused& a, bool cleared, cudaStream_t stream) {
  const bool itself = samples_itself(d, n);
  int resident = 0;
  SVEXPORT_TRY(Launch<T>::prepare(resident));
  const int64_t tiles = ceil_div(n.queries, kRows) * static_cast<int64_t>(n.batch);
  if (itself && d.num_layers <= kMaxLayers && tiles <= resident) {
    if (!cleared) SVEXPORT_TRY(cudaMemsetAsync(b.done, 0, b.counters * sizeof(unsigned), stream));
    Launch<T> launch(d, n, b, a, 2 * tiles <= resident && tiles <= kMostSplit);
    a.which = 0;
    launch.all();
    const cudaError_t status = launch.run(true, stream, cleared);
    if (status != cudaErrorCooperativeLaunchTooLarge) return status;
    cudaGetLastError();  // something else occupies part of the device
  }

  auto save = [&](Launch<T>& launch) { launch.save({kX, kPosition, kQuery}), a.save_points = true; };
  {
    Launch<T> launch(d, n, b, a);
    a.which = 0;
    launch.begin();
    save(launch);
    SVEXPORT_TRY(launch.run(false, stream));
  }
  for (int layer = 0; layer < d.num_layers; ++layer) {
    const bool last = layer + 1 == d.num_layers;
    Launch<T> launch(d, n, b, a);
    a.which = (layer + 1) % 2;
    launch.load({kX, kPosition, kQuery});
    launch.attend(layer, itself);
    if (itself) {
      launch.sample(layer, true);
      if (!last) save(launch);
      SVEXPORT_TRY(launch.run(false, stream));
      continue;
    }
    launch.save({kX, kWhere});
    SVEXPORT_TRY(launch.run(false, stream));
    auto apply = [&](DecoderWeight weight, void* y) {
      const Tensor* w = weight_of(d, layer, weight);
      Linear product;
      product.x = b.where, product.weight = w[0].data, product.bias = w[1].data, product.y = y;
      product.rows = n.rows, product.in = kChannels, product.out = static_cast<int>(w[0].sizes[0]);
      return linear(product, d.query.dtype, stream);
    };
    SVEXPORT_TRY(apply(kAttentionWeights, b.logits));
    if (d.learned_offsets) SVEXPORT_TRY(apply(kOffsets, b.offsets));
    auto* const wide = reinterpret_cast<float*>(b.sampled);
    SVEXPORT_TRY(svexport::sample(copied, n, b.points, b.logits, b.offsets, b.mixed, wide, stream));
    Launch<T> rest(d, n, b, a);
    rest.load({kX, kPosition, kIn});
    rest.sample(layer, false);
    if (!last) save(rest);
    SVEXPORT_TRY(rest.run(false, stream));
  }
  return cudaSuccess;
}

template <class T>
cudaError_t run(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  if (!has_threads(decoder_kernel<T, false>, kThreads)) return cudaErrorNotSupported;  // not compiled for sm_90a
  Scratch scratch{static_cast<char*>(workspace)};
  const FusedBuffers b(scratch, d, n);
  Fused a(d);
  a.queries = n.queries, a.keys = b.keys;
  a.points = b.points, a.done = b.done;
  a.passed_tile[kQueries] = b.x, a.passed_tile[kBoxes] = b.position, a.seen = reinterpret_cast<float*>(b.q);
  a.samples = b.samples;
  a.passed[kQueries] = b.done + n.batch, a.passed[kBoxes] = a.passed[kQueries] + (b.counters - n.batch) / 2;
  a.k = b.k, a.v = b.v;
  a.heads_size = static_cast<int64_t>(n.batch) * b.keys * kChannels;
  a.num_classes = n.classes, a.code_size = n.code_size;
  a.cams = n.cams, a.levels = n.levels, a.ahead_levels = std::min(kAheadLevels, n.levels), a.logits = n.logits,
  a.activation = d.sampling.activation;
  for (int i = 0; i < 4; ++i) a.lidar2img_strides[i] = d.lidar2img.strides[i];
  for (int i = 0; i < 3; ++i) {
    a.low[i] = static_cast<float>(d.sampling.pc_range[i]);
    a.size[i] = static_cast<float>(d.sampling.pc_range[i + 3] - d.sampling.pc_range[i]);
  }
  for (int i = 0; i < 2; ++i) {
    a.image[i] = static_cast<float>(d.sampling.image_size[i]);
    a.clamp[i] = static_cast<float>(d.sampling.uv_clamp[i]);
  }
  a.depth_eps = static_cast<float>(d.sampling.depth_eps), a.in_image = d.sampling.in_image;
  TransformerDecoder copied = d;
  Tensor maps[kMaxCameraLevels];
  int64_t used = 0;
  Copies copies;
  copies.cams = n.cams, copies.counters = b.done, copies.num_counters = b.counters;
  unsigned blocks = 0;
  for (int i = 0; i < d.num_features; ++i) {
    Tensor& map = maps[i] = d.features[i];
    const int64_t bytes = copy_bytes(d, i), *sizes = map.sizes;
    if (bytes == 0 || bytes > copy_limit(d, n) || used + bytes > b.copies_size) continue;
    MapCopy& m = copies.map[copies.maps++];
    m.from = static_cast<const uint16_t*>(map.data), m.to = reinterpret_cast<uint16_t*>(b.copies + used);
    m.batch = map.strides[0], m.cam = map.strides[1], m.channel = map.strides[2];
    m.y = map.strides[3], m.x = map.strides[4];
    m.width = static_cast<int>(sizes[4]), m.pixels = static_cast<int>(sizes[3] * sizes[4]);
    m.first_block = blocks;
    m.pairs = m.x == 1 && m.y == m.width && m.pixels % 2 == 0 && (m.batch | m.cam | m.channel) % 2 == 0 &&
              reinterpret_cast<uintptr_t>(m.from) % 4 == 0;
    blocks += static_cast<unsigned>(n.batch * n.cams * (kChannels / kCopyChannels) * ceil_div(m.pixels, kCopyPixels));
    map.data = b.copies + used;
    map.strides[2] = 1, map.strides[4] = sizes[2], map.strides[3] = sizes[4] * sizes[2];
    map.strides[1] = sizes[3] * map.strides[3], map.strides[0] = sizes[1] * map.strides[1];
    used += bytes;
  }
  if (blocks > 0) SVEXPORT_TRY(svexport::launch(copy_maps, dim3(blocks), kCopyThreads, 0, stream, false, copies));
  copied.features = maps;
  for (int i = 0; samples_itself(d, n) && i < n.levels; ++i) {
    a.level[i] = level_of(copied, i);
    if (i >= kAheadLevels || !plain(a.level[i])) continue;
    if (a.plain_levels == 0) a.first_plain = i;
    if (a.first_plain + a.plain_levels == i) ++a.plain_levels;
  }
  return launch_all<T>(d, n, copied, b, a, blocks > 0, stream);
}

}  // namespace

size_t fused_decoder_workspace(const TransformerDecoder& d, const DecoderSizes& n) {
  if (d.query.item_size() != 2) return 0;
  Scratch scratch{nullptr};
  FusedBuffers buffers(scratch, d, n);
  return scratch.used;
}

cudaError_t fused_decoder(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  if (!fits(d, n) || !tensor_map_encoder()) return cudaErrorNotSupported;
  const bool is_half = d.query.dtype == DType::kFloat16;
  return is_half ? run<__half>(d, n, workspace, stream) : run<__nv_bfloat16>(d, n, workspace, stream);
}

#endif

}  // namespace svexport

#ifdef SVEXPORT_STAGES
// Clears the clocks if `clocks` is null, else copies them there.
extern "C" int svexport_stages(void* clocks) {
  if (clocks) return cudaMemcpyFromSymbol(clocks, svexport::fused::stage_clocks, sizeof(svexport::fused::stage_clocks));
  void* p = nullptr;
  const cudaError_t e = cudaGetSymbolAddress(&p, svexport::fused::stage_clocks);
  return e ? e : cudaMemset(p, 0, sizeof(svexport::fused::stage_clocks));
}
#endif
