"""``F.pad`` with ``mode="circular"``, which ONNX's Pad has only from opset 19."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = ["pad"]


def pad(input: Tensor, pad: Sequence[int], mode: str = "constant", value: float | None = None) -> Tensor:
    """``F.pad``, with ``mode="circular"`` as slices: the exporter writes ``mode="wrap"`` at any opset, which no version
    of TensorRT reads.

    As in torch, the last dimension comes first: negative pads crop, and the rest is repeated on either side.
    """
    if mode != "circular" or len(pad) % 2 or len(pad) > 2 * (input.dim() - 1):
        return F.pad(input, pad, mode, value)
    F.pad(input, pad, mode, value)  # called only for its checks of the arguments
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
