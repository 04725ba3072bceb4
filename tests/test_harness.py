"""The test harness: which tests run, and from which seeds."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter import dynamo
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET, LAST_TORCHSCRIPT_OPSET
from svexport.exporter.trace import torch_export_first
from tests import csrc
from tests.harness import extent, fallbacks, kernels, seeds


@pytest.mark.parametrize("sizes", [(3, 4, 2), (2, 2, 2, 3, 2), (5, 3, 4)])
def test_every_two_values_meet(sizes: tuple[int, ...]) -> None:
    product = [tuple(enumerate(values)) for values in itertools.product(*map(range, sizes))]
    chosen = [product[i] for i in extent.covering(product)]
    met = {pair for values in chosen for pair in itertools.combinations(values, 2)}
    assert met == {pair for values in product for pair in itertools.combinations(values, 2)}
    assert len(chosen) < len(product)


def test_of_two_parameters_every_value_is_met() -> None:
    product = [(("a", a), ("b", b)) for a in range(5) for b in range(3)]
    chosen = [product[i] for i in extent.covering(product)]
    assert len(chosen) == 5
    assert {value for values in chosen for value in values} == {value for values in product for value in values}


def test_what_has_no_product_is_kept() -> None:
    assert extent.covering([()]) == [0]
    assert extent.covering([(("a", i),) for i in range(7)]) == list(range(7))


def test_cases_of_even_distance() -> None:
    assert extent.spread("abcdefgh", 4) == ["a", "c", "e", "g"]
    assert extent.spread("abc", 9) == ["a", "b", "c"]
    assert extent.spread("abcde", 2) == ["a", "c"]
    assert extent.spread("", 3) == []


def case(name: str, *marks: str, **params: int) -> SimpleNamespace:
    found = [getattr(pytest.mark, name).mark for name in marks]
    return SimpleNamespace(
        nodeid=f"{name}[{params}]",
        callspec=SimpleNamespace(params=params),
        iter_markers=lambda name: [mark for mark in found if mark.name == name],
        get_closest_marker=lambda name: next((mark for mark in found if mark.name == name), None),
    )


@pytest.mark.parametrize("extent_of", [extent.SOME, extent.MOST])
def test_cases_fit_into_the_time_of_a_test(monkeypatch: pytest.MonkeyPatch, extent_of: extent.Extent) -> None:
    each = {"short": 0.0, "product": 0.1, "long": 3.0, "longest": 7.0, "whole": 7.0, "exhaustive": 0.1}
    monkeypatch.setattr(extent, "durations", lambda: each)
    items = [
        case(name, *({name} & {"whole", "exhaustive"}), a=a, b=b, c=c)
        for name in each
        for a, b, c in itertools.product(range(5), range(4), range(3))
    ]
    chosen = {
        name: [item for item in extent._fitting(items, extent_of) if item.nodeid.startswith(f"{name}[")]
        for name in each
    }
    count = {name: len(cases) for name, cases in chosen.items()}
    most = extent_of is extent.MOST
    assert count["short"] == count["whole"] == 60
    fitting = int(extent_of.cases / each["product"])
    assert count["product"] == min(fitting, len(extent.covering([extent._values(item) for item in items[60:120]])))
    assert count["long"] == max(1, int(extent_of.cases / each["long"]))
    assert count["longest"] == (int(extent_of.cases / each["longest"]) if most else 0)
    assert (count["exhaustive"] > 0) == most


def test_names_given_together_are_one_parameter() -> None:
    marks = [pytest.mark.parametrize(("a", "b"), []).mark, pytest.mark.parametrize("c", []).mark]
    params = {"c": "c0", "b": "b0", "a": "a0", "fixture": 1}
    item = SimpleNamespace(callspec=SimpleNamespace(params=params), iter_markers=lambda name: marks)
    assert len(extent._values(item)) == 3


def test_durations_are_of_tests_that_there_are() -> None:
    root = Path(__file__).parents[1]
    gone = [name for name in extent.durations() if not (root / name.partition("::")[0]).is_file()]
    assert not gone, "make test-most ARGS=--keep-durations"


def numbers() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(1).item()


def test_random_numbers_follow_from_name_and_seed(pytestconfig: pytest.Config) -> None:
    config = SimpleNamespace(stash={seeds.KEY: 1})
    drawn = []
    for name in ("a", "b", "a"):
        seeds._start(config, name)
        drawn.append(numbers())
    assert drawn[0] == drawn[2]
    assert not set(drawn[0]) & set(drawn[1])
    config.stash[seeds.KEY] = 2
    seeds._start(config, "a")
    assert not set(numbers()) & set(drawn[0])


@pytest.fixture(scope="module")
def drawn_by_a_fixture() -> tuple[float, float, float]:
    return numbers()


def test_fixtures_take_no_random_numbers_of_a_test(request: pytest.FixtureRequest) -> None:
    seeds._start(request.config, "a")
    expected = numbers()
    seeds._start(request.config, "a")
    assert request.getfixturevalue("drawn_by_a_fixture") != expected
    assert numbers() == expected


@pytest.fixture
def judged() -> Iterator[Callable[..., str]]:
    """Judges what was exported here as if ``known`` were the tests that need TorchScript."""
    config = SimpleNamespace(stash={})

    def judge(known: dict[str, str] | None) -> str:
        config.stash[fallbacks.KNOWN] = known
        try:
            return fallbacks._judge("a test", config)
        finally:
            fallbacks._seen.clear()

    yield judge
    fallbacks._seen.clear()


class Doubling(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2


class Branching(nn.Module):
    """Takes a value into Python, which torch.export refuses."""

    def forward(self, x: Tensor) -> Tensor:
        if x.isnan().any():
            self.seen = True
        return x * 2


def wrong(*args: Any) -> Any:
    """What torch.export's exporter would write with a rule that is wrong."""
    written, guarded = EXPORT(*args)
    for node in written.graph.node:
        node.op_type = {"Mul": "Add"}.get(node.op_type, node.op_type)
    return written, guarded


