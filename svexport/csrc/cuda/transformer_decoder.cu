#include "transformer_decoder.h"

#include "attention.h"
#include "gemm.h"
#include "mma.cuh"
#include "overlap.cuh"
#include "transformer_decoder.cuh"

namespace svexport {
namespace {

// ---------------------------------------------------------------- kernels between the matrix products
//
// All but the first use programmatic dependent launch: they begin while the previous kernel ends.

// Writes points in fp32, and where = query + query_pos.
template <class T>
__global__ void begin_kernel(const T* query, const T* query_pos, T* where, int64_t count, AnyFloat given, float* points,
                             int64_t count_points) {
  start_next();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) where[i] = from_float<T>(to_float(query[i]) + to_float(query_pos[i]));
  if (i < count_points) points[i] = given.get(i);
}

template <class T>
__global__ void round_kernel(const float* x, T* y, int64_t count) {
  wait_for_previous();
  start_next();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i < count) y[i] = from_float<T>(x[i]);
}

template <class T>
struct Norm {
  // The input of the norm: x + bias + residual + extra, all but x optional; or, given points, their first linear layer.
  const T *x, *bias, *residual, *extra;
  const float* points;    // (rows, 3)
  const T* point_weight;  // (channels, 3)
  const T *weight, *norm_bias;
  const T* query_pos;     // optional; with it, where = y + query_pos
  T *y, *where;
  int64_t rows;
  int channels;
  bool relu;
};

// One warp per row of at most Rounds * 32 channels.
template <class T, int Rounds>
__global__ void __launch_bounds__(128) norm_kernel(const Norm<T> a) {
  wait_for_previous();
  start_next();
  const int64_t row = blockIdx.x * 4ll + threadIdx.x / 32;
  if (row >= a.rows) return;
  const int lane = threadIdx.x % 32;
  const int64_t start = row * a.channels;
  float v[Rounds], sum = 0, position[3];
  if (a.points) {
    UNROLL for (int j = 0; j < 3; ++j) position[j] = to_float(from_float<T>(inverse_sigmoid(a.points[row * 3 + j])));
  }
  UNROLL for (int i = 0; i < Rounds; ++i) {
    const int c = i * 32 + lane;
    v[i] = 0;
    if (c < a.channels) {
      if (a.points) {
        v[i] = to_float(a.bias[c]);
        UNROLL for (int j = 0; j < 3; ++j) v[i] = fmaf(position[j], to_float(a.point_weight[c * 3 + j]), v[i]);
      } else {
        v[i] = to_float(a.x[start + c]);
        if (a.bias) v[i] += to_float(a.bias[c]);
        if (a.residual) v[i] += to_float(a.residual[start + c]);
        if (a.extra) v[i] += to_float(a.extra[start + c]);
      }
      sum += v[i];
    }
  }
  const float mean = warp_sum(sum) / a.channels;
  float squares = 0;
  UNROLL for (int i = 0; i < Rounds; ++i) {
    if (i * 32 + lane < a.channels) squares = fmaf(v[i] - mean, v[i] - mean, squares);
  }
  const float scale = rsqrtf(warp_sum(squares) / a.channels + kEps);
  UNROLL for (int i = 0; i < Rounds; ++i) {
    const int c = i * 32 + lane;
    if (c >= a.channels) break;
    float y = (v[i] - mean) * scale * to_float(a.weight[c]) + to_float(a.norm_bias[c]);
    if (a.relu) y = relu(y);
    const T rounded = from_float<T>(y);
    a.y[start + c] = rounded;
    if (a.where) a.where[start + c] = from_float<T>(to_float(rounded) + to_float(a.query_pos[start + c]));
  }
}

// Moves points, and at last writes boxes, by the box branch. One thread per number of the box code.
template <class T>
struct Update {
  const T *code, *bias;  // (rows, code_size) without its bias; (code_size)
  float* points;         // (rows, 3)
  int64_t rows;
  int code_size;
  bool last;             // whether to write boxes and moved, too
  AnyFloat boxes, moved;
  float low[3], size[3];
};

