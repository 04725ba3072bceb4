// What stands in for TensorRT's libraries while its Python bindings are imported: functions that make nothing, a plugin
// registry, and a caller of plugins that are compiled ahead of time. Compiled with -DTENSORRT_MAJOR=10 or 11; needs no
// header of TensorRT: the virtual functions stand here in the order in which it declares them, whatever their names.
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

namespace {

struct Info {
  const char* kind;
  int32_t major, minor;
};

struct Interface {
  virtual int32_t language() const = 0;
  virtual Info info() const = 0;
  virtual ~Interface() = default;
};

struct Field {
  const char* name;
  const void* data;
  int32_t type, length;
};

struct Fields {
  int32_t count;
  const Field* first;
};

struct Plugin : Interface {
  virtual Interface* capability(int32_t) = 0;
  virtual Plugin* clone() = 0;
};

// Creators of both kinds have their name in the same place. The other one makes plugins by create(name, fields, phase).
struct Creator : Interface {
  virtual Plugin* create(const char* name, const char* scope, const Fields*, int32_t phase, int32_t request) = 0;
  virtual const Fields* fields() = 0;
  virtual const char* name() const = 0;
};

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
  virtual bool register_creator(Creator* creator, const char*) { return all.push_back(creator), true; }
  virtual Creator* const* creators(int32_t* count) const { return *count = all.size(), all.data(); }
  virtual Creator* creator(const char* name, const char*, const char*) {
    for (Creator* one : all) {
      if (!std::strcmp(one->name(), name)) return one;
    }
    return nullptr;
  }
  virtual bool deregister_creator(const void*) { return true; }
  virtual void* acquire_resource(const char*, void*) { return nullptr; }
  virtual int32_t release_resource(const char*) { return 0; }
  virtual Creator* const* creators_recursive(int32_t* count) { return creators(count); }

  std::vector<Creator*> all;
} registry;

// ------------------------------------------------------------------------------------------------------- expressions

struct Root {
  virtual ~Root() = default;
};

// A dimension: its number is known here, and to the plugin only if it is constant.
struct Expression : Root {
  struct Body : Root {
    virtual bool is_constant() const { return constant; }
    virtual int64_t value() const { return constant ? number : -1; }
    virtual bool is_size_tensor() const { return false; }

    int64_t number;
    bool constant;
  };
  Expression(int64_t number, bool constant) {
    own.number = number;
    own.constant = constant;
  }

  Body* body = &own;
  Body own;
};

struct Builder : Root {
  struct Body : Root {
    virtual const Expression* constant(int64_t value) { return make(value, true); }
    virtual const Expression* operation(int32_t kind, const Expression& left, const Expression& right) {
      const int64_t a = left.own.number, b = right.own.number;
      const int64_t results[] = {a + b, a * b, a > b ? a : b, a < b ? a : b, a - b, a == b, a < b,
                                 kind == 7 ? a / b : 0, kind == 8 ? (a + b - 1) / b : 0};
      return make(results[kind], left.own.constant && right.own.constant);
    }
    virtual const Expression* declare_size_tensor(int32_t, const Expression&, const Expression&) { return nullptr; }

    const Expression* make(int64_t number, bool constant) {
      made.push_back(std::make_unique<Expression>(number, constant));
      return made.back().get();
    }
    std::vector<std::unique_ptr<Expression>> made;
  };

  Body* body = &own;
  Body own;
};

struct Argument {  // an integer of a kernel
  virtual int32_t type() const = 0;
  virtual int32_t data_type() const = 0;
  virtual const Expression* expression() = 0;
};

struct Arguments {
  struct Body {
    virtual Argument* get(int32_t i) const { return all[i]; }
    virtual bool set(int32_t i, Argument* argument) { return all.at(i) = argument, true; }
    virtual int32_t count() const { return all.size(); }
    virtual bool resize(int32_t count) { return all.resize(count), true; }
    virtual ~Body() = default;

    std::vector<Argument*> all;
  };

  Body* body = &own;
  virtual ~Arguments() = default;
  Body own;
};

struct Launch {
#define PARAMETER(i)                             \
  virtual Argument* get##i() { return all[i]; } \
  virtual bool set##i(Argument* argument) { return all[i] = argument, true; }
  struct Body {
    PARAMETER(0) PARAMETER(1) PARAMETER(2) PARAMETER(3) PARAMETER(4) PARAMETER(5) PARAMETER(6)
    virtual ~Body() = default;

    Argument* all[7] = {};  // grid x, y, z; block x, y, z; shared memory
  };

  Body* body = &own;
  virtual ~Launch() = default;
  Body own;
};

// ----------------------------------------------------------------------------------------------------------- plugins

struct Dims {
  int32_t rank;
  int64_t sizes[8];
};

struct Shape {
  int32_t rank;
  const Expression* sizes[8];
};

struct Desc {
  Dims dims;
  int32_t type, format;
  float scale;
};

