// Expressions of sizes, stand-ins for plugins, and the registry that the parser asks for creators.
#pragma once

#include "tensors.h"

struct DE : IDimensionExpr {
  struct V : apiv::VDimensionExpr {
    int64_t v;
    bool size;
    bool isConstant() const noexcept { return v != kUnknown; }
    int64_t c() const { return v; }
#if TRT >= 1000
    int64_t getConstantValue() const noexcept { return v == kUnknown ? -1 : v; }
    bool isSizeTensor() const noexcept { return size; }
#else
    int32_t getConstantValue() const noexcept { return v == kUnknown ? -1 : v; }
#endif
  } w;
  DE(int64_t a, bool s = false) {
    w.v = a;
    w.size = s;
    mImpl = &w;
  }
  ~DE() noexcept {}
};
std::vector<std::unique_ptr<DE>> pool;
DE const* expression(int64_t v, bool s = false) {
  pool.emplace_back(new DE(v, s));
  return pool.back().get();
}
struct EB : IExprBuilder {
  struct V : apiv::VExprBuilder {
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& a, IDimensionExpr const& b) noexcept {
      int64_t x = static_cast<DE const&>(a).w.v, y = static_cast<DE const&>(b).w.v;
      static int const m[] = {0, 1, 2, 3, 4, 11, 13, 7, 99};
      int o = (int)op;
      return expression(o == 8 ? (x == kUnknown || y == kUnknown || !y ? kUnknown : (x + y - 1) / y)
                               : arith(m[o], x, y));
    }
#if TRT >= 1000
    IDimensionExpr const* constant(int64_t v) noexcept { return expression(v); }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) {
      return expression(kUnknown, true);
    }
#else
    IDimensionExpr const* constant(int32_t v) noexcept { return expression(v); }
