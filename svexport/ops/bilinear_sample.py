"""Bilinear sampling in pixel coordinates with a validity mask: the sampler people wrote before GridSample existed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops._op import Op, check_floating_point

__all__ = ["BilinearSample", "bilinear_sample"]


def reference(image: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    height, width = image.shape[2:]
    precise = torch.promote_types(grid.dtype, torch.float32)  # half cannot hold pixel coordinates above 2048
    x, y = grid.to(precise).unbind(-1)  # (N, gH, gW) each
    mask = (x >= 0) & (y >= 0) & (x < width - 1) & (y < height - 1)  # false for NaN
    x, y = torch.where(mask, x, 0), torch.where(mask, y, 0)
    x0, y0 = x.floor(), y.floor()
    fx, fy = x - x0, y - y0
    corner = (y0 * width + x0).long()
    right, below = min(1, width - 1), width * min(1, height - 1)  # a map one pixel wide has nothing inside its mask

    pixels = image.flatten(2).to(torch.promote_types(image.dtype, torch.float32))  # (N, C, H*W)

    def corner_value(offset: int, weight: Tensor) -> Tensor:
        index = (corner + offset).flatten(1)[:, None].expand(-1, pixels.shape[1], -1)  # (N, C, gH*gW)
        return pixels.gather(2, index) * weight.flatten(1)[:, None]

    output = (
        corner_value(0, (1 - fx) * (1 - fy))
        + corner_value(right, fx * (1 - fy))
        + corner_value(below, (1 - fx) * fy)
        + corner_value(below + right, fx * fy)
    ).unflatten(2, grid.shape[1:3])
    output = torch.where(mask[:, None], output, 0)
    return output.to(image.dtype), mask[..., None].to(image.dtype)


def fake(image: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    return image.new_empty(*image.shape[:2], *grid.shape[1:3]), image.new_empty(*grid.shape[:3], 1)


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for n, c, h, w, gh, gw in [(2, 3, 5, 7, 4, 3), (1, 1, 2, 11, 1, 1), (3, 8, 13, 5, 7, 2)]:
        scale = make(1).new_tensor([w, h])
        yield make(n, c, h, w), make(n, gh, gw, 2).sigmoid() * scale * 1.2 - 0.1 * scale


OP = Op(
    name="bilinear_sample",
    schema="(Tensor image, Tensor grid) -> (Tensor output, Tensor mask)",
    reference=reference,
    fake=fake,
    samples=samples,
)


def bilinear_sample(image: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
    """Samples ``image`` bilinearly at pixel coordinates; zero wherever a coordinate lies outside.

    Shape:
        - image: ``(N, C, H, W)``, floating point
        - grid: ``(N, gH, gW, 2)``, pixel coordinates ``(x, y)``; ``(0, 0)`` is the centre of the first pixel. Kept in
          float32 at least, also for half inputs.
        - output: ``(N, C, gH, gW)``, the dtype of ``image``
        - mask: ``(N, gH, gW, 1)``, the dtype of ``image``: 1 where ``x >= 0 and y >= 0 and x < W-1 and y < H-1``, else
            0
          (NaN coordinates included), and ``output`` is 0 there.

    Inside the mask it equals ``torch.nn.functional.grid_sample(..., align_corners=True)`` at normalized coordinates.

    Raises:
        ValueError: on a rank, batch or last dimension other than these, or an image without a pixel.
        TypeError: if ``image`` is not floating point.
    """
    fits = image.dim() == 4 and grid.dim() == 4 and grid.shape[-1] == 2 and image.shape[0] == grid.shape[0]
    if not fits or 0 in image.shape[2:]:
        raise ValueError(
            "bilinear_sample expects image (N, C, H, W), H and W not 0, and grid (N, gH, gW, 2) of the same N; "
            f"got image {tuple(image.shape)} and grid {tuple(grid.shape)}"
        )
    check_floating_point("bilinear_sample", "image", image)
    return OP(image, grid)


class BilinearSample(nn.Module):
    """Module form of :func:`bilinear_sample`; it has no parameters."""

    def forward(self, image: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
        """``(N, C, H, W)`` and pixels ``(N, gH, gW, 2)`` to ``(N, C, gH, gW)`` and the mask ``(N, gH, gW, 1)``."""
        return bilinear_sample(image, grid)
