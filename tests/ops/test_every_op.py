"""Properties of every op, tested on the samples of its definition; nothing here names an op."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import svexport
from svexport.graph.nodes import svexport_nodes
from svexport.ops._op import OPS, Op, _tensors, _with_tensors, as_tuple
from svexport.symbolic import SYMBOLICS
from tests.support import OPSETS, op_model, run_op

ROOT = Path(svexport.__file__).parent


def samples(op: Op, dtype: torch.dtype, seed: int) -> list[tuple]:
    generator = torch.Generator().manual_seed(seed)
    return list(op.samples(lambda *shape: torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)))


def cases(some: int | None = None) -> Iterator:
    """The samples of each op, by index; the first is core, those after the first ``some`` are exhaustive."""
    for name, op in OPS.items():
        for index in range(len(samples(op, torch.float64, 0))):
            marks = [pytest.mark.core] if index == 0 else []
            if some is not None and index >= some:
                marks = [pytest.mark.exhaustive]
            yield pytest.param(op, index, id=f"{name}-{index}", marks=marks)


every_op = pytest.mark.parametrize("op", OPS.values(), ids=OPS)
every_sample = pytest.mark.parametrize(("op", "index"), list(cases()))
some_samples = pytest.mark.parametrize(("op", "index"), list(cases(2)))


def flat(args: tuple) -> list[Tensor]:
    return [t for a in args for t in (a if isinstance(a, list) else [a]) if isinstance(t, Tensor)]


def with_grad(args: tuple) -> tuple:
    def one(value):
        if isinstance(value, list):
            return [one(v) for v in value]
        return value.clone().requires_grad_() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(one, args))


@pytest.mark.core
@every_op
def test_files_are_where_the_name_says(op: Op) -> None:
    for folder in ("ops", "symbolic"):
        assert (ROOT / folder / f"{op.name}.py").is_file()
    assert Path(inspect.getfile(op.reference)).stem == op.name
    assert (Path(__file__).parent / f"test_{op.name}.py").is_file()
    assert SYMBOLICS[op.node_type].op is op
    assert callable(getattr(svexport.ops, op.name))


@every_op
def test_attributes_are_numbers(op: Op) -> None:
    """A TensorRT string attribute arrives with its trailing NUL: enumerations are ints."""
    assert {a.kind for a in op.attributes} <= {"int", "float", "ints", "floats"}


@some_samples
def test_opcheck(op: Op, index: int) -> None:
    torch.library.opcheck(op.torch_op, with_grad(samples(op, torch.float32, 1)[index]))


@some_samples
def test_gradcheck(op: Op, index: int) -> None:
    args = with_grad(samples(op, torch.float64, 2)[index])
    inputs = [t for t in flat(args) if t.requires_grad]
    if not any(o.requires_grad for o in as_tuple(op(*args))):
        return  # integer results

    def function(*tensors: Tensor) -> tuple[Tensor, ...]:
        rest = iter(tensors)
        call = [
            [next(rest) if isinstance(t, Tensor) and t.requires_grad else t for t in a]
            if isinstance(a, list)
            else next(rest)
            if isinstance(a, Tensor) and a.requires_grad
            else a
            for a in args
        ]
        return tuple(o for o in as_tuple(op(*call)) if o.requires_grad)

    assert torch.autograd.gradcheck(function, inputs)


def outputs_of(function: Callable[..., Any], args: Sequence[Any]) -> list[Tensor]:
    """Those that have a gradient."""
    return [o for o in as_tuple(function(*args)) if o.requires_grad]


def gradients_of(op: Op, index: int) -> tuple[tuple, list[Tensor], list[Tensor], list[Tensor]]:
    """Arguments, those that require gradients, weights of the outputs, and the gradients of all at once."""
    args = with_grad(samples(op, torch.float64, 8)[index])
    inputs = [t for t in flat(args) if t.requires_grad]
    outputs = outputs_of(op, args)
    weights = [torch.randn_like(o) for o in outputs]
    return args, inputs, weights, gradients(outputs, inputs, weights)


def gradients(outputs: list[Tensor], inputs: Sequence[Tensor], weights: list[Tensor]) -> list[Tensor]:
    if not outputs:
        return []
    return list(torch.autograd.grad(outputs, inputs, weights, materialize_grads=True))


@every_sample
def test_gradient_of_one_tensor_alone(op: Op, index: int) -> None:
    args, inputs, weights, expected = gradients_of(op, index)
    for one, e in zip(inputs, expected):
        for other in inputs:
            other.requires_grad_(other is one)
        (gradient,) = gradients(outputs_of(op, args), [one], weights)
        torch.testing.assert_close(gradient, e, rtol=1e-12, atol=1e-12)


class Watched(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@every_sample
def test_gradient_under_a_dispatch_mode(op: Op, index: int) -> None:
    """As of those that count operations: they call operators when autograd has had its turn."""
    args, inputs, weights, expected = gradients_of(op, index)
    with Watched():
        found = gradients(outputs_of(op, args), inputs, weights)
    for gradient, e in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, e, rtol=0, atol=0)


@pytest.mark.core
@every_op
def test_gradient_of_gradients_is_that_of_the_reference(op: Op) -> None:
    args = with_grad(samples(op, torch.float64, 9)[0])
    inputs = [t for t in flat(args) if t.requires_grad]
    tensors = _tensors(op, args)
    for i, t in enumerate(tensors):  # of which each is computed from the one before, so that ways through it show
        before = tensors[i - 1] if i else None
        if all(x is not None and x.requires_grad and x.numel() for x in (t, before)):
            tensors[i] = t + 0.01 * before.mean()
    args = _with_tensors(op, args, tensors)
    found = []
    for function in (op, op.reference):
        outputs = outputs_of(function, args)
        if not outputs:
            return
        loss = sum(o.square().sum() for o in outputs)
        gradients = torch.autograd.grad(loss, inputs, create_graph=True, materialize_grads=True)
        loss = sum(g.square().sum() for g in gradients)
        found.append(torch.autograd.grad(loss, inputs, materialize_grads=True, retain_graph=True))
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.core
@every_op
def test_transforms_and_forward_mode_are_those_of_the_reference(op: Op) -> None:
    args = samples(op, torch.float64, 12)[0]
    tensors = _tensors(op, args)
    at = next((i for i, t in enumerate(tensors) if t is not None and t.is_floating_point()), None)
    if at is None or not outputs_of(op, with_grad(args)):
        return

    def loss(function: Callable[..., Any], x: Tensor) -> Tensor:
        outputs = as_tuple(function(*_with_tensors(op, args, [*tensors[:at], x, *tensors[at + 1 :]])))
        return sum(o.square().sum() for o in outputs if o.is_floating_point())

    def derivatives(function: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        of_function = partial(loss, function)
        return torch.func.grad(of_function)(x), torch.func.jvp(of_function, (x,), (tangent,))[1]

    x, tangent = tensors[at], torch.randn_like(tensors[at])
    gradient, slope = derivatives(op)
    expected = derivatives(op.reference)
    torch.testing.assert_close((gradient, slope), expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(slope, (gradient * tangent).sum(), rtol=1e-8, atol=1e-8)


@pytest.mark.core
@every_op
def test_vmap_is_one_after_the_other(op: Op) -> None:
    """In one call, without the warning of a fallback: of operators that take lists there is none."""
    several = [samples(op, torch.float64, seed)[0] for seed in (13, 14)]
    tensors = [_tensors(op, args) for args in several]
    changing = [i for i, t in enumerate(tensors[0]) if t is not None and t.is_floating_point()]
    if not changing:
        return

    def call(*changed: Tensor) -> tuple[Tensor, ...]:
        new = dict(zip(changing, changed, strict=True))
        return as_tuple(op(*_with_tensors(op, several[0], [new.get(i, t) for i, t in enumerate(tensors[0])])))

    found = torch.vmap(call)(*(torch.stack([ts[i] for ts in tensors]) for i in changing))
    for number, ts in enumerate(tensors):
        for actual, expected in zip(found, call(*(ts[i] for i in changing)), strict=True):
            torch.testing.assert_close(actual[number], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.core
@every_op
def test_jacobian_in_one_call(op: Op) -> None:
    """vmap over the backward pass."""
    args = with_grad(samples(op, torch.float64, 15)[0])
    inputs = [t for t in flat(args) if t.requires_grad]
    outputs = outputs_of(op, args)
    if not outputs:
        return
    weights = [torch.randn(2, *o.shape, dtype=o.dtype) for o in outputs]
    found = torch.autograd.grad(outputs, inputs, weights, True, is_grads_batched=True, materialize_grads=True)
    for number in range(2):
        expected = torch.autograd.grad(outputs, inputs, [w[number] for w in weights], True, materialize_grads=True)
        for actual, e in zip(found, expected, strict=True):
            torch.testing.assert_close(actual[number], e, rtol=1e-10, atol=1e-10)


@pytest.mark.core
@every_op
def test_nothing_is_recorded_where_nothing_is_asked(op: Op) -> None:
    args = samples(op, torch.float32, 10)[0]
    assert not outputs_of(op, args)
    with torch.no_grad():
        assert not outputs_of(op, with_grad(args))
    with torch.inference_mode():
        assert all(o.is_inference() for o in as_tuple(op(*with_grad(args))))


@pytest.mark.core
@every_op
def test_a_change_in_place_before_backward_is_noticed(op: Op) -> None:
    args = with_grad(samples(op, torch.float32, 11)[0])
    for i, tensor in enumerate(_tensors(op, args)):
        if tensor is None:
            continue
        copies = [t if t is None else t.clone() for t in _tensors(op, args)]
        outputs = outputs_of(op, _with_tensors(op, args, copies))
        with torch.no_grad():
            copies[i].copy_(tensor)
        if outputs:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                sum(o.sum() for o in outputs).backward()


@pytest.mark.core
@every_op
def test_tensors_are_kept_as_saved_tensor_hooks_say(op: Op) -> None:
    """Offloaded, say: nothing else of the graph holds them."""
    args = with_grad(samples(op, torch.float64, 12)[0])
    inputs = [t for t in flat(args) if t.requires_grad]
    copies = [t if t is None else t.clone() for t in _tensors(op, args)]
    watched = [weakref.ref(t) for t in copies if t is not None]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.numpy(force=True).copy(), torch.from_numpy):
        outputs = outputs_of(op, _with_tensors(op, args, copies))
    del copies
    assert not any(ref() is not None for ref in watched)
    if outputs:
        loss, expected = (sum(o.square().sum() for o in os) for os in (outputs, outputs_of(op, args)))
        gradients = [torch.autograd.grad(x, inputs, materialize_grads=True) for x in (loss, expected)]
        for actual, e in zip(*gradients, strict=True):
            torch.testing.assert_close(actual, e, rtol=1e-12, atol=1e-12)


@every_sample
def test_implementation_is_the_reference(op: Op, index: int) -> None:
    args = samples(op, torch.float64, 3)[index]
    for actual, expected in zip(as_tuple(op(*args)), as_tuple(op.reference(*args)), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@every_sample
def test_half_is_close_to_float64(op: Op, index: int) -> None:
    for dtype, tolerance in ((torch.float16, 1e-2), (torch.bfloat16, 8e-2)):
        args = samples(op, dtype, 4)[index]
        precise = [
            [t.double() if isinstance(t, Tensor) and t.is_floating_point() else t for t in a]
            if isinstance(a, list)
            else a.double()
            if isinstance(a, Tensor) and a.is_floating_point()
            else a
            for a in args
        ]
        for actual, expected in zip(as_tuple(op(*args)), as_tuple(op.reference(*precise)), strict=True):
            scale = float(expected.double().abs().max()) if expected.numel() else 1.0
            torch.testing.assert_close(
                actual.double(), expected.double(), rtol=tolerance, atol=tolerance * max(scale, 1)
            )


@every_sample
def test_non_contiguous_and_channels_last(op: Op, index: int) -> None:
    args = samples(op, torch.float32, 5)[index]

    def strided(value):
        if isinstance(value, list):
            return [strided(v) for v in value]
        if not isinstance(value, Tensor) or not value.dim():
            return value
        return torch.stack([value, torch.zeros_like(value)], dim=-1)[..., 0]

    def last(value):
        if isinstance(value, list):
            return [last(v) for v in value]
        if not isinstance(value, Tensor) or value.dim() != 4:
            return value
        return value.to(memory_format=torch.channels_last)

    expected = as_tuple(op(*args))
    for change in (strided, last):
        for actual, e in zip(as_tuple(op(*map(change, args))), expected, strict=True):
            torch.testing.assert_close(actual, e, rtol=1e-5, atol=1e-5)


@pytest.mark.core
@every_op
def test_compile_in_one_graph(op: Op) -> None:
    """Forward and backward under torch.compile(fullgraph=True)."""
    torch.compiler.reset()  # all ops share the code of loss, which would count as recompiled
    args = with_grad(samples(op, torch.float32, 6)[0])

    def loss(*a) -> Tensor:
        return sum(o.float().square().sum() for o in as_tuple(op(*a)))

    expected = loss(*args)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")(*args)
    torch.testing.assert_close(compiled, expected)
    if expected.requires_grad:
        inputs = [t for t in flat(args) if t.requires_grad]
        wanted = torch.autograd.grad(expected, inputs, allow_unused=True)
        for actual, e in zip(torch.autograd.grad(compiled, inputs, allow_unused=True), wanted, strict=True):
            torch.testing.assert_close(actual, e)


@pytest.mark.parametrize(
    "opset", [pytest.param(opset, marks=[pytest.mark.core] if opset in (11, 18) else []) for opset in range(9, 24)]
)
@every_op
def test_body_is_the_reference(op: Op, opset: int) -> None:
    """In ONNX Runtime: lowered and attached, static and dynamic, for every sample; between OPSETS in one way."""
    ways = [(True, False), (True, True), (False, False), (False, True)] if opset in OPSETS else [(True, True)]
    for index, args in enumerate(samples(op, torch.float32, opset)):
        expected = as_tuple(op(*args))
        for lowered, dynamic in ways:
            got = run_op(op, args, opset, lowered=lowered, dynamic=dynamic)
            for actual, e in zip(got, expected, strict=True):
                torch.testing.assert_close(
                    actual,
                    e,
                    rtol=1e-5,
                    atol=1e-5,
                    msg=lambda m: f"sample {index}, {lowered=}, {dynamic=}: {m}",  # noqa: B023
                )


@pytest.mark.parametrize("opset", [9, 11, 17, 20])
@every_op
def test_body_in_half(op: Op, opset: int) -> None:
    for args in samples(op, torch.float16, opset):
        for actual, expected in zip(run_op(op, args, opset), as_tuple(op(*args)), strict=True):
            assert actual.dtype == expected.dtype
            torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


@pytest.mark.core
@pytest.mark.parametrize("opset", OPSETS)
@every_op
def test_lowered_body_is_standard_onnx(op: Op, opset: int) -> None:
    for args in samples(op, torch.float32, 7):
        model = op_model(op, args, opset, lowered=True)
        assert not list(svexport_nodes(model))
        assert [entry.domain for entry in model.opset_import] == [""]
        types = {n.op_type for n in model.graph.node}
        assert "Einsum" not in types
        assert "GridSample" not in types or 16 <= opset < 20
