"""Dropout in and outside of training, and Bernoulli, at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest

from tests.graph.opsets.backend import run
from tests.graph.opsets.nodes import check, converted, node_model

X = np.linspace(0.1, 1, 20000, dtype=np.float32).reshape(100, 200)


@pytest.mark.parametrize("target", [11, 9])
@pytest.mark.parametrize("inputs", [[X], [X, np.array(0.3, np.float32)], [X, None, np.array(False)]])
def test_dropout_outside_of_training(inputs: list[np.ndarray | None], target: int) -> None:
    model = node_model("Dropout", 13, inputs, constant=(1, 2), outputs=2)
    check(model, inputs, target, [X, np.ones(X.shape, bool)])


@pytest.mark.parametrize("target", [11, 9])
@pytest.mark.parametrize("constant", [(1, 2), ()])
def test_dropout_in_training(constant: tuple[int, ...], target: int) -> None:
    inputs = [X, np.array(0.3, np.float32), np.array(True)]
    result = converted(node_model("Dropout", 13, inputs, constant=constant, outputs=2), target)
    y, kept = run(result, [x for i, x in enumerate(inputs) if i not in constant])
    assert 0.68 < kept.mean() < 0.72
    np.testing.assert_allclose(y, np.where(kept, X / np.float32(0.7), 0), rtol=1e-6)
    if not constant:  # the run may also say that it is none
        y, kept = run(result, [X, inputs[1], np.array(False)])
        assert kept.all()
        np.testing.assert_array_equal(y, X)


@pytest.mark.parametrize("target", [14, 9])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_bernoulli(dtype: type, target: int) -> None:
    x = X.astype(dtype)
    (y,) = run(converted(node_model("Bernoulli", 15, [x]), target), [x])
    assert y.dtype == dtype
    assert set(np.unique(y)) == {0, 1}
    assert abs(y.mean(0) - x.mean(0)).max() < 0.25
    assert abs(y.mean() - x.mean()) < 0.02
