"""Losses at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.graph.opsets.nodes import check, node_model

X = np.random.default_rng(0).standard_normal((3, 5, 2, 4)).astype(np.float32)
TARGET = np.random.default_rng(1).integers(0, 5, (3, 2, 4))
TARGET[0, 0, :2] = 2
WEIGHT = np.linspace(0.5, 2, 5, dtype=np.float32)


@pytest.mark.parametrize("target", [11, 9])
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("ignored", [None, 2, -1])
@pytest.mark.parametrize("op_type", ["NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss"])
def test_losses(op_type: str, ignored: int | None, weighted: bool, reduction: str, target: int) -> None:
    labels = TARGET.copy()
    if ignored == -1:
        labels[1] = -1
    inputs = [X, labels, *([WEIGHT] if weighted else [])]
    t = [torch.from_numpy(x) for x in inputs]
    function = F.nll_loss if op_type.startswith("Negative") else F.cross_entropy
    options = {} if ignored is None else {"ignore_index": ignored}
    wanted = function(t[0], t[1], t[2] if weighted else None, reduction=reduction, **options).numpy()
    outputs = [np.asarray(wanted)]
    if op_type.startswith("Softmax"):
        outputs.append(F.log_softmax(t[0], 1).numpy())
    model = node_model(op_type, 13, inputs, outputs=len(outputs), reduction=reduction, **options)
    check(model, inputs, target, outputs)
