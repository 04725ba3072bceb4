"""Fifty training steps of a replaced copy give the same losses as those of the original."""

import copy
from pathlib import Path

import pytest
import torch

import svexport
from svexport.cli._model import load_file
from svexport.tracing.arguments import leaves

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS = 50


def losses(model, args, rate):
    model = copy.deepcopy(model).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    found = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = sum(t.float().square().mean() for _, t in leaves(model(*args)))
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


# Where steps are larger, DETR3D's head doubles what rounding changes every few steps, the original's too.
CASES = {
    "detr3d": ({"config": "small", "layers": 2, "queries": 20}, 1e-6, "transformer_decoder"),
    "multicamera": ({"queries": 20, "layers": 1, "cameras": 2, "image_size": (72, 120)}, 1e-5, "transformer_decoder"),
    "deformable_detr": ({"config": "small", "layers": 1}, 1e-3, "ms_deform_attn"),
    "stgcn": ({"frames": 8}, 1e-3, "einsum"),
}


@pytest.mark.parametrize("name", CASES)
def test_fifty_losses_are_the_originals(name):
    options, rate, op = CASES[name]
    model = load_file(EXAMPLES / f"{name}.py").model(**options)
    replaced = svexport.replace(model, verbose=False)
    assert f"svexport.ops.{op}" in [r.after for r in replaced.svexport_replacements]
    theirs = losses(model, model.example_inputs, rate)
    assert theirs[-1] < 0.995 * theirs[0]  # steps that change something
    assert losses(replaced, model.example_inputs, rate) == pytest.approx(theirs, rel=1e-4)
