"""Compares the bindings that reach a name with the values that real runs of the same function see there."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import random
from collections import defaultdict

import pytest

from svexport.advise.flow import Flow
from svexport.advise.functions import File
from svexport.advise.source import Source

NAMES = ("a", "b")


class Writer:
    """Functions at random: every assignment gives a number of its own, every ``see`` reads a name."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.numbers = 0

    def number(self):
        self.numbers += 1
        return self.numbers

    def block(self, depth, in_loop):
        lines = []
        for _ in range(self.random.randint(1, 3)):
            lines += self.statement(depth, in_loop)
        return lines

    def inside(self, depth, in_loop):
        return [f"    {line}" for line in self.block(depth - 1, in_loop)]

    def simple(self, in_loop):
        name = self.random.choice(NAMES)
        jump = self.random.choice(("break", "continue") if in_loop else ("return",))
        return self.random.choice(
            [
                [f"{name} = {self.number()}"],
                [f"{name}, _ = {self.number()}, 0"],
                [f"see({self.number()}, {name})"],
                [f"see({self.number()}, ({name} := {self.number()}))"],
                [f"[see({self.number()}, {name}) for {name} in ({self.number()},)]"],
                [f"[(_, see({self.number()}, {name})) for _ in (0, 1) if flip()]"],
                ["raise_perhaps()"],
                ["if flip():", f"    {jump}"],
            ]
        )

    def statement(self, depth, in_loop):
        kind = self.random.choice(
            ("simple", "simple", "if", "else", "for", "while", "except", "finally", "with", "match")
        )
        if depth == 0 or kind == "simple":
            return self.simple(in_loop)
        body = self.inside(depth, in_loop or kind in ("for", "while"))
        if kind in ("else", "while", "except", "finally"):
            other = self.inside(depth, in_loop)
        if kind == "if":
            return ["if flip():", *body]
        if kind == "else":
            return ["if flip():", *body, "else:", *other]
        if kind == "for":
            return [f"for {self.random.choice(NAMES)} in some({self.number()}):", *body]
        if kind == "while":
            return ["while flip():", *body, "else:", *other]
        if kind == "with":
            return ["with context():", *body]
        if kind == "match":
            return ["match flip():", "    case True:", *[f"    {line}" for line in body]]
        return ["try:", *body, "except Exception:" if kind == "except" else "finally:", *other]


class Context:
    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


def load(path):
    spec = importlib.util.spec_from_file_location("flowing", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def seen(path, draws):
    """The numbers that each ``see`` was given, over many runs; negative ones are arguments."""
    found = defaultdict(set)

    def see(place, value):
        found[place].add(value)

    def raise_perhaps():
        if draws.random() < 0.3:
            raise ValueError

    names = vars(load(path))
    names |= {
        "see": see,
        "raise_perhaps": raise_perhaps,
        "flip": lambda: draws.random() < 0.5,
        "some": lambda number: [number] * draws.randint(0, 2),
        "context": Context,
    }
    for _ in range(40):
        with contextlib.suppress(ValueError):
            names["f"](-1, -2)
    return found


def number_of(binding):
    """The number that a binding gives."""
    if binding.parameter is not None:
        return {"a": -1, "b": -2}[binding.parameter.arg]
    value = binding.value
    if isinstance(value, ast.Call):
        return value.args[0].value  # some(3)
    return value.elts[0].value if isinstance(value, ast.Tuple) else value.value


@pytest.mark.parametrize("seed", range(8))
def test_every_value_that_is_seen_reaches(seed, tmp_path):
    """No run sees what does not reach a name; in straight lines nothing else does."""
    for part in range(20):
        path = tmp_path / f"f{part}.py"
        lines = Writer(f"{seed} {part}").block(3, False)
        path.write_text("def f(a, b):\n" + "\n".join(f"    {line}" for line in lines) + "\n")
        file = File(Source(path))
        flow = Flow(file.functions[0])
        runs = seen(path, random.Random(seed))
        for call in ast.walk(file.source.tree):
            if not (isinstance(call, ast.Call) and getattr(call.func, "id", "") == "see"):
                continue
            name = call.args[1]
            if isinstance(name, ast.Name):
                reached = {number_of(b) for b in flow.definitions.get(name, ())}
                assert runs[call.args[0].value] <= reached, ast.unparse(file.source.tree)


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("a = 1; see(0, a)", {1}),
        ("a = 1; a = 2; see(0, a)", {2}),
        ("if b:;     a = 1; else:;     a = 2; see(0, a)", {1, 2}),
        ("if b:;     a = 1;     return; see(0, a)", {-1}),
        ("for b in c:;     a = 1;     see(0, a)", {1}),
        ("for b in c:;     see(0, a);     a = 1", {-1, 1}),
        ("a = 1; [a for a in c]; see(0, a)", {1}),
        ("try:;     a = 1; finally:;     see(0, a)", {-1, 1}),
        ("a = 1; f = lambda a: a; see(0, a)", {1}),
    ],
)
def test_nothing_else_reaches(lines, expected, tmp_path):
    path = tmp_path / "f.py"
    path.write_text("def f(a, b):\n" + "\n".join(f"    {line}" for line in lines.split("; ")) + "\n")
    file = File(Source(path))
    flow = Flow(file.functions[0])
    (call,) = (n for n in ast.walk(file.source.tree) if isinstance(n, ast.Call))
    assert {number_of(b) for b in flow.definitions[call.args[1]]} == expected
