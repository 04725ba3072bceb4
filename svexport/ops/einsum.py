"""Einsum as matrix products: an equation becomes a plan of Transpose, Reshape, MatMul, Mul and ReduceSum steps.

A plan is pure data. Two executors run it: the one at the end of this file with torch operators, and the op's body with
ONNX nodes (``svexport/symbolic/einsum.py``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise, permutations, product, takewhile
from string import ascii_letters, ascii_uppercase
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from svexport.ops import _cuda
from svexport.ops._op import Op, autocast, tracing

__all__ = ["Einsum", "EinsumPlan", "einsum"]

Labels: TypeAlias = tuple[int, ...]
Shape: TypeAlias = "tuple[int | None, ...]"

# ------------------------------------------------------------------ equation -> labels


@lru_cache(maxsize=4096)
def parse(equation: str, ranks: tuple[int, ...]) -> tuple[Labels, tuple[int, ...]]:
    """Canonical integer form of an equation for operands of the given ranks.

    Returns:
        ``labels``, those of every operand and then of the output, concatenated and numbered by first appearance, the
        dimensions of an ellipsis as labels of their own; and ``ranks`` with the output's rank appended.

    Raises:
        RuntimeError: if the equation is malformed or does not fit the ranks.
    """
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ranks):
        raise RuntimeError(
            f"einsum(): expected one operand for each of the {len(terms)} comma-separated terms of {equation!r}, "
            f"got {len(ranks)}"
        )
    subscripts = [_subscripts(term, equation, f"operand {i}") for i, term in enumerate(terms)]
    operands: list[tuple[str, ...]] = []
    covered = 0  # dimensions under the longest ellipsis; the shorter ones are aligned to its right end
    for i, (names, rank) in enumerate(zip(subscripts, ranks, strict=True)):
        missing = rank - len(names) + ("..." in names)
        if missing < 0 or (missing and "..." not in names):
            raise RuntimeError(
                f"einsum(): expected operand {i} of {equation!r} to have {'at least ' if '...' in names else ''}"
                f"{rank - missing} dimensions, one for each subscript, got {rank}; "
                "add or remove subscripts, or let an ellipsis (...) stand for the rest"
            )
        covered = max(covered, missing) if "..." in names else covered
        operands.append(_expand(names, missing))

    # Counted in strings: torch.compile of 2.6 knows neither Counter nor count() of a list.
    letters = "".join([name for names in operands for name in names if name in ascii_letters])
    counts = {name: letters.count(name) for name in letters}
    if arrow:
        names = _subscripts(output, equation, "the output")
        for name in names:
            count = "".join(names).count(name)
            if name != "..." and (count > 1 or name not in counts):
                fault = f"appears {count} times there" if count > 1 else "appears in no operand"
                raise RuntimeError(
                    f"einsum(): expected output subscripts of {equation!r} to be distinct subscripts of the operands, "
                    f"but {name!r} {fault}"
                )
    else:
        names = ("...", *(name for name in sorted(counts) if counts[name] == 1))  # upper case first, as torch has it
    operands.append(_expand(names, covered))

    numbers: dict[str, int] = {}
    labels = tuple(numbers.setdefault(name, len(numbers)) for names in operands for name in names)
    return labels, tuple(len(names) for names in operands)


def _subscripts(term: str, equation: str, where: str) -> tuple[str, ...]:
    """``"b...ij"`` -> ``("b", "...", "i", "j")``."""
    names = []
    rest = term
    while rest := rest.lstrip(" "):
        name = "..." if rest.startswith("...") else rest[0]
        if name not in ascii_letters and (name != "..." or "..." in names):
            raise RuntimeError(
                f"einsum(): expected subscripts in [a-zA-Z] and at most one ellipsis (...) for {where} of "
                f"{equation!r}, got {name!r} in {term!r}"
            )
        names.append(name)
        rest = rest[len(name) :]
    return tuple(names)


def _expand(names: Iterable[str], covered: int) -> tuple[str, ...]:
    """Names the dimensions of an ellipsis, from its right end: ``("...", "i")`` -> ``(".2", ".1", "i")``."""
    ellipsis = [f".{i}" for i in range(covered, 0, -1)]
    return tuple(part for name in names for part in (ellipsis if name == "..." else [name]))


def _subscript(number: Any) -> str:
    """A subscript of the sublist form: 0..25 are A..Z, 26..51 are a..z."""
    if number is Ellipsis:
        return "..."
    if not 0 <= number < 52:
        raise ValueError(f"einsum(): expected subscripts of a sublist in the range [0, 52), got {number}")
    return ascii_uppercase[number] if number < 26 else ascii_letters[number - 26]


# ------------------------------------------------------------------ the plan


@dataclass(frozen=True, slots=True)
class Diagonal:
    """Dimensions ``dim`` and ``dim + 1`` of value ``x`` become one."""

    x: int
    dim: int


@dataclass(frozen=True, slots=True)
class ReduceSum:
    """Sum over ``axes``; integers become int64, as in torch."""

    x: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transpose:
    """The dimensions of ``x`` in the order ``perm``.

    ``store``, if not empty, is the order in which a copy is best laid out in memory, for executors whose tensors have
    strides: the innermost dimension stays innermost, which copies several times faster, and the product that follows
    reads a transposed matrix just as well.
    """

    x: int
    perm: tuple[int, ...]
    store: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshape:
    """To one dimension per group of labels: the product of their sizes, 1 for an empty group."""

    x: int
    groups: tuple[Labels, ...]


@dataclass(frozen=True, slots=True)
class MatMul:
    """``x @ y`` over the last two dimensions, the others broadcast; then summed over its dimensions ``summed``.

    ``swapped``: best computed as ``(y.T @ x.T).T``, for executors whose tensors have strides: the output has the rows
    innermost then, and so does its gradient.
    """

    x: int
    y: int
    summed: tuple[int, ...] = ()
    swapped: bool = False


@dataclass(frozen=True, slots=True)
class Mul:
    """``x * y``, broadcast."""

    x: int
    y: int


Step: TypeAlias = "Diagonal | ReduceSum | Transpose | Reshape | MatMul | Mul"


@dataclass(frozen=True)
class EinsumPlan:
    """How to compute an einsum, for any executor.

    Values are numbered: the operands first, then the result of each step. Every value is used once; the last one is the
    output.

    Attributes:
        steps: in order of execution. No Transpose merely moves dimensions of size 1.
        sizes: of every label, None where it is dynamic.
        sources: the (operand, dimension) that has the size of a label.
    """

    steps: tuple[Step, ...]
    sizes: Shape
    sources: tuple[tuple[int, int], ...]

    @property
    def transposes(self) -> int:
        """How many steps move data without computing anything."""
        return sum(isinstance(step, Transpose) for step in self.steps)


@lru_cache(maxsize=4096)
def plan(
    labels: Labels, ranks: tuple[int, ...], shapes: tuple[Shape, ...], training: bool = False, view: bool = False
) -> EinsumPlan:
    """Plans an einsum given in canonical form (see :func:`parse`).

    Args:
        shapes: of the operands; None is a dynamic size, taken not to be broadcast.
        training: leaves every sum to the products. A sum after a product saves a copy, but its gradient needs more.
        view: for executors whose tensors have strides: the output costs nothing in whatever order its dimensions are.

    Raises:
        RuntimeError: if the sizes of a label contradict each other.
    """
    *operands, output = split(labels, ranks)
    sizes, sources = _label_sizes(operands, shapes)
    planner = _Planner(sizes, len(operands), training, view)
    alone = len(operands) == 1

    # A dimension of size 1 is no dimension at all: it broadcasts, or Reshape puts it back at the end. Only the sum of a
    # single operand keeps it, for the dtype that torch gives to sums.
    values = []
    for i, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
        dims = [(l,) if s != 1 or (alone and l not in output) else () for l, s in zip(operand, shape, strict=True)]
        values.append(planner.diagonal(_Value(i, tuple(dims))))
    holders = Counter(label for value in values for label in value.labels)
    kept = {label for label, count in holders.items() if count > 1}.union(output)
    values = [planner.reduce(value, kept) for value in values]

    groups = tuple((label,) if label in holders else () for label in output)
    order = _flatten(groups)
    for chosen in _path([value.labels for value in values], order, planner.sizes):
        first, *rest = [values[i] for i in chosen]
        values = [value for i, value in enumerate(values) if i not in chosen]
        for i, second in enumerate(rest, 1):
            others = [*values, *rest[i:]]
            kept = set(order).union(*(value.labels for value in others))
            first = planner.contract(first, second, kept, None if others else order)
        values.append(first)
    planner.arrange(values[0], groups)
    return EinsumPlan(tuple(planner.steps), sizes, sources)


def split(labels: Sequence[int], ranks: Sequence[int]) -> list[Labels]:
    """The labels of every operand and of the output."""
    rest = iter(labels)
    return [tuple(next(rest) for _ in range(rank)) for rank in ranks]


def _label_sizes(operands: Sequence[Labels], shapes: Sequence[Shape]) -> tuple[Shape, tuple[tuple[int, int], ...]]:
    """The broadcast size of every label, and a dimension that has it."""
    sizes: dict[int, int | None] = {}
    sources: dict[int, tuple[int, int]] = {}
    for i, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
        seen: dict[int, int | None] = {}
        for dim, (label, size) in enumerate(zip(operand, shape, strict=True)):
            if None not in (size, twin := seen.setdefault(label, size)) and size != twin:
                raise RuntimeError(
                    f"einsum(): expected the dimensions of operand {i} that share a subscript (a diagonal) to have one "
                    f"size, got {twin} and {size} in shape {tuple(shape)}"
                )
            known = sizes.setdefault(label, 1)
            if known in (1, None) and size != 1 and (known == 1 or size is not None):
                sizes[label], sources[label] = size, (i, dim)
            elif size not in (1, None, known):
                other, other_dim = sources[label]
                raise RuntimeError(
                    f"einsum(): expected the sizes of one subscript to be equal or 1, got {known} in dimension "
                    f"{other_dim} of operand {other} of shape {tuple(shapes[other])}, and {size} in dimension {dim} of "
                    f"operand {i} of shape {tuple(shape)}"
                )
            sources.setdefault(label, (i, dim))
    return tuple(sizes[label] for label in range(len(sizes))), tuple(sources[label] for label in range(len(sizes)))


def _path(terms: Sequence[Labels], output: Labels, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Which operands to contract, in order; the result of each contraction goes to the end."""
    if len(terms) < 3:
        return [(0, 1)] * (len(terms) - 1)
    import opt_einsum

    symbols = ["".join(map(opt_einsum.get_symbol, term)) for term in (*terms, output)]
    shapes = [tuple(sizes[label] for label in term) for term in terms]
    path, _ = opt_einsum.contract_path(",".join(symbols[:-1]) + "->" + symbols[-1], *shapes, shapes=True)
    return path


