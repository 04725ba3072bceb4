// The fused decoder on the host: whether it supports a decoder, its memory, and the list of a launch.
#pragma once

#include <algorithm>

#include "transformer_decoder_fused_kernel.cuh"

namespace svexport {
namespace {

using namespace fused;

bool fits(const TransformerDecoder& d, const DecoderSizes& n) {
  if (d.query.item_size() != 2 || n.channels != kChannels || d.num_heads != kHeads || n.ffn % 256 != 0 ||
      n.ffn > kMaxFfn || n.code_size > kNarrow || n.classes > kNarrow || n.rows >= 1 << 30 || n.cams > kMaxCams ||
      of_device(cudaDevAttrComputeCapabilityMajor) != 9) {
    return false;
  }
  uintptr_t bits = reinterpret_cast<uintptr_t>(d.query.data) | reinterpret_cast<uintptr_t>(d.query_pos.data);
  for (int i = 0; i < d.num_weights; ++i) bits |= reinterpret_cast<uintptr_t>(d.weights[i].data);
  return bits % 16 == 0;
}

// Whether the fused kernel samples the cameras itself; if not, small kernels do, between two launches of it.
bool samples_itself(const TransformerDecoder& d, const DecoderSizes& n) {
  return d.num_points == 1 && d.num_groups == 1 && !d.learned_offsets && n.logits <= kNarrow && n.cams <= 32 &&
         !n.widen;
}

// A map whose channels are not adjacent is copied to channels-last if the copy costs less than strided reads in every
// layer: as measured, up to 40 KB a sample. These are the limits for one map and for all maps. Neither grows when a
// size shrinks, so that scratch memory for the largest sizes suffices for smaller ones.
int64_t copy_limit(const TransformerDecoder& d, const DecoderSizes& n) {
  return n.rows * d.num_layers * d.num_points * (40 << 10);
}
constexpr int64_t kCopyLimit = 256 << 20;

int64_t copy_bytes(const TransformerDecoder& d, int i) {
  const Tensor& map = d.features[i];
  return map.dtype == d.query.dtype && map.strides[2] != 1 ? map.numel() * 2 : 0;
}

FusedLevel level_of(const TransformerDecoder& d, int i) {
  const int given = i < d.num_features ? i : d.num_features - 1;
  const Tensor& map = d.features[given];
  FusedLevel l{};
  l.data = map.data;
  l.pool = i == d.num_features;
  l.scale = 1;
  l.batch = map.strides[0], l.cam = map.strides[1];
  l.channel = map.strides[2], l.y = map.strides[3], l.x = map.strides[4];
  l.height = static_cast<int>(map.sizes[3]), l.width = static_cast<int>(map.sizes[4]);
  if (map.dtype == DType::kInt8) {
    l.format = kBytes, l.scale = d.scales[given];
  } else {
    l.format = map.aligned(2, 16) ? kAdjacent : kStrided;
  }
  if (l.pool) l.height /= 2, l.width /= 2;
  return l;
}

int64_t copies_bytes(const TransformerDecoder& d, const DecoderSizes& n) {
  int64_t bytes = 0;
  for (int i = 0; i < d.num_features; ++i) bytes += std::min(copy_bytes(d, i), copy_limit(d, n));
  return std::min(bytes, kCopyLimit);
}

struct FusedBuffers {
  float* points;
  char* copies;
  int64_t copies_size = 0;
  char *x, *position, *q, *k, *v, *where, *mixed, *logits, *offsets, *sampled;
  char* samples;
  unsigned* done;  // counters of `done`, then those of `passed`
  int64_t counters;
  int keys;