template <class T>
__global__ void update_kernel(const __grid_constant__ Update<T> a) {
  wait_for_previous();
  start_next();
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x, row = i / a.code_size;
  const int j = static_cast<int>(i % a.code_size), axis = j < 2 ? j : j == 4 ? 2 : -1;
  if (row >= a.rows || (axis < 0 && !a.last)) return;
  float value = to_float(a.code[i]) + to_float(a.bias[j]);
  if (axis >= 0) {
    float& point = a.points[row * 3 + axis];
    point = sigmoid(value + inverse_sigmoid(point));
    if (a.last) a.moved.set(row * 3 + axis, point);
    value = point * a.size[axis] + a.low[axis];
  }
  if (a.last) a.boxes.set(i, value);
}

// ---------------------------------------------------------------- one kernel for every step

template <class T>
cudaError_t normed(const Norm<T>& a, cudaStream_t stream) {
  const auto kernel = a.channels <= 256 ? norm_kernel<T, 8> : norm_kernel<T, 32>;
  return launch(kernel, static_cast<unsigned>(ceil_div<int64_t>(a.rows, 4)), 128, 0, stream, true, a);
}

// Scratch memory, most of it used by several steps of a layer in turn.
template <class T>
struct Buffers {
  float* points;
  T *query, *logits, *offsets, *code;
  T *where, *mixed;  // share memory: query + query_pos has been read when attention or cameras write their result
  T *qkv, *product, *position[2], *hidden[2];  // share memory too: none of one kind outlives the next
  float* sampled;                              // shares this memory

  Buffers(Scratch& scratch, const DecoderSizes& n) {
    const int64_t tensor = n.rows * n.channels, widest = n.rows * (n.ffn > n.channels ? n.ffn : n.channels);
    points = scratch.take<float>(n.rows * 3);
    query = scratch.take<T>(tensor);
    where = mixed = scratch.take<T>(tensor);
    T* const turns = scratch.take<T>(tensor + (widest > 2 * tensor ? widest : 2 * tensor));
    qkv = product = hidden[1] = turns;
    position[0] = hidden[0] = turns + tensor, position[1] = turns + 2 * tensor;
    sampled = reinterpret_cast<float*>(turns);
    logits = scratch.take<T>(n.rows * n.logits);
    offsets = scratch.take<T>(n.rows * n.offsets);
    code = scratch.take<T>(n.rows * n.code_size);
  }
};

