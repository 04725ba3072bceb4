from __future__ import annotations

import pytest
import torch

from svexport.ops.solve_ex import OP, solve_ex
from tests.support import OPSETS, run_op


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("left", [True, False])
def test_info(opset: int, left: bool) -> None:
    regular = torch.tensor([[2.0, 1, 0], [0, 1, 1], [1, 0, 1]])
    A = torch.stack([regular, torch.ones(3, 3), regular.T])
    B = torch.arange(18.0).reshape(2, 1, 3, 3)  # broadcasts; info has the batch of A alone
    expected, info = torch.linalg.solve_ex(A, B, left=left)
    assert info.bool().tolist() == [False, True, False]
    result, failed = solve_ex(A, B, left=left)
    assert torch.equal(failed, info)
    for dynamic in (False, True):
        in_file, failed = run_op(OP, (A, B, 3, left, False), opset, dynamic=dynamic)
        assert failed.dtype == torch.int32
        assert torch.equal(failed.bool(), info.bool())
        for actual in (result, in_file):
            torch.testing.assert_close(actual[:, [0, 2]], expected[:, [0, 2]])
            assert not actual[:, 1].isfinite().all()
