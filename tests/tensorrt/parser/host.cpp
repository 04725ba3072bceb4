// A host for NVIDIA's ONNX parser without libnvinfer: implements the network that the parser fills (tensors, layers,
// shapes), the registry that it asks for plugins, the logger and the error recorder; says as JSON what it did with files.
//
//   parser_host [--network [--data]] [--strong] [--mock NAME:VERSION:NAMESPACE:FIELD,…]… [--plugin LIBRARY]… FILE…
//
// --network adds the layers, --data their weights too; --mock registers a stand-in for a plugin (--mock3 one of
// IPluginV3), --plugin the plugins of a library; - reads the names of files from stdin. What the host refuses itself,
// and not the parser, begins with HOST:.
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <fstream>
#include <functional>
#include <iostream>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <sstream>
#include <vector>

#include "NvInfer.h"
#include "NvInferVersion.h"
#include "NvOnnxParser.h"
using namespace nvinfer1;
#define TRT (NV_TENSORRT_MAJOR * 100 + NV_TENSORRT_MINOR)
#if TRT >= 1000
#define V3 1
#else
#define V3 0
#endif
#if TRT >= 1000
using D_ = Dims const&;
#else
using D_ = Dims;
#endif
using I = int64_t;
constexpr I U = INT64_MIN;  // an unknown element of a shape tensor
using Shape = std::vector<I>;
using Vals = std::optional<std::vector<I>>;

// ---- JSON
std::string esc(std::string const& s) {
  std::string r = "\"";
  char b[8];
  for (unsigned char c : s) {
    if (c == '"' || c == '\\') {
      r += '\\';
      r += c;
    } else if (c < 32 || c > 126) {
      snprintf(b, 8, "\\u%04x", c);
      r += b;
    } else r += c;
  }
  return r + "\"";
}
void sep(std::ostream& o, char const* k) { o << ',' << esc(k) << ':'; }
template <class T, std::enable_if_t<std::is_enum_v<T>, int> = 0>
void js(std::ostream& o, char const* k, T v) {
  sep(o, k);
  o << (I)v;
}
template <class T, std::enable_if_t<std::is_integral_v<T>, int> = 0>
void js(std::ostream& o, char const* k, T v) {
  sep(o, k);
  o << (I)v;
}
void js(std::ostream& o, char const* k, double v) {
  sep(o, k);
  if (std::isfinite(v)) o << v;
  else o << esc(std::to_string(v));
}
void js(std::ostream& o, char const* k, std::string const& v) {
  sep(o, k);
  o << esc(v);
}
template <class V>
void arr(std::ostream& o, V const* p, I n) {
  o << '[';
  for (I i = 0; i < n; i++) o << (i ? "," : "") << (double)p[i];
  o << ']';
}
void js(std::ostream& o, char const* k, Dims const& v) {
  sep(o, k);
  if (v.nbDims < 0) o << "null";
  else arr(o, v.d, v.nbDims);
}
void js(std::ostream& o, char const* k, Permutation const& v) {
  sep(o, k);
  arr(o, v.order, 8);
}
bool withData = false;
void js(std::ostream& o, char const* k, Weights const& v) {
  static int const bits[] = {32, 16, 8, 32, 8, 8, 8, 16, 64, 4};
  sep(o, k);
  o << "{\"type\":" << (int)v.type << ",\"count\":" << v.count;
  if (withData && v.values) {
    o << ",\"hex\":\"";
    auto* p = (unsigned char const*)v.values;
    char b[3];
    for (I i = 0, n = (v.count * bits[(int)v.type] + 7) / 8; i < n; i++) {
      snprintf(b, 3, "%02x", p[i]);
      o << b;
    }
    o << '"';
  }
  o << '}';
}
template <class T>
void js(std::ostream& o, char const* k, std::vector<T> const& v) {
  sep(o, k);
  arr(o, v.data(), v.size());
}

// ---- what the host notes
struct Note {
  std::vector<std::string> missing, host, log, asked;
} note;
void missing(char const* what) { note.missing.push_back(what); }
IErrorRecorder* recorder{};
struct Core;
void hostError(Core*, std::string const&);
struct Tensor;
struct Values {
  Core* core{};
  void touch();
  virtual void dump(std::ostream&) const = 0;
};
Tensor& T(ITensor& t);
Dims dims(Shape const& s) {
  Dims d{};
  d.nbDims = s.size();
  for (size_t i = 0; i < s.size() && i < 8; i++) d.d[i] = s[i];
  return d;
}
Shape shape(Dims const& d) { return d.nbDims < 0 ? Shape{} : Shape(d.d, d.d + d.nbDims); }

struct CoreBase : apiv::VLayer {
  ILayer* pub{};
  Values* values{};
  char const* kind{""};
  LayerType type{};
  std::string name, meta;
  std::vector<Tensor*> in, out;
  bool fresh{false};
  DataType precision{DataType::kFLOAT};
  bool precisionSet{false};
  std::map<int, DataType> outType;
  std::function<void()> rule;
  int owner{-1};  // the number of its loop or conditional
  int made{-1};   // of a plugin: the number of the note of its creator's call
};
struct Core : CoreBase {
  LayerType getType() const noexcept override { return type; }
  void setName(char const* n) noexcept override { name = n; }
  char const* getName() const noexcept override { return name.c_str(); }
  int32_t getNbInputs() const noexcept override { return in.size(); }
  ITensor* getInput(int32_t i) const noexcept override;
  int32_t getNbOutputs() const noexcept override { return out.size(); }
  ITensor* getOutput(int32_t i) const noexcept override;
  void setInput(int32_t i, ITensor& t) noexcept override;
  void setPrecision(DataType t) noexcept override {
    precision = t;
    precisionSet = true;
  }
  DataType getPrecision() const noexcept override { return precision; }
  bool precisionIsSet() const noexcept override { return precisionSet; }
  void resetPrecision() noexcept override { precisionSet = false; }
  void setOutputType(int32_t i, DataType t) noexcept override {
    outType[i] = t;
    dirty();
  }
  DataType getOutputType(int32_t i) const noexcept override;
  bool outputTypeIsSet(int32_t i) const noexcept override { return outType.count(i); }
  void resetOutputType(int32_t i) noexcept override {
    outType.erase(i);
    dirty();
  }
  void setMetadata(char const* m) noexcept { meta = m; }
  char const* getMetadata() const noexcept { return meta.c_str(); }
  void dirty();
  void infer();
};
void Values::touch() {
  if (core) core->dirty();
}
#include "generated.h"