  FusedBuffers(Scratch& scratch, const TransformerDecoder& d, const DecoderSizes& n) {
    keys = ceil_div(n.queries, kKeyBlock) * kKeyBlock;
    const int64_t tiles = static_cast<int64_t>(n.batch) * ceil_div(n.queries, kRows);
    const int64_t tensor = tiles * kRows * kChannels * 2,
                  heads = 2 * static_cast<int64_t>(n.batch) * keys * kChannels * 2;
    const bool apart = !samples_itself(d, n);  // other kernels sample
    const int64_t sampled_tiles = apart ? 0 : std::min<int64_t>(tiles, kMostSplit);
    const int64_t samples_of_row = kPresampled * std::min(kAheadLevels, n.levels);
    samples = scratch.take<char>(sampled_tiles * kRows * samples_of_row * kChannels * 2);
    counters = n.batch + 2 * tiles;
    done = scratch.take<unsigned>(counters);
    points = scratch.take<float>(n.rows * 3);
    for (char** p : {&k, &v}) *p = scratch.take<char>(heads);
    for (char** p : {&x, &position, &q}) *p = scratch.take<char>(tensor);
    for (char** p : {&where, &mixed}) *p = scratch.take<char>(apart ? tensor : 0);
    logits = scratch.take<char>(apart ? n.rows * n.logits * 2 : 0);
    offsets = scratch.take<char>(apart ? n.rows * n.offsets * 2 : 0);
    sampled = scratch.take<char>(n.widen ? n.rows * kChannels * 4 : 0);
    copies_size = copies_bytes(d, n);
    copies = scratch.take<char>(copies_size);
  }
};

bool plain(const FusedLevel& l) {
  return l.format == kAdjacent && !l.pool && l.height * l.y < 1ll << 31 && l.width * l.x < 1ll << 31;
}

// cuTensorMapEncodeTiled, looked up at run time, because the kernels do not link to the driver.
decltype(&cuTensorMapEncodeTiled) tensor_map_encoder() {
  static const auto encoder = [] {
    void* p = nullptr;
    cudaDriverEntryPointQueryResult found{};
#if CUDART_VERSION >= 12050
    const cudaError_t e =
        cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &p, 12000, cudaEnableDefault, &found);
#else
    const cudaError_t e = cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &p, cudaEnableDefault, &found);
#endif
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(
        e == cudaSuccess && found == cudaDriverEntryPointSuccess ? p : nullptr);
  }();
  return encoder;
}

// Builds the list of a launch, and the tables that it refers to.
struct List {
  Fused& a;
  DType dtype;
  int products = 0, weights = 0, norms = 0;
  bool failed = false;
  const Tensor* used[kMaxWeights];

  // Adds a product of 256 inputs and outputs of a layer; in, out: in units of 256. weight: its bias follows it.
  Product& add(const Tensor* weight, uint32_t code, Tile from, Tile to = kSum, int in = 0, int out = 0) {
    Product& p = a.product[products++] = Product{};
    const int rows = static_cast<int>(weight[0].sizes[0]);
    if (rows < kChannels) code |= kIsNarrow;
    p.code = code | from << kFrom | static_cast<uint32_t>(to) << kTo;
    p.in = static_cast<uint8_t>(in), p.out = static_cast<uint8_t>(out);
    for (int i = std::max(0, weights - 3); i < weights; ++i) {
      if (used[i] == weight) {
        p.weight = static_cast<uint8_t>(i);
        return p;
      }
    }
    used[weights] = weight;
    a.weight[weights] = {weight[1].data, rows};
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(weight[0].sizes[1]), static_cast<cuuint64_t>(rows)},
                     pitch[1] = {sizes[0] * 2};
    const cuuint32_t box[2] = {64, static_cast<cuuint32_t>(rows < kChannels ? kNarrow : kHalf)}, steps[2] = {1, 1};
    failed |= tensor_map_encoder()(
                  &a.map[weights],
                  dtype == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 2,
                  weight[0].data, sizes, pitch, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                  CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS;
    p.weight = static_cast<uint8_t>(weights++);
    return p;
  }
  // Adds an entry without a product.
  Product& add(uint32_t code) {
    Product& p = a.product[products++] = Product{};
    p.code = code;
    return p;
  }
  // Norms tile `from` to `to` before product p; encoder: the first layer of the position's encoding, applied before.
  void norm(Product& p, const Tensor* weight, Tile from, Tile to, uint32_t code = 0, const Tensor* encoder = nullptr) {
    p.code |= kNorms | code | static_cast<uint32_t>(from) << kNormFrom | static_cast<uint32_t>(to) << kNormTo;
    p.norm = static_cast<uint8_t>(norms);
    a.norm[norms++] = {weight[0].data, weight[1].data, encoder ? encoder[0].data : nullptr,
                       encoder ? encoder[1].data : nullptr};
  }
};

