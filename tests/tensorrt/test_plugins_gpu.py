"""The C++ plugins run in every type and format they support, cloned, reloaded, captured, and on two streams."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from svexport.ops._op import OPS, Op, as_tuple
from svexport.tensorrt.nodes import plugin_ops
from tests.tensorrt.cases import CASES, COORDINATES, arguments, inputs_of, small_decoder, with_inputs
from tests.tensorrt.host import HWC8, Desc, Host, Plugin, from_format, to_format
from tests.tensorrt.test_plugins import TACTICS, case, configured, index_type, plugin_of, tactic_arguments

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
SCALE = 0.03  # of inputs in int8


class Run:
    """A plugin, made again from an engine, and its tensors on the device, of one combination of types and formats."""

    def __init__(self, plugin: Plugin, tensors: Sequence[Desc], inputs: Sequence[Tensor]) -> None:
        self.tensors = tensors
        self.inputs = [self._typed(x, d) for x, d in zip(inputs, tensors, strict=False)]
        self.memory = [to_format(x.cuda(), d.format) for x, d in zip(self.inputs, tensors, strict=False)]
        for d in tensors[len(inputs) :]:
            shape = to_format(torch.empty(d.shape), d.format).shape
            self.memory.append(torch.full(shape, 77, dtype=d.dtype, device="cuda"))  # what is not written shows
        size = plugin.configure(tensors)
        assert size >= 0, plugin.host.log()
        self.workspace = torch.full((size + 1024,), 0x5A, dtype=torch.uint8, device="cuda")
        self.plugin = plugin.reload().attach()
        if plugin.host.version >= (10, 0):  # older ones do so only when shapes change
            assert self.plugin.prepare(tensors) == 0, plugin.host.log()

    @staticmethod
    def _typed(x: Tensor, desc: Desc) -> Tensor:
        if desc.dtype == torch.int8 and x.is_floating_point():
            return (x / SCALE).round().clamp(-127, 127).to(torch.int8)
        return x.to(desc.dtype)

    def enqueue(self, **options: object) -> float:
        return self.plugin.enqueue(self.tensors, self.memory, self.workspace, **options)

    def outputs(self) -> list[Tensor]:
        torch.cuda.synchronize()
        assert (self.workspace[-1024:] == 0x5A).all(), "wrote past its workspace"
        n = len(self.inputs)
        return [from_format(m, d.shape, d.format) for m, d in zip(self.memory[n:], self.tensors[n:], strict=True)]

    def expected(self, op: Op, args: Sequence) -> list[Tensor]:
        """By the reference, in float64, of the same rounded inputs."""
        originals = [x for _, x in inputs_of(op, args)]
        exact = [
            x.double() * SCALE
            if x.dtype == torch.int8 and o.is_floating_point()
            else x.double()
            if x.is_floating_point()
            else o
            for x, o in zip(self.inputs, originals, strict=True)
        ]
        return list(as_tuple(op.reference(*with_inputs(op, args, exact))))

    def check(self, op: Op, args: Sequence, expected: Sequence[Tensor] | None = None) -> None:
        expected = self.expected(op, args) if expected is None else expected
        for d, y, e in zip(self.tensors[len(self.inputs) :], self.outputs(), expected, strict=True):
            error = (y.double().cpu() - e).norm() / e.norm().clamp(min=1e-9)
            assert error <= tolerance(op, self.tensors[0].dtype, d.dtype), (error, self.tensors)
            assert y.numel() == e.numel()


def tolerance(op: Op, *dtypes: torch.dtype) -> float:
    # Between its layers the decoder rounds to the type of its query, a dozen times.
    return max(TOLERANCE.get(dtype, 0) for dtype in dtypes) * (20 if op.name == "transformer_decoder" else 1)


def runs(
    host: Host, op: Op, args: tuple, dtype: torch.dtype, *, precise: bool = False, weak: bool = False
) -> list[Run]:
    """One for each combination that TensorRT would find in a network of this type."""
    inputs = inputs_of(op, args)
    plugin = plugin_of(host, op, args)
    keep = COORDINATES.get(op.name, ()) if precise else ()
    types = [
        index_type(host, x.dtype) if not x.is_floating_point() else torch.float32 if name in keep else dtype
        for name, x in inputs
    ]
    types += plugin.output_types(types)
    shapes = plugin.shapes([Desc(tuple(x.shape)) for _, x in inputs])
    scale = SCALE if weak else 1.0
    tensors = [*(Desc(tuple(x.shape), scale=scale) for _, x in inputs), *(Desc(shape) for shape, _ in shapes)]
    choice = [[t, torch.float16, torch.int8] if weak and t.is_floating_point else [t] for t in types]
    found = plugin.formats(tensors, choice)
    assert found, host.log()
    return [Run(plugin, each, [x for _, x in inputs]) for each in found]


cases = pytest.mark.parametrize(("op", "i"), CASES, ids=[f"{op.name}-{i}" for op, i in CASES])


@cases
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_type_and_format(host: Host, op: Op, i: int, dtype: torch.dtype) -> None:
    if host.version < (10, 0) and dtype == torch.bfloat16:
        pytest.skip("TensorRT 8 has no bfloat16")
    args = case(op, i)
    seen: dict[tuple, list[Tensor]] = {}
    for precise in (False, True) if op.name in COORDINATES and dtype != torch.float32 else (False,):
        for run in runs(host, op, args, dtype, precise=precise):
            run.enqueue()
            types = tuple(d.dtype for d in run.tensors)
            if types not in seen:
                seen[types] = run.expected(op, args)
            run.check(op, args, seen[types])


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_what_a_weakly_typed_network_may_choose(host: Host, op: Op) -> None:
    args = list(arguments(op))[-1]
    for run in runs(host, op, args, torch.float32, weak=True):
        run.enqueue()
        run.check(op, args)


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_a_captured_plugin_replays_on_new_data(host: Host, op: Op) -> None:
    args = case(op, 0)
    run = runs(host, op, args, torch.float32)[0]
    run.enqueue()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run.enqueue(stream=torch.cuda.current_stream().cuda_stream)
    changed = [x * 0.75 if x.is_floating_point() else x for x in run.inputs]
    if op.name == "transformer_decoder":  # its points are fractions
        changed = [x * 0.75 if j == 0 else x for j, x in enumerate(run.inputs)]
    run.inputs = changed
    for memory, x in zip(run.memory, changed, strict=False):
        memory.copy_(x)
    for memory in run.memory[len(changed) :]:
        memory.fill_(77)
    graph.replay()
    run.check(op, args)


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_two_contexts_on_two_streams(host: Host, op: Op) -> None:
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    all_args = [case(op, 0), list(arguments(op))[-1]]
    both = [runs(host, op, args, torch.float32)[0] for args in all_args]
    torch.cuda.synchronize()
    for _ in range(20):
        for run, stream in zip(both, streams, strict=True):
            run.enqueue(stream=stream.cuda_stream)
    for run, args in zip(both, all_args, strict=True):
        run.check(op, args)


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_clones_of_one_plugin_keep_apart(host: Host, op: Op) -> None:
    first = runs(host, op, case(op, 0), torch.float16)[0]
    copy = Run(first.plugin.clone(), first.tensors, [x for _, x in inputs_of(op, case(op, 0))])
    first.plugin = None  # destroyed
    copy.enqueue()
    copy.check(op, case(op, 0))


@pytest.mark.parametrize("op", plugin_ops(), ids=lambda op: op.name)
def test_enqueue_neither_allocates_nor_waits(host: Host, op: Op, plugin_library: Path) -> None:
    library = ctypes.CDLL(str(plugin_library))
    for run in runs(host, op, case(op, 0), torch.float16)[:4]:
        run.enqueue()
        forbidden, launches = library.intercept_forbidden(), library.intercept_launches()
        run.enqueue(times=20)
        assert library.intercept_forbidden() == forbidden
        assert library.intercept_launches() >= launches + 20


@pytest.mark.parametrize("name", TACTICS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_tactic(host: Host, name: str, dtype: torch.dtype) -> None:
    if host.version < (10, 0):
        pytest.skip("TensorRT 8 asks for no tactics")
    op = OPS[name]
    for args in tactic_arguments(op):
        run = runs(host, op, args, dtype)[0]
        run.plugin = None
        plugin, _ = configured(host, name, args, dtype)
        found = plugin.tactics()
        for tactic in [0, *found]:
            plugin.set_tactic(tactic)
            run.plugin = plugin.reload().attach()
            assert run.plugin.prepare(run.tensors) == 0
            for memory in run.memory[len(run.inputs) :]:
                memory.fill_(77)
            run.enqueue()
            run.check(op, args)


def test_a_plugin_takes_smaller_shapes_with_the_workspace_of_the_largest(host: Host) -> None:
    """Of many points that scatter, for which the launcher copies the image."""
    op = OPS["grid_sample"]
    sizes = [((130, 120), 260), ((100, 90), 260), ((130, 120), 255), ((7, 5), 3)]
    every = [(torch.randn(1, 64, *size), torch.rand(1, n, n, 2) * 2 - 1, 0, 0, False, 1.0) for size, n in sizes]
    largest = runs(host, op, every[0], torch.float32)[0]
    assert largest.workspace.numel() > every[0][0].numel() * 4
    for args in (*every, every[0]):
        run = runs(host, op, args, torch.float32)[0]
        run.plugin, run.workspace = largest.plugin, largest.workspace
        assert run.plugin.prepare(run.tensors) == 0
        for _ in range(2):
            run.enqueue()
        run.check(op, args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [None, torch.float16], ids=["float32", "float16"])
def test_weights_as_attributes_are_those_of_the_inputs(
    host: Host, held: Any, dtype: torch.dtype, stored: torch.dtype | None
) -> None:
    if host.version < (10, 0) and dtype == torch.bfloat16:
        pytest.skip("TensorRT 8 has no bfloat16")
    op = OPS["transformer_decoder"]
    decoder = small_decoder(2, learned_offsets=True)
    if stored:
        decoder.half().float()
    inputs = decoder.example_inputs
    args = (*inputs, [w.detach() for w in decoder.weights()], *decoder.config.attributes())
    plugin = host.create_from(held(decoder, **({"dtype": stored} if stored else {})))
    assert plugin, host.log()
    for run in runs(host, op, args, dtype):
        run.enqueue()
        first = len(run.inputs) - len(decoder.weights())
        tensors = [*run.tensors[:first], *run.tensors[len(run.inputs) :]]
        other = Run(plugin, tensors, run.inputs[:first])
        other.enqueue()
        for y, expected in zip(other.outputs(), run.outputs(), strict=True):
            assert torch.equal(y, expected)
            assert y.isfinite().all()


def test_odd_channels_are_padded_in_channels_last(host: Host) -> None:
    """HWC8 with 5 channels is read, its padding is not."""
    op = OPS["bilinear_sample"]
    args = (torch.randn(2, 5, 9, 11), torch.rand(2, 4, 3, 2) * 8)
    found = [run for run in runs(host, op, args, torch.float16) if run.tensors[0].format == HWC8]
    assert found
    for run in found:
        run.memory[0][..., 5:] = torch.nan
        run.enqueue()
        run.check(op, args)


def test_empty_tensors(host: Host) -> None:
    op = OPS["grid_sample"]
    args = (torch.randn(2, 3, 4, 5), torch.zeros(2, 0, 3, 2), 0, 0, False, 1.0)
    for run in itertools.islice(runs(host, op, args, torch.float32), 2):
        run.enqueue()
        run.check(op, args)


def test_tensors_that_do_not_fit_are_an_error_and_no_crash(host: Host) -> None:
    op = OPS["grid_sample"]
    args = case(op, 0)
    run = runs(host, op, args, torch.float32)[0]
    run.tensors = [run.tensors[0], Desc((5, *run.tensors[1].shape[1:])), *run.tensors[2:]]
    with pytest.raises(AssertionError, match="input and grid differ in N" if host.version >= (8, 6) else None):
        run.enqueue()
