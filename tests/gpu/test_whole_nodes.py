"""Compares attention with a hand-written backward, and examples as one autograd node, in float32 with torch."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.cli._model import load_file
from svexport.ops._gradients import Attended
from svexport.tracing.arguments import leaves, rebuild
from tests.gpu.support import gpu, relative_error

pytestmark = gpu

EXAMPLES = Path(__file__).parents[2] / "examples"
WHOLES = {
    "detr3d": "a decoder of the DETR3D kind",
    "deformable_detr": "an encoder of the Deformable DETR kind",
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(1, 8, 900, 32), (2, 3, 17, 8), (1, 2, 5, 3)])
def test_attention(shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    n, heads, rows, width = shape
    q, k, v = (torch.randn(n, rows, heads, width, device="cuda", dtype=dtype).transpose(1, 2) for _ in range(3))
    attended = Attended.of(q, k, v)
    given = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = F.scaled_dot_product_attention(*given)
    rate = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, given, rate)
    assert relative_error(attended.output, expected) < 1e-5
    for _ in range(2):
        for actual, theirs in zip(attended.backward(rate), gradients, strict=True):
            assert relative_error(actual, theirs) < 1e-5
        if not attended.kept:  # autograd's graph is gone
            break


def gradients_of(model: nn.Module, inputs: Any) -> list[Tensor]:
    outputs = [t for _, t in leaves(model(*inputs))]
    total = torch.stack([t.square().mean() for t in outputs]).sum()
    return list(torch.autograd.grad(total, list(model.parameters()), materialize_grads=True))


@pytest.mark.parametrize("name", WHOLES)
def test_gradients_of_examples(name: str) -> None:
    """No further from those in float64 than the original's, but for a factor that rounding makes."""
    model = load_file(EXAMPLES / f"{name}.py").model("small").cuda()
    inputs = rebuild(model.example_inputs, lambda t: t.cuda())
    replaced = svexport.replace(model, inputs, choose="all", skip="add_bias_residual_layer_norm", verbose=False)
    assert WHOLES[name] in [r.before for r in replaced.svexport_replacements]
    precise = rebuild(inputs, lambda t: t.double() if t.is_floating_point() else t)
    expected = gradients_of(copy.deepcopy(model).double(), precise)
    total = torch.cat([t.flatten() for t in expected]).norm()
    off = [
        torch.cat([(a - e).flatten() for a, e in zip(gradients_of(m, inputs), expected, strict=True)]).norm() / total
        for m in (model, replaced)
    ]
    assert off[1] < max(3 * off[0], 1e-5)
