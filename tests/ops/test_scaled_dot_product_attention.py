"""Tests only the op; tests/exporter/test_attention.py has unedited models and the layers of torch.nn."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from svexport.ops.scaled_dot_product_attention import OP, scaled_dot_product_attention
from tests.support import OPSETS, op_model, run_op


def explicit(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor, added: Tensor, scale: float) -> Tensor:
    """One query of one head at a time; a query that may attend to nothing gives 0."""
    output = v.new_zeros(*q.shape[:-1], v.shape[-1])
    groups = q.shape[1] // k.shape[1]
    for n, head, i in torch.cartesian_prod(*map(torch.arange, q.shape[:3])).tolist():
        keys, values = k[n, head // groups], v[n, head // groups]
        chosen = allowed[n, head, i].nonzero().flatten().tolist()
        scores = [math.exp(float(q[n, head, i] @ keys[j]) * scale + float(added[n, head, i, j])) for j in chosen]
        for j, score in zip(chosen, scores, strict=True):
            output[n, head, i] += score / math.fsum(scores) * values[j]
    return output


CASES = ("plain", "causal", "allowed", "added", "for all heads", "groups", "scale")


def problem(case: str) -> tuple[tuple, Tensor]:
    """Arguments of the operator in float64, and what it has to give."""
    torch.manual_seed(CASES.index(case))
    n, heads, queries, keys, size = 2, 4, 3, 5, 6
    kv = 2 if case == "groups" else heads
    q, k, v = (
        torch.randn(n, h, r, c).double() for h, r, c in ((heads, queries, size), (kv, keys, size), (kv, keys, 7))
    )
    full = (n, heads, queries, keys)
    allowed, added = torch.ones(full, dtype=torch.bool), torch.zeros(full, dtype=torch.float64)
    mask, scale = None, 1 / math.sqrt(size)
    if case == "causal":
        allowed = torch.ones(queries, keys).tril().bool().expand(full)
    elif case in ("allowed", "groups"):
        mask = allowed = torch.rand(full) < 0.6
        allowed[0, 1, 2] = False
    elif case == "added":
        mask = added = torch.randn(full).double()
    elif case == "for all heads":
        mask = torch.rand(queries, keys) < 0.6
        mask[1] = False
        allowed = mask.expand(full)
    elif case == "scale":
        scale = -0.4
    args = (q, k, v, mask, case == "causal", (scale,) if case == "scale" else (), case == "groups")
    return args, explicit(q, k, v, allowed, added, scale)


def single(args: tuple, dtype: torch.dtype = torch.float32) -> tuple:
    return tuple(a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


@pytest.mark.parametrize("case", CASES)
def test_equals_the_definition(case: str) -> None:
    args, expected = problem(case)
    torch.testing.assert_close(OP.reference(*args), expected)
    torch.testing.assert_close(OP(*args), expected)
    q, k, v, mask, is_causal, scale, gqa = args
    actual = scaled_dot_product_attention(
        q, k, v, mask, is_causal=is_causal, scale=scale[0] if scale else None, enable_gqa=gqa
    )
    torch.testing.assert_close(actual, expected)
    for opset in OPSETS:
        for dynamic in (False, True):
            (actual,) = run_op(OP, single(args), opset, dynamic=dynamic)
            torch.testing.assert_close(actual.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("opset", [9, 17, 20])
def test_lowest_number_as_a_mask(opset: int) -> None:
    """Masks of the smallest number instead of infinity, as transformers has them, keep what may be seen apart."""
    for dtype in (torch.float32, torch.float16):
        args, _ = problem("allowed")
        q, k, v, allowed, *rest = single(args, dtype)
        mask = torch.zeros(allowed.shape, dtype=dtype).masked_fill(~allowed, torch.finfo(dtype).min)
        seen = allowed.any(-1)
        (actual,) = run_op(OP, (q, k, v, mask, *rest), opset)
        expected = OP(q.double(), k.double(), v.double(), allowed, *rest)
        torch.testing.assert_close(actual.double()[seen], expected[seen], rtol=1e-2, atol=5e-3)
        assert actual[seen].isfinite().all()


@pytest.mark.parametrize("opset", [9, 17, 20])
@pytest.mark.parametrize("dtypes", [(torch.float16, torch.float32), (torch.float64, torch.float32)], ids=str)
def test_masks_of_another_type(dtypes: tuple[torch.dtype, torch.dtype], opset: int) -> None:
    """As ``nn.Transformer.generate_square_subsequent_mask`` makes them, in float32: numbers that half does not have."""
    of_query, of_mask = dtypes
    args, _ = problem("allowed")
    q, k, v, allowed, *rest = single(args, of_query)
    for number in (-torch.inf, -7e4, 0.3):
        mask = torch.zeros(allowed.shape, dtype=of_mask).masked_fill(~allowed, number)
        (actual,) = run_op(OP, (q, k, v, mask, *rest), opset)
        expected = OP(q.double(), k.double(), v.double(), mask.double(), *rest)
        assert actual.dtype == of_query
        torch.testing.assert_close(actual.double(), expected, rtol=1e-2, atol=1e-2)


def test_masks_that_are_constant_cost_nothing_at_run_time() -> None:
    """Without a mask there are two products, a softmax and the scaling; causal adds one addition of a constant."""
    for case, kinds in (
        ("plain", ["Transpose", "Mul", "MatMul", "Softmax", "MatMul"]),
        ("causal", ["Transpose", "Mul", "MatMul", "Add", "Softmax", "MatMul"]),
    ):
        model = op_model(OP, single(problem(case)[0]), 17)
        constant = {i.name for i in model.graph.initializer}
        kept = [n.op_type for n in model.graph.node if not set(n.input) <= constant]
        assert kept == kinds


def test_gradients_where_nothing_may_be_seen() -> None:
    args, _ = problem("for all heads")
    leaves = [a.requires_grad_() for a in args[:3]]
    assert torch.autograd.gradcheck(lambda *t: OP.reference(*t, *args[3:]), leaves)
    assert torch.autograd.gradcheck(lambda *t: OP(*t, *args[3:]), leaves)
