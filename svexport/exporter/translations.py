"""``custom_translation_table`` of the exporter on torch.export: our operators, and what it has otherwise than torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from svexport.errors import ExportError
from svexport.exporter import fp8
from svexport.exporter.conversions import (
    INTEGERS,
    Writer,
    bounded,
    extreme,
    extreme_along,
    integer_power,
    is_floating,
    larger,
    mean_of_some,
    place_of_extreme,
    sorted_along,
)
from svexport.exporter.numbers import TRANSLATIONS
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET
from svexport.graph.nodes import PLUGIN_ATTRIBUTES
from svexport.ops._op import DOMAIN, Op
from svexport.symbolic import SYMBOLICS, Symbolic
from svexport.symbolic._symbolic import TensorInfo, qualified, without_computed

__all__ = ["translations"]


def translations(opset: int = FIRST_DYNAMO_OPSET) -> dict[Any, Callable[..., Any]]:
    """``custom_translation_table`` for torch.onnx.export: our operators, and the aten functions they replace."""
    table: dict[Any, Callable[..., Any]] = TRANSLATIONS | _conversions()
    for symbolic in SYMBOLICS.values():
        table[symbolic.op.torch_op] = _translation(symbolic)
        if symbolic.until is not None and (opset > symbolic.until or symbolic.until >= FIRST_DYNAMO_OPSET):
            continue  # the exporter's own is right, and below exact by the converter
        for key, convert in symbolic.aten.items():
            name, _, only = key.partition(".")
            library, _, function = qualified(name).partition("::")
            packet = getattr(getattr(torch.ops, library), function, None)
            if packet is None:  # a library that is not imported
                continue
            for overload in [only] if only else packet.overloads():
                target = getattr(packet, overload)
                table[target] = _translation(symbolic, convert, target._schema.arguments)
    return table


class _OnnxscriptWriter:
    """Writes nodes by onnxscript: :class:`svexport.exporter.conversions.Writer`."""

    opset = 18

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        from onnxscript import opset18

        return getattr(opset18, op_type)(*inputs, **attributes)

    def constant(self, tensor: Tensor) -> Any:
        from onnxscript import opset18

        return opset18.Constant(value=ir.tensor(tensor))  # type: ignore[arg-type]

    def dtype(self, value: Any) -> torch.dtype | None:
        return None if value.dtype is None else _TORCH_DTYPES.get(value.dtype)

    def rank(self, value: Any) -> int | None:
        return None if value.shape is None else len(value.shape)

    def reduced(self, op_type: str, x: Any, axes: Sequence[int] | None, keepdims: bool) -> Any:
        given = [] if axes is None else [self.constant(torch.tensor(list(axes)))]
        return self(op_type, x, *given, keepdims=int(keepdims))

    def squeezed(self, x: Any, axis: int) -> Any:
        return self("Squeeze", x, self.constant(torch.tensor([axis])))

    def unsqueezed(self, x: Any) -> Any:
        return self("Unsqueeze", x, self.constant(torch.tensor([-1])))


_TORCH_DTYPES = {
    ir.DataType.BFLOAT16: torch.bfloat16,
    ir.DataType.BOOL: torch.bool,
    ir.DataType.DOUBLE: torch.float64,
    ir.DataType.FLOAT: torch.float32,
    ir.DataType.FLOAT16: torch.float16,
    ir.DataType.INT16: torch.int16,
    ir.DataType.INT32: torch.int32,
    ir.DataType.INT64: torch.int64,
    ir.DataType.INT8: torch.int8,
    ir.DataType.UINT8: torch.uint8,
}


_ONNX_DTYPES = {torch_dtype: int(dtype) for dtype, torch_dtype in _TORCH_DTYPES.items()}


def _conversions() -> dict[Any, Callable[..., Any]]:
    """Of functions that the exporter converts to something else than torch, by the rules of both exporters."""
    aten, write = torch.ops.aten, _OnnxscriptWriter()

    def sorted_stably(x: Any, *, stable: bool | None = None, dim: int = -1, descending: bool = False) -> Any:
        return sort(x, dim, descending)

    def sort(x: Any, dim: int = -1, descending: bool = False) -> Any:
        size = write("Gather", write("Shape", x), write.constant(torch.tensor([dim]))) if write.rank(x) else None
        return sorted_along(write, x, size, dim, descending)

    def topk(x: Any, k: Any, dim: int = -1, largest: bool = True, sorted: bool = True) -> Any:
        one = torch.tensor([k if isinstance(k, int) else 1])
        count = write.constant(one) if isinstance(k, int) else write("Reshape", k, write.constant(one))
        return sorted_along(write, x, count, dim, largest)

    def bound(x: Any, number: Any) -> Any:
        if number is None or not isinstance(number, (bool, int, float)):
            return number if number is None or number.dtype == x.dtype else write("CastLike", number, x)
        return write.constant(torch.tensor(number, dtype=write.dtype(x)))

    def clamp(x: Any, min: Any = None, max: Any = None) -> Any:
        low, high = bound(x, min), bound(x, max)
        if isinstance(min, (int, float)) and isinstance(max, (int, float)) and is_floating(write, x):
            return write("Clip", x, low, high)
        return bounded(write, x, low, high)

    def relu(x: Any) -> Any:
        return write("Relu", x) if is_floating(write, x) else clamp(x, 0)

    def mean(x: Any, dim: Sequence[int] | None = None, keepdim: bool = False, *, dtype: int | None = None) -> Any:
        if dtype not in (None, -1):
            x = write("Cast", x, to=dtype)
        if write.rank(x) == 0:
            return write("Identity", x)
        result = write.reduced("ReduceMean", x, list(dim) if dim else None, keepdim)
        sizes = [None] if x.shape is None else [x.shape[axis] for axis in dim or range(len(x.shape))]
        chosen = any(s == 0 if isinstance(s, int) else str(getattr(s, "value", s)).startswith("u") for s in sizes)
        return mean_of_some(write, result, x, dim) if chosen else result

    def power(x: Any, exponent: Any) -> Any:
        kinds = [write.dtype(v) for v in (x, exponent) if not isinstance(v, (bool, int, float))]
        floating = [kind for kind in kinds if kind not in INTEGERS and kind != torch.bool]
        if not floating and not isinstance(x, float) and not isinstance(exponent, float):
            whole = [kind for kind in kinds if kind in INTEGERS]
            return integer_power(write, x, exponent, functools.reduce(torch.promote_types, whole or [torch.int64]))
        known = [kind for kind in floating if kind is not None]
        kind = functools.reduce(torch.promote_types, known or [torch.float32])
        return write("Pow", *(of_type(v, kind) for v in (x, exponent)))

    def of_type(x: Any, kind: torch.dtype) -> Any:
        if isinstance(x, (bool, int, float)):
            return write.constant(torch.tensor(x, dtype=kind))
        return x if write.dtype(x) == kind else write("Cast", x, to=_ONNX_DTYPES[kind])

    table: dict[Any, Callable[..., Any]] = {
        aten.clamp.default: clamp,
        aten.clamp.Tensor: clamp,
        aten.clamp_max.default: lambda x, max: clamp(x, None, max),
        aten.clamp_max.Tensor: lambda x, max: clamp(x, None, max),
        aten.clamp_min.default: clamp,
        aten.clamp_min.Tensor: clamp,
        aten.hardtanh.default: lambda x, min_val=-1, max_val=1: clamp(x, min_val, max_val),
        aten.mean.default: lambda x, *, dtype=None: mean(x, dtype=dtype),
        aten.mean.dim: mean,
        aten.pow.Scalar: power,
        aten.pow.Tensor_Scalar: power,
        aten.pow.Tensor_Tensor: power,
        aten.relu.default: relu,
        aten.relu6.default: lambda x: clamp(x, 0, 6),
        aten.sort.default: sort,
        aten.sort.stable: sorted_stably,
        aten.topk.default: topk,
        torch.ops.svexport.fake_quantize_fp8.default: fp8.to_onnx,
    }
    for name in ("Max", "Min"):
        table |= _extremes(write, name)
    return table | _of_numbers(write) | _of_truth(write)


def _of_truth(write: Writer) -> dict[Any, Callable[..., Any]]:
    aten = torch.ops.aten

    def anywhere(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
        """Whether the largest is 1: of nothing, it is negative, which the exporter's own takes for true."""
        is_true = x if write.dtype(x) == torch.bool else write("Cast", x, to=int(ir.DataType.BOOL))
        if write.rank(x) == 0:
            return write("Identity", is_true)
        axes = [dim] if isinstance(dim, int) else list(dim or ()) or None
        largest = write.reduced("ReduceMax", write("Cast", is_true, to=int(ir.DataType.INT64)), axes, keepdim)
        return write("Greater", largest, write.constant(torch.tensor(0)))

    return dict.fromkeys((aten.any.default, aten.any.dim, aten.any.dims), anywhere)


