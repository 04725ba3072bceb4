"""Proof of an exported file: ONNX Runtime against torch, on the given inputs and on fresh ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from svexport.errors import EngineError, VerificationError
from svexport.exporter.as_in_files import AsInFiles
from svexport.exporter.quantizers import allow_steps
from svexport.exporter.rounding import Rounding, Tolerances
from svexport.exporter.sizes import Size, tiled
from svexport.exporter.state import State
from svexport.exporter.ties import StableOrder
from svexport.exporter.way import Way
from svexport.parity import Parity, parity
from svexport.progress import phase

__all__ = ["verify"]

_ANYWAY = "svexport.export(..., verify=False) writes the file anyway"

_KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "negated": (torch.neg, torch.logical_not),
    "hundredfold": (lambda x: x * 100, torch.clone),
    "zero": (torch.zeros_like, torch.zeros_like),
}
"""Inputs of another kind than the given ones, for models that decide by values: of floating-point numbers, of masks."""


def verify(
    model: nn.Module,
    path: Path,
    tensors: Sequence[Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    dynamic_axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
    held_to: Tolerances,
    notes: list[str],
    warned: Sequence[str],
    state: State,
) -> list[Parity]:
    """Compares every output on the given inputs, on random ones, and with every dynamic size changed.

    What an output is held to is relative to its own scale. Where torch in float32 is itself further from float64 than
    that, a file cannot do better: what it differs by is allowed as far as torch's own rounding explains it, and noted
    of inputs that are not the given ones, for those may be what a model was never meant for.

    A quantizer makes a whole step of a rounding error on the border of two. Elements that torch, too, takes for the
    other step once what it rounds changes by some rounding errors are allowed, and noted.

    ``F.grid_sample`` in half precision is torch's as on CUDA, and ``topk(sorted=False)`` sorts (:class:`AsInFiles`),
    which is noted.

    If Python takes values out of tensors, or the tracer has ``warned`` of it, inputs of other kinds are tried as well,
    and compared where forward goes a way with them that it has not gone before.

    Raises:
        VerificationError: if any output differs, the worst one named, or the file does not run.
    """
    from svexport.runtime.session import OnnxEngine

    try:
        engine = OnnxEngine(path, device="cpu")
    except EngineError as error:
        raise VerificationError(f"{error}. No file was written.\n  {_ANYWAY}") from error
    results: list[Parity] = []
    ways: dict[str, Way] = {}
    as_files = AsInFiles()
    failing: dict[str, tuple[list[Tensor], list[Tensor]]] = {}  # inputs and what the file made of them, by run
    infinite: dict[Parity, tuple[int, int]] = {}  # how many elements of torch's result and of the file's
    for alternatives in _runs(
        tensors, input_names, dynamic_axes, sizes, lambda: bool(warned) or ways["given"].takes_values
    ):
        refusals: dict[str, Exception] = {}
        for run, inputs in alternatives:
            phase(f"verifying, {run} inputs")
            arguments = [t.clone() for t in inputs]  # a model may work on its inputs in place
            try:
                with as_files, Way([*arguments, *model.parameters(), *model.buffers()]) as ways[run]:
                    expected = model(*arguments)
                ways[run].end(expected)
                break
            except Exception as error:
                if run == "given":
                    raise
                refusals[run] = error
        else:
            if refusals.keys() <= _KINDS.keys():  # not what the model is for
                continue
            tried, first = " or ".join(refusals), next(iter(refusals.values()))
            notes.append(f"not verified with {tried}: the model itself fails there ({type(first).__name__}: {first})")
            continue
        if run in _KINDS and any(ways[run] == way for before, way in ways.items() if before != run):
            continue
        try:
            actual = engine.run([t.detach().cpu() for t in inputs])
        except EngineError as error:
            raise VerificationError(
                f"torch computes {run} inputs, the exported file does not: {error}. No file was written.\n"
                + _causes(
                    ways,
                    run,
                    warned,
                    "Usual cause: a number that the tracer took as it was, such as int(x.shape[0]), len(x) or the "
                    "groups of a convolution",
                )
                + _ANYWAY
            ) from error
        if len(expected) != len(actual):
            raise VerificationError(
                f"torch returns {len(expected)} tensors on {run} inputs, the exported file always {len(actual)}. "
                "No file was written.\n"
                + _causes(ways, run, warned, "How many come may not depend on the inputs or their sizes")
                + _ANYWAY
            )
        pairs = list(zip(output_names, expected, actual, strict=True))
        found = [_held(name, e, a, run, held_to) for name, e, a in pairs]
        if not all(p.ok for p in found):
            with as_files:
                allow_steps(found, model, inputs, pairs, notes)
        if not all(p.ok for p in found):
            with as_files:
                _allow_rounding(found, Rounding(model, inputs, expected), pairs, held_to, notes)
        if not all(p.ok for p in found):
            failing[run] = inputs, actual
        results += found
        for p, (_, e, a) in zip(found, pairs, strict=True):
            if math.isinf(p.max_abs) and e.shape == a.shape and e.dtype == a.dtype:
                infinite[p] = int((~e.isfinite()).sum()), int((~a.isfinite()).sum())
    notes += as_files.notes
    failed = sorted((p for p in results if not p.ok), key=lambda p: p.max_rel, reverse=True)
    if failed:
        worst = failed[0]
        changed = state.changed()
        kept = (
            f"  forward changes {', '.join(changed)} of the model, which a file cannot: pass and return it instead.\n"
        )
        kinds = {str(t.dtype) for t in (*model.parameters(), *model.buffers())} | {f"torch.{worst.dtype}"}
        half = (
            "half precision itself, in which every runtime rounds its own way (give rtol and atol to allow more) and "
            "argmax and topk may take another of values that are nearly equal (compare what they take it from), "
        )
        usual = (
            f"Usual causes: {half if kinds & {'torch.float16', 'torch.bfloat16'} else ''}random numbers or "
            "data-dependent Python branches in forward (traced once, for the given inputs)"
        )
        if worst in infinite:
            own, its = infinite[worst]
            usual = (
                f"{own} elements of torch's result are NaN or infinite, {its} of the file's: a number became too large "
                "for its type, or was divided by zero, of which runtimes need not make the same"
            )
        elif "(came as " in worst.name:
            usual = (
                f"torch's result is {worst.dtype}{list(worst.shape)}: the exporter has lost that, which another one "
                "(opset 17 or less, 18 or more) need not do"
            )
        with as_files:
            ties = _ties(model, *failing[worst.run], held_to)
        if ties:
            usual = (
                f"Some values are equal, which torch may return in any order, ONNX by their places: {ties}. Nothing "
                "else differs. Use torch.sort(x, dim=-1, descending=True, stable=True), or values that are never equal"
            )
        raise VerificationError(
            f"the exported file does not compute what torch computes: output {worst.name!r} differs by up to "
            f"{worst.max_abs:.3g} (relative {worst.max_rel:.3g}, cosine {worst.cosine:.6f}) on {worst.run} inputs, "
            f"{worst.mismatched} elements outside rtol={worst.rtol:g}, atol={worst.atol:.3g}; "
            f"{len(failed)} of {len(results)} comparisons fail. No file was written.\n"
            f"{kept if changed else ''}"
            + _causes(ways, worst.run, warned, usual)
            + f"{_ANYWAY}; svexport.compare(..., layers=True) then shows the first layer that differs",
            failed,
        )
    return results


def _causes(ways: Mapping[str, Way], run: str, warned: Sequence[str], usual: str) -> str:
    """What an error says of its causes: where forward went another way than with the given inputs, or guesses."""
    if where := ways["given"].parting(ways[run]):
        return (
            f"  forward takes values out of tensors, which are others there than on the given inputs, at {where}\n"
            "  A file has one way for all inputs: compute both and choose by torch.where, or make a constant of it. "
        )
    return "".join(f"  {warning}\n" for warning in warned[:5]) + f"  {usual}. "


def _ties(model: nn.Module, inputs: Sequence[Tensor], actual: Sequence[Tensor], held_to: Tolerances) -> str:
    """The calls that order equal values another way than ONNX does, if torch agrees with the file but for them."""
    try:
        with StableOrder() as order:
            expected = model(*(t.clone() for t in inputs))
    except Exception:  # noqa: BLE001 - a model that knows what it gets from torch; only the explanation would be lost
        return ""
    agrees = all(_held("", e, a, "", held_to).ok for e, a in zip(expected, actual, strict=True))
    return ", ".join(order.where) if agrees else ""


def _held(name: str, expected: Tensor, actual: Tensor, run: str, held_to: Tolerances) -> Parity:
    rtol, atol = held_to.held(expected)
    return parity(name, expected, actual, run=run, rtol=rtol, atol=atol)


def _allow_rounding(
    found: list[Parity],
    rounding: Rounding,
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    held_to: Tolerances,
    notes: list[str],
) -> None:
    """Of ``found``, allows what torch's own rounding explains; on the given inputs up to what is held to at most."""
    for index, (name, e, a) in enumerate(pairs):
        p = found[index]
        if p.ok or not (own := rounding.allows(index, a, p.rtol, p.atol)):
            continue
        atol = p.atol + Rounding.FACTOR * own
        if p.run != "given":
            notes.append(f"{name} on {p.run} inputs: torch itself differs by {own:.1e} between float32 and float64")
        elif held_to.atol is not None or (e.is_floating_point() and atol > held_to.most[1]):
            continue
        found[index] = parity(name, e, a, run=p.run, rtol=p.rtol, atol=atol)


