"""Reads some damaged files; ``python -m tests.mutated`` reads thousands."""

from __future__ import annotations

import contextlib

import pytest
from onnx import helper

import svexport
from tests.mutated import ACTIONS
from tests.mutated.run import main


@pytest.mark.parametrize(("first", "count"), [(0, 60), (3371, 1)])
def test_some_damaged_files(first, count, capfd) -> None:
    """Each in a process of its own: none raises what is not svexport's, dies or hangs."""
    assert main(count, first) == 0, capfd.readouterr().out
    assert set(ACTIONS) == {"check", "compare", "convert", "load", "lower"}


@pytest.mark.parametrize("damage", [b"", b"\x08", b"\xff" * 40, b"PK\x03\x04" + b"\0" * 40, b"\n" * 1000])
@pytest.mark.parametrize("read", [lambda p: svexport.check(p, "8.6"), svexport.lower, svexport.load])
def test_what_is_no_model(damage, read, tmp_path) -> None:
    (tmp_path / "m.onnx").write_bytes(damage)
    with pytest.raises(svexport.SvexportError, match=r"m\.onnx"):
        read(tmp_path / "m.onnx")


def test_a_domain_that_is_not_imported_is_no_error_of_a_library() -> None:
    """Types of svexport nodes cannot be inferred then."""
    x = helper.make_tensor_value_info("x", 1, [2, 3])
    y = helper.make_tensor_value_info("y", 1, None)
    nodes = [
        helper.make_node("SvFastSigmoid", ["x"], ["s"], domain="svexport"),
        helper.make_node("SvFastSigmoid", ["s"], ["t"], domain="svexport"),
        helper.make_node("Relu", ["t"], ["y"]),
    ]
    model = helper.make_model(helper.make_graph(nodes, "g", [x], [y]), opset_imports=[helper.make_opsetid("", 13)])
    with contextlib.suppress(svexport.SvexportError):
        assert svexport.convert(model, opset=11).opset_import[0].version == 11
