"""Decides for all tests which of them run, in what order, and from which seeds (see tests/harness)."""

from __future__ import annotations

import os
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

from tests.harness import extent, fallbacks, kernels, seeds
from tests.harness.seeds import pytest_fixture_setup, pytest_make_collect_report, pytest_runtest_setup

__all__ = ["pytest_fixture_setup", "pytest_make_collect_report", "pytest_runtest_setup"]


def pytest_addoption(parser: pytest.Parser) -> None:
    extent.add_options(parser)
    fallbacks.add_options(parser)
    seeds.add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    seeds.configure(config)
    kernels.configure(config)
    extent.configure(config)
    fallbacks.configure(config)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    seeds.configure_node(node)


def pytest_report_header(config: pytest.Config) -> str:
    return seeds.header(config)


@pytest.fixture(scope="session")
def everything(request: pytest.FixtureRequest) -> bool:
    """Whether this is ``--all``, for tests whose combinations are no parameters."""
    return bool(request.config.getoption("all"))


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run for all its processes: what one has made in it, under a FileLock, the others take."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    extent.select(items, config)
    kernels.select(items, everything=extent.is_long(config))
    extent.order(items)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, Any, Any]:
    report = yield
    seeds.show(item, report)
    return report
