"""The ONNX ops that TensorRT's parser knows: one line per op.

    "Op": op(first version, "documented types", restriction, ...)

The words for types are those of ``documented.allowed_types``: ``float`` is FLOAT, FLOAT16 and, from 9.0, BFLOAT16,
``half`` the first two alone, ``int`` INT32 and, from 9.0, INT64; ``int@8.6`` holds from 8.6 on. They are the types of
the first input unless ``data=`` names another. What is not here is parsed by no version.
"""

from __future__ import annotations

from dataclasses import dataclass

from svexport.tensorrt.support import rule as m
from svexport.tensorrt.support import rules as r
from svexport.tensorrt.support.rule import Rule
from svexport.tensorrt.support.target import Version, version

__all__ = ["INSTEAD", "OPERATORS", "Operator", "is_parsed"]


@dataclass(frozen=True)
class Operator:
    """What is known of an ONNX op.

    Attributes:
        first: the first version that parses it.
        types: documented types of its data, in words; empty for any.
        data: the input that they are the types of.
        rules: its restrictions.
    """

    first: Version
    types: str
    data: int
    rules: tuple[Rule, ...]


def is_parsed(name: str, version: Version) -> bool:
    """Whether a version has an importer for nodes of that op_type, whatever their domain."""
    return name in OPERATORS and OPERATORS[name].first <= version


def op(first: str, types: str, *rules: Rule, data: int = 0) -> Operator:
    return Operator(version(first), types, data, rules)


# Restrictions that several ops share.
NO_BOOL = m.refused("BOOL", inputs=(0, 1))
# Before opset 7 only equal ranks; and from 10.0 on not even those, for elementwise ops.
OLD = (m.within(r.OLD_BROADCAST, before="10.0"), m.within(r.OLD_ELEMENTWISE, since="10.0"))
NO_INT = m.refused("INT32", "INT64", inputs=(0, 1))
UNARY = m.refused("INT32", "INT64", "BOOL")
ACTIVATION = m.refused("INT32", "BOOL")
REDUCE_BOOL = (m.refused("BOOL", before="10.0", kind="builder"), m.refused("BOOL", since="10.0"))
REDUCE = (r.REDUCE_AXES, *REDUCE_BOOL)  # axes are an input from opset 13 or 18 on
POOL = (m.rank(0, 3, 4, 5), m.all_ones("dilations"), m.within(r.POOL_CEIL, kind="silent"))
LP = m.attribute("p", 2, 1, 2)
QUANTIZED = (
    m.needs_input(2, "zero_point", before="9.0"),
    r.ZERO_POINT,
    r.SCALES,
    m.within(r.SCALAR, since="10.0", kind="silent"),
)
LAYOUT = m.attribute("layout", 0, 0, kind="silent", todo="export with batch_first=False: layout is not read")
AS_FLOAT = "cast to FLOAT before it, and back"
RANDOM = m.no_type("dtype", "BFLOAT16", "DOUBLE")
RANDOM_LIKE = (RANDOM, m.computed(0, "input", before="10.11"))
RESIZE_MODE = (
    m.attribute("mode", "nearest", "nearest", "linear", before="8.5"),
    m.attribute("mode", "nearest", "nearest", "linear", "cubic", since="8.5"),
)
COORDINATES = m.attribute(
    "coordinate_transformation_mode",
    "half_pixel",
    *("half_pixel", "pytorch_half_pixel", "tf_half_pixel_for_nn", "asymmetric", "align_corners"),
)
NEWER_RESIZE = tuple(
    m.attribute(name, default, default, todo=todo, **limits)
    for name, default, todo in [
        ("antialias", 0, "svexport.export writes antialiased resizes with other ops"),
        ("keep_aspect_ratio_policy", "stretch", "give the sizes as they come out"),
    ]
    for limits in ({"before": "10.0", "kind": "silent"}, {"since": "10.0"})
)
GRID_MODE = m.attribute(
    "mode",
    "bilinear",
    *("bilinear", "nearest", "bicubic"),
    kind="silent",
    todo="write the names of opset 16: the parser takes linear and cubic, as opset 20 calls them, for nearest",
)

