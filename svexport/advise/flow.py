"""Which values reach a name: the bindings of a function, and where each is read."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from svexport.advise.functions import FUNCTIONS, Function

__all__ = ["Binding", "Flow"]

_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)
# Nodes that bind a name held as a string, not as an ast.Name.
_NAMED: tuple[type[ast.AST], ...] = (*FUNCTIONS, ast.ClassDef, ast.ExceptHandler, ast.MatchAs, ast.MatchStar)
_JUMPS = (ast.Return, ast.Raise, ast.Break, ast.Continue)


@dataclass(eq=False)
class Binding:
    """How a name gets a value: ``value`` itself, its ``index``-th item, or (no index) each item; None if unknown.

    Attributes:
        statement: the node that binds the name; None for a parameter.
        parameter: the parameter, if the binding is one.
        uses: names that may read the value, in nested functions too.
    """

    value: ast.expr | None
    item: bool = False
    index: int | None = None
    statement: ast.AST | None = field(default=None, repr=False)
    parameter: ast.arg | None = None
    uses: list[ast.Name] = field(default_factory=list, repr=False)


Reaching = dict[str, frozenset[Binding]]


class Flow:
    """Which bindings reach each name of one function.

    Each loop is walked once: at its head a name may have any value that some round gives it.

    Attributes:
        bindings: all bindings of the function's own names except parameters, by name.
        parameters: the bindings of the parameters, by name.
        definitions: the bindings that may reach each name that is read, except names of nested functions and the file.
    """

    def __init__(self, function: Function) -> None:
        self.function = function
        self._of: dict[ast.AST, list[tuple[str, Binding]]] = {}
        self.bindings: dict[str, list[Binding]] = {}
        self.definitions: dict[ast.Name, frozenset[Binding]] = {}
        self.parameters = {p.arg: Binding(None, parameter=p) for p in function.parameters}
        self._bind_all()
        reaching: Reaching = {name: frozenset((binding,)) for name, binding in self.parameters.items()}
        self._block(function.node.body, reaching)
        everything = {**self.bindings}
        for name, binding in self.parameters.items():
            everything[name] = [binding, *everything.get(name, [])]
        for node, reached in self.definitions.items():
            for binding in reached:
                binding.uses.append(node)
        for node in function.every(ast.Name):  # names that nested functions read, or that no path reaches
            if isinstance(node.ctx, ast.Load) and node not in self.definitions:
                for binding in everything.get(node.id, []):
                    binding.uses.append(node)

    def bound_by(self, statement: ast.AST) -> list[Binding]:
        """The bindings that a statement, or a part of one, makes."""
        return [binding for _, binding in self._of.get(statement, [])]

    def _bind(self, target: ast.expr, binding: Binding, statement: ast.AST) -> None:
        if isinstance(target, ast.Name):
            self._add(target.id, binding, statement)
        elif isinstance(target, ast.Starred):
            self._bind(target.value, Binding(None, statement=statement), statement)
        elif isinstance(target, (ast.Tuple, ast.List)):
            pairs = isinstance(binding.value, (ast.Tuple, ast.List)) and not binding.item
            values = binding.value.elts if pairs else []  # type: ignore[union-attr]
            for i, part in enumerate(target.elts):
                if pairs and len(values) == len(target.elts):
                    self._bind(part, Binding(values[i], statement=statement), statement)
                elif binding.item:
                    self._bind(part, Binding(None, statement=statement), statement)
                else:
                    self._bind(part, Binding(binding.value, True, i, statement), statement)

    def _add(self, name: str, binding: Binding, statement: ast.AST) -> None:
        self.bindings.setdefault(name, []).append(binding)
        self._of.setdefault(statement, []).append((name, binding))

    def _bind_all(self) -> None:
        f = self.function
        for assigned in f.all(ast.Assign):
            for target in assigned.targets:
                self._bind(target, Binding(assigned.value, statement=assigned), assigned)
        for annotated in f.all(ast.AnnAssign):
            if annotated.value is not None:
                self._bind(annotated.target, Binding(annotated.value, statement=annotated), annotated)
        for augmented in f.all(ast.AugAssign):
            self._bind(augmented.target, Binding(augmented.target, statement=augmented), augmented)
        for walrus in f.all(ast.NamedExpr):
            self._bind(walrus.target, Binding(walrus.value, statement=walrus), walrus)
        loops: list[ast.For | ast.AsyncFor | ast.comprehension]
        loops = [*f.all(ast.For), *f.all(ast.AsyncFor), *f.all(ast.comprehension)]
        for loop in loops:
            self._bind_loop(loop)
        for item in f.all(ast.withitem):
            if item.optional_vars is not None:
                self._bind(item.optional_vars, Binding(None), item)
        for node in (n for kind in _NAMED for n in f.all(kind)):
            name = getattr(node, "name", None)
            if name:
                self._add(name, Binding(None), node)
        elsewhere: list[ast.Global | ast.Nonlocal] = [*f.all(ast.Global), *f.all(ast.Nonlocal)]
        for declared in elsewhere:
            for name in declared.names:
                self._add(name, Binding(None), declared)
        for lambda_ in f.all(ast.Lambda):
            a = lambda_.args
            for argument in (*a.posonlyargs, *a.args, *a.kwonlyargs):
                self._add(argument.arg, Binding(None), lambda_)

    def _bind_loop(self, loop: ast.For | ast.AsyncFor | ast.comprehension) -> None:
        target, rows = loop.target, loop.iter
        function, given = self._called(rows)
        if function == "enumerate" and given and isinstance(target, (ast.Tuple, ast.List)) and len(target.elts) == 2:
            self._bind(target.elts[0], Binding(None, statement=loop), loop)
            target, rows = target.elts[1], given[0]
            function, given = self._called(rows)
        parts = target.elts if isinstance(target, (ast.Tuple, ast.List)) else []
        if function in ("zip", "itertools.product") and parts and len(parts) == len(given):
            for part, value in zip(parts, given, strict=True):
                self._bind(part, Binding(value, True, None, loop), loop)
        else:
            self._bind(target, Binding(rows, True, None, loop), loop)

    def _called(self, node: ast.expr) -> tuple[str | None, list[ast.expr]]:
        """The function that an expression calls, and its arguments."""
        return (self.function.file.qualified(node.func), node.args) if isinstance(node, ast.Call) else (None, [])

    def _block(self, body: Iterable[ast.stmt], reaching: Reaching) -> Reaching | None:
        """The bindings that reach the end of a block; None if control never does."""
        now: Reaching | None = dict(reaching)
        for statement in body:
            if now is None:
                return None  # this statement never runs
            now = self._statement(statement, now)
        return now

    def _statement(self, node: ast.stmt, now: Reaching) -> Reaching | None:
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
            for part in (*node.decorator_list, *_defaults(node)):
                self._read(part, now)
            self._give(node, now)
            return now
        if isinstance(node, (ast.For, ast.AsyncFor)):
            self._read(node.iter, now)
            self._give_all_inside(node, now, itself=True)
            inside = dict(now)
            self._give(node, inside)
            self._read(node.target, inside)
            self._block(node.body, inside)
            return _joined(now, self._block(node.orelse, now))  # a break leaves it out
        if isinstance(node, ast.While):
            self._give_all_inside(node, now)
            self._read(node.test, now)
            self._block(node.body, now)
            return _joined(now, self._block(node.orelse, now))  # a break leaves it out
        if isinstance(node, ast.If):
            self._read(node.test, now)
            return _joined(self._block(node.body, now), self._block(node.orelse, now))
        if isinstance(node, (ast.With, ast.AsyncWith)):
            for item in node.items:
                self._read(item.context_expr, now)
                self._give(item, now)
            return self._block(node.body, now)
        if isinstance(node, ast.Match):
            self._read(node.subject, now)
            self._give_all_inside(node, now)
            ends = [self._case(case, now) for case in node.cases]
            return _joined(now, *ends)
        if hasattr(node, "handlers"):  # ast.Try, and ast.TryStar where there is one
            return self._try(node, now)  # type: ignore[arg-type]
        for child in ast.iter_child_nodes(node):
            self._read(child, now)
        self._give(node, now)
        return None if isinstance(node, _JUMPS) else now

    def _case(self, case: ast.match_case, now: Reaching) -> Reaching | None:
        for part in (case.pattern, case.guard):
            if part is not None:
                self._read(part, now)
        return self._block(case.body, now)

    def _try(self, node: ast.Try, now: Reaching) -> Reaching | None:
        end = self._block(node.body, now)
        broken = dict(now)
        for statement in node.body:
            self._give_all_inside(statement, broken, itself=True)
        ends = [self._block(node.orelse, end) if end is not None else None]
        for handler in node.handlers:
            inside = dict(broken)
            self._give(handler, inside)
            if handler.type is not None:
                self._read(handler.type, inside)
            ends.append(self._block(handler.body, inside))
        if not node.finalbody:
            return _joined(*ends)
        for handler in node.handlers:
            for statement in (*handler.body, *node.orelse):
                self._give_all_inside(statement, broken, itself=True)
        after = self._block(node.finalbody, _joined(broken, *ends) or broken)
        return after if any(e is not None for e in ends) else None

    def _give(self, statement: ast.AST, now: Reaching) -> None:
        for name, binding in self._of.get(statement, []):
            now[name] = frozenset((binding,))

    def _give_all_inside(self, node: ast.AST, now: Reaching, itself: bool = False) -> None:
        """Adds every binding made inside a statement to those that reach the statement."""
        for part in ast.walk(node):
            if (part is not node or itself) and not isinstance(part, _SCOPED):
                self._add_to(part, now)

    def _read(self, node: ast.AST, now: Reaching) -> None:
        """Records the bindings that reach each name that an expression reads."""
        if isinstance(node, ast.Name):
            # ``x += y`` reads its target as well.
            augmented = isinstance(self.function.file.parents[node], ast.AugAssign)
            if isinstance(node.ctx, ast.Load) or augmented:
                reached = now.get(node.id)
                if reached is not None:
                    self.definitions[node] = reached
            return
        if isinstance(node, ast.Lambda):
            inside = dict(now)
            self._give(node, inside)
            for default in _defaults(node):
                self._read(default, now)
            self._read(node.body, inside)
            return
        if isinstance(node, _COMPREHENSIONS):
            inside = dict(now)
            for loop in node.generators:
                self._read(loop.iter, inside)
                self._give(loop, inside)
                for test in loop.ifs:
                    self._read(test, inside)
            for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
                self._read(part, inside)
            for inner in ast.walk(node):  # a walrus binds its name in the function, not in the comprehension
                if isinstance(inner, ast.NamedExpr):
                    self._add_to(inner, now)
            return
        for child in ast.iter_child_nodes(node):
            self._read(child, now)
        if isinstance(node, ast.NamedExpr):
            self._add_to(node, now)

    def _add_to(self, node: ast.AST, now: Reaching) -> None:
        for name, binding in self._of.get(node, []):
            now[name] = now.get(name, frozenset()) | {binding}


_SCOPED = (ast.comprehension, ast.Lambda)  # nodes whose names do not outlive them


def _joined(*ends: Reaching | None) -> Reaching | None:
    """The bindings that reach a place by any of several paths; None if no path does."""
    ways = [end for end in ends if end is not None]
    if len(ways) < 2:
        return ways[0] if ways else None
    result = dict(ways[0])
    for way in ways[1:]:
        for name, bindings in way.items():
            before = result.get(name)
            if before is None:
                result[name] = bindings
            elif before is not bindings:
                result[name] = before | bindings
    return result


def _defaults(node: ast.AST) -> Iterator[ast.expr]:
    arguments = getattr(node, "args", None)
    if arguments is not None:
        yield from arguments.defaults
        yield from (d for d in arguments.kw_defaults if d is not None)
