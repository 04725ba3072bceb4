"""Data types that a version of an op does not take: a cast to a wider type and back, if that is exact."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from contextlib import suppress

import onnx
from onnx import TensorProto, helper

from svexport.graph.opsets.known import Known, known_of
from svexport.graph.opsets.rules import Refusal, schema_of
from svexport.graph.walk import STANDARD, graphs, opset_of, refill
from svexport.symbolic._builder import Builder, Value, dtype_name

__all__ = ["fit", "fit_all", "moves"]

_T = TensorProto
_WIDER_INTEGERS: dict[int, tuple[int, ...]] = {
    _T.INT8: (_T.INT32, _T.INT64, _T.INT16),
    _T.INT16: (_T.INT32, _T.INT64),
    _T.INT32: (_T.INT64,),
    _T.UINT8: (_T.INT32, _T.INT64, _T.INT16, _T.UINT32, _T.UINT64, _T.UINT16),
    _T.UINT16: (_T.INT32, _T.INT64, _T.UINT32, _T.UINT64),
    _T.UINT32: (_T.INT64, _T.UINT64),
}
"""Sums, products and so on are the same modulo the range of the narrower type."""

_WIDER_NUMBERS: dict[int, tuple[int, ...]] = {
    _T.BOOL: (_T.UINT8, _T.INT32, _T.INT64, _T.FLOAT),
    _T.INT8: (_T.FLOAT, _T.DOUBLE, _T.FLOAT16),
    _T.INT16: (_T.FLOAT, _T.DOUBLE),
    _T.INT32: (_T.DOUBLE,),
    _T.UINT8: (_T.FLOAT, _T.DOUBLE, _T.FLOAT16),
    _T.UINT16: (_T.FLOAT, _T.DOUBLE),
    _T.UINT32: (_T.DOUBLE,),
}
"""Floating-point numbers that hold every integer of the type: for ops that only move or compare numbers."""

_WIDER_FLOATS: dict[int, tuple[int, ...]] = {
    _T.FLOAT16: (_T.FLOAT, _T.DOUBLE),
    _T.BFLOAT16: (_T.FLOAT, _T.DOUBLE),
    _T.FLOAT: (_T.DOUBLE,),
}
"""One rounding to the narrower type at the end; of one sum, product, quotient or square root it is the right one."""

_MOVING: set[str] = set()


def moves(op_types: str) -> None:
    """Says that ops move, choose or compare numbers: they return numbers that they are given, places or booleans."""
    _MOVING.update(op_types.split())


@functools.cache
def _variables(op_type: str, opset: int) -> dict[str, frozenset[int]]:
    """The data types that each type variable of an op may stand for."""
    schema = schema_of(op_type, opset)
    if schema is None:
        return {}
    return {c.type_param_str: _dtypes(tuple(c.allowed_type_strs)) for c in schema.type_constraints}


@functools.cache
def _dtypes(names: tuple[str, ...]) -> frozenset[int]:
    numbers = {f"tensor({name.lower()})": number for name, number in _T.DataType.items()}
    return frozenset(numbers[name] for name in names if name in numbers)


def fit(node: onnx.NodeProto, opset: int, known: Known, prefix: str) -> list[onnx.NodeProto] | None:
    """Rewrites a node so that it uses only data types that its op supports at an opset.

    Args:
        node: the node, in the meaning of that opset; it may be edited.
        opset: opset of the node.
        known: the types of its inputs.
        prefix: prefix of names of new values.

    Returns:
        The nodes that replace it; None if it is kept.

    Raises:
        Refusal: if no wider type is exact.
    """
    schema = schema_of(node.op_type, opset)
    if schema is None:
        return None
    variables = _variables(node.op_type, opset)
    bound: dict[str, int] = {}
    for index, name in enumerate(node.input):
        formal = _formal(schema.inputs, index)
        if name and formal is not None and formal.type_str in variables:
            dtype = known.value(name).dtype
            if dtype is not None:
                bound.setdefault(formal.type_str, dtype)
    casts: dict[str, int] = {}
    for variable, dtype in bound.items():
        allowed = variables[variable]
        if not allowed or dtype in allowed:
            continue
        wider = _wider(node.op_type, dtype, allowed)
        if wider is None or node.op_type == "Cast":
            raise Refusal(f"{node.op_type} takes no {dtype_name(dtype)} there, and no wider type holds all its numbers")
        casts[variable] = wider
    for index, name in enumerate(node.output):
        formal = _formal(schema.outputs, index)
        if name and formal is not None and formal.type_str in variables and formal.type_str not in bound:
            made, allowed = known.value(name).dtype, variables[formal.type_str]
            if made is not None and allowed and made not in allowed:
                raise Refusal(f"{node.op_type} makes no {dtype_name(made)} there")
    return _cast(node, schema, opset, casts, bound, prefix) if casts else None


def fit_all(model: onnx.ModelProto) -> bool:
    """Rewrites the nodes of a model, in place, to data types that their ops support at its opset, if a wider type does.

    Returns:
        Whether any node was rewritten.
    """
    known, opset, found = known_of(model), opset_of(model), False
    for graph in graphs(model.graph):
        nodes: list[onnx.NodeProto] = []
        for index, node in enumerate(graph.node):
            fitted: list[onnx.NodeProto] | None = None
            if node.domain in STANDARD:
                known.add_node(node, opset)
                with suppress(Refusal):
                    fitted = fit(node, opset, known, f"{node.name}/fitted_{index}/")
                for one in fitted or ():
                    known.add_node(one, opset)
            nodes += fitted or [node]
            found |= fitted is not None
        refill(graph.node, nodes)
    return found


def _formal(
    formals: Sequence[onnx.defs.OpSchema.FormalParameter], index: int
) -> onnx.defs.OpSchema.FormalParameter | None:
    if index < len(formals):
        return formals[index]
    variadic = formals and formals[-1].option == onnx.defs.OpSchema.FormalParameterOption.Variadic
    return formals[-1] if variadic and formals[-1].is_homogeneous else None


def _wider(op_type: str, dtype: int, allowed: frozenset[int]) -> int | None:
    candidates: tuple[int, ...] = (*_WIDER_INTEGERS.get(dtype, ()), *_WIDER_FLOATS.get(dtype, ()))
    if op_type in _MOVING:
        candidates += _WIDER_NUMBERS.get(dtype, ())
    return next((wider for wider in candidates if wider in allowed), None)


def _cast(
    node: onnx.NodeProto,
    schema: onnx.defs.OpSchema,
    opset: int,
    casts: dict[str, int],
    bound: dict[str, int],
    prefix: str,
) -> list[onnx.NodeProto]:
    """The node with its inputs cast, and its outputs cast back."""
    builder = Builder(opset, prefix)
    wide: dict[tuple[str, str], str] = {}
    for index, name in enumerate(node.input):
        formal = _formal(schema.inputs, index)
        if name and formal is not None and formal.type_str in casts:
            key = name, formal.type_str
            if key not in wide:
                wide[key] = builder.cast(Value(name), casts[formal.type_str]).name
            node.input[index] = wide[key]
    before, builder.nodes = builder.nodes, []
    for index, name in enumerate(node.output):
        formal = _formal(schema.outputs, index)
        if name and formal is not None and formal.type_str in casts:
            node.output[index] = made = f"{prefix}wide_{index}"
            back = helper.make_node("Cast", [made], [name], f"{prefix}narrow_{index}", to=bound[formal.type_str])
            builder.nodes.append(back)
    return [*before, node, *builder.nodes]
