"""What torch leaves open, or does otherwise on a CPU than on CUDA, as files have it: for comparisons."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["AsInFiles"]

_SAMPLERS = {F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d}
_TOPK = {torch.topk, Tensor.topk}
_MOST_ROWS = 25
"""Between which torch computes distances as they are written."""


class AsInFiles(TorchFunctionMode):
    """Has ``topk(sorted=False)`` sort, ``F.grid_sample`` in half precision on a CPU count pixels in float32, ``cdist``
    subtract and ``searchsorted`` search what is sorted.

    Which order unsorted values come in is left to the device; files have them sorted, which TensorRT asks for.

    ATen's CPU kernels count pixels in half where CUDA's, and files, do so in float32: pixels off in an image 3000 wide,
    and NaN, or any pixel, for points so far outside that half has no number for them. Scripted code is not reached.

    Of many rows torch makes distances of one product of matrices, which is 1e-3 off where they are close. What is
    searched in has to be sorted, as inputs drawn for a comparison are not.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        """Of what is compared another way than torch has it here, one of each kind, once there was such a call."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _SAMPLERS:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            dtypes, devices = {x.dtype for x in given}, {x.device.type for x in given}
            if dtypes in ({torch.float16}, {torch.bfloat16}) and devices == {"cpu"}:
                (dtype,) = dtypes
                self._note(
                    f"grid_sample in {str(dtype).removeprefix('torch.')} is compared as torch has it on CUDA, with "
                    "coordinates in float32, which its CPU kernel rounds"
                )
                return func(*map(_float, args), **{k: _float(v) for k, v in kwargs.items()}).to(dtype)
        if func in _TOPK and not (args[4] if len(args) > 4 else kwargs.get("sorted", True)):
            self._note("topk(sorted=False) is compared in sorted order, which files have: torch's own may be any")
            return func(*args[:4], **{**kwargs, "sorted": True})
        if func is torch.cdist and max(x.shape[-2] for x in args[:2]) > _MOST_ROWS and _power(args, kwargs) == 2:
            self._note("cdist is compared by differences, as files have it: torch's product of matrices is less exact")
            return torch.cdist(args[0], args[1], compute_mode="donot_use_mm_for_euclid_dist")
        searched = args[0] if func is torch.searchsorted and args and kwargs.get("sorter") is None else None
        if searched is not None and bool((searched.diff(dim=-1) < 0).any()):
            self._note("searchsorted is compared in sorted order where what it searches in is not sorted")
            return func(searched.sort(-1).values, *args[1:], **kwargs)
        return func(*args, **kwargs)

    def _note(self, note: str) -> None:
        if note not in self.notes:
            self.notes.append(note)


def _power(args: tuple[Any, ...], kwargs: dict[str, Any]) -> float:
    return args[2] if len(args) > 2 else kwargs.get("p", 2)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
