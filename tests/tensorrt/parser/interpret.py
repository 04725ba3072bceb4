"""Runs with torch a network that the parser recorded, layer by layer as TensorRT documents them."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["DTYPES", "Unsupported", "run"]

# nvinfer1::DataType
DTYPES = {
    0: torch.float32,
    1: torch.float16,
    2: torch.int8,
    3: torch.int32,
    4: torch.bool,
    5: torch.uint8,
    6: torch.float8_e4m3fn,
    7: torch.bfloat16,
    8: torch.int64,
}
NUMPY = {0: np.float32, 1: np.float16, 2: np.int8, 3: np.int32, 4: np.bool_, 5: np.uint8, 8: np.int64}
NUMPY |= {6: np.uint8, 7: np.uint16}  # of those that numpy has not, the bits
Record = Mapping[str, Any]
"""A layer or a tensor as the host writes it."""
Plugin = Callable[[int, Sequence[Tensor]], Sequence[Tensor]]
"""Called with the number of a creator's call and the inputs of the plugin that it made."""


class Unsupported(Exception):
    """A layer, or an option of one, that is not interpreted; the message names it."""


class Layer:
    """A layer with the values of its inputs."""

    def __init__(self, record: Record, inputs: Sequence[Tensor | None]) -> None:
        self.record, self.inputs = record, inputs

    def __getitem__(self, name: str) -> Any:
        return self.record[name]

    def get(self, name: str, default: Any = None) -> Any:
        return self.record.get(name, default)

    @property
    def x(self) -> Tensor:
        return self.inputs[0]

    def input(self, index: int) -> Tensor | None:
        return self.inputs[index] if index < len(self.inputs) else None

    def numbers(self, index: int) -> list[int] | None:
        """An input as integers; None where it is not given."""
        value = self.input(index)
        return None if value is None else [int(v) for v in value.reshape(-1)]


def weights(record: Record, dims: Sequence[int] | None = None) -> Tensor:
    if record["type"] not in NUMPY:
        raise Unsupported("the type of a constant")
    array = np.frombuffer(bytes.fromhex(record.get("hex", "")), NUMPY[record["type"]])
    tensor = torch.from_numpy(array.copy())
    tensor = tensor.view(DTYPES[record["type"]])
    return tensor if dims is None else tensor.reshape([int(d) for d in dims])


def axes_of(mask: int, rank: int) -> list[int]:
    return [i for i in range(rank) if int(mask) >> i & 1]


def along(values: Tensor, axis: int, rank: int) -> Tensor:
    """A vector as a tensor that broadcasts along an axis."""
    return values.reshape([-1 if d == axis else 1 for d in range(rank)])


# One function for each kind of layer ----------------------------------------------------------------------------------


def clip(x: Tensor, a: float, b: float) -> Tensor:
    if x.is_floating_point():
        return x.clamp(torch.tensor(a).to(x.dtype).item(), torch.tensor(b).to(x.dtype).item())
    return x.double().clamp(a, b).to(x.dtype)


ACTIVATIONS: list[Callable[[Tensor, float, float], Tensor]] = [
    lambda x, a, b: F.relu(x),
    lambda x, a, b: torch.sigmoid(x),
    lambda x, a, b: torch.tanh(x),
    lambda x, a, b: torch.where(x >= 0, x, a * x),
    lambda x, a, b: torch.where(x >= 0, x, a * (torch.exp(x) - 1)),
    lambda x, a, b: torch.where(x > 0, b * x, b * (a * torch.exp(x) - a)),
    lambda x, a, b: x / (1 + x.abs()),
    lambda x, a, b: a * torch.log(torch.exp(b * x) + 1),
    clip,
    lambda x, a, b: (a * x + b).clamp(0, 1),
    lambda x, a, b: a * torch.tanh(b * x),
    lambda x, a, b: torch.where(x > a, x, torch.zeros_like(x)),
    lambda x, a, b: F.gelu(x),
    lambda x, a, b: F.gelu(x, approximate="tanh"),
]
UNARY = [
    *(torch.exp, torch.log, torch.sqrt, torch.reciprocal, torch.abs, torch.neg, torch.sin, torch.cos, torch.tan),
    *(torch.sinh, torch.cosh, torch.asin, torch.acos, torch.atan, torch.asinh, torch.acosh, torch.atanh, torch.ceil),
    *(torch.floor, torch.erf, torch.logical_not, torch.sign, torch.round, torch.isinf, torch.isnan),
]