template <class T>
cudaError_t run(const TransformerDecoder& d, const DecoderSizes& n, void* workspace, cudaStream_t stream) {
  Scratch scratch{static_cast<char*>(workspace)};
  const Buffers<T> b(scratch, n);
  const T* query_pos = static_cast<const T*>(d.query_pos.data);
  const T* query = static_cast<const T*>(d.query.data);

  // y = x weight^T (+ bias, which follows the weight); outputs from `tail` on read x_tail in place of x
  enum Epilogue { kNothing, kBias, kBiasRelu };
  auto apply = [&](const T* x, const Tensor* weight, T* y, Epilogue epilogue, const T* x_tail = nullptr, int tail = 0) {
    Linear a;
    a.x = x, a.x_tail = x_tail, a.tail = tail, a.y = y, a.rows = n.rows;
    a.weight = weight->data, a.out = static_cast<int>(weight->sizes[0]), a.in = static_cast<int>(weight->sizes[1]);
    a.bias = epilogue == kNothing ? nullptr : weight[1].data, a.relu = epilogue == kBiasRelu;
    return linear(a, d.query.dtype, stream);
  };
  auto norm = [&](const Tensor* weight, T* y, auto&& fill) {
    Norm<T> a{};
    a.weight = static_cast<const T*>(weight[0].data), a.norm_bias = static_cast<const T*>(weight[1].data);
    a.y = y, a.rows = n.rows, a.channels = n.channels;
    fill(a);
    return normed(a, stream);
  };
  auto bias_of = [](const Tensor* weight) { return static_cast<const T*>(weight[1].data); };

  const int64_t count = n.rows * n.channels;
  const unsigned blocks = static_cast<unsigned>(ceil_div<int64_t>(count > 3 * n.rows ? count : 3 * n.rows, 256));
  begin_kernel<T><<<blocks, 256, 0, stream>>>(query, query_pos, b.where, count, AnyFloat(d.reference_points), b.points,
                                              n.rows * 3);
  SVEXPORT_TRY(cudaGetLastError());

  for (int layer = 0; layer < d.num_layers; ++layer) {
    auto w = [&](DecoderWeight weight) { return weight_of(d, layer, weight); };

    SVEXPORT_TRY(apply(b.where, w(kInProj), b.qkv, kBias, query, 2 * n.channels));
    SVEXPORT_TRY(attention(b.qkv, b.mixed, n.batch, n.queries, d.num_heads, n.channels / d.num_heads, d.query.dtype,
                           stream));
    SVEXPORT_TRY(apply(b.mixed, w(kOutProj), b.product, kNothing));
    SVEXPORT_TRY(norm(w(kMhaNorm), b.query, [&](Norm<T>& a) {
      a.x = b.product, a.bias = bias_of(w(kOutProj)), a.residual = query;
      a.extra = d.residual_query_pos ? query_pos : nullptr;
      a.query_pos = query_pos, a.where = b.where;
    }));
    query = b.query;

    SVEXPORT_TRY(apply(b.where, w(kAttentionWeights), b.logits, kBias));
    if (d.learned_offsets) SVEXPORT_TRY(apply(b.where, w(kOffsets), b.offsets, kBias));
    SVEXPORT_TRY(sample(d, n, b.points, b.logits, b.offsets, b.mixed, b.sampled, stream));
    SVEXPORT_TRY(apply(b.mixed, w(kOutputProj), b.product, kNothing));
    SVEXPORT_TRY(norm(w(kPositionNorm0), b.position[0], [&](Norm<T>& a) {
      a.points = b.points, a.relu = true;
      a.point_weight = static_cast<const T*>(w(kPosition0)->data), a.bias = bias_of(w(kPosition0));
    }));
    SVEXPORT_TRY(apply(b.position[0], w(kPosition3), b.position[1], kBias));
    SVEXPORT_TRY(norm(w(kPositionNorm1), b.position[0], [&](Norm<T>& a) { a.x = b.position[1], a.relu = true; }));
    SVEXPORT_TRY(norm(w(kSvcaNorm), b.query, [&](Norm<T>& a) {
      a.x = b.product, a.bias = bias_of(w(kOutputProj)), a.residual = query, a.extra = b.position[0];
    }));

    SVEXPORT_TRY(apply(b.query, w(kFfn0), b.hidden[0], kBiasRelu));
    SVEXPORT_TRY(apply(b.hidden[0], w(kFfn2), b.product, kNothing));
    SVEXPORT_TRY(norm(w(kFfnNorm), b.query, [&](Norm<T>& a) {
      a.x = b.product, a.bias = bias_of(w(kFfn2)), a.residual = query;
      a.query_pos = query_pos, a.where = b.where;
    }));

    SVEXPORT_TRY(apply(b.query, w(kReg0), b.hidden[0], kBiasRelu));
    SVEXPORT_TRY(apply(b.hidden[0], w(kReg2), b.hidden[1], kBiasRelu));
    SVEXPORT_TRY(apply(b.hidden[1], w(kReg4), b.code, kNothing));
    Update<T> update{b.code, bias_of(w(kReg4)), b.points, n.rows, n.code_size, layer + 1 == d.num_layers,
                     AnyFloat(d.boxes), AnyFloat(d.points)};
    for (int i = 0; i < 3; ++i) {
      const double* range = d.sampling.pc_range;
      update.low[i] = static_cast<float>(range[i]);
      update.size[i] = static_cast<float>(range[i + 3] - range[i]);
    }
    SVEXPORT_TRY(launch(update_kernel<T>, static_cast<unsigned>(ceil_div<int64_t>(n.rows * n.code_size, 128)), 128, 0,
                        stream, true, update));
  }

  constexpr ClassWeight kLinear[2] = {kCls0, kCls3}, kNorm[2] = {kClsNorm0, kClsNorm1};
  for (int i = 0; i < 2; ++i) {
    SVEXPORT_TRY(apply(i ? b.hidden[1] : b.query, weight_of(d, kLinear[i]), b.hidden[0], kBias));
    SVEXPORT_TRY(norm(weight_of(d, kNorm[i]), b.hidden[1], [&](Norm<T>& a) { a.x = b.hidden[0], a.relu = true; }));
  }
  return apply(b.hidden[1], weight_of(d, kCls6), static_cast<T*>(d.classes.data), kBias);
}

bool same_dtype(const Tensor* tensors, int count, DType dtype) {
  for (int i = 0; i < count; ++i) {
    if (tensors[i].dtype != dtype) return false;
  }
  return true;
}

