// Malformed attributes and serialized plugins, at random, for every creator; and what becomes a plugin lives with tensors
// of random sizes. Compiled together with the plugins, host.cpp and stand_in.cpp under sanitizers. Prints what it came to.
#include <NvInferRuntime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#pragma GCC diagnostic ignored "-Wdeprecated-declarations"

using namespace nvinfer1;

namespace {

#if NV_TENSORRT_MAJOR >= 10
using Creator = IPluginCreatorV3One;
using Plugin = IPluginV3;
using Layer = IPluginV3;
using CreatorInterface = IPluginCreatorInterface;
extern "C" CreatorInterface* const* getCreators(int32_t&);
Plugin* create(Creator* creator, const PluginFieldCollection* fields) {
  return creator->createPlugin("fuzz", fields, TensorRTPhase::kBUILD);
}
void destroy(Plugin* plugin) { delete plugin; }
#else
using Creator = IPluginCreator;
using Plugin = IPluginV2;
using Layer = IPluginV2DynamicExt;
using CreatorInterface = IPluginCreator;
extern "C" CreatorInterface* const* getPluginCreators(int32_t&);
Plugin* create(Creator* creator, const PluginFieldCollection* fields) { return creator->createPlugin("fuzz", fields); }
void destroy(Plugin* plugin) { plugin->destroy(); }
#endif

std::mt19937 random_bits(7);
int below(int n) { return static_cast<int>(random_bits() % static_cast<unsigned>(n)); }

int logged = 0;

class Logger final : public ILogger {
  void log(Severity, const char* message) noexcept override { logged += std::strlen(message) > 0; }
};

#if NV_TENSORRT_MAJOR > 8 || NV_TENSORRT_MINOR >= 6
class Finder final : public ILoggerFinder {
 public:
  ILogger* findLogger() override { return &logger_; }

 private:
  Logger logger_;
};
extern "C" void setLoggerFinder(ILoggerFinder*);
#endif

// A value of exactly as many bytes as the field says, on the heap: reading past it is found out.
struct Value {
  std::unique_ptr<char[]> bytes;
  explicit Value(size_t size) : bytes(new char[size]) {
    for (size_t i = 0; i < size; i += 4) {
      const int32_t pick[] = {0, 1, 2, 3, -1, 1 << 30, INT32_MIN, 0x3f800000, 0x7fc00000, static_cast<int32_t>(random_bits())};
      std::memcpy(bytes.get() + i, &pick[below(10)], size - i < 4 ? size - i : 4);
    }
  }
};

size_t size_of(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kFLOAT64: return 8;
    case PluginFieldType::kFLOAT16:
    case PluginFieldType::kINT16: return 2;
    case PluginFieldType::kINT8:
    case PluginFieldType::kCHAR:
    case PluginFieldType::kUNKNOWN: return 1;
    case PluginFieldType::kDIMS: return sizeof(Dims);
    default: return 4;
  }
}

int32_t* ints(const PluginField& field) { return static_cast<int32_t*>(const_cast<void*>(field.data)); }

// Of the weights all are left out, or all but those of the first layer.
bool left_out(const PluginField& field, bool weights) {
  const auto begins = [&](const char* with) { return !std::strncmp(field.name, with, std::strlen(with)); };
  return weights ? begins("layers_") && !begins("layers_0_") : begins("layers_") || begins("cls_");
}

// The numbers of a decoder of one channel, and of whatever else is no list of other lengths.
int length_of(const PluginField& field) {
  const std::string name = field.name;
  const auto has = [&](const char* part) { return name.find(part) != std::string::npos; };
  if (name == "pc_range" || has("reg_4_")) return 6;
  if (has("in_proj") || has("position_encoder_0_weight") || has("sampling_offsets")) return 3;
  const bool two = field.length == 0 && field.type == PluginFieldType::kINT32;
  return two || name == "uv_clamp" || has("attention_weights") ? 2 : 1;
}

// Ranks of the inputs of every node, in the order of the creators; its weights are no inputs.
const std::vector<int> kRanks[] = {
    {3, 1, 3, 1, 1, 3}, {4, 4}, {5, 3, 4, 6, 4}, {4, 4, 4, 1, 4}, {4, 4}, {3}, {4, 2, 1, 6, 5}, {3, 3, 3, 5, 4},
};
constexpr int kOutputs[] = {2, 2, 1, 1, 1, 1, 1, 3};

}  // namespace

struct HostTensor {
  int32_t rank, type, format;
  float scale;
  int64_t dims[8], max[8];
};

extern "C" {
void host_use(CreatorInterface* const* creators, int count);
int host_output_types(Layer*, int inputs, const int32_t* types, int32_t* results);
int host_shapes(Layer*, int inputs, const HostTensor* tensors, HostTensor* results);
int host_formats(Layer*, int inputs, int outputs, const HostTensor*, const int32_t* masks, int32_t* found, int max);
int64_t host_configure(Layer*, int inputs, int outputs, const HostTensor* tensors);
int host_prepare(Layer*, int inputs, int outputs, const HostTensor* tensors);
int host_enqueue(Layer*, int inputs, int outputs, const HostTensor*, void* const* pointers, void* workspace, void* stream,
                 int times, double* microseconds);
Layer* host_reload(Layer*);
Layer* host_attach(Layer*);
void host_destroy(Layer*);
}

