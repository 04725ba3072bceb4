"""Functions of which torch's exporters make something else than torch does, made of functions that they take.

What is right for one tracer is right for the other: both take these in place of their own conversions, TorchScript
while it traces (see ``decompose``), torch.export where it decomposes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.errors import UnsupportedError
from svexport.exporter.aten import made_by_torch
from svexport.exporter.aten.product import up_to_each
from svexport.exporter.aten.special import floating, log1p, polynomial
from svexport.exporter.masks import where

__all__ = ["EXACT", "floor_divide", "shapes_of_losses", "truncated"]


def _angle(x: Tensor) -> Tensor:
    """0 or pi, but of NaN. The exporters' own is of complex numbers, or calls for atan2."""
    x = floating(x)
    return torch.where(x < 0, math.pi, torch.where(x >= 0, 0.0, x)).to(x.dtype)


def _atan2(y: Tensor, x: Tensor) -> Tensor:
    """From the angle within an eighth of the circle; the exporters' own is wrong on the axes and of infinities."""
    kind = torch.result_type(y, x)
    kind = kind if kind.is_floating_point else torch.get_default_dtype()
    y, x = y.to(kind), x.to(kind)
    height, width = y.abs(), x.abs()
    steep = height > width
    short, long = torch.where(steep, width, height), torch.where(steep, height, width)
    diagonal = torch.where(long > 0, 1.0, 0.0).to(kind)
    angle = torch.where(short == long, diagonal, short / long).atan()
    angle = torch.where(steep, math.pi / 2 - angle, angle)
    angle = torch.where(_negative(x), math.pi - angle, angle)
    return torch.where(_negative(y), -angle, angle)


def _negative(x: Tensor) -> Tensor:
    """Negative numbers, and -0."""
    return torch.where(x == 0, 1 / x, x) < 0


def _left_shift(x: Any, places: Any) -> Tensor:
    """By multiplication, which TensorRT has and ONNX for signed integers; 0 beyond the type's bits."""
    x, places, _, bits = _shifted(x, places)
    if isinstance(places, int):
        inside = 0 <= places < bits
        return x * (2**places if places < bits - 1 else -(2**places)) if inside else torch.zeros_like(x)
    return x * 2**places


def _right_shift(x: Any, places: Any) -> Tensor:
    """By a division that rounds down; -1 or 0 beyond the type's bits."""
    x, places, kind, bits = _shifted(x, places)
    bits -= kind.is_signed
    beyond = torch.where(x < 0, -1, 0).to(kind)
    if isinstance(places, int):
        return torch.floor_divide(x, 2**places) if 0 <= places < bits else beyond
    quotient = torch.floor_divide(x, 2 ** places.clamp(0, bits - 1))
    return torch.where((places >= 0) & (places < bits), quotient, beyond)


def _shifted(x: Any, places: Any) -> tuple[Tensor, Any, torch.dtype, int]:
    """What is shifted, and by what, of the type of the result; that, and its bits."""
    kind = torch.result_type(x, places)
    if not isinstance(x, Tensor):
        x = torch.full_like(places, x, dtype=kind)
    return x.to(kind), places.to(kind) if isinstance(places, Tensor) else places, kind, torch.iinfo(kind).bits


def _log_sigmoid(x: Tensor) -> Tensor:
    """``log(sigmoid(x))`` is minus infinity from -18 on (in half precision -104 and -17)."""
    return -F.relu(-x) - log1p(torch.exp(-x.abs()))


def _log_add_exp(exp: Callable[[Tensor], Tensor], unit: float) -> Callable[..., Tensor]:
    """Of the larger one: the exporter's own exponentials overflow. ``unit``: the natural logarithm of the base."""

    def function(x: Tensor, y: Tensor) -> Tensor:
        x, y = floating(x), floating(y)
        more = log1p(exp(torch.where(x == y, 0.0, -(x - y).abs())))
        return torch.maximum(x, y) + (more if unit == 1 else more * (1 / unit))

    return function


def _log_cumsum_exp(x: Tensor, dim: int) -> Tensor:
    """Less the largest of all, as the exporter has it, small sums before a large number are gone."""
    if not x.dim():
        return x.clone()
    return up_to_each(x, dim, -math.inf)[0].logsumexp(-1).transpose(dim, -1)


def _cumulative(x: Tensor, dim: int, reduce: Callable[..., Tensor], worst: float) -> tuple[Tensor, Tensor]:
    """``cummax`` and ``cummin`` from all pairs of places; the last of several that are equal, or NaN."""
    if not x.dim():
        return x.clone(), torch.zeros_like(x, dtype=torch.int64)
    if not x.is_floating_point():
        worst = torch.iinfo(x.dtype).max if worst > 0 else torch.iinfo(x.dtype).min
    pairs, behind = up_to_each(x, dim, worst)
    values = reduce(pairs, -1, keepdim=True)
    same = pairs == values
    if x.is_floating_point():
        same = same | pairs.isnan()
    places = torch.where(same & ~behind, torch.arange(x.size(dim), device=x.device), -1).amax(-1)
    return values.squeeze(-1).transpose(dim, -1), places.transpose(dim, -1)