def _of_numbers(write: Writer) -> dict[Any, Callable[..., Any]]:
    """Tensors of a number. The exporter's own has every float in float32 before it is one of double precision."""
    aten = torch.ops.aten

    def number(s: Any, *, dtype: int | None = None, **_: Any) -> Any:
        kind = ir.DataType.FLOAT if dtype in (None, -1) else ir.DataType(dtype)
        if isinstance(s, (bool, int, float)) and kind in _TORCH_DTYPES:
            return write.constant(torch.tensor(s, dtype=_TORCH_DTYPES[kind]))
        return write("Cast", s, to=int(kind))

    def full(size: Any, fill_value: Any, *, dtype: int | None = None, **_: Any) -> Any:
        kind = None if dtype in (None, -1) and not isinstance(fill_value, float) else dtype
        value = fill_value if kind is None else number(fill_value, dtype=kind)
        return write("Expand", value, write("Cast", size, to=int(ir.DataType.INT64)))

    def full_like(x: Any, fill_value: Any, *, dtype: int | None = None, **_: Any) -> Any:
        return write("Expand", number(fill_value, dtype=x.dtype if dtype in (None, -1) else dtype), write("Shape", x))

    return {
        aten.fill.Scalar: full_like,
        aten.full.default: full,
        aten.full_like.default: full_like,
        aten.new_full.default: lambda x, size, value, *, dtype=None, **_: full(size, value, dtype=dtype or x.dtype),
        aten.scalar_tensor.default: number,
    }


