"""PyTorch's samples of a function as calls with tensors, and extreme values to call them with."""

from __future__ import annotations

import dataclasses
import math
import random
import sys
import types
import unittest
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

if "expecttest" not in sys.modules:
    try:
        import expecttest  # noqa: F401
    except ImportError:  # which torch's tests derive from, and its samples do not use
        stub = types.ModuleType("expecttest")
        stub.TestCase = unittest.TestCase  # type: ignore[attr-defined]
        sys.modules["expecttest"] = stub

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal.common_methods_invocations import op_db

DTYPES = (torch.float32, torch.float16, torch.int64, torch.bool)
LARGEST = 20_000
"""Elements of a sample; what is larger takes long and shows nothing more."""

_HALF = torch.float16
_FINITE = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 20.0, -20.0, 100.0, -100.0, 3e-5, -3e-5]
_INTEGERS = [0, 1, -1, 2, -2, 3, -3, 7, -7, 100, -100, 2**31, -(2**31) - 1, 2**53 + 1, 2**63 - 1, -(2**63)]
_PLACES = {
    *("argmax", "argmin", "argsort", "cummax", "cummin", "kthvalue", "max", "median", "min", "mode", "msort"),
    *("nanmedian", "sort", "topk"),
}
"""Functions that say where a value is, which torch leaves open among equal ones."""


_ORDERED = {"bucketize", "searchsorted"}
"""Functions of sorted numbers, which extremes are not."""


@dataclasses.dataclass
class Case:
    """One call of a function: ``call(tensors)`` gives the tensors of its result, ``tensors`` are PyTorch's."""

    call: Callable[[Sequence[Tensor]], list[Tensor]]
    tensors: list[Tensor]
    dtype: torch.dtype
    text: str
    places: bool = False
    ordered: bool = False

    def runs(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Inputs to try, by name: PyTorch's own first."""
        yield "samples", [t.clone() for t in self.tensors]
        if self.ordered:
            return
        if self.dtype == torch.bool:
            yield "all true", self._filled(lambda t, _: torch.ones_like(t))
            yield "all false", self._filled(lambda t, _: torch.zeros_like(t))
        elif self.dtype == torch.int64:
            yield "extremes", self._filled(lambda t, seed: _scattered(t, _INTEGERS, seed))
            yield "small", self._filled(lambda t, seed: _scattered(t, _INTEGERS[:9], seed))
        else:
            large = [6e4, -6e4, 6e-8] if self.dtype == _HALF else [1e30, -1e30, 1e-40]
            finite = [x for x in _FINITE + large if not self.places or math.copysign(1, x) > 0 or x]
            yield "finite", self._filled(lambda t, seed: _scattered(t, finite[:-3], seed))
            yield "large", self._filled(lambda t, seed: _scattered(t, finite, seed))
            yield "infinite", self._filled(lambda t, seed: _scattered(t, [math.inf, -math.inf, *finite], seed))
            yield "nan", self._filled(lambda t, seed: _scattered(t, [math.nan, math.inf, *finite[:-3]], seed))

    def _filled(self, value: Callable[[Tensor, int], Tensor]) -> list[Tensor]:
        return [value(t, i) if t.dtype == self.dtype and t.numel() else t.clone() for i, t in enumerate(self.tensors)]


def _scattered(like: Tensor, values: Sequence[float], seed: int) -> Tensor:
    """Of the shape of a tensor: these values at random places, and others of both signs."""
    generator = torch.Generator().manual_seed(seed)
    rest = torch.randn(like.shape, generator=generator, dtype=torch.float32) * 3
    flat = rest.round().long().flatten() if not like.dtype.is_floating_point else rest.to(like.dtype).flatten()
    order = torch.randperm(len(values), generator=generator)
    places = torch.randperm(flat.numel(), generator=generator)[: len(values)]
    flat[places] = torch.tensor(values, dtype=like.dtype)[order[: len(places)]]
    return flat.reshape(like.shape)


def names() -> list[str]:
    """Of the functions, in PyTorch's order; a variant after a dot."""
    return list(_table())


def _table() -> dict[str, Any]:
    return {op.name + (f".{op.variant_test_name}" if op.variant_test_name else ""): op for op in op_db}


def cases(name: str, most: int = 6) -> list[Case]:
    """Samples of a function, up to ``most`` of float32 and half as many of each other type it has."""
    op = _table()[name]
    found: list[Case] = []
    for dtype in DTYPES:
        if dtype not in op.dtypes:
            continue
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                samples = list(op.sample_inputs("cpu", dtype, requires_grad=False))
            except Exception:  # noqa: BLE001 - of some types there are none on a CPU
                continue
        mine = [case for sample in samples if (case := _case(op, sample, dtype)) is not None]
        limit = most if dtype == torch.float32 else most // 2
        step = max(1, -(-len(mine) // limit))
        found += mine[::step]
    return found


def _case(op: Any, sample: Any, dtype: torch.dtype) -> Case | None:
    leaves, spec = pytree.tree_flatten((sample.input, sample.args, sample.kwargs))
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    tensors = [leaves[i].detach() for i in places]
    if not tensors or any(t.layout != torch.strided or t.numel() > LARGEST or t.is_nested for t in tensors):
        return None
    rest = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]

    def call(given: Sequence[Tensor]) -> list[Tensor]:
        filled = list(rest)
        for i, tensor in zip(places, given, strict=True):
            filled[i] = tensor
        input, args, kwargs = pytree.tree_unflatten(filled, spec)
        return [leaf for leaf in pytree.tree_leaves(op.op(input, *args, **kwargs)) if isinstance(leaf, Tensor)]

    def shown(leaf: Any) -> str:
        return f"{str(leaf.dtype)[6:]}{list(leaf.shape)}" if isinstance(leaf, Tensor) else repr(leaf)[:60]

    text = ", ".join(
        [pytree.tree_map(shown, x) if not isinstance(x, (list, tuple)) else str(pytree.tree_map(shown, list(x)))
         for x in (sample.input, *sample.args)]
        + [f"{k}={pytree.tree_map(shown, v)}" for k, v in sample.kwargs.items()]
    )  # fmt: skip
    return Case(call, tensors, dtype, text[:200], places=op.name in _PLACES, ordered=op.name in _ORDERED)
