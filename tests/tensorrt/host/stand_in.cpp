// Linked into a plugin library for tests without a GPU: its memory in place of a device's, and a launcher that does
// nothing in place of each (tests/tensorrt/conftest.py). Counts what is allocated on the host.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <cstring>
#include <new>

namespace {
long allocations = 0;
long launches = 0;
long device_blocks = 0;
}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT long stand_in_allocations() { return allocations; }
EXPORT long stand_in_launches() { return launches; }
EXPORT long stand_in_device_blocks() { return device_blocks; }

extern "C" long stand_in_launcher() { return ++launches, 0; }

void* operator new(size_t size) {
  ++allocations;
  if (void* p = std::malloc(size)) return p;
  throw std::bad_alloc();
}
void operator delete(void* p) noexcept { std::free(p); }
void operator delete(void* p, size_t) noexcept { std::free(p); }

cudaError_t cudaGetDevice(int* device) { return *device = 0, cudaSuccess; }
cudaError_t cudaGetDeviceCount(int* count) { return *count = 1, cudaSuccess; }
cudaError_t cudaGetDeviceProperties(cudaDeviceProp* properties, int) { return *properties = {}, cudaSuccess; }
// An H100, as far as planners ask.
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = 132; break;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = 227 * 1024; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = 5120; break;
    case cudaDevAttrMemoryClockRate: *value = 2619000; break;
    default: *value = 0;
  }
  return cudaSuccess;
}
cudaError_t cudaMalloc(void** p, size_t size) { return *p = std::malloc(size), ++device_blocks, cudaSuccess; }
cudaError_t cudaFree(void* p) { return device_blocks -= p != nullptr, std::free(p), cudaSuccess; }
cudaError_t cudaMemcpy(void* to, const void* from, size_t size, cudaMemcpyKind) {
  return std::memcpy(to, from, size), cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) { return "an error"; }
