"""What a rule is, and what it finds."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from svexport.advise.functions import Function, Reach
from svexport.advise.kinds import Kinds
from svexport.advise.source import Edit, Source

__all__ = ["Found", "Rule", "Scope"]


class Scope(Kinds):
    """A function as rules see it: its nodes, and what kind they are."""

    def __init__(self, function: Function, around: Scope | None = None) -> None:
        super().__init__(function, around)
        self.source: Source = function.file.source

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
