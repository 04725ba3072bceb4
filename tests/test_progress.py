from __future__ import annotations

import torch
from torch import nn

import svexport
from svexport.progress import phase, phases_to


def test_an_export_says_what_it_is_at(tmp_path) -> None:
    said: list[str] = []
    with phases_to(said.append):
        svexport.export(nn.Linear(3, 2), torch.randn(4, 3), tmp_path / "m.onnx", target="8.6")
    phase("after that nobody listens")
    assert said[:3] == ["tracing", "writing nodes and bodies", "verifying, given inputs"]
    assert said[-1] == "checking for TensorRT 8.6"
    assert "verifying, scaled inputs" in said


def test_the_last_listener_hears() -> None:
    outer: list[str] = []
    inner: list[str] = []
    with phases_to(outer.append):
        with phases_to(inner.append):
            phase("one")
        phase("two")
    assert (outer, inner) == (["two"], ["one"])
