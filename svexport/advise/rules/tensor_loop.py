"""SVX102: Python loops over a tensor's first axis."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from svexport.advise.calls import integer, parameter
from svexport.advise.kinds import Kind
from svexport.advise.rule import Found, Rule, Scope
from svexport.advise.sizes import is_first_size
from svexport.advise.torch_names import FUNCTIONS, METHODS

__all__ = ["RULE"]

# Functions whose result may have another size for each row, so that all rows cannot be computed at once.
_RAGGED = {
    "nms", "batched_nms", "nonzero", "argwhere", "unique", "unique_consecutive", "masked_select", "split", "item",
    "tolist", "where", "linear_sum_assignment",
}  # fmt: skip

_SHAPING = ("flatten", "view", "reshape", "squeeze", "unsqueeze", "permute", "transpose", "contiguous")


def find(scope: Scope) -> Iterator[Found]:
    for loop in scope.function.all(ast.For):
        over = _over(scope, loop, loop.target, loop.iter)
        if over is None or scope.function.guarded(loop) or _is_carried(scope, loop) or _is_ragged(scope, loop):
            continue
        if all(isinstance(s, (ast.Raise, ast.Assert)) or (isinstance(s, ast.If) and _raises(s)) for s in loop.body):
            continue
        yield Found(loop, _message(over))
    for node in scope.function.all(ast.comprehension):
        whole = scope.parent(node)
        if not isinstance(whole, (ast.ListComp, ast.GeneratorExp)) or len(whole.generators) != 1 or node.ifs:
            continue
        over = _over(scope, whole, node.target, node.iter)
        if over is not None and not scope.function.guarded(whole) and not _is_ragged(scope, whole):
            yield Found(whole, _message(over))


def _message(over: str) -> str:
    return f"a loop over the first axis of `{over}` is unrolled, its size frozen: work on all rows at once"


def _over(scope: Scope, loop: ast.AST, target: ast.expr, over: ast.expr) -> str | None:
    """The text of the tensor over whose rows the loop iterates; None if it iterates over something else."""
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.args:
        function, first = over.func.id, over.args[0]
        if function == "range" and len(over.args) == 1 and isinstance(target, ast.Name):
            return _indexed(scope, loop, first, target.id)
        if function == "enumerate":
            over = first
            target = target.elts[1] if isinstance(target, ast.Tuple) and len(target.elts) == 2 else target
    if isinstance(over, ast.Call) and isinstance(over.func, ast.Name) and over.func.id == "zip":
        rows = [_unbound(scope, a) for a in over.args]
        if not rows or not all(isinstance(a, (ast.Name, ast.Attribute)) for a in rows):
            return None
        alike = all(map(scope.is_tensor, rows)) and _computes(scope, loop, target)
        return ast.unparse(rows[0]) if alike else None
    over = _unbound(scope, over)
    plain = isinstance(over, (ast.Name, ast.Attribute, ast.Compare, ast.BinOp)) and not scope.is_state(over)
    if plain and scope.is_tensor(over) and _computes(scope, loop, target):
        return ast.unparse(over)
    return None


def _unbound(scope: Scope, over: ast.expr) -> ast.expr:
    """The x of ``x.unbind(0)`` and ``x.split(1)``, whose items are rows of x; anything else itself."""
    call = scope.call(over)
    if call is not None and call.name == "unbind" and integer(call.get(0, "dim") or ast.Constant(0)) == 0:
        return call.input
    if call is not None and call.name == "split" and integer(call.get(0, "split_size")) == 1:
        return call.input if integer(call.get(1, "dim") or ast.Constant(0)) == 0 else over
    return over


def _computes(scope: Scope, loop: ast.AST, target: ast.expr) -> bool:
    """Whether torch or a layer takes a row; otherwise rows may be numbers, or the "tensor" a list."""
    rows = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    for node in ast.walk(loop):
        if _takes_positions(scope, node, rows):
            return True
        call = scope.call(node)
        if call is None:
            continue
        name = scope.file.qualified(call.node.func) or ""
        layer = name.startswith("self.") and name.count(".") == 1
        known = call.name in METHODS or call.name in FUNCTIONS
        given = call.node.args if layer else [call.input] if known else []
        callee = scope.callee(call.node)
        if callee is not None:
            given = [a for a in given if not _is_kept(callee, call.node, a)]
        if any(isinstance(n, ast.Name) and n.id in rows for a in given for n in ast.walk(a)):
            return True
    return False


def _is_kept(callee: Scope, call: ast.Call, given: ast.expr) -> bool:
    """Whether a function of the file only keeps what is given to it: in an attribute, an item, or a new object."""
    taken = parameter(callee.function, call, given)
    uses = [callee.parent(use) for use in callee.flow.parameters[taken.arg].uses] if taken is not None else []
    return bool(uses) and all(
        isinstance(use, (ast.Assign, ast.Dict, ast.Tuple, ast.List))
        or (isinstance(use, ast.Call) and (callee.file.qualified(use.func) or "") in callee.file.classes)
        for use in uses
    )


def _takes_positions(scope: Scope, node: ast.AST, rows: set[str]) -> bool:
    """Whether it is ``row[i]`` where ``topk`` or the like found ``i`` in that row."""
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name) or node.value.id not in rows:
        return False
    binding = scope.definition(node.slice)
    found = binding.value if binding is not None and binding.item and binding.index is None else None
    return (
        isinstance(node.slice, ast.Name) and node.slice.id in rows and found is not None and _is_position(scope, found)
    )


def _indexed(scope: Scope, loop: ast.AST, size: ast.expr, index: str) -> str | None:
    """The tensor that a loop over a first size indexes by the loop's counter."""
    if not is_first_size(scope, size):
        return None
    for node in ast.walk(loop):
        if not isinstance(node, ast.Subscript) or not isinstance(node.ctx, ast.Load):
            continue
        first = node.slice.elts[0] if isinstance(node.slice, ast.Tuple) and node.slice.elts else node.slice
        if _is_at(first, index) and scope.is_tensor(node.value):
            return ast.unparse(node.value)
    return None


