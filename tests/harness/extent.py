"""Which tests run: ``--core``, some of each (the default), ``--most``, or ``--all``; and in what order.

* By default, tests marked ``exhaustive`` and tests with a case that takes long are left out.
* If a product of parameters takes long in all, only enough combinations run that any two values of different
  parameters meet; with just two parameters, only enough that every value occurs.
* If a test still takes longer than its share of time, evenly spaced cases run, as many as fit into that time, unless
  the test is marked ``whole``. ``--most`` gives each test more time.

durations.json holds how long a case of each test takes. The longest run first, so that no process is left with one of
them at the end.
"""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Hashable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import pytest

Case = TypeVar("Case")

DURATIONS = Path(__file__).with_name("durations.json")
SHORTEST = 0.5  # seconds that all cases of a test take; what is shorter is not kept


class Extent(NamedTuple):
    """How much of a test runs.

    Attributes:
        product: seconds of all its cases from which on it has combinations to spare.
        cases: seconds that its cases take.
        case: seconds of a case from which on the test is left out.
        exhaustive: whether tests marked so run.
    """

    product: float
    cases: float
    case: float
    exhaustive: bool


SOME = Extent(product=0.5, cases=0.6, case=4.0, exhaustive=False)
MOST = Extent(product=3.0, cases=15.0, case=math.inf, exhaustive=True)


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("extent")
    group.addoption("--core", action="store_true", help="only tests marked 'core': a few of every part")
    group.addoption("--most", action="store_true", help="every test, with as many cases as fit its time")
    group.addoption("--all", action="store_true", help="every test and every combination of parameters")
    group.addoption("--keep-durations", action="store_true", help=f"write those of this run to {DURATIONS.name}")


def is_long(config: pytest.Config) -> bool:
    """Whether more runs than by default."""
    return bool(config.getoption("most") or config.getoption("all"))


def select(items: list[pytest.Item], config: pytest.Config) -> None:
    """Keeps the tests that are wanted, deselects the others."""
    if config.getoption("all"):
        return
    if config.getoption("core"):
        wanted = {item for item in items if item.get_closest_marker("core")}
    else:
        wanted = set(_fitting(items, MOST if config.getoption("most") else SOME))
    config.hook.pytest_deselected(items=[item for item in items if item not in wanted])
    items[:] = [item for item in items if item in wanted]


def _fitting(items: Sequence[pytest.Item], extent: Extent) -> Iterator[pytest.Item]:
    seconds, tests = durations(), defaultdict(list)
    for item in items:
        if extent.exhaustive or not item.get_closest_marker("exhaustive"):
            tests[_test(item.nodeid)].append(item)
    for name, cases in tests.items():
        each = seconds.get(name, 0.0)
        if cases[0].get_closest_marker("whole"):
            yield from cases
        elif each < extent.case:
            if each * len(cases) >= extent.product:
                cases = [cases[i] for i in covering([_values(item) for item in cases])]
            yield from spread(cases, max(1, int(extent.cases / each)) if each else len(cases))


def _test(nodeid: str) -> str:
    """Its name without parameters."""
    return nodeid.partition("[")[0]


def _values(item: pytest.Item) -> tuple[Hashable, ...]:
    """Which value each of its parameters has, by its identity; names that are given together are one parameter."""
    values = {name: id(value) for name, value in item.callspec.params.items()} if hasattr(item, "callspec") else {}
    together = [mark.args[0] for mark in item.iter_markers("parametrize")]
    groups = [names.replace(" ", "").split(",") if isinstance(names, str) else names for names in together]
    found: list[Hashable] = [tuple((name, values.pop(name)) for name in names if name in values) for names in groups]
    return (*found, *values.items())


def covering(combinations: Sequence[tuple[Hashable, ...]]) -> list[int]:
    """Indices of combinations in which all pairs of values meet that meet in any; of two parameters, all values.

    Greedy: each next one is that with the most that is new, the first of them.
    """
    size = 2 if combinations and len(combinations[0]) > 2 else 1
    parts = [set(itertools.combinations(values, size)) for values in combinations]
    missing = set().union(*parts)
    chosen: list[int] = []
    while missing:
        best = max(range(len(parts)), key=lambda i: len(parts[i] & missing))
        chosen.append(best)
        missing -= parts[best]
    return sorted(chosen) if len(combinations) > 1 else list(range(len(combinations)))


def spread(cases: Sequence[Case], count: int) -> list[Case]:
    """At most ``count`` cases, of even distance, the first among them."""
    count = min(count, len(cases))
    return [cases[i * len(cases) // count] for i in range(count)]


def order(items: list[pytest.Item]) -> None:
    """Files that take longest first; what is in a file stays together, for its fixtures."""
    files: dict[str, float] = defaultdict(float)
    seconds = durations()
    for item in items:
        files[item.nodeid.partition("::")[0]] += seconds.get(_test(item.nodeid), 0.0)
    items.sort(key=lambda item: -files[item.nodeid.partition("::")[0]])


def durations() -> dict[str, float]:
    """Seconds that a case of a test took in some run, by the test's name."""
    return dict(json.loads(DURATIONS.read_text()))


class Keep:
    """Writes how long the tests of a run took: ``make test-most ARGS=--keep-durations``."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.cases: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name = _test(report.nodeid)
        self.seconds[name] += report.duration
        self.cases[name].add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        long = sorted(name for name, seconds in self.seconds.items() if seconds >= SHORTEST)
        kept = {name: round(self.seconds[name] / len(self.cases[name]), 3) for name in long}
        DURATIONS.write_text(json.dumps(kept, indent=0) + "\n")


def configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "core: of 'make test-core'")
    config.addinivalue_line(
        "markers", "exhaustive: takes long and proves little more than others do; not of 'make test'"
    )
    config.addinivalue_line("markers", "whole: all its cases run, however long they take in all")
    if config.getoption("keep_durations") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keep())