EXPORT = dynamo.export
both = pytest.mark.skipif(LAST_TORCHSCRIPT_OPSET >= FIRST_DYNAMO_OPSET, reason="an old torch has TorchScript alone")


@both
@pytest.mark.parametrize("rule", ["refuses", "is wrong"])
def test_what_torch_script_traces_fails_where_nobody_knows(rule: str, judged, monkeypatch, tmp_path) -> None:
    if rule == "is wrong":
        monkeypatch.setattr(dynamo, "export", wrong)
    model = Branching() if rule == "refuses" else Doubling()

    def export() -> None:
        assert svexport.export(model, torch.randn(2, 3), tmp_path / "m.onnx", opset=11).verified

    export()
    with pytest.raises(pytest.fail.Exception, match="did not trace a model"):
        judged({"another test": ""})
    export()
    assert judged({"a test": ""})
    export()
    assert judged(None), "collected for the list"


@both
def test_what_torch_export_traces_is_in_no_list(judged, tmp_path) -> None:
    svexport.export(Doubling(), torch.randn(2, 3), tmp_path / "m.onnx", opset=11)
    with pytest.raises(pytest.fail.Exception, match="take a test out"):
        judged({"a test": "refused, once"})
    svexport.export(Doubling(), torch.randn(2, 3), tmp_path / "m.onnx", opset=11)
    assert judged({}) == ""


@pytest.mark.parametrize("model", ["scripted", "meant for it", "opset 20"])
def test_models_that_say_nothing_of_the_first_tracer(model: str, judged, tmp_path) -> None:
    module = torch.jit.script(Doubling()) if model == "scripted" else Doubling()
    with torch_export_first(False) if model == "meant for it" else nullcontext():
        svexport.export(module, torch.randn(2, 3), tmp_path / "m.onnx", opset=20 if model == "opset 20" else 11)
    assert judged({"a test": "neither here nor there"}) == ""


