"""The types of a rule, its view of a function, and its findings."""

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
    """The axes of size 1, counted from the front (>= 0) or the back (< 0), and the rank, None if unknown."""

    ones: frozenset[int] = frozenset()
    rank: int | None = None

    @classmethod
    def of(cls, ones: Iterable[int], rank: int | None) -> Shape:
        """A shape whose axes are all counted from the front if the rank is known."""
        kept = frozenset(ones)
        if rank is not None:
            kept = frozenset(axis % rank for axis in kept if -rank <= axis < rank)
        return cls(kept, rank)

    def from_back(self) -> frozenset[int] | None:
        """``ones`` counted from the back; None if that needs the rank and it is unknown."""
        if self.rank is None and any(axis >= 0 for axis in self.ones):
            return None
        return frozenset(axis - (self.rank or 0) if axis >= 0 else axis for axis in self.ones)


class Scope(Kinds):
    """A function as rules see it: its nodes and their kinds.

    Attributes:
        shapes: the shapes of values found so far, None while one is being found; ``svexport.advise.shapes`` fills it.
        assumed: ranks assumed while the shape of a value is being found.
        told: the ranks that the uses of a value, and comments, tell of it; None also while that is being found.
    """

    def __init__(self, function: Function, around: Scope | None = None) -> None:
        super().__init__(function, around)
        self.source: Source = function.file.source
        self.shapes: dict[Binding, Shape | None] = {}
        self.assumed: dict[Binding, set[int | None]] = {}
        self.told: dict[Binding, int | None] = {}

    def callee(self, node: ast.AST) -> Scope | None:
        """The function, method or layer of the file that ``node`` calls; None if it calls none."""
        found = self.called(node) if isinstance(node, ast.Call) else None
        return found if isinstance(found, Scope) else None

    def parent(self, node: ast.AST) -> ast.AST:
        """The parent of a node in the syntax tree."""
        return self.file.parents[node]

    def text(self, node: ast.AST) -> str:
        """The source text of a node."""
        return self.source.segment(node)


@dataclass(frozen=True)
class Found:
    """One place where a rule found its habit, as a node of the syntax tree.

    Attributes:
        node: the expression or statement.
        message: the habit, and its better form.
        edits: edits that write the better form, if it certainly computes the same; else empty.
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
        find: yields the places where a function has the habit.
        reach: the least reach of the functions that it looks at.
        fixes: whether it fixes some of its findings.
        note: why it fixes none or not all of them.
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
