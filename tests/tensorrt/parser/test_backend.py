"""Compares the parser with what ``svexport check`` says on all backend tests of ONNX."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

import onnx
import pytest

import svexport
from svexport.errors import SvexportError
from tests.tensorrt.parser.backend import Case, cases, with_constants
from tests.tensorrt.parser.parser import Parsed, Parser, outcome

# What check calls an error though the parser takes it rightly, by rule, and why.
REASONS = {
    "known_depth": "a rule of the builder: IOneHotLayer wants a depth that is constant in building",
    "equation": "a rule of the builder: IEinsumLayer knows no diagonal",
    "computed_scales": "right where sizes times scales are whole numbers, which a graph input does not say",
    "upper": "right of what the other half is zero of, or of k that makes no difference",
    "reduction": "right where no two updates meet, and the data does not win",
    "constant_axes": "right where the axes, which are not read, are all of them",
    "opset": "right where axes, which are not read, are all of them, or where the largest of all does as well",
    "renamed_input": "right in sources of 8.6 that are younger than its release",
    "type": "taken by the parser at this version, refused by documentation and layer",
}


def verdict(model: onnx.ModelProto, parser: Parser) -> tuple[str, set[str]]:
    try:
        report = svexport.check(model, str(parser))
    except SvexportError:
        return "error", {"svexport"}
    return ("ok" if report.ok else "error"), {finding.rule for finding in report.errors}


def matrix(parser: Parser, tests: list[Case], folder: Path) -> tuple[Counter, dict[str, list[str]]]:
    """Files by what the parser makes of them and what check says, and those by name that should not be."""
    files = []
    for test in tests:
        files.append(folder / f"{test.name}.onnx")
        onnx.save(test.model, files[-1])
    table: Counter[tuple[str, str]] = Counter()
    wrong: dict[str, list[str]] = {"missed": [], "false": [], "unexplained": []}
    for test, parsed in zip(tests, parser.read(files), strict=True):
        found, why = outcome(parsed, test.feeds, test.expected)
        said, rules = verdict(test.model, parser)
        if (found, said) == ("right", "error") and (other := test.on_other_numbers()):
            found, why = outcome(parsed, other.feeds, other.expected)
        table[found, said] += 1
        if found in ("other", "refused") and said == "ok":
            wrong["missed"].append(f"{test.name}: {found}: {why}")
        if found == "right" and said == "error":
            wrong["false"].append(f"{test.name}: {', '.join(sorted(rules))}")
            if rules - set(REASONS):
                wrong["unexplained"].append(wrong["false"][-1])
    return table, wrong


@pytest.fixture(scope="module")
def tests() -> list[Case]:
    found = list(cases())
    assert len(found) > 1000
    return found


def note(parser: Parser, name: str, table: Counter, wrong: dict[str, list[str]]) -> None:
    """Left where SVEXPORT_MATRIX says, for the table in docs/tensorrt.md."""
    if folder := os.environ.get("SVEXPORT_MATRIX"):
        counts = {f"{found}, {said}": count for (found, said), count in sorted(table.items())}
        Path(folder, f"{name}-{parser}.json").write_text(json.dumps({"counts": counts, **wrong}, indent=1))


def test_check_agrees_with_the_parser(parser: Parser, tests: list[Case], tmp_path: Path) -> None:
    """Nothing that the parser refuses, or takes for something else, passes; little that it takes rightly does not."""
    table, wrong = matrix(parser, tests, tmp_path)
    note(parser, "backend", table, wrong)
    assert not wrong["missed"]
    assert not wrong["unexplained"]
    assert len(wrong["false"]) <= 0.01 * len(tests)
    assert table["right", "ok"] > 0.3 * len(tests)


def test_check_agrees_where_inputs_are_constants(parser: Parser, tests: list[Case], tmp_path: Path) -> None:
    """The same with every input but the first as an initializer, which the parser reads in other ways."""
    table, wrong = matrix(parser, [made for test in tests if (made := with_constants(test))], tmp_path)
    note(parser, "constants", table, wrong)
    assert not wrong["missed"]
    assert not wrong["unexplained"]


def test_functions_of_parsed() -> None:
    """A network that the host and not the parser refuses is refused; what is not interpreted is taken."""
    record = {"inputs": [], "outputs": [{"id": 0, "type": 0}], "network": []}
    assert outcome(Parsed(True, [], ["HOST: no"], [], record), {}, [])[0] == "refused"
    assert outcome(Parsed(None, [], [], [], record), {}, [])[0] == "refused"
    record["network"] = [{"kind": "Unknown", "in": [], "out": [{"id": 0, "type": 0}]}]
    assert outcome(Parsed(True, [], [], [], record), {}, []) == ("taken", "Unknown")