// All that TensorRT does with a plugin, as far as it goes. Whether that is to its end.
bool live(Layer* layer, const std::vector<int>& ranks, int outputs) {
  constexpr int kMost = 16;
  HostTensor tensors[kMost] = {};
  int32_t types[kMost] = {}, masks[kMost] = {}, found[64 * kMost * 2] = {};
  const int inputs = static_cast<int>(ranks.size()) + (below(10) ? 0 : below(3) - 1), usual = 1 + below(4);
  for (int i = 0; i < inputs; ++i) {
    HostTensor& t = tensors[i];
    t.rank = i < static_cast<int>(ranks.size()) && below(30) ? ranks[i] : below(7);
    t.scale = 1;
    for (int j = 0; j < t.rank; ++j) t.dims[j] = t.max[j] = below(4) ? usual : below(9);
    types[i] = below(9) ? 0 : below(5);
  }
  if (host_output_types(layer, inputs, types, types + inputs)) return false;
  if (host_shapes(layer, inputs, tensors, tensors + inputs)) return false;
  for (int i = 0; i < inputs + outputs; ++i) masks[i] = 1 << types[i];
  const int combinations = host_formats(layer, inputs, outputs, tensors, masks, found, 64);
  if (combinations == 0) return false;
  const int32_t* chosen = found + 2 * (inputs + outputs) * below(std::min(combinations, 64));
  for (int i = 0; i < inputs + outputs; ++i) tensors[i].type = chosen[2 * i], tensors[i].format = chosen[2 * i + 1];
  if (host_configure(layer, inputs, outputs, tensors) < 0) return false;
  Layer* engine = host_reload(layer);
  if (!engine) std::abort();  // it was made of such attributes before
  Layer* context = host_attach(engine);
  host_destroy(engine);
  void* pointers[kMost] = {};
  double microseconds = 0;
  const bool ran = !host_prepare(context, inputs, outputs, tensors) &&
                   !host_enqueue(context, inputs, outputs, tensors, pointers, nullptr, nullptr, 2, &microseconds);
  host_destroy(context);
  return ran;
}

int main(int argc, char** argv) {
  const int cases = argc > 1 ? std::atoi(argv[1]) : 10000;
#if NV_TENSORRT_MAJOR > 8 || NV_TENSORRT_MINOR >= 6
  static Finder finder;
  setLoggerFinder(&finder);
#endif
  int32_t count = 0;
#if NV_TENSORRT_MAJOR >= 10
  auto* const* creators = getCreators(count);
#else
  auto* const* creators = getPluginCreators(count);
#endif
  host_use(creators, count);
  int made = 0, refused = 0, silent = 0, made_with_weights = 0, lived = 0;
  const auto tally = [&](Plugin* plugin, bool quiet) {
    ++(plugin ? made : refused);
    silent += !plugin && quiet;
    if (plugin) destroy(plugin);
  };
  for (int i = 0; i < cases; ++i) {
    const int node = below(count);
    auto* creator = static_cast<Creator*>(creators[node]);
    const PluginFieldCollection* known = creator->getFieldNames();
    std::vector<PluginField> fields(known->fields, known->fields + known->nbFields);
    const bool weights = below(2);
    const auto out = [&](const PluginField& field) { return left_out(field, weights); };
    fields.erase(std::remove_if(fields.begin(), fields.end(), out), fields.end());
    std::vector<Value> values;
    std::string garbage(1 + below(40), static_cast<char>(1 + below(255)));
    const int harm = below(12);  // some with none: those may become plugins
    for (auto& field : fields) {
      field.length = length_of(field);
      if (harm == 1 && below(2)) field.length = below(70);
      if (harm == 2 && below(2)) field.type = static_cast<PluginFieldType>(below(14) - 1);
      values.emplace_back(field.length * size_of(field.type));
      field.data = values.back().bytes.get();
      if (weights && harm != 10 && field.type == PluginFieldType::kINT32) std::fill_n(ints(field), field.length, 1);
      if (harm == 3 && below(2)) field.length = INT32_MAX - below(3);
      if (harm == 4 && below(2)) field.length = -1 - below(1000);
      if (harm == 5 && below(2)) field.data = nullptr;
      if (harm == 6 && below(2)) field.name = below(2) ? garbage.c_str() : nullptr;
    }
    if (harm == 7 && !fields.empty()) fields.erase(fields.begin() + below(static_cast<int>(fields.size())));
    if (harm == 8 && !fields.empty()) fields.push_back(fields[below(static_cast<int>(fields.size()))]);
    if (harm == 9) fields.emplace_back(garbage.c_str(), "....", PluginFieldType::kCHAR, 4);
    PluginFieldCollection all{static_cast<int32_t>(fields.size()), fields.data()};
    if (harm == 10) all.nbFields = -1 - below(100);
    if (harm == 11) all.fields = nullptr;
    const int before = logged;
    Plugin* plugin = create(creator, harm == 11 && below(2) ? nullptr : &all);
    const bool quiet = logged == before;
    made_with_weights += plugin && weights && known->nbFields > 100;
#if NV_TENSORRT_MAJOR < 10
    // What engines hold: noise, or of this plugin a part, or all of it with some bytes changed.
    std::vector<char> bytes(plugin ? plugin->getSerializationSize() : below(200));
    if (plugin) {
      plugin->serialize(bytes.data());
      if (below(2)) bytes.resize(below(static_cast<int>(bytes.size())));
    }
    for (char& byte : bytes) {
      if (!plugin || below(100) == 0) byte = static_cast<char>(random_bits());
    }
    const std::vector<char> exact(bytes);
    const int then = logged;
    Plugin* again = creator->deserializePlugin("fuzz", exact.empty() ? nullptr : exact.data(), exact.size());
    tally(again, logged == then);
#endif
    for (int life = 0; plugin && life < 20; ++life) {
      lived += live(static_cast<Layer*>(plugin), kRanks[node], kOutputs[node]);
    }
    tally(plugin, quiet);
  }
  std::printf("made %d refused %d silent %d weights %d lived %d\n", made, refused, silent, made_with_weights, lived);
  return 0;
}
