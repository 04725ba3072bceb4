// Describes the current device for the planners.
#pragma once

#include <cuda_runtime_api.h>

#include <vector>

#include "planner.h"
#include "tuned.h"

namespace svexport {

constexpr int kMaxGpus = 64;

// Called once per device, because some attributes are slow to query. If a query fails, it gives what any GPU can do.
inline Gpu described(int device) {
  const auto get = [device](cudaDeviceAttr attribute, int otherwise) {
    int value = 0;
    return cudaDeviceGetAttribute(&value, attribute, device) == cudaSuccess && value > 0 ? value : otherwise;
  };
  Gpu gpu;
  gpu.capability = 10 * get(cudaDevAttrComputeCapabilityMajor, 7) + get(cudaDevAttrComputeCapabilityMinor, 0);
  gpu.shared_memory = get(cudaDevAttrMaxSharedMemoryPerBlockOptin, gpu.shared_memory);
  gpu.l2_megabytes = get(cudaDevAttrL2CacheSize, gpu.l2_megabytes << 20) >> 20;
  // Two transfers a cycle: kHz * bits / 8 * 2.
  const double bytes = get(cudaDevAttrGlobalMemoryBusWidth, 0) / 4.0;
  if (const double kilohertz = get(cudaDevAttrMemoryClockRate, 0); bytes * kilohertz > 0) {
    gpu.bandwidth = static_cast<float>(bytes * kilohertz / 1e3);
  }
  cudaDeviceProp properties;
  if (cudaGetDeviceProperties(&properties, device) == cudaSuccess) gpu.table = table_of(properties.name);
  return gpu;
}

inline Gpu current_gpu() {
  static const std::vector<Gpu> all = [] {
    int count = 0;
    if (cudaGetDeviceCount(&count) != cudaSuccess || count > kMaxGpus) count = 0;
    std::vector<Gpu> gpus;
    for (int device = 0; device < count; ++device) gpus.push_back(described(device));
    return gpus;
  }();
  int device = 0, multiprocessors = 0;
  if (cudaGetDevice(&device) != cudaSuccess) device = 0;
  Gpu gpu = device < static_cast<int>(all.size()) ? all[device] : Gpu();
  // Queried every time, because it may change for a share of a device (MPS, green contexts).
  if (cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device) == cudaSuccess) {
    gpu.multiprocessors = multiprocessors;
  }
  return gpu;
}

}  // namespace svexport
