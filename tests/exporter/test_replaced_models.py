"""Models of other packages give the same results with their functions and modules replaced."""

from __future__ import annotations

import copy
import functools
import pickle
import sys
from collections import Counter
from types import FrameType
from typing import Any
from unittest import mock

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from benchmarks._pypi import MODELS, like_trained
from svexport.tracing.arguments import leaves

pytestmark = pytest.mark.exhaustive


@functools.cache
def pair(name: str) -> tuple[nn.Module, nn.Module, Any]:
    """A small model, its copy, and inputs of both."""
    pytest.importorskip(MODELS[name].package)
    torch.manual_seed(0)
    model, inputs = MODELS[name].build(True)
    like_trained(model)
    return model.eval(), svexport.replace(model.eval(), inputs, choose="all", verbose=False), inputs


@pytest.fixture(params=MODELS)
def built(request: pytest.FixtureRequest) -> tuple[nn.Module, nn.Module, Any]:
    return pair(request.param)


def floats(outputs: Any) -> list[Tensor]:
    return [t for _, t in leaves(outputs) if isinstance(t, Tensor) and t.is_floating_point()]


def others(inputs: Any, batch: int) -> list[Tensor]:
    """Inputs that the copy was not made with."""
    return [torch.rand(batch, *t.shape[1:]) if t.is_floating_point() else t.expand(batch, *t.shape[1:]) for t in inputs]


def backward(model: nn.Module, inputs: list[Tensor]) -> tuple[list[Tensor], list[Tensor | None]]:
    """Outputs, and gradients of parameters and inputs."""
    model.zero_grad()
    given = [t.clone().requires_grad_(t.is_floating_point()) for t in inputs]
    torch.manual_seed(1)  # of dropout
    outputs = [t for t in floats(model(*given)) if t.requires_grad]
    torch.stack([(t * torch.randn_like(t)).sum() for t in outputs]).sum().backward()
    return outputs, [p.grad for p in model.parameters()] + [t.grad for t in given]


def assert_near(actual: list[Any], expected: list[Any], rtol: float, whole: float) -> None:
    """Each to ``rtol`` of its norm, or of ``whole``, the norm of all: many gradients are zero but for rounding."""
    assert [t is None for t in actual] == [t is None for t in expected]
    for a, e in zip(actual, expected, strict=True):
        if e is not None:
            assert a.shape == e.shape
            assert (a - e).norm().item() <= rtol * max(e.norm().item(), whole)


@pytest.mark.parametrize("training", [False, True])
def test_outputs_and_gradients(built: Any, training: bool) -> None:
    model, replaced, inputs = built
    given, found = [t.double() if t.is_floating_point() else t for t in others(inputs, 2)], []
    for m in (model, replaced):
        found.append(backward(copy.deepcopy(m).double().train(training), given))  # a copy: norms keep statistics
    (expected, gradients), (actual, ours) = found
    assert_near(actual, expected, 1e-6, 0)
    total = torch.cat([g.flatten() for g in gradients if g is not None]).norm()
    assert total > 0
    assert_near(ours, gradients, 1e-6, 1e-2 * total.item())


def test_copies(built: Any) -> None:
    model, replaced, inputs = built
    assert list(replaced.state_dict()) == list(model.state_dict())
    copies = [copy.deepcopy(replaced)]
    try:
        pickle.dumps(model)
    except (AttributeError, pickle.PicklingError):
        pass
    else:
        copies.append(pickle.loads(pickle.dumps(replaced)))  # noqa: S301 - written here
    given = others(inputs, 1)
    with torch.no_grad():
        expected = floats(replaced(*given))
        for other in copies:
            torch.testing.assert_close(floats(other(*given)), expected, rtol=0, atol=0)


SLOW = {"hf_deformable_detr", "hf_mask2former", "hf_oneformer", "hf_rt_detr_v2"}
"""torch.compile takes a minute for each, of what it compiles in the others."""


@pytest.mark.parametrize("name", [name for name in MODELS if name not in SLOW])
def test_compiled(name: str) -> None:
    model, replaced, inputs = pair(name)
    given = others(inputs, 1)
    with torch.no_grad():
        try:
            torch.compile(model, fullgraph=True, backend="aot_eager")(*given)
        except torch._dynamo.exc.TorchDynamoException as error:
            pytest.skip(f"the original does not compile as one graph: {str(error).partition(chr(10))[0]}")
        found = floats(torch.compile(replaced, fullgraph=True, backend="aot_eager")(*given))
        torch.compiler.reset()
        assert_near(found, floats(model(*given)), 5e-6, 0)


def calls(function: Any) -> Counter[str]:
    """What a call calls, by name: what it costs the CPU beside the kernels, whatever else the machine does."""
    found: Counter[str] = Counter()

    def note(frame: FrameType, event: str, value: Any) -> None:
        if event == "call":
            found[f"{frame.f_code.co_filename} {frame.f_code.co_name}"] += 1
        elif event == "c_call":
            found[getattr(value, "__qualname__", str(value))] += 1

    with torch.no_grad():
        function()
        sys.setprofile(note)
        try:
            function()
        finally:
            sys.setprofile(None)
    return found


@pytest.mark.parametrize("name", ["kornia_warps", "monai_voxelmorph", "hf_rt_detr_v2"])
def test_calls_are_those_of_the_op_called_by_hand(name: str) -> None:
    model, _, inputs = pair(name)
    replaced = svexport.replace(model, inputs, only="torch.nn.functional.grid_sample", choose="all", verbose=False)
    given = others(inputs, 1)
    with mock.patch.object(F, "grid_sample", svexport.ops.grid_sample):
        expected = calls(lambda: model(*given))
    assert expected.total() > 100
    assert calls(lambda: replaced(*given)) == expected


def test_the_file_is_no_larger(built: Any, tmp_path) -> None:
    *models, inputs = built
    sizes = []
    for model in models:
        report = svexport.export(model, inputs, tmp_path / "m.onnx")
        assert report.verified
        file = onnx.load(tmp_path / "m.onnx")
        sizes.append(len(file.graph.node))
    assert sizes[1] <= sizes[0]
