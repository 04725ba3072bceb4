#include "transformer_decoder.h"

#include <algorithm>

#include "cameras.h"
#include "plugin.h"

namespace svexport::plugin {
namespace {

// Inputs up to the features; lidar2img and the weights follow.
enum { kQuery, kQueryPos, kPoints, kFeatures };
enum { kClasses, kBoxes, kUpdatedPoints };

class TransformerDecoderPlugin final : public Plugin<TransformerDecoderPlugin, TransformerDecoderNode> {
 public:
  int min_inputs() const override { return num_inputs(); }
  int max_inputs() const override { return num_inputs(); }

  std::vector<std::string> weight_names() const override { return names(node.num_layers, layer_weights()); }
  std::vector<std::string> possible_weight_names() const override { return names(kMaxLayersHeld, kMaxLayerWeights); }

  const char* wrong_lengths(const std::vector<int64_t>& lengths) const override {
    const int64_t samples = int64_t{node.num_points} * (levels() + pool()) * node.num_groups;
    return wrong_weights([&](int i) { return lengths[i]; }, lengths[kChannels], lengths[kLogits] / samples);
  }

  const char* wrong_attributes() const override {
    for (int number : {node.num_layers, node.num_heads, node.num_points, node.num_groups}) {
      if (number < 1 || number > 1000) return "num_layers, num_heads, num_points and num_groups should be 1 to 1000";
    }
    if (const char* why = wrong_cameras(node)) return why;
    if (node.scales.empty() || levels() + pool() > kMaxCameraLevels) return "scales should be one number for each feature";
    return nullptr;
  }

  const char* shapes(const DimsExprs* in, int count, DimsExprs* out, IExprBuilder& builder) const override {
    for (int i : {+kQuery, +kQueryPos, +kPoints}) {
      if (in[i].nbDims != 3) return "query and query_pos should be (B, Q, C) and reference_points (B, Q, 3)";
    }
    for (int i = kFeatures; i < lidar2img(); ++i) {
      if (in[i].nbDims != 5 && in[i].nbDims != 6) {
        return "every feature should be (B, cams, C, H, W), or int8 in CHW32, (B, cams, ceil(C/32), H, W, 32)";
      }
    }
    if (in[lidar2img()].nbDims != 4) return "lidar2img should be (B, cams, 4, 4)";
    for (int i = first_weight(); i < count; ++i) {
      if (in[i].nbDims != 1 && in[i].nbDims != 2) return "every weight should have one or two dimensions";
    }
    const auto* query = in[kQuery].d;
    const auto length = [&](int i) {
      return weights_ ? builder.constant(weights_->length(i)) : in[first_weight() + i].d[0];
    };
    set_dims(out[kClasses], {query[0], query[1], length(num_weights() - 1)});
    set_dims(out[kBoxes], {query[0], query[1], length(code())});
    set_dims(out[kUpdatedPoints], {query[0], query[1], builder.constant(3)});
    return nullptr;
  }

  DataType output_type(int i, const DataType* inputs) const override {
    return i == kClasses ? inputs[kQuery] : inputs[kPoints];
  }

  bool supports(int i, const Descriptions& t) const override {
    if (i == kQuery) return is_linear_float(t[i]);
    if (i == kPoints || i == lidar2img()) return is_coordinates(t, i);
    if (i >= kFeatures && i < lidar2img()) {
      if (t[i].type != t[kFeatures].type || t[i].format != t[kFeatures].format) return false;
      if (is_int8(t, i, node.scales[i - kFeatures])) {
        return t[i].dims.nbDims == 6 ? is_linear(t[i]) : t[i].format == TensorFormat::kCHW32;
      }
      return t[i].dims.nbDims == 5 && is_strided_float(t[i]) &&
             (t[i].type == t[kQuery].type || t[i].type == DataType::kFLOAT);
    }
    if (i > t.inputs() + kClasses) return is_linear_like(t[i], t[kPoints]);
    return is_linear_like(t[i], t[kQuery]);
  }

  const char* wrong_sizes(const Tensors& t) const override {
    const Tensor &query = t.in(kQuery), &projections = t.in(lidar2img());
    const int64_t batch = query.sizes[0], queries = query.sizes[1], c = query.sizes[2], cams = projections.sizes[1];
    if (!std::equal(query.sizes, query.sizes + 3, t.in(kQueryPos).sizes)) return "query_pos should be (B, Q, C)";
    const int64_t points[] = {batch, queries, 3};
    if (!std::equal(points, points + 3, t.in(kPoints).sizes)) return "reference_points should be (B, Q, 3)";
    const int64_t matrices[] = {batch, cams, 4, 4};
    if (!std::equal(matrices, matrices + 4, projections.sizes)) return "lidar2img should be (B, cams, 4, 4)";
    if (c % node.num_heads != 0 || c % node.num_groups != 0) return "num_heads and num_groups should divide C";
    if (c > 1024 || c / node.num_heads > 64) return "C should be at most 1024, and 64 for each of num_heads";
    for (int i = kFeatures; i < lidar2img(); ++i) {
      const Tensor& feature = t.in(i);
      const bool blocks = feature.rank == 6;
      if (feature.sizes[0] != batch || feature.sizes[1] != cams || feature.sizes[2] != (blocks ? (c + 31) / 32 : c) ||
          (blocks && feature.sizes[5] != 32)) {
        return "every feature should be (B, cams, C, H, W), or int8 in CHW32, (B, cams, ceil(C/32), H, W, 32)";
      }
    }
    const auto length = [&](int i) { return weights_ ? weights_->length(i) : t.in(first_weight() + i).numel(); };
    if (t.out(kBoxes).sizes[2] != length(code()) || t.out(kClasses).sizes[2] != length(num_weights() - 1)) {
      return "boxes and classes should be of as many numbers as their last biases";
    }
    return wrong_weights(length, c, cams);
  }

