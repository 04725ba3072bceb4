"""Proof of an exported file: ONNX Runtime against torch, on the given inputs and on fresh ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from svexport.errors import VerificationError
from svexport.parity import Parity, parity

__all__ = ["random_like", "verify"]


def verify(
    reference: Callable[..., Sequence[Tensor]],
    path: Path,
    tensors: Sequence[Tensor],
    output_names: Sequence[str],
    *,
    input_names: Sequence[str] = (),
    dynamic_axes: Mapping[str, Mapping[int, str]] | None = None,
    rtol: float,
    atol: float,
) -> list[Parity]:
    """Compares every output on the given inputs, on random ones, and with every dynamic size changed.

    Raises:
        VerificationError: if any output differs, the worst one named.
    """
    from svexport.runtime.session import OnnxEngine

    engine = OnnxEngine(path, device="cpu")
    results: list[Parity] = []
    for run, inputs in _runs(tensors, input_names, dynamic_axes or {}):
        try:
            expected = reference(*inputs)
        except Exception:
            if run in ("given", "random"):
                raise
            continue  # the model itself does not take these sizes
        actual = engine.run([t.detach().cpu() for t in inputs])
        for name, e, a in zip(output_names, expected, actual, strict=True):
            results.append(parity(name, e, a, run=run, rtol=rtol, atol=atol))
    failed = sorted((p for p in results if not p.ok), key=lambda p: p.max_rel, reverse=True)
    if failed:
        worst = failed[0]
        raise VerificationError(
            f"the exported file does not compute what torch computes: output {worst.name!r} differs by up to "
            f"{worst.max_abs:.3g} (relative {worst.max_rel:.3g}, cosine {worst.cosine:.6f}) on {worst.run} inputs, "
            f"{worst.mismatched} elements outside rtol={rtol:g}, atol={atol:g}; "
            f"{len(failed)} of {len(results)} comparisons fail. No file was written.\n"
            "  Usual causes: random numbers or data-dependent Python branches in forward (traced once, for the given "
            "inputs). svexport.export(..., verify=False) writes the file anyway; svexport.compare(..., layers=True) "
            "then shows the first layer that differs",
            failed,
        )
    return results


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
                shape[axis] = sizes.setdefault(symbol, shape[axis] + 1)
            changed.append(random_like(tensor, shape))
        yield ", ".join(f"{symbol}={size}" for symbol, size in sizes.items()), changed


def random_like(tensor: Tensor, shape: Sequence[int] | None = None) -> Tensor:
    """Fresh values in the range of the given ones: uniform for floating point, drawn from its own for anything else."""
    shape = tuple(tensor.shape if shape is None else shape)
    tensor = tensor.detach()
    if not tensor.numel():
        return tensor.new_zeros(shape)
    if not tensor.is_floating_point():  # indices and masks stay valid
        return tensor.flatten()[torch.randint(tensor.numel(), shape, device=tensor.device)]
    finite = tensor[tensor.isfinite()].float()
    low, high = (float(finite.min()), float(finite.max())) if finite.numel() else (0.0, 0.0)
    if low == high:  # a constant says nothing about the range
        low, high = low - 1.0, high + 1.0
    return torch.empty(shape, device=tensor.device).uniform_(low, high).to(tensor.dtype)
