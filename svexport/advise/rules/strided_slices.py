"""SVX203: concatenations of all phases of strided slices, which are a space to depth."""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterator
from dataclasses import dataclass

from svexport.advise.calls import integer
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.source import Edit

__all__ = ["RULE"]

_FOCUS = ((0, 0), (1, 0), (0, 1), (1, 1))  # (row, column) of svexport.ops.space_to_depth


@dataclass(frozen=True)
class _Phase:
    base: str
    axes: tuple[int, ...]  # the strided axes, counted from the back after an ellipsis
    starts: tuple[int, ...]
    count: int  # the number of indices


def find(scope: Scope) -> Iterator[Found]:
    for node in scope.function.all(ast.Call):
        call = scope.call(node)
        if call is None or call.is_method or call.name not in ("cat", "concat", "concatenate"):
            continue
        items = _items(scope.value_of(call.input))
        if len(items) != 4:
            continue
        slices = [scope.value_of(item) for item in items]
        phases = [_phase(item) for item in slices]
        first = phases[0]
        if first is None or any(
            p is None or (p.base, p.axes, p.count) != (first.base, first.axes, first.count) for p in phases
        ):
            continue
        if any(_definitions(scope, item) != _definitions(scope, slices[0]) for item in slices):
            continue  # the slices take different values of one name
        starts = tuple(p.starts for p in phases if p is not None)
        if sorted(starts) != sorted(_FOCUS):
            continue
        dim = integer(call.get(0, "dim", "axis"))
        rows_and_columns = first.axes in ((-2, -1), (2, 3))
        if rows_and_columns and dim in (1, -3):
            message = "four strided slices and `cat` are one space to depth: `svexport.ops.space_to_depth(x)`"
            if starts != _FOCUS:
                message += ", its channels permuted"
            written = call.input.elts if isinstance(call.input, (ast.List, ast.Tuple)) else []
            yield Found(node, message, _edits(scope, node, written, starts), ("svexport",))
        else:
            yield Found(
                node,
                "four strided slices and `cat` are one space to depth: `x.reshape(...).permute(...).flatten(...)`",
            )


def _definitions(scope: Scope, item: ast.expr) -> list[object]:
    """The bindings that reach the names of the sliced expression."""
    return [scope.flow.definitions.get(n) for n in ast.walk(item.value) if isinstance(n, ast.Name)]  # type: ignore[attr-defined]


def _items(node: ast.expr) -> list[ast.expr]:
    """The items of a literal list, or of a comprehension over literal numbers with the numbers substituted."""
    if isinstance(node, (ast.List, ast.Tuple)):
        return node.elts
    if not isinstance(node, (ast.ListComp, ast.GeneratorExp)):
        return []
    items = [node.elt]
    for loop in reversed(node.generators):
        rounds = _rounds(loop)
        if rounds is None or len(items) * len(rounds) > len(_FOCUS):
            return []
        items = [_Put(numbers).visit(copy.deepcopy(item)) for numbers in rounds for item in items]
    return items


def _rounds(loop: ast.comprehension) -> list[dict[str, int]] | None:
    """The numbers that a comprehension's names take in each round; None if they are not written out."""
    if loop.ifs:
        return None
    if isinstance(loop.iter, ast.Call) and isinstance(loop.iter.func, ast.Name) and loop.iter.func.id == "range":
        count = integer(loop.iter.args[0]) if len(loop.iter.args) == 1 else None
        given: list[ast.expr] = [ast.Constant(i) for i in range(min(count or 0, len(_FOCUS) + 1))]
    else:
        given = loop.iter.elts if isinstance(loop.iter, (ast.Tuple, ast.List)) else []
    rounds = [_named(loop.target, item) for item in given]
    return [names for names in rounds if names] if rounds and all(rounds) else None


def _named(target: ast.expr, item: ast.expr) -> dict[str, int]:
    """The values of names: ``i`` from 1, ``i, j`` from ``(1, 0)``; empty if they do not match."""
    if isinstance(target, ast.Tuple) and isinstance(item, (ast.Tuple, ast.List)) and len(target.elts) == len(item.elts):
        pairs = list(zip(target.elts, item.elts, strict=True))
    else:
        pairs = [(target, item)]
    found = {t.id: n for t, i in pairs if isinstance(t, ast.Name) and (n := integer(i)) is not None}
    return found if len(found) == len(pairs) else {}