struct DynamicDesc {
  Desc desc;
  Dims min, max, opt;
};

struct BuildOne : Interface {
  virtual int32_t configure(const DynamicDesc*, int32_t, const DynamicDesc*, int32_t) = 0;
  virtual int32_t output_types(int32_t*, int32_t, const int32_t*, int32_t) const = 0;
  virtual int32_t output_shapes(const Shape*, int32_t, const Shape*, int32_t, Shape*, int32_t, Builder&) = 0;
  virtual bool supports(int32_t, const DynamicDesc*, int32_t, int32_t) = 0;
  virtual int32_t outputs() const = 0;
  virtual size_t workspace(const DynamicDesc*, int32_t, const DynamicDesc*, int32_t) const = 0;
};

struct Build : Interface {
  virtual int32_t output_types(int32_t*, int32_t, const int32_t*, const int32_t*, int32_t) const = 0;
  virtual int32_t output_shapes(const Shape*, int32_t, const Shape*, int32_t, Shape*, int32_t, Builder&) = 0;
  virtual int32_t configure(const DynamicDesc*, int32_t, const DynamicDesc*, int32_t) = 0;
  virtual int32_t count_combinations(const DynamicDesc*, int32_t, int32_t) = 0;
  virtual int32_t combinations(const DynamicDesc*, int32_t, int32_t, Desc*, int32_t) = 0;
  virtual int32_t outputs() const = 0;
  virtual int32_t aliased_input(int32_t) = 0;
  virtual int32_t tactics(int32_t*, int32_t) = 0;
  virtual int32_t count_tactics() = 0;
  virtual const char* timing_cache_id() = 0;
  virtual const char* metadata() = 0;
  virtual int32_t launch(const Shape*, const DynamicDesc*, int32_t, int32_t, Launch*, Arguments*, Builder&) = 0;
  virtual int32_t kernel(const Desc*, int32_t, const Desc*, int32_t, const char**, char**, int32_t*) = 0;
  virtual int32_t set_tactic(int32_t) = 0;
};

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

int registered_creators() { return registry.all.size(); }

// What a plugin says when it is asked as TensorRT asks. `known`: whether it is told all sizes; if not, those of channels,
// third from the end.
struct Answer {
  char kind[64];  // of its interface
  Dims shapes[4];
  int32_t types[4], count_combinations, combinations[512][2], count_arguments, code_size;
  int64_t launch[7], arguments[128];
  char name[128];
  char code[1 << 20];
};

// Expressions for the sizes of inputs.
std::vector<Shape> shapes_of(const Dims* dims, int32_t inputs, bool known, Builder& builder) {
  std::vector<Shape> in(inputs);
  for (int32_t i = 0; i < inputs; ++i) {
    in[i].rank = dims[i].rank;
    for (int32_t k = 0; k < in[i].rank; ++k) {
      in[i].sizes[k] = builder.own.make(dims[i].sizes[k], known || k == in[i].rank - 3);
    }
  }
  return in;
}

// The plugin that torch computes: its types and shapes, and which of the three floating-point types (`combinations`, 1 or
// 0) and channels-last (the fourth) it takes for all of its floating-point tensors. Returns as `ask` does.
int ask_torch(const char* node, const Field* fields, int32_t count_fields, const Dims* dims, const int32_t* types,
              int32_t inputs, bool known, Answer* answer) {
  Creator* creator = registry.creator(node, "1", "svexport");
  const Fields collection{count_fields, fields};
  if (!creator) return 1;
  Plugin* made = nullptr;
  if (!std::strcmp(creator->info().kind, "PLUGIN CREATOR_V3QUICK")) {
    made = creator->create("layer", "svexport", &collection, 0, 3);  // strictly just in time
  } else {
    using Create = Plugin* (*)(Creator*, const char*, const Fields*, int32_t);
    void** functions = *reinterpret_cast<void***>(creator);
    made = reinterpret_cast<Create>(functions[4])(creator, "layer", &collection, 0);
  }
  if (!made) return 2;
  Plugin* plugin = made->clone();
  BuildOne* build = plugin ? static_cast<BuildOne*>(plugin->capability(1)) : nullptr;
  if (!build) return 3;
  std::strncpy(answer->kind, build->info().kind, sizeof(answer->kind) - 1);
  Builder builder;
  const int32_t outputs = build->outputs(), all = inputs + outputs;
  const std::vector<Shape> in = shapes_of(dims, inputs, known, builder);
  std::vector<Shape> out(outputs);
  if (build->output_types(answer->types, outputs, types, inputs)) return 4;
  if (build->output_shapes(in.data(), inputs, nullptr, 0, out.data(), outputs, builder)) return 5;
  for (int32_t i = 0; i < outputs; ++i) {
    answer->shapes[i].rank = out[i].rank;
    for (int32_t k = 0; k < out[i].rank; ++k) answer->shapes[i].sizes[k] = out[i].sizes[k]->own.number;
  }
  const int32_t tried[4][2] = {{0, 0}, {1, 0}, {7, 0}, {1, 2}};
  for (int32_t t = 0; t < 4; ++t) {
    std::vector<DynamicDesc> descs(all);
    for (int32_t i = 0; i < all; ++i) {
      const int32_t type = i < inputs ? types[i] : answer->types[i - inputs];
      descs[i].desc.type = type == 0 ? tried[t][0] : type;
      descs[i].desc.format = tried[t][1];
    }
    bool taken = true;
    for (int32_t i = 0; i < all; ++i) taken = taken && build->supports(i, descs.data(), inputs, outputs);
    answer->combinations[t][0] = taken;
  }
  return 0;
}

