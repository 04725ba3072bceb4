from __future__ import annotations

import pytest
import torch

from svexport.exporter.proof import Proof

lost = getattr(torch, "AcceleratorError", None)


def fails(error: Exception):
    def run(*_: object) -> object:
        raise error

    return run


@pytest.mark.skipif(lost is None, reason="this torch raises RuntimeError, as for all else")
def test_an_error_of_a_kernel_ends_a_proof() -> None:
    """Nothing on the GPU works after it: taken for a difference, whatever comes next would be blamed."""
    error, x = lost("CUDA error: an illegal memory access was encountered"), torch.ones(2)
    with pytest.raises(lost, match="illegal memory"):
        Proof().add(x, fails(error))
    with pytest.raises(lost, match="illegal memory"):
        Proof().add_other(lambda: x, fails(error))
    with pytest.raises(lost, match="illegal memory"):
        Proof().add_gradients(lambda t: t, fails(error), (x,))


def test_any_other_error_is_a_fault() -> None:
    x = torch.ones(2)
    for error in (torch.OutOfMemoryError("CUDA out of memory"), RuntimeError("no kernel"), ValueError("odd")):
        proofs = [Proof() for _ in range(3)]
        assert proofs[0].add(x, fails(error)) is x
        proofs[1].add_other(lambda: x, fails(error))
        proofs[2].add_gradients(lambda t: t, fails(error), (x,))
        assert all(str(error) in proof.fault for proof in proofs)
