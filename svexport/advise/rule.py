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
    """Axes of size 1, from the front (>= 0) or from the back (< 0), and how many axes there are, if that is known."""

    ones: frozenset[int] = frozenset()
    rank: int | None = None

    @classmethod
    def of(cls, ones: Iterable[int], rank: int | None) -> Shape:
        """With axes from the front, where the rank is known."""
        kept = frozenset(ones)
        if rank is not None:
            kept = frozenset(axis % rank for axis in kept if -rank <= axis < rank)
        return cls(kept, rank)

    def from_back(self) -> frozenset[int] | None:
        """``ones`` from the back, None if that takes a rank that is not known."""
        if self.rank is None and any(axis >= 0 for axis in self.ones):
            return None
        return frozenset(axis - (self.rank or 0) if axis >= 0 else axis for axis in self.ones)


class Scope(Kinds):
    """A function as rules see it: its nodes, and what kind they are.

    Attributes:
        shapes: what is known of values, None while it is being found; ``svexport.advise.shapes`` fills it.
        assumed: ranks taken for granted while the shape of a value is being found.
    """

    def __init__(self, function: Function, around: Scope | None = None) -> None:
        super().__init__(function, around)
        self.source: Source = function.file.source
        self.shapes: dict[Binding, Shape | None] = {}
        self.assumed: dict[Binding, set[int | None]] = {}

    def parent(self, node: ast.AST) -> ast.AST:
        """The node of the syntax tree around one."""
        return self.file.parents[node]

    def text(self, node: ast.AST) -> str:
        """The source of a node, as it is written."""
        return self.source.segment(node)


@dataclass(frozen=True)
class Found:
    """One place where a habit stands.

    Attributes:
        node: the expression or statement.
        message: what is there, and the better form.
        edits: the better form where it computes the same for sure; else empty.
        imports: modules that ``edits`` need.
    """

    node: ast.AST
    message: str
    edits: tuple[Edit, ...] = ()
    imports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rule:
    """A habit that costs at export or run time.

    Attributes:
        code: ``"SVX101"``; the hundreds group rules: 1 values and sizes, 2 copies and layout, 3 arithmetic.
        name: the habit in a few words.
        why: what it costs.
        before, after: the habit and its better form.
        find: yields where a function has it.
        reach: which functions it looks at: those, or what is known better.
        fixes: whether some of what it finds is fixed.
        note: why nothing or not everything is fixed.
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
