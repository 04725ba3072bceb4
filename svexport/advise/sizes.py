"""Recognizes sizes of a tensor's first axis."""

from __future__ import annotations

import ast

from svexport.advise.calls import integer
from svexport.advise.kinds import Kind
from svexport.advise.rule import Scope

__all__ = ["is_first_size"]


def is_first_size(scope: Scope, size: ast.expr) -> bool:
    """Whether ``size`` is ``len(x)``, ``x.shape[0]`` or ``x.size(0)`` of a tensor, or a name for one of these."""
    binding = scope.definition(size)
    if binding is not None and binding.item:
        return binding.index == 0 and binding.value is not None and _is_shape(scope, binding.value)
    size = scope.value_of(size)
    if isinstance(size, ast.Call) and isinstance(size.func, ast.Name) and size.func.id == "len" and size.args:
        return scope.is_tensor(size.args[0])
    if isinstance(size, ast.Subscript) and integer(size.slice) == 0:
        return _is_shape(scope, size.value)
    call = scope.call(size)
    first = call is not None and call.name == "size" and len(call.arguments) == 1 and integer(call.arguments[0]) == 0
    return first and scope.is_tensor(call.input)  # type: ignore[union-attr]


def _is_shape(scope: Scope, node: ast.expr) -> bool:
    """Whether ``node`` is a tensor's sizes beginning with that of its first axis."""
    if scope.kind(node) is not Kind.SHAPE:
        return False
    if isinstance(node, ast.Subscript):
        whole = isinstance(node.slice, ast.Slice) and node.slice.lower is None and node.slice.step is None
        return whole and _is_shape(scope, node.value)
    if isinstance(node, ast.Attribute):
        return scope.is_tensor(node.value)
    call = scope.call(node)
    return call is not None and scope.is_tensor(call.input)
