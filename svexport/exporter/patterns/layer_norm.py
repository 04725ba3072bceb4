"""The norm of a sum, ``norm(x + sublayer(x))``, of which transformers have two per layer.

The sum and its norm are one kernel on a GPU. Under a tracer, and for arguments that the op does not support, they stay
separate: compilers fuse them themselves, and files keep their nodes.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from svexport import ops
from svexport.exporter.patterns.pattern import ADDS, Pattern, is_bare
from svexport.exporter.patterns.traced import Traced, operand
from svexport.exporter.proof import Random
from svexport.ops._kept import zeros
from svexport.ops._op import tracing

__all__ = ["find", "layer_norm_of_sum", "norm_of_sum"]

_add_norm = torch.ops.svexport.add_bias_residual_layer_norm.default
_NORMS = (nn.LayerNorm, ops.LayerNorm)


def norm_of_sum(norm: nn.Module, x: Tensor, residual: Tensor, extra: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """``norm`` of ``x + residual (+ extra)``, and that sum."""
    if _is_plain(norm) and _fits(norm.weight, norm.bias, x, residual, extra):
        return _op(x, residual, norm.weight, norm.bias, norm.eps, extra)
    total = _sum(x, residual, extra)
    return norm(total), total


def layer_norm_of_sum(
    x: Tensor,
    residual: Tensor,
    shape: Any,
    weight: Tensor,
    bias: Tensor,
    eps: float = 1e-5,
    extra: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``F.layer_norm`` of ``x + residual (+ extra)``, and that sum."""
    if len(shape) == 1 and _fits(weight, bias, x, residual, extra):
        return _op(x, residual, weight, bias, eps, extra)
    total = _sum(x, residual, extra)
    return F.layer_norm(total, shape, weight, bias, eps), total


def _op(x: Tensor, residual: Tensor, weight: Any, bias: Any, eps: Any, extra: Tensor | None) -> tuple[Tensor, Tensor]:
    zero = zeros(x, bias.shape, traced=False)  # _fits excludes tracers
    return _add_norm(x, zero, residual, weight, bias, eps, extra)


def _sum(x: Tensor, residual: Tensor, extra: Tensor | None) -> Tensor:
    total = x + residual
    return total if extra is None else total + extra


def _is_plain(norm: nn.Module) -> bool:
    """Whether a module is a norm over one dimension, without hooks."""
    return type(norm) in _NORMS and is_bare(norm) and len(norm.normalized_shape) == 1  # type: ignore[arg-type]


def _fits(weight: Any, bias: Any, x: Tensor, residual: Tensor, extra: Tensor | None) -> bool:
    """Whether the op returns what torch does: one dtype for all tensors, no half under autocast, no broadcasting."""
    if weight is None or bias is None or tracing():
        return False
    dtype, shape = x.dtype, x.shape
    for t in (residual, extra):
        if t is not None and (t.dtype != dtype or t.shape != shape):
            return False
    if weight.dtype != dtype or bias.dtype != dtype or shape[-1:] != weight.shape:
        return False
    return dtype in (torch.float32, torch.float64) or not torch.is_autocast_enabled(x.device.type)


def find(traced: Traced) -> Iterator[Pattern]:
    """Parts that may be :func:`svexport.ops.add_bias_residual_layer_norm`."""
    for node in traced.graph.nodes:
        module = traced.called(node)
        if node.target is not F.layer_norm and not (isinstance(module, _NORMS) and _is_plain(module)):
            continue
        total = operand(node, 0, "input")
        summands = _summands(traced, total)
        value = traced.tensor(node)
        if summands is None or value is None or not value.is_floating_point():
            continue
        if module is None:
            arguments = [operand(node, i, name) for i, name in ((2, "weight"), (3, "bias"))]
            if all(isinstance(a, fx.Node) and a.op == "get_attr" for a in arguments):
                yield _pattern(traced, node, total, summands, tuple(arguments), None)
        elif module.weight is not None and module.bias is not None:
            yield _pattern(traced, node, total, summands, (), module)


def _summands(traced: Traced, total: Any) -> tuple[fx.Node, ...] | None:
    """The two or three tensors whose sum a node is; None for any other node."""

    def two(node: Any) -> tuple[fx.Node, ...]:
        if not isinstance(node, fx.Node) or node.target not in ADDS or node.kwargs or len(node.args) != 2:
            return ()
        shapes = [None if traced.tensor(a) is None else traced.values[a].shape for a in node.args]  # type: ignore[index]
        return () if None in shapes or shapes[0] != shapes[1] else tuple(node.args)  # type: ignore[arg-type]

    found = two(total)
    if not found:
        return None
    first, second = found
    for inner, outer in ((first, second), (second, first)):
        if len(inner.users) == 1 and len(more := two(inner)) == 2:
            return *more, outer
    return found


def _pattern(
    traced: Traced,
    node: fx.Node,
    total: fx.Node,
    summands: tuple[fx.Node, ...],
    affine: tuple[fx.Node, ...],
    module: Any,
) -> Pattern:
    more = (total,) if len(total.users) > 1 else ()
    shape = (traced.values[node].shape[-1],)
    eps = module.eps if module is not None else (operand(node, 4, "eps") or 1e-5)

    def ours(*values: Tensor) -> Any:
        x, residual, *extra = values[: len(summands)]
        weight, bias = values[len(summands) :] or (module.weight.to(x.dtype), module.bias.to(x.dtype))
        y, s = ops.add_bias_residual_layer_norm(x, torch.zeros_like(bias), residual, weight, bias, eps, *extra)
        return (y, s) if more else y

    def build(graph: fx.Graph) -> Any:
        x, residual, *extra = summands
        if module is not None:
            called = graph.call_function(norm_of_sum, (graph.get_attr(str(node.target)), x, residual, *extra))
        else:
            weight, bias = (graph.get_attr(str(a.target)) for a in affine)
            called = graph.call_function(layer_norm_of_sum, (x, residual, shape, weight, bias, eps, *extra))
        y = graph.call_function(operator.getitem, (called, 0))
        return (y, graph.call_function(operator.getitem, (called, 1))) if more else y

    def draw(random: Random) -> list[Tensor]:
        return [random.normal(traced.values[n]) for n in (*summands, *affine)]

    name = "add_bias_residual_layer_norm"
    modules = frozenset() if module is None else frozenset({str(node.target)})
    return Pattern(name, "layer_norm(x + y)", node, (*summands, *affine), ours, build, draw, more, modules)
