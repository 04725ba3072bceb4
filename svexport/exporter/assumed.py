"""The dynamic sizes that a torch.export program is valid for; it makes no statement about others."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from svexport.exporter.inputs import Resized

__all__ = ["Assumption", "assumptions", "sizes_against"]

Assumption = Callable[[Sequence[Sequence[int]]], bool]
"""Whether it holds of inputs of these shapes."""

MOST_ASSUMED = 32
"""Assumptions that sizes are looked for against."""

MOST_OF_ONE = 4
"""Sizes against one assumption."""


def assumptions(program: Any) -> list[Assumption]:
    """Those of an exported program, but for the least sizes.

    Where Python compares sizes, or takes a number made of them, ``torch.export`` goes on by what came out, and notes it
    where a name says that a size is dynamic: of other sizes the program is another.
    """
    values = {node.name: node.meta.get("val") for node in program.graph.nodes if node.op == "placeholder"}
    places: dict[Any, tuple[int, int]] = {}
    environment = None
    for index, name in enumerate(program.graph_signature.user_inputs):
        value = values.get(name)
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                environment = size.node.shape_env
                places.setdefault(size.node.expr, (index, axis))
    if environment is None:
        return []
    noted = [found.expr for asserts in environment.deferred_runtime_asserts.values() for found in asserts]
    known = [_condition(expression, places) for expression in noted]
    for symbol, limits in program.range_constraints.items():
        if symbol in places and limits.upper < 2**31:
            known.append(_at_most(places[symbol], int(limits.upper)))
    return [condition for condition in known if condition is not None]


def _condition(expression: Any, places: Mapping[Any, tuple[int, int]]) -> Assumption | None:
    """Of what Python can compute of sizes of inputs."""
    from torch.utils._sympy.printers import PythonPrinter

    class Printer(PythonPrinter):  # type: ignore[misc]
        def _print_BitwiseFn_bitwise_and(self, one: Any) -> str:
            return f"({self.stringify(one.args, ' & ', 1000)})"

        def _print_BitwiseFn_bitwise_or(self, one: Any) -> str:
            return f"({self.stringify(one.args, ' | ', 1000)})"

        def _print_BitwiseFn_bitwise_xor(self, one: Any) -> str:
            return f"({self.stringify(one.args, ' ^ ', 1000)})"

    if not expression.free_symbols <= places.keys():  # of what values decide
        return None
    try:
        code = compile(Printer().doprint(expression), "<assumed>", "eval")
    except Exception:  # noqa: BLE001 - a function that has no name in Python
        return None
    named = {str(symbol): places[symbol] for symbol in expression.free_symbols}

    def holds(shapes: Sequence[Sequence[int]]) -> bool:
        sizes = {name: shapes[index][axis] for name, (index, axis) in named.items()}
        return bool(eval(code, {"math": math, "torch": torch, **sizes}))  # noqa: S307 - of torch's own expressions

    return holds


def _at_most(place: tuple[int, int], limit: int) -> Assumption:
    index, axis = place
    return lambda shapes: shapes[index][axis] <= limit


def sizes_against(assumed: Sequence[Assumption], resized: Resized, most: int) -> Iterator[dict[str, int]]:
    """Dynamic sizes of which an assumption does not hold: first such that the others do, the nearest below and above,
    and some as large as twice the given ones. ``most`` elements may be tried."""
    listed = {root: [n for n in resized.others(root, given) if n > 1] for root, given in resized.given.items()}
    for place, assumption in list(enumerate(assumed))[:MOST_ASSUMED]:
        others = [other for index, other in enumerate(assumed) if index != place]
        found: dict[tuple[tuple[str, int], ...], None] = {}
        for kept in (others, []):
            for root, given in resized.given.items():
                against = [
                    size
                    for size in listed[root]
                    if _breaks(resized.shapes({root: size}), assumption, kept)
                    and not resized.too_large({root: size}, most)
                ]
                sides = (lambda n: True, lambda n: n > given, lambda n: n < given, lambda n: n >= 2 * given)  # noqa: B023
                for side in sides:
                    found |= dict.fromkeys(((root, size),) for size in islice(filter(side, against), 1))
        yield from (dict(sizes) for sizes in islice(found, MOST_OF_ONE))


def _breaks(shapes: Sequence[Sequence[int]], assumption: Assumption, others: Sequence[Assumption]) -> bool:
    with suppress(Exception):  # divided by zero, say
        return not assumption(shapes) and all(other(shapes) for other in others)
    return False