  size_t workspace(const Tensors& t) const override { return transformer_decoder_workspace(Arguments(*this, t).decoder); }

  cudaError_t run(const Tensors& t, void* workspace, cudaStream_t stream) const override {
    if (weights_ && !on_device_) return cudaErrorNotReady;
    return transformer_decoder(Arguments(*this, t).decoder, workspace, stream);
  }

 private:
  // Most weights of a layer, and most layers that may have theirs as attributes.
  static constexpr int kMaxLayerWeights = sizeof(TransformerDecoderNode::kLayerWeights) / sizeof(const char*);
  static constexpr int kMaxLayersHeld = 12;
  static constexpr int kLastWeights = sizeof(TransformerDecoderNode::kLastWeights) / sizeof(const char*);
  // Biases of a layer whose lengths give the sizes of the other weights.
  static constexpr int kChannels = 3, kLogits = 7, kHidden = 21, kNumbers = 31;

  struct Arguments {
    Arguments(const TransformerDecoderPlugin& plugin, const Tensors& t) {
      const TransformerDecoderNode& node = plugin.node;
      for (int i = 0; i < plugin.levels(); ++i) scales[i] = scale_of(t, kFeatures + i, node.scales[i]);
      const Tensor* const weights = plugin.weights_ ? plugin.weight_views_.data() : &t.in(plugin.first_weight());
      decoder = {t.in(kQuery), t.in(kQueryPos), t.in(kPoints), &t.in(kFeatures), plugin.levels(), scales,
                 t.in(plugin.lidar2img()), weights, plugin.num_weights(), node.num_layers, node.num_heads,
                 node.num_points, node.num_groups, options_of(node), node.learned_offsets != 0,
                 node.residual_query_pos != 0, plugin.pool(), t.out(kClasses), t.out(kBoxes), t.out(kUpdatedPoints)};
    }
    TransformerDecoder decoder{};
    float scales[kMaxCameraLevels] = {};
  };

  int levels() const { return static_cast<int>(node.scales.size()); }
  bool pool() const { return node.pool != 0; }
  int lidar2img() const { return kFeatures + levels(); }
  int first_weight() const { return lidar2img() + 1; }
  int layer_weights() const { return kMaxLayerWeights - (node.learned_offsets ? 0 : 2); }
  int num_weights() const { return node.num_layers * layer_weights() + kLastWeights; }
  int num_inputs() const { return first_weight() + (weights_ ? 0 : num_weights()); }
  // The index of the last layer's bias of the box code.
  int code() const { return (node.num_layers - 1) * layer_weights() + kNumbers; }

  static std::vector<std::string> names(int layers, int of_layer) {
    std::vector<std::string> result;
    for (int i = 0; i < layers; ++i) {
      for (int j = 0; j < of_layer; ++j) {
        result.push_back("layers_" + std::to_string(i) + "_" + TransformerDecoderNode::kLayerWeights[j]);
      }
    }
    result.insert(result.end(), std::begin(TransformerDecoderNode::kLastWeights),
                  std::end(TransformerDecoderNode::kLastWeights));
    return result;
  }

  // What is wrong with weights of these lengths, in the order of the node's inputs.
  template <class Length>
  const char* wrong_weights(Length&& length, int64_t c, int64_t cams) const {
    const int64_t hidden = length(kHidden), numbers = length(code()), classes = length(num_weights() - 1);
    const int64_t logits = cams * node.num_points * (levels() + pool()) * node.num_groups, moves = 3 * node.num_points;
    if (c < 1 || c > 1 << 20 || cams < 1 || numbers < 6) return "no decoder has weights of these sizes";
    const int64_t layer[] = {3 * c * c, 3 * c, c * c,      c,      c,           c,       logits * c, logits, c * c,
                             c,         3 * c, c,          c,      c,           c * c,   c,          c,      c,
                             c,         c,     hidden * c, hidden, c * hidden,  c,       c,          c,      c * c,
                             c,         c * c, c,          numbers * c, numbers, moves * c, moves};
    const int64_t last[] = {c * c, c, c, c, c * c, c, c, c, classes * c, classes};
    for (int i = 0; i < num_weights(); ++i) {
      const int of_last = i - node.num_layers * layer_weights();
      if (length(i) != (of_last >= 0 ? last[of_last] : layer[i % layer_weights()])) {
        return "a weight does not fit the attributes, the other weights and the inputs";
      }
    }
    return nullptr;
  }
};

}  // namespace

SVEXPORT_PLUGIN(transformer_decoder, TransformerDecoderPlugin)

}  // namespace svexport::plugin
