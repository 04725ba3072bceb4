from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from svexport.cli import main
from tests.tensorrt.reference.fixtures import files, tensorrt

__all__ = ["Result", "files", "project", "run", "tensorrt"]

MODELS = """
import os
import sys
import svexport
import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return {"scores": self.conv(x).relu().mean((2, 3))}


class Ready(Net):
    example_inputs = (torch.linspace(-1, 1, 3 * 8 * 8).reshape(1, 3, 8, 8),)


class Product(nn.Module):
    example_inputs = (torch.ones(2, 3), torch.ones(3, 4))

    def forward(self, a, b):
        return torch.einsum("ij,jk->ik", a, b)


class Turned(Ready):
    def forward(self, x):
        return x.permute(0, 2, 3, 1).relu().permute(0, 3, 1, 2)


class Pyramid(nn.Module):
    def forward(self, features, scale):
        return sum(f.mean() for f in features) * scale


class Unsupported(Ready):
    def forward(self, x):
        return torch.special.bessel_j0(x)


class Masked(nn.Module):
    def forward(self, x, ids, mask):
        return x


class Recorded(Net):
    def __init__(self):
        super().__init__()
        with svexport.record(self):
            self(x=torch.ones(1, 3, 8, 8))


class Lookup(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(2, 3)

    def forward(self, ids):
        return self.table(ids)


class Noise(Ready):
    def forward(self, x):
        return super().forward(x)["scores"] + torch.rand(1)


class Chatty(Ready):
    def forward(self, x):
        print("from Python")
        os.write(1, b"from below\\n")
        return super().forward(x)


class Sized(Net):
    def __init__(self, width):
        super().__init__()


class Zoo:
    net = Ready()


instance = Ready()
number = 3


def nothing():
    return None


def broken():
    raise RuntimeError("no such checkpoint")
"""


@dataclass
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        def refuse(constant: str) -> None:
            raise AssertionError(f"{constant} is not JSON")

        return json.loads(self.out, parse_constant=refuse)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder as the working directory: nets.py, and the same in a package."""
    (tmp_path / "nets.py").write_text(MODELS)
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__init__.py").touch()
    (tmp_path / "package" / "nets.py").write_text("from nets import *\nfrom nets import Zoo\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if getattr(sys.modules[name], "__file__", None) and sys.modules[name].__file__.startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., Result]:
    """Runs a command line in this process; usage errors come back as exit codes too."""

    def run(*argv: object) -> Result:
        capfd.readouterr()
        try:
            code = main([str(word) for word in argv])
        except SystemExit as exit:
            code = exit.code or 0
        return Result(code, *capfd.readouterr())

    return run
