from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from svexport.ops import add_bias_residual_layer_norm
from svexport.ops.add_bias_residual_layer_norm import OP
from tests.gpu.support import check_kernel, gpu, moved, relative_error

pytestmark = gpu

EXTRA = pytest.mark.parametrize("extra", [False, True])


def problem(*shape: int, extra: bool = False, dtype: torch.dtype = torch.float32, mean: float = 0.0) -> tuple:
    d = shape[-1]
    vectors = [torch.randn(d).to(dtype) for _ in range(3)]
    x, residual, more = ((torch.randn(shape) + mean).to(dtype) for _ in range(3))
    return x, vectors[0], residual, *vectors[1:], 1e-5, more if extra else None


@EXTRA
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "d", [2, 7, 32, 64, 100, 255, 256, 258, 264, 384, 512, 777, 1000, 1024, 1030, 1032, 1531, 4096]
)
def test_sizes(d: int, dtype: torch.dtype, extra: bool) -> None:
    # Two columns are normalized to 1 and -1 whatever they are: of the gradient only a small difference is left.
    check_kernel(
        OP, problem(37, d, extra=extra, dtype=dtype), tolerance=5e-5 if d == 2 and dtype.itemsize == 4 else None
    )


@pytest.mark.parametrize(
    "shape",
    [(1, 256), (1, 777), (1, 2048), (5003, 256), (40, 23, 64), (701, 1024), (3, 1, 2, 768), (16, 5120), (17, 8192)],
)
def test_rows(shape: tuple[int, ...]) -> None:
    check_kernel(OP, problem(*shape, extra=True))


