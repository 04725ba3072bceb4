"""Whether a file computes what torch does: within the tolerances, or within torch's own rounding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from svexport.exporter.followed import Sizes
from svexport.exporter.rounding import Rounding, Tolerances
from svexport.exporter.way import Way
from svexport.parity import Parity, parity
from svexport.tracing.quantizers import largest
from svexport.tracing.ties import ORDERING, StableOrder

__all__ = [
    "CLOSEST",
    "AnotherWay",
    "agree",
    "allow_rounding",
    "closely",
    "held",
    "hold_closely",
    "jumps",
    "mostly_unlike",
    "same_way",
    "ties",
]

CLOSE = 2.0**-17
"""Relative to an output's largest number: torch and ONNX Runtime seldom differ by more."""

MOST_ROUNDING = 10.0
"""An output that differs by more than :data:`CLOSE` is held to this multiple of torch's own rounding."""

CLOSEST = 5.0
"""Multiple of torch's own rounding, as perturbations of one rounding error measure it; correct files stay below 2.5."""


class AnotherWay(Exception):
    """Values that Python reads from tensors lead to another branch."""


def jumps(
    model: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    found: Sequence[Parity],
) -> bool:
    """Whether tiny changes of the inputs change torch's own results as much as the file differs in ``found``; False if
    ``model`` raises :class:`AnotherWay` there."""
    for _ in range(2):
        near = [t + 1e-6 * (_size(t) * torch.randn_like(t)) if t.is_floating_point() else t.clone() for t in inputs]
        try:
            others = model(*near)
        except AnotherWay:
            return False
        except Exception:  # noqa: BLE001 - an error is the largest change
            return True
        for p, (_, e, _), other in zip(found, pairs, others, strict=True):
            if not p.ok and other.shape != e.shape:
                return True
            if not p.ok and e.numel() and not math.isinf(p.max_abs):
                own = parity("", e, other, rtol=p.rtol, atol=p.atol)
                if own.max_abs >= p.max_abs / 4 and 4 * own.mismatched >= p.mismatched:
                    return True
    return False


def _size(tensor: Tensor) -> float:
    """The largest magnitude in a tensor; 1 if the tensor is empty or zero."""
    return float(tensor.abs().amax()) or 1.0 if tensor.numel() else 1.0


def same_way(
    usual: Way, model: nn.Module, inputs: Sequence[Tensor], sizes: Callable[[], Sizes] | None, asked: bool, like: bool
) -> tuple[Sequence[Tensor], bool | None]:
    """Runs the model again. If ``asked``, also returns whether it took its usual steps, with the same Python numbers
    and only its own tensors: if every call does, the model remembers nothing.

    Args:
        like: whether the dtypes are the usual ones: a half model's copy in float64 may take other steps.

    Raises:
        AnotherWay: if Python branches differently on values.
    """
    if not usual.exits and not asked:
        return model(*inputs), None
    with Way(inputs, [*model.parameters(), *model.buffers()], sizes=sizes() if sizes else None) as way:
        results = model(*inputs)
    way.end(results)
    if (usual.exits or like) and not way.decides_like(usual):
        raise AnotherWay
    return results, way.same_flow(usual) and not way.foreign


def ties(model: nn.Module, inputs: Sequence[Tensor], actual: Sequence[Tensor], held_to: Tolerances) -> str:
    """The calls that order equal values differently from ONNX, if these explain every difference from the file."""
    expected, where = _ordered(model, inputs)
    return where if expected is not None and agree(expected, actual, held_to) else ""


def by_place(
    found: list[Parity],
    way: Way,
    model: nn.Module,
    inputs: Sequence[Tensor],
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    notes: list[str],
) -> None:
    """Accepts what agrees in ``found`` once torch orders equal values as ONNX does, by their places: all or none.

    Inputs that verification makes have many of them, as the scores of an empty image are, and any order is right. The
    given inputs are not made here: there a user sees the order.
    """
    run = found[0].run if found else "given"
    if run == "given" or not way.calls(ORDERING):
        return
    expected, where = _ordered(model, inputs)
    if not where or expected is None:
        return
    ordered = [
        parity(name, e, a, run=run, rtol=p.rtol, atol=p.atol)
        for p, e, (name, _, a) in zip(found, expected, pairs, strict=True)
    ]
    if all(p.ok for p in ordered):
        found[:] = ordered
        notes.append(f"{run} inputs: equal values come by their places, torch gives any order of them: {where}")


