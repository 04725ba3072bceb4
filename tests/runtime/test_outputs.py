"""Results of engines by name, by position and in the structure that the model returned."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport import EngineError
from svexport.graph.returned import KEY, note_returned, parse_returned
from svexport.runtime.outputs import Outputs

A, B, C = torch.zeros(1), torch.ones(2), torch.ones(3)


class Returns(nn.Module):
    example_inputs = (torch.arange(6.0).reshape(2, 3),)

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(x)


RETURNED = {
    "dict": lambda x: {"boxes": x + 1, "scores": x * 2},
    "one": lambda x: {"boxes": x + 1},
    "ordered": lambda x: OrderedDict(z=x + 1, a=x * 2),
    "nested": lambda x: {"levels": [x + 1, {"deep": (x * 2, x - 1)}], "n": 3, "last": x},
    "integers": lambda x: {0: x + 1, 1: x * 2},
}


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("name", RETURNED)
def test_a_dict_comes_back(tmp_path: Path, name: str, opset: int) -> None:
    model = Returns(RETURNED[name])
    svexport.export(model, path=tmp_path / "m.onnx", opset=opset, verify="quick")
    engine = svexport.load(tmp_path / "m.onnx", device="cpu")
    x = torch.randn(2, 3)
    wanted = torch.utils._pytree.tree_leaves({str(k): v for k, v in model(x).items() if k != "n"})
    got = dict(engine(x))
    assert list(got) == [str(k) for k in model(x) if k != "n"]
    for a, b in zip(torch.utils._pytree.tree_leaves(got), wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_what_is_no_dict_stays_as_it_was(tmp_path: Path) -> None:
    for number, make in enumerate((lambda x: x + 1, lambda x: (x + 1, x * 2))):
        svexport.export(Returns(make), path=tmp_path / "m.onnx", verify="quick")
        engine = svexport.load(tmp_path / "m.onnx", device="cpu")
        assert engine.returned is None
        result = engine(torch.ones(2, 3))
        assert isinstance(result, (Tensor, Outputs)[number])
    first, second = result
    assert torch.equal(result["output_1"], second)
    assert torch.equal(result[0], first)
    assert torch.equal(result[-1], second)


def test_names() -> None:
    outputs = Outputs([A, B, C], ["a", "x_0", "x_1"], {"a": 0, "x": [1, 2]})
    assert outputs.keys() == ["a", "x"]
    assert outputs["x"][1] is C
    assert outputs["x_1"] is C
    assert [key for key, _ in outputs.items()] == ["a", "x"]
    assert outputs.values()[0] is A
    assert outputs[1:] == (B, C)
    assert "x" in outputs
    assert "x_0" in outputs
    assert "y" not in outputs
    assert B in outputs
    assert torch.ones(2) not in outputs
    assert len(outputs) == 3
    assert isinstance(outputs, tuple)
    with pytest.raises(EngineError, match="no output is named 'y'; there are a, x, x_0, x_1"):
        outputs["y"]
    with pytest.raises(IndexError):
        outputs[3]
    for again in (copy.deepcopy(outputs), pickle.loads(pickle.dumps(outputs))):  # noqa: S301 - our own
        assert torch.equal(again["x"][0], B)
    doubled = torch.utils._pytree.tree_map(lambda tensor: 2 * tensor, outputs)
    assert isinstance(doubled, Outputs)
    assert torch.equal(doubled["x"][1], 2 * C)
    assert repr(outputs) == "Outputs(a: [1], x_0: [2], x_1: [3])"
    assert dict(Outputs([A], ["a"])) == {"a": A}


@pytest.mark.parametrize(
    "text",
    [
        "", "[]", "[0]", "null", "0", '{"a": 0', '{"a": 1}', '{"a": 0, "b": 0}', '{"a": -1}', '{"a": 0.0}',
        '{"a": true}', '{"a": null}', '{"a": "0"}', '{"a": ' * 30 + "0" + "}" * 30, '{"a": ' * 900,
        '{"a":0}' + " " * 4000,
        '{"a": NaN}', '{"a": [0, [0]]}',
    ],
)  # fmt: skip
def test_metadata_may_be_anything(text: str) -> None:
    assert parse_returned(text, 1) is None


def test_metadata_that_is_right_and_too_long() -> None:
    assert parse_returned('{"a": {"b": [1, 0]}}', 2) == {"a": {"b": [1, 0]}}
    model = onnx.ModelProto()
    note_returned(model, [("k" * 5000,)])
    assert not model.metadata_props
    note_returned(model, [("a", "0"), ("a", "2"), ("b",)])
    [entry] = model.metadata_props
    assert (entry.key, entry.value) == (KEY, '{"a":{"0":0,"2":1},"b":2}')
