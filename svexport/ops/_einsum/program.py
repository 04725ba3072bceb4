"""Runs plans with torch operators."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from svexport.ops._einsum.labels import parse, size_of
from svexport.ops._einsum.plan import Diagonal, EinsumPlan, MatMul, Mul, ReduceSum, Reshape, Step, Transpose, plan

Program: TypeAlias = "tuple[tuple[Callable[..., Tensor], tuple[int, ...], tuple[Any, ...]], ...]"
"""A plan bound to sizes: (function, numbers of its input values, further arguments) for every step."""


def bind(chosen: EinsumPlan, sizes: Sequence[int]) -> Program:
    """Prepares a plan for tensors whose labels have the given sizes."""
    return tuple(_bind_step(step, sizes) for step in chosen.steps)


def _bind_step(step: Step, sizes: Sequence[int]) -> tuple[Callable[..., Tensor], tuple[int, ...], tuple[Any, ...]]:
    match step:
        case Diagonal(x, dim):
            return _diagonal, (x,), (dim,)
        case ReduceSum(x, axes):
            return torch.sum, (x,), (axes,)
        case Transpose(x, perm, ()):
            return torch.permute, (x,), (perm,)
        case Transpose(x, perm, store):
            return _permute_stored, (x,), (store, tuple(store.index(i) for i in perm))
        case Reshape(x, groups):
            return torch.reshape, (x,), (tuple(size_of(group, sizes) for group in groups),)
        case MatMul(x, y, summed, swapped):
            return _matmul_swapped if swapped else _matmul, (x, y), (summed,)
        case Mul(x, y):
            return torch.mul, (x, y), ()


def _diagonal(x: Tensor, dim: int) -> Tensor:
    return x.diagonal(0, dim, dim + 1).movedim(-1, dim)


def _permute_stored(x: Tensor, store: tuple[int, ...], view: tuple[int, ...]) -> Tensor:
    return x.permute(store).contiguous().permute(view)


def _matmul_swapped(x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
    return _matmul(y.mT, x.mT, summed).mT


def _matmul(x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
    if x.dim() == y.dim() == 3 and not summed and x.shape[0] == y.shape[0]:
        return torch.bmm(x, y)
    while x.dim() < y.dim():
        x = x[None]
    while y.dim() < x.dim():
        y = y[None]
    if x.dim() == 2:
        return torch.mm(x, y)
    # Not torch.matmul: where the batch of one operand broadcasts, it may copy the other to fold it into the rows.
    batch = tuple(b if a == 1 else a for a, b in zip(x.shape[:-2], y.shape[:-2], strict=True))
    if x.shape[:-2] != y.shape[:-2]:
        if x.is_cuda and summed and len(batch) > 2:
            return _matmul_folded(x, y, summed)
        x, y = x.expand(*batch, -1, -1), y.expand(*batch, -1, -1)
    static = isinstance(x.numel() + y.numel(), int)  # no decision may depend on a symbolic size
    if static and len(summed) == 1 and 0 < batch[summed[0]] <= _UNROLL:
        if len(batch) <= 2:
            return _sum_of_products(x.unbind(summed[0]), y.unbind(summed[0]))
        if summed[0] > 0 and _in_parts(x, batch[0]):
            return torch.stack([_matmul(*pair, (summed[0] - 1,)) for pair in zip(x.unbind(), y.unbind(), strict=True)])
    product = torch.bmm(_flat(x), _flat(y)) if len(batch) > 1 else torch.bmm(x, y)
    product = product.view(*batch, *product.shape[1:])
    return product.sum(summed, dtype=product.dtype) if summed else product


def _matmul_folded(x: Tensor, y: Tensor, summed: tuple[int, ...]) -> Tensor:
    """:func:`_matmul` with few large products. Summed dimensions join the inner dimension, and batch dimensions that
    one operand broadcasts join the rows or columns of the other. Copies an operand; many products need as much."""
    batch = range(x.dim() - 2)
    rows = [i for i in batch if i not in summed and y.shape[i] == 1]
    columns = [i for i in batch if i not in summed and x.shape[i] == 1 and i not in rows]
    shared = [i for i in batch if i not in (*summed, *rows, *columns)]
    for i in summed:
        size = max(x.shape[i], y.shape[i])
        x, y = (z.expand(*z.shape[:i], size, *z.shape[i + 1 :]) for z in (x, y))
    m, n = x.shape[-2], y.shape[-1]
    outer, over, under = [x.shape[i] for i in shared], [x.shape[i] for i in rows], [y.shape[i] for i in columns]
    inner = math.prod(x.shape[i] for i in summed) * x.shape[-1]
    left = x.permute(*shared, *rows, -2, *summed, -1, *columns).reshape(math.prod(outer), math.prod(over) * m, inner)
    right = y.permute(*shared, *summed, -2, *columns, -1, *rows).reshape(left.shape[0], inner, math.prod(under) * n)
    order = [*shared, *rows, x.dim() - 2, *columns, x.dim() - 1]
    product = torch.bmm(left, right).view(*outer, *over, m, *under, n)
    return product.permute([order.index(i) for i in sorted(order)])


def _flat(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-2]), *x.shape[-2:])


def _in_parts(x: Tensor, parts: int) -> bool:
    """Whether to multiply a batch part by part, which keeps the products in the cache of a single CPU thread."""
    return x.device.type == "cpu" and torch.get_num_threads() == 1 and x.numel() >= max(parts, 1) * 2**16


_UNROLL = 8  # up to this many products are accumulated one by one into one result


def _sum_of_products(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """The sum of a few products of (batches of) matrices, in the memory of one product."""
    multiply, accumulate = (torch.mm, Tensor.addmm_) if xs[0].dim() == 2 else (torch.bmm, Tensor.baddbmm_)
    output = multiply(xs[0], ys[0])
    for x, y in zip(xs[1:], ys[1:], strict=True):
        if type(output) is Tensor:
            accumulate(output, x.to(output.dtype), y.to(output.dtype))  # autocast does not convert products in place
        else:
            output = output + multiply(x, y)  # under a tracer, which allows no in-place op
    return output


def run(program: Program, operands: Sequence[Tensor]) -> Tensor:
    """Runs a bound plan. It calls plain torch operators, so autograd, vmap and all devices and dtypes work."""
    values: list[Any] = list(operands)
    for function, inputs, arguments in program:
        tensors = [values[i] for i in inputs]
        for i in inputs:
            values[i] = None  # used once: an intermediate result is freed as soon as the next one exists
        values.append(function(*tensors, *arguments))
    return values[-1]


@lru_cache(maxsize=4096)
def planned(equation: str, training: bool, view: bool, *shapes: tuple[int, ...]) -> Program:
    chosen = plan(*parse(equation, tuple(map(len, shapes))), shapes, training, view)
    return bind(chosen, chosen.sizes)  # type: ignore[arg-type]  # all of them known


def trains(operands: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)
