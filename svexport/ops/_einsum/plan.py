"""A plan of Transpose, Reshape, MatMul, Mul and ReduceSum steps for an einsum.

A plan is pure data. Two executors run it: ``program.py`` with torch operators, and the op's body with ONNX nodes
(``svexport/symbolic/einsum.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from svexport.ops._einsum.gemm import best_gemm, merge
from svexport.ops._einsum.labels import Labels, Shape, flatten, label_sizes, size_of, split


@dataclass(frozen=True, slots=True)
class Diagonal:
    """The diagonal of dimensions ``dim`` and ``dim + 1`` of value ``x``."""

    x: int
    dim: int


@dataclass(frozen=True, slots=True)
class ReduceSum:
    """Sum over ``axes``; integers become int64, as in torch."""

    x: int
    axes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Transpose:
    """Permutes the dimensions of ``x`` to the order ``perm``.

    ``store``, if not empty, is the best memory layout of the copy, for executors whose tensors have strides. It keeps
    the innermost dimension innermost, which copies several times faster; the product that follows reads a transposed
    matrix just as well.
    """

    x: int
    perm: tuple[int, ...]
    store: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Reshape:
    """Reshapes to one dimension per group of labels: the product of their sizes, 1 for an empty group."""

    x: int
    groups: tuple[Labels, ...]


@dataclass(frozen=True, slots=True)
class MatMul:
    """``x @ y`` over the last two dimensions, with the others broadcast; then a sum over the dimensions ``summed``.

    With ``swapped``, executors whose tensors have strides best compute ``(y.T @ x.T).T``: the rows of the output, and
    of its gradient, are innermost then.
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
        steps: the steps in order of execution. No Transpose moves only dimensions of size 1.
        sizes: the size of every label, None if it is dynamic.
        sources: for every label, the (operand, dimension) that has its size.
    """

    steps: tuple[Step, ...]
    sizes: Shape
    sources: tuple[tuple[int, int], ...]

    @property
    def transposes(self) -> int:
        """The number of steps that move data without computing anything."""
        return sum(isinstance(step, Transpose) for step in self.steps)


@lru_cache(maxsize=4096)
def plan(
    labels: Labels, ranks: tuple[int, ...], shapes: tuple[Shape, ...], training: bool = False, view: bool = False
) -> EinsumPlan:
    """Plans an einsum given in canonical form (see :func:`parse`).

    Args:
        shapes: shapes of the operands; None is a dynamic size, assumed not to be broadcast.
        training: computes every sum inside a product. A sum after a product saves a copy, but its gradient costs more.
        view: for executors whose tensors have strides: any order of the output's dimensions is free of cost.

    Raises:
        RuntimeError: if the sizes of a label contradict each other.
    """
    *operands, output = split(labels, ranks)
    sizes, sources = label_sizes(operands, shapes)
    planner = _Planner(sizes, len(operands), training, view)
    alone = len(operands) == 1

    # Dimensions of size 1 are dropped: they broadcast, or the last Reshape restores them. Only the sum of a single
    # operand keeps them, because torch's sum decides the dtype of the output.
    values = []
    for i, (operand, shape) in enumerate(zip(operands, shapes, strict=True)):
        dims = [(l,) if s != 1 or (alone and l not in output) else () for l, s in zip(operand, shape, strict=True)]
        values.append(planner.diagonal(_Value(i, tuple(dims))))
    holders = Counter(label for value in values for label in value.labels)
    kept = {label for label, count in holders.items() if count > 1}.union(output)
    values = [planner.reduce(value, kept) for value in values]

    groups = tuple((label,) if label in holders else () for label in output)
    order = flatten(groups)
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


def _path(terms: Sequence[Labels], output: Labels, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """The pairs of operands to contract, in order; the result of each contraction is appended to the list."""
    if len(terms) < 3:
        return [(0, 1)] * (len(terms) - 1)
    import opt_einsum

    symbols = ["".join(map(opt_einsum.get_symbol, term)) for term in (*terms, output)]
    shapes = [tuple(sizes[label] for label in term) for term in terms]
    path, _ = opt_einsum.contract_path(",".join(symbols[:-1]) + "->" + symbols[-1], *shapes, shapes=True)
    return path


@dataclass(frozen=True)
class _Value:
    """A value during planning. Each dimension holds a group of labels; an empty group has size 1."""

    index: int
    dims: tuple[Labels, ...]

    @property
    def labels(self) -> Labels:
        return flatten(self.dims)


class _Planner:
    """Appends steps to a plan; ``sizes`` are the label sizes used for costs."""

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
        order = flatten(groups)
        if value.labels != order:
            if any(_scattered(dim, order) for dim in value.dims):
                value = self.reshape(value, tuple((label,) for label in value.labels))
            value = self.permute(value, _permutation(value.dims, order), store and _permutation(value.dims, store))
        return self.reshape(value, groups)

    def contract(self, x: _Value, y: _Value, kept: set[int], output: Labels | None) -> _Value:
        """Multiplies two values and sums over the labels not ``kept``; prefers the order ``output`` if it is given."""
        if kept.issuperset(set(x.labels).intersection(y.labels)):
            return self.multiply(x, y, output)
        gemm = best_gemm(x.labels, y.labels, kept, output, self.sizes, self.training, self.view)
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
        if rows and columns and value.labels == (*flatten(lead), *columns, *rows):
            # Transpose last: runtimes fuse this transpose into the product.
            value = self.arrange(value, (*lead, columns, rows))
            return self.permute(value, (*range(len(lead)), len(lead) + 1, len(lead)))
        store: Labels = ()
        groups = (flatten(lead), rows, columns)
        if columns and rows[-1:] == value.labels[-1:] and any(_scattered(group, value.labels) for group in groups):
            store = (*groups[0], *columns, *rows)
        return self.arrange(value, (*lead, rows, columns), store)

    def multiply(self, x: _Value, y: _Value, output: Labels | None) -> _Value:
        """The elementwise product of two values without a summed label."""

        def moved(order: Labels) -> int:
            parts = [(v.labels, tuple(label for label in order if label in v.labels)) for v in (x, y)]
            parts.append((order, output or order))
            return sum(size_of(before, self.sizes) for before, after in parts if before != after)

        orders = [merge(x.labels, y.labels), merge(y.labels, x.labels)]
        order = min([output, *orders] if output else orders, key=moved)
        operands = []
        for value in (x, y):
            groups = [(label,) if label in value.labels else () for label in order]
            while groups and not groups[0]:
                del groups[0]
            operands.append(self.arrange(value, tuple(groups)))
        return self.add(Mul(operands[0].index, operands[1].index), ((label,) for label in order))


def _scattered(group: Labels, order: Labels) -> bool:
    """Whether ``group`` is not a contiguous run of ``order``."""
    return bool(group) and group != order[order.index(group[0]) :][: len(group)]


def _permutation(dims: Sequence[Labels], order: Labels) -> tuple[int, ...]:
    """The permutation that puts the labels of ``dims`` in ``order``, empty dimensions first."""
    return tuple(sorted(range(len(dims)), key=lambda i: order.index(dims[i][0]) if dims[i] else -1))
