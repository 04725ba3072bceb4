"""Properties of every op that has a CUDA kernel, tested on the samples of its definition."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from svexport.ops import _cuda
from svexport.ops._op import OPS, Op, as_tuple
from tests.gpu.support import check_kernel, gpu, leaves, moved, relative_error
from tests.ops.test_every_op import cases, flat, samples

pytestmark = gpu

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


KERNELS = {source.stem for source in _cuda.CSRC.glob("torch/*.cpp")} & set(OPS)
every_op = pytest.mark.parametrize("op", [OPS[name] for name in sorted(KERNELS)], ids=sorted(KERNELS))
every_sample = pytest.mark.parametrize(("op", "index"), [case for case in cases() if case.values[0].name in KERNELS])


@pytest.fixture(autouse=True)
def loaded() -> None:
    assert _cuda.load()


def on_gpu(op: Op, index: int, seed: int, dtype: torch.dtype = torch.float32) -> tuple:
    return moved(samples(op, dtype, seed)[index], "cuda")


def test_every_source_registers_its_op() -> None:
    assert _cuda.kernels() >= KERNELS
    assert {name.removesuffix("_backward") for name in _cuda.kernels()} <= set(OPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_sample
def test_kernel_is_the_reference(op: Op, index: int, dtype: torch.dtype) -> None:
    check_kernel(op, samples(op, dtype, 1)[index])


@every_sample
def test_float64_runs_the_reference(op: Op, index: int) -> None:
    check_kernel(op, samples(op, torch.float64, 2)[index], tolerance=1e-10)


@every_sample
def test_outputs_are_fully_written(op: Op, index: int) -> None:
    """New memory is filled with NaN in torch's deterministic mode, gradients included."""
    torch.use_deterministic_algorithms(True)
    try:
        args, inputs = leaves(on_gpu(op, index, 3))
        outputs = as_tuple(op(*args))
        with_grad = [o for o in outputs if o.requires_grad]
        gradients = (
            torch.autograd.grad(with_grad, inputs, [torch.ones_like(o) for o in with_grad], allow_unused=True)
            if with_grad
            else []
        )
    finally:
        torch.use_deterministic_algorithms(False)
    for tensor in [*outputs, *(g for g in gradients if g is not None)]:
        assert not tensor.isnan().any()


@every_sample
def test_opcheck(op: Op, index: int) -> None:
    torch.library.opcheck(op.torch_op, leaves(on_gpu(op, index, 4))[0])


@every_sample
def test_forward_is_deterministic(op: Op, index: int) -> None:
    args = on_gpu(op, index, 5)
    for first, second in zip(as_tuple(op(*args)), as_tuple(op(*args)), strict=True):
        assert torch.equal(first, second)


@every_sample
def test_backward_is_deterministic_when_asked(op: Op, index: int) -> None:
    args, inputs = leaves(on_gpu(op, index, 6))
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            outputs = [o for o in as_tuple(op(*args)) if o.requires_grad]
            if not outputs:
                return
            runs.append(torch.autograd.grad(outputs, inputs, [torch.ones_like(o) for o in outputs], allow_unused=True))
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*runs, strict=True):
        assert first is second is None or torch.equal(first, second)


@every_sample
def test_strides_and_channels_last(op: Op, index: int) -> None:
    args = on_gpu(op, index, 7)

    def strided(value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(strided, value))
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return torch.stack([value, torch.full_like(value, 3)], dim=-1)[..., 0]

    def unaligned(value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(unaligned, value))
        if not isinstance(value, Tensor):
            return value
        return torch.cat([value.new_zeros(1), value.flatten()])[1:].view(value.shape)

    def last(value):
        if isinstance(value, (list, tuple)):
            return type(value)(map(last, value))
        if not isinstance(value, Tensor) or value.dim() not in (4, 5):
            return value
        return value.to(memory_format=torch.channels_last if value.dim() == 4 else torch.channels_last_3d)

    expected = as_tuple(op(*args))
    for change in (strided, unaligned, last):
        for actual, e in zip(as_tuple(op(*map(change, args))), expected, strict=True):
            torch.testing.assert_close(actual, e, rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.large
@every_op
def test_compiles_in_one_graph(op: Op) -> None:
    torch.compiler.reset()
    args, inputs = leaves(on_gpu(op, 0, 8))

    def loss(*a) -> Tensor:
        return sum(o.float().square().sum() for o in as_tuple(op(*a)))

    expected = loss(*args)
    actual = torch.compile(loss, fullgraph=True)(*args)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    if expected.requires_grad:
        wanted = torch.autograd.grad(expected, inputs, allow_unused=True)
        for a, e in zip(torch.autograd.grad(actual, inputs, allow_unused=True), wanted, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-4, atol=1e-4)


@every_sample
def test_cuda_graph(op: Op, index: int) -> None:
    """Captured once, replayed on other values."""
    first, second = on_gpu(op, index, 9), on_gpu(op, index, 10)
    expected = as_tuple(op(*second))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        op(*first)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = as_tuple(op(*first))
    for target, source in zip(flat(first), flat(second), strict=True):
        target.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    for actual, e in zip(outputs, expected, strict=True):
        torch.testing.assert_close(actual, e, rtol=0, atol=0, equal_nan=True)


@pytest.mark.large
@every_op
def test_streams_of_two_threads(op: Op) -> None:
    cases = [on_gpu(op, 0, seed) for seed in (11, 12)]
    expected = [as_tuple(op(*args)) for args in cases]
    torch.cuda.synchronize()
    worst = [0.0, 0.0]

    def work(i: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(20):
                for actual, e in zip(as_tuple(op(*cases[i])), expected[i], strict=True):
                    if actual.is_floating_point():
                        worst[i] = max(worst[i], relative_error(actual, e))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(worst) == 0


@every_op
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA GPUs")
def test_other_device(op: Op) -> None:
    args = samples(op, torch.float32, 13)[0]
    for actual, e in zip(as_tuple(op(*moved(args, "cuda:1"))), as_tuple(op(*moved(args, "cuda:0"))), strict=True):
        assert actual.device == torch.device("cuda:1")
        torch.testing.assert_close(actual.cpu(), e.cpu(), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@every_op
def test_autocast(op: Op, dtype: torch.dtype) -> None:
    args = on_gpu(op, 0, 14)
    with torch.autocast("cuda", dtype=dtype):
        outputs = as_tuple(op(*args))
    for actual, e in zip(outputs, as_tuple(op(*args)), strict=True):
        if e.is_floating_point():
            assert relative_error(actual, e) < 3e-2