def divide(a: Tensor, b: Tensor) -> Tensor:
    return torch.div(a, b) if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc")


ELEMENTWISE: list[Callable[[Tensor, Tensor], Tensor]] = [
    *(torch.add, torch.mul, torch.maximum, torch.minimum, torch.sub, divide, torch.pow),
    lambda a, b: torch.div(a, b, rounding_mode="floor"),
    *(torch.logical_and, torch.logical_or, torch.logical_xor, torch.eq, torch.gt, torch.lt),
]


def shuffle(layer: Layer) -> Tensor:
    y = layer.x.permute([int(d) for d in layer["FirstTranspose"][: layer.x.dim()]])
    shape = layer.numbers(1) if len(layer.inputs) > 1 else layer["ReshapeDimensions"]
    if shape is not None:
        keeps = layer.get("ZeroIsPlaceholder", 1)
        y = y.reshape([y.shape[i] if size == 0 and keeps else int(size) for i, size in enumerate(shape)])
    return y.permute([int(d) for d in layer["SecondTranspose"][: y.dim()]])


def gather(layer: Layer) -> Tensor:
    x, index = layer.x, layer.inputs[1].long()
    mode, batch = layer["Mode"], layer["NbElementWiseDims"]
    if mode == 0:
        axis = layer["GatherAxis"] % max(x.dim(), 1)
        index = torch.where(index < 0, index + x.shape[axis], index)
        if batch:
            pairs = zip(x.flatten(0, batch - 1), index.flatten(0, batch - 1), strict=True)
            taken = [one.index_select(axis - batch, i.reshape(-1)) for one, i in pairs]
            shape = (*x.shape[:axis], *index.shape[batch:], *x.shape[axis + 1 :])
            return torch.stack(taken).reshape(shape)
        taken = x.index_select(axis, index.reshape(-1))
        return taken.reshape((*x.shape[:axis], *index.shape, *x.shape[axis + 1 :]))
    if mode == 1:
        axis = layer["GatherAxis"] % x.dim()
        return torch.gather(x, axis, torch.where(index < 0, index + x.shape[axis], index))
    depth = index.shape[-1]
    index = torch.where(index < 0, index + torch.tensor(x.shape[batch : batch + depth]), index)
    rank = index.dim() - 1
    lead = [along(torch.arange(n), d, rank).expand(index.shape[:-1]) for d, n in enumerate(index.shape[:batch])]
    return x[(*lead, *(index[..., d] for d in range(depth)))]


def scatter(layer: Layer) -> Tensor:
    index, updates, y = layer.inputs[1].long(), layer.inputs[2], layer.x.clone()
    if layer["Mode"] == 0:
        axis = layer["Axis"]
        return y.scatter_(axis, torch.where(index < 0, index + y.shape[axis], index), updates)
    index = torch.where(index < 0, index + torch.tensor(y.shape[: index.shape[-1]]), index)
    y[tuple(index[..., d] for d in range(index.shape[-1]))] = updates
    return y