def test_fallbacks_are_of_tests_that_there_are() -> None:
    root = Path(__file__).parents[1]
    gone = [name for name in fallbacks.read()["tests"] if not (root / name.partition("::")[0]).is_file()]
    assert not gone, "make test ARGS=--keep-fallbacks"


def test_fallbacks_of_a_run_are_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(fallbacks, "FALLBACKS", tmp_path / "fallbacks.json")
    fallbacks.FALLBACKS.write_text(
        json.dumps({"torch": "2.0", "tests": {"a": "still", "b": "no more", "c": "not run"}})
    )
    keep = fallbacks.Keep()
    for name, properties in {"a": [("fallback", ("a", "now"))], "b": [], "d": [("fallback", ("d", "new"))]}.items():
        keep.pytest_runtest_logreport(SimpleNamespace(nodeid=name, user_properties=properties))
    keep.pytest_sessionfinish()
    assert fallbacks.read() == {"torch": fallbacks._torch(), "tests": {"a": "now", "c": "not run", "d": "new"}}


def item_of(name: str, source: Path) -> SimpleNamespace:
    added: list[pytest.MarkDecorator] = []
    return SimpleNamespace(
        nodeid=name,
        path=Path(__file__),
        user_properties=[],
        iter_markers=lambda _: [pytest.mark.kernels(source).mark],
        add_marker=added.append,
        added=added,
    )


def test_kernels_run_where_their_sources_changed_since_they_passed(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "PASSED", tmp_path / "passed.json")
    header, source = tmp_path / "op.h", tmp_path / "op.cu"
    header.write_text("// one")
    source.write_text('#include "op.h"\n')

    def reasons(everything: bool = False) -> list[str]:
        items = [item_of("f::test[1]", source), item_of("f::test[2]", source)]
        kernels.select(items, everything=everything)
        passed = kernels.Passed()
        for item in items:
            if not item.added:
                report = SimpleNamespace(nodeid=item.nodeid, skipped=False, failed=False, when="call")
                passed.pytest_runtest_logreport(SimpleNamespace(**vars(report), user_properties=item.user_properties))
        passed.pytest_sessionfinish()
        return [mark.mark.kwargs["reason"].split(" ")[0] for item in items for mark in item.added]

    assert reasons() == ["compiles", "compiles"], "never compiled here"
    assert reasons(everything=True) == []
    assert reasons() == ["passed", "passed"]
    assert reasons(everything=True) == []
    header.write_text("// two")
    assert reasons() == []
    assert reasons() == ["passed", "passed"]


def test_what_failed_runs_again(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "PASSED", tmp_path / "passed.json")
    kernels.PASSED.write_text(json.dumps({"a": "key", "b": "key"}))
    passed = kernels.Passed()
    failure = SimpleNamespace(nodeid="a", skipped=False, failed=True, when="call", user_properties=[("kernels", "key")])
    passed.pytest_runtest_logreport(failure)
    passed.pytest_sessionfinish()
    assert json.loads(kernels.PASSED.read_text()) == {"b": "key"}


@pytest.mark.skipif(not csrc.CXX, reason="needs g++")
def test_objects_are_made_once(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(csrc, "CACHE", tmp_path / "cache")
    runs: list[tuple] = []
    run = csrc.run
    monkeypatch.setattr(csrc, "run", lambda *command: runs.append(command) or run(*command))

    def build(folder: str, header: str, *flags: str) -> Path:
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "a.h").write_text(header)
        source = tmp_path / folder / "a.cpp"
        source.write_text('#include "a.h"\nint a() { return A; }\n')
        return csrc.built("a.o", (csrc.CXX, "-c", *flags, source), [source])

    first = build("one", "#define A 1")
    assert build("two", "#define A 1") == first, "wherever the checkout is"
    assert len(runs) == 1
    assert build("two", "#define A 2") != first
    assert build("two", "#define A 1", "-O1") != first
    assert len(runs) == 3
    with pytest.raises(AssertionError, match="error"):
        build("two", "#define B 1")
    assert build("two", "#define A 1") == first