bool supported(const TransformerDecoder& d) {
  const DecoderSizes n(d);
  const DType dtype = d.query.dtype, map = d.features[0].dtype;
  if (dtype == DType::kBFloat16 && !has_mma(dtype)) return false;
  for (int i = 0; map == DType::kInt8 && i < d.num_features; ++i) {
    const Tensor& t = d.features[i];
    if (t.rank != 6 || !t.contiguous() || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
  }
  return is_float(d.query) && same_dtype(&d.query_pos, 1, dtype) && same_dtype(d.weights, d.num_weights, dtype) &&
         same_dtype(d.features, d.num_features, map) &&
         (map == dtype || map == DType::kInt8 || map == DType::kFloat32) && is_float(d.reference_points) &&
         is_float(d.lidar2img) && is_float(d.boxes) && is_float(d.points) && n.levels <= kMaxCameraLevels &&
         n.channels <= 1024 && n.channels / d.num_heads <= 64;
}

}  // namespace

DecoderSizes::DecoderSizes(const TransformerDecoder& d)
    : batch(static_cast<int>(d.query.sizes[0])),
      queries(static_cast<int>(d.query.sizes[1])),
      channels(static_cast<int>(d.query.sizes[2])),
      cams(static_cast<int>(d.lidar2img.sizes[1])),
      levels(d.num_features + d.pool),
      ffn(static_cast<int>(weight_of(d, 0, kFfn0)->sizes[0])),
      logits(static_cast<int>(weight_of(d, 0, kAttentionWeights)->sizes[0])),
      offsets(d.learned_offsets ? 3 * d.num_points : 0),
      code_size(static_cast<int>(weight_of(d, 0, kReg4)->sizes[0])),
      classes(static_cast<int>(weight_of(d, kCls6)->sizes[0])),
      rows(static_cast<int64_t>(batch) * queries),
      widen(d.features[0].dtype == DType::kFloat32 && d.query.dtype != DType::kFloat32) {}

cudaError_t sample(const TransformerDecoder& d, const DecoderSizes& n, const float* points, const void* logits,
                   const void* offsets, void* sampled, float* wide, cudaStream_t stream) {
  const int64_t b = n.batch, q = n.queries, p = d.num_points;
  CameraLevel levels[kMaxCameraLevels];
  for (int i = 0; i < n.levels; ++i) {
    const int given = i < d.num_features ? i : d.num_features - 1;
    levels[i] = {d.features[given], d.scales ? d.scales[given] : 1.f, i == d.num_features};
  }
  const Tensor output = n.widen ? row_major(wide, DType::kFloat32, {b, q, n.channels})
                                : row_major(sampled, d.query.dtype, {b, q, n.channels});
  SVEXPORT_TRY(camera_sample(levels, n.levels, row_major(points, DType::kFloat32, {b, q, 3}), d.lidar2img,
                             row_major(logits, d.query.dtype, {b, q, n.cams, p, n.levels, d.num_groups}),
                             d.learned_offsets ? row_major(offsets, d.query.dtype, {b, q, p, 3}) : Tensor{}, d.sampling,
                             output, 0, stream));
  if (!n.widen) return cudaSuccess;
  return dispatch_float(d.query.dtype, [&](auto* p) {
    using T = element_t<decltype(p)>;
    const int64_t count = output.numel();
    return launch(round_kernel<T>, static_cast<unsigned>(ceil_div<int64_t>(count, 256)), 256, 0, stream, true, wide,
                  static_cast<T*>(sampled), count);
  });
}

size_t transformer_decoder_workspace(const TransformerDecoder& d) {
  const DecoderSizes n(d);
  Scratch scratch{nullptr};
  dispatch_float(d.query.dtype, [&](auto* p) {
    Buffers<element_t<decltype(p)>> buffers(scratch, n);
    return cudaSuccess;
  });
  const size_t fused = fused_decoder_workspace(d, n);
  return scratch.used > fused ? scratch.used : fused;
}

cudaError_t transformer_decoder(const TransformerDecoder& d, void* workspace, cudaStream_t stream) {
  if (!supported(d)) return cudaErrorNotSupported;
  const DecoderSizes n(d);
  if (n.rows == 0) return cudaSuccess;
  const cudaError_t status = fused_decoder(d, n, workspace, stream);
  if (status != cudaErrorNotSupported) return status;
  return dispatch_float(d.query.dtype, [&](auto* p) { return run<element_t<decltype(p)>>(d, n, workspace, stream); });
}

}  // namespace svexport