def _flatten(groups: Iterable[Iterable[int]]) -> Labels:
    return tuple(label for group in groups for label in group)


@dataclass(frozen=True)
class _Value:
    """A value under planning: each of its dimensions holds a group of labels, an empty one has size 1."""

    index: int
    dims: tuple[Labels, ...]

    @property
    def labels(self) -> Labels:
        return _flatten(self.dims)


class _Planner:
    """Appends steps; ``sizes`` are those used for costs."""

    _NOMINAL = 32  # for a dynamic size

    def __init__(self, sizes: Shape, operands: int, training: bool, view: bool) -> None:
        self.steps: list[Step] = []
        self.sizes = [self._NOMINAL if size is None else max(size, 1) for size in sizes]
        self.operands = operands
        self.training = training
        self.view = view

    def add(self, step: Step, dims: Iterable[Labels]) -> _Value:
        self.steps.append(step)
        return _Value(self.operands + len(self.steps) - 1, tuple(dims))

    def diagonal(self, value: _Value) -> _Value:
        """Merges dimensions of the same label."""
        for label in dict.fromkeys(value.labels):
            while value.dims.count((label,)) > 1:
                first = value.dims.index((label,))
                second = value.dims.index((label,), first + 1)
                if second > first + 1:
                    others = (i for i in range(first + 1, len(value.dims)) if i != second)
                    value = self.permute(value, (*range(first + 1), second, *others))
                value = self.add(Diagonal(value.index, first), value.dims[:first] + value.dims[first + 1 :])
        return value

    def reduce(self, value: _Value, kept: set[int]) -> _Value:
        """Sums over every label that nothing else needs."""
        axes = tuple(i for i, dim in enumerate(value.dims) if not kept.issuperset(dim))
        if not axes:
            return value
        return self.add(ReduceSum(value.index, axes), (d for i, d in enumerate(value.dims) if i not in axes))

    def permute(self, value: _Value, perm: tuple[int, ...], store: tuple[int, ...] = ()) -> _Value:
        return self.add(Transpose(value.index, perm, store), (value.dims[i] for i in perm))

    def reshape(self, value: _Value, groups: tuple[Labels, ...]) -> _Value:
        return value if value.dims == groups else self.add(Reshape(value.index, groups), groups)

    def arrange(self, value: _Value, groups: tuple[Labels, ...], store: Labels = ()) -> _Value:
        """Transposes and reshapes ``value`` into the dimensions ``groups``; for ``store`` see :class:`Transpose`."""
        order = _flatten(groups)
        if value.labels != order:
            if any(_scattered(dim, order) for dim in value.dims):
                value = self.reshape(value, tuple((label,) for label in value.labels))
            value = self.permute(value, _permutation(value.dims, order), store and _permutation(value.dims, store))
        return self.reshape(value, groups)

    def contract(self, x: _Value, y: _Value, kept: set[int], output: Labels | None) -> _Value:
        """Multiplies two values and sums over what is not ``kept``; tends to the order ``output`` if that is given."""
        if kept.issuperset(set(x.labels).intersection(y.labels)):
            return self.multiply(x, y, output)
        gemm = _best_gemm(x.labels, y.labels, kept, output, self.sizes, self.training, self.view)
        if gemm.swapped:
            x, y = y, x
        x = self.matrix(x, gemm.batch, gemm.rows, gemm.inner)
        y = self.matrix(y, gemm.batch, gemm.inner, gemm.columns)
        summed = tuple(i for i, label in enumerate(gemm.batch) if label not in kept)
        batch = ((label,) for label in gemm.batch if label in kept)
        innermost = output[-1:] if output and gemm.columns else ()
        swapped = bool(innermost) and innermost == gemm.rows[-1:]
        return self.add(MatMul(x.index, y.index, summed, swapped), (*batch, gemm.rows, gemm.columns))

    def matrix(self, value: _Value, batch: Labels, rows: Labels, columns: Labels) -> _Value:
        """``value`` as a batch of matrices."""
        lead = tuple((label,) if label in value.labels else () for label in batch)
        while lead and not lead[0]:
            lead = lead[1:]
        if rows and columns and value.labels == (*_flatten(lead), *columns, *rows):
            # Transposed as a last step, where runtimes make it part of the product.
            value = self.arrange(value, (*lead, columns, rows))
            return self.permute(value, (*range(len(lead)), len(lead) + 1, len(lead)))
        store: Labels = ()
        groups = (_flatten(lead), rows, columns)
        if columns and rows[-1:] == value.labels[-1:] and any(_scattered(group, value.labels) for group in groups):
            store = (*groups[0], *columns, *rows)
        return self.arrange(value, (*lead, rows, columns), store)

    def multiply(self, x: _Value, y: _Value, output: Labels | None) -> _Value:
        """The product of values of which no label is summed over."""

        def moved(order: Labels) -> int:
            parts = [(v.labels, tuple(label for label in order if label in v.labels)) for v in (x, y)]
            parts.append((order, output or order))
            return sum(_size(before, self.sizes) for before, after in parts if before != after)

        orders = [_merge(x.labels, y.labels), _merge(y.labels, x.labels)]
        order = min([output, *orders] if output else orders, key=moved)
        operands = []
        for value in (x, y):
            groups = [(label,) if label in value.labels else () for label in order]
            while groups and not groups[0]:
                del groups[0]
            operands.append(self.arrange(value, tuple(groups)))
        return self.add(Mul(operands[0].index, operands[1].index), ((label,) for label in order))


