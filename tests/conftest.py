"""For all tests."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def builds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all test processes share, for what is compiled once."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "builds"
    folder.mkdir(exist_ok=True)
    return folder


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles kernels takes longest, so it comes first: processes share out the rest beside it."""
    items.sort(key=lambda item: item.path.name != "test_csrc.py")
