"""Shapes, dtypes and formats of a plugin's tensors, derived from the op's definition."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from types import ModuleType
from typing import Any

import torch

from svexport.ops._op import Op

COORDINATES = {
    "bilinear_sample": ("grid",),
    "camera_sample": ("reference_points", "lidar2img", "offsets"),
    "deform_conv2d": ("offset",),
    "grid_sample": ("grid",),
    "ms_deform_attn": ("sampling_locations",),
    "transformer_decoder": ("reference_points", "lidar2img"),
}
"""Inputs that may, and should, be float32 with half data: half coordinates would be off by pixels."""

FACTORS = {
    "add_bias_residual_layer_norm": ("bias", "weight", "norm_bias"),
    "camera_sample": ("weights",),
    "ms_deform_attn": ("attention_weights",),
}
"""Inputs that may keep their type in the network when the data has another type."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16)

IMAGES = {
    "bilinear_sample": (4, ("image", "output")),
    "camera_sample": (5, ("features",)),
    "grid_sample": (4, ("input", "output")),
}
"""Inputs and first output that ahead-of-time kernels also read and write in channels-last, if they have this rank."""


class Size:
    """A dimension that an op's fake can compute with: a TensorRT expression, or a number."""

    def __init__(self, value: Any, builder: Any, operations: Any) -> None:
        self.value, self._builder, self._operations = value, builder, operations

    def _with(self, operation: str, left: Any, right: Any) -> Size:
        one, other = (
            x.value if isinstance(x, Size) else self._builder.constant(x)  #
            for x in (left, right)
        )
        return Size(
            self._builder.operation(getattr(self._operations, operation), one, other), self._builder, self._operations
        )

    def __add__(self, other: Any) -> Size:
        return self._with("SUM", self, other)

    def __radd__(self, other: Any) -> Size:
        return self._with("SUM", other, self)

    def __sub__(self, other: Any) -> Size:
        return self._with("SUB", self, other)

    def __rsub__(self, other: Any) -> Size:
        return self._with("SUB", other, self)

    def __mul__(self, other: Any) -> Size:
        return self._with("PROD", self, other)

    __rmul__ = __mul__

    def __floordiv__(self, other: Any) -> Size:
        return self._with("FLOOR_DIV", self, other)

    def at_least(self, other: Any) -> Size:
        """The larger of two sizes, as an expression of shapes."""
        return self._with("MAX", self, other)

    def at_most(self, other: Any) -> Size:
        """The smaller of two sizes, as an expression of shapes."""
        return self._with("MIN", self, other)


@dataclass(frozen=True)
class Description:
    """A stand-in for a tensor in an op's fake: a shape of numbers or :class:`Size`, and a dtype."""

    shape: tuple[Any, ...]
    dtype: torch.dtype

    def dim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    def is_floating_point(self) -> bool:
        """Whether the dtype is floating point."""
        return self.dtype.is_floating_point

    def new_empty(self, *size: Any, dtype: torch.dtype | None = None) -> Description:
        """A description with these sizes, and with the same dtype unless one is given."""
        shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list)) else size
        return Description(tuple(shape), dtype or self.dtype)


def output_descriptions(op: Op, tensors: Sequence[Description], attributes: Mapping[str, Any]) -> list[Description]:
    """The op's outputs for tensors of these shapes and dtypes, computed by its fake."""
    assert op.fake is not None, f"{op.name}: an op with a plugin has a fake, from which its shapes follow"
    outputs = op.fake(*op.bind(tensors, attributes))
    return list(outputs) if isinstance(outputs, tuple) else [outputs]


@cache
def sample_shapes(op: Op) -> dict[str, tuple[int, ...]]:
    """A shape for each tensor argument, from the op's first sample (the first tensor of a list)."""
    sample = next(iter(op.samples(lambda *shape: torch.zeros(shape))))
    tensors = {
        argument.name: value[0] if argument.kind == "tensors" else value
        for argument, value in zip(op.arguments, sample, strict=True)
        if argument.is_tensor
    }
    return {name: () if tensor is None else tuple(tensor.shape) for name, tensor in tensors.items()}


def input_names(op: Op, count: int, attributes: Mapping[str, Any]) -> list[str]:
    """The argument that each of a node's inputs belongs to."""
    bound = op.bind(range(count), attributes)
    by_input = {
        index: argument.name
        for argument, value in zip(op.arguments, bound, strict=True)
        if argument.is_tensor and value is not None
        for index in (value if isinstance(value, list) else (value,))
    }
    return [by_input[i] for i in range(count)]


def output_dtypes(op: Op, given: Sequence[torch.dtype], attributes: Mapping[str, Any]) -> list[torch.dtype]:
    """Dtypes of the outputs for inputs of these dtypes. Ranks are the samples': TensorRT has not passed any yet."""
    shapes = sample_shapes(op)
    names = input_names(op, len(given), attributes)
    inputs = [Description(shapes[n], d) for n, d in zip(names, given, strict=True)]
    return [o.dtype for o in output_descriptions(op, inputs, attributes)]


def dtype_combinations(
    op: Op, declared: Sequence[torch.dtype], attributes: Mapping[str, Any]
) -> Iterator[list[torch.dtype]]:
    """The dtypes of inputs and outputs that a plugin accepts, for inputs with the given dtypes in the network.

    The data, and all inputs that share its type, may have any floating-point type. :data:`FACTORS` may also keep their
    own type, and :data:`COORDINATES` may also be float32. Everything else keeps its type.
    """
    coordinates, factors = COORDINATES.get(op.name, ()), FACTORS.get(op.name, ())
    names = input_names(op, len(declared), attributes)
    for data in FLOATS:
        choices = [
            (dtype,)
            if not dtype.is_floating_point
            else tuple(dict.fromkeys((torch.float32, dtype)))
            if name in coordinates
            else tuple(dict.fromkeys((data, dtype)))
            if name in factors
            else (data,)
            for name, dtype in zip(names, declared, strict=True)
        ]
        for inputs in product(*choices):
            yield [*inputs, *output_dtypes(op, inputs, attributes)]


def shape_expressions(
    trt: ModuleType, op: Op, inputs: Sequence[Any], attributes: Mapping[str, Any], builder: Any
) -> tuple[list[Description], list[Description]]:
    """Descriptions of the inputs, whose dimensions TensorRT gives as expressions, and of the outputs.

    Sizes that TensorRT knows become numbers.
    """

    def size(expression: Any) -> Any:
        if expression.is_constant():
            return expression.get_constant_value()
        return Size(expression, builder, trt.DimensionOperation)

    given = [Description(tuple(size(dims[i]) for i in range(len(dims))), torch.float32) for dims in inputs]
    return given, output_descriptions(op, given, attributes)


def expression(size: Any, builder: Any) -> Any:
    """A number or :class:`Size` as a TensorRT expression."""
    return size.value if isinstance(size, Size) else builder.constant(size)


def output_shapes(
    trt: ModuleType, op: Op, inputs: Sequence[Any], attributes: Mapping[str, Any], builder: Any
) -> list[Any]:
    """The shapes of the outputs as TensorRT expressions of the inputs' shapes."""
    shapes = []
    for output in shape_expressions(trt, op, inputs, attributes, builder)[1]:
        dims = trt.DimsExprs(len(output.shape))
        for i, size in enumerate(output.shape):
            dims[i] = expression(size, builder)
        shapes.append(dims)
    return shapes