def slice_(layer: Layer) -> Tensor:
    x = layer.x
    start, size, stride = (layer.numbers(i) or layer[name] for i, name in ((1, "Start"), (2, "Size"), (3, "Stride")))
    if layer.input(5) is not None:
        axes = [v % x.dim() for v in layer.numbers(5)]

        def spread(values: Sequence[int], rest: Sequence[int]) -> list[int]:
            return [values[axes.index(d)] if d in axes else rest[d] for d in range(x.dim())]

        start, size, stride = spread(start, [0] * x.dim()), spread(size, x.shape), spread(stride, [1] * x.dim())
    fill = layer.input(4)
    for axis in range(x.dim()):
        index = torch.tensor([int(start[axis] + i * stride[axis]) for i in range(int(size[axis]))], dtype=torch.long)
        n, mode = x.shape[axis], layer["Mode"]
        outside = (index < 0) | (index >= n)
        if mode == 1:  # wrap
            index = index % n
        elif mode == 4 and n > 1:  # reflect
            index = index % (2 * n - 2)
            index = torch.where(index >= n, 2 * n - 2 - index, index)
        elif mode == 0 and outside.any():
            raise IndexError("a slice out of bounds")
        if not n:
            taken = x.new_zeros(*x.shape[:axis], len(index), *x.shape[axis + 1 :])
        else:
            taken = x.index_select(axis, index.clamp(0, n - 1))
        if mode == 3 and outside.any():  # fill
            value = torch.as_tensor(0 if fill is None else fill, dtype=x.dtype)
            taken = torch.where(along(outside, axis, x.dim()), value, taken)
        x = taken
    return x


def reduce(layer: Layer) -> Tensor:
    x, axes, keep = layer.x, axes_of(layer["ReduceAxes"], layer.x.dim()), bool(layer["KeepDimensions"])
    operation = layer["Operation"]
    if not axes:
        return x
    if operation == 1:
        for axis in reversed(axes):
            x = x.prod(axis, keepdim=keep, dtype=x.dtype)
        return x
    if operation == 0:
        return x.sum(axes, keepdim=keep, dtype=x.dtype)
    if not all(x.shape[axis] for axis in axes):
        raise Unsupported("a reduction of nothing")
    if operation == 4:
        return x.double().mean(axes, keepdim=keep).to(x.dtype)
    return (x.amax if operation == 2 else x.amin)(axes, keepdim=keep)


def topk(layer: Layer) -> list[Tensor]:
    (axis,) = axes_of(layer["ReduceAxes"], layer.x.dim())
    n = (layer.numbers(1) or [layer["K"]])[0]
    order = torch.sort(layer.x, dim=axis, descending=layer["Operation"] == 0, stable=True)
    return [order.values.narrow(axis, 0, n), order.indices.narrow(axis, 0, n).int()]


def matrix_multiply(layer: Layer) -> Tensor:
    a, b = layer.x, layer.inputs[1]
    left, right = layer["Operation0"], layer["Operation1"]  # 1: transposed, 2: a vector
    a = a.transpose(-1, -2) if left == 1 else a.unsqueeze(-2) if left == 2 else a
    b = b.transpose(-1, -2) if right == 1 else b.unsqueeze(-1) if right == 2 else b
    y = torch.matmul(a, b)
    y = y.squeeze(-1) if right == 2 else y
    return y.squeeze(-1 if right == 2 else -2) if left == 2 else y


