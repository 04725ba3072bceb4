"""The algebra of permutations: what Transposes do to the dimensions of a tensor.

As in Transpose, a permutation ``p`` turns ``x`` into the tensor whose dimension ``i`` is dimension ``p[i]`` of ``x``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TypeAlias

__all__ = ["Perm", "compose", "extend", "identity", "inverse", "restrict"]

Perm: TypeAlias = tuple[int, ...]


def identity(rank: int) -> Perm:
    """The permutation that moves nothing."""
    return tuple(range(rank))


@lru_cache(maxsize=4096)
def compose(a: Perm, b: Perm) -> Perm:
    """``a``, then ``b``, as one permutation."""
    return tuple([a[i] for i in b])


@lru_cache(maxsize=4096)
def inverse(a: Perm) -> Perm:
    """The inverse permutation: composed with the permutation itself it is the identity."""
    return tuple(sorted(range(len(a)), key=a.__getitem__))


@lru_cache(maxsize=4096)
def restrict(a: Perm, dims: Sequence[int]) -> Perm:
    """The permutation of the given (ascending) dimensions alone, numbered from 0."""
    return tuple([dims.index(i) for i in a if i in dims])


@lru_cache(maxsize=4096)
def extend(order: Perm, dims: Sequence[int], a: Perm) -> Perm:
    """``a`` with the given dimensions rearranged among themselves, so that ``restrict(..., dims)`` is ``order``."""
    arranged = iter(order)
    return tuple([dims[next(arranged)] if i in dims else i for i in a])