@EXTRA
@pytest.mark.parametrize("d", [4097, 4098, 4100, 5120, 8192, 8200, 10246, 12001, 40000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_long_rows(d: int, dtype: torch.dtype, extra: bool) -> None:
    check_kernel(OP, problem(67 if d < 8192 else 3, d, extra=extra, dtype=dtype))


@pytest.fixture
def filled() -> Iterator[None]:
    """What torch.empty returns is full of NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


@EXTRA
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("rows", "d"),
    [
        *[(41, 1), (41, 3), (1, 13), (19, 249), (19, 250), (19, 253), (19, 505), (7, 509), (7, 511), (9001, 67)],
        *[(2201, 511), (1201, 1021), (7, 4090), (7, 4093), (301, 4097), (301, 5297), (170, 6002), (5, 8187), (5, 8191)],
        *[(140, 9001), (140, 16379)],
    ],
)
def test_rows_that_begin_anywhere(rows: int, d: int, dtype: torch.dtype, extra: bool, filled: None) -> None:
    """Rows of any length lie across the 16 bytes of a load: nothing of their neighbours enters, all is written."""
    check_kernel(OP, problem(rows, d, extra=extra, dtype=dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("d", [77, 511, 5297])
def test_neighbours_that_are_not_finite(d: int, dtype: torch.dtype) -> None:
    """Nor do infinities and NaN of the rows before and behind enter a row, or its gradient."""
    args = problem(9, d, dtype=dtype)
    grads = [torch.randn(9, d).to(dtype) for _ in range(2)]
    even = slice(0, None, 2)

    def gradients(args: tuple, grads: list[Tensor]) -> list[Tensor]:
        call = torch.ops.svexport.add_bias_residual_layer_norm_backward
        got = call(moved(grads, "cuda"), *moved(args, "cuda"), [True, False, True, False, False])
        return [*OP(*moved(args, "cuda")), *got]

    clean = gradients(args, grads)
    for rows in (args[0], args[2], *grads):
        rows[1::4], rows[3::4] = torch.inf, torch.nan
    for a, e in zip(gradients(args, grads), clean, strict=True):
        assert torch.equal(a[even], e[even])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("d", [63, 64, 66, 5297, 5298])
def test_tensors_that_begin_anywhere(d: int, dtype: torch.dtype) -> None:
    """Views from the second element of their memory on; parameters alone; one tensor alone."""
    args = problem(13, d, extra=True, dtype=dtype)

    def moved_on(t: Tensor) -> Tensor:
        memory = torch.full((t.numel() + 2,), torch.nan, dtype=t.dtype, device="cuda")
        memory[1:-1] = t.flatten().cuda()
        return memory[1:-1].view(t.shape)

    expected = OP.reference(*moved(args, torch.float64))
    grads = [torch.randn(13, d).to(dtype) for _ in range(2)]
    call = torch.ops.svexport.add_bias_residual_layer_norm_backward
    wanted = call(moved(grads, torch.float64), *moved(args, torch.float64), [True] * 6)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for which in [{0, 1, 2, 3, 4, 6}, {1, 3, 4}, {2}, {6}]:
        given = tuple(moved_on(t) if i in which else moved(t, "cuda") for i, t in enumerate(args))
        for a, e in zip(OP(*given), expected, strict=True):
            assert relative_error(a, e) < tolerance
        for a, e in zip(call(moved(grads, "cuda"), *given, [True] * 6), wanted, strict=True):
            assert relative_error(a, e) < 3 * tolerance


@pytest.mark.parametrize("d", [256, 1024, 2000, 5297, 20001])
def test_large_mean(d: int) -> None:
    """The variance is that of the differences from the mean: nothing cancels. Sums of integers and halves are exact."""
    x, bias, residual, weight, norm_bias, eps, _ = problem(11, d)
    x, residual, bias = (t.mul(8).round() / 8 for t in (x + 3000, residual - 500, bias))
    check_kernel(OP, (x, bias, residual, weight, norm_bias, eps, None), gradients=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_transposed_rows_are_read_as_they_lie(dtype: torch.dtype) -> None:
    """(queries, batch, channels) beside (batch, queries, channels), as in DETR; slices of rows; broadcast rows."""
    x, bias, residual, weight, norm_bias, eps, extra = problem(5, 9, 64, extra=True, dtype=dtype)
    expected = OP.reference(*moved((x, bias, residual, weight, norm_bias, eps, extra), torch.float64))
    cuda = moved((x, bias, residual, weight, norm_bias, eps, extra), "cuda")
    x, bias, residual, weight, norm_bias, eps, extra = cuda
    variants = [
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat([x, x], -1)[..., :64],
        torch.cat([x, x], -1)[..., 1:65].roll(1, -1),
        x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        torch.stack([x, x], 1)[:, 0],
    ]
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for other in variants:
        for args in ((other, bias, residual, weight, norm_bias, eps, extra), (*cuda[:2], other, *cuda[3:6], other)):
            expected = OP.reference(*moved(args, "cpu", torch.float64))
            for a, e in zip(OP(*args), expected, strict=True):
                assert a.is_contiguous()
                assert relative_error(a, e) < tolerance


def test_parameters_of_another_type() -> None:
    """Half activations with float32 parameters, whose gradients are float32."""
    x, bias, residual, weight, norm_bias, eps, extra = problem(50, 256, extra=True)
    x, residual, extra = x.half(), residual.half(), extra.half()
    args = moved((x, bias, residual, weight, norm_bias, eps, extra), "cuda")
    tensors = [t.requires_grad_() for t in args if isinstance(t, Tensor)]
    y, s = OP(*args)
    assert y.dtype == s.dtype == torch.float16
    wide = moved([t.detach() for t in tensors], "cpu", torch.float64)
    wide = [t.requires_grad_() for t in wide]
    expected = OP.reference(*wide[:5], eps, wide[5])
    grads = [torch.randn(50, 256).half() for _ in range(2)]
    got = torch.autograd.grad((y, s), tensors, [g.cuda() for g in grads])
    wanted = torch.autograd.grad(expected, wide, [g.double() for g in grads])
    for actual, e, t in zip([y, s, *got], [*expected, *wanted], [y, s, *tensors], strict=True):
        assert actual.dtype == t.dtype
        assert relative_error(actual, e) < 2e-3


def test_types_without_a_kernel_run_the_reference() -> None:
    x, bias, residual, weight, norm_bias, eps, extra = moved(problem(6, 16), "cuda")
    for actual, e in zip(
        OP(x.half(), bias, residual, weight, norm_bias, eps, extra),
        OP.reference(x.half(), bias, residual, weight, norm_bias, eps, extra),
        strict=True,
    ):
        assert torch.equal(actual, e)


def test_nan_and_infinity_stay_in_their_rows() -> None:
    args = problem(6, 300)
    args[0][1, 7], args[2][3, 299] = torch.nan, torch.inf
    check_kernel(OP, args, gradients=False)


@pytest.mark.parametrize("shape", [(900, 256), (4001, 1000), (901, 511), (401, 5297), (300, 6000)])
def test_backward_is_deterministic(shape: tuple[int, ...]) -> None:
    tensors = [t.requires_grad_() for t in moved(problem(*shape), "cuda") if isinstance(t, Tensor)]
    y, s = add_bias_residual_layer_norm(*tensors)
    runs = [torch.autograd.grad(((y * y).sum() + s.sum()), tensors, retain_graph=True) for _ in range(3)]
    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


def test_gradients_that_are_not_needed_are_left_out() -> None:
    args = moved(problem(33, 48, extra=True), "cuda")
    tensors = [t for t in args if isinstance(t, Tensor)]
    everything = torch.ops.svexport.add_bias_residual_layer_norm_backward([*OP(*args)], *args, [True] * 6)
    for mask in range(1, 64):
        needs = [bool(mask >> i & 1) for i in range(6)]
        got = torch.ops.svexport.add_bias_residual_layer_norm_backward([*OP(*args)], *args, needs)
        wanted = [g for g, need in zip(everything, needs, strict=True) if need]
        assert len(tensors) == 6
        assert all(map(torch.equal, got, wanted))
        assert len({g.data_ptr() for g in got}) == len(got) == len(wanted)


@pytest.mark.large
def test_more_than_2_to_the_31_elements() -> None:
    rows, d = (2**31 + 2**20) // 256, 256
    x = torch.empty(rows, d, dtype=torch.float16, device="cuda").normal_()
    bias, weight, norm_bias = torch.randn(3, d, device="cuda")
    y, s = OP(x, bias, x, weight, norm_bias, 1e-5, None)
    for part in (slice(0, 1000), slice(rows - 1000, rows)):
        args = moved((x[part], bias, x[part], weight, norm_bias, 1e-5, None), "cpu", torch.float64)
        for actual, e in zip((y[part], s[part]), OP.reference(*args), strict=True):
            assert relative_error(actual, e) < 2e-3
