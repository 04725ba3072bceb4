"""The zoo and other people's architectures in NVIDIA's parser: what ``svexport check`` says, and the results."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import svexport
from svexport.errors import SvexportError
from svexport.tracing.arguments import leaves

pytest.importorskip("transformers")  # or the architectures are skipped, half imported

from tests.exporter.test_architectures import ARCHITECTURES, like_trained
from tests.exporter.zoo import ZOO
from tests.exporter.zoo import test_zoo as _models  # noqa: F401 - which imports them all
from tests.tensorrt.parser.parser import Parser, outcome
from tests.tensorrt.parser.test_files import known

OPSETS = (11, 13, 17, 20)

INEXACT = {"int64_range", "rounded_quotient"}
"""Warnings of numbers that the layers do not hold, or compute in another way close to a border."""


def agreed(parser: Parser, library: Path, path: Path, model: nn.Module, args: object, opset: int) -> None:
    """A file for the parser's version is right where check has no error against it, and refused where it has one."""
    known(parser, opset)
    try:
        report = svexport.export(model, args, path, opset=opset, target=str(parser), verify=False)
    except SvexportError as error:
        pytest.skip(f"not exported for TensorRT {parser}: {error}")
    given = _tensors(args)  # caches among them grow in the run
    with torch.no_grad():
        result = model(**args) if isinstance(args, dict) else model(*_positional(args))
    expected = _tensors(result)
    (parsed,) = parser.read([path], library)
    found, why = outcome(parsed, dict(zip(report.inputs, given, strict=False)), expected)
    assert report.check is not None
    if found == "other" and INEXACT & {finding.rule for finding in report.check.findings}:
        return
    assert found in ("right", "refused"), why
    assert report.check.ok == (found == "right"), (why, [finding.came for finding in report.check.errors])


def _tensors(value: object) -> list[torch.Tensor]:
    """Those in caches, too."""
    return [leaf for _, leaf in leaves(value) if isinstance(leaf, torch.Tensor)]


def _positional(args: object) -> tuple:
    return args if isinstance(args, tuple) else (args,)


@pytest.mark.parametrize(("name", "opset"), [(name, OPSETS[i % 4]) for i, name in enumerate(ZOO)])
def test_zoo(parser: Parser, plugin_library: Path, tmp_path: Path, name: str, opset: int) -> None:
    model, args = ZOO[name].build().eval(), ZOO[name].inputs(2)
    agreed(parser, plugin_library, tmp_path / "m.onnx", model, args, opset)


@pytest.mark.large
@pytest.mark.parametrize(("name", "opset"), [(name, OPSETS[i % 4]) for i, name in enumerate(ARCHITECTURES)])
def test_architectures(parser: Parser, plugin_library: Path, tmp_path: Path, name: str, opset: int) -> None:
    torch.manual_seed(0)
    model, args = ARCHITECTURES[name][0]()
    like_trained(model)
    agreed(parser, plugin_library, tmp_path / "m.onnx", model.eval(), args, opset)


class Picked(nn.Module):
    """Rows that values pick, of which there may be none: sizes are written for that, too."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.TransformerDecoderLayer(6, 2, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rows = x[x[:, 0] > 0]
        return self.decoder(rows[None], x[None]), torch.einsum("nc,mc->mn", rows, x)


@pytest.mark.parametrize("opset", [11, 17])
def test_rows_that_values_pick(parser: Parser, plugin_library: Path, tmp_path: Path, opset: int) -> None:
    agreed(parser, plugin_library, tmp_path / "m.onnx", Picked().eval(), (torch.randn(7, 6),), opset)