#endif
  } w;
  EB() { mImpl = &w; }
  ~EB() noexcept {}
} builderOfExpressions;
std::vector<DimsExprs> exprs(std::vector<Tensor*> const& ts) {
  std::vector<DimsExprs> r;
  for (auto* t : ts) {
    DimsExprs e{};
    auto& s = t->sh();
    e.nbDims = s.size();
    for (size_t j = 0; j < s.size(); j++) e.d[j] = expression(s[j] < 0 ? kUnknown : s[j]);
    r.push_back(e);
  }
  return r;
}
Shape unexpr(DimsExprs const& e) {
  Shape s;
  for (int j = 0; j < e.nbDims; j++) s.push_back(dimOf(static_cast<DE const*>(e.d[j])->w.v));
  return s;
}
void plugin2(Core* c, IPluginV2& p) {
  for (auto* t : c->in)
    if (!t->known()) {
      for (auto* o : c->out) o->unknown(t->ty());
      return;
    }
  auto& d = static_cast<IPluginV2DynamicExt&>(p);
  auto in = exprs(c->in);
  std::vector<DataType> ty;
  for (auto* t : c->in) ty.push_back(t->ty());
  for (size_t i = 0; i < c->out.size(); i++) {
    auto e = d.getOutputDimensions(i, in.data(), in.size(), builderOfExpressions);
    if (e.nbDims < 0 || (e.nbDims && !e.d[0])) {
      hostError(c, "plugin refuses the shapes");
      c->out[i]->unknown(ty[0]);
      continue;
    }
    c->out[i]->set(unexpr(e), d.getOutputDataType(i, ty.data(), ty.size()));
  }
}
#if V3
void plugin3(Core* c, IPluginV3& p) {
  for (auto* t : c->in)
    if (!t->known()) {
      for (auto* o : c->out) o->unknown(t->ty());
      return;
    }
  auto* b = static_cast<IPluginV3OneBuild*>(p.getCapabilityInterface(PluginCapabilityType::kBUILD));
  auto in = exprs(c->in);
  std::vector<DataType> ty, to(c->out.size());
  for (auto* t : c->in) ty.push_back(t->ty());
  std::vector<DimsExprs> o(c->out.size());
  if (b->getOutputDataTypes(to.data(), to.size(), ty.data(), ty.size())) hostError(c, "plugin refuses the types");
  if (b->getOutputShapes(in.data(), in.size(), nullptr, 0, o.data(), o.size(), builderOfExpressions)) {
    hostError(c, "plugin refuses the shapes");
    for (auto* t : c->out) t->unknown(DataType::kFLOAT);
    return;
  }
  for (size_t i = 0; i < o.size(); i++) c->out[i]->set(unexpr(o[i]), to[i]);
}
#endif
std::string fieldsJson(PluginFieldCollection const* fc) {
  std::ostringstream o;
  o << '[';
  for (int i = 0; fc && i < fc->nbFields; i++) {
    auto& f = fc->fields[i];
    o << (i ? "," : "") << "{\"name\":" << quoted(f.name) << ",\"type\":" << (int)f.type << ",\"length\":" << f.length
      << ",\"data\":";
    int n = withData ? f.length : std::min(f.length, 24);
    switch (f.data ? f.type : PluginFieldType::kUNKNOWN) {
      case PluginFieldType::kFLOAT32:
        writeArray(o, (float const*)f.data, n);
        break;
      case PluginFieldType::kINT32:
        writeArray(o, (int32_t const*)f.data, n);
        break;
      case PluginFieldType::kCHAR:
        o << quoted(std::string((char const*)f.data, f.length));
        break;
      case PluginFieldType::kINT8:
        writeArray(o, (int8_t const*)f.data, n);
        break;
#if V3
      case PluginFieldType::kINT64:
        writeArray(o, (int64_t const*)f.data, n);
        break;
#endif
      default:
        o << "null";
    }
    o << '}';
  }
  o << ']';
  return o.str();
}
std::map<void const*, int> madeBy;  // plugins, and the numbers of the notes of their creators' calls
void asked(std::string const& what, char const* n, char const* v, char const* ns, bool found,
           std::string fields = "null") {
  note.asked.push_back("{\"call\":" + quoted(what) + ",\"name\":" + quoted(n) + ",\"version\":" + quoted(v) +
                       ",\"namespace\":" + quoted(ns ? ns : "") + ",\"ok\":" + (found ? "true" : "false") +
                       ",\"fields\":" + fields + "}");
}
// a stand-in for any plugin: one output (or as many as `out`), shaped like the first input with unknown sizes
struct Mock2 : IPluginV2DynamicExt {
  std::string n, v, ns;
  int rank{-1};
  Mock2(std::string a, std::string b) : n(a), v(b) {}
  AsciiChar const* getPluginType() const noexcept override { return n.c_str(); }
  AsciiChar const* getPluginVersion() const noexcept override { return v.c_str(); }
  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t initialize() noexcept override { return 0; }
  void terminate() noexcept override {}
  size_t getSerializationSize() const noexcept override { return 0; }
  void serialize(void*) const noexcept override {}
  void destroy() noexcept override {}
  void setPluginNamespace(AsciiChar const* s) noexcept override { ns = s; }
  AsciiChar const* getPluginNamespace() const noexcept override { return ns.c_str(); }
  DataType getOutputDataType(int32_t, DataType const* t, int32_t) const noexcept override { return t[0]; }
  IPluginV2DynamicExt* clone() const noexcept override { return new Mock2(n, v); }
  DimsExprs getOutputDimensions(int32_t, DimsExprs const* in, int32_t, IExprBuilder&) noexcept override {
    return in[0];
  }
  bool supportsFormatCombination(int32_t, PluginTensorDesc const*, int32_t, int32_t) noexcept override { return true; }
  void configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                       int32_t) noexcept override {}
  size_t getWorkspaceSize(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) const noexcept override {
    return 0;
  }
  int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*,
                  cudaStream_t) noexcept override {
    return 1;
  }
};
// a creator by name: one that was registered, or a stand-in that has fields of these names
template <class Creator>
struct Named : Creator {
  std::string n, v, ns;
  std::vector<std::string> names;
  std::vector<PluginField> f;
  PluginFieldCollection fc{};
  Creator* real{};
  AsciiChar const* getPluginName() const noexcept override { return n.c_str(); }
  AsciiChar const* getPluginVersion() const noexcept override { return v.c_str(); }
  AsciiChar const* getPluginNamespace() const noexcept override { return ns.c_str(); }
  PluginFieldCollection const* getFieldNames() noexcept override {
    if (real) return real->getFieldNames();
    f.clear();
    for (auto& s : names) f.push_back(PluginField{s.c_str(), nullptr, PluginFieldType::kUNKNOWN, 0});
    fc.nbFields = f.size();
    fc.fields = f.data();
    return &fc;
  }
};
struct Mock2C : Named<IPluginCreator> {
  void setPluginNamespace(AsciiChar const* s) noexcept override { ns = s; }
  IPluginV2* createPlugin(AsciiChar const* a, PluginFieldCollection const* c) noexcept override {
    IPluginV2* p = real ? real->createPlugin(a, c) : new Mock2(n, v);
    madeBy[p] = note.asked.size();
    asked("create", n.c_str(), v.c_str(), ns.c_str(), p, fieldsJson(c));
    return p;
  }
  IPluginV2* deserializePlugin(AsciiChar const*, void const*, size_t) noexcept override { return nullptr; }
};
#if V3
struct Mock3 : IPluginV3, IPluginV3OneCore, IPluginV3OneBuild, IPluginV3OneRuntime {
  std::string n, v;
  Mock3(std::string a, std::string b) : n(a), v(b) {}
  IPluginCapability* getCapabilityInterface(PluginCapabilityType t) noexcept override {
    if (t == PluginCapabilityType::kBUILD) return static_cast<IPluginV3OneBuild*>(this);
    if (t == PluginCapabilityType::kCORE) return static_cast<IPluginV3OneCore*>(this);
    return static_cast<IPluginV3OneRuntime*>(this);
  }
  IPluginV3* clone() noexcept override { return new Mock3(n, v); }
  AsciiChar const* getPluginName() const noexcept override { return n.c_str(); }
  AsciiChar const* getPluginVersion() const noexcept override { return v.c_str(); }
  AsciiChar const* getPluginNamespace() const noexcept override { return ""; }
  int32_t configurePlugin(DynamicPluginTensorDesc const*, int32_t, DynamicPluginTensorDesc const*,
                          int32_t) noexcept override {
    return 0;
  }
  int32_t getOutputDataTypes(DataType* o, int32_t no, DataType const* i, int32_t) const noexcept override {
    for (int k = 0; k < no; k++) o[k] = i[0];
    return 0;
  }
  int32_t getOutputShapes(DimsExprs const* i, int32_t, DimsExprs const*, int32_t, DimsExprs* o, int32_t no,
                          IExprBuilder&) noexcept override {
    for (int k = 0; k < no; k++) {
      o[k] = i[0];
      for (int j = 0; j < i[0].nbDims; j++) o[k].d[j] = expression(kUnknown);
    }
    return 0;
  }
  bool supportsFormatCombination(int32_t, DynamicPluginTensorDesc const*, int32_t, int32_t) noexcept override {
    return true;
  }
  int32_t getNbOutputs() const noexcept override { return 1; }
  int32_t onShapeChange(PluginTensorDesc const*, int32_t, PluginTensorDesc const*, int32_t) noexcept override {
    return 0;
  }
  int32_t enqueue(PluginTensorDesc const*, PluginTensorDesc const*, void const* const*, void* const*, void*,
                  cudaStream_t) noexcept override {
    return 1;
  }
  IPluginV3* attachToContext(IPluginResourceContext*) noexcept override { return this; }
  PluginFieldCollection const* getFieldsToSerialize() noexcept override {
    static PluginFieldCollection c{};
    return &c;
  }
};
// keeps a plugin that is written in Python alive after the parser has destroyed what it was given
struct Keep : IPluginV3 {
  IPluginV3* p;
  Keep(IPluginV3* q) : p(q) {}
  IPluginCapability* getCapabilityInterface(PluginCapabilityType t) noexcept override {
    return p->getCapabilityInterface(t);
  }
  IPluginV3* clone() noexcept override {
    auto* q = p->clone();
    return q ? new Keep(q) : nullptr;
  }
};
struct Mock3C : Named<IPluginCreatorV3One> {
  IPluginV3* createPlugin(AsciiChar const* a, PluginFieldCollection const* c, TensorRTPhase ph) noexcept override {
    IPluginV3* p = real ? real->createPlugin(a, c, ph) : new Mock3(n, v);
    madeBy[p] = note.asked.size();
    asked("create", n.c_str(), v.c_str(), ns.c_str(), p, fieldsJson(c));
    return p && real && real->getAPILanguage() == APILanguage::kPYTHON ? new Keep(p) : p;
  }
};
using Any = IPluginCreatorInterface;
#else
using Any = IPluginCreator;
#endif
struct Reg final : IPluginRegistry {
  struct E {
    std::string n, v, ns;
    Any* c;
  };
  std::vector<E> es;
  IErrorRecorder* er{};
  Any* find(char const* n, char const* v, char const* ns) {
    for (auto& e : es)
      if (e.n == n && e.v == v && e.ns == (ns ? ns : "")) {
        asked("find", n, v, ns, true);
        return e.c;
      }
    asked("find", n, v, ns, false);
    return nullptr;
  }
  bool add1(IPluginCreator& c, char const* ns) {
    auto* m = new Mock2C;
    m->n = c.getPluginName();
    m->v = c.getPluginVersion();
    m->ns = ns && *ns ? ns : c.getPluginNamespace();
    m->real = &c;
    es.push_back({m->n, m->v, m->ns, m});
    return true;
  }
#if V3
  bool add(IPluginCreatorInterface& c, char const* ns) {
    if (!strcmp(c.getInterfaceInfo().kind, "PLUGIN CREATOR_V1")) return add1(static_cast<IPluginCreator&>(c), ns);
    auto& d = static_cast<IPluginCreatorV3One&>(c);
    auto* m = new Mock3C;
    m->n = d.getPluginName();
    m->v = d.getPluginVersion();
    m->ns = d.getPluginNamespace();
    m->real = &d;
    es.push_back({m->n, m->v, m->ns, m});
    return true;
  }
  bool registerCreator(IPluginCreatorInterface& c, AsciiChar const* const ns) noexcept override { return add(c, ns); }
  IPluginCreatorInterface* const* getAllCreators(int32_t* const n) const noexcept override {
    *n = 0;
    return nullptr;
  }
  IPluginCreatorInterface* getCreator(AsciiChar const* const n, AsciiChar const* const v,
                                      AsciiChar const* const ns) noexcept override {
    return find(n, v, ns);
  }
  bool deregisterCreator(IPluginCreatorInterface const&) noexcept override { return false; }
  IPluginResource* acquirePluginResource(AsciiChar const*, IPluginResource*) noexcept override { return nullptr; }
  int32_t releasePluginResource(AsciiChar const*) noexcept override { return 0; }
  IPluginCreatorInterface* const* getAllCreatorsRecursive(int32_t* const n) noexcept {
    *n = 0;
    return nullptr;
  }
  IPluginCreator* getPluginCreator(AsciiChar const* const n, AsciiChar const* const v,
                                   AsciiChar const* const ns) noexcept {
    auto* c = find(n, v, ns);
    return c && !strcmp(c->getInterfaceInfo().kind, "PLUGIN CREATOR_V1") ? static_cast<IPluginCreator*>(c) : nullptr;
  }
#else
  IPluginCreator* getPluginCreator(AsciiChar const* const n, AsciiChar const* const v,
                                   AsciiChar const* const ns) noexcept override {
    return find(n, v, ns);
  }
#endif
  bool registerCreator(IPluginCreator& c, AsciiChar const* const ns) noexcept { return add1(c, ns); }
  IPluginCreator* const* getPluginCreatorList(int32_t* const n) const noexcept {
    *n = 0;
    return nullptr;
  }
  bool deregisterCreator(IPluginCreator const&) noexcept { return false; }
  void setErrorRecorder(IErrorRecorder* const r) noexcept { er = r; }
  IErrorRecorder* getErrorRecorder() const noexcept { return er; }
  bool isParentSearchEnabled() const noexcept { return true; }
  void setParentSearchEnabled(bool const) noexcept {}
  void* loadLibrary(AsciiChar const* p) noexcept {
    void* h = dlopen(p, RTLD_NOW | RTLD_LOCAL);
    if (!h) {
      std::cerr << dlerror() << '\n';
      return nullptr;
    }
    int32_t n = 0;
    if (auto g = reinterpret_cast<Any* const* (*)(int32_t&)>(dlsym(h, "getCreators"))) {
      auto cs = g(n);
      for (int i = 0; i < n; i++)
#if V3
        add(*cs[i], "");
#else
        add1(*cs[i], "");
#endif
    } else if (auto q = reinterpret_cast<IPluginCreator* const* (*)(int32_t&)>(dlsym(h, "getPluginCreators"))) {
      auto cs = q(n);
      for (int i = 0; i < n; i++) add1(*cs[i], "");
    }
    return h;
  }
  void deregisterLibrary(void*) noexcept {}
};
Reg& reg() {
  static Reg* r = new Reg;
  return *r;
}
extern "C" __attribute__((visibility("default"))) IPluginRegistry* getPluginRegistry() noexcept { return &reg(); }
extern "C" __attribute__((visibility("default"))) bool initLibNvInferPlugins(void*, char const*) { return true; }
extern "C" __attribute__((visibility("default"))) IPluginRegistry* getBuilderPluginRegistry(EngineCapability) noexcept {
  return &reg();
}
extern "C" __attribute__((visibility("default"))) int32_t getInferLibVersion() noexcept { return NV_TENSORRT_VERSION; }
struct Log : ILogger {
  void log(Severity s, AsciiChar const* m) noexcept override {
    if (s <= Severity::kINFO) note.log.push_back(std::string("EEWIV").substr((int)s, 1) + " " + m);
  }
} theLogger;
extern "C" __attribute__((visibility("default"))) ILogger* getLogger() noexcept { return &theLogger; }