def _scattered(group: Labels, order: Labels) -> bool:
    """Whether ``group`` is no run of ``order``."""
    return bool(group) and group != order[order.index(group[0]) :][: len(group)]


def _permutation(dims: Sequence[Labels], order: Labels) -> tuple[int, ...]:
    """That puts the labels of ``dims`` in ``order``, empty dimensions first."""
    return tuple(sorted(range(len(dims)), key=lambda i: order.index(dims[i][0]) if dims[i] else -1))


# ------------------------------------------------------------------ the search for the best matrix product

# Costs, in elements read or written once. Ratios rather than truths: they hold roughly on CPUs and GPUs alike.
_MOVE = 2.5  # a Transpose: read, write, and one of them strided
_SWAP = 0.25  # a Transpose of the last two dimensions before a product, which most runtimes absorb
_FLOPS = 32  # multiply-adds in the time of one element
_TILE = 8  # a product is computed in tiles: small dimensions waste what they do not fill
_LAUNCH = 64  # for each matrix of a batch
_SUMMED = 4  # products, and more, read and write their sum too often where tensors have strides
_STEP = 4096  # for a Transpose, or a sum after the product, whatever its size


_Atom: TypeAlias = Labels  # fused labels, see _fuse
_Atoms: TypeAlias = tuple[_Atom, ...]


