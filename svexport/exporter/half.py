"""Half precision as torch computes it on CUDA, for comparisons on a CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

__all__ = ["HalfSampling"]

_SAMPLERS = {F.grid_sample, torch.grid_sampler, torch.grid_sampler_2d, torch.grid_sampler_3d}


class HalfSampling(TorchFunctionMode):
    """Has ``F.grid_sample`` in half precision on a CPU count pixels in float32, as it does on CUDA, and as files do.

    ATen's CPU kernels count them in half: pixels off in an image 3000 wide, and NaN, or any pixel, for points so far
    outside that half has no number for them. Scripted code is not reached.
    """

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        """One, of what is compared, once there was such a call."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _SAMPLERS:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, Tensor)]
            (dtype, *others), devices = dict.fromkeys(x.dtype for x in given), {x.device.type for x in given}
            if dtype in (torch.float16, torch.bfloat16) and not others and devices == {"cpu"}:
                self.notes = [
                    f"grid_sample in {str(dtype).removeprefix('torch.')} is compared as torch has it on CUDA, with "
                    "coordinates in float32, which its CPU kernel rounds"
                ]
                return func(*map(_float, args), **{k: _float(v) for k, v in kwargs.items()}).to(dtype)
        return func(*args, **kwargs)


def _float(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) else value
