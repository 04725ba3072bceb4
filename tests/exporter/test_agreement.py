"""The tolerances for a file's results, which follow from torch's own rounding."""

from __future__ import annotations

import gc
import platform
import subprocess
import sys
import weakref
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from svexport.exporter import memory
from svexport.exporter.agreement import CLOSE, held, hold_closely
from svexport.exporter.rounding import Rounding, Tolerances
from svexport.tracing.quantizers import Copies


class Counted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> tuple[Tensor]:
        self.calls += 1
        return (x.sin(),)


@pytest.mark.parametrize(("off", "measured"), [(0.9 * CLOSE, False), (3 * CLOSE, True)])
def test_rounding_is_measured_of_what_differs_by_more_than_runtimes_do(off: float, measured: bool) -> None:
    model, x = Counted(), torch.rand(37)
    (expected,) = model(x)
    actual = expected.clone()
    actual[5] += off * expected.abs().max()
    model.calls = 0
    found = [held("y", expected, actual, "random", Tolerances.of(None, None, set()))]
    assert found[0].ok
    rounding = Rounding(model, [x], [expected], Copies(model, changes=False, random=False))
    hold_closely(found, rounding, [("y", expected, actual)])
    assert bool(model.calls or rounding.gaps[0] is not None) == measured
    assert found[0].ok != measured  # ten times its rounding is less than each of these


MEMORY = """
import resource, runpy, sys

kept_memory = runpy.run_path(sys.argv[1])["kept_memory"]


def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    b"x" * 2**26  # 16,384 pages, unless they are large
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])


usual, before = faults(), resident()
with kept_memory(), kept_memory():
    faults()
    again = faults()
print(usual, again, resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_memory_is_used_again() -> None:
    """In a process of its own: where memory is free already, and in other threads, it depends."""
    command = [sys.executable, "-c", MEMORY, memory.__file__]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usual, again, left = map(int, output.split())
    assert again * 10 < usual
    assert left < 8000  # pages: given back


class Loop:
    """Garbage, once nobody else has it, that takes a collection to find."""

    def __init__(self) -> None:
        self.own = self


@pytest.fixture
def thawed() -> Iterator[None]:
    """Collections when they are asked for alone, and nothing frozen by other tests."""
    gc.disable()
    gc.collect()  # and none is due once they are on again
    assert not gc.get_freeze_count()
    yield
    gc.unfreeze()
    gc.enable()


@pytest.mark.usefixtures("thawed")
def test_garbage_is_looked_for_among_new_objects_alone() -> None:
    gc.enable()
    old = weakref.ref(one := Loop())
    with memory.old_objects_left_alone():
        new = weakref.ref(Loop())
        del one
        gc.collect()
        assert (old() is None, new() is None) == (False, True)
    assert not gc.get_freeze_count()
    gc.collect()
    assert old() is None


@pytest.mark.usefixtures("thawed")
def test_garbage_of_a_trace_goes_before_old_objects_are_left_alone() -> None:
    with memory.without_collections():
        left = weakref.ref(Loop())
    gc.enable()
    assert left() is not None
    with memory.old_objects_left_alone():
        assert left() is None


@pytest.mark.parametrize("why", ["disabled", "frozen"])
@pytest.mark.usefixtures("thawed")
def test_collections_of_whoever_sees_to_them_are_left_alone(why: str) -> None:
    if why == "frozen":
        gc.enable()
        gc.freeze()
    before = gc.get_freeze_count()
    with memory.old_objects_left_alone():
        assert bool(gc.get_freeze_count()) == bool(before) == (why == "frozen")
    assert bool(gc.get_freeze_count()) == bool(before)