def _extremes(write: Writer, name: str) -> dict[Any, Callable[..., Any]]:
    aten, reduce = torch.ops.aten, f"Reduce{name}"

    def whole(x: Any) -> Any:
        return extreme(write, reduce, x, None, False)

    def along(x: Any, dim: int, keepdim: bool = False) -> Any:
        return extreme_along(write, reduce, x, dim, keepdim)

    def along_all(x: Any, dim: Sequence[int] = (), keepdim: bool = False) -> Any:
        return extreme(write, reduce, x, list(dim) or None, keepdim)

    def place(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
        if dim is not None or write.rank(x) == 0:
            return place_of_extreme(write, f"Arg{name}", x, dim or 0, keepdim)
        flat = write("Reshape", x, write.constant(torch.tensor([-1])))
        found = place_of_extreme(write, f"Arg{name}", flat, 0, False)
        shape = write.constant(torch.tensor([1] * (write.rank(x) or 0)))
        return write("Reshape", found, shape) if keepdim else found

    def two(x: Any, y: Any) -> Any:
        return larger(write, name, x, y)

    small = name.lower()
    return {
        getattr(aten, small).default: whole,
        getattr(aten, small).dim: along,
        getattr(aten, f"a{small}").default: along_all,
        getattr(aten, f"arg{small}").default: place,
        getattr(aten, f"{small}imum").default: two,
    }


def _translation(
    symbolic: Symbolic, convert: Callable[..., Sequence[Any] | None] | None = None, schema: Sequence[Any] = ()
) -> Callable[..., Any]:
    from onnxscript import opset18, values

    op = symbolic.op
    domain = values.Opset(DOMAIN, 1)

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments: Sequence[Any] = args
        if convert is not None:
            rest = schema[len(args) :]  # all of them by position, as the TorchScript exporter gives them
            converted = convert(*map(_info, args), *(_info(kwargs.get(a.name, a.default_value)) for a in rest))
            if converted is None:
                raise ExportError(f"{op.node_type} cannot take over this call at opset 18 and later")
            arguments = converted
        inputs: list[Any] = []
        computed: list[Any] = []
        attributes: dict[str, Any] = {}
        for argument, value in zip(op.arguments, arguments, strict=True):
            if argument.symbolic:
                value = without_computed(_info(value), computed)
            if argument.kind == "tensors":
                inputs += [_value(t) for t in value]
            elif argument.is_tensor:
                inputs.append(_value(value))
            elif argument.kind in ("int", "float"):
                attributes[argument.name] = (float if argument.kind == "float" else int)(value)
            elif value:  # an empty list has no type; it is written when the file is cleaned
                number = float if argument.kind == "floats" else int
                attributes[argument.name] = [number(v) for v in value]
        while inputs and inputs[-1] is None and not computed:
            inputs.pop()
        inputs += [opset18.Reshape(size, opset18.Constant(value_ints=[1])) for size in computed]  # type: ignore[arg-type]
        attributes |= PLUGIN_ATTRIBUTES
        return values.Op(domain, op.node_type, _schema(op, len(inputs)))(*inputs, **attributes)

    return function


def _info(value: Any) -> Any:
    """The exporter's tensors as :class:`TensorInfo`, lists of them too; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [_info(v) for v in value]
    if not hasattr(value, "producer") or not hasattr(value, "shape"):
        return value
    shape = value.shape
    return TensorInfo(value, None if shape is None else tuple(d if isinstance(d, int) else None for d in shape))


def _value(value: Any) -> Any:
    return value.value if isinstance(value, TensorInfo) else value


def _schema(op: Op, num_inputs: int) -> Any:
    from onnx import defs

    schema = defs.OpSchema
    kinds = {"int": schema.AttrType.INT, "float": schema.AttrType.FLOAT, "ints": schema.AttrType.INTS}
    kinds["floats"] = schema.AttrType.FLOATS
    attributes = [schema.Attribute(a.name, kinds[a.kind], "", required=False) for a in op.attributes]
    attributes += [schema.Attribute(name, schema.AttrType.STRING, "") for name in PLUGIN_ATTRIBUTES]
    tensors = [
        "tensor(float)",
        "tensor(float16)",
        "tensor(bfloat16)",
        "tensor(double)",
        "tensor(int8)",
        "tensor(uint8)",
    ]
    tensors += ["tensor(int32)", "tensor(int64)", "tensor(bool)"]
    optional = schema.FormalParameterOption.Optional  # a variadic input could not be absent
    return schema(
        op.node_type,
        DOMAIN,
        1,
        inputs=[schema.FormalParameter(f"input_{i}", "T", param_option=optional) for i in range(num_inputs)],
        outputs=[schema.FormalParameter(f"output_{i}", "T") for i in range(op.num_outputs)],
        type_constraints=[("T", tensors, "")],
        attributes=attributes,
    )
