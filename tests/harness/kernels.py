"""Runs tests of compiled kernels, marked ``kernels(sources)``, only if their sources changed since they passed.

They compile for minutes. The user's cache holds which test passed with which sources and compilers, and the objects.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from pathlib import Path

import pytest
from filelock import FileLock

from tests.csrc import CACHE, ROOT, compilers, digest

PASSED = CACHE / "passed.json"
PROPERTY = "kernels"
_HARNESS = (ROOT / "tests" / "csrc.py", ROOT / "tests" / "test_csrc.py")


class Passed:
    """Collects which tests pass in this run."""

    def __init__(self) -> None:
        self.keys: dict[str, str | None] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = dict(report.user_properties).get(PROPERTY)
        if key is None or report.skipped:
            return
        if report.failed:
            self.keys[report.nodeid] = None
        elif report.when == "call":
            self.keys.setdefault(report.nodeid, str(key))

    def pytest_sessionfinish(self) -> None:
        if not self.keys:
            return
        PASSED.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(PASSED.with_suffix(".lock")):
            known = {**_passed(), **self.keys}
            part = PASSED.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps({name: key for name, key in known.items() if key}, indent=0, sort_keys=True))
            os.replace(part, PASSED)


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "kernels(*sources): compiles these CUDA sources")
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Passed())


def select(items: list[pytest.Item], *, everything: bool) -> None:
    """Skips, unless everything is wanted, what passed as it is, and what has never been compiled here."""
    passed = _passed()
    groups: dict[tuple[Path, ...], list[pytest.Item]] = defaultdict(list)
    for item in items:
        if sources := {path for mark in item.iter_markers("kernels") for path in mark.args}:
            groups[(item.path, *sorted(sources))].append(item)
    for files, group in groups.items():
        key = digest(compilers(), *files, *_HARNESS)
        met = any(item.nodeid in passed for item in group)
        for item in group:
            item.user_properties.append((PROPERTY, key))
            if everything:
                continue
            if passed.get(item.nodeid) == key:
                item.add_marker(
                    pytest.mark.skip(reason="passed here with the same sources; make test-most runs it again")
                )
            elif not met:
                item.add_marker(
                    pytest.mark.skip(reason="compiles for minutes; after make test-most, if sources change")
                )


def _passed() -> dict[str, str | None]:
    try:
        return dict(json.loads(Path(PASSED).read_text()))
    except (OSError, ValueError):
        return {}
