"""Forwards that count their calls are refused if a later call returns something else, and accepted otherwise."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter import counted


class Counts(nn.Module):
    """Goes by how often it has been called, or not."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls, self.left, self.longest = how, 0, 40, 0
        self.kept: Tensor | None = None
        self.register_buffer("seen", torch.zeros((), dtype=torch.long))
        self.register_buffer("age", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.left -= 1
        self.seen += 1
        self.age.add_(1)
        if self.longest < x.shape[1]:
            self.longest = x.shape[1]
            self.kept = torch.arange(self.longest) + 1.0
        if self.how == "warm-up":
            return x * (3 if self.calls <= 50 else 2)
        if self.how == "key frame":
            return x * 3 if self.calls % 10 == 0 else x * 2
        if self.how == "down":
            return x * (3 if self.left > 0 else 2)
        if self.how == "buffer":
            return torch.where(self.seen > 100, x * 2, x * 3)
        if self.how == "fading":
            return x * torch.exp(-1e-7 * self.age)
        if self.how == "kept":
            return x * self.kept[: x.shape[1]]
        assert self.calls < 10**5, "only counts"
        return x * 2


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(
    ("how", "name"),
    [("warm-up", "calls"), ("key frame", "calls"), ("down", "left"), ("buffer", "seen"), ("fading", "age")],
)
def test_what_comes_later_is_refused(how: str, name: str, opset: int, tmp_path: Path) -> None:
    with pytest.raises(
        svexport.VerificationError, match=rf"forward changes [a-z, ]*\b{name}\b.* returns something else"
    ):
        svexport.export(Counts(how), torch.rand(2, 3) + 1, tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


calls = 0
draws = object()  # that has the name of an attribute


class Keeps(nn.Module):
    """Keeps how often it has been called where no attribute of its own tells, and returns twice that much once."""

    seen = 0

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.counts, self.own = how, {"calls": 0}, SimpleNamespace(calls=0)
        self.pair, self.text, self.doubled, self.age, self.whole = (0, 0), "", 1, 0.0, np.int64(0)
        self.array, self.last = np.zeros(3), deque([0], maxlen=90)
        self.register_buffer("decay", torch.ones(2))
        self.going, self.closed, self.draws = counting(), closure(), random.Random(0)

    def many(self) -> bool:
        if self.how == "dict":
            self.counts["calls"] += 1
            return self.counts["calls"] % 64 == 0
        if self.how == "object":
            self.own.calls += 1
            return self.own.calls == 60
        if self.how == "class":
            type(self).seen += 1
            return type(self).seen > 70
        if self.how == "tuple":
            self.pair = self.pair[0] + 1, 0
            return self.pair[0] > 70
        if self.how == "text":
            self.text += "."
            return len(self.text) > 70
        if self.how == "deque":
            self.last.append(1)
            return len(self.last) > 70
        if self.how == "doubled":
            self.doubled *= 2
            return self.doubled > 2**60
        if self.how == "fraction":
            self.age += 0.1
            return self.age > 5
        if self.how == "numpy":
            self.whole += 1
            return bool(self.whole > 70)
        if self.how == "array":
            self.array[1] += 1
            return bool(self.array[1] > 70)
        if self.how == "generator":
            return next(self.going) > 70
        if self.how == "closure":
            return self.closed() > 70
        if self.how == "draws":
            return self.draws.random() < 0.02
        if self.how == "function":
            closure.calls = getattr(closure, "calls", 0) + 1
            return closure.calls > 70
        if self.how == "global":
            global calls
            calls += 1
            return calls > 70
        return default() > 70

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "decay":
            self.decay *= 0.9
            return torch.where(self.decay[0] < 1e-3, x * 2, x)
        return x * 2 if self.many() else x * 1


def counting() -> Iterator[int]:
    calls = 0
    while True:
        calls += 1
        yield calls


def closure() -> Callable[[], int]:
    calls = 0

    def call() -> int:
        nonlocal calls
        calls += 1
        return calls

    return call


def default(calls: list[int] = [0]) -> int:  # noqa: B006 - the habit that is to be seen
    calls[0] += 1
    return calls[0]


KEPT = {
    "dict": "counts['calls']",
    "object": "own.calls",
    "class": "seen",
    "tuple": "pair[0]",
    "text": "text",
    "deque": "last[3]",
    "doubled": "doubled",
    "fraction": "age",
    "numpy": "whole",
    "array": "array",
    "decay": "decay",
    "generator": "going().calls",
    "closure": "closed().calls",
    "draws": "draws",
    "function": "global closure().calls",
    "global": "global calls",
    "default": "global default().calls[0]",
}


@pytest.mark.parametrize("how", KEPT)
def test_wherever_it_is_kept(how: str, tmp_path: Path) -> None:
    model = Keeps(how)
    with pytest.raises(svexport.VerificationError) as raised:
        svexport.export(model, torch.rand(2, 3) + 1, tmp_path / "m.onnx", opset=18)
    assert f"forward changes {KEPT[how]}, and returns something else" in str(raised.value)
    assert (model.counts, model.own.calls, Keeps.seen, model.pair) == ({"calls": 0}, 0, 0, (0, 0))
    assert (model.text, [*model.last], model.doubled, model.age, model.whole) == ("", [0], 1, 0, 0)
    assert not model.array.any()
    assert model.decay.tolist() == [1, 1]
    assert model.closed() == 1 or how == "closure"


class Logs(nn.Module):
    """Keeps what it is called with, and goes by how much that is once it is so long."""

    def __init__(self, longest: int = 10**9, text: bool = False) -> None:
        super().__init__()
        self.longest, self.text, self.calls = longest, text, 0
        self.shapes: list[torch.Size] = []
        self.lines = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.text:
            self.lines += f"{tuple(x.shape)}\n"
        else:
            self.shapes.append(x.shape)
        self.calls += 1
        assert len(self.shapes) < 10_100
        return x * 3 if max(len(self.shapes), len(self.lines)) > self.longest else x * 2


def test_lists_that_grow_are_noted(tmp_path: Path) -> None:
    model = Logs()
    report = svexport.export(model, torch.rand(2, 3), tmp_path / "m.onnx", opset=18)
    assert report.verified
    assert any(
        "shapes" in n and "20 calls return the same result, and so does one with 10,000 items more" in n
        for n in report.notes
    )
    assert (model.shapes, model.calls) == ([], 0)


@pytest.mark.parametrize("text", [False, True])
def test_lists_and_texts_are_made_long(text: bool, tmp_path: Path) -> None:
    with pytest.raises(svexport.VerificationError, match=r"(shapes\[2\]|lines).* something else once that is \d+ more"):
        svexport.export(Logs(6000, text), torch.rand(2, 3), tmp_path / "m.onnx", opset=18)
    assert not list(tmp_path.iterdir())


class Holds(nn.Module):
    """Goes by how much a container has, which each call changes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.sizes, self.waiting = how, {0: 0}, deque(range(1000))
        self.left, self.seen = {str(i): i for i in range(1000)}, {0}

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "dict":
            self.sizes[len(self.sizes)] = x.shape[0]
            return x * 2 if len(self.sizes) < 1000 else x * 3
        if self.how == "length":
            self.sizes[object()] = 1
            return x * 2 if len(self.sizes) != 777 else x * 3
        if self.how == "set":
            self.seen.add(len(self.seen))
            return x * 2 if len(self.seen) < 1000 else x * 3
        if self.how == "last":
            self.left.popitem()
            return x * 2 if len(self.left) > 500 else x * 3
        self.waiting.popleft() if self.how == "first" else self.waiting.pop()
        ends = self.waiting[0] < 500 and self.waiting[-1] > 499
        return x * 2 if ends else x * 3


@pytest.mark.parametrize("how", ["dict", "length", "set", "last", "first", "pop"])
def test_what_containers_hold_is_many_or_few(how: str, tmp_path: Path) -> None:
    model = Holds(how)
    with pytest.raises(svexport.VerificationError, match=r"something else once that is \d+ more"):
        svexport.export(model, torch.rand(2, 3), tmp_path / "m.onnx", opset=18)
    assert (model.sizes, model.seen) == ({0: 0}, {0})
    assert [*model.waiting] == [*model.left.values()] == [*range(1000)]


def test_lists_of_tensors_are_not_made_too_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counted, "MOST_BYTES", 2**16)

    class Remembers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.features: list[Tensor] = []

        def forward(self, x: Tensor) -> Tensor:
            self.features.append(x.detach())
            assert len(self.features) < 70
            return torch.stack(self.features)[-1] * 2

    report = svexport.export(Remembers(), torch.rand(2, 2**9), tmp_path / "m.onnx", opset=18)
    assert any("features" in note and "with 16 items more" in note for note in report.notes)


@pytest.mark.parametrize("how", ["kept", "only counts"])
def test_what_is_the_same_is_not(how: str, tmp_path: Path) -> None:
    model = Counts(how)
    assert svexport.export(model, torch.rand(2, 3) + 1, tmp_path / "m.onnx", opset=11).verified
    assert (model.calls, model.left, model.longest, int(model.seen), model.kept) == (0, 40, 0, 0, None)
