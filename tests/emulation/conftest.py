from __future__ import annotations

import pytest

from tests.emulation import RUNTIME, Kernels


@pytest.fixture(scope="module")
def kernels(request: pytest.FixtureRequest) -> Kernels:
    """The sources that the module names."""
    mark = request.node.get_closest_marker("kernels")
    return Kernels(*(path for path in mark.args if path not in RUNTIME))
