"""Names that tell what code does: torch functions and methods, and classes and arguments of training repos."""

from __future__ import annotations

__all__ = [
    "ACTIVATIONS",
    "ARITHMETIC",
    "CONVOLUTIONS",
    "CREATORS",
    "DATA_CLASSES",
    "ELEMENTWISE_LAYERS",
    "FUNCTIONS",
    "KEEPING_RANK",
    "LABELS",
    "LIKE_CREATORS",
    "METHODS",
    "MODULE_BASES",
    "MODULE_OUTPUT",
    "NEW_CREATORS",
    "RANKS",
    "REDUCTIONS",
    "SAME_RANK",
    "SAME_SHAPE",
    "SEVERAL",
    "SOFTMAX_LAYERS",
    "TRACING",
    "TRAINING_CLASSES",
    "UNMISTAKABLE",
]


def _set(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Elementwise functions of one tensor.
ACTIVATIONS = _set(
    "abs acos acosh asin asinh atan atanh ceil celu cos cosh deg2rad elu erf erfc exp exp2 expm1 floor gelu "
    "hardsigmoid hardswish hardtanh leaky_relu log log10 log1p log2 logsigmoid mish neg rad2deg reciprocal relu "
    "relu6 round rsqrt selu sigmoid sign silu sin sinh softplus softsign sqrt square tan tanh trunc"
)
# Elementwise functions of several tensors, which broadcast.
ARITHMETIC = _set(
    "add sub subtract mul multiply div divide true_divide pow maximum minimum eq ne lt le gt ge less greater "
    "less_equal greater_equal logical_and logical_or logical_xor where fmod remainder atan2 lerp addcmul "
    "addcdiv"
)
REDUCTIONS = _set("sum mean prod amax amin argmax argmin all any std var norm logsumexp count_nonzero")
CREATORS = _set("zeros ones empty full")
LIKE_CREATORS = _set("zeros_like ones_like empty_like")
NEW_CREATORS = _set("new_zeros new_ones new_empty")

# Methods that only tensors have, and that return a tensor.
UNMISTAKABLE = _set(
    "permute unsqueeze contiguous expand expand_as view_as masked_fill softmax log_softmax sigmoid type_as "
    "detach index_select new_zeros new_ones new_empty new_full new_tensor scatter_add unflatten "
    "masked_scatter bmm clamp_min clamp_max relu tanh repeat_interleave addmm movedim triu tril masked_fill_ "
    "logical_not"
)
# Methods that return a tensor, including those that other classes have too.
METHODS = (
    ACTIVATIONS
    | ARITHMETIC
    | REDUCTIONS
    | UNMISTAKABLE
    | _set(
        "view reshape transpose flatten squeeze repeat float half double long int bool bfloat16 to clone clamp "
        "clip t matmul mm cumsum gather scatter scatter_ roll flip type cpu swapaxes swapdims narrow select "
        "unfold fill_ zero_ add_ mul_ sub_ div_ copy_ requires_grad_ inverse diagonal take nan_to_num isnan "
        "isfinite baddbmm dot outer bitwise_not"
    )
)
# Functions torch.<name> and torch.nn.functional.<name> that return one tensor.
FUNCTIONS = (
    (METHODS - _set("float half double long int bool bfloat16 to type cpu cuda view fill_ zero_ view_as t copy_"))
    | CREATORS
    | LIKE_CREATORS
    | _set(
        "tensor as_tensor from_numpy full_like arange linspace logspace eye rand randn randint randperm "
        "rand_like randn_like cat concat concatenate stack hstack vstack einsum linear conv1d conv2d conv3d "
        "conv_transpose2d conv_transpose1d conv_transpose3d batch_norm layer_norm group_norm instance_norm "
        "dropout pad interpolate grid_sample affine_grid max_pool2d avg_pool2d adaptive_avg_pool2d max_pool1d "
        "avg_pool1d max_pool3d avg_pool3d one_hot normalize embedding scaled_dot_product_attention glu "
        "pixel_shuffle pixel_unshuffle fold upsample softmin cosine_similarity cdist cross rms_norm bincount "
        "logit isclose isinf bitwise_and bitwise_or cumprod tensordot bernoulli multinomial diag cartesian_prod "
        "block_diag trace det searchsorted bucketize histc nonzero argwhere argsort rot90 flatten complex polar "
        "view_as_complex view_as_real Tensor FloatTensor LongTensor BoolTensor special.expit special.logit "
        "linalg.inv linalg.norm"
    )
)
# Functions and methods that return several tensors.
SEVERAL = _set(
    "split chunk unbind tensor_split meshgrid broadcast_tensors topk sort max min median mode kthvalue cummax cummin"
)

# Functions and layers that read a channels-last tensor without a copy.
CONVOLUTIONS = _set(
    "torch.nn.functional.conv2d torch.nn.functional.grid_sample torch.nn.functional.interpolate torch.conv2d "
    "torch.nn.functional.max_pool2d torch.nn.functional.avg_pool2d torch.nn.functional.conv_transpose2d "
    "torch.nn.functional.adaptive_avg_pool2d torch.nn.Conv2d torch.nn.ConvTranspose2d torch.nn.MaxPool2d "
    "torch.nn.AvgPool2d torch.nn.AdaptiveAvgPool2d torch.nn.BatchNorm2d torch.nn.Upsample "
    "torch.nn.functional.batch_norm"
)
# Layers of torch.nn that return one tensor for one tensor.
MODULE_OUTPUT = frozenset(
    f"torch.nn.{name}"
    for name in _set(
        "Linear Embedding LayerNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d InstanceNorm1d InstanceNorm2d "
        "InstanceNorm3d SyncBatchNorm RMSNorm ReLU GELU SiLU Mish Sigmoid Tanh Softmax LogSoftmax Softplus PReLU "
        "LeakyReLU ReLU6 Hardswish Hardsigmoid Hardtanh ELU Dropout Dropout2d Dropout3d Identity MaxPool1d MaxPool2d "
        "MaxPool3d AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool2d Upsample "
        "PixelShuffle PixelUnshuffle Flatten Unflatten Unfold Fold ZeroPad2d Bilinear Conv1d Conv2d Conv3d "
        "ConvTranspose1d ConvTranspose2d ConvTranspose3d Sequential"
    )
)
# Rank of the tensors that layers and functions take and return.
RANKS = {
    **{f"torch.nn.{name}": 3 for name in _set("Conv1d ConvTranspose1d")},
    **{
        f"torch.nn.{name}": 4
        for name in _set(
            "Conv2d ConvTranspose2d BatchNorm2d MaxPool2d AvgPool2d AdaptiveAvgPool2d AdaptiveMaxPool2d PixelShuffle "
            "PixelUnshuffle InstanceNorm2d"
        )
    },
    **{f"torch.nn.{name}": 5 for name in _set("Conv3d ConvTranspose3d BatchNorm3d MaxPool3d AvgPool3d")},
    **{
        f"torch.nn.functional.{name}": 4
        for name in _set("conv2d conv_transpose2d max_pool2d avg_pool2d adaptive_avg_pool2d")
    },
}
# Layers that keep the rank.
SAME_RANK = frozenset(
    f"torch.nn.{name}"
    for name in _set(
        "Linear LayerNorm RMSNorm GroupNorm BatchNorm1d BatchNorm2d BatchNorm3d ReLU GELU SiLU Sigmoid Tanh Softmax "
        "LogSoftmax Dropout Dropout2d Identity LeakyReLU ReLU6 Hardswish ELU Mish Softplus PReLU"
    )
)
# Functions and methods of one tensor that keep its shape.
SAME_SHAPE = ACTIVATIONS | _set(
    "softmax log_softmax softmin dropout layer_norm normalize clamp clip clamp_min clamp_max masked_fill contiguous "
    "clone detach float half double long int bool bfloat16 to type type_as cumsum cumprod logical_not bitwise_not "
    "nan_to_num isnan isfinite flip roll requires_grad_ triu tril logit cpu cuda zeros_like ones_like full_like "
    "rand_like randn_like batch_norm group_norm fill_ mul_ add_ sub_ div_"
)

# Functions and methods that keep the rank of their input, but not its sizes.
KEEPING_RANK = _set(
    "interpolate pad grid_sample linear gather index_select narrow repeat_interleave scatter scatter_add index_add "
    "take_along_dim tile pixel_shuffle pixel_unshuffle"
)
# Layers without parameters, and the functions that they compute.
ELEMENTWISE_LAYERS = {
    f"torch.nn.{name}": name.lower() for name in ("Sigmoid", "Tanh", "ReLU", "GELU", "SiLU", "Mish", "ReLU6")
}
# Those that take an axis where they are made.
SOFTMAX_LAYERS = {"torch.nn.Softmax": "softmax", "torch.nn.LogSoftmax": "log_softmax"}
# Suffixes of the names of classes that derive from torch.nn.Module.
MODULE_BASES = ("Module", "PreTrainedModel", "LightningModule", "PretrainedModel")
TRAINING_CLASSES = ("Loss", "Criterion", "HungarianMatcher", "Assigner", "Trainer", "Optimizer", "Evaluator")
DATA_CLASSES = ("Dataset", "DataLoader", "Collator", "Tokenizer", "ImageProcessor", "Augment")
LABELS = ("labels", "label", "targets", "target", "gt", "gts", "annotations")
# Names that code tests to learn whether a tracer or compiler runs it.
TRACING = _set(
    "is_tracing is_scripting is_exporting is_compiling is_in_onnx_export is_dynamo_compiling "
    "is_torchdynamo_compiling is_tracing_enabled is_torchscript is_jit is_torch_fx_proxy is_fx_tracing "
    "exportable is_export export_mode is_exportable is_scriptable no_jit"
)