def _is_at(item: ast.expr, index: str) -> bool:
    """Whether an index takes the row ``index``: ``x[i]``, ``x[i : i + 1]``."""
    if isinstance(item, ast.Slice) and isinstance(item.lower, ast.Name) and item.step is None:
        return item.lower.id == index and item.upper is not None and ast.unparse(item.upper) == f"{index} + 1"
    return isinstance(item, ast.Name) and item.id == index


def _is_carried(scope: Scope, loop: ast.For) -> bool:
    """Whether a round reads what an earlier one computed, or the loop may end early: it cannot be removed."""
    written: set[str] = set()
    for statement in loop.body:
        for node in ast.walk(statement):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                written.add(node.id)
    before = {n.id for n in ast.walk(loop.target) if isinstance(n, ast.Name)}
    for statement in loop.body:
        reads = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        if reads & (written - before):
            return True
        before |= {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    return any(isinstance(node, (ast.Break, ast.Return, ast.Yield, ast.Await)) for node in ast.walk(loop))


def _is_ragged(scope: Scope, loop: ast.For | ast.ListComp | ast.GeneratorExp) -> bool:
    """Whether rows may differ in size, or the loop also indexes something that is no tensor."""
    target = loop.target if isinstance(loop, ast.For) else loop.generators[0].target
    index = {n.id for n in ast.walk(target) if isinstance(n, ast.Name)}
    for node in (n for part in (loop.body if isinstance(loop, ast.For) else [loop.elt]) for n in ast.walk(part)):
        if isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name in _RAGGED and not (name == "where" and len(node.args) > 1):
                return True
            if isinstance(node.func, ast.Name) and name in ("int", "float") and any(map(scope.is_tensor, node.args)):
                return True  # takes a value out, as ``.item()`` does
            if any(_is_size(k, index) for k in node.keywords):
                return True
        elif isinstance(node, ast.Subscript) and not scope.is_tensor(node.value):
            if isinstance(node.slice, ast.Name) and node.slice.id in index and not _is_row(scope, node):
                return True
        elif isinstance(node, ast.Subscript) and any(_picks(scope, n) for n in ast.walk(node.slice)):
            return True
    return False


def _is_size(keyword: ast.keyword, rows: set[str]) -> bool:
    """Whether it is ``size=(h, w)`` or the like with numbers that differ by row."""
    names = {n.id for n in ast.walk(keyword.value) if isinstance(n, ast.Name)}
    return keyword.arg in ("size", "output_size", "scale_factor", "num_classes") and bool(names & rows)


def _is_row(scope: Scope, node: ast.Subscript) -> bool:
    """Whether ``node`` is an argument of a function of this file whose parameter there is a tensor."""
    call = scope.parent(node)
    callee = scope.callee(call)
    taken = parameter(callee.function, call, node) if callee is not None else None  # type: ignore[arg-type]
    return taken is not None and callee is not None and callee.kind_of_parameter(taken.arg) is Kind.TENSOR


def _picks(scope: Scope, node: ast.AST) -> bool:
    """Whether ``node`` is a mask, or indices that depend on values."""
    if isinstance(node, ast.Name):
        named = any(word in node.id for word in ("mask", "keep", "valid"))
        return isinstance(scope.value_of(node), ast.Compare) or (named and not _is_position(scope, node))
    return isinstance(node, ast.Compare) or (isinstance(node, ast.Subscript) and not _is_position(scope, node))


def _is_position(scope: Scope, node: ast.expr) -> bool:
    """Whether ``node`` is a position found by ``argmax``, ``topk`` or ``sort``, of which every row has as many."""
    while True:
        call, value = scope.call(node), scope.value_of(node)
        if value is not node:
            node = value
        elif isinstance(node, ast.Subscript) or (isinstance(node, ast.Attribute) and node.attr == "indices"):
            node = node.value
        elif call is not None and call.name in _SHAPING:
            node = call.input
        else:
            break
    binding = scope.definition(node)
    if binding is not None and binding.item and binding.index == 1 and binding.value is not None:
        call = scope.call(binding.value)
        return call is not None and call.name in ("max", "min", "topk", "sort")
    return call is not None and call.name in ("argmax", "argmin", "argsort", "topk", "sort", "max", "min")


def _raises(statement: ast.If) -> bool:
    return not statement.orelse and all(isinstance(s, ast.Raise) for s in statement.body)


RULE = Rule(
    code="SVX102",
    name="a Python loop over a tensor's first axis",
    why=(
        "The graph gets a copy of the loop's body per row of the example input, and is right only for that number of "
        "rows. At run time each row starts kernels of its own."
    ),
    before="rows = []\nfor row in x:\n    rows.append(torch.softmax(row, -1))\ny = torch.stack(rows)",
    after="y = torch.softmax(x, -1)",
    find=find,
    note="what is done with a row has to be written for all of them",
)
