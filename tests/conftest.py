"""For all tests."""

from __future__ import annotations

import pytest


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What compiles kernels takes longest, so it comes first: processes share out the rest beside it."""
    items.sort(key=lambda item: item.path.name != "test_csrc.py")
