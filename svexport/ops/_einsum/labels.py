"""Parses an equation into numbers: a label for every dimension of every operand and of the output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache
from string import ascii_letters, ascii_uppercase
from typing import Any, TypeAlias

Labels: TypeAlias = tuple[int, ...]
Shape: TypeAlias = "tuple[int | None, ...]"


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
        names = ("...", *(name for name in sorted(counts) if counts[name] == 1))  # upper case first, as in torch
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


def subscript(number: Any) -> str:
    """A subscript of the sublist form: 0..25 are A..Z, 26..51 are a..z."""
    if number is Ellipsis:
        return "..."
    if not 0 <= number < 52:
        raise ValueError(f"einsum(): expected subscripts of a sublist in the range [0, 52), got {number}")
    return ascii_uppercase[number] if number < 26 else ascii_letters[number - 26]


def split(labels: Sequence[int], ranks: Sequence[int]) -> list[Labels]:
    """The labels of every operand and of the output."""
    rest = iter(labels)
    return [tuple(next(rest) for _ in range(rank)) for rank in ranks]


def label_sizes(operands: Sequence[Labels], shapes: Sequence[Shape]) -> tuple[Shape, tuple[tuple[int, int], ...]]:
    """The broadcast size of every label, and an (operand, dimension) that has this size."""
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


def size_of(labels: Iterable[int], sizes: Sequence[int]) -> int:
    return math.prod(sizes[label] for label in labels)


def flatten(groups: Iterable[Iterable[int]]) -> Labels:
    return tuple(label for group in groups for label in group)
