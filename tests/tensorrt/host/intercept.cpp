// Linked into a plugin library for tests, with --wrap for the functions named here: counts what an enqueue may not call,
// and measures how long the launches themselves take.
#include <cuda_runtime.h>

#include <chrono>

namespace {
int forbidden = 0;
int launches = 0;
double launch_microseconds = 0;

template <class F>
cudaError_t timed(F&& launch) {
  static bool inside = false;  // one of these functions may call another
  if (inside) return launch();
  inside = true;
  const auto start = std::chrono::steady_clock::now();
  const cudaError_t status = launch();
  launch_microseconds += std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start).count();
  ++launches;
  inside = false;
  return status;
}
}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int intercept_forbidden() { return forbidden; }
EXPORT int intercept_launches() { return launches; }
EXPORT double intercept_launch_microseconds() { return launch_microseconds; }

#define FORBIDDEN(name, parameters, arguments)       \
  extern "C" cudaError_t __real_##name parameters;   \
  extern "C" cudaError_t __wrap_##name parameters {  \
    ++forbidden;                                     \
    return __real_##name arguments;                  \
  }
FORBIDDEN(cudaMalloc, (void** p, size_t size), (p, size))
FORBIDDEN(cudaMallocAsync, (void** p, size_t size, cudaStream_t stream), (p, size, stream))
FORBIDDEN(cudaMallocHost, (void** p, size_t size), (p, size))
FORBIDDEN(cudaHostAlloc, (void** p, size_t size, unsigned flags), (p, size, flags))
FORBIDDEN(cudaFree, (void* p), (p))
FORBIDDEN(cudaFreeAsync, (void* p, cudaStream_t stream), (p, stream))
FORBIDDEN(cudaFreeHost, (void* p), (p))
FORBIDDEN(cudaMemcpy, (void* to, const void* from, size_t size, cudaMemcpyKind kind), (to, from, size, kind))
FORBIDDEN(cudaMemset, (void* p, int value, size_t size), (p, value, size))
FORBIDDEN(cudaDeviceSynchronize, (), ())
FORBIDDEN(cudaStreamSynchronize, (cudaStream_t stream), (stream))
FORBIDDEN(cudaStreamQuery, (cudaStream_t stream), (stream))
FORBIDDEN(cudaStreamCreate, (cudaStream_t * stream), (stream))
FORBIDDEN(cudaStreamCreateWithFlags, (cudaStream_t * stream, unsigned flags), (stream, flags))
FORBIDDEN(cudaEventCreate, (cudaEvent_t * event), (event))
FORBIDDEN(cudaEventCreateWithFlags, (cudaEvent_t * event, unsigned flags), (event, flags))
FORBIDDEN(cudaEventSynchronize, (cudaEvent_t event), (event))

#define TIMED(name, parameters, arguments)           \
  extern "C" cudaError_t __real_##name parameters;   \
  extern "C" cudaError_t __wrap_##name parameters {  \
    return timed([&] { return __real_##name arguments; }); \
  }
TIMED(cudaLaunchKernel, (const void* f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream),
      (f, grid, block, args, shared, stream))
// What nvcc 13 compiles <<<>>> to.
TIMED(__cudaLaunchKernel, (cudaKernel_t f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream),
      (f, grid, block, args, shared, stream))
TIMED(cudaLaunchKernelExC, (const cudaLaunchConfig_t* config, const void* f, void** args), (config, f, args))