@dataclass(frozen=True, slots=True)
class _Gemm:
    """``batch`` dimensions of ``(rows, inner) @ (inner, columns)``, of the operands in order or swapped.

    A free label of one operand may be in ``batch``: the other operand is broadcast. So may a contracted one: it is
    summed over after the product.
    """

    swapped: bool
    batch: Labels
    rows: Labels
    columns: Labels
    inner: Labels


def _best_gemm(
    x: Labels,
    y: Labels,
    kept: set[int],
    output: Labels | None,
    label_sizes: Sequence[int],
    training: bool,
    view: bool,
) -> _Gemm:
    """The cheapest way to compute a pair as a batched matrix product."""
    orders = _fuse([order for order in (x, y, output) if order is not None], kept)
    sizes = {atom: _size(atom, label_sizes) for order in orders for atom in order}

    def size(atoms: Iterable[_Atom]) -> int:
        return math.prod(sizes[atom] for atom in atoms)

    largest = max(size(orders[0]), size(orders[1]))
    best, best_cost = None, math.inf

    for swapped in (False, True):
        left, right = (orders[1], orders[0]) if swapped else orders[:2]
        target = orders[2] if output is not None else ()
        shared = {atom for atom in left if atom in right}
        contracted = {atom for atom in shared if not kept.issuperset(atom)}
        for rows, columns, inner in product(
            _tails(set(left) - shared, left, target),
            _tails(set(right) - shared, right, target),
            _tails(contracted, left, right),
        ):
            if not inner:
                continue
            batch = {*left, *right} - rows - columns - inner
            summed = batch & contracted
            b, m, n, k = size(batch), size(rows), size(columns), size(inner)
            if summed and (training or b * m * n > largest or (view and size(summed) > _SUMMED)):
                continue
            cost = b * (m * k + k * n + m * n + _tiled(m) * _tiled(n) * _tiled(k) / _FLOPS + _LAUNCH)
            if summed:
                cost += b * m * n + b * m * n / size(summed) + _STEP
            for operand, matrix in ((left, m * k), (right, k * n)):
                if 0 < len(batch.intersection(operand)) < len(batch):  # no single stride: torch copies what it expands
                    cost += 2 * b * matrix
            if cost >= best_cost:
                continue
            for bs, ms, ns, ks in product(
                _orders(batch, left, right, target),
                _orders(rows, left, target),
                _orders(columns, right, target),
                _orders(inner, left, right),
            ):
                total = cost + _move(left, bs, ms, ks, size, training) + _move(right, bs, ks, ns, size, training)
                if target and target != tuple(atom for atom in bs if atom not in summed) + ms + ns:
                    total += _SWAP * size(target) if view else _MOVE * size(target) + _STEP
                if total < best_cost:
                    best_cost = total
                    best = _Gemm(swapped, *map(_flatten, (bs, ms, ns, ks)))
    assert best is not None
    return best


def _fuse(orders: Sequence[Labels], kept: set[int]) -> list[_Atoms]:
    """Makes one atom of labels that stand side by side wherever they appear."""
    after = [dict(pairwise(order)) for order in orders]

    def follows(a: int, b: int) -> bool:
        return (a in kept) == (b in kept) and all(
            following.get(a) == b for following, order in zip(after, orders, strict=True) if a in order or b in order
        )

    fused = []
    for order in orders:
        atoms: list[_Atom] = []
        for label in order:
            if atoms and follows(atoms[-1][-1], label):
                atoms[-1] += (label,)
            else:
                atoms.append((label,))
        fused.append(tuple(atoms))
    return fused


def _tails(atoms: Set[_Atom], *orders: _Atoms) -> set[frozenset[_Atom]]:
    """Subsets worth a matrix dimension: what is left when the first atoms of an order go to the batch."""
    ordered = [[atom for atom in order if atom in atoms] for order in orders]
    return {frozenset(order[i:]) for order in ordered for i in range(len(order) + 1)}


def _orders(atoms: Set[_Atom], *orders: _Atoms) -> set[_Atoms]:
    """Orders of ``atoms`` in which some tensor already has them; those a tensor lacks come where another has them."""
    if len(atoms) < 2:
        return {tuple(atoms)}
    chosen = [tuple(atom for atom in order if atom in atoms) for order in orders]
    merged = set()
    for first, *rest in permutations(chosen):
        for order in rest:
            first = _merge(first, order)
        merged.add(first)
    return merged