class _Put(ast.NodeTransformer):
    """Replaces names by numbers."""

    def __init__(self, numbers: dict[str, int]) -> None:
        self._numbers = numbers

    def visit_Name(self, node: ast.Name) -> ast.expr:
        number = self._numbers.get(node.id)
        return node if number is None else ast.copy_location(ast.Constant(number), node)


def _phase(node: ast.expr) -> _Phase | None:
    """``node`` as a phase, if it has the form ``x[..., i::2, j::2]``."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Tuple):
        return None
    items = node.slice.elts
    axes, starts, after = [], [], False
    for i, item in enumerate(items):
        if isinstance(item, ast.Constant) and item.value is Ellipsis:
            after = True
        elif not isinstance(item, ast.Slice):
            return None
        elif item.step is not None:
            start = 0 if item.lower is None else integer(item.lower)
            if integer(item.step) != 2 or item.upper is not None or start not in (0, 1):
                return None
            axes.append(i - len(items) if after else i)
            starts.append(start)
        elif item.lower is not None or item.upper is not None:
            return None
    return _Phase(ast.dump(node.value), tuple(axes), tuple(starts), len(items)) if len(axes) == 2 else None


def _edits(
    scope: Scope, node: ast.Call, items: list[ast.expr], starts: tuple[tuple[int, ...], ...]
) -> tuple[Edit, ...]:
    slices = [scope.value_of(item) for item in items]
    base = slices[0].value if slices and isinstance(slices[0], ast.Subscript) else None
    if starts != _FOCUS or not isinstance(base, ast.Name) or "svexport" in scope.bindings:
        return ()
    if scope.file.names.get("svexport", "svexport") != "svexport":
        return ()
    call = scope.source.replace(node, f"svexport.ops.space_to_depth({base.id})")
    if call is None:
        return ()
    end = scope.function.statement(node)
    edits = [call]
    for item in items:
        if not isinstance(item, ast.Name):
            continue
        binding = scope.definition(item)
        statement = binding.statement if binding is not None and len(binding.uses) == 1 else None
        if not isinstance(statement, ast.Assign):
            return ()
        removed = _removed(scope, statement, end)
        if removed is None:
            return ()
        edits.append(removed)
    begin = min(
        [
            end.lineno,
            *(
                b.lineno
                for i in items
                if isinstance(i, ast.Name)
                for b in (scope.function.statement(scope.value_of(i)),)
            ),
        ]
    )
    for binding in scope.bindings.get(base.id, []):  # the name must be the same tensor at the slices and at the call
        if binding.statement is None or begin <= getattr(binding.statement, "lineno", begin) < end.lineno:
            return ()
    return tuple(edits)


def _removed(scope: Scope, statement: ast.Assign, end: ast.stmt) -> Edit | None:
    """The edit that deletes ``statement``; None if it shares a line or is in another block than ``end``."""
    if scope.parent(statement) is not scope.parent(end) or len(statement.targets) != 1:
        return None
    if not isinstance(statement.targets[0], ast.Name):
        return None
    start, stop = scope.source.span(statement)
    text = scope.source.text
    line = text.rfind("\n", 0, start) + 1
    following = text.find("\n", stop)
    if following < 0 or text[line:start].strip() or text[stop:following].strip():
        return None
    return Edit(line, following + 1, "")


RULE = Rule(
    code="SVX203",
    name="strided slices and `cat`",
    why=(
        "Each of the four slices reads every second pixel, and `cat` copies the results. One reshape, transpose and "
        "reshape does the same."
    ),
    before="y = torch.cat((x[..., ::2, ::2], x[..., 1::2, ::2], x[..., ::2, 1::2], x[..., 1::2, 1::2]), 1)",
    after="y = svexport.ops.space_to_depth(x)    # the module: svexport.ops.Focus",
    find=find,
    fixes=True,
    note="fixed for slices in YOLOX's order, assigned to names or not",
)
