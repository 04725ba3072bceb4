"""Every model of the zoo gives a file that equals torch on other values and batches, or is rightly refused."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import svexport
from tests.exporter.zoo import (
    ZOO,
    Entry,
    bev,
    blocks,
    detection,
    fields,
    geometry,
    keyed,
    lidar,
    matching,
    motion,
    segmentation,
    sequences,
)

# They add their models.
FAMILIES = bev, blocks, detection, fields, geometry, keyed, lidar, matching, motion, segmentation, sequences


def varied(entry: Entry, batch: int) -> Iterator[tuple[Tensor, ...]]:
    """Fresh inputs; their floats scaled; masks all true and all false."""
    yield entry.inputs(batch)
    for scale in entry.scales:
        yield tuple(x * scale if x.is_floating_point() else x for x in entry.inputs(batch))
    if any(x.dtype == torch.bool for x in entry.inputs(batch)):
        for mask in (torch.ones_like, torch.zeros_like):
            yield tuple(mask(x) if x.dtype == torch.bool else x for x in entry.inputs(batch))


def flat(outputs: Tensor | Mapping[str, Tensor] | tuple[Tensor, ...]) -> list[Tensor]:
    if isinstance(outputs, Tensor):
        return [outputs]
    return list(outputs.values() if isinstance(outputs, Mapping) else outputs)


def equal(model: nn.Module, engine: svexport.Engine, args: tuple[Tensor, ...]) -> None:
    expected = [
        x.detach() for x in flat(model(*(x.clone() for x in args)))
    ]  # with gradients: no fused layers of torch's
    actual = engine(*args)
    for i, (a, e) in enumerate(
        zip(flat(actual if isinstance(actual, Tensor) else tuple(actual)), expected, strict=True)
    ):
        scale = e[e.isfinite()].abs().max().item() if e.is_floating_point() and e.isfinite().any() else 0.0
        torch.testing.assert_close(
            a, e, rtol=1e-3, atol=1e-4 * max(scale, 1e-3), equal_nan=True, msg=lambda m, i=i: f"output {i}: {m}"
        )


@pytest.mark.exhaustive
@pytest.mark.parametrize(("name", "opset"), [(name, (11, 18)[i % 2]) for i, name in enumerate(ZOO)])
def test_equals_torch(name: str, opset: int, tmp_path: Path) -> None:
    entry = ZOO[name]
    model = entry.build().eval()
    args = entry.inputs(2)
    shapes = {"dynamic_shapes": "auto"} if entry.dynamic else {}
    if entry.refused:
        with pytest.raises(svexport.SvexportError, match=entry.refused):
            svexport.export(model, args, tmp_path / "model.onnx", opset=opset, **shapes)
        return
    report = svexport.export(model, args, tmp_path / "model.onnx", opset=opset, **shapes)
    assert report.verified
    engine = svexport.load(report.path)
    for batch in (2, 1, 3) if entry.dynamic else (2,):
        for given in varied(entry, batch):
            equal(model, engine, given)


def test_files_are_compared_by_their_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.exporter.zoo import __main__ as command

    monkeypatch.setattr(command, "models", lambda: {"tiny": lambda: (nn.Linear(3, 2), torch.rand(1, 3))})
    file = tmp_path / "hashes.json"
    assert command.main([str(file)]) == 0
    known = json.loads(file.read_text())
    assert list(known) == [f"tiny {opset}" for opset in command.OPSETS]
    monkeypatch.setattr(command, "models", lambda: {"tiny": lambda: (nn.Linear(3, 2, bias=False), torch.rand(1, 3))})
    assert command.main([str(file)]) == 1
    assert capsys.readouterr().out.count("tiny 17: was " + known["tiny 17"]) == 1