def padding_of(layer: Layer, sizes: Sequence[int], kernel: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """Of a convolution or pooling: before, after, and what rounding up adds after that."""
    n = len(kernel)
    stride, dilation = layer.get("StrideNd") or [1] * n, layer.get("DilationNd") or [1] * n
    before, after = (layer[name] or layer["PaddingNd"] or [0] * n for name in ("PrePadding", "PostPadding"))
    window = [d * (k - 1) + 1 for d, k in zip(dilation, kernel)]
    mode, extra = layer["PaddingMode"], [0] * n
    if mode >= 2:  # SAME_UPPER, SAME_LOWER
        total = [max((math.ceil(s / t) - 1) * t + w - s, 0) for s, t, w in zip(sizes, stride, window)]
        small, large = [t // 2 for t in total], [t - t // 2 for t in total]
        before, after = (small, large) if mode == 2 else (large, small)
    elif mode == 1:  # EXPLICIT_ROUND_UP
        whole = [s + a + b for s, a, b in zip(sizes, before, after)]
        counts = [math.ceil((s - w) / t) + 1 for s, w, t in zip(whole, window, stride)]
        extra = [max((c - 1) * t + w - s, 0) for c, t, w, s in zip(counts, stride, window, whole)]
    return ([int(v) for v in before], [int(v) for v in after], [int(v) for v in extra])


def flat(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """Padding as ``F.pad`` takes it."""
    return [int(v) for pair in reversed(list(zip(before, after))) for v in pair]


def convolution(layer: Layer, transposed: bool = False) -> Tensor:
    x, n = layer.x, len(layer["KernelSizeNd"])
    groups, maps, kernel = layer["NbGroups"], int(layer["NbOutputMaps"]), [int(k) for k in layer["KernelSizeNd"]]
    weight, bias = layer.input(1), layer.input(2)
    if weight is None:
        lead = (x.shape[1], maps // groups) if transposed else (maps, x.shape[1] // groups)
        weight = weights(layer["KernelWeights"], [*lead, *kernel])
    if bias is None and layer["BiasWeights"]["count"]:
        bias = weights(layer["BiasWeights"])
    kernel = list(weight.shape[2:])
    stride = [int(v) for v in layer["StrideNd"] or [1] * n]
    dilation = [int(v) for v in layer["DilationNd"] or [1] * n]
    if not transposed:
        before, after, _ = padding_of(layer, x.shape[-n:], kernel)
        function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
        return function(F.pad(x, flat(before, after)), weight, bias, stride, 0, dilation, groups)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
    y = function(x, weight, bias, stride, 0, 0, groups, dilation)
    if layer["PaddingMode"] >= 2:  # cropped to size * stride
        total = [y.shape[2 + i] - x.shape[2 + i] * stride[i] for i in range(n)]
        small, large = [t // 2 for t in total], [t - t // 2 for t in total]
        before, after = (small, large) if layer["PaddingMode"] == 2 else (large, small)
    else:
        before, after, _ = padding_of(layer, x.shape[-n:], kernel)
    return F.pad(y, flat([-v for v in before], [-v for v in after]))


def pooling(layer: Layer) -> Tensor:
    kernel = [int(k) for k in layer["WindowSizeNd"]]
    n = len(kernel)
    lead, x = layer.x.shape[:-n], layer.x.reshape(1, -1, *layer.x.shape[-n:])
    before, after, extra = padding_of(layer, x.shape[-n:], kernel)
    stride = [int(v) for v in layer["StrideNd"] or [1] * n]
    whole = flat(before, [a + b for a, b in zip(after, extra)])
    if layer["PoolingType"] == 0:
        function = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[n - 1]
        y = function(F.pad(x.float(), whole, value=-math.inf), kernel, stride).to(x.dtype)
    else:
        average = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[n - 1]
        without = layer["AverageCountExcludesPadding"]
        counted = torch.ones_like(x) if without else F.pad(torch.ones_like(x), flat(before, after), value=1.0)
        total = average(F.pad(counted, whole if without else flat([0] * n, extra)), kernel, stride)
        y = average(F.pad(x, whole), kernel, stride) / total
    return y.reshape(*lead, *y.shape[-n:])


def cubic(distance: Tensor, a: float) -> Tensor:
    near = (a + 2) * distance**3 - (a + 3) * distance**2 + 1
    return torch.where(distance <= 1, near, a * distance**3 - 5 * a * distance**2 + 8 * a * distance - 4 * a)


def resize(layer: Layer) -> Tensor:
    x, scales = layer.x, layer.get("Scales") or []
    sizes = layer.numbers(1) or layer["OutputDimensions"] or [math.floor(s * q) for s, q in zip(x.shape, scales)]
    y = x.double()
    mode, transformation, a = layer["ResizeMode"], layer["CoordinateTransformation"], layer.get("CubicCoeff", -0.75)
    for axis in range(x.dim()):
        n, m = y.shape[axis], int(sizes[axis])
        scale = scales[axis] if scales else m / n
        if n == m and scale == 1:
            continue
        i = torch.arange(m, dtype=torch.float64)
        at = i * ((n - 1) / (m - 1) if m > 1 else 0)  # align_corners
        at = i / scale if transformation == 1 else (i + 0.5) / scale - 0.5 if transformation == 2 else at
        if m == 1 and layer.get("SelectorForSinglePixel"):
            at = torch.zeros(1, dtype=torch.float64)
        low = torch.floor(at)
        if mode == 0:
            rounding = (torch.floor(at + 0.5), torch.ceil(at - 0.5), low, torch.ceil(at))
            taps = [(rounding[layer.get("NearestRounding", 2)], torch.ones_like(at))]
        elif mode == 1:
            taps = [(low, 1 - (at - low)), (low + 1, at - low)]
        else:
            taps = [(low + q, cubic((at - low - q).abs(), a)) for q in (-1, 0, 1, 2)]
            if layer.get("ExcludeOutside"):
                inside = [(i, torch.where((i < 0) | (i >= n), 0.0, w)) for i, w in taps]
                total = torch.stack([w for _, w in inside]).sum(0)
                taps = [(i, w / total) for i, w in inside]
        parts = [y.index_select(axis, i.long().clamp(0, n - 1)) * along(w, axis, x.dim()) for i, w in taps]
        y = torch.stack(parts).sum(0)
    return y.to(x.dtype)


def scale(layer: Layer) -> Tensor:
    x = layer.x
    per_channel = [-1 if d == layer["ChannelAxis"] else 1 for d in range(x.dim())]
    shape = ([1] * x.dim(), per_channel, [1, *x.shape[1:]])[layer["Mode"]]

    def given(name: str, default: float) -> Tensor | float:
        return weights(layer[name], shape) if layer[name]["count"] else default

    return (x * given("Scale", 1) + given("Shift", 0)) ** given("Power", 1)


def one_hot(layer: Layer) -> Tensor:
    index, n = layer.x.long(), int(layer.inputs[2])
    axis = layer["Axis"] % (index.dim() + 1)
    hot = torch.stack([(index == v) | (index == v - n) for v in range(n)], axis)
    return torch.where(hot, layer.inputs[1][1], layer.inputs[1][0])


def quantization(layer: Layer) -> Tensor:
    x, step = layer.x, layer.inputs[1]
    if layer["out"][0]["type"] not in DTYPES:
        raise Unsupported("a quantized type")
    step = step.reshape(()) if step.numel() == 1 else along(step, layer["Axis"], x.dim()) if step.dim() == 1 else step
    if layer["kind"] == "Dequantize":
        return x.to(step.dtype) * step
    if layer["out"][0]["type"] == 6:
        return (x / step).clamp(-448, 448)  # rounded as it becomes fp8
    return torch.round(x / step).clamp(-128, 127)


def normalization(layer: Layer) -> Tensor:
    x, groups = layer.x, int(layer["NbGroups"])
    y = x.reshape(x.shape[0], groups, -1) if groups > 1 else x
    axes = [2] if groups > 1 else axes_of(layer["Axes"], x.dim())
    y = (y - y.mean(axes, keepdim=True)) / torch.sqrt(y.var(axes, unbiased=False, keepdim=True) + layer["Epsilon"])
    scale, bias = layer.inputs[1:3]
    if groups > 1 and scale.shape[1] == groups != x.shape[1]:
        return (y * scale.reshape(1, groups, 1) + bias.reshape(1, groups, 1)).reshape(x.shape)
    return y.reshape(x.shape) * scale + bias


def fill(layer: Layer) -> Tensor:
    if layer["Operation"]:
        raise Unsupported("random numbers")
    sizes = layer.numbers(0) if layer.input(0) is not None else [int(d) for d in layer["Dimensions"]]
    start, step = layer.input(1), layer.input(2)
    start = torch.tensor(float(layer["Alpha"])) if start is None else start
    step = torch.tensor(float(layer["Beta"])) if step is None else step
    y = start.reshape(()).expand(sizes).clone()
    for axis, n in enumerate(sizes):
        y = y + along(torch.arange(n) * step.reshape(-1)[axis if step.numel() > 1 else 0], axis, len(sizes))
    return y


def reverse_sequence(layer: Layer) -> Tensor:
    y, batch, axis = layer.x.clone(), layer["BatchAxis"], layer["SequenceAxis"]
    for i, n in enumerate(layer.inputs[1].tolist()):
        rest = axis - (axis > batch)
        y.select(batch, i).narrow(rest, 0, n).copy_(layer.x.select(batch, i).narrow(rest, 0, n).flip(rest))
    return y


def grid_sample(layer: Layer) -> Tensor:
    mode = ("nearest", "bilinear", "bicubic")[layer["InterpolationMode"]]
    padding = {0: "zeros", 2: "border", 3: "zeros", 4: "reflection"}[layer["SampleMode"]]
    return F.grid_sample(layer.x, layer.inputs[1], mode, padding, bool(layer["AlignCorners"]))


LAYERS: dict[str, Callable[[Layer], Tensor | Sequence[Tensor]]] = {
    "Activation": lambda layer: ACTIVATIONS[layer["ActivationType"]](
        layer.x, float(layer["Alpha"]), float(layer["Beta"])
    ),
    "Assertion": lambda layer: (),
    "Cast": lambda layer: layer.x,
    "Concatenation": lambda layer: torch.cat(layer.inputs, layer["Axis"]),
    "Constant": lambda layer: weights(layer["Weights"], layer["Dimensions"]),
    "Convolution": convolution,
    "Deconvolution": lambda layer: convolution(layer, transposed=True),
    "Dequantize": quantization,
    "Einsum": lambda layer: torch.einsum(layer["Equation"], *layer.inputs),
    "ElementWise": lambda layer: ELEMENTWISE[layer["Operation"]](layer.x, layer.inputs[1]),
    "Fill": fill,
    "Gather": gather,
    "GridSample": grid_sample,
    "Identity": lambda layer: layer.x,
    "IfConditionalInput": lambda layer: layer.x,
    "LRN": lambda layer: F.local_response_norm(
        layer.x, int(layer["WindowSize"]), layer["Alpha"], layer["Beta"], layer["K"]
    ),
    "MatrixMultiply": matrix_multiply,
    "NonZero": lambda layer: layer.x.nonzero().T.int(),
    "Normalization": normalization,
    "OneHot": one_hot,
    "Padding": lambda layer: F.pad(layer.x, flat(layer["PrePaddingNd"], layer["PostPaddingNd"])),
    "ParametricReLU": lambda layer: torch.where(layer.x >= 0, layer.x, layer.x * layer.inputs[1]),
    "Pooling": pooling,
    "Quantize": quantization,
    "Reduce": reduce,
    "Resize": resize,
    "ReverseSequence": reverse_sequence,
    "Scale": scale,
    "Scatter": scatter,
    "Select": lambda layer: torch.where(layer.x, layer.inputs[1], layer.inputs[2]),
    "Shape": lambda layer: torch.tensor(layer.x.shape),
    "Shuffle": shuffle,
    "Slice": slice_,
    "SoftMax": lambda layer: F.softmax(layer.x, axes_of(layer["Axes"], layer.x.dim())[0]),
    "TopK": topk,
    "Unary": lambda layer: UNARY[layer["Operation"]](layer.x),
}


# The network ----------------------------------------------------------------------------------------------------------

_INSIDE = ("Recurrence", "Iterator")


class Network:
    """A recorded network and the values of its tensors, made as they are asked for."""

    def __init__(self, record: Record, feeds: Mapping[str, Tensor], plugin: Plugin | None) -> None:
        self.layers: list[Record] = record["network"]
        self.plugin = plugin
        self.values = {t["id"]: feeds[t["name"]].to(DTYPES[t["type"]]) for t in record["inputs"]}
        self.makers = {t["id"]: layer for layer in self.layers for t in layer["out"]}
        self.users: dict[int, list[Record]] = {}
        for layer in self.layers:
            for t in layer["in"]:
                if t is not None:
                    self.users.setdefault(t["id"], []).append(layer)

    def value(self, tensor: Record | None) -> Tensor | None:
        if tensor is None:
            return None
        if tensor["id"] not in self.values:
            self._make(self.makers[tensor["id"]])
        return self.values[tensor["id"]]

    def _make(self, layer: Record) -> None:
        kind = layer["kind"]
        if kind == "LoopOutput":
            return self._loop(layer["owner"])
        if kind in _INSIDE:
            raise RuntimeError("a loop's inside is used outside of it")
        if kind == "IfConditionalOutput":
            condition = next(p for p in self.layers if p["kind"] == "Condition" and p["owner"] == layer["owner"])
            outputs: Any = self.value(layer["in"][0 if bool(self.value(condition["in"][0])) else 1])
        elif kind.startswith("Plugin"):
            if self.plugin is None:
                raise Unsupported("plugins")
            outputs = self.plugin(layer["made"], [self.value(t) for t in layer["in"]])
        elif kind in LAYERS:
            outputs = LAYERS[kind](Layer(layer, [self.value(t) for t in layer["in"]]))
        else:
            raise Unsupported(kind)
        self._set(layer, [outputs] if isinstance(outputs, Tensor) else outputs)

    def _set(self, layer: Record, outputs: Sequence[Tensor]) -> None:
        for tensor, value in zip(layer["out"], outputs, strict=True):
            dtype = DTYPES.get(tensor["type"])
            self.values[tensor["id"]] = value if dtype is None else value.to(dtype)

    def _loop(self, loop: int) -> None:
        """Runs a loop and sets all its outputs."""
        boundary = [p for p in self.layers if p.get("owner") == loop and p["kind"] != "Condition"]
        recurrences = [p for p in boundary if p["kind"] == "Recurrence"]
        iterators = [p for p in boundary if p["kind"] == "Iterator"]
        limits = {p["TripLimit"]: p["in"][0] for p in boundary if p["kind"] == "TripLimit"}
        results = [p for p in boundary if p["kind"] == "LoopOutput"]
        inside = self._inside(recurrences + iterators)
        count = int(self.value(limits[0])) if 0 in limits else None
        states = [self.value(p["in"][0]) for p in recurrences]
        sources = [self.value(p["in"][0]) for p in iterators]
        collected: list[list[Tensor]] = [[] for _ in results]
        i = 0
        while count is None or i < count:
            for name in inside:
                self.values.pop(name, None)
            for layer, state in zip(recurrences, states):
                self._set(layer, [state])
            for layer, source in zip(iterators, sources):
                position = source.shape[layer["Axis"]] - 1 - i if layer["Reverse"] else i
                self._set(layer, [source.select(layer["Axis"], position)])
            if 1 in limits and not bool(self.value(limits[1])):
                break
            for result, values in zip(results, collected):
                if result["LoopOutput"]:
                    values.append(self.value(result["in"][0]))
            states = [self.value(p["in"][1]) for p in recurrences]
            i += 1
        last = {p["out"][0]["id"]: state for p, state in zip(recurrences, states)}
        for result, values in zip(results, collected):
            if result["LoopOutput"] == 0:
                source = result["in"][0]
                self._set(result, [last[source["id"]] if source["id"] in last else self.value(source)])
                continue
            if not values:
                raise Unsupported("a loop without iterations that concatenates")
            values = values[::-1] if result["LoopOutput"] == 2 else values
            self._set(result, [torch.stack(values, min(result["Axis"], values[0].dim()))])

    def _inside(self, starts: Sequence[Record]) -> set[int]:
        """The tensors that change from one iteration to the next."""
        owner = starts[0]["owner"] if starts else None
        found: set[int] = set()
        rest = list(starts)
        while rest:
            layer = rest.pop()
            if layer["kind"] == "LoopOutput" and layer["owner"] == owner:
                continue
            for tensor in layer["out"]:
                if tensor["id"] not in found:
                    found.add(tensor["id"])
                    rest += self.users.get(tensor["id"], [])
        return found


def run(record: Record, feeds: Mapping[str, Tensor], plugin: Plugin | None = None) -> list[Tensor]:
    """The outputs of a network.

    Args:
        record: what the host wrote of it (``--network --data``).
        feeds: its inputs by name.
        plugin: runs a plugin.

    Raises:
        Unsupported: of a layer that is not interpreted.
    """
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(max(before, 100_000))  # a value asks for those it is made of
    try:
        network = Network(record, feeds, plugin)
        with torch.no_grad():
            return [network.value(tensor) for tensor in record["outputs"]]
    finally:
        sys.setrecursionlimit(before)