def _diagonal(x: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """By places: the exporters' own multiplies by a mask, which infinities and NaN beside the diagonal outlive."""
    x = x.movedim((dim1, dim2), (-2, -1))[..., max(-offset, 0) :, max(offset, 0) :]
    x = x[..., : x.shape[-1], :]
    places = torch.arange(x.shape[-2], device=x.device).unsqueeze(-1)
    return x.gather(-1, places.expand(*x.shape[:-1], 1)).squeeze(-1)


def floor_divide(x: Tensor, y: Any) -> Tensor:
    """``torch.floor_divide`` of one type; torch rounds no number to half precision here."""
    kind = torch.result_type(x, y)
    if kind.is_floating_point and kind.itemsize < 4 and not isinstance(y, Tensor):
        return torch.floor_divide(x.float(), y).to(kind)
    return torch.floor_divide(x.to(kind), y)


def truncated(x: Tensor) -> Tensor:
    """``torch.trunc`` of floating-point numbers."""
    return torch.where(x < 0, x.ceil(), x.floor())


def _trunc_divide(x: Tensor, y: Any, *, rounding_mode: str | None) -> Tensor:
    """The exporter's own goes through integers, which have no infinities and end at 2**63."""
    if rounding_mode is None:
        return torch.true_divide(x, y)
    if rounding_mode == "floor":
        return floor_divide(x, y)
    kind = torch.result_type(x, y)
    if kind.is_floating_point:
        return truncated(x.to(kind) / y)
    down = torch.floor_divide(x, y)
    rest = x - down * y
    return torch.where((down < 0) & (rest != 0), down + 1, down)


def _is_finite(x: Tensor) -> Tensor:
    """By comparison, as those below: IsInf is for two types, and TensorRT has it from 8.6 on."""
    return x.abs() < math.inf if x.is_floating_point() else torch.ones_like(x, dtype=torch.bool)


def _is_infinite(x: Tensor) -> Tensor:
    return x.abs() > torch.finfo(x.dtype).max if x.is_floating_point() else torch.zeros_like(x, dtype=torch.bool)


def _nan_to_num(
    x: Tensor, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Tensor:
    if not x.is_floating_point():
        return x.clone()
    last = torch.finfo(x.dtype).max
    high, low = (last if posinf is None else posinf), (-last if neginf is None else neginf)
    result = torch.where(x.isnan(), x.new_full((), nan or 0.0), x)
    if posinf is neginf is None and math.isfinite(nan or 0.0):  # in ONNX Runtime a fifth of the time of the others
        return result.clamp(-last, last)
    result = torch.where(x > last, x.new_full((), high), result)
    return torch.where(x < -last, x.new_full((), low), result)


def _sign_bit(x: Tensor) -> Tensor:
    return _negative(x) if x.is_floating_point() else x < 0


def _sign(x: Tensor) -> Tensor:
    """ONNX Runtime's Sign takes 32 bits of integers, and keeps NaN."""
    return torch.where(x > 0, 1, torch.where(x < 0, -1, 0)).to(x.dtype)


_ERFCC = (
    *(0.17087277, -0.82215223, 1.48851587, -1.13520398, 0.27886807),
    *(-0.18628806, 0.09678418, 0.37409196, 1.00002368, -1.26551223),
)


def _erfcx(x: Tensor) -> Tensor:
    """``exp(x * x) * erfc(x)``, whose factors overflow and vanish.

    Raises:
        UnsupportedError: of float64, for it is right to 1.2e-7.

    Source: W. Press et al., Numerical Recipes in C, 1992, section 6.2, ``erfcc``.
    """
    if x.dtype == torch.float64:
        raise UnsupportedError("erfcx and log_ndtr of float64 have no exact form in ONNX; compute them in float32")
    kind = floating(x).dtype
    x = floating(x).to(torch.promote_types(kind, torch.float32))
    t = 1 / (1 + 0.5 * x.abs())
    scaled = t * torch.exp(polynomial(t, _ERFCC))
    return torch.where(x < 0, 2 * torch.exp(x * x) - scaled, scaled).to(kind)


def _log_ndtr(x: Tensor) -> Tensor:
    """The logarithm of a probability that is 0 in floating point below -14."""
    kind = floating(x).dtype
    x = floating(x).to(torch.promote_types(kind, torch.float32))
    z = x.abs() * math.sqrt(0.5)
    half = 0.5 * _erfcx(z)
    return torch.where(x < 0, torch.log(half) - z * z, torch.log(1 - half * torch.exp(-z * z))).to(kind)


def _diagonal_scatter(x: Tensor, source: Tensor, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Tensor:
    """Chosen by place: the exporters write into a copy, or lose what is written."""
    moved = x.movedim((dim1, dim2), (-2, -1))
    row, column = (torch.arange(n, device=x.device) for n in moved.shape[-2:])
    place = row - max(-offset, 0)
    count = source.shape[-1]
    if not count:
        return x.clone()
    spread = source.index_select(-1, place.clamp(0, count - 1)).unsqueeze(-1)  # (..., rows, 1)
    here = (column - row.unsqueeze(-1)) == offset
    return where(here, spread, moved).movedim((-2, -1), (dim1, dim2))


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Any = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Tensor:
    """The exporter's own raises negative numbers to powers."""
    kind = dtype or x.dtype
    x = x.to(kind)
    if not x.dim():
        x, dim, keepdim = x.reshape(1), 0, False
    dims = [dim] if isinstance(dim, int) else list(dim or range(x.dim()))
    norms: dict[float, Callable[[], Tensor]] = {
        0: lambda: (x != 0).to(kind).sum(dims, keepdim),
        1: lambda: x.abs().sum(dims, keepdim),
        2: lambda: (x * x).sum(dims, keepdim).sqrt(),
        math.inf: lambda: x.abs().amax(dims, keepdim),
        -math.inf: lambda: x.abs().amin(dims, keepdim),
    }
    return norms.get(ord, lambda: (x.abs() ** ord).sum(dims, keepdim) ** (1 / ord))()


@contextmanager
def shapes_of_losses() -> Iterator[None]:
    """Has torch tell the shapes of losses by what its C++ makes of them. For dynamic sizes it asks its Python, which
    knows reductions by name where functions have numbers, and gives the loss of every sample the shape of one."""
    table, losses = torch._decomp.decomposition_table, ("hinge_embedding_loss", "margin_ranking_loss", "nll_loss")
    own = {f: table.pop(f) for f in (getattr(torch.ops.aten, name).default for name in losses) if f in table}
    try:
        yield
    finally:
        table.update(own)


_MADE_BY_TORCH = (
    *("atleast_1d.Sequence", "atleast_2d.Sequence", "atleast_3d.Sequence", "binary_cross_entropy_with_logits"),
    *("column_stack", "dstack", "float_power.Tensor_Scalar", "float_power.Tensor_Tensor", "hstack", "isclose"),
    *("logit", "movedim.int", "movedim.intlist", "native_batch_norm", "row_stack", "vstack"),
)
"""Of these the exporters make something else than torch does, of what torch makes of them they do not."""

EXACT: dict[str, Callable[..., Any]] = {
    **{f"aten::{name}": made_by_torch(f"aten::{name}") for name in _MADE_BY_TORCH},
    "aten::angle": _angle,
    "aten::atan2": _atan2,
    **{f"aten::{name}": _left_shift for name in ("__lshift__.Scalar", "__lshift__.Tensor")},
    **{f"aten::{name}": _right_shift for name in ("__rshift__.Scalar", "__rshift__.Tensor")},
    **{f"aten::bitwise_left_shift.{form}": _left_shift for form in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")},
    **{f"aten::bitwise_right_shift.{form}": _right_shift for form in ("Tensor", "Tensor_Scalar", "Scalar_Tensor")},
    "aten::cummax": lambda x, dim: _cumulative(x, dim, torch.amax, -math.inf),
    "aten::cummin": lambda x, dim: _cumulative(x, dim, torch.amin, math.inf),
    **{f"aten::diagonal{form}": _diagonal for form in ("", "_copy")},
    "aten::diagonal_scatter": _diagonal_scatter,
    **{f"aten::div.{form}_mode": _trunc_divide for form in ("Scalar", "Tensor")},
    "aten::isfinite": _is_finite,
    "aten::isinf": _is_infinite,
    "aten::linalg_vector_norm": _vector_norm,
    "aten::log_sigmoid": _log_sigmoid,
    "aten::logaddexp": _log_add_exp(torch.exp, 1),
    "aten::logaddexp2": _log_add_exp(torch.exp2, math.log(2)),
    "aten::logcumsumexp": _log_cumsum_exp,
    "aten::nan_to_num": _nan_to_num,
    "aten::sign": _sign,
    "aten::signbit": _sign_bit,
    "aten::special_erfcx": _erfcx,
    "aten::special_log_ndtr": _log_ndtr,
}
"""By the overload of ATen."""