struct Tensor : ITensor {
  struct V : GVTensor {
    Tensor* t;
    void setDimensions(D_ d) noexcept override {
      t->dims_ = shape(d);
      t->rank = d.nbDims;
    }
    Dims getDimensions() const noexcept override {
      t->update();
      Dims d = dims(t->dims_);
      d.nbDims = t->rank;
      return d;
    }
    void setType(DataType x) noexcept override { t->forced = x; }
    DataType getType() const noexcept override {
      t->update();
      return t->forced ? *t->forced : t->type;
    }
    bool isNetworkInput() const noexcept override { return t->input; }
    bool isNetworkOutput() const noexcept override { return t->output; }
    bool setDynamicRange(float a, float b) noexcept override {
      mDynamicRangeMin = a;
      mDynamicRangeMax = b;
      range = true;
      return true;
    }
    bool dynamicRangeIsSet() const noexcept override { return range; }
    void resetDynamicRange() noexcept override { range = false; }
    bool isShapeTensor() const noexcept override { return false; }
    bool isExecutionTensor() const noexcept override { return true; }
    void setDimensionName(int32_t i, char const* n) noexcept { names[i] = n; }
    char const* getDimensionName(int32_t i) const noexcept {
      auto p = names.find(i);
      return p == names.end() ? nullptr : p->second.c_str();
    }
    bool range{false};
    std::map<int, std::string> names;
  } v;
  Core* from{};
  std::vector<Core*> users;
  Shape dims_;
  int rank{0};
  DataType type{DataType::kFLOAT};
  std::optional<DataType> forced;
  Vals vals;
  bool input{false}, output{false};
  int id;
  Tensor() {
    static int n = 0;
    id = n++;
    mImpl = &v;
    v.t = this;
    v.setName(("(Unnamed Tensor " + std::to_string(id) + ")").c_str());
  }
  void update() {
    if (from && !from->fresh) from->infer();
  }
  Shape const& sh() {
    update();
    return dims_;
  }
  bool known() {
    update();
    return rank >= 0;
  }
  DataType ty() {
    update();
    return forced ? *forced : type;
  }
  Vals const& val() {
    update();
    return vals;
  }
  void set(Shape s, DataType t, Vals x = {}) {
    rank = s.size();
    dims_ = std::move(s);
    type = t;
    vals = std::move(x);
    if (rank > 8) {
      rank = -1;
      hostError(from, "more than 8 dimensions");
    }
  }
  void unknown(DataType t) {
    rank = -1;
    dims_.clear();
    type = t;
    vals.reset();
  }
};
Tensor& T(ITensor& t) { return static_cast<Tensor&>(t); }
ITensor* Core::getInput(int32_t i) const noexcept { return i < (int)in.size() ? in[i] : nullptr; }
ITensor* Core::getOutput(int32_t i) const noexcept { return i < (int)out.size() ? out[i] : nullptr; }
void Core::setInput(int32_t i, ITensor& t) noexcept {
  if ((int)in.size() <= i) in.resize(i + 1);
  in[i] = &T(t);
  T(t).users.push_back(this);
  dirty();
}
DataType Core::getOutputType(int32_t i) const noexcept {
  auto p = outType.find(i);
  return p == outType.end() ? out[i]->ty() : p->second;
}
void Core::dirty() {
  if (!fresh) return;
  fresh = false;
  for (auto* t : out) {
    t->vals.reset();
    for (auto* u : t->users) u->dirty();
  }
}
void Core::infer() {
  if (fresh) return;
  fresh = true;
  if (rule) rule();
  for (auto& [i, t] : outType)
    if (i < (int)out.size()) out[i]->type = t;
}
void hostError(Core* c, std::string const& s) {
  std::string m = std::string("HOST: ") + (c ? c->kind + std::string(" ") + c->name + ": " : "") + s;
  note.host.push_back(m);
  if (recorder) recorder->reportError(ErrorCode::kINVALID_ARGUMENT, m.c_str());
}
std::string str(Shape const& s) {
  std::ostringstream o;
  o << '(';
  for (size_t i = 0; i < s.size(); i++) o << (i ? "," : "") << s[i];
  o << ')';
  return o.str();
}
I vol(Shape const& s) {
  I n = 1;
  for (I d : s) {
    if (d < 0) return -1;
    n *= d;
  }
  return n;
}
I bc(Core* c, I a, I b) {
  if (a == b) return a;
  if (a == 1) return b;
  if (b == 1) return a;
  if (a < 0) return b;
  if (b < 0) return a;
  hostError(c, "sizes " + std::to_string(a) + " and " + std::to_string(b) + " do not broadcast");
  return a;
}
bool bcast(Core* c, std::vector<Tensor*> const& ts, Shape& o) {
  for (auto* t : ts)
    if (!t->known()) return false;
  o = ts[0]->sh();
  for (auto* t : ts) {
    if (t->sh().size() != o.size()) {
      hostError(c, "ranks differ: " + str(o) + " and " + str(t->sh()));
      return false;
    }
    for (size_t i = 0; i < o.size(); i++) o[i] = bc(c, o[i], t->sh()[i]);
  }
  return true;
}
bool isInt(DataType t) {
  return t == DataType::kINT32 || t == DataType::kBOOL || t == DataType::kINT8
#if TRT >= 900
         || t == DataType::kINT64
#endif
      ;
}
I dimOf(I v) { return v == U ? -1 : v; }
constexpr DataType kSIZE =
#if V3
    DataType::kINT64;
#else
    DataType::kINT32;