// Returns the number of the step that failed, 0 if none did. `choice`: of the combinations of types and formats.
int ask(const char* node, const Field* fields, int32_t count_fields, int32_t request, const Dims* dims,
        const int32_t* types, int32_t inputs, bool known, int32_t choice, bool compile, Answer* answer) {
  Creator* creator = registry.creator(node, "1", "svexport");
  if (!creator || std::strcmp(creator->info().kind, "PLUGIN CREATOR_V3QUICK")) return 1;
  const Fields collection{count_fields, fields};
  Plugin* made = creator->create("layer", "svexport", &collection, 0, request);
  if (!made) return 2;
  Plugin* plugin = made->clone();
  Build* build = plugin ? static_cast<Build*>(plugin->capability(1)) : nullptr;
  if (!build) return 3;
  std::strncpy(answer->kind, build->info().kind, sizeof(answer->kind) - 1);
  if (std::strcmp(build->info().kind, "PLUGIN_V3QUICKAOT_BUILD")) return 4;

  Builder builder;
  const int32_t outputs = build->outputs();
  const std::vector<Shape> in = shapes_of(dims, inputs, known, builder);
  std::vector<Shape> out(outputs);
  int32_t ranks[64];
  for (int32_t i = 0; i < inputs; ++i) ranks[i] = dims[i].rank;
  if (build->output_types(answer->types, outputs, types, ranks, inputs)) return 5;
  if (build->output_shapes(in.data(), inputs, nullptr, 0, out.data(), outputs, builder)) return 6;

  std::vector<DynamicDesc> descs(inputs + outputs);
  for (int32_t i = 0; i < inputs + outputs; ++i) {
    Desc& desc = descs[i].desc;
    if (i < inputs) {
      desc.dims = dims[i];
    } else {
      const Shape& shape = out[i - inputs];
      desc.dims.rank = shape.rank;
      for (int32_t k = 0; k < shape.rank; ++k) desc.dims.sizes[k] = shape.sizes[k]->own.number;
      answer->shapes[i - inputs] = desc.dims;
    }
    desc.type = i < inputs ? types[i] : answer->types[i - inputs];
    descs[i].min = descs[i].max = descs[i].opt = desc.dims;
    for (int32_t k = 0; k < desc.dims.rank; ++k) {
      if (!known && k != desc.dims.rank - 3) desc.dims.sizes[k] = -1;
    }
  }
  const int32_t all = inputs + outputs, count = build->count_combinations(descs.data(), inputs, outputs);
  std::vector<Desc> combinations(count * all);
  if (count <= choice || build->combinations(descs.data(), inputs, outputs, combinations.data(), count)) return 7;
  answer->count_combinations = count;
  for (int32_t i = 0; i < count * all && i < 512; ++i) {
    answer->combinations[i][0] = combinations[i].type;
    answer->combinations[i][1] = combinations[i].format;
  }
  std::vector<Desc> chosen;
  for (int32_t i = 0; i < all; ++i) {
    descs[i].desc.type = combinations[choice * all + i].type;
    descs[i].desc.format = combinations[choice * all + i].format;
    chosen.push_back(descs[i].desc);
  }
  if (build->configure(descs.data(), inputs, descs.data() + inputs, outputs)) return 8;

  Launch launch;
  Arguments arguments;
  if (build->launch(in.data(), descs.data(), inputs, outputs, &launch, &arguments, builder)) return 9;
  for (int32_t i = 0; i < 7; ++i) {
    if (!launch.own.all[i]) return 10;
    answer->launch[i] = launch.own.all[i]->expression()->own.number;
  }
  answer->count_arguments = arguments.own.all.size();
  for (int32_t i = 0; i < answer->count_arguments; ++i) {
    if (arguments.own.all[i]->type() != 0 || arguments.own.all[i]->data_type() != 2) return 11;  // 32-bit integers
    answer->arguments[i] = arguments.own.all[i]->expression()->own.number;
  }
  if (!compile) return 0;
  const char* name = nullptr;
  char* code = nullptr;
  if (build->kernel(chosen.data(), inputs, chosen.data() + inputs, outputs, &name, &code, &answer->code_size)) return 12;
  std::strncpy(answer->name, name, sizeof(answer->name) - 1);
  std::memcpy(answer->code, code, answer->code_size);
  return 0;
}
}
