"""A cache of small derived tensors: keeping them between calls is cheaper than a launch for each."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from svexport.ops._op import tracing

__all__ = ["kept_of", "zeros"]

_of: WeakIdKeyDictionary = WeakIdKeyDictionary()
_zeros: dict[tuple[torch.device, torch.dtype, tuple[int, ...]], Tensor] = {}


def _keeps(like: Tensor) -> bool:
    """Whether a tensor made now is an ordinary one that can be cached; tracers, modes and CUDA graphs own theirs."""
    if tracing() or type(like) is not Tensor or torch.is_inference_mode_enabled() or like.is_inference():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    return not (like.is_cuda and torch.cuda.is_current_stream_capturing())


def kept_of(tensor: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """``make(tensor)``, cached until ``tensor`` is written to."""
    if not _keeps(tensor):
        return make(tensor)
    known = _of.get(tensor)
    if known is None or known[0] is not make or known[1] != tensor._version:
        known = make, tensor._version, make(tensor)
        _of[tensor] = known
    return known[2]


def zeros(like: Tensor, shape: tuple[int, ...], *, traced: bool = True) -> Tensor:
    """Zeros with the dtype and device of ``like``; callers must not write to them.

    Args:
        traced: whether a tracer may be running, which would record cached zeros as a constant.
    """
    key = like.device, like.dtype, shape
    if not traced and type(like) is Tensor and (known := _zeros.get(key)) is not None:
        return known
    if not _keeps(like):
        return like.new_zeros(shape)
    if key not in _zeros:
        _zeros[key] = like.new_zeros(shape)
    return _zeros[key]