#endif
// values of shape tensors element by element, with broadcasting among tensors of one element and n
Vals zip(std::vector<Tensor*> const& ts, std::function<I(std::vector<I> const&)> f) {
  size_t n = 1;
  for (auto* t : ts) {
    if (!t->val()) return {};
    n = (n == 1) ? t->val()->size() : n;
  }
  std::vector<I> r;
  for (size_t i = 0; i < n; i++) {
    std::vector<I> a;
    for (auto* t : ts) {
      auto& v = *t->val();
      if (v.size() != 1 && v.size() != n) return {};
      a.push_back(v.size() == 1 ? v[0] : v[i]);
    }
    r.push_back(f(a));
  }
  return r;
}
// sizes of a window operation along one axis
I window(I x, I k, I s, I d, I p0, I p1, int mode) {
  if (x < 0 || k < 0) return -1;
  I e = d * (k - 1) + 1;
  if (mode >= 2 && mode <= 3) return (x + s - 1) / s;  // SAME_UPPER, SAME_LOWER
  I a = x + p0 + p1 - e;
  return mode == 1 ? (a + s - 1) / s + 1 : (a >= 0 ? a / s : -((-a + s - 1) / s)) + 1;  // EXPLICIT_ROUND_UP | DOWN
}
I at(Dims const& d, int i, I other) { return i < d.nbDims ? d.d[i] : other; }
template <class V>
void conv(Core* c, V& v, bool de) {
  auto* o = c->out[0];
  auto* x = c->in[0];
  if (!x->known()) return o->unknown(x->ty());
  Shape s = x->sh();
  int n = v.mKernelSizeNd.nbDims;
  Shape k = shape(v.mKernelSizeNd);
  if (c->in.size() > 1 && c->in[1] && c->in[1]->known() && (int)c->in[1]->sh().size() == n + 2) {
    auto& w = c->in[1]->sh();
    for (int i = 0; i < n; i++) k[i] = w[i + 2];
  }
  if ((int)s.size() < n + 2) {
    hostError(c, "input " + str(s) + " has too few dimensions");
    return o->unknown(x->ty());
  }
  Dims pre = v.mPrePadding.nbDims ? v.mPrePadding : v.mPaddingNd,
       post = v.mPostPadding.nbDims ? v.mPostPadding : v.mPaddingNd;
  int b = s.size() - n;
  s[b - 1] = v.mNbOutputMaps;
  for (int i = 0; i < n; i++) {
    I st = at(v.mStrideNd, i, 1), d = at(v.mDilationNd, i, 1), p0 = at(pre, i, 0), p1 = at(post, i, 0);
    int mode = (int)v.mPaddingMode;
    s[b + i] = !de            ? window(s[b + i], k[i], st, d, p0, p1, mode)
               : s[b + i] < 0 ? -1
               : mode >= 2    ? s[b + i] * st
                              : (s[b + i] - 1) * st + d * (k[i] - 1) + 1 - p0 - p1;
  }
  o->set(s, x->ty());
}
Shape perm(Shape const& s, Permutation const& p) {
  Shape r(s.size());
  for (size_t i = 0; i < s.size(); i++) r[i] = s[p.order[i]];
  return r;
}
bool ident(Permutation const& p, size_t n) {
  for (size_t i = 0; i < n; i++)
    if (p.order[i] != (int)i) return false;
  return true;
}
void shuffle(Core* c, GVShuffleLayer& v, bool fixed) {
  auto* x = c->in[0];
  auto* o = c->out[0];
  DataType t = x->ty();
  Shape s;
  bool known = x->known();
  if (known) s = perm(x->sh(), v.mFirstTranspose);
  Shape r;
  bool have = false, dyn = c->in.size() > 1 && c->in[1];
  if (dyn) {
    auto* q = c->in[1];
    if (!q->known() || q->sh().size() != 1 || q->sh()[0] < 0) return o->unknown(t);
    have = true;
    r = q->val() ? *q->val() : Shape(q->sh()[0], U);
  } else if (fixed) {
    have = true;
    r = shape(v.mReshapeDimensions);
  }
  if (have) {
    int wild = -1;
    bool ok = known;
    I have_ = 1, want = known ? vol(s) : -1;
    for (size_t i = 0; i < r.size(); i++) {
      if (r[i] == 0 && v.mZeroIsPlaceholder) {
        if (known && i < s.size()) r[i] = s[i];
        else {
          if (known) hostError(c, "reshape's 0 at " + std::to_string(i) + " of " + str(s));
          r[i] = U;
        }
        if (r[i] < 0) r[i] = U;
      } else if (r[i] == -1) {
        if (wild >= 0) hostError(c, "two -1 in a reshape");
        wild = i;
      }
    }
    for (size_t i = 0; i < r.size(); i++)
      if ((int)i != wild) {
        if (r[i] == U) have_ = -1;
        else if (have_ >= 0) have_ *= r[i];
      }
    if (wild >= 0) {
      if (want >= 0 && have_ > 0) {
        if (want % have_) hostError(c, "reshape " + str(s) + " to " + str(r));
        r[wild] = want / have_;
      } else {
        // symbolic: the same unknown on both sides cancels if it is the only one
        I a = 1, b = 1;
        int ua = 0, ub = 0;
        for (I d : s) {
          if (d < 0) ua++;
          else a *= d;
        }
        for (size_t i = 0; i < r.size(); i++)
          if ((int)i != wild) {
            if (r[i] == U) ub++;
            else b *= r[i];
          }
        r[wild] = (known && ua == 1 && ub == 1 && b && a % b == 0 && v.mZeroIsPlaceholder && !dyn) ? a / b : U;
      }
    } else if (want >= 0 && have_ >= 0 && want != have_) hostError(c, "reshape " + str(s) + " to " + str(r));
    for (auto& d : r) d = dimOf(d);
    s = r;
    known = true;
    (void)ok;
  }
  if (!known) return o->unknown(t);
  bool same = ident(v.mFirstTranspose, x->known() ? x->sh().size() : 8) && ident(v.mSecondTranspose, s.size());
  o->set(perm(s, v.mSecondTranspose), t, same ? x->val() : Vals{});
}
void slice(Core* c, GVSliceLayer& v) {
  auto* x = c->in[0];
  auto* o = c->out[0];
  DataType t = x->ty();
  if (!x->known()) return o->unknown(t);
  size_t n = x->sh().size();
  auto get = [&](size_t i, Dims const& d) {
    if (c->in.size() > i && c->in[i]) {
      auto* q = c->in[i];
      return q->val() ? *q->val() : std::vector<I>(n, U);
    }
    return d.nbDims < 0 ? std::vector<I>(n, U) : shape(d);
  };
  auto st = get(1, v.mStart), sz = get(2, v.mSize), sd = get(3, v.mStride);
  Shape s = x->sh();
  if (c->in.size() > 5 && c->in[5]) {  // axes
    auto* a = c->in[5];
    if (!a->val()) {
      s.assign(n, -1);
      return o->set(s, t);
    }
    auto z = *a->val();
    Shape full = s;
    std::vector<I> st2(n, 0), sd2(n, 1);
    for (size_t i = 0; i < z.size(); i++) {
      I k = z[i] < 0 ? z[i] + n : z[i];
      if (k < 0 || k >= (I)n) {
        hostError(c, "slice axis");
        return o->unknown(t);
      }
      full[k] = i < sz.size() ? dimOf(sz[i]) : -1;
      st2[k] = i < st.size() ? st[i] : U;
      sd2[k] = i < sd.size() ? sd[i] : U;
    }
    s = full;
    st = st2;
    sd = sd2;
  } else {
    if (sz.size() != n) {
      hostError(c, "slice of " + str(x->sh()) + " with size of " + std::to_string(sz.size()));
      return o->unknown(t);
    }
    for (size_t i = 0; i < n; i++) s[i] = dimOf(sz[i]);
  }
  Vals r;
  if (n == 1 && x->val() && s[0] >= 0 && st.size() == 1 && sd.size() == 1 && st[0] != U && sd[0] != U) {
    std::vector<I> q;
    I m = x->val()->size();
    bool ok = true;
    for (I i = 0; i < s[0]; i++) {
      I k = st[0] + i * sd[0];
      if (k < 0 || k >= m) {
        ok = false;
        break;
      }
      q.push_back((*x->val())[k]);
    }
    if (ok) r = q;
  }
  o->set(s, t, r);
}
void einsum(Core* c, GVEinsumLayer& v) {
  std::string e = v.mEquation;
  e.erase(std::remove(e.begin(), e.end(), ' '), e.end());
  auto* o = c->out[0];
  std::map<char, I> m;
  auto ar = e.find("->");
  std::string l = e.substr(0, ar), r = ar == std::string::npos ? "" : e.substr(ar + 2);
  std::stringstream ss(l);
  std::string term;
  size_t k = 0;
  if (e.find('.') != std::string::npos) {
    hostError(c, "ellipsis in einsum");
    return o->unknown(c->in[0]->ty());
  }
  while (std::getline(ss, term, ',')) {
    if (k >= c->in.size()) return hostError(c, "einsum operands");
    auto* x = c->in[k++];
    if (!x->known()) {
      o->unknown(x->ty());
      continue;
    }
    if (x->sh().size() != term.size()) {
      hostError(c, "einsum " + e + ": rank of operand");
      return;
    }
    for (size_t i = 0; i < term.size(); i++) {
      auto p = m.find(term[i]);
      m[term[i]] = p == m.end() ? x->sh()[i] : bc(c, p->second, x->sh()[i]);
    }
  }
  if (ar == std::string::npos)
    for (auto& [q, d] : m)
      if (std::count(l.begin(), l.end(), q) == 1) r += q;
  Shape s;
  for (char q : r) s.push_back(m.count(q) ? m[q] : -1);
  o->set(s, c->in[0]->ty());
}
void gather(Core* c, GVGatherLayer& v) {
  auto *d = c->in[0], *i = c->in[1], *o = c->out[0];
  DataType t = d->ty();
  if (!d->known() || !i->known()) return o->unknown(t);
  Shape ds = d->sh(), is = i->sh(), s;
  int mode = (int)v.mMode, a = v.mGatherAxis, b = v.mNbElementWiseDims;
  if (a < 0) a += ds.size();
  if (mode == 0) {
    if (a >= (int)ds.size()) {
      hostError(c, "gather axis");
      return o->unknown(t);
    }
    s.assign(ds.begin(), ds.begin() + a);
    s.insert(s.end(), is.begin() + b, is.end());
    s.insert(s.end(), ds.begin() + a + 1, ds.end());
    Vals r;
    if (ds.size() == 1 && d->val() && i->val()) {
      std::vector<I> q;
      I n = d->val()->size();
      for (I k : *i->val()) q.push_back(k == U ? U : (k < -n || k >= n) ? U : (*d->val())[k < 0 ? k + n : k]);
      r = q;
    }
    return o->set(s, t, r);
  }
  if (mode == 1) return o->set(is, t);
  I k = is.empty() ? 0 : is.back();
  if (k < 0) return o->unknown(t);
  s.assign(is.begin(), is.end() - 1);
  s.insert(s.end(), ds.begin() + std::min<I>(ds.size(), b + k), ds.end());
  o->set(s, t);
}
void matmul(Core* c, GVMatrixMultiplyLayer& v) {
  auto *a = c->in[0], *b = c->in[1], *o = c->out[0];
  if (!a->known() || !b->known()) return o->unknown(a->ty());
  Shape x = a->sh(), y = b->sh(), m, n;
  int p = (int)v.mOperation[0], q = (int)v.mOperation[1];  // 0 none, 1 transpose, 2 vector
  auto cut = [&](Shape& s, int op, bool left, Shape& keep) -> std::pair<bool, I> {
    if ((int)s.size() < (op == 2 ? 1 : 2)) {
      hostError(c, "matmul of " + str(s));
      return {false, -1};
    }
    I k;
    if (op == 2) {
      k = s.back();
      s.pop_back();
    } else {
      I l = s.back();
      s.pop_back();
      I r = s.back();
      s.pop_back();
      if (op == 1) std::swap(l, r);
      k = left ? l : r;
      keep = {left ? r : l};
    }
    return {true, k};
  };
  auto [ok1, k1] = cut(x, p, true, m);
  auto [ok2, k2] = cut(y, q, false, n);
  if (!ok1 || !ok2) return o->unknown(a->ty());
  if (k1 >= 0 && k2 >= 0 && k1 != k2) hostError(c, "matmul of " + str(a->sh()) + " and " + str(b->sh()));
  if (x.size() != y.size()) {
    hostError(c, "matmul: batch ranks differ: " + str(a->sh()) + " and " + str(b->sh()));
    return o->unknown(a->ty());
  }
  Shape s;
  for (size_t i = 0; i < x.size(); i++) s.push_back(bc(c, x[i], y[i]));
  s.insert(s.end(), m.begin(), m.end());
  s.insert(s.end(), n.begin(), n.end());
  o->set(s, a->ty());
}
I arith(int op, I a, I b) {
  if (a == U || b == U) return (op == 1 && (a == 0 || b == 0)) ? 0 : U;
  switch (op) {
    case 0:
      return a + b;
    case 1:
      return a * b;
    case 2:
      return std::max(a, b);
    case 3:
      return std::min(a, b);
    case 4:
      return a - b;
    case 5:
      return b ? a / b : U;
    case 6: {
      I r = 1;
      for (I i = 0; i < b && i < 64; i++) r *= a;
      return r;
    }
    case 7:
      if (!b) return U;
      return a / b - ((a % b != 0) && ((a < 0) != (b < 0)));
    case 8:
      return a && b;
    case 9:
      return a || b;
    case 10:
      return !a != !b;
    case 11:
      return a == b;
    case 12:
      return a > b;
    case 13:
      return a < b;
  }
  return U;
}

