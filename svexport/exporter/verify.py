"""Proof of an exported file: ONNX Runtime against torch, on the given inputs and on fresh ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from svexport.errors import VerificationError
from svexport.exporter.state import State
from svexport.parity import Parity, parity

__all__ = ["random_like", "verify"]


def verify(
    model: nn.Module,
    path: Path,
    tensors: Sequence[Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    dynamic_axes: Mapping[str, Mapping[int, str]],
    rtol: float,
    atol: float,
    notes: list[str],
    state: State,
) -> list[Parity]:
    """Compares every output on the given inputs, on random ones, and with every dynamic size changed.

    Random inputs may hit what a model was never meant for. Where float32 torch itself is then further from float64
    torch than the tolerance, a file cannot do better: that distance is added to the tolerance, and noted.

    Raises:
        VerificationError: if any output differs, the worst one named.
    """
    from svexport.runtime.session import OnnxEngine

    engine = OnnxEngine(path, device="cpu")
    results: list[Parity] = []
    for run, inputs in _runs(tensors, input_names, dynamic_axes):
        try:
            expected = model(*(t.clone() for t in inputs))  # a model may work on its inputs in place
        except Exception as error:
            if run == "given":
                raise
            notes.append(f"not verified with {run}: the model itself fails there ({type(error).__name__}: {error})")
            continue
        actual = engine.run([t.detach().cpu() for t in inputs])
        pairs = list(zip(output_names, expected, actual, strict=True))
        found = [parity(name, e, a, run=run, rtol=rtol, atol=atol) for name, e, a in pairs]
        if run != "given" and not all(p.ok for p in found):
            gaps = _float64_gaps(model, inputs, expected)
            for index, ((name, e, a), gap) in enumerate(zip(pairs, gaps, strict=True)):
                if not found[index].ok and 0 < gap < math.inf:
                    found[index] = parity(name, e, a, run=run, rtol=rtol, atol=atol + 4 * gap)
                    notes.append(
                        f"{name} on {run} inputs: torch itself differs by {gap:.1e} between float32 and float64"
                    )
        results += found
    failed = sorted((p for p in results if not p.ok), key=lambda p: p.max_rel, reverse=True)
    if failed:
        worst = failed[0]
        changed = state.changed()
        kept = (
            f"  forward changes {', '.join(changed)} of the model, which a file cannot: pass and return it instead.\n"
        )
        raise VerificationError(
            f"the exported file does not compute what torch computes: output {worst.name!r} differs by up to "
            f"{worst.max_abs:.3g} (relative {worst.max_rel:.3g}, cosine {worst.cosine:.6f}) on {worst.run} inputs, "
            f"{worst.mismatched} elements outside rtol={rtol:g}, atol={atol:g}; "
            f"{len(failed)} of {len(results)} comparisons fail. No file was written.\n"
            f"{kept if changed else ''}"
            "  Usual causes: random numbers or data-dependent Python branches in forward (traced once, for the given "
            "inputs). svexport.export(..., verify=False) writes the file anyway; svexport.compare(..., layers=True) "
            "then shows the first layer that differs",
            failed,
        )
    return results


def _float64_gaps(model: nn.Module, inputs: Sequence[Tensor], expected: Sequence[Tensor]) -> list[float]:
    """Per output, how far torch is from itself in float64; 0 where that cannot be told."""
    try:
        again = copy.deepcopy(model)(*(t.clone() for t in inputs))
        precise = copy.deepcopy(model).double()(*(t.double() if t.is_floating_point() else t.clone() for t in inputs))
    except Exception:  # noqa: BLE001 - a model tied to one dtype; the plain tolerance stands
        return [0.0] * len(expected)
    if not all(torch.equal(a, e) for a, e in zip(again, expected, strict=True)):
        return [0.0] * len(expected)  # random or stateful: its distance from itself excuses nothing
    gaps = [(p.double() - e.double()).abs().nan_to_num(0.0) for p, e in zip(precise, expected, strict=True)]
    return [float(g.max()) if g.numel() else 0.0 for g in gaps]


def _runs(
    tensors: Sequence[Tensor], names: Sequence[str], dynamic_axes: Mapping[str, Mapping[int, str]]
) -> Iterator[tuple[str, list[Tensor]]]:
    yield "given", list(tensors)
    yield "random", [random_like(t) for t in tensors]
    if dynamic_axes:
        sizes: dict[str, int] = {}
        changed = []
        for name, tensor in zip(names, tensors, strict=True):
            shape = list(tensor.shape)
            for axis, symbol in dynamic_axes.get(name, {}).items():
                shape[axis] = sizes.setdefault(symbol, shape[axis] + 1) if shape[axis] else 0
            changed.append(random_like(tensor, shape))
        yield ", ".join(f"{symbol}={size}" for symbol, size in sizes.items()), changed


def random_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Fresh values like the given ones, tiled or cut to ``shape``: each changed by about a tenth where floating point
    (so that what was a projection matrix still is one), drawn from among them for anything else."""
    tensor = tensor.detach()
    for axis, size in enumerate(tensor.shape if shape is None else shape):
        tensor = tensor.index_select(axis, torch.arange(size, device=tensor.device) % max(tensor.shape[axis], 1))
    if not tensor.numel():
        return tensor
    if not tensor.is_floating_point():  # indices and masks stay valid
        return tensor.flatten()[torch.randint(tensor.numel(), tensor.shape, device=tensor.device)]
    noise = torch.randn(tensor.shape, dtype=torch.float64, device=tensor.device)
    # Zeros alone say nothing: any values will do.
    return (tensor.double() * (1 + 0.1 * noise) if tensor.any() else noise).to(tensor.dtype)
