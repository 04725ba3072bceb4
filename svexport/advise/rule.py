"""The definition of a rule, and of its findings."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from svexport.advise.flow import Binding
from svexport.advise.functions import Function, Reach
from svexport.advise.kinds import Kinds
from svexport.advise.source import Edit, Source

__all__ = ["Found", "Rule", "Scope", "Shape"]


@dataclass(frozen=True)
class Shape:
    """Axes of size 1, from the front (>= 0) or from the back (< 0), and the rank, if it is known."""

    ones: frozenset[int] = frozenset()
    rank: int | None = None

    @classmethod
    def of(cls, ones: Iterable[int], rank: int | None) -> Shape:
        """Makes a shape, with axes counted from the front if the rank is known."""
        kept = frozenset(ones)
        if rank is not None:
            kept = frozenset(axis % rank for axis in kept if -rank <= axis < rank)
        return cls(kept, rank)

    def from_back(self) -> frozenset[int] | None:
        """``ones`` counted from the back; None if this needs an unknown rank."""
        if self.rank is None and any(axis >= 0 for axis in self.ones):
            return None
        return frozenset(axis - (self.rank or 0) if axis >= 0 else axis for axis in self.ones)


class Scope(Kinds):
    """A function as rules see it: its nodes and their kinds.

    Attributes:
        shapes: known shapes of values, None during inference; ``svexport.advise.shapes`` fills it.
        assumed: ranks assumed while the shape of a value is inferred.
    """

    def __init__(self, function: Function, around: Scope | None = None) -> None:
        super().__init__(function, around)
        self.source: Source = function.file.source
        self.shapes: dict[Binding, Shape | None] = {}
        self.assumed: dict[Binding, set[int | None]] = {}

    def parent(self, node: ast.AST) -> ast.AST:
        """The parent of a node in the syntax tree."""
        return self.file.parents[node]

    def text(self, node: ast.AST) -> str:
        """The source text of a node."""
        return self.source.segment(node)


@dataclass(frozen=True)
class Found:
    """One place where a rule applies.

    Attributes:
        node: the expression or statement.
        message: the pattern found, and the better form.
        edits: the edits to the better form if it surely computes the same; otherwise empty.
        imports: modules that ``edits`` need.
    """

    node: ast.AST
    message: str
    edits: tuple[Edit, ...] = ()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A rule: a pattern that costs at export or run time.

    Attributes:
        code: ``"SVX101"``; the hundreds group rules: 1 values and sizes, 2 copies and layout, 3 arithmetic.
        name: the pattern in a few words.
        why: its cost.
        before, after: the pattern and its better form.
        find: yields the places of the pattern in a function.
        reach: the functions that it checks: those with this reach or a higher one.
        fixes: whether some of its findings can be fixed.
        note: why nothing, or not everything, is fixed.
    """

    code: str
    name: str
    why: str
    before: str
    after: str
    find: Callable[[Scope], Iterator[Found]]
    reach: Reach = Reach.TENSORS
    fixes: bool = False
    note: str = ""
