// The gradients of camera_sample:
//
// 1. A block per query reads the samples again. It computes the gradients of the weights, and of what the matrices map
//    points to ("image": x, y and depth). For every pixel, it counts the samples that read it, and numbers them.
// 2. These samples ("readers") are grouped by pixel.
// 3. A block per few pixels sums over their readers and writes the gradient once, in whole sectors. Most pixels have no
//    reader, and no sums have to be cleared before or rounded after.
// 4. A block per camera sums the gradient of its matrix.
#include <algorithm>

#include "camera_sample/backward_maps.cuh"

namespace svexport {
namespace {

// Lays out the parts of the workspace one after the other. Returns its size.
size_t divide(const CameraLevel* levels, int num_levels, const Tensor& weights, void* workspace, Backward& r) {
  size_t used = 0;
  const auto take = [&](auto*& part, int64_t count) {
    part = reinterpret_cast<std::remove_reference_t<decltype(part)>>(static_cast<char*>(workspace) + used);
    used += (count * sizeof(*part) + 15) / 16 * 16;
  };
  r.pixels = 0;
  for (int l = 0; l < num_levels; ++l) {
    const int64_t* sizes = levels[l].map.sizes;
    r.first_pixel[l] = r.pixels;
    r.pixels += sizes[0] * sizes[1] * sizes[3] * sizes[4];
  }
  const int64_t queries = weights.sizes[0] * weights.sizes[1], pairs = queries * weights.sizes[2] * weights.sizes[3];
  take(r.counts, r.pixels + 1);
  take(r.firsts, r.pixels);
  take(r.links, pairs * weights.sizes[4] * 4);
  take(r.readers, pairs * weights.sizes[4] * 4);
  take(r.weights, weights.numel());
  take(r.grad_sampled, weights.numel());
  take(r.image, pairs * 3);
  take(r.norms, queries * weights.sizes[5]);
  return used;
}

}  // namespace

size_t camera_sample_backward_workspace(const CameraLevel* levels, int num_levels, const Tensor& weights) {
  const Tensor none{};
  const AnyFloat null{none};
  Backward r{null, null, null, null, null};
  return num_levels > kMaxCameraLevels ? 0 : divide(levels, num_levels, weights, nullptr, r);
}

cudaError_t camera_sample_backward(const CameraLevel* levels, int num_levels, const Tensor& reference_points,
                                   const Tensor& lidar2img, const Tensor& weights, const Tensor& offsets,
                                   const CameraSampleOptions& options, const Tensor& grad_output,
                                   const CameraSampleGradients& gradients, bool deterministic, void* workspace,
                                   cudaStream_t stream) {
  Params p{AnyFloat(reference_points), AnyFloat(lidar2img), AnyFloat(weights), AnyFloat(offsets)};
  cudaError_t status =
      prepare(levels, num_levels, reference_points, lidar2img, weights, offsets, options, grad_output, p);
  if (status != cudaSuccess) return status;
  Backward r{AnyFloat(grad_output), AnyFloat(gradients.reference_points), AnyFloat(gradients.lidar2img),
             AnyFloat(gradients.weights), AnyFloat(gradients.offsets)};
  divide(levels, num_levels, weights, workspace, r);
  const int64_t queries = weights.sizes[0] * weights.sizes[1], images = weights.sizes[0] * p.cams;
  if (queries * p.samples > INT32_MAX / 4 || p.channels == 0 || !grad_output.contiguous()) return cudaErrorNotSupported;
  r.queries = static_cast<int>(weights.sizes[1]);
  r.deterministic = deterministic;
  r.any_place = gradients.reference_points.data || gradients.lidar2img.data || gradients.offsets.data;
  int64_t tiles = 0;
  for (int l = 0; l < num_levels; ++l) {
    const Level& level = p.levels[l];
    if (level.int8 || level.pool) return cudaErrorNotSupported;
    const int64_t plane = static_cast<int64_t>(level.height) * level.width;
    r.grad_maps[l] = gradients.maps[l].data;
    r.any_map |= r.grad_maps[l] != nullptr;
    r.first_tile[l] = static_cast<int>(tiles);
    // A pixel of a small level has many readers, so a block takes fewer of them.
    r.tile_pixels[l] = static_cast<int>(kTileBytes / grad_output.item_size()) / (plane < 2048 ? 4 : 1);
    tiles += r.grad_maps[l] ? images * ceil_div<int64_t>(plane, r.tile_pixels[l]) : 0;
    if (tiles > INT32_MAX || r.pixels > INT32_MAX) return cudaErrorNotSupported;
  }
  r.first_tile[num_levels] = static_cast<int>(tiles);

  return dispatch_float(grad_output.dtype, [&](auto* t) {
    using T = element_t<decltype(t)>;
    if (r.any_map) {
      status = cudaMemsetAsync(r.counts, 0, (r.pixels + 1) * sizeof(int), stream);
      if (status != cudaSuccess) return status;
    }
    const bool vector = has_vectors(levels, num_levels, p.channels, p.groups, sizeof(T)) && grad_output.aligned(2, 16);
    const int64_t threads = vector ? p.channels / kVector<T> : 2 * int64_t{p.channels};
    p.row_shift = log2_ceil(threads < 1 ? 1 : threads < 32 ? threads : 32);
    if (queries > 0) {
      const dim3 blocks(static_cast<unsigned>(weights.sizes[1]), static_cast<unsigned>(weights.sizes[0]));
      vector ? camera_sample_backward_kernel<T, kVector<T>, false><<<blocks, kThreads, 0, stream>>>(p, r)
             : camera_sample_backward_kernel<T, 1, true><<<blocks, kThreads, 0, stream>>>(p, r);
    }
    if (tiles > 0) {
      const int links = static_cast<int>(queries * p.samples * 4);
      camera_sample_backward_firsts_kernel<<<static_cast<unsigned>(ceil_div<int64_t>(r.pixels, 256)), 256, 0, stream>>>(
          r);
      if (links > 0) {
        camera_sample_backward_readers_kernel<<<ceil_div(links, 256), 256, 0, stream>>>(r, links, p.groups == 1);
      }
      const dim3 grid(static_cast<unsigned>(tiles), ceil_div(p.channels, kTileChannels));
      camera_sample_backward_maps_kernel<T><<<grid, kTileThreads, 0, stream>>>(p, r);
    }
    if (r.grad_lidar2img.data && images > 0) {
      camera_sample_backward_lidar2img_kernel<<<static_cast<unsigned>(images), kTileThreads, 0, stream>>>(p, r);
    }
    return cudaGetLastError();
  });
}

}  // namespace svexport
