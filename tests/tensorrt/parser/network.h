// The network that the parser fills: one function for each layer, with the rule for its shape.
#pragma once

#include "plugins.h"

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
        c.in.push_back(x ? &tensorOf(*x) : nullptr);
        if (x) tensorOf(*x).users.push_back(&c);
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
    ITensor* addInput(char const* name, DataType t, DimsArgument d) noexcept override {
      auto* x = new Tensor;
      x->input = true;
      x->set(shape(d), t);
      x->v.setName(name);
      inputs.push_back(x);
      return x;
    }
    void markOutput(ITensor& t) noexcept override {
      tensorOf(t).output = true;
      outputs.push_back(&tensorOf(t));
    }
    void unmarkOutput(ITensor& t) noexcept override { tensorOf(t).output = false; }
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
    // The parser destroys its recorder and leaves it with the network: no later network may hand it out.
    IErrorRecorder* mine{};
    void setErrorRecorder(IErrorRecorder* r) noexcept override { recorder = mine = r; }
    IErrorRecorder* getErrorRecorder() const noexcept override { return mine; }
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
          c->out[0]->vals = eachElement({x}, [op](auto& a) {
            return a[0] == kUnknown ? kUnknown
                   : op == 4        ? std::abs(a[0])
                   : op == 5        ? -a[0]
                   : op == 20       ? int64_t(!a[0])
                                    : kUnknown;
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
    ILRNLayer* addLRN(ITensor& x, int64_t w, float a, float b, float k) noexcept { return lrn(x, w, a, b, k); }
    ILRNLayer* addLRN(ITensor& x, int32_t w, float a, float b, float k) noexcept { return lrn(x, w, a, b, k); }
    ILRNLayer* lrn(ITensor& x, int64_t w, float a, float b, float k) {
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
        if (!broadcastShape(c, c->in, s)) return c->out[0]->unknown(t);
        c->out[0]->set(s, t,
                       s.size() <= 1 && isInt(c->in[0]->ty())
                           ? eachElement(c->in, [op](auto& a) { return arith(op, a[0], a[1]); })
                           : ShapeValues{});
      });
      h->setOperation(op);
      return h;
    }
    ISelectLayer* addSelect(ITensor& q, ITensor& a, ITensor& b) noexcept override {
      return make<HSelectLayer>(LayerType::kSELECT, {&q, &a, &b}, 1, [](Core* c, auto*) {
        Shape s;
        DataType t = c->in[1]->ty();
        if (c->in[1]->ty() != c->in[2]->ty()) hostError(c, "types differ");
        if (!broadcastShape(c, c->in, s)) return c->out[0]->unknown(t);
        c->out[0]->set(
            s, t,
            s.size() <= 1 ? eachElement(c->in, [](auto& a) { return a[0] == kUnknown ? kUnknown
                                                                    : a[0]           ? a[1]
                                                                                     : a[2]; })
                          : ShapeValues{});
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
        c->out[0]->set({c->in[0]->known() ? (int64_t)c->in[0]->sh().size() : -1, -1}, DataType::kINT32);
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
            ShapeValues v = c->in[0]->val();
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
                int64_t d = x->sh()[k];
                if (k == a) s[k] = s[k] < 0 || d < 0 ? -1 : s[k] + d;
                else if (s[k] < 0) s[k] = d;
                else if (d >= 0 && d != s[k]) hostError(c, "sizes differ");
              }
              if (v && x->val()) v->insert(v->end(), x->val()->begin(), x->val()->end());
              else v.reset();
            }
            c->out[0]->set(s, t, s.size() == 1 ? v : ShapeValues{});
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
        ShapeValues v;
        if (x->sh().size() == 1 && x->val() && m == 1 && op <= 3) {
          int64_t r = op == 1;
          bool ok = true;
          int64_t k = 0;
          for (int64_t e : *x->val()) {
            if (e == kUnknown) ok = false;
            r = op == 0 ? r + e : op == 1 ? r * e : !k++ ? e : op == 2 ? std::max(r, e) : std::min(r, e);
          }
          v = std::vector<int64_t>{ok ? r : kUnknown};
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
        int64_t k = h->getK();
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
    IConstantLayer* addConstant(DimsArgument d, Weights w) noexcept override {
      auto* h = make<HConstantLayer>(LayerType::kCONSTANT, {}, 1, [](Core* c, HConstantLayer* h) {
        auto w = h->getWeights();
        ShapeValues v;
        Shape s = shape(h->getDimensions());
        if (w.values && w.count <= 4096) {
          std::vector<int64_t> q;
          for (int64_t i = 0; i < w.count; i++) {
            if (w.type == DataType::kINT32) q.push_back(((int32_t const*)w.values)[i]);
            else if (w.type == DataType::kBOOL) q.push_back(((bool const*)w.values)[i]);
#if TRT >= 900
            else if (w.type == DataType::kINT64) q.push_back(((int64_t const*)w.values)[i]);
#endif
          }
          if (isInt(w.type) && (int64_t)q.size() == w.count) v = q;
        }
        if (volume(s) != w.count) hostError(c, "constant of " + std::to_string(w.count) + " for " + text(s));
        c->out[0]->set(s, w.type, v);
      });
      h->setDimensions(d);
      h->setWeights(w);
      return h;
    }
    ISliceLayer* addSlice(ITensor& x, DimsArgument a, DimsArgument b, DimsArgument s) noexcept override {
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
        std::vector<int64_t> v;
        for (int64_t d : x->sh()) v.push_back(d < 0 ? kUnknown : d);
        c->out[0]->set({(int64_t)v.size()}, kSIZE, v);
      });
    }
    template <class H>
    H* convolution(LayerType t, ITensor& x, int64_t n, Dims const& k, Weights w, Weights b, bool de) {
      auto* h = make<H>(t, {&x}, 1, [de](Core* c, H* h) { conv(c, h->v, de); });
      h->v.mNbOutputMaps = n;
      h->v.mNbGroups = 1;
      h->setKernelSizeNd(k);
      h->setKernelWeights(w);
      h->setBiasWeights(b);
      return h;
    }
    IConvolutionLayer* addConvolutionNd(ITensor& x, int64_t n, DimsArgument k, Weights w, Weights b) noexcept {
      return convolution<HConvolutionLayer>(LayerType::kCONVOLUTION, x, n, k, w, b, false);
    }
    IConvolutionLayer* addConvolutionNd(ITensor& x, int32_t n, DimsArgument k, Weights w, Weights b) noexcept {
      return addConvolutionNd(x, (int64_t)n, k, w, b);
    }
    IDeconvolutionLayer* addDeconvolutionNd(ITensor& x, int64_t n, DimsArgument k, Weights w, Weights b) noexcept {
      return convolution<HDeconvolutionLayer>(LayerType::kDECONVOLUTION, x, n, k, w, b, true);
    }
    IDeconvolutionLayer* addDeconvolutionNd(ITensor& x, int32_t n, DimsArgument k, Weights w, Weights b) noexcept {
      return addDeconvolutionNd(x, (int64_t)n, k, w, b);
    }
    IPoolingLayer* addPoolingNd(ITensor& x, PoolingType t, DimsArgument k) noexcept override {
      auto* h = make<HPoolingLayer>(LayerType::kPOOLING, {&x}, 1, [](Core* c, HPoolingLayer* h) {
        auto* x = c->in[0];
        auto& v = h->v;
        if (!x->known()) return c->out[0]->unknown(x->ty());
        Shape s = x->sh();
        int n = v.mWindowSizeNd.nbDims;
        Dims pre = v.mPrePadding.nbDims ? v.mPrePadding : v.mPaddingNd,
             post = v.mPostPadding.nbDims ? v.mPostPadding : v.mPaddingNd;
        if ((int)s.size() < n + 1) {
          hostError(c, "pooling of " + text(s));
          return c->out[0]->unknown(x->ty());
        }
        for (int i = 0; i < n; i++) {
          int64_t& d = s[s.size() - n + i];
          d = window(d, v.mWindowSizeNd.d[i], sizeAt(v.mStrideNd, i, 1), 1, sizeAt(pre, i, 0), sizeAt(post, i, 0),
                     (int)v.mPaddingMode);
        }
        c->out[0]->set(s, x->ty());
      });
      h->setPoolingType(t);
      h->setWindowSizeNd(k);
      h->v.mAverageCountExcludesPadding = true;
      return h;
    }
    IPaddingLayer* addPaddingNd(ITensor& x, DimsArgument a, DimsArgument b) noexcept override {
      auto* h = make<HPaddingLayer>(LayerType::kPADDING, {&x}, 1, [](Core* c, HPaddingLayer* h) {
        auto* x = c->in[0];
        if (!x->known()) return c->out[0]->unknown(x->ty());
        Shape s = x->sh();
        auto &p = h->v.mPrePaddingNd, &q = h->v.mPostPaddingNd;
        for (int i = 0; i < p.nbDims; i++) {
          int64_t& d = s[s.size() - p.nbDims + i];
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
            if (s[i] >= 0) s[i] = (int64_t)std::floor(s[i] * h->v.mScales[i]);
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
            for (int64_t e : *q->val()) s.push_back(dimOf(e));
          } else if (q->known() && q->sh().size() == 1 && q->sh()[0] >= 0) s.assign(q->sh()[0], -1);
          else return c->out[0]->unknown(ty);
        }
        ShapeValues v;
        if (s.size() == 1 && s[0] >= 0 && s[0] < 4096 && (int)h->v.mOperation == 0 && c->in.size() > 2 && c->in[1] &&
            c->in[2] && c->in[1]->val() && c->in[2]->val()) {
          int64_t a = (*c->in[1]->val())[0], b = (*c->in[2]->val())[0];
          std::vector<int64_t> q;
          for (int64_t i = 0; i < s[0]; i++) q.push_back(a == kUnknown || b == kUnknown ? kUnknown : a + i * b);
          v = q;
        }
        c->out[0]->set(s, ty, v);
      });
      h->setDimensions(d);
      h->setOperation(op);
      return h;
    }
    IFillLayer* addFill(DimsArgument d, FillOperation op) noexcept override { return fill(d, op, DataType::kFLOAT); }
#if TRT >= 900
    IFillLayer* addFillV2(DimsArgument d, FillOperation op, DataType t) noexcept override { return fill(d, op, t); }
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
  if ((int)t == 0) l->trip = &tensorOf(x);
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
      hostError(c, "branches differ in rank: " + text(a->sh()) + " and " + text(b->sh()));
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
