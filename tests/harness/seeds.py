"""Seeds random numbers from the test's name and ``--seed``, so they are the same in any order and in any process.

``--seed=random`` draws a seed; the header and every failure show it.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Generator
from typing import Any

import numpy as np
import pytest
import torch

KEY = pytest.StashKey[int]()


def add_options(parser: pytest.Parser) -> None:
    parser.addoption("--seed", default="0", help="of all random inputs: a number, or 'random' (default: %(default)s)")


def configure(config: pytest.Config) -> None:
    given = config.getoption("seed")
    if hasattr(config, "workerinput"):  # a process of xdist: what the first one drew
        config.stash[KEY] = config.workerinput["seed"]
    else:
        config.stash[KEY] = random.SystemRandom().randrange(2**32) if given == "random" else int(given)


def configure_node(node: Any) -> None:
    node.workerinput["seed"] = node.config.stash[KEY]


def header(config: pytest.Config) -> str:
    return f"seed: {config.stash[KEY]}"


def _start(config: pytest.Config, name: str) -> None:
    seed = int.from_bytes(hashlib.sha256(f"{config.stash[KEY]} {name}".encode()).digest()[:4], "big")
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@pytest.hookimpl(tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector) -> None:
    """Tensors that a module makes when it is imported."""
    if isinstance(collector, pytest.Module):
        _start(collector.config, collector.nodeid)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    _start(item.config, item.nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: pytest.FixtureDef[Any], request: Any) -> Generator[None, Any, Any]:
    """A fixture that tests share does not depend on which of them is first, nor does that test on the fixture."""
    if fixturedef.scope == "function":
        return (yield)
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    _start(request.config, f"{request.node.nodeid} {fixturedef.argname} {getattr(request, 'param_index', 0)}")
    try:
        return (yield)
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])


def show(item: pytest.Item, report: pytest.TestReport) -> None:
    """With a failure, how to see it again."""
    if report.failed:
        seed = item.config.stash[KEY]
        report.sections.append(("seed", f'again: python -m pytest --all "{item.nodeid}" --seed={seed}'))
