// Malformed attributes and serialized plugins, at random, for every creator. Compiled together with the plugins under
// sanitizers, without a GPU and without kernels, none of which is launched. Prints what it came to.
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
extern "C" IPluginCreatorInterface* const* getCreators(int32_t&);
Plugin* create(Creator* creator, const PluginFieldCollection* fields) {
  return creator->createPlugin("fuzz", fields, TensorRTPhase::kBUILD);
}
void destroy(Plugin* plugin) { delete plugin; }
#else
using Creator = IPluginCreator;
using Plugin = IPluginV2;
extern "C" IPluginCreator* const* getPluginCreators(int32_t&);
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

}  // namespace

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
  int made = 0, refused = 0, silent = 0, made_with_weights = 0;
  const auto tally = [&](Plugin* plugin, bool quiet) {
    ++(plugin ? made : refused);
    silent += !plugin && quiet;
    if (plugin) destroy(plugin);
  };
  for (int i = 0; i < cases; ++i) {
    auto* creator = static_cast<Creator*>(creators[below(count)]);
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
    tally(plugin, quiet);
  }
  std::printf("made %d refused %d silent %d weights %d\n", made, refused, silent, made_with_weights);
  return 0;
}