def _ordered(model: nn.Module, inputs: Sequence[Tensor]) -> tuple[Sequence[Tensor] | None, str]:
    """What the model computes where equal values come by their places, and the calls of which torch's order differs."""
    try:
        with StableOrder() as order:
            return model(*(t.clone() for t in inputs)), ", ".join(order.where)
    except Exception:  # noqa: BLE001 - the model may refuse another order
        return None, ""


def held(name: str, expected: Tensor, actual: Tensor, run: str, held_to: Tolerances, far: bool = False) -> Parity:
    """Compares an output of the file with torch's, within the tolerances of its run."""
    rtol, atol = held_to.held(expected, far)
    return parity(name, expected, actual, run=run, rtol=rtol, atol=atol)


def agree(expected: Sequence[Tensor], actual: Sequence[Tensor], held_to: Tolerances) -> bool:
    """Whether all results of two forwards agree within the tolerances."""
    return all(held("", e, a, "", held_to).ok for e, a in zip(expected, actual, strict=True))


def allow_rounding(
    found: list[Parity],
    rounding: Rounding,
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    held_to: Tolerances,
    notes: list[str],
) -> None:
    """Widens ``atol`` of the outputs in ``found`` whose difference torch's own rounding explains, and notes it.

    On the given inputs this is silent: it needs a default ``atol``, and floating-point outputs get no more than
    ``held_to.most`` allows.
    """
    for index, (name, e, a) in enumerate(pairs):
        p = found[index]
        if p.ok or not (own := rounding.allows(index, a, p.rtol, p.atol)):
            continue
        atol = p.atol + Rounding.FACTOR * own
        if p.run != "given":
            notes.append(
                f"{name} on {p.run} inputs: the file differs from torch by {p.max_abs:.1e}, and torch differs from "
                f"itself by {own:.1e} when its rounding errors change (values that cancel, or are nearly equal)"
            )
        elif held_to.atol is not None or (e.is_floating_point() and atol > held_to.most[1]):
            continue
        found[index] = parity(name, e, a, run=p.run, rtol=p.rtol, atol=atol)


def closely(
    expected: Tensor,
    usual: tuple[float, float],
    own: float | None,
    most: float = MOST_ROUNDING,
    close: float = CLOSE,
) -> tuple[float, float]:
    """rtol and atol from torch's own rounding ``own``, if it is known: the larger of ``most`` times that and ``close``
    times the output's scale. The usual tolerances are kept if they are tighter."""
    scale = largest(expected)
    tight = math.inf if own is None else max(most * own, close * scale)
    return (0.0, tight) if tight < usual[1] + usual[0] * scale else usual


def hold_closely(found: list[Parity], rounding: Rounding, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Holds outputs in ``found`` that agree, but differ more than two runtimes usually do, to torch's own rounding."""
    for index, (name, e, a) in enumerate(pairs):
        if not e.is_floating_point():
            continue
        p, scale = found[index], largest(e)
        if p.max_abs <= CLOSE * scale:
            continue
        own = rounding.own(index, p.max_abs / MOST_ROUNDING)
        rtol, atol = closely(e, (p.rtol, p.atol), own)
        if p.max_abs > atol + rtol * scale:
            found[index] = parity(name, e, a, run=p.run, rtol=rtol, atol=atol)


def mostly_unlike(one: Tensor, other: Tensor) -> bool:
    """Whether a tenth or more of the elements differ by more than rounding; for integers, whether any differs."""
    if not one.is_floating_point():
        return not one.numel() or bool((one != other).any())
    return int(((one - other).abs() > 1e-3 * other.abs()).sum()) * 10 >= one.numel()
