"""Decides whether a file agrees with torch: within tolerances, or within torch's own rounding errors."""

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
from svexport.tracing.ties import StableOrder

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
"""Relative to an output's largest number: a difference that torch and ONNX Runtime seldom exceed."""

MOST_ROUNDING = 10.0
"""Outputs that differ by more than CLOSE may differ by at most this multiple of torch's own rounding."""

CLOSEST = 5.0
"""Multiple of torch's own rounding, measured with perturbations of one rounding error; correct files stay below 2.5."""


class AnotherWay(Exception):
    """Values that Python takes of tensors decide another way."""


def jumps(
    model: Callable[..., Sequence[Tensor]],
    inputs: Sequence[Tensor],
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    found: Sequence[Parity],
) -> bool:
    """Whether torch's own results change as much as ``found`` says of the file's, where inputs hardly change; not if
    ``model`` raises :class:`AnotherWay` there."""
    for _ in range(2):
        near = [t + 1e-6 * (_size(t) * torch.randn_like(t)) if t.is_floating_point() else t.clone() for t in inputs]
        try:
            others = model(*near)
        except AnotherWay:
            return False
        except Exception:  # noqa: BLE001 - which is as far as can be
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
    """The largest number of a tensor, or 1 of nothing."""
    return float(tensor.abs().amax()) or 1.0 if tensor.numel() else 1.0


def same_way(
    usual: Way, model: nn.Module, inputs: Sequence[Tensor], sizes: Callable[[], Sizes] | None, asked: bool, like: bool
) -> tuple[Sequence[Tensor], bool | None]:
    """What a model computes once more, and, where that is ``asked``, whether by the steps of its usual way, of the same
    numbers of Python and tensors of its own: if all calls do, it remembers nothing.

    Args:
        like: whether in the types of the usual way: a half model's copy in float64 may take other steps.

    Raises:
        AnotherWay: where Python decides by values another way.
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
    """The calls that order equal values another way than ONNX does, if torch agrees with the file but for them."""
    try:
        with StableOrder() as order:
            expected = model(*(t.clone() for t in inputs))
    except Exception:  # noqa: BLE001 - a model that knows what it gets from torch; only the explanation would be lost
        return ""
    return ", ".join(order.where) if agree(expected, actual, held_to) else ""


def held(name: str, expected: Tensor, actual: Tensor, run: str, held_to: Tolerances, far: bool = False) -> Parity:
    """Compares an output of the file with torch's, with the tolerances of its run."""
    rtol, atol = held_to.held(expected, far)
    return parity(name, expected, actual, run=run, rtol=rtol, atol=atol)


def agree(expected: Sequence[Tensor], actual: Sequence[Tensor], held_to: Tolerances) -> bool:
    """Whether all results of one forward are those of another, within the tolerances."""
    return all(held("", e, a, "", held_to).ok for e, a in zip(expected, actual, strict=True))


def allow_rounding(
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
            notes.append(
                f"{name} on {p.run} inputs: the file differs by {p.max_abs:.1e}, torch by {own:.1e} from itself where "
                "its results change by rounding errors (values that cancel, or are nearly equal)"
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
    """rtol and atol by how far torch is from itself, where that is known and less than the usual ones: ``most`` times
    that, or ``close``."""
    scale = largest(expected)
    tight = math.inf if own is None else max(most * own, close * scale)
    return (0.0, tight) if tight < usual[1] + usual[0] * scale else usual


def hold_closely(found: list[Parity], rounding: Rounding, pairs: Sequence[tuple[str, Tensor, Tensor]]) -> None:
    """Of ``found``, which agrees, holds to torch's own rounding what is further apart than two runtimes usually are."""
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
    """Whether a tenth of the elements differs, by more than rounding."""
    if not one.is_floating_point():
        return not one.numel() or bool((one != other).any())
    return int(((one - other).abs() > 1e-3 * other.abs()).sum()) * 10 >= one.numel()
