"""Reads the kinds of arguments and results from annotations."""

from __future__ import annotations

import ast
from collections.abc import Callable

__all__ = ["is_tensor_annotation", "tensors_of_annotation"]


def is_tensor_annotation(node: ast.AST | None, names: Callable[[ast.AST], str | None]) -> bool:
    """Whether an annotation says one tensor, or None: ``Tensor``, ``Tensor | None``, ``Optional[Tensor]``."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        try:
            node = ast.parse(node.value[:200], mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return False
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        sides = [side for side in (node.left, node.right) if not _is_none(side)]
        return bool(sides) and all(is_tensor_annotation(side, names) for side in sides)
    if isinstance(node, ast.Subscript):
        name = (names(node.value) or "").rpartition(".")[2]
        if name == "Optional":
            return is_tensor_annotation(node.slice, names)
        if name == "Annotated" and isinstance(node.slice, ast.Tuple):
            return is_tensor_annotation(node.slice.elts[0], names)
        if name == "Union":
            parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
            parts = [part for part in parts if not _is_none(part)]
            return bool(parts) and all(is_tensor_annotation(part, names) for part in parts)
        return False
    if not isinstance(node, (ast.Name, ast.Attribute)):
        return False
    name = names(node) or ""
    return name.rpartition(".")[2] in _TENSOR_TYPES and not name.startswith(("tensorflow", "tf.", "jax"))


_TENSOR_TYPES = {"Tensor", *(f"{kind}Tensor" for kind in ("Float", "Long", "Bool", "Int", "Half", "Double", "Byte"))}


def tensors_of_annotation(node: ast.AST, names: Callable[[ast.AST], str | None]) -> bool:
    """Whether an annotation says several tensors: ``list[Tensor]``, ``Tuple[Tensor, Tensor]``, ``Sequence[Tensor]``."""
    if not isinstance(node, ast.Subscript):
        return False
    name = (names(node.value) or "").rpartition(".")[2]
    parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    parts = [part for part in parts if not (isinstance(part, ast.Constant) and part.value is Ellipsis)]
    if name not in ("list", "List", "tuple", "Tuple", "Sequence", "Iterable"):
        return False
    return bool(parts) and all(is_tensor_annotation(part, names) for part in parts)


def _is_none(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is None
