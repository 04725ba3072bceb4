"""The search for the best matrix product of two operands."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence, Set
from dataclasses import dataclass
from itertools import pairwise, permutations, product
from typing import Any, TypeAlias

from svexport.ops._einsum.labels import Labels, flatten, size_of

# Costs, in the time to read or write one element. The ratios are approximate; they suit CPUs and GPUs alike.
_MOVE = 2.5  # a Transpose: read, write, and one of them strided
_SWAP = 0.25  # a Transpose of the last two dimensions before a product, which most runtimes absorb
_FLOPS = 32  # multiply-adds in the time of one element
_TILE = 8  # a product is computed in tiles: small dimensions waste what they do not fill
_LAUNCH = 64  # for each matrix of a batch
_SUMMED = 4  # at most so many products are summed where tensors have strides: more would move their sum too often
_STEP = 4096  # for a Transpose, or a sum after the product, whatever its size


_Atom: TypeAlias = Labels  # fused labels, see _fuse
_Atoms: TypeAlias = tuple[_Atom, ...]


@dataclass(frozen=True, slots=True)
class _Gemm:
    """``batch`` dimensions of ``(rows, inner) @ (inner, columns)``, of the operands in order or swapped.

    ``batch`` may hold a free label of one operand, to which the other operand is broadcast, and a contracted label,
    which is summed over after the product.
    """

    swapped: bool
    batch: Labels
    rows: Labels
    columns: Labels
    inner: Labels


def best_gemm(
    x: Labels,
    y: Labels,
    kept: set[int],
    output: Labels | None,
    label_sizes: Sequence[int],
    training: bool,
    view: bool,
) -> _Gemm:
    """The cheapest batched matrix product for a pair of operands."""
    orders = _fuse([order for order in (x, y, output) if order is not None], kept)
    sizes = {atom: size_of(atom, label_sizes) for order in orders for atom in order}

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
                    best = _Gemm(swapped, *map(flatten, (bs, ms, ns, ks)))
    assert best is not None
    return best


def _fuse(orders: Sequence[Labels], kept: set[int]) -> list[_Atoms]:
    """Fuses labels into one atom if they are adjacent and in the same order wherever they appear."""
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
    """Candidate subsets for a matrix dimension: what remains when the first atoms of an order go to the batch."""
    ordered = [[atom for atom in order if atom in atoms] for order in orders]
    return {frozenset(order[i:]) for order in ordered for i in range(len(order) + 1)}


def _orders(atoms: Set[_Atom], *orders: _Atoms) -> set[_Atoms]:
    """Orders of ``atoms`` that some tensor already has; atoms missing from it are placed as in another tensor."""
    if len(atoms) < 2:
        return {tuple(atoms)}
    chosen = [tuple(atom for atom in order if atom in atoms) for order in orders]
    merged = set()
    for first, *rest in permutations(chosen):
        for order in rest:
            first = merge(first, order)
        merged.add(first)
    return merged


def merge(first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inserts the elements that only ``second`` has into ``first``, each after its predecessor in ``second``."""
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
    """The cost of making ``operand`` a batch of matrices. With ``training`` (torch) a transposed matrix is no step."""
    lead = tuple(atom for atom in batch if atom in operand)
    if operand == lead + rows + columns:
        return 0
    if operand == lead + columns + rows:
        return _SWAP * size(operand) + (0 if training else _STEP)
    return _MOVE * size(operand) + _STEP


def _tiled(size: int) -> int:
    return -(-size // _TILE) * _TILE
