"""The functions that ``svexport.replace`` knows: torch's, and those of other packages, by name and signature."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport import ops
from svexport.ops._kept import kept_of

__all__ = ["FUNCTIONS", "NAMES", "WHOLES", "Function", "deform_attn", "parameters", "starts_of", "unfit", "whole"]


class Function(NamedTuple):
    """A function of torch and what takes its place.

    Attributes:
        theirs: torch's.
        ours: with the same parameters. What our op does not have, such as ``out``, it leaves to torch.
        op: the op's name, ``"inverse"``.
    """

    theirs: Callable[..., Any]
    ours: Callable[..., Any]
    op: str


def _inv(A: Tensor, *, out: Tensor | None = None) -> Tensor:
    return ops.inverse(A) if out is None else torch.linalg.inv(A, out=out)


def _inverse(input: Tensor, *, out: Tensor | None = None) -> Tensor:
    return ops.inverse(input) if out is None else torch.inverse(input, out=out)


def _inverse_of(self: Any) -> Any:
    """A method is called by its name, of whatever has one."""
    return ops.inverse(self) if isinstance(self, Tensor) else self.inverse()


def _solve(A: Tensor, B: Tensor, *, left: bool = True, out: Tensor | None = None) -> Tensor:
    return ops.solve(A, B, left=left) if out is None else torch.linalg.solve(A, B, left=left, out=out)


FUNCTIONS: dict[str, Function] = {
    "torch.einsum": Function(torch.einsum, ops.einsum, "einsum"),
    "torch.nn.functional.grid_sample": Function(F.grid_sample, ops.grid_sample, "grid_sample"),
    "torch.linalg.inv": Function(torch.linalg.inv, _inv, "inverse"),
    "torch.inverse": Function(torch.inverse, _inverse, "inverse"),
    "torch.Tensor.inverse": Function(torch.Tensor.inverse, _inverse_of, "inverse"),
    "torch.linalg.solve": Function(torch.linalg.solve, _solve, "solve"),
}
"""By the name that reports have."""

NAMES = {function.theirs: name for name, function in FUNCTIONS.items()}


# ------------------------------------------------------------------ whole functions


def deform_attn(
    value: Tensor, value_spatial_shapes: Any, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    """:func:`svexport.ops.ms_deform_attn` of levels one after the other, by sizes alone."""
    shapes = torch.as_tensor(value_spatial_shapes, device=value.device)
    return ops.ms_deform_attn(value, shapes, starts_of(shapes), sampling_locations, attention_weights)


def starts_of(shapes: Tensor) -> Tensor:
    """The start of each level among all pixels; cached until the sizes are written to."""
    return kept_of(shapes, _starts)


def _starts(shapes: Tensor) -> Tensor:
    sizes = shapes.prod(-1)
    return sizes.cumsum(0) - sizes


def _ms_deform_attn_core(
    value: Tensor, spatial_shapes: Any, sampling_locations: Tensor, attention_weights: Tensor
) -> Tensor:
    return deform_attn(value, spatial_shapes, sampling_locations, attention_weights)


def _bilinear_grid_sample(im: Tensor, grid: Tensor, align_corners: bool = False) -> Tensor:
    return ops.grid_sample(im, grid, align_corners=align_corners)


WHOLES: dict[str, Sequence[tuple[Callable[..., Any], str]]] = {
    # mmcv, Deformable DETR and those after it, Hugging Face, RT-DETR
    **dict.fromkeys(
        (
            "multi_scale_deformable_attn_pytorch",
            "ms_deform_attn_core_pytorch",
            "multi_scale_deformable_attention",
            "deformable_attention_core_func",
        ),
        ((deform_attn, "ms_deform_attn"), (_ms_deform_attn_core, "ms_deform_attn")),
    ),
    "bilinear_grid_sample": ((_bilinear_grid_sample, "grid_sample"),),  # mmcv
}
"""By the name of a function, wherever it is defined: what may take its place, and the name of the op. One fits that has
the parameters of that function."""


def parameters(code: CodeType) -> tuple[str, ...]:
    """The names of a function's parameters."""
    stars = bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + stars]


def whole(code: CodeType) -> tuple[Callable[..., Any], str] | None:
    """The replacement of a whole function with this code, and the op's name."""
    for ours, op in WHOLES.get(code.co_name, ()):
        if parameters(ours.__code__) == parameters(code):  # type: ignore[attr-defined]
            return ours, op
    return None


def unfit(code: CodeType) -> str:
    """Why a function with a known name is not that one: its parameters."""
    expected = " or ".join(
        f"({', '.join(parameters(ours.__code__))})"  # type: ignore[attr-defined]
        for ours, _ in WHOLES[code.co_name]
    )
    return f"expects {code.co_name}{expected}, got ({', '.join(parameters(code))})"
