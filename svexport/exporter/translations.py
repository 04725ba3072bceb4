"""``custom_translation_table`` of the exporter on torch.export: our operators, and corrections of its translations."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor

from svexport.errors import ExportError
from svexport.exporter import fp8
from svexport.exporter.aten import overload_of
from svexport.exporter.conversions import CONVERSIONS, TYPES, Writer
from svexport.exporter.decompose import overloads_of
from svexport.exporter.numbers import TRANSLATIONS
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET
from svexport.graph.nodes import PLUGIN_ATTRIBUTES
from svexport.ops._op import DOMAIN
from svexport.symbolic import SYMBOLICS, Symbolic
from svexport.symbolic._symbolic import TensorInfo, node_of, qualified

__all__ = ["translations"]


def translations(opset: int = FIRST_DYNAMO_OPSET) -> dict[Any, Callable[..., Any]]:
    """``custom_translation_table`` for torch.onnx.export: our operators, the aten functions they replace, and those
    that the exporter converts to something else than torch."""
    write = _OnnxscriptWriter()
    table: dict[Any, Callable[..., Any]] = TRANSLATIONS | _of_numbers(write)
    table[torch.ops.svexport.fake_quantize_fp8.default] = fp8.to_onnx
    table |= {overload_of(name): functools.partial(convert, write) for name, convert in CONVERSIONS.items()}
    for symbolic in SYMBOLICS.values():
        table[symbolic.op.torch_op] = _translation(symbolic)
        if symbolic.until is not None and (opset > symbolic.until or symbolic.until >= FIRST_DYNAMO_OPSET):
            continue  # the exporter's own is right, and below exact by the converter
        for key, convert in symbolic.aten.items():
            name, _, only = key.partition(".")
            for overload in overloads_of(qualified(name)):
                if only in ("", overload._overloadname) and not overload._schema.is_mutable:
                    table[overload] = _translation(symbolic, convert, overload._schema.arguments)
    return table


class _OnnxscriptWriter(Writer):
    """Writes nodes by onnxscript: :class:`svexport.exporter.conversions.Writer`."""

    opset = 18

    def __call__(self, op_type: str, *inputs: Any, outputs: int = 1, **attributes: Any) -> Any:
        from onnxscript import opset18

        return getattr(opset18, op_type)(*inputs, **attributes)

    def constant(self, tensor: Tensor) -> Any:
        return self("Constant", value=ir.tensor(tensor))

    def dtype(self, value: Any) -> torch.dtype | None:
        return None if value.dtype is None else _TORCH_DTYPES.get(value.dtype)

    def rank(self, value: Any) -> int | None:
        return None if value.shape is None else len(value.shape)


_TORCH_DTYPES = {ir.DataType(number): dtype for dtype, number in TYPES.items()}


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


def _translation(
    symbolic: Symbolic, convert: Callable[..., Sequence[Any] | None] | None = None, schema: Sequence[Any] = ()
) -> Callable[..., Any]:
    from onnxscript import evaluator, opset18

    op = symbolic.op

    def function(*args: Any, **kwargs: Any) -> Any:
        arguments: Sequence[Any] = _info(args)
        if convert is not None:
            rest = schema[len(args) :]  # all of them by position, as the TorchScript exporter gives them
            converted = convert(*arguments, *(_info(kwargs.get(a.name, a.default_value)) for a in rest))
            if converted is None:
                raise ExportError(f"{op.node_type} cannot take over this call at opset 18 and later")
            arguments = converted
        inputs, computed, attributes = node_of(op, arguments)
        while inputs and inputs[-1] is None and not computed:
            inputs.pop()
        inputs += [opset18.Reshape(size, opset18.Constant(value_ints=[1])) for size in computed]  # type: ignore[arg-type]
        named = attributes | PLUGIN_ATTRIBUTES
        node = ir.node(op.node_type, inputs, named, domain=DOMAIN, num_outputs=op.num_outputs)
        evaluator.default().nodes.append(node)  # type: ignore[attr-defined]  # the exporter's, which records nodes
        return node.outputs[0] if op.num_outputs == 1 else node.outputs

    return function


def _info(value: Any) -> Any:
    """The exporter's tensors as :class:`TensorInfo`, lists of them too; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [_info(v) for v in value]
    if not hasattr(value, "producer") or not hasattr(value, "shape"):
        return value
    shape = value.shape
    return TensorInfo(value, None if shape is None else tuple(d if isinstance(d, int) else None for d in shape))