OPERATORS: dict[str, Operator] = {
    "Abs": op("8.2", "float int", m.refused("BOOL")),
    "Acos": op("8.2", "float", UNARY),
    "Acosh": op("8.2", "float", UNARY),
    "Add": op("8.2", "float int", NO_BOOL, *OLD),
    "And": op("8.2", "bool", *OLD),
    "ArgMax": op("8.2", "float int@8.6", m.refused("INT32", before="8.6")),
    "ArgMin": op("8.2", "float int@8.6", m.refused("INT32", before="8.6")),
    "Asin": op("8.2", "float", UNARY),
    "Asinh": op("8.2", "float", UNARY),
    "Atan": op("8.2", "float", UNARY),
    "Atanh": op("8.2", "float", UNARY),
    "Attention": op(
        "10.14",
        "float",
        m.rank(0, 4, kind="documented"),
        m.rank(1, 4, kind="documented"),
        m.rank(2, 4, kind="documented"),
        m.rank(3, 4, kind="documented"),
        m.no_input(4, "past_key", kind="documented"),
        m.no_input(5, "past_value", kind="documented"),
        m.no_input(6, "nonpad_kv_seqlen", kind="documented"),
        m.no_output(1, "present_key", kind="documented"),
        m.no_output(2, "present_value", kind="documented"),
        m.no_output(3, "qk_matmul_output", kind="documented"),
        m.attribute("softcap", 0.0, 0.0),
        m.without("softmax_precision"),
    ),
    "AveragePool": op("8.2", "float int8", *POOL, m.within(r.AVERAGE_PADS, before="8.5")),
    "BatchNormalization": op(
        "8.2",
        "float",
        m.attribute("training_mode", 0, 0, before="8.5", kind="silent", todo="export in eval mode"),
        m.attribute("training_mode", 0, 0, since="8.5", todo="export in eval mode"),
        m.no_output(1, "running_mean"),
        m.within(r.HALF_STATISTICS, before="10.0", kind="builder"),
    ),
    "BlackmanWindow": op("10.4", ""),
    "Cast": op("8.2", "float int int8 bool uint8@8.5", m.no_type("to", "UINT8", before="8.5")),
    "CastLike": op("9.1", "float int int8 bool uint8"),
    "Ceil": op("8.2", "float", UNARY),
    "Celu": op("8.2", "float", m.only("FLOAT", kind="builder")),
    "Clip": op("8.2", "float int", m.refused("BOOL", "INT8"), m.within(r.CLIP_BOUNDS, before="8.5", kind="silent")),
    "Concat": op("8.2", "float int int8 bool"),
    "Constant": op(
        "8.2",
        "",
        m.without("sparse_value", "value_string", "value_strings"),
        m.within(r.VALUE_INT, before="9.2", kind="silent"),
    ),
    "ConstantOfShape": op("8.2", ""),
    "Conv": op("8.2", "float int8", m.constant(2, "B", before="8.5"), r.KERNEL_SHAPE),
    "ConvTranspose": op(
        "8.2",
        "float int8",
        m.constant(2, "B", before="8.5"),
        m.rank(0, 3, 4, 5),
        m.within(r.OUTPUT_SHAPE, kind="silent"),
    ),
    "Cos": op("8.2", "float", UNARY),
    "Cosh": op("8.2", "float", UNARY),
    "CumSum": op("8.2", "float", m.constant(1, "axis", before="10.8")),
    "DeformConv": op(
        "10.1", "half", m.rank(0, 3, 4), r.PAIRED_PADS, m.only("FLOAT", "FLOAT16"), m.same_types(0, 1, 2, 3, 4)
    ),
    "DepthToSpace": op("8.2", "float int", m.rank(0, 4), m.refused("BOOL")),
    "DequantizeLinear": op(
        "8.2", "quantized", *QUANTIZED, m.refused("UINT8", since="8.5"), m.within(r.ODD_INT4, since="10.0")
    ),
    "Div": op("8.2", "float int", NO_BOOL, *OLD),
    "Dropout": op("8.2", "float", m.constant(2, "training_mode"), r.DROPOUT),
    "Einsum": op(
        "8.2",
        "float",
        r.EINSUM_LETTERS,
        m.within(r.EINSUM_PLAIN, before="9.0", kind="builder"),
        m.within(r.EINSUM_DIAGONAL, before="10.12", kind="builder"),
        m.within(r.EINSUM_SIZES, before="10.12", kind="documented"),
        m.refused("INT32", "INT64", since="10.15"),
    ),
    "Elu": op("8.2", "float int8", ACTIVATION),
    "Equal": op("8.2", "float int bool@8.5", m.refused("BOOL", inputs=(0, 1), before="8.5"), *OLD),
    "Erf": op("8.2", "float", UNARY),
    "Exp": op("8.2", "float", UNARY),
    "Expand": op("8.2", "float int bool", m.rank(1, 1)),
    "EyeLike": op("8.2", "float int bool", m.rank(0, 2), m.static(0)),
    "Flatten": op("8.2", "float int bool"),
    "Floor": op("8.2", "float", UNARY),
    "Gather": op("8.2", "float int int8 bool@8.5", m.refused("BOOL", before="8.5")),
    "GatherElements": op("8.2", "float int int8 bool@8.5", m.refused("BOOL", before="8.5")),
    "GatherND": op("8.2", "float int int8 bool@8.5", m.refused("BOOL", before="8.5")),
    "Gelu": op("10.0", "float int"),
    "Gemm": op(
        "8.2",
        "float int8",
        m.rank(0, 2),
        m.rank(1, 2),
        NO_INT,
        r.OLD_BIAS,
        m.within(r.HALF_FACTORS, before="10.2", kind="builder"),
    ),
    "GlobalAveragePool": op("8.2", "float int8"),
    "GlobalLpPool": op("8.2", "float int8", m.attribute("p", 2, 2, 4, kind="silent")),
    "GlobalMaxPool": op("8.2", "float int8"),
    "Greater": op("8.2", "float int", NO_BOOL, *OLD),
    "GreaterOrEqual": op("8.2", "float int", NO_BOOL),
    "GridSample": op("8.5", "half", m.rank(0, 4, kind="builder"), GRID_MODE, m.refused("BOOL", inputs=(0, 1))),
    "GroupNormalization": op("8.6", "float", m.rank(0, 3, 4, 5, 6, 7, 8)),
    "GRU": op(
        "8.2", "float", r.directions(2), LAYOUT, m.refused("FLOAT16", before="10.2", kind="builder", todo=AS_FLOAT)
    ),
    "HammingWindow": op("10.4", ""),
    "HannWindow": op("10.4", ""),
    "Hardmax": op("9.2", "float", m.refused("INT32", "INT64", "INT8", "BOOL")),
    "HardSigmoid": op("8.2", "float int8", ACTIVATION),
    "HardSwish": op(
        "8.4", "float int8@8.5", m.refused("BOOL"), m.only("FLOAT", "FLOAT16", "INT8", since="8.5", before="10.15")
    ),
    "Identity": op("8.2", "float int int8 bool"),
    "If": op(
        "8.2",
        "",
        r.IF_COUNT,
        m.within(r.IF_NAMES, before="8.4"),
        m.within(r.IF_NAMES, since="8.4", kind="documented"),
        m.within(r.IF_RANKS, kind="builder"),
    ),
    "ImageScaler": op("8.2", "float"),
    "InstanceNormalization": op(
        "8.2",
        "float",
        m.constant(1, "scale", before="10.0"),
        m.constant(2, "B", before="10.0"),
        m.refused("FLOAT16", "BFLOAT16", inputs=(1, 2), before="10.0", kind="silent", todo=AS_FLOAT),
        m.rank(0, 3, 4, 5, before="10.0"),
        m.same_types(0, 1, 2, since="10.0"),
    ),
    "IsInf": op("8.6", "float", m.only("FLOAT", "FLOAT16", since="8.6", before="9.0")),
    "IsNaN": op("8.2", "float int"),
    "LayerNormalization": op("8.6", "float", m.no_output(1, "Mean"), m.no_output(2, "InvStdDev")),
    "LeakyRelu": op("8.2", "float int8", ACTIVATION),
    "Less": op("8.2", "float int", NO_BOOL, *OLD),
    "LessOrEqual": op("8.2", "float int", NO_BOOL),
    "Log": op("8.2", "float", UNARY),
    "LogSoftmax": op("8.2", "float"),
    "Loop": op(
        "8.2",
        "",
        m.within(r.LOOP_STATES, kind="documented"),
        m.within(r.LOOP_SCANS, kind="documented"),
        r.LOOP_GIVEN,
        m.within(r.LOOP_CONDITION, kind="silent"),
        m.within(r.LOOP_COUNTER, before="8.6", kind="silent"),
    ),
    "LpNormalization": op("8.2", "float", LP, m.refused("BOOL", "INT8", "INT32", "INT64")),
    "LpPool": op("8.2", "float int8", *POOL, LP, m.refused("BOOL", "INT8", "INT32", "INT64")),
    "LRN": op("8.2", "float"),
    "LSTM": op("8.2", "float", m.attribute("input_forget", 0, 0), r.directions(3), LAYOUT, r.CLIPPED_CELL),
    "MatMul": op("8.2", "float", NO_INT, m.within(r.VECTOR_FIRST, kind="silent")),
    "Max": op("8.2", "float int", NO_BOOL, *OLD),
    "MaxPool": op("8.2", "float int8", *POOL, m.no_output(1, "Indices")),
    "Mean": op("8.2", "float int", *OLD),
    "MeanVarianceNormalization": op("8.5", "float", m.refused("BOOL", "INT8", "INT32", "INT64")),
    "Min": op("8.2", "float int", NO_BOOL, *OLD),
    "Mish": op("10.0", "half", m.only("FLOAT", "FLOAT16")),
    "Mod": op("8.5", "float int", r.MOD, r.ROUNDED_QUOTIENT),
    "Mul": op("8.2", "float int", NO_BOOL, *OLD),
    "Neg": op("8.2", "float int", m.refused("BOOL")),
    "NonMaxSuppression": op(
        "8.2",
        "half",
        m.rank(0, 3),
        m.rank(1, 3),
        m.constant(2, "max_output_boxes_per_class", before="8.5"),
        m.constant(3, "iou_threshold", before="8.5"),
        m.constant(4, "score_threshold", before="8.5"),
        m.within(r.PADDED, before="8.5", kind="documented"),
    ),
    "NonZero": op(
        "8.5", "float int int8 bool", m.only("FLOAT", "FLOAT16", "BFLOAT16", "INT32", "INT64", "INT8", "BOOL")
    ),
    "Not": op("8.2", "bool"),
    "OneHot": op(
        "8.5",
        "float int bool",
        m.foldable(1, "depth", kind="builder"),
        m.only("INT32", "INT64", inputs=(1,), before="8.6"),
        data=2,
    ),
    "Or": op("8.2", "bool", *OLD),
    "Pad": op(
        "8.2",
        "float int int8",
        m.attribute("mode", "constant", "constant", "reflect", "edge", before="10.0"),
        m.constant(3, "axes", before="10.4"),
        r.NEGATIVE_PADS,
    ),
    "ParametricSoftplus": op("8.2", "float int8", ACTIVATION),
    "Pow": op(
        "8.2",
        "float int@10.12",
        NO_BOOL,
        *OLD,
        m.refused("INT32", "INT64", inputs=(0, 1), before="10.8"),
        m.refused("INT32", "INT64", since="10.8", before="10.12"),
    ),
    "PRelu": op("8.2", "float int8", NO_INT, r.OLD_BROADCAST),
    "QuantizeLinear": op("8.2", "float", *QUANTIZED, m.within(r.UINT8_ZERO_POINT, kind="silent")),
    "RandomNormal": op("8.5", "", RANDOM),
    "RandomNormalLike": op("8.5", "float", *RANDOM_LIKE),
    "RandomUniform": op("8.2", "", RANDOM),
    "RandomUniformLike": op("8.2", "float", *RANDOM_LIKE),
    "Range": op("8.2", "float int", m.only("FLOAT", "INT32", "INT64"), m.same_types(0, 1, 2)),
    "Reciprocal": op("8.2", "float", UNARY),
    "ReduceL1": op("8.2", "float int@9.0", *REDUCE),
    "ReduceL2": op("8.2", "float int@9.0", *REDUCE),
    "ReduceLogSum": op(
        "8.2",
        "float int@9.0",
        *REDUCE,
        m.within(r.ALL_AXES, before="10.0", kind="silent"),
        m.within(r.NOOP, kind="silent"),
    ),
    "ReduceLogSumExp": op("8.2", "float int@9.0", m.within(r.AXES_AFTER_EXP, kind="silent"), *REDUCE_BOOL),
    "ReduceMax": op("8.2", "float int@9.0", *REDUCE),
    "ReduceMean": op("8.2", "float int@9.0", *REDUCE),
    "ReduceMin": op("8.2", "float int@9.0", *REDUCE),
    "ReduceProd": op("8.2", "float int@9.0", *REDUCE),
    "ReduceSum": op(
        "8.2",
        "float int@9.0",
        *REDUCE,
        m.within(r.ALL_AXES, before="10.0", kind="silent"),
        m.within(r.NOOP, before="10.0", kind="silent"),
    ),
    "ReduceSumSquare": op("8.2", "float int@9.0", *REDUCE, m.within(r.NOOP, kind="silent")),
    "Relu": op("8.2", "float int8 int@9.0", m.refused("INT32", before="9.0"), m.refused("BOOL")),
    "Reshape": op("8.2", "float int int8 bool"),
    "Resize": op(
        "8.2",
        "float",
        *RESIZE_MODE,
        COORDINATES,
        r.RESIZE_NEAREST,
        m.within(r.RESIZE_NOT_NEAREST, kind="silent"),
        r.RESIZE_LINEAR,
        r.RESIZE_CUBIC,
        r.RESIZE_AXES,
        m.within(r.RESIZE_CORNERS, kind="silent"),
        *NEWER_RESIZE,
        m.constant(2, "scales", before="8.4"),
        m.within(r.COMPUTED_SCALES, since="8.4", kind="silent"),
        m.within(r.SIZES_OF_TENSORFLOW, since="8.5"),
        m.refused("INT32", before="8.5"),
        m.refused("BOOL"),
    ),
    "ReverseSequence": op("8.2", "float int@8.6 int8@8.6 bool@8.6", m.static(0, before="8.6")),
    "RMSNormalization": op("10.15", "float"),
    "RNN": op("8.2", "float", r.directions(1), LAYOUT),
    "RoiAlign": op("8.5", "half"),
    "RotaryEmbedding": op("10.15", "float"),
    "Round": op("8.2", "float int8", UNARY),
    "ScaledTanh": op("8.2", "float int8", ACTIVATION),
    "Scan": op("8.2", ""),
    "Scatter": op("8.2", "float int int8", m.within(r.SCATTERED, since="8.4")),
    "ScatterElements": op(
        "8.2", "float int int8", m.within(r.REDUCTION, before="10.0", kind="silent"), m.within(r.SCATTERED, since="8.4")
    ),
    "ScatterND": op(
        "8.2",
        "float int int8",
        m.within(r.REDUCTION, before="10.0", kind="silent"),
        m.within(r.REDUCTION_GIVEN, since="10.0", before="10.2"),
        m.within(r.REDUCTION, since="10.2"),
    ),
    "Selu": op("8.2", "float int8", ACTIVATION),
    "Shape": op("8.2", "float int int8 bool", m.within(r.SHAPE_PART, before="10.0", kind="silent")),
    "Shrink": op("8.4", "float int", m.refused("BOOL")),
    "Sigmoid": op("8.2", "float int8", ACTIVATION),
    "Sign": op("8.2", "float int int8", m.refused("INT32", before="9.0"), m.refused("BOOL")),
    "Sin": op("8.2", "float", UNARY),
    "Sinh": op("8.2", "float", UNARY),
    "Size": op("8.2", "float int int8 bool"),
    "Slice": op("8.2", "float int int8 bool", m.foldable(3, "axes", before="10.3"), r.SLICE_AXES),
    "Softmax": op("8.2", "float"),
    "Softplus": op("8.2", "float int8", ACTIVATION),
    "Softsign": op("8.2", "float int8", ACTIVATION),
    "SpaceToDepth": op("8.2", "float int", m.rank(0, 4), m.refused("BOOL")),
    "Split": op("8.2", "float int bool", m.within(r.UNEVEN_SPLIT, since="10.0")),
    "Sqrt": op("8.2", "float", UNARY),
    "Squeeze": op("8.2", "float int int8 bool", m.constant(1, "axes", before="10.7"), r.SQUEEZE),
    "STFT": op(
        "10.5", "half", m.constant(1, "frame_step", kind="documented"), m.constant(2, "window", kind="documented")
    ),
    "Sub": op("8.2", "float int", NO_BOOL, *OLD),
    "Sum": op("8.2", "float int", NO_BOOL, *OLD),
    "Swish": op("11.0", ""),
    "Tan": op("8.2", "float", UNARY),
    "Tanh": op("8.2", "float int8", ACTIVATION),
    "TensorScatter": op(
        "10.15", "float", m.rank(0, 4, kind="documented"), m.attribute("axis", -2, -2, kind="documented")
    ),
    "ThresholdedRelu": op("8.2", "float int8", ACTIVATION),
    "Tile": op("8.2", "float int bool"),
    "TopK": op(
        "8.2",
        "float int@8.6",
        m.constant(1, "K", before="8.6"),
        m.within(r.TOPK_K, kind="documented"),
        m.attribute("largest", 1, 1, kind="silent", before="8.5", todo="negate input and values: largest is not read"),
        m.attribute("sorted", 1, 1, kind="documented"),
        m.refused("INT32", before="8.6"),
    ),
    "Transpose": op("8.2", "float int int8 bool"),
    "Trilu": op("8.5", "float int int8 bool", m.rank(0, 2, 3, before="8.6"), m.within(r.UPPER, kind="silent")),
    "Unsqueeze": op("8.2", "float int int8 bool", m.foldable(1, "axes", before="10.7"), r.EMPTY_AXES),
    "Upsample": op(
        "8.2",
        "float",
        m.constant(1, "scales", before="8.4"),
        m.within(r.COMPUTED_SCALES, since="8.4", kind="silent"),
        r.RESIZE_LINEAR,
        m.refused("INT32", before="8.5"),
        m.refused("BOOL"),
    ),
    "Where": op("8.2", "float int bool@8.5", m.refused("BOOL", inputs=(1, 2), before="8.5"), data=1),
    "Xor": op("8.4", "bool", *OLD),
}

