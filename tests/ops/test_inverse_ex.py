from __future__ import annotations

import pytest
import torch

from svexport.ops.inverse_ex import OP, inverse_ex
from tests.support import OPSETS, run_op


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_info(opset: int, dtype: torch.dtype) -> None:
    regular = torch.tensor([[2.0, 1, 0], [0, 1, 1], [1, 0, 1]])
    A = torch.stack([regular, torch.ones(3, 3), regular.T, torch.zeros(3, 3)]).reshape(2, 2, 3, 3)
    expected, info = torch.linalg.inv_ex(A)
    assert info.bool().tolist() == [[False, True], [False, True]]
    inverse, failed = inverse_ex(A.to(dtype))
    assert torch.equal(failed, info)
    for dynamic in (False, True):
        in_file, failed = run_op(OP, (A.to(dtype), 3), opset, dynamic=dynamic)
        assert failed.dtype == torch.int32
        assert torch.equal(failed.bool(), info.bool())
        for actual in (inverse, in_file):
            torch.testing.assert_close(actual[:, 0], expected[:, 0].to(dtype))
            assert not actual[:, 1].isfinite().all()


def test_overflow_of_half_is_no_failure() -> None:
    """The inverse exists in float32; it is infinite only where float16 ends."""
    A = torch.diag(torch.tensor([1e-6, 1.0])).half()
    for inverse, info in (inverse_ex(A), run_op(OP, (A, 2), 11)):
        assert inverse[0, 0].isinf()
        assert info == 0