def _runs(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
    branches: Callable[[], bool],
) -> Iterator[Iterable[tuple[str, list[Tensor]]]]:
    """Names and inputs of each run; of several, the first that the model takes."""
    yield [("given", list(tensors))]
    yield (("random", inputs) for inputs in _random(tensors, [t.shape for t in tensors]))
    if dynamic_axes:
        yield _resized(tensors, names, dynamic_axes, sizes)
    if branches():
        yield from ([(kind, [_of_kind(kind, t) for t in tensors])] for kind in _KINDS)


def _of_kind(kind: str, tensor: Tensor) -> Tensor:
    number, mask = _KINDS[kind]
    return number(tensor) if tensor.is_floating_point() else mask(tensor) if tensor.dtype == torch.bool else tensor


def _resized(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
) -> Iterator[tuple[str, list[Tensor]]]:
    """Every dynamic size one larger, or as a model needs it that halves its sizes, or divides them by other numbers."""
    tried = set()
    for larger in (lambda n: n + 1, lambda n: n + (n & -n), lambda n: 2 * n):
        shapes = [list(tensor.shape) for tensor in tensors]
        roots: dict[str, int] = {}
        for name, shape in zip(names, shapes, strict=True):
            for axis, symbol in dynamic_axes.get(name, {}).items():
                size = sizes[symbol]
                root = roots.setdefault(size.root, size.other(shape[axis], larger))
                shape[axis] = size.size(root)
        run = ", ".join(f"{root}={size}" for root, size in roots.items())
        if run not in tried:
            tried.add(run)
            yield from ((run, inputs) for inputs in _random(tensors, shapes))


def _random(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    """Everything random; or floating-point numbers alone, for integers may be sizes that fit one another."""
    yield [_random_like(t, shape) for t, shape in zip(tensors, shapes, strict=True)]
    if not all(t.is_floating_point() for t in tensors):
        yield [
            _random_like(t, shape) if t.is_floating_point() else tiled(t, shape)
            for t, shape in zip(tensors, shapes, strict=True)
        ]


def _random_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Fresh values like the given ones, tiled or cut to ``shape``: each changed by about a tenth where floating point
    (so that what was a projection matrix still is one), drawn from among them for anything else."""
    tensor = tiled(tensor, shape)
    if not tensor.numel():
        return tensor
    if not tensor.is_floating_point():  # indices and masks stay valid
        return tensor.flatten()[torch.randint(tensor.numel(), tensor.shape, device=tensor.device)]
    noise = torch.randn(tensor.shape, dtype=torch.float64, device=tensor.device)
    # Zeros alone say nothing: any values will do.
    return (tensor.double() * (1 + 0.1 * noise) if tensor.any() else noise).to(tensor.dtype)