# TensorRT's own, which the tools that quantize for it write.
OPERATORS |= {
    "DistCollective": op("10.16", ""),
    "TRT_Attention": op("11.0", ""),
    "TRT_BlockQuantize": op("10.15", ""),
    "TRT_FP4DynamicQuantize": op("10.8", ""),
    "TRT_FP8DequantizeLinear": op("8.6", ""),
    "TRT_FP8QuantizeLinear": op("8.6", ""),
    "TRT_INT4DequantizeLinear": op("10.0", ""),
    "TRT_INT4QuantizeLinear": op("10.0", ""),
    "TRT_KVCacheUpdate": op("11.0", ""),
    "TRT_MoE": op("11.0", ""),
    "TRT_MXFP8DequantizeLinear": op("10.12", ""),
    "TRT_MXFP8DynamicQuantize": op("10.12", ""),
    "TRT_MXFP8QuantizeLinear": op("10.12", ""),
    "TRT_QuantizedAttention": op("10.15", ""),
}

INSTEAD = {
    "AffineGrid": "svexport.export writes F.affine_grid with other ops up to opset 19",
    "Col2Im": "svexport.export writes F.fold with other ops up to opset 17",
    "DeformConv": "svexport.export keeps torchvision's deform_conv2d as SvDeformConv2d, a plugin",
    "Det": "write it out for small matrices",
    "Einsum": "svexport.export writes torch.einsum as Transposes and MatMuls",
    "Gelu": "export at opset 19 or below, which writes it with other ops",
    "GridSample": "svexport.export keeps F.grid_sample as SvGridSample, a plugin; plugins=False writes other ops",
    "GroupNormalization": "export at opset 17 or below, which writes it with other ops",
    "IsInf": "svexport.export writes torch.isinf and nan_to_num with other ops up to opset 17",
    "LayerNormalization": "svexport.export writes F.layer_norm with other ops up to opset 16",
    "Mod": "write x - y * floor(x / y)",
    "Trilu": "svexport.export writes torch.triu and tril with other ops up to opset 13",
}
"""What to do without an op where there is more to say than that another opset may write it otherwise."""
