// A host for NVIDIA's ONNX parser without libnvinfer: implements the network that the parser fills (tensors, layers,
// shapes), the registry that it asks for plugins, the logger and the error recorder; says as JSON what it did with
// files.
//
//   parser_host [--network [--data]] [--strong] [--mock NAME:VERSION:NAMESPACE:FIELD,…]… [--plugin LIBRARY]… FILE…
//
// --network adds the layers, --data their weights too; --mock registers a stand-in for a plugin (--mock3 one of
// IPluginV3), --plugin the plugins of a library; - reads the names of files from stdin. What the host refuses itself,
// and not the parser, begins with HOST:.
#include "network.h"

void list(std::ostream& o, char const* k, std::vector<std::string> const& v, bool raw = false) {
  writeKey(o, k);
  o << '[';
  for (size_t i = 0; i < v.size(); i++) o << (i ? "," : "") << (raw ? v[i] : quoted(v[i]));
  o << ']';
}
void tensor(std::ostream& o, Tensor* t) {
  if (!t) {
    o << "null";
    return;
  }
  o << "{\"id\":" << t->id;
  writeField(o, "name", std::string(t->v.getName()));
  writeField(o, "type", (int)t->ty());
  writeKey(o, "dims");
  if (t->known()) writeArray(o, t->sh().data(), t->sh().size());
  else o << "null";
  o << '}';
}
void tensors(std::ostream& o, char const* k, std::vector<Tensor*> const& v) {
  writeKey(o, k);
  o << '[';
  for (size_t i = 0; i < v.size(); i++) {
    if (i) o << ',';
    tensor(o, v[i]);
  }
  o << ']';
}
void one(std::string const& file, bool network, bool strong) {
  std::ifstream f(file, std::ios::binary);
  std::string data((std::istreambuf_iterator<char>(f)), {});
  Net net;
  net.v.strong = strong;
  auto* parser =
      static_cast<nvonnxparser::IParser*>(createNvOnnxParser_INTERNAL(&net, &theLogger, NV_ONNX_PARSER_VERSION));
  bool ok = false;
  try {
    ok = parser->parse(data.data(), data.size(), file.c_str());
  } catch (std::exception const& e) { note.log.push_back(std::string("E parse threw: ") + e.what()); }
  std::ostream& o = std::cout;
  std::cout.precision(9);
  for (auto* t : net.v.outputs) t->update();
  o << "{\"file\":" << quoted(file)
    << ",\"trt\":" << quoted(std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR))
    << ",\"ok\":" << (ok ? "true" : "false") << ",\"errors\":[";
  for (int i = 0; i < parser->getNbErrors(); i++) {
    auto* e = parser->getError(i);
    o << (i ? "," : "") << "{\"code\":" << (int)e->code();
    writeField(o, "desc", std::string(e->desc()));
    writeField(o, "file", std::string(e->file()));
    writeField(o, "line", e->line());
    writeField(o, "func", std::string(e->func()));
    writeField(o, "node", e->node());
#if V3
    writeField(o, "name", std::string(e->nodeName()));
    writeField(o, "op", std::string(e->nodeOperator()));
    std::vector<std::string> st;
    for (int k = 0; k < e->localFunctionStackSize(); k++) st.push_back(e->localFunctionStack()[k]);
    list(o, "functions", st);
#endif
    o << '}';
  }
  o << ']';
  list(o, "missing", note.missing);
  list(o, "host", note.host);
  list(o, "plugins", note.asked, true);
  list(o, "log", note.log);
  writeField(o, "layers", (int)net.v.layers.size());
  tensors(o, "inputs", net.v.inputs);
  tensors(o, "outputs", net.v.outputs);
  if (network) {
    writeKey(o, "network");
    o << '[';
    bool first = true;
    for (auto* c : net.v.layers) {
      o << (first ? "" : ",") << "{\"kind\":" << quoted(c->kind);
      first = false;
      writeField(o, "name", c->name);
      if (c->owner >= 0) writeField(o, "owner", c->owner);
      if (c->made >= 0) writeField(o, "made", c->made);
      c->values->dump(o);
      tensors(o, "in", c->in);
      tensors(o, "out", c->out);
      o << '}';
    }
    o << ']';
  }
  o << "}" << std::endl;
}
#ifdef HOST_LIBRARY
// In the place of libnvinfer, for TensorRT's own Python bindings of the same version: networks and parsers work,
// nothing is built.
struct Config : IBuilderConfig {
  GVBuilderConfig v;
  Config() { mImpl = &v; }
};
struct PyBuilder : IBuilder {
  struct V : GVBuilder {
    INetworkDefinition* createNetworkV2(NetworkDefinitionCreationFlags f) noexcept override {
      auto* n = new Net;
      n->v.strong = (f >> (int)NetworkDefinitionCreationFlag::kSTRONGLY_TYPED) & 1;
      return n;
    }
    IBuilderConfig* createBuilderConfig() noexcept override { return new Config; }
    bool platformHasFastFp16() const noexcept override { return true; }
  } v;
  PyBuilder() {
    mImpl = &v;
    v.mPluginRegistry = &reg();
  }
};
#define X extern "C" __attribute__((visibility("default")))
X void* createInferBuilder_INTERNAL(void*, int32_t) noexcept { return static_cast<IBuilder*>(new PyBuilder); }
X void* createInferRuntime_INTERNAL(void*, int32_t) noexcept { return nullptr; }
X void* createInferRefitter_INTERNAL(void*, void*, int32_t) noexcept { return nullptr; }
X char const* host_asked() {
  static std::string s;
  s.clear();
  for (auto& a : note.asked) s += a + "\n";
  return s.c_str();
}
X char const* host_errors() {
  static std::string s;
  s.clear();
  for (auto& a : note.host) s += a + "\n";
  for (auto& a : note.missing) s += "missing " + a + "\n";
  return s.c_str();
}
#else
int main(int n, char** a) {
  bool network = false, strong = false;
  std::vector<std::string> files;
  for (int i = 1; i < n; i++) {
    std::string s = a[i];
    if (s == "--network") network = true;
    else if (s == "--data") withData = true;
    else if (s == "--strong") strong = true;
    else if (s == "--plugin") {
      if (!reg().loadLibrary(a[++i])) return 2;
    } else if (s == "--mock" || s == "--mock3") {
      std::stringstream q(a[++i]);
      std::string p[4];
      for (auto& x : p) std::getline(q, x, ':');
      auto fill = [&](auto* m) {
        m->n = p[0];
        m->v = p[1];
        m->ns = p[2];
        std::stringstream z(p[3]);
        std::string x;
        while (std::getline(z, x, ',')) m->names.push_back(x);
        reg().es.push_back({m->n, m->v, m->ns, m});
      };
#if V3
      if (s == "--mock3") fill(new Mock3C);
      else
#endif
        fill(new Mock2C);
    } else if (s == "-") {
      std::string l;
      while (std::getline(std::cin, l)) files.push_back(l);
    } else files.push_back(s);
  }
  for (auto& f : files) {
    std::cout.flush();
    pid_t p = fork();
    if (!p) {
      alarm(60);
      one(f, network, strong);
      _exit(0);
    }
    int st;
    waitpid(p, &st, 0);
    if (st) std::cout << "{\"file\":" << quoted(f) << ",\"ok\":null,\"crash\":" << st << "}" << std::endl;
  }
}
#endif
