// What stands in for TensorRT's libraries while its Python bindings are imported: nine functions that make nothing, and a
// plugin registry that counts. Compiled with -DTENSORRT_MAJOR=10 or 11; needs no header of TensorRT.
#include <cstdint>

namespace {

// The virtual functions in the order in which TensorRT declares them.
struct Registry {
#if TENSORRT_MAJOR == 10
  virtual bool register_creator_v2(void*, const char*) { return false; }
  virtual void* const* creators_v2(int32_t* count) const { return *count = 0, nullptr; }
  virtual void* creator_v2(const char*, const char*, const char*) { return nullptr; }
#endif
  virtual ~Registry() = default;
  virtual void set_error_recorder(void*) {}
  virtual void* error_recorder() const { return nullptr; }
#if TENSORRT_MAJOR == 10
  virtual bool deregister_creator_v2(const void*) { return false; }
#endif
  virtual bool is_parent_search_enabled() const { return false; }
  virtual void set_parent_search_enabled(bool) {}
  virtual void* load_library(const char*) { return nullptr; }
  virtual void deregister_library(void*) {}
  virtual bool register_creator(void*, const char*) { return ++registered, true; }
  virtual void* const* creators(int32_t* count) const { return *count = 0, nullptr; }
  virtual void* creator(const char*, const char*, const char*) { return nullptr; }
  virtual bool deregister_creator(const void*) { return true; }
  virtual void* acquire_resource(const char*, void*) { return nullptr; }
  virtual int32_t release_resource(const char*) { return 0; }
  virtual void* const* creators_recursive(int32_t* count) { return *count = 0, nullptr; }

  int registered = 0;
} registry;

}  // namespace

extern "C" {

void* getPluginRegistry() { return &registry; }
void* getBuilderPluginRegistry(int32_t) { return &registry; }
bool initLibNvInferPlugins(void*, const char*) { return true; }
void* createInferBuilder_INTERNAL(void*, int32_t) { return nullptr; }
void* createInferRefitter_INTERNAL(void*, void*, int32_t) { return nullptr; }
void* createInferRuntime_INTERNAL(void*, int32_t) { return nullptr; }
void* createNvOnnxParser_INTERNAL(void*, void*, int32_t) { return nullptr; }
void* createNvOnnxParserRefitter_INTERNAL(void*, void*, int32_t) { return nullptr; }
int getNvOnnxParserVersion() { return 0; }

int registered_creators() { return registry.registered; }
}