// A launch of some layers, or of a part of one.
template <class T>
class Launch {
 public:
  // split: the box branch has clusters of its own.
  Launch(const TransformerDecoder& d, const DecoderSizes& n, const FusedBuffers& b, Fused& a, bool split = false)
      : d_(d), n_(n), b_(b), a_(a), list_{a, d.query.dtype}, split_(split) {
    std::fill(a.load, a.load + kTiles, nullptr);
    std::fill(a.save, a.save + kTiles, nullptr);
    std::fill(a.products, a.products + 2, 0);
    std::fill(a.passes, a.passes + 2, 0);
    a.load[kQueryPos] = d.query_pos.data;
    a.first = a.save_points = false;
    a.classes = nullptr, a.signals = 0;
  }

  // Adds all layers.
  void all() {
    begin();
    for (int layer = 0; layer < d_.num_layers; ++layer) attend(layer, true), sample(layer, true);
    if (!split_) return;
    a_.products[kQueries] = list_.products;
    encode(0, kEncodes);
    for (int layer = 0; layer < d_.num_layers; ++layer) {
      list_.norm(list_.add(kNoProduct), weight_of(d_, layer, kPositionNorm1), kPosition, kPosition,
                 kNormRelu | kPasses);
      boxes(layer).code |= kTakes;
    }
    list_.add(kNoProduct | kMoves);
    a_.passes[kQueries] = a_.passes[kBoxes] = d_.num_layers;
  }
  // Adds queries, keys and values of the first layer, and the encoding of its position.
  void begin() {
    a_.first = true;
    a_.load[kX] = d_.query.data;
    heads(0, nullptr);
    if (!split_) encode(0, kEncodes);
  }
  // Adds a layer from its attention to the camera weights, if `itself` to the logits, else up to their input in kWhere.
  void attend(int layer, bool itself) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    Product& attention = list_.add(kAttends);
    if (itself && !split_) list_.norm(attention, w(kPositionNorm1), kPosition, kPosition, kNormRelu);
    list_.add(w(kOutProj), kAddsX | (d_.residual_query_pos ? kQueryPos << kAdds : 0u), kIn);
    list_.norm(itself ? list_.add(w(kAttentionWeights), 0, kWhere) : list_.add(kNoProduct), w(kMhaNorm), kSum, kX,
               kAddsQueryPos);
  }
  // Adds a layer from its sampling on, up to queries, keys and values of the next layer.
  void sample(int layer, bool itself) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    Product& out =
        list_.add(w(kOutputProj), kAddsX | kPosition << kAdds | (itself ? kSamples : 0u) | (split_ ? kTakes : 0u), kIn);
    if (!itself) list_.norm(out, w(kPositionNorm1), kPosition, kPosition, kNormRelu);
    // One exchange has two parts of 256 hidden channels; the next uses other tiles, as these may still be read.
    constexpr Tile kHidden[2][2] = {{kQuery, kIn}, {kWhere, kSum}};
    const int parts = n_.ffn / kChannels;
    for (int first = 0; first < parts; first += 2) {
      const int last = std::min(first + 2, parts) - 1;
      for (int i = first; i <= last; ++i) {
        Product& p = list_.add(w(kFfn0), kRelu | (i < last ? kOpen : 0u), kX, kHidden[first / 2 % 2][i - first], 0, i);
        if (i == 0) list_.norm(p, w(kSvcaNorm), kSum, kX);
      }
      for (int i = first; i <= last; ++i) {
        list_.add(w(kFfn2), (i > 0 ? kGoesOn : 0u) | (i + 1 < parts ? kKeeps : kAddsX),
                  kHidden[first / 2 % 2][i - first], kPosition, i, 0);
      }
    }
    const bool ends = layer + 1 == d_.num_layers;
    if (!ends) heads(layer + 1, w(kFfnNorm));
    if (!split_) {
      Product& reg = boxes(layer);
      if (ends) list_.norm(reg, w(kFfnNorm), kPosition, kX);
    }
    if (!ends) return;
    Product& classes = list_.add(weight_of(d_, kCls0), split_ ? 0 : kMoves, kX, kSum);
    if (split_) list_.norm(classes, w(kFfnNorm), kPosition, kX, kPasses);
    list_.norm(list_.add(weight_of(d_, kCls3), 0, kIn, kWhere), weight_of(d_, kClsNorm0), kSum, kIn, kNormRelu);
    list_.norm(list_.add(weight_of(d_, kCls6), 0, kIn), weight_of(d_, kClsNorm1), kWhere, kIn, kNormRelu);
    a_.classes = d_.classes.data;
  }

  void load(std::initializer_list<Tile> tiles) {
    for (Tile tile : tiles) a_.load[tile] = buffer(tile);
  }
  void save(std::initializer_list<Tile> tiles) {
    for (Tile tile : tiles) a_.save[tile] = buffer(tile);
  }

  // Called before the first launch. Sets how many clusters can be resident at once.
  static cudaError_t prepare(int& clusters) {
    Config config(1, nullptr, false);
    for (const auto kernel : kKernels) {
      SVEXPORT_TRY(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                        static_cast<int>(sizeof(Shared<T>))));
    }
    return cudaOccupancyMaxActiveClusters(&clusters, kKernels[false], &config.config);
  }

  // together: a cooperative launch, in which blocks wait for each other.
  cudaError_t run(bool together, cudaStream_t stream, bool early = false) {
    if (!split_ && (list_.products == 0 || !(a_.product[list_.products - 1].code & kNoProduct))) list_.add(kNoProduct);
    a_.products[split_ ? kBoxes : kQueries] = list_.products - a_.products[kQueries];
    if (list_.failed) return cudaErrorInvalidValue;
    a_.scene_clusters = ceil_div(n_.queries, kRows);
    if (!together) a_.signals = 0;  // the next launch waits for all of this one
    const Config config(static_cast<unsigned>(a_.scene_clusters * n_.batch * (split_ ? 2 : 1)), stream, together,
                        early);
    return cudaLaunchKernelEx(&config.config, kKernels[split_], a_);
  }

 private:
  static constexpr void (*kKernels[2])(Fused) = {decoder_kernel<T, false>, decoder_kernel<T, true>};

  struct Config {
    cudaLaunchAttribute attributes[3]{};
    cudaLaunchConfig_t config{};

    Config(unsigned clusters, cudaStream_t stream, bool together, bool early = false) {
      attributes[0].id = cudaLaunchAttributeClusterDimension;
      attributes[0].val.clusterDim.x = kBlocks, attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
      attributes[1].id = cudaLaunchAttributeCooperative;
      attributes[1].val.cooperative = 1;
      attributes[2].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[2].val.programmaticStreamSerializationAllowed = 1;
      config.gridDim = dim3(clusters * kBlocks);
      config.blockDim = dim3(kThreads);
      config.dynamicSmemBytes = sizeof(Shared<T>);
      config.stream = stream;
      config.attrs = attributes;
      config.numAttrs = together ? early ? 3 : 2 : 1;
    }
    Config(const Config&) = delete;
  };

  // Adds in_proj of a layer, after the previous layer's last norm. Keys and values come first: others wait for them.
  void heads(int layer, const Tensor* norm) {
    const Tensor* weight = weight_of(d_, layer, kInProj);
    Product& keys = list_.add(weight, kToKeys, kWhere, kSum, 0, 1);
    if (norm) list_.norm(keys, norm, kPosition, kX, kAddsQueryPos | (split_ ? kPasses : 0u));
    list_.add(weight, kToValues, kX, kSum, 0, 2);
    list_.add(weight, kToQueries, kWhere, kQuery, 0, 0);
    ++a_.signals;
  }
  // Adds the box branch of a layer and the encoding of the next layer. Returns the first product.
  Product& boxes(int layer) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    Product& first = list_.add(w(kReg0), kRelu, kX, kIn);
    list_.add(w(kReg2), kRelu, kIn, kWhere);
    list_.add(w(kReg4), 0, kWhere);
    if (layer + 1 < d_.num_layers) encode(layer + 1, kMoves | kEncodes);
    return first;
  }
  void encode(int layer, uint32_t code) {
    auto w = [&](DecoderWeight weight) { return weight_of(d_, layer, weight); };
    list_.norm(list_.add(w(kPosition3), code, kIn, kPosition), w(kPositionNorm0), kSum, kIn, kNormRelu, w(kPosition0));
  }
  char* buffer(Tile tile) const {
    return tile == kX          ? b_.x
           : tile == kPosition ? b_.position
           : tile == kQuery    ? b_.q
           : tile == kWhere    ? b_.where
                               : b_.mixed;
  }

  const TransformerDecoder& d_;
  const DecoderSizes& n_;
  const FusedBuffers& b_;
  Fused& a_;
  List list_;
  bool split_;
};

}  // namespace
}  // namespace svexport
