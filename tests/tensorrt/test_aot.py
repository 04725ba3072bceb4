"""Ahead-of-time kernels, launched as TensorRT would, equal the references."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from svexport.errors import PluginBuildError, UnsupportedError
from svexport.ops._op import OPS, Op, as_tuple
from svexport.tensorrt import aot, library
from svexport.tensorrt.signature import (
    COORDINATES,
    FACTORS,
    IMAGES,
    Description,
    Size,
    input_names,
    output_descriptions,
)
from tests.tensorrt.cases import arguments, inputs_of, with_inputs
from tests.tensorrt.driver import launch

AOT_OPS = [OPS[name] for name in sorted(aot.AOT_OPS)]
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
nvcc = pytest.mark.skipif(not aot.available(), reason="needs nvcc")
gpu = [pytest.mark.gpu, nvcc, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
every_op = pytest.mark.parametrize("op", AOT_OPS, ids=lambda op: op.name)


class Builder:
    """Expressions of dimensions as functions of the sizes that TensorRT learns later."""

    def constant(self, value: int) -> Any:
        return lambda sizes: value

    def operation(self, operation: Any, first: Any, second: Any) -> Any:
        return lambda sizes: operation(first(sizes), second(sizes))


class Operations:
    SUM = staticmethod(lambda a, b: a + b)
    SUB = staticmethod(lambda a, b: a - b)
    PROD = staticmethod(lambda a, b: a * b)
    FLOOR_DIV = staticmethod(lambda a, b: a // b)
    MAX = staticmethod(max)
    MIN = staticmethod(min)


def evaluate(value: Any, sizes: Mapping[tuple[int, int], int]) -> int:
    return value.value(sizes) if isinstance(value, Size) else value


def more_arguments(op: Op) -> Iterator[tuple]:
    """Beside the samples: what chooses between kernels, and nothing at all."""
    generator = torch.Generator().manual_seed(1)

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    if op.name == "add_bias_residual_layer_norm":
        for rows, d in [(3, 1), (5, 256), (2, 300), (7, 1000), (3, 1025), (2, 4100), (1, 12001), (0, 8)]:
            extra = make(1, rows, d) if rows % 2 else None
            yield make(1, rows, d), make(d), make(1, rows, d), make(d), make(d), 1e-5, extra
    elif op.name == "grid_sample":
        for mode, padding, align in [(0, 0, True), (1, 1, False), (2, 2, True)]:
            yield make(1, 40, 7, 5), make(1, 17, 19, 2), mode, padding, align, 1.0
            yield make(2, 264, 3, 4), make(2, 1, 31, 2), mode, padding, align, 1.0
        yield make(1, 3, 4, 5, 6), make(1, 2, 3, 5, 3), 0, 1, False, 1.0
        yield make(2, 8, 5, 5), make(2, 0, 3, 2), 0, 0, False, 1.0
    elif op.name == "bilinear_sample":
        yield make(1, 72, 9, 7), make(1, 13, 11, 2).sigmoid() * 9 - 1
    elif op.name == "camera_sample":
        for activation, groups, channels in [(1, 2, 32), (0, 1, 300), (1, 2, 24)]:
            features = [make(2, 3, channels, 7, 9), make(2, 3, channels, 4, 5), make(2, 3, channels, 1, 2)]
            matrix = torch.tensor([[9.0, 0, 5, 0], [0, 9, 4, 0], [0, 0, 1, 0], [0, 0, 0, 1]]) + make(2, 3, 4, 4) * 0.1
            weights, offsets = make(2, 5, 3, 2, 3, groups), make(2, 5, 2, 3)
            box, rest = (-3.0, -3.0, 1.0, 3.0, 3.0, 7.0), (1e-5, True, (0.0, 1.0), activation, [1.0] * 3)
            yield features, make(2, 5, 3).sigmoid(), matrix, weights, offsets, (9, 11), box, *rest
    elif op.name == "inverse":
        for shape in [(1, 1), (300, 2, 2), (129, 3, 3), (5, 7, 6, 6), (0, 4, 4)]:
            yield make(*shape) + 4 * torch.eye(shape[-1]), shape[-1]
    elif op.name == "ms_deform_attn":
        shapes = torch.tensor([[6, 5], [3, 2]])
        starts = torch.tensor([0, 30])
        for m, d in [(3, 8), (2, 32), (1, 72), (2, 3)]:
            locations, weights = make(2, 11, m, 2, 4, 2).sigmoid(), make(2, 11, m, 2, 4)
            yield make(2, 36, m, d), shapes, starts, locations, weights, 1.0
            codes = (make(2, 36, m, d) * 40).clamp(-128, 127).to(torch.int8)
            yield codes, shapes, starts, locations, weights, 0.02


def cases(op: Op) -> list[tuple]:
    return [*arguments(op), *more_arguments(op)]


def kernel_for(
    op: Op,
    args: Sequence[Any],
    tensors: Sequence[Tensor],
    *,
    last: bool = False,
    symbolic: bool = False,
    channels: bool = False,
) -> tuple[aot.Kernel, dict[tuple[int, int], int], list[aot.Operand]]:
    """The kernel, what its expressions mean, and the outputs. `channels`: those are known in any case."""
    attributes = {a.name: v for a, v in zip(op.arguments, args, strict=True) if not a.is_tensor}
    names = [*input_names(op, len(tensors), attributes), "output"]
    sizes = {(i, axis): size for i, t in enumerate(tensors) for axis, size in enumerate(t.shape)}
    channel = {(i, t.dim() - 3) for i, t in enumerate(tensors) if last or channels}
    if last and not channels:
        channel |= {(i, 5) for i in range(len(tensors))}  # groups of channels

    def size(i: int, axis: int) -> Any:
        if symbolic and (i, axis) not in channel:
            return Size(lambda sizes: sizes[i, axis], Builder(), Operations)
        return sizes[i, axis]

    given = [Description(tuple(size(i, a) for a in range(t.dim())), t.dtype) for i, t in enumerate(tensors)]
    made = output_descriptions(op, given, attributes)
    operands = [
        aot.Operand(d.shape, d.dtype, last and i < len(names) and names[i] in IMAGES[op.name][1])
        for i, d in enumerate([*given, *made])
    ]
    kernel = aot.kernel(op, operands[: len(given)], operands[len(given) :], attributes)
    outputs = [aot.Operand(tuple(evaluate(s, sizes) for s in o.shape), o.dtype, o.channels_last) for o in operands]
    return kernel, sizes, outputs[len(given) :]


def can_be_last(op: Op, tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    if op.name not in IMAGES or not first.is_floating_point() or first.dim() != IMAGES[op.name][0]:
        return False
    return first.shape[-3] > 0 and first.shape[-3] * first.element_size() % 16 == 0


def stored_last(tensor: Tensor) -> Tensor:
    """The same numbers with the channels innermost in memory."""
    return tensor.movedim(-3, -1).contiguous().movedim(-1, -3)


@every_op
def test_expressions_are_the_numbers(op: Op) -> None:
    """Launch parameters and sizes for shapes that are known later are those for the same shapes known at once."""
    for args in cases(op):
        tensors = [t for _, t in inputs_of(op, args)]
        for last in (False, True)[: 1 + can_be_last(op, tensors)]:
            known, sizes, outputs = kernel_for(op, args, tensors, last=last)
            later, _, _ = kernel_for(op, args, tensors, last=last, symbolic=True)
            assert all(isinstance(n, int) and n > 0 for n in known.grid)
            assert all(evaluate(n, sizes) > 0 for n in later.grid)
            assert [evaluate(n, sizes) for n in later.sizes] == list(known.sizes)
            assert list(known.sizes) == [n for t in (*tensors, *outputs) for n in t.shape]


@nvcc
@every_op
def test_arguments_are_pointers_sizes_pointers(op: Op) -> None:
    args = next(iter(op.samples(lambda *shape: torch.zeros(shape))))
    tensors = [t for _, t in inputs_of(op, args)]
    kernel, _, outputs = kernel_for(op, args, tensors)
    text = aot.ptx(kernel.source)
    entries = re.findall(r"\.visible \.entry (\w+)\((.*?)\)", text, re.DOTALL)
    assert [name for name, _ in entries] == [kernel.name]
    kinds = re.findall(r"\.param \.(u\d+)", entries[0][1])
    assert kinds == ["u64"] * len(tensors) + ["u32"] * len(kernel.sizes) + ["u64"] * len(outputs)
    assert f".maxntid {kernel.block}" in text
    assert ".target sm_75" in text


@every_op
def test_what_has_no_kernel_is_refused(op: Op) -> None:
    args = next(iter(op.samples(lambda *shape: torch.zeros(shape))))
    large = [aot.Operand((2**16,) * t.dim(), t.dtype) for _, t in inputs_of(op, args)]
    attributes = {a.name: v for a, v in zip(op.arguments, args, strict=True) if not a.is_tensor}
    with pytest.raises(UnsupportedError, match="32 bits"):
        aot.kernel(op, large, [], attributes)


def test_channels_of_other_sizes_are_refused() -> None:
    image, grid = aot.Operand((1, 12, 4, 4), torch.float16, True), aot.Operand((1, 2, 2, 2), torch.float32)
    attributes = {"interpolation_mode": 0, "padding_mode": 0, "align_corners": 0, "scale": 1.0}
    with pytest.raises(UnsupportedError, match="multiples of 8, got 12"):
        aot.kernel(OPS["grid_sample"], [image, grid], [image], attributes)
    matrix = aot.Operand((9, 9), torch.float32)
    with pytest.raises(UnsupportedError, match="no kernel is for n=9"):
        aot.kernel(OPS["inverse"], [matrix], [matrix], {"n": 9})


def test_types_without_a_kernel_are_refused() -> None:
    matrix = aot.Operand((4, 4), torch.float64)
    with pytest.raises(UnsupportedError, match=r"takes torch\.float64"):
        aot.kernel(OPS["inverse"], [matrix], [matrix], {"n": 4})
    args = next(arguments(OPS["camera_sample"]))
    kinds = iter([torch.float16, torch.float32, *[torch.float32] * 4])
    operands = [aot.Operand(tuple(t.shape), next(kinds)) for _, t in inputs_of(OPS["camera_sample"], args)]
    attributes = {a.name: v for a, v in zip(OPS["camera_sample"].arguments, args, strict=True) if not a.is_tensor}
    with pytest.raises(UnsupportedError, match="features of one type"):
        aot.kernel(OPS["camera_sample"], operands, [aot.Operand((2, 7, 3), torch.float16)], attributes)


def test_without_nvcc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library.shutil, "which", lambda *args, **kwargs: None)
    assert not aot.available()
    with pytest.raises(PluginBuildError, match="no nvcc was found"):
        aot.ptx("")


@nvcc
def test_errors_of_nvcc_are_shown() -> None:
    with pytest.raises(PluginBuildError, match="undeclared_identifier_of_a_test"):
        aot.ptx("int f() { return undeclared_identifier_of_a_test; }")


class Launch(NamedTuple):
    """A kernel of a case, what its expressions mean, its tensors (``images`` of which are stored channels-last)."""

    kernel: aot.Kernel
    sizes: dict[tuple[int, int], int]
    inputs: list[Tensor]
    images: list[bool]
    made: list[aot.Operand]
    expected: tuple[Tensor, ...]


def launches(op: Op, dtype: torch.dtype, symbolic: bool) -> Iterator[Launch]:
    coordinates = COORDINATES.get(op.name, ())
    for case, args in enumerate(cases(op)):
        if case % 3 == 1 and (symbolic or dtype == torch.bfloat16):
            continue  # mostly the same kernels as for others
        named = inputs_of(op, args)
        keep = (*coordinates, *(FACTORS.get(op.name, ()) if case % 2 else ()))
        inputs = [t.to(dtype) if t.is_floating_point() and name not in keep else t for name, t in named]
        wide = [t.double() if t.is_floating_point() else t for t in inputs]
        expected = as_tuple(op.reference(*with_inputs(op, args, wide)))
        for last in (False, True)[: 1 + can_be_last(op, inputs)]:
            images = [last and name in IMAGES[op.name][1] for name, _ in named]
            kernel, sizes, made = kernel_for(op, args, inputs, last=last, symbolic=symbolic)
            yield Launch(kernel, sizes, inputs, images, made, expected)


def compiled(sources: Iterable[str]) -> list[str]:
    """The PTX of each source that is another than those before."""
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(aot.ptx, dict.fromkeys(sources)))


def assembler() -> str | None:
    try:
        found = Path(library.find_nvcc()).parent / "ptxas"
    except PluginBuildError:
        return None
    return str(found) if found.is_file() else None


needs_ptxas = pytest.mark.skipif(assembler() is None, reason="needs nvcc and ptxas")
DEVICES = (75, 80, 86, 87, 89, 90, 100, 110, 120)


def assemble(code: str, device: int, folder: Path) -> None:
    """As the driver does it on a device of that capability: what ptxas refuses TensorRT cannot load there."""
    (folder / "kernel.ptx").write_text(code)
    command = [str(assembler()), f"-arch=sm_{device}", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"sm_{device}: {done.stderr}"


@needs_ptxas
def test_ptx_of_narrow_rows_is_for_every_device(tmp_path: Path) -> None:
    """Many loads, each under a predicate of its own, were more than ptxas has registers for from sm_90 on."""
    op = OPS["add_bias_residual_layer_norm"]
    kernel = next(x.kernel for x in launches(op, torch.float16, False) if x.inputs[0].shape[-1] == 4)
    for device in DEVICES:
        assemble(aot.ptx(kernel.source), device, tmp_path)


@pytest.mark.exhaustive
@needs_ptxas
@every_op
def test_ptx_is_for_every_device(op: Op, tmp_path: Path) -> None:
    dtype = DTYPES[int(torch.randint(3, ()))]
    sources = list(dict.fromkeys(x.kernel.source for x in launches(op, dtype, False)))
    some = [sources[i] for i in torch.randperm(len(sources))[:2].tolist()]
    for code in compiled(some):
        for device in (80 if dtype == torch.bfloat16 else 75, 90, 120):
            assemble(code, device, tmp_path)


@pytest.mark.parametrize("symbolic", [False, True], ids=["known", "symbolic"])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).rsplit(".", 1)[-1])
@pytest.mark.parametrize("op", [pytest.param(op, marks=gpu, id=op.name) for op in AOT_OPS])
def test_kernel_is_the_reference(op: Op, dtype: torch.dtype, symbolic: bool) -> None:
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    work = list(launches(op, dtype, symbolic))
    assert all(compiled(x.kernel.source for x in work))
    for case, (kernel, sizes, inputs, images, made, expected) in enumerate(work):
        stored = [stored_last(t.cuda()) if image else t.cuda() for t, image in zip(inputs, images, strict=True)]
        outputs = [torch.full(o.shape, 7.0, dtype=o.dtype, device="cuda") for o in made]
        outputs = [stored_last(t) if o.channels_last else t for t, o in zip(outputs, made, strict=True)]
        launch(
            aot.ptx(kernel.source).encode(),
            kernel.name,
            [evaluate(n, sizes) for n in kernel.grid],
            kernel.block,
            kernel.shared,
            stored,
            [evaluate(n, sizes) for n in kernel.sizes],
            outputs,
        )
        for output, wanted in zip(outputs, expected, strict=True):
            got = output.cpu().double()
            assert got.shape == wanted.shape
            if got.numel():
                error = (got - wanted).norm() / wanted.norm().clamp_min(1e-12)
                assert error < tolerance, (case, made, error.item())
