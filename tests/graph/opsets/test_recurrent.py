"""RNN, LSTM and GRU in batch-first layout at lower opsets."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.graph.opsets.nodes import check, node_model

STEPS, BATCH, SIZE, HIDDEN = 5, 2, 3, 4


@pytest.mark.parametrize("target", [13, 9])
@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize(("op_type", "gates"), [("RNN", 1), ("LSTM", 4), ("GRU", 3)])
def test_batch_first(op_type: str, gates: int, outputs: int, target: int) -> None:
    torch.manual_seed(0)
    module = getattr(torch.nn, op_type)(SIZE, HIDDEN, batch_first=True, bidirectional=True)
    x = torch.randn(BATCH, STEPS, SIZE)
    state = torch.randn(2, BATCH, HIDDEN)
    with torch.no_grad():
        y, last = module(x, (state, state) if op_type == "LSTM" else state)
    order = {"RNN": [0], "LSTM": [0, 3, 1, 2], "GRU": [1, 0, 2]}[op_type]  # ONNX has the gates in another order

    def both(name: str) -> np.ndarray:
        parts = [getattr(module, f"{name}_l0{end}").detach() for end in ("", "_reverse")]
        return np.stack([torch.cat([p.chunk(gates)[i] for i in order]).numpy() for p in parts])

    initial = state.transpose(0, 1).contiguous().numpy()
    biases = np.concatenate([both("bias_ih"), both("bias_hh")], 1)
    inputs = [x.numpy(), both("weight_ih"), both("weight_hh"), biases, None, initial]
    inputs += [initial] if op_type == "LSTM" else []
    attributes = {"linear_before_reset": 1} if op_type == "GRU" else {}
    model = node_model(
        op_type, 14, inputs, constant=(1, 2, 3), outputs=outputs, hidden_size=HIDDEN, direction="bidirectional",
        layout=1, **attributes,
    )  # fmt: skip
    last = last[0] if op_type == "LSTM" else last
    wanted = [y.reshape(BATCH, STEPS, 2, HIDDEN).numpy(), last.transpose(0, 1).numpy()]
    check(model, inputs, target, wanted[:outputs])


def test_absent_outputs_stay_absent() -> None:
    x, w, r = (np.ones(shape, np.float32) for shape in ((BATCH, STEPS, SIZE), (1, HIDDEN, SIZE), (1, HIDDEN, HIDDEN)))
    model = node_model("RNN", 14, [x, w, r], outputs=2, hidden_size=HIDDEN, layout=1)
    model.graph.node[0].output[0] = ""
    del model.graph.output[0]
    result = check(model, [x, w, r], 9, [np.full((BATCH, 1, HIDDEN), 0.999999, np.float32)], tolerance=1e-2)
    assert len(result.graph.node) == 3