def _merge(first: tuple, second: tuple) -> tuple:
    """``first`` with the elements that only ``second`` has, each after its predecessor there."""
    merged, at = list(first), 0
    for element in second:
        if element in merged:
            at = merged.index(element) + 1
        else:
            merged.insert(at, element)
            at += 1
    return tuple(merged)


def _move(
    operand: _Atoms, batch: _Atoms, rows: _Atoms, columns: _Atoms, size: Callable[[_Atoms], int], training: bool
) -> float:
    """The cost of turning ``operand`` into a batch of matrices; a transposed matrix is one to torch, which trains."""
    lead = tuple(atom for atom in batch if atom in operand)
    if operand == lead + rows + columns:
        return 0
    if operand == lead + columns + rows:
        return _SWAP * size(operand) + (0 if training else _STEP)
    return _MOVE * size(operand) + _STEP


def _tiled(size: int) -> int:
    return -(-size // _TILE) * _TILE


def _size(labels: Iterable[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[label] for label in labels)


# ------------------------------------------------------------------ running a plan with torch

Program: TypeAlias = "tuple[tuple[Callable[..., Tensor], tuple[int, ...], tuple], ...]"
"""A plan bound to sizes: (function, values, further arguments) for every step."""


def bind(chosen: EinsumPlan, sizes: Sequence[int]) -> Program:
    """Prepares a plan for tensors whose labels have the given sizes."""
    return tuple(_bind_step(step, sizes) for step in chosen.steps)


def _bind_step(step: Step, sizes: Sequence[int]) -> tuple[Callable[..., Tensor], tuple[int, ...], tuple]:
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
            return torch.reshape, (x,), (tuple(_size(group, sizes) for group in groups),)
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
    """The same with few large products: what is summed joins the inner dimension, and batches broadcast by one operand
    the rows or columns of the other. Copies an operand, where the product of small matrices would be as large."""
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
    """Whether to multiply one part of a batch after the other: one CPU thread then finds the products in its cache."""
    return x.device.type == "cpu" and torch.get_num_threads() == 1 and x.numel() >= max(parts, 1) * 2**16


_UNROLL = 8  # up to so many products are added up one after the other, into one result


def _sum_of_products(xs: Sequence[Tensor], ys: Sequence[Tensor]) -> Tensor:
    """The sum of a few products of matrices or of batches of them, in no more memory than one takes."""
    multiply, accumulate = (torch.mm, Tensor.addmm_) if xs[0].dim() == 2 else (torch.bmm, Tensor.baddbmm_)
    output = multiply(xs[0], ys[0])
    for x, y in zip(xs[1:], ys[1:], strict=True):
        if type(output) is Tensor:
            accumulate(output, x.to(output.dtype), y.to(output.dtype))  # autocast does not convert products in place
        else:
            output = output + multiply(x, y)  # traced into a graph, where nothing may be in place
    return output


def run(program: Program, operands: Sequence[Tensor]) -> Tensor:
    """Runs a bound plan. Plain torch operators: autograd, vmap and every device and dtype come with them."""
    values: list[Any] = list(operands)
    for function, inputs, arguments in program:
        tensors = [values[i] for i in inputs]
        for i in inputs:
            values[i] = None  # used once: an intermediate result is freed as soon as the next one exists
        values.append(function(*tensors, *arguments))
    return values[-1]


@lru_cache(maxsize=4096)
def _program(equation: str, training: bool, view: bool, *shapes: tuple[int, ...]) -> Program:
    chosen = plan(*parse(equation, tuple(map(len, shapes))), shapes, training, view)
    return bind(chosen, chosen.sizes)  # type: ignore[arg-type]  # all of them known


def _training(operands: Sequence[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(x.requires_grad for x in operands)


# ------------------------------------------------------------------ the CUDA kernels

_SHORT = 2**21  # elements of operands that a GPU copies in less time than a plan's further products take to begin
_ROWS_OF_FLOATS, _ROWS_OF_HALVES = 300, 700  # of matrices whose gradients are faster as one product, and fewer
_LARGE = 2**18  # elements, and more
_WIDTHS = range(8, 65)  # of what a large tensor has in common with the small one only, as far as it is innermost
_COUNTS = range(1, 9)  # of such
_ROWS = 128  # for every matrix of the small tensor, and more
_MIXED = 2**21  # bytes of the larger one of those whose channels are mixed, and more
_MIXED_SUMMED = 2**17  # the same where the product or a gradient sums over samples: a plan has a product for each
_FEW_CHANNELS = 128  # and fewer, for that
_FEW_SUMMED, _FEW_COLUMNS = 32, 16  # and fewer
_NARROW = 40  # channels, and fewer
_SUMMED_CHANNELS = range(1, 257)
_CHANNELS = range(1, 513)
_MULTIPLIED = 2**24  # products of one sample, and more
_POSITIONS = 128  # and more
_SHARED = 222 * 2**10  # bytes of shared memory of a multiprocessor, but for what is beside matrices and tiles


@lru_cache(maxsize=64)
def _wide(device: int) -> bool:
    """Whether a CUDA device multiplies matrices by groups of warps, as the kernels that mix channels do."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=4096)
def _kernel_products(
    equation: str, *shapes: tuple[int, ...], item_size: int, wide: bool = False, needs: tuple[bool, ...] = ()
) -> tuple[bool, ...]:
    """Whether the operator's CUDA kernels are faster than a plan: for an einsum, and for each operand's gradient.

    They are for two large tensors and a small one, whichever is the output: a graph convolution or one of 1 x 1, and
    their gradients. They read as it is what a plan has to copy, and multiply float32 on tensor cores.

    Args:
        item_size: bytes of an element.
        wide: whether there are kernels that mix channels.
        needs: the operands that need a gradient.
    """
    labels, ranks = parse(equation, tuple(map(len, shapes)))
    *operands, output = split(labels, ranks)
    known, _ = _label_sizes(operands, shapes)
    sizes = [size or 0 for size in known]
    none = (False,) * (len(operands) + 1)
    if len(operands) != 2 or 0 in sizes:
        return none
    terms = [tuple(label for label in output if sizes[label] != 1)]
    for operand, shape in zip(operands, shapes, strict=True):
        terms.append(tuple(label for label, size in zip(operand, shape, strict=True) if size != 1))
    at_small, *at_large = sorted(range(3), key=lambda i: _size(terms[i], sizes))
    small, large = terms[at_small], [terms[i] for i in at_large]
    if {*small} - {*large[0], *large[1]}:
        return none
    if _convolves(small, large, sizes):
        fits = {at_small: 1 in (_own(large[0], large[1], sizes)[1], _own(large[1], large[0], sizes)[1])}
        for at, (target, source) in zip(at_large, (large, large[::-1]), strict=True):
            fits[at] = _fits(source, target, sizes, item_size)
        return tuple(fits[i] for i in range(3))
    if not wide or not _mixes(small, large, sizes):
        return none
    products = {at_small: _correlates(small, large, sizes, item_size)}
    learned = at_small == 0 or any(needs[at_small - 1 : at_small])
    for at, (target, source) in zip(at_large, (large, large[::-1]), strict=True):
        products[at] = _channels(source, target, sizes, item_size, learned)
    if products[at_large[0]] and products[at_large[1]]:
        products[at_small] = True
    return tuple(products[i] for i in range(3))


def _own(term: Labels, other: Labels, sizes: Sequence[int]) -> tuple[int, int]:
    """Of what a term has and another lacks: the size of that which is innermost, and of the rest."""
    own = [label for label in term if label not in other]
    width = _size(takewhile(own.__contains__, reversed(term)), sizes)
    return width, _size(own, sizes) // width


def _convolves(small: Labels, large: Sequence[Labels], sizes: Sequence[int]) -> bool:
    """Whether the kernels of a graph convolution are for this."""
    shared = {*small}.intersection(*large)
    rows, copied = [], not shared.issuperset(large[0][: len(shared)])  # matrices of a batch that is not the outermost
    for term, other in (large, reversed(large)):
        own = [label for label in term if label not in other]
        run = list(takewhile(own.__contains__, reversed(term)))
        width, count = _own(term, other, sizes)
        if width not in _WIDTHS or count not in _COUNTS or _size(term, sizes) < _LARGE or not {*own} <= {*small}:
            return False
        rows.append(term[: -len(run)][-1:])
        copied = copied or count > 1
    alike = [label for label in large[0] if label in large[1] and label not in small]
    return rows[0] == rows[1] and not {*rows[0]} & {*small} and copied and _size(alike, sizes) >= _ROWS


def _fits(source: Labels, target: Labels, sizes: Sequence[int], item_size: int) -> bool:
    """Whether a multiprocessor holds a small matrix, in two parts if of float32, and two tiles of 32 rows."""
    (width, count), (columns, _) = _own(source, target, sizes), _own(target, source, sizes)
    matrix = count * -(-width // 2) * 2 * -(-columns // 16) * 16 * (8 if item_size == 4 else item_size)
    return matrix + 2 * 32 * (count * width + columns) * item_size <= _SHARED


def _positions(large: Sequence[Labels], sizes: Sequence[int]) -> int:
    """Of one sample: what two terms end with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*map(reversed, large), strict=False))
    return _size([label for label, _ in same], sizes)


def _mixes(small: Labels, large: Sequence[Labels], sizes: Sequence[int]) -> bool:
    """Whether the channels of all positions are mixed alike."""
    return {*small} == {*large[0]} ^ {*large[1]} and _positions(large, sizes) >= _POSITIONS


def _channels(source: Labels, target: Labels, sizes: Sequence[int], item_size: int, learned: bool) -> bool:
    """Whether the kernels that mix the channels of a large tensor are for this; learned: the matrix has a gradient."""
    shared = [label for label in source if label in target]
    total, positions = _size(shared, sizes), _positions((source, target), sizes)
    summed, count = _size(source, sizes) // total, _size(target, sizes) // total
    if total == positions:  # one sample: a plan copies nothing, and one product may have few columns to share all sums
        enough = item_size == 2 or (total * summed * count >= _MULTIPLIED and summed < 4 * count)
        least = _MIXED
    else:
        enough = True
        least = _MIXED_SUMMED if learned and max(summed, count) <= _FEW_CHANNELS else _MIXED
    return (
        summed in _SUMMED_CHANNELS
        and count in _CHANNELS
        and enough
        and max(summed, count) * total * item_size >= least
        # Half types are as fast in torch where rows lie at 16 bytes, but for products of few columns or sums.
        and (
            item_size > 2
            or positions % 8 != 0
            or (total > positions and (summed <= _FEW_SUMMED or count <= _FEW_COLUMNS))
        )
    )


def _correlates(small: Labels, large: Sequence[Labels], sizes: Sequence[int], item_size: int) -> bool:
    """Whether the kernel that sums over all positions is for this: a plan multiplies each sample, or copies them all.

    Its blocks leave parts of the output, which are to be few beside what is read.
    """
    total = _size([label for label in large[0] if label in large[1]], sizes)
    samples = total // _positions(large, sizes)
    if samples == 1:
        narrow = _size(large[0], sizes) // total <= _NARROW  # the fewer channels of the two
        parts = 8 if item_size > 2 else 4 if narrow else 1
    else:  # a plan adds up the product of every sample; of two in half types fast ones, where rows lie at 16 bytes
        parts = 128 if item_size > 2 else 8 if samples == 2 and total % 16 == 0 else 64
    return total * parts >= _size(small, sizes)


def _takes_kernels(operands: Sequence[Tensor]) -> bool:
    """Whether the operator runs them: plain tensors, not those of torch.func or of forward-mode differentiation."""
    return all(
        x.is_cuda
        and type(x) in (Tensor, nn.Parameter)
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and forward_ad.unpack_dual(x).tangent is None
        for x in operands
    )


def _autocast(operands: Sequence[Tensor], labels: Labels, ranks: tuple[int, ...]) -> list[Tensor]:
    """The operands as autocast converts them where anything contracts: then they are factors of matrix products."""
    converted = autocast(operands)
    if any(new.dtype != old.dtype for new, old in zip(converted, operands, strict=True)):
        *terms, output = split(labels, ranks)
        if not any(label not in output and sum(label in term for term in terms) > 1 for label in labels):
            return list(operands)
    return list(converted)


# ------------------------------------------------------------------ the op


def reference(operands: Sequence[Tensor], labels: Sequence[int], ranks: Sequence[int]) -> Tensor:
    # Sizes stay symbolic under torch.export; the layout of the output must not depend on them, so it is contiguous.
    shapes = tuple(tuple(s if isinstance(s, int) else None for s in x.shape) for x in operands)
    chosen = plan(tuple(labels), tuple(ranks), shapes, _training(operands))
    output = run(bind(chosen, [operands[i].shape[dim] for i, dim in chosen.sources]), operands)
    if all(isinstance(step, Diagonal | Reshape | Transpose) for step in chosen.steps):
        return output.clone(memory_format=torch.contiguous_format)  # a view of an operand so far
    return output.contiguous()


def samples(make: Callable[..., Tensor]) -> Iterator[tuple]:
    for equation, *shapes in [
        ("nctw,cd->ndtw", (2, 3, 5, 4), (3, 6)),
        ("nkctv,kvw->nctw", (2, 3, 4, 5, 7), (3, 7, 7)),
        ("nkctv,kcvw->nctw", (2, 3, 4, 5, 7), (3, 4, 7, 7)),
        ("bhnm,bdhm->bdhn", (2, 3, 5, 4), (2, 6, 3, 4)),
        ("...ij,...jk", (2, 1, 3, 4), (5, 4, 2)),
        ("iji->j", (3, 4, 3)),
        ("ij->ji", (3, 4)),
        ("bn,anm,bm->ba", (2, 5), (3, 5, 4), (2, 4)),
        ("i,j->ij", (3,), (1,)),
    ]:
        operands = [make(*shape) for shape in shapes]
        labels, ranks = parse(equation, tuple(map(len, shapes)))
        yield operands, list(labels), list(ranks)


OP = Op(
    name="einsum",
    schema="(Tensor[] operands, int[] labels, int[] ranks) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
)


def einsum(equation: str | Tensor, *operands: Any) -> Tensor:
    """``torch.einsum`` by matrix products: nothing larger than the operands and the output is ever made.

    Everything ``torch.einsum`` accepts: ``einsum("bij,bjk->bik", x, y)`` with ellipsis, repeated subscripts
    (diagonals), implicit output, any number of operands (also as one list) and broadcasting of dimensions of size 1;
    and the sublist form ``einsum(x, [0, 1], y, [1, 2], [0, 2])``.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.einsum.html

    Shape:
        - operands: as the equation says, one dimension for each subscript
        - output: one dimension for each output subscript; like that of ``torch.einsum`` it may be a view of a single
          operand, or not contiguous

    Any dtype and device that ``torch.einsum`` supports; the output has the dtype it would have there. On CUDA, graph
    convolutions, convolutions of 1 x 1 and their gradients (two large tensors, a small one) run kernels of their own.

    In a file a dynamic size may be 0 from opset 14 on, but not where a matrix is broadcast to that many
    (``nctw,cd->ndtw`` without any n): ONNX Runtime refuses such a product, torch.matmul's too, with an error.

    Raises:
        RuntimeError: if the equation is malformed, or does not fit the operands.
        ValueError: if there is no operand, or a sublist holds a number outside ``[0, 52)``.
        TypeError: if the equation is no string or an operand no tensor.
    """
    if isinstance(equation, Tensor):
        return einsum(*_from_sublists(equation, *operands))
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not operands:
        raise ValueError(
            "einsum(): expected an equation and at least one operand, or operands each with its list of subscripts"
        )
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in operands):
        kinds = ", ".join(type(x).__name__ for x in (equation, *operands))
        raise TypeError(f"einsum(): expected a string and tensors, or tensors and lists of subscripts; got {kinds}")
    if tracing():
        labels, ranks = parse.__wrapped__(equation, tuple(x.dim() for x in operands))  # torch.compile warns of caches
        return torch.ops.svexport.einsum(_autocast(operands, labels, ranks), labels, ranks)
    first, shapes = operands[0], [x.shape for x in operands]
    needs = tuple([torch.is_grad_enabled() and x.requires_grad for x in operands])
    if not first.is_cuda:
        return run(_program(equation, any(needs), False, *shapes), operands)
    item_size = first.element_size()
    way = _way(equation, needs, item_size, first.get_device(), *shapes)
    if way is not None and _takes_kernels(operands) and _cuda.load():
        labels, ranks = parse(equation, tuple(map(len, shapes)))
        if way is OP:
            return OP(_autocast(operands, labels, ranks), labels, ranks)
        return way.apply(equation, *_autocast(operands, labels, ranks))
    return run(_cuda_program(equation, any(needs), item_size, *shapes), operands)


@lru_cache(maxsize=4096)
def _way(equation: str, needs: tuple[bool, ...], item_size: int, device: int, *shapes: tuple[int, ...]) -> Any:
    """What has kernels for an einsum on CUDA: the operator, or a function whose gradients are einsums too; or None."""
    kernels = _kernel_products(equation, *shapes, item_size=item_size, wide=_wide(device), needs=needs)
    wanted = [kernel for kernel, need in zip(kernels, (True, *needs), strict=True) if need]
    if all(wanted):
        return OP
    return _Products if any(wanted) and _gradients(equation, *shapes) else None


@lru_cache(maxsize=4096)
def _cuda_program(equation: str, training: bool, item_size: int, *shapes: tuple[int, ...]) -> Program:
    """A plan for operands on CUDA."""
    short = all(math.prod(shape) <= _SHORT for shape in shapes)
    view = short and _few_rows(equation, *shapes, item_size=item_size) if training else True
    return _program(equation, short or training, view, *shapes)


@lru_cache(maxsize=4096)
def _few_rows(equation: str, *shapes: tuple[int, ...], item_size: int) -> bool:
    """Whether an output that is a view trains faster, of two short operands: its gradient is copied.

    Otherwise matrices are, for every sample, and the sum of their gradients is one step more; but those of many rows
    are few products of long sums.
    """
    labels, ranks = parse(equation, tuple(map(len, shapes)))
    *operands, output = split(labels, ranks)
    if len(operands) != 2:
        return False
    known, _ = _label_sizes(operands, shapes)
    sizes = [size or 0 for size in known]
    x, y = ([label for label in term if label in output] for term in operands)
    rows = max(_size({*x} - {*operands[1]}, sizes), _size({*y} - {*operands[0]}, sizes))
    return rows < (_ROWS_OF_FLOATS if item_size > 2 else _ROWS_OF_HALVES)


@lru_cache(maxsize=4096)
def _gradients(equation: str, *shapes: tuple[int, ...]) -> tuple[str, str] | None:
    """Of two operands: the einsum of the output's gradient and the other one. None if it is not one for both."""
    labels, ranks = parse(equation, tuple(map(len, shapes)))
    terms = split(labels, ranks)
    sizes = {pair for term, shape in zip(terms, shapes, strict=False) for pair in zip(term, shape, strict=True)}
    counts = Counter(labels)
    if len(sizes) > len(counts) or min(counts.values()) == 1 or any(len({*term}) < len(term) for term in terms):
        return None
    x, y, output = ("".join(map(ascii_letters.__getitem__, term)) for term in terms)
    return f"{output},{y}->{x}", f"{output},{x}->{y}"


class _Products(torch.autograd.Function):
    """An einsum of two operands whose gradients are einsums too: each of the three by what is fastest for it."""

    @staticmethod
    def forward(ctx: Any, equation: str, x: Tensor, y: Tensor) -> Tensor:
        ctx.equation = equation
        ctx.save_for_backward(x, y)
        return _product(equation, x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        of_x, of_y = _gradients(ctx.equation, x.shape, y.shape)  # type: ignore[misc]
        if 0 in grad.stride():  # such as that of a sum
            grad = grad.contiguous()
        function = einsum if torch.is_grad_enabled() else _product  # create_graph=True
        return (
            None,
            function(of_x, grad, y) if ctx.needs_input_grad[1] else None,
            function(of_y, grad, x) if ctx.needs_input_grad[2] else None,
        )


def _product(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """An einsum of which no gradient is recorded, of operands that kernels take."""
    wide = x.is_cuda and _wide(x.get_device())
    return _fastest(equation, x.shape, y.shape, item_size=x.element_size(), wide=wide)([x, y])


@lru_cache(maxsize=4096)
def _fastest(
    equation: str, *shapes: tuple[int, ...], item_size: int, wide: bool
) -> Callable[[Sequence[Tensor]], Tensor]:
    if _kernel_products(equation, *shapes, item_size=item_size, wide=wide)[0]:
        labels, ranks = parse(equation, tuple(map(len, shapes)))
        return lambda operands: OP(operands, labels, ranks)
    program = _program(equation, all(math.prod(shape) <= _SHORT for shape in shapes), True, *shapes)
    return lambda operands: run(program, operands)


def _from_sublists(*arguments: Any) -> tuple[Any, ...]:
    """``x, [0, 1], y, [1, 2], [0, 2]`` -> ``"AB,BC->AC", x, y``."""
    if len(arguments) == 1:
        return ("",)
    equation = ",".join("".join(map(_subscript, sublist)) for sublist in arguments[1::2])
    if len(arguments) % 2 == 0:
        return equation, *arguments[::2]
    return equation + "->" + "".join(map(_subscript, arguments[-1])), *arguments[:-1:2]


class Einsum(nn.Module):
    """Module form of :func:`einsum` for one equation."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, *operands: Tensor) -> Tensor:
        return einsum(self.equation, *operands)

    def extra_repr(self) -> str:
        return repr(self.equation)
