"""Untrusted JSON is read within bounds, whatever Python's recursion limit is."""

import json
import subprocess
import sys

import pytest

from svexport.untrusted import parse_json

DEEP = ["[" * 100_000, '{"a":' * 100_000, "[" * 100_000 + "]" * 100_000, '["\\"", ' + "[" * 201, "[ \n" * 201]


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
def test_nested_without_end(text):
    with pytest.raises(ValueError, match="nested more than 200 deep"):
        parse_json(text)


@pytest.mark.parametrize(
    "value",
    [
        1,
        "[" * 500,
        '"' * 300 + "[" * 300,
        "\\" * 301 + "{" * 300,
        {"a\\": ["[[[", "]"]},
        [[1, [2]], {"b": {"c": []}}] * 400,
    ],
)
def test_what_json_is(value):
    for indent in (None, 2):
        assert parse_json(json.dumps(value, indent=indent)) == value


@pytest.mark.parametrize("text", ["", "[", '"', '"\\', "]" * 9, "{]", "nan"])
def test_what_is_none(text):
    with pytest.raises(ValueError):  # noqa: PT011 - json's own
        parse_json(text)


def test_with_a_limit_that_somebody_raised():
    code = (
        "import sys; sys.setrecursionlimit(10**6)\nfrom svexport.untrusted import parse_json\nparse_json('[' * 10**6)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert found.returncode == 1
    assert "nested more than 200 deep" in found.stderr
