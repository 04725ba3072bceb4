"""``F.pad`` in a mode that ONNX's Pad has only from opset 19 on."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["pad"]


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """``F.pad``; of ``mode="circular"`` in slices, for the exporter writes ``mode="wrap"`` at any opset, which no
    version of TensorRT reads.

    As torch does, the last dimension first: negative pads crop, and what is left is repeated on either side.
    """
    if mode != "circular" or len(pad) % 2 or len(pad) > 2 * (input.dim() - 1):
        return F.pad(input, pad, mode, value)
    F.pad(input, pad, mode, value)  # refuses what it does not take, and is dropped
    for index in range(len(pad) // 2):
        before, after = pad[2 * index : 2 * index + 2]
        dim = input.dim() - 1 - index
        start, stop = max(0, -before), input.shape[dim] - max(0, -after)
        input = input.narrow(dim, start, stop - start)
        parts = [input]
        if before > 0:
            parts.insert(0, input.narrow(dim, stop - start - before, before))
        if after > 0:
            parts.append(input.narrow(dim, 0, after))
        input = torch.cat(parts, dim) if len(parts) > 1 else input
    return input
