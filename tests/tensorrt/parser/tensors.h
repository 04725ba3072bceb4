// Tensors and layers of the network, and the shapes of what layers make.
#pragma once

#include "json.h"

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
Tensor& tensorOf(ITensor& t);
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
    void setDimensions(DimsArgument d) noexcept override {
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
  ShapeValues vals;
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
  ShapeValues const& val() {
    update();
    return vals;
  }
  void set(Shape s, DataType t, ShapeValues x = {}) {
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
Tensor& tensorOf(ITensor& t) { return static_cast<Tensor&>(t); }
ITensor* Core::getInput(int32_t i) const noexcept { return i < (int)in.size() ? in[i] : nullptr; }
ITensor* Core::getOutput(int32_t i) const noexcept { return i < (int)out.size() ? out[i] : nullptr; }
void Core::setInput(int32_t i, ITensor& t) noexcept {
  if ((int)in.size() <= i) in.resize(i + 1);
  in[i] = &tensorOf(t);
  tensorOf(t).users.push_back(this);
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
std::string text(Shape const& s) {
  std::ostringstream o;
  o << '(';
  for (size_t i = 0; i < s.size(); i++) o << (i ? "," : "") << s[i];
  o << ')';
  return o.str();
}
int64_t volume(Shape const& s) {
  int64_t n = 1;
  for (int64_t d : s) {
    if (d < 0) return -1;
    n *= d;
  }
  return n;
}
int64_t broadcastSize(Core* c, int64_t a, int64_t b) {
  if (a == b) return a;
  if (a == 1) return b;
  if (b == 1) return a;
  if (a < 0) return b;
  if (b < 0) return a;
  hostError(c, "sizes " + std::to_string(a) + " and " + std::to_string(b) + " do not broadcast");
  return a;
}
bool broadcastShape(Core* c, std::vector<Tensor*> const& ts, Shape& o) {
  for (auto* t : ts)
    if (!t->known()) return false;
  o = ts[0]->sh();
  for (auto* t : ts) {
    if (t->sh().size() != o.size()) {
      hostError(c, "ranks differ: " + text(o) + " and " + text(t->sh()));
      return false;
    }
    for (size_t i = 0; i < o.size(); i++) o[i] = broadcastSize(c, o[i], t->sh()[i]);
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
int64_t dimOf(int64_t v) { return v == kUnknown ? -1 : v; }
constexpr DataType kSIZE =
#if V3
    DataType::kINT64;
#else
    DataType::kINT32;
#endif
// values of shape tensors element by element, with broadcasting among tensors of one element and n
ShapeValues eachElement(std::vector<Tensor*> const& ts, std::function<int64_t(std::vector<int64_t> const&)> f) {
  size_t n = 1;
  for (auto* t : ts) {
    if (!t->val()) return {};
    n = (n == 1) ? t->val()->size() : n;
  }
  std::vector<int64_t> r;
  for (size_t i = 0; i < n; i++) {
    std::vector<int64_t> a;
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
int64_t window(int64_t x, int64_t k, int64_t s, int64_t d, int64_t p0, int64_t p1, int mode) {
  if (x < 0 || k < 0) return -1;
  int64_t e = d * (k - 1) + 1;
  if (mode >= 2 && mode <= 3) return (x + s - 1) / s;  // SAME_UPPER, SAME_LOWER
  int64_t a = x + p0 + p1 - e;
  return mode == 1 ? (a + s - 1) / s + 1 : (a >= 0 ? a / s : -((-a + s - 1) / s)) + 1;  // EXPLICIT_ROUND_UP | DOWN
}
int64_t sizeAt(Dims const& d, int i, int64_t other) { return i < d.nbDims ? d.d[i] : other; }
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
    hostError(c, "input " + text(s) + " has too few dimensions");
    return o->unknown(x->ty());
  }
  Dims pre = v.mPrePadding.nbDims ? v.mPrePadding : v.mPaddingNd,
       post = v.mPostPadding.nbDims ? v.mPostPadding : v.mPaddingNd;
  int b = s.size() - n;
  s[b - 1] = v.mNbOutputMaps;
  for (int i = 0; i < n; i++) {
    int64_t st = sizeAt(v.mStrideNd, i, 1), d = sizeAt(v.mDilationNd, i, 1), p0 = sizeAt(pre, i, 0),
            p1 = sizeAt(post, i, 0);
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
    r = q->val() ? *q->val() : Shape(q->sh()[0], kUnknown);
  } else if (fixed) {
    have = true;
    r = shape(v.mReshapeDimensions);
  }
  if (have) {
    int wild = -1;
    bool ok = known;
    int64_t have_ = 1, want = known ? volume(s) : -1;
    for (size_t i = 0; i < r.size(); i++) {
      if (r[i] == 0 && v.mZeroIsPlaceholder) {
        if (known && i < s.size()) r[i] = s[i];
        else {
          if (known) hostError(c, "reshape's 0 at " + std::to_string(i) + " of " + text(s));
          r[i] = kUnknown;
        }
        if (r[i] < 0) r[i] = kUnknown;
      } else if (r[i] == -1) {
        if (wild >= 0) hostError(c, "two -1 in a reshape");
        wild = i;
      }
    }
    for (size_t i = 0; i < r.size(); i++)
      if ((int)i != wild) {
        if (r[i] == kUnknown) have_ = -1;
        else if (have_ >= 0) have_ *= r[i];
      }
    if (wild >= 0) {
      if (want >= 0 && have_ > 0) {
        if (want % have_) hostError(c, "reshape " + text(s) + " to " + text(r));
        r[wild] = want / have_;
      } else {
        // symbolic: the same unknown on both sides cancels if it is the only one
        int64_t a = 1, b = 1;
        int ua = 0, ub = 0;
        for (int64_t d : s) {
          if (d < 0) ua++;
          else a *= d;
        }
        for (size_t i = 0; i < r.size(); i++)
          if ((int)i != wild) {
            if (r[i] == kUnknown) ub++;
            else b *= r[i];
          }
        r[wild] = (known && ua == 1 && ub == 1 && b && a % b == 0 && v.mZeroIsPlaceholder && !dyn) ? a / b : kUnknown;
      }
    } else if (want >= 0 && have_ >= 0 && want != have_) hostError(c, "reshape " + text(s) + " to " + text(r));
    for (auto& d : r) d = dimOf(d);
    s = r;
    known = true;
    (void)ok;
  }
  if (!known) return o->unknown(t);
  bool same = ident(v.mFirstTranspose, x->known() ? x->sh().size() : 8) && ident(v.mSecondTranspose, s.size());
  o->set(perm(s, v.mSecondTranspose), t, same ? x->val() : ShapeValues{});
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
      return q->val() ? *q->val() : std::vector<int64_t>(n, kUnknown);
    }
    return d.nbDims < 0 ? std::vector<int64_t>(n, kUnknown) : shape(d);
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
    std::vector<int64_t> st2(n, 0), sd2(n, 1);
    for (size_t i = 0; i < z.size(); i++) {
      int64_t k = z[i] < 0 ? z[i] + n : z[i];
      if (k < 0 || k >= (int64_t)n) {
        hostError(c, "slice axis");
        return o->unknown(t);
      }
      full[k] = i < sz.size() ? dimOf(sz[i]) : -1;
      st2[k] = i < st.size() ? st[i] : kUnknown;
      sd2[k] = i < sd.size() ? sd[i] : kUnknown;
    }
    s = full;
    st = st2;
    sd = sd2;
  } else {
    if (sz.size() != n) {
      hostError(c, "slice of " + text(x->sh()) + " with size of " + std::to_string(sz.size()));
      return o->unknown(t);
    }
    for (size_t i = 0; i < n; i++) s[i] = dimOf(sz[i]);
  }
  ShapeValues r;
  if (n == 1 && x->val() && s[0] >= 0 && st.size() == 1 && sd.size() == 1 && st[0] != kUnknown && sd[0] != kUnknown) {
    std::vector<int64_t> q;
    int64_t m = x->val()->size();
    bool ok = true;
    for (int64_t i = 0; i < s[0]; i++) {
      int64_t k = st[0] + i * sd[0];
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
  std::map<char, int64_t> m;
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
      m[term[i]] = p == m.end() ? x->sh()[i] : broadcastSize(c, p->second, x->sh()[i]);
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
    ShapeValues r;
    if (ds.size() == 1 && d->val() && i->val()) {
      std::vector<int64_t> q;
      int64_t n = d->val()->size();
      for (int64_t k : *i->val())
        q.push_back(k == kUnknown ? kUnknown : (k < -n || k >= n) ? kUnknown : (*d->val())[k < 0 ? k + n : k]);
      r = q;
    }
    return o->set(s, t, r);
  }
  if (mode == 1) return o->set(is, t);
  int64_t k = is.empty() ? 0 : is.back();
  if (k < 0) return o->unknown(t);
  s.assign(is.begin(), is.end() - 1);
  s.insert(s.end(), ds.begin() + std::min<int64_t>(ds.size(), b + k), ds.end());
  o->set(s, t);
}
void matmul(Core* c, GVMatrixMultiplyLayer& v) {
  auto *a = c->in[0], *b = c->in[1], *o = c->out[0];
  if (!a->known() || !b->known()) return o->unknown(a->ty());
  Shape x = a->sh(), y = b->sh(), m, n;
  int p = (int)v.mOperation[0], q = (int)v.mOperation[1];  // 0 none, 1 transpose, 2 vector
  auto cut = [&](Shape& s, int op, bool left, Shape& keep) -> std::pair<bool, int64_t> {
    if ((int)s.size() < (op == 2 ? 1 : 2)) {
      hostError(c, "matmul of " + text(s));
      return {false, -1};
    }
    int64_t k;
    if (op == 2) {
      k = s.back();
      s.pop_back();
    } else {
      int64_t l = s.back();
      s.pop_back();
      int64_t r = s.back();
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
  if (k1 >= 0 && k2 >= 0 && k1 != k2) hostError(c, "matmul of " + text(a->sh()) + " and " + text(b->sh()));
  if (x.size() != y.size()) {
    hostError(c, "matmul: batch ranks differ: " + text(a->sh()) + " and " + text(b->sh()));
    return o->unknown(a->ty());
  }
  Shape s;
  for (size_t i = 0; i < x.size(); i++) s.push_back(broadcastSize(c, x[i], y[i]));
  s.insert(s.end(), m.begin(), m.end());
  s.insert(s.end(), n.begin(), n.end());
  o->set(s, a->ty());
}
int64_t arith(int op, int64_t a, int64_t b) {
  if (a == kUnknown || b == kUnknown) return (op == 1 && (a == 0 || b == 0)) ? 0 : kUnknown;
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
      return b ? a / b : kUnknown;
    case 6: {
      int64_t r = 1;
      for (int64_t i = 0; i < b && i < 64; i++) r *= a;
      return r;
    }
    case 7:
      if (!b) return kUnknown;
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
  return kUnknown;
}
