// Linked into a plugin library for tests, with --wrap for the functions named here: counts what an enqueue may not call,
// and what it should.
#include <cuda_runtime.h>

namespace {
int forbidden = 0;
int launches = 0;
}  // namespace

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT int intercept_forbidden() { return forbidden; }
EXPORT int intercept_launches() { return launches; }

#define COUNTED(counter, name, parameters, arguments) \
  extern "C" cudaError_t __real_##name parameters;    \
  extern "C" cudaError_t __wrap_##name parameters {   \
    ++counter;                                        \
    return __real_##name arguments;                   \
  }
#define FORBIDDEN(name, parameters, arguments) COUNTED(forbidden, name, parameters, arguments)
#define EXPECTED(name, parameters, arguments) COUNTED(launches, name, parameters, arguments)
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

EXPECTED(cudaLaunchKernel, (const void* f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream),
         (f, grid, block, args, shared, stream))
// What nvcc 13 compiles <<<>>> to.
EXPECTED(__cudaLaunchKernel, (cudaKernel_t f, dim3 grid, dim3 block, void** args, size_t shared, cudaStream_t stream),
         (f, grid, block, args, shared, stream))
EXPECTED(cudaLaunchKernelExC, (const cudaLaunchConfig_t* config, const void* f, void** args), (config, f, args))
