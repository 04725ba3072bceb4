"""Fixtures of all tests that build and run engines with the reference; each conftest.py imports them from here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.tensorrt.models import BATCH, Sampler, Scale, exported
from tests.tensorrt.reference import VERSIONS, Reference, install

__all__ = ["Install", "every_version", "files", "tensorrt"]

Install = Callable[..., Reference]
every_version = pytest.mark.parametrize("version", VERSIONS)


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with sampler.onnx, dynamic in its batch, and scale.onnx; nothing is written beside them."""
    folder = tmp_path_factory.mktemp("files")
    torch.manual_seed(0)
    exported(Sampler(), folder / "sampler.onnx", dynamic_shapes=BATCH)
    exported(Scale(), folder / "scale.onnx")
    return folder


@pytest.fixture
def tensorrt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """Makes a version the TensorRT of the test."""
    return lambda version="10.16.1", **faults: install(monkeypatch, tmp_path, version, **faults)