// ---- plugins
struct DE : IDimensionExpr {
  struct V : apiv::VDimensionExpr {
    I v;
    bool size;
    bool isConstant() const noexcept { return v != U; }
    I c() const { return v; }
#if TRT >= 1000
    int64_t getConstantValue() const noexcept { return v == U ? -1 : v; }
    bool isSizeTensor() const noexcept { return size; }
#else
    int32_t getConstantValue() const noexcept { return v == U ? -1 : v; }
#endif
  } w;
  DE(I a, bool s = false) {
    w.v = a;
    w.size = s;
    mImpl = &w;
  }
  ~DE() noexcept {}
};
std::vector<std::unique_ptr<DE>> pool;
DE const* mk(I v, bool s = false) {
  pool.emplace_back(new DE(v, s));
  return pool.back().get();
}
struct EB : IExprBuilder {
  struct V : apiv::VExprBuilder {
    IDimensionExpr const* operation(DimensionOperation op, IDimensionExpr const& a, IDimensionExpr const& b) noexcept {
      I x = static_cast<DE const&>(a).w.v, y = static_cast<DE const&>(b).w.v;
      static int const m[] = {0, 1, 2, 3, 4, 11, 13, 7, 99};
      int o = (int)op;
      return mk(o == 8 ? (x == U || y == U || !y ? U : (x + y - 1) / y) : arith(m[o], x, y));
    }
#if TRT >= 1000
    IDimensionExpr const* constant(int64_t v) noexcept { return mk(v); }
    IDimensionExpr const* declareSizeTensor(int32_t, IDimensionExpr const&, IDimensionExpr const&) {
      return mk(U, true);
    }
#else
    IDimensionExpr const* constant(int32_t v) noexcept { return mk(v); }
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
    for (size_t j = 0; j < s.size(); j++) e.d[j] = mk(s[j] < 0 ? U : s[j]);
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
    o << (i ? "," : "") << "{\"name\":" << esc(f.name) << ",\"type\":" << (int)f.type << ",\"length\":" << f.length
      << ",\"data\":";
    int n = withData ? f.length : std::min(f.length, 24);
    switch (f.data ? f.type : PluginFieldType::kUNKNOWN) {
      case PluginFieldType::kFLOAT32:
        arr(o, (float const*)f.data, n);
        break;
      case PluginFieldType::kINT32:
        arr(o, (int32_t const*)f.data, n);
        break;
      case PluginFieldType::kCHAR:
        o << esc(std::string((char const*)f.data, f.length));
        break;
      case PluginFieldType::kINT8:
        arr(o, (int8_t const*)f.data, n);
        break;
#if V3
      case PluginFieldType::kINT64:
        arr(o, (int64_t const*)f.data, n);
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
  note.asked.push_back("{\"call\":" + esc(what) + ",\"name\":" + esc(n) + ",\"version\":" + esc(v) + ",\"namespace\":" +
                       esc(ns ? ns : "") + ",\"ok\":" + (found ? "true" : "false") + ",\"fields\":" + fields + "}");
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
struct Mock2C : IPluginCreator {
  std::string n, v, ns;
  std::vector<std::string> names;
  std::vector<PluginField> f;
  PluginFieldCollection fc{};
  IPluginCreator* real{};
  AsciiChar const* getPluginName() const noexcept override { return n.c_str(); }
  AsciiChar const* getPluginVersion() const noexcept override { return v.c_str(); }
  AsciiChar const* getPluginNamespace() const noexcept override { return ns.c_str(); }
  void setPluginNamespace(AsciiChar const* s) noexcept override { ns = s; }
  PluginFieldCollection const* getFieldNames() noexcept override {
    if (real) return real->getFieldNames();
    f.clear();
    for (auto& s : names) f.push_back(PluginField{s.c_str(), nullptr, PluginFieldType::kUNKNOWN, 0});
    fc.nbFields = f.size();
    fc.fields = f.data();
    return &fc;
  }
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
      for (int j = 0; j < i[0].nbDims; j++) o[k].d[j] = mk(U);
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
struct Mock3C : IPluginCreatorV3One {
  std::string n, v, ns;
  std::vector<std::string> names;
  std::vector<PluginField> f;
  PluginFieldCollection fc{};
  IPluginCreatorV3One* real{};
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

// ---- the network
struct Builder : IBuilder {
  struct V : GVBuilder {
    bool platformHasFastFp16() const noexcept override { return true; }
  } v;
  Builder() {
    mImpl = &v;
#if TRT >= 806
    v.mPluginRegistry = &reg();
#endif
  }
} theBuilder;
struct Net;
struct Loop : ILoop {
  struct V : GVLoop {
    Loop* l;
    IRecurrenceLayer* addRecurrence(ITensor&) noexcept override;
    ITripLimitLayer* addTripLimit(ITensor&, TripLimit) noexcept override;
    IIteratorLayer* addIterator(ITensor&, int32_t, bool) noexcept override;
    ILoopOutputLayer* addLoopOutput(ITensor&, LoopOutput, int32_t) noexcept override;
  } v;
  Net* n;
  int id;
  Tensor* trip{};
  Loop() {
    mImpl = &v;
    v.l = this;
  }
};
struct Cond : IIfConditional {
  struct V : GVIfConditional {
    Cond* c;
    IConditionLayer* setCondition(ITensor&) noexcept override;
    IIfConditionalInputLayer* addInput(ITensor&) noexcept override;
    IIfConditionalOutputLayer* addOutput(ITensor&, ITensor&) noexcept override;
  } v;
  Net* n;
  int id;
  Cond() {
    mImpl = &v;
    v.c = this;
  }
};
Permutation const idPerm{{0, 1, 2, 3, 4, 5, 6, 7}};
struct Net : INetworkDefinition {
  struct V : GVNetworkDefinition {
    Net* n;
    std::vector<Core*> layers;
    int boundaries{0};  // loops and conditionals
    std::vector<Tensor*> inputs, outputs;
    bool strong{false};
    template <class H>
    H* make(LayerType t, std::vector<ITensor*> in, int outs, std::function<void(Core*, H*)> rule) {
      auto* h = new H;
      Core& c = h->core;
      c.type = t;
      for (auto* x : in) {
        c.in.push_back(x ? &T(*x) : nullptr);
        if (x) T(*x).users.push_back(&c);
      }
      c.name = std::string("(Unnamed Layer* ") + std::to_string(layers.size()) + ") [" + c.kind + "]";
      for (int i = 0; i < outs; i++) {
        auto* o = new Tensor;
        o->from = &c;
        o->v.setName((c.name + "_output").c_str());
        c.out.push_back(o);
      }
      c.rule = [&c, h, rule] { rule(&c, h); };
      layers.push_back(&c);
      return h;
    }
    ITensor* addInput(char const* name, DataType t, D_ d) noexcept override {
      auto* x = new Tensor;
      x->input = true;
      x->set(shape(d), t);
      x->v.setName(name);
      inputs.push_back(x);
      return x;
    }
    void markOutput(ITensor& t) noexcept override {
      T(t).output = true;
      outputs.push_back(&T(t));
    }
    void unmarkOutput(ITensor& t) noexcept override { T(t).output = false; }
    void removeTensor(ITensor&) noexcept override {}
    int32_t getNbLayers() const noexcept override { return layers.size(); }
    ILayer* getLayer(int32_t i) const noexcept override { return layers[i]->pub; }
    int32_t getNbInputs() const noexcept override { return inputs.size(); }
    ITensor* getInput(int32_t i) const noexcept override { return inputs[i]; }
    int32_t getNbOutputs() const noexcept override { return outputs.size(); }
    ITensor* getOutput(int32_t i) const noexcept override { return outputs[i]; }
    bool hasImplicitBatchDimension() const noexcept override { return false; }
    bool markOutputForShapes(ITensor& t) noexcept override {
      markOutput(t);
      return true;
    }
    void setErrorRecorder(IErrorRecorder* r) noexcept override { recorder = r; }
    IErrorRecorder* getErrorRecorder() const noexcept override { return recorder; }
    bool setWeightsName(Weights, char const*) noexcept override { return true; }
    IBuilder& getBuilder() const noexcept { return theBuilder; }
    bool hasExplicitPrecision() const noexcept { return false; }
#if TRT >= 900
    NetworkDefinitionCreationFlags getFlags() const noexcept override {
      return strong ? 1U << (int)NetworkDefinitionCreationFlag::kSTRONGLY_TYPED : 0;
    }
    bool getFlag(NetworkDefinitionCreationFlag f) const noexcept override { return (getFlags() >> (int)f) & 1; }
#endif
    // elementwise and the like
#define SAME(c)                                       \
  {                                                   \
    auto* x = c->in[0];                               \
    if (x->known()) c->out[0]->set(x->sh(), x->ty()); \
    else c->out[0]->unknown(x->ty());                 \
  }
    IActivationLayer* addActivation(ITensor& x, ActivationType t) noexcept override {
      auto* h = make<HActivationLayer>(LayerType::kACTIVATION, {&x}, 1, [](Core* c, auto*) SAME(c));
      h->setActivationType(t);
      h->v.mAlpha = h->v.mBeta = t == ActivationType::kSOFTPLUS ? 1.F : 0.F;
      return h;
    }  // what the defaults are is not documented
    IUnaryLayer* addUnary(ITensor& x, UnaryOperation t) noexcept override {
      auto* h = make<HUnaryLayer>(LayerType::kUNARY, {&x}, 1, [](Core* c, HUnaryLayer* h) {
        SAME(c);
        int op = (int)h->getOperation();
        auto* x = c->in[0];
        if (x->val())
          c->out[0]->vals = zip({x}, [op](auto& a) {
            return a[0] == U ? U : op == 4 ? std::abs(a[0]) : op == 5 ? -a[0] : op == 20 ? I(!a[0]) : U;
          });
#if TRT >= 806
        if (op >= 23) c->out[0]->type = DataType::kBOOL;  // ISINF, ISNAN
#endif
      });
      h->setOperation(t);
      return h;
    }
    ISoftMaxLayer* addSoftMax(ITensor& x) noexcept override {
      return make<HSoftMaxLayer>(LayerType::kSOFTMAX, {&x}, 1, [](Core* c, auto*) SAME(c));
    }
    ILRNLayer* addLRN(ITensor& x, I w, float a, float b, float k) noexcept { return lrn(x, w, a, b, k); }
    ILRNLayer* addLRN(ITensor& x, int32_t w, float a, float b, float k) noexcept { return lrn(x, w, a, b, k); }
    ILRNLayer* lrn(ITensor& x, I w, float a, float b, float k) {
      auto* h = make<HLRNLayer>(LayerType::kLRN, {&x}, 1, [](Core* c, auto*) SAME(c));
      h->setWindowSize(w);
      h->setAlpha(a);
      h->setBeta(b);
      h->setK(k);
      return h;
    }
    IScaleLayer* addScale(ITensor& x, ScaleMode m, Weights a, Weights b, Weights p) noexcept override {
      return addScaleNd(x, m, a, b, p, 1);
    }
    IScaleLayer* addScaleNd(ITensor& x, ScaleMode m, Weights a, Weights b, Weights p, int32_t ax) noexcept override {
      auto* h = make<HScaleLayer>(LayerType::kSCALE, {&x}, 1, [](Core* c, auto*) SAME(c));
      h->setMode(m);
      h->setShift(a);
      h->setScale(b);
      h->setPower(p);
      h->v.mChannelAxis = ax;
      return h;
    }
    IElementWiseLayer* addElementWise(ITensor& a, ITensor& b, ElementWiseOperation op) noexcept override {
      auto* h = make<HElementWiseLayer>(LayerType::kELEMENTWISE, {&a, &b}, 1, [](Core* c, HElementWiseLayer* h) {
        Shape s;
        int op = (int)h->getOperation();
        DataType t = op >= 11 || (op >= 8) ? DataType::kBOOL : c->in[0]->ty();
        if (c->in[0]->ty() != c->in[1]->ty())
          hostError(c, "types differ: " + std::to_string((int)c->in[0]->ty()) + " and " +
                           std::to_string((int)c->in[1]->ty()));
        if (!bcast(c, c->in, s)) return c->out[0]->unknown(t);
        c->out[0]->set(s, t,
                       s.size() <= 1 && isInt(c->in[0]->ty())
                           ? zip(c->in, [op](auto& a) { return arith(op, a[0], a[1]); })
                           : Vals{});
      });
      h->setOperation(op);
      return h;
    }
    ISelectLayer* addSelect(ITensor& q, ITensor& a, ITensor& b) noexcept override {
      return make<HSelectLayer>(LayerType::kSELECT, {&q, &a, &b}, 1, [](Core* c, auto*) {
        Shape s;
        DataType t = c->in[1]->ty();
        if (c->in[1]->ty() != c->in[2]->ty()) hostError(c, "types differ");
        if (!bcast(c, c->in, s)) return c->out[0]->unknown(t);
        c->out[0]->set(s, t,
                       s.size() <= 1 ? zip(c->in, [](auto& a) { return a[0] == U ? U
                                                                       : a[0]    ? a[1]
                                                                                 : a[2]; }) : Vals{});
      });
    }
    IParametricReLULayer* addParametricReLU(ITensor& x, ITensor& y) noexcept override {
      return make<HParametricReLULayer>(LayerType::kPARAMETRIC_RELU, {&x, &y}, 1, [](Core* c, auto*) SAME(c));
    }
    IIdentityLayer* addIdentity(ITensor& x) noexcept override {
      return make<HIdentityLayer>(LayerType::kIDENTITY, {&x}, 1, [](Core* c, auto*) {
        SAME(c);
        c->out[0]->vals = c->in[0]->val();
      });
    }
#if TRT >= 806
    ICastLayer* addCast(ITensor& x, DataType t) noexcept override {
      auto* h = make<HCastLayer>(LayerType::kCAST, {&x}, 1, [](Core* c, HCastLayer* h) {
        SAME(c);
        c->out[0]->type = h->v.mToType;
        if (isInt(c->in[0]->ty()) && isInt(h->v.mToType)) c->out[0]->vals = c->in[0]->val();
      });
      h->setToType(t);
      return h;
    }
    IReverseSequenceLayer* addReverseSequence(ITensor& x, ITensor& l) noexcept override {
      return make<HReverseSequenceLayer>(LayerType::kREVERSE_SEQUENCE, {&x, &l}, 1, [](Core* c, auto*) SAME(c));
    }
    INormalizationLayer* addNormalization(ITensor& x, ITensor& s, ITensor& b, uint32_t m) noexcept override {
      auto* h = make<HNormalizationLayer>(LayerType::kNORMALIZATION, {&x, &s, &b}, 1, [](Core* c, auto*) SAME(c));
      h->setAxes(m);
      h->v.mNbGroups = 1;
      return h;
    }
#endif
#if TRT >= 805
    IOneHotLayer* addOneHot(ITensor& i, ITensor& v, ITensor& d, int32_t a) noexcept override {
      auto* h = make<HOneHotLayer>(LayerType::kONE_HOT, {&i, &v, &d}, 1, [](Core* c, HOneHotLayer* h) {
        auto* i = c->in[0];
        DataType t = c->in[1]->ty();
        if (!i->known()) return c->out[0]->unknown(t);
        Shape s = i->sh();
        int a = h->getAxis();
        if (a < 0) a += s.size() + 1;
        s.insert(s.begin() + a, c->in[2]->val() ? dimOf((*c->in[2]->val())[0]) : -1);
        c->out[0]->set(s, t);
      });
      h->setAxis(a);
      return h;
    }
    INonZeroLayer* addNonZero(ITensor& x) noexcept override {
      return make<HNonZeroLayer>(LayerType::kNON_ZERO, {&x}, 1, [](Core* c, auto*) {
        c->out[0]->set({c->in[0]->known() ? (I)c->in[0]->sh().size() : -1, -1}, DataType::kINT32);
      });
    }
    IGridSampleLayer* addGridSample(ITensor& x, ITensor& g) noexcept override {
      return make<HGridSampleLayer>(LayerType::kGRID_SAMPLE, {&x, &g}, 1, [](Core* c, auto*) {
        auto *x = c->in[0], *g = c->in[1];
        if (!x->known() || !g->known()) return c->out[0]->unknown(x->ty());
        if (x->sh().size() != 4 || g->sh().size() != 4) hostError(c, "grid_sample is for 4 dimensions");
        Shape s = x->sh();
        for (size_t i = 2; i < s.size(); i++) s[i] = i - 1 < g->sh().size() ? g->sh()[i - 1] : -1;
        c->out[0]->set(s, x->ty());
      });
    }
    INMSLayer* addNMS(ITensor& b, ITensor& s, ITensor& m) noexcept override {
      return make<HNMSLayer>(LayerType::kNMS, {&b, &s, &m}, 2, [](Core* c, auto*) {
        c->out[0]->set({-1, 3}, DataType::kINT32);
        c->out[1]->set({}, DataType::kINT32);
      });
    }
#endif
    IConcatenationLayer* addConcatenation(ITensor* const* in, int32_t n) noexcept override {
      return make<HConcatenationLayer>(
          LayerType::kCONCATENATION, std::vector<ITensor*>(in, in + n), 1, [](Core* c, HConcatenationLayer* h) {
            DataType t = c->in[0]->ty();
            if (!c->in[0]->known()) return c->out[0]->unknown(t);
            Shape s = c->in[0]->sh();
            int a = h->getAxis();
            if (a < 0) a += s.size();
            if (a >= (int)s.size()) {
              hostError(c, "concat axis");
              return c->out[0]->unknown(t);
            }
            Vals v = c->in[0]->val();
            for (size_t i = 1; i < c->in.size(); i++) {
              auto* x = c->in[i];
              if (!x->known()) return c->out[0]->unknown(t);
              if (x->ty() != t)
                hostError(c, "types differ: " + std::to_string((int)t) + " and " + std::to_string((int)x->ty()));
              if (x->sh().size() != s.size()) {
                hostError(c, "ranks differ");
                return c->out[0]->unknown(t);
              }
              for (int k = 0; k < (int)s.size(); k++) {
                I d = x->sh()[k];
                if (k == a) s[k] = s[k] < 0 || d < 0 ? -1 : s[k] + d;
                else if (s[k] < 0) s[k] = d;
                else if (d >= 0 && d != s[k]) hostError(c, "sizes differ");
              }
              if (v && x->val()) v->insert(v->end(), x->val()->begin(), x->val()->end());
              else v.reset();
            }
            c->out[0]->set(s, t, s.size() == 1 ? v : Vals{});
          });
    }
    IShuffleLayer* addShuffle(ITensor& x) noexcept override {
      auto* h = make<HShuffleLayer>(LayerType::kSHUFFLE, {&x}, 1, [](Core* c, HShuffleLayer* h) {
        shuffle(c, h->v, h->v.mReshapeDimensions.nbDims >= 0);
      });
      h->v.mFirstTranspose = h->v.mSecondTranspose = idPerm;
      h->v.mZeroIsPlaceholder = true;
      h->v.mReshapeDimensions.nbDims = -1;
      return h;
    }
    IReduceLayer* addReduce(ITensor& x, ReduceOperation op, uint32_t ax, bool keep) noexcept override {
      auto* h = make<HReduceLayer>(LayerType::kREDUCE, {&x}, 1, [](Core* c, HReduceLayer* h) {
        auto* x = c->in[0];
        if (!x->known()) return c->out[0]->unknown(x->ty());
        Shape s;
        uint32_t m = h->getReduceAxes();
        int op = (int)h->getOperation();
        if (m >> x->sh().size()) hostError(c, "reduce axes");
        for (size_t i = 0; i < x->sh().size(); i++)
          if (!((m >> i) & 1)) s.push_back(x->sh()[i]);
          else if (h->getKeepDimensions()) s.push_back(1);
        Vals v;
        if (x->sh().size() == 1 && x->val() && m == 1 && op <= 3) {
          I r = op == 1;
          bool ok = true;
          I k = 0;
          for (I e : *x->val()) {
            if (e == U) ok = false;
            r = op == 0 ? r + e : op == 1 ? r * e : !k++ ? e : op == 2 ? std::max(r, e) : std::min(r, e);
          }
          v = std::vector<I>{ok ? r : U};
        }
        c->out[0]->set(s, x->ty(), v);
      });
      h->setOperation(op);
      h->setReduceAxes(ax);
      h->setKeepDimensions(keep);
      return h;
    }
    ITopKLayer* addTopK(ITensor& x, TopKOperation op, int32_t k, uint32_t ax) noexcept override {
      auto* h = make<HTopKLayer>(LayerType::kTOPK, {&x}, 2, [](Core* c, HTopKLayer* h) {
        auto* x = c->in[0];
        if (!x->known()) {
          c->out[0]->unknown(x->ty());
          return c->out[1]->unknown(DataType::kINT32);
        }
        Shape s = x->sh();
        I k = h->getK();
        if (c->in.size() > 1 && c->in[1]) k = c->in[1]->val() ? dimOf((*c->in[1]->val())[0]) : -1;
        for (size_t i = 0; i < s.size(); i++)
          if ((h->getReduceAxes() >> i) & 1) s[i] = k;
        c->out[0]->set(s, x->ty());
        c->out[1]->set(s, DataType::kINT32);
      });
      h->setOperation(op);
      h->setK(k);
      h->setReduceAxes(ax);
      return h;
    }
    IGatherLayer* addGather(ITensor& d, ITensor& i, int32_t a) noexcept override {
      auto* h = make<HGatherLayer>(LayerType::kGATHER, {&d, &i}, 1, [](Core* c, HGatherLayer* h) { gather(c, h->v); });
      h->setGatherAxis(a);
      return h;
    }
    IGatherLayer* addGatherV2(ITensor& d, ITensor& i, GatherMode m) noexcept override {
      auto* h = static_cast<HGatherLayer*>(addGather(d, i, 0));
      h->setMode(m);
      return h;
    }
    IScatterLayer* addScatter(ITensor& d, ITensor& i, ITensor& u, ScatterMode m) noexcept override {
      auto* h = make<HScatterLayer>(LayerType::kSCATTER, {&d, &i, &u}, 1, [](Core* c, auto*) SAME(c));
      h->setMode(m);
      return h;
    }
    IRaggedSoftMaxLayer* addRaggedSoftMax(ITensor& x, ITensor& b) noexcept override {
      return make<HRaggedSoftMaxLayer>(LayerType::kRAGGED_SOFTMAX, {&x, &b}, 1, [](Core* c, auto*) SAME(c));
    }
    IMatrixMultiplyLayer* addMatrixMultiply(ITensor& a, MatrixOperation p, ITensor& b,
                                            MatrixOperation q) noexcept override {
      auto* h = make<HMatrixMultiplyLayer>(LayerType::kMATRIX_MULTIPLY, {&a, &b}, 1,
                                           [](Core* c, HMatrixMultiplyLayer* h) { matmul(c, h->v); });
      h->setOperation(0, p);
      h->setOperation(1, q);
      return h;
    }
    IConstantLayer* addConstant(D_ d, Weights w) noexcept override {
      auto* h = make<HConstantLayer>(LayerType::kCONSTANT, {}, 1, [](Core* c, HConstantLayer* h) {
        auto w = h->getWeights();
        Vals v;
        Shape s = shape(h->getDimensions());
        if (w.values && w.count <= 4096) {
          std::vector<I> q;
          for (I i = 0; i < w.count; i++) {
            if (w.type == DataType::kINT32) q.push_back(((int32_t const*)w.values)[i]);
            else if (w.type == DataType::kBOOL) q.push_back(((bool const*)w.values)[i]);
#if TRT >= 900
            else if (w.type == DataType::kINT64) q.push_back(((int64_t const*)w.values)[i]);
#endif
          }
          if (isInt(w.type) && (I)q.size() == w.count) v = q;
        }
        if (vol(s) != w.count) hostError(c, "constant of " + std::to_string(w.count) + " for " + str(s));
        c->out[0]->set(s, w.type, v);
      });
      h->setDimensions(d);
      h->setWeights(w);
      return h;
    }
    ISliceLayer* addSlice(ITensor& x, D_ a, D_ b, D_ s) noexcept override {
      auto* h = make<HSliceLayer>(LayerType::kSLICE, {&x}, 1, [](Core* c, HSliceLayer* h) { slice(c, h->v); });
      h->setStart(a);
      h->setSize(b);
      h->setStride(s);
      return h;
    }
    IShapeLayer* addShape(ITensor& x) noexcept override {
      return make<HShapeLayer>(LayerType::kSHAPE, {&x}, 1, [](Core* c, auto*) {
        auto* x = c->in[0];
        if (!x->known()) return c->out[0]->set({-1}, kSIZE);
        std::vector<I> v;
        for (I d : x->sh()) v.push_back(d < 0 ? U : d);
        c->out[0]->set({(I)v.size()}, kSIZE, v);
      });
    }
    template <class H>
    H* convolution(LayerType t, ITensor& x, I n, Dims const& k, Weights w, Weights b, bool de) {
      auto* h = make<H>(t, {&x}, 1, [de](Core* c, H* h) { conv(c, h->v, de); });
      h->v.mNbOutputMaps = n;
      h->v.mNbGroups = 1;
      h->setKernelSizeNd(k);
      h->setKernelWeights(w);
      h->setBiasWeights(b);
      return h;
    }
    IConvolutionLayer* addConvolutionNd(ITensor& x, I n, D_ k, Weights w, Weights b) noexcept {
      return convolution<HConvolutionLayer>(LayerType::kCONVOLUTION, x, n, k, w, b, false);
    }
    IConvolutionLayer* addConvolutionNd(ITensor& x, int32_t n, D_ k, Weights w, Weights b) noexcept {
      return addConvolutionNd(x, (I)n, k, w, b);
    }
    IDeconvolutionLayer* addDeconvolutionNd(ITensor& x, I n, D_ k, Weights w, Weights b) noexcept {
      return convolution<HDeconvolutionLayer>(LayerType::kDECONVOLUTION, x, n, k, w, b, true);
    }
    IDeconvolutionLayer* addDeconvolutionNd(ITensor& x, int32_t n, D_ k, Weights w, Weights b) noexcept {
      return addDeconvolutionNd(x, (I)n, k, w, b);
    }
    IPoolingLayer* addPoolingNd(ITensor& x, PoolingType t, D_ k) noexcept override {
      auto* h = make<HPoolingLayer>(LayerType::kPOOLING, {&x}, 1, [](Core* c, HPoolingLayer* h) {
        auto* x = c->in[0];
        auto& v = h->v;
        if (!x->known()) return c->out[0]->unknown(x->ty());
        Shape s = x->sh();
        int n = v.mWindowSizeNd.nbDims;
        Dims pre = v.mPrePadding.nbDims ? v.mPrePadding : v.mPaddingNd,
             post = v.mPostPadding.nbDims ? v.mPostPadding : v.mPaddingNd;
        if ((int)s.size() < n + 1) {
          hostError(c, "pooling of " + str(s));
          return c->out[0]->unknown(x->ty());
        }
        for (int i = 0; i < n; i++) {
          I& d = s[s.size() - n + i];
          d = window(d, v.mWindowSizeNd.d[i], at(v.mStrideNd, i, 1), 1, at(pre, i, 0), at(post, i, 0),
                     (int)v.mPaddingMode);
        }
        c->out[0]->set(s, x->ty());
      });
      h->setPoolingType(t);
      h->setWindowSizeNd(k);
      h->v.mAverageCountExcludesPadding = true;
      return h;
    }
    IPaddingLayer* addPaddingNd(ITensor& x, D_ a, D_ b) noexcept override {
      auto* h = make<HPaddingLayer>(LayerType::kPADDING, {&x}, 1, [](Core* c, HPaddingLayer* h) {
        auto* x = c->in[0];
        if (!x->known()) return c->out[0]->unknown(x->ty());
        Shape s = x->sh();
        auto &p = h->v.mPrePaddingNd, &q = h->v.mPostPaddingNd;
        for (int i = 0; i < p.nbDims; i++) {
          I& d = s[s.size() - p.nbDims + i];
          if (d >= 0) d += p.d[i] + q.d[i];
        }
        c->out[0]->set(s, x->ty());
      });
      h->setPrePaddingNd(a);
      h->setPostPaddingNd(b);
      return h;
    }
    IResizeLayer* addResize(ITensor& x) noexcept override {
      return make<HResizeLayer>(LayerType::kRESIZE, {&x}, 1, [](Core* c, HResizeLayer* h) {
        auto* x = c->in[0];
        if (!x->known()) return c->out[0]->unknown(x->ty());
        Shape s = x->sh();
        if (c->in.size() > 1 && c->in[1]) {
          auto* q = c->in[1];
          for (size_t i = 0; i < s.size(); i++) s[i] = q->val() && i < q->val()->size() ? dimOf((*q->val())[i]) : -1;
        } else if (h->v.mOutputDimensions.nbDims > 0) s = shape(h->v.mOutputDimensions);
        else
          for (size_t i = 0; i < s.size() && i < h->v.mScales.size(); i++)
            if (s[i] >= 0) s[i] = (I)std::floor(s[i] * h->v.mScales[i]);
        c->out[0]->set(s, x->ty());
      });
    }
    template <class Q>
    IFillLayer* fill(Dims const& d, FillOperation op, Q t) {
      auto* h = make<HFillLayer>(LayerType::kFILL, {}, 1, [t](Core* c, HFillLayer* h) {
        Shape s = shape(h->v.mDimensions);
        DataType ty = t;
        if (c->in.size() > 1 && c->in[1]) ty = c->in[1]->ty();
        if (c->in.size() && c->in[0]) {
          auto* q = c->in[0];
          if (q->val()) {
            s.clear();
            for (I e : *q->val()) s.push_back(dimOf(e));
          } else if (q->known() && q->sh().size() == 1 && q->sh()[0] >= 0) s.assign(q->sh()[0], -1);
          else return c->out[0]->unknown(ty);
        }
        Vals v;
        if (s.size() == 1 && s[0] >= 0 && s[0] < 4096 && (int)h->v.mOperation == 0 && c->in.size() > 2 && c->in[1] &&
            c->in[2] && c->in[1]->val() && c->in[2]->val()) {
          I a = (*c->in[1]->val())[0], b = (*c->in[2]->val())[0];
          std::vector<I> q;
          for (I i = 0; i < s[0]; i++) q.push_back(a == U || b == U ? U : a + i * b);
          v = q;
        }
        c->out[0]->set(s, ty, v);
      });
      h->setDimensions(d);
      h->setOperation(op);
      return h;
    }
    IFillLayer* addFill(D_ d, FillOperation op) noexcept override { return fill(d, op, DataType::kFLOAT); }
#if TRT >= 900
    IFillLayer* addFillV2(D_ d, FillOperation op, DataType t) noexcept override { return fill(d, op, t); }
    IQuantizeLayer* addQuantizeV2(ITensor& x, ITensor& s, DataType t) noexcept override {
      auto* h = static_cast<HQuantizeLayer*>(addQuantize(x, s));
      h->setToType(t);
      return h;
    }
    IDequantizeLayer* addDequantizeV2(ITensor& x, ITensor& s, DataType t) noexcept override {
      auto* h = static_cast<HDequantizeLayer*>(addDequantize(x, s));
      h->setToType(t);
      return h;
    }
#endif
    IQuantizeLayer* addQuantize(ITensor& x, ITensor& s) noexcept override {
      auto* h =
          make<HQuantizeLayer>(LayerType::kQUANTIZE, {&x, &s}, 1, [](Core* c, [[maybe_unused]] HQuantizeLayer* h) {
            SAME(c);
            c->out[0]->type = DataType::kINT8;
#if TRT >= 900
            if (h->v.mToType != DataType::kFLOAT) c->out[0]->type = h->v.mToType;
#endif
          });
      h->v.mAxis = -1;
      return h;
    }
    IDequantizeLayer* addDequantize(ITensor& x, ITensor& s) noexcept override {
      auto* h = make<HDequantizeLayer>(
          LayerType::kDEQUANTIZE, {&x, &s}, 1, [](Core* c, [[maybe_unused]] HDequantizeLayer* h) {
            SAME(c);
            c->out[0]->type = DataType::kFLOAT;
#if TRT >= 900
            c->out[0]->type = h->v.mToType == DataType::kFLOAT ? c->in[1]->ty() : h->v.mToType;
#endif
          });
      h->v.mAxis = -1;
      return h;
    }
    IEinsumLayer* addEinsum(ITensor* const* in, int32_t n, char const* e) noexcept override {
      auto* h = make<HEinsumLayer>(LayerType::kEINSUM, std::vector<ITensor*>(in, in + n), 1,
                                   [](Core* c, HEinsumLayer* h) { einsum(c, h->v); });
      h->setEquation(e);
      return h;
    }
    IAssertionLayer* addAssertion(ITensor& q, char const* m) noexcept override {
      auto* h = make<HAssertionLayer>(LayerType::kASSERTION, {&q}, 0, [](Core*, auto*) {});
      h->setMessage(m);
      return h;
    }
    IPluginV2Layer* addPluginV2(ITensor* const* in, int32_t n, IPluginV2& q) noexcept override {
      IPluginV2& p = *q.clone();  // as the library does: the parser destroys its own
      auto* h = make<HPluginV2Layer>(LayerType::kPLUGIN_V2, std::vector<ITensor*>(in, in + n), p.getNbOutputs(),
                                     [&p](Core* c, auto*) { plugin2(c, p); });
      h->v.mPlugin = &p;
      if (madeBy.count(&q)) h->core.made = madeBy[&q];
      return h;
    }
#if V3
    IPluginV3Layer* addPluginV3(ITensor* const* in, int32_t n, ITensor* const*, int32_t,
                                IPluginV3& q) noexcept override {
      IPluginV3& p = *q.clone();
      auto* b = static_cast<IPluginV3OneBuild*>(p.getCapabilityInterface(PluginCapabilityType::kBUILD));
      auto* h = make<HPluginV3Layer>(LayerType::kPLUGIN_V3, std::vector<ITensor*>(in, in + n), b->getNbOutputs(),
                                     [&p](Core* c, auto*) { plugin3(c, p); });
      h->v.mPlugin = &p;
      if (madeBy.count(&q)) h->core.made = madeBy[&q];
      return h;
    }
#endif
    ILoop* addLoop() noexcept override {
      auto* l = new Loop;
      l->n = n;
      l->id = boundaries++;
      return l;
    }
    IIfConditional* addIfConditional() noexcept override {
      auto* l = new Cond;
      l->n = n;
      l->id = boundaries++;
      return l;
    }
  } v;
  Net() {
    mImpl = &v;
    v.n = this;
  }
};
IRecurrenceLayer* Loop::V::addRecurrence(ITensor& x) noexcept {
  auto* h = l->n->v.make<HRecurrenceLayer>(LayerType::kRECURRENCE, {&x}, 1, [](Core* c, auto*) SAME(c));
  h->b.mLoop = l;
  h->core.owner = l->id;
  return h;
}
ITripLimitLayer* Loop::V::addTripLimit(ITensor& x, TripLimit t) noexcept {
  auto* h = l->n->v.make<HTripLimitLayer>(LayerType::kTRIP_LIMIT, {&x}, 0, [](Core*, auto*) {});
  h->v.mTripLimit = t;
  h->b.mLoop = l;
  h->core.owner = l->id;
  if ((int)t == 0) l->trip = &T(x);
  return h;
}
IIteratorLayer* Loop::V::addIterator(ITensor& x, int32_t a, bool r) noexcept {
  auto* h = l->n->v.make<HIteratorLayer>(LayerType::kITERATOR, {&x}, 1, [](Core* c, HIteratorLayer* h) {
    auto* x = c->in[0];
    if (!x->known()) return c->out[0]->unknown(x->ty());
    Shape s = x->sh();
    int a = h->getAxis();
    if (a < (int)s.size()) s.erase(s.begin() + a);
    c->out[0]->set(s, x->ty());
  });
  h->setAxis(a);
  h->setReverse(r);
  h->b.mLoop = l;
  h->core.owner = l->id;
  return h;
}
ILoopOutputLayer* Loop::V::addLoopOutput(ITensor& x, LoopOutput o, int32_t a) noexcept {
  auto* L = l;
  auto* h = l->n->v.make<HLoopOutputLayer>(LayerType::kLOOP_OUTPUT, {&x}, 1, [L](Core* c, HLoopOutputLayer* h) {
    auto* x = c->in[0];
    if (!x->known()) return c->out[0]->unknown(x->ty());
    Shape s = x->sh();
    if ((int)h->v.mLoopOutput) {
      auto* q = c->in.size() > 1 && c->in[1] ? c->in[1] : L->trip;
      int a = std::min<int>(h->getAxis(), s.size());
      s.insert(s.begin() + a, q && q->val() ? dimOf((*q->val())[0]) : -1);
    }
    c->out[0]->set(s, x->ty());
  });
  h->v.mLoopOutput = o;
  h->setAxis(a);
  h->b.mLoop = l;
  h->core.owner = l->id;
  return h;
}
IConditionLayer* Cond::V::setCondition(ITensor& x) noexcept {
  auto* h = c->n->v.make<HConditionLayer>(LayerType::kCONDITION, {&x}, 0, [](Core*, auto*) {});
  h->b.mConditional = c;
  h->core.owner = c->id;
  return h;
}
IIfConditionalInputLayer* Cond::V::addInput(ITensor& x) noexcept {
  auto* h = c->n->v.make<HIfConditionalInputLayer>(LayerType::kCONDITIONAL_INPUT, {&x}, 1, [](Core* c, auto*) {
    SAME(c);
    c->out[0]->vals = c->in[0]->val();
  });
  h->b.mConditional = c;
  h->core.owner = c->id;
  return h;
}
IIfConditionalOutputLayer* Cond::V::addOutput(ITensor& a, ITensor& b) noexcept {
  auto* h = c->n->v.make<HIfConditionalOutputLayer>(LayerType::kCONDITIONAL_OUTPUT, {&a, &b}, 1, [](Core* c, auto*) {
    auto *a = c->in[0], *b = c->in[1];
    if (!a->known() || !b->known()) return c->out[0]->unknown(a->ty());
    if (a->sh().size() != b->sh().size()) {
      hostError(c, "branches differ in rank: " + str(a->sh()) + " and " + str(b->sh()));
      return c->out[0]->unknown(a->ty());
    }
    Shape s = a->sh();
    for (size_t i = 0; i < s.size(); i++)
      if (s[i] != b->sh()[i]) s[i] = -1;
    c->out[0]->set(s, a->ty());
  });
  h->b.mConditional = c;
  h->core.owner = c->id;
  return h;
}

// ---- one file
void list(std::ostream& o, char const* k, std::vector<std::string> const& v, bool raw = false) {
  sep(o, k);
  o << '[';
  for (size_t i = 0; i < v.size(); i++) o << (i ? "," : "") << (raw ? v[i] : esc(v[i]));
  o << ']';
}
void tensor(std::ostream& o, Tensor* t) {
  if (!t) {
    o << "null";
    return;
  }
  o << "{\"id\":" << t->id;
  js(o, "name", std::string(t->v.getName()));
  js(o, "type", (int)t->ty());
  sep(o, "dims");
  if (t->known()) arr(o, t->sh().data(), t->sh().size());
  else o << "null";
  o << '}';
}
void tensors(std::ostream& o, char const* k, std::vector<Tensor*> const& v) {
  sep(o, k);
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
  o << "{\"file\":" << esc(file)
    << ",\"trt\":" << esc(std::to_string(NV_TENSORRT_MAJOR) + "." + std::to_string(NV_TENSORRT_MINOR))
    << ",\"ok\":" << (ok ? "true" : "false") << ",\"errors\":[";
  for (int i = 0; i < parser->getNbErrors(); i++) {
    auto* e = parser->getError(i);
    o << (i ? "," : "") << "{\"code\":" << (int)e->code();
    js(o, "desc", std::string(e->desc()));
    js(o, "file", std::string(e->file()));
    js(o, "line", e->line());
    js(o, "func", std::string(e->func()));
    js(o, "node", e->node());
#if V3
    js(o, "name", std::string(e->nodeName()));
    js(o, "op", std::string(e->nodeOperator()));
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
  js(o, "layers", (int)net.v.layers.size());
  tensors(o, "inputs", net.v.inputs);
  tensors(o, "outputs", net.v.outputs);
  if (network) {
    sep(o, "network");
    o << '[';
    bool first = true;
    for (auto* c : net.v.layers) {
      o << (first ? "" : ",") << "{\"kind\":" << esc(c->kind);
      first = false;
      js(o, "name", c->name);
      if (c->owner >= 0) js(o, "owner", c->owner);
      if (c->made >= 0) js(o, "made", c->made);
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
    if (st) std::cout << "{\"file\":" << esc(f) << ",\"ok\":null,\"crash\":" << st << "}" << std::endl;
  }
}
#endif
