"""``deform_conv2d`` beside torchvision's, and beside torch's convolution, which reads at fixed places.

torchvision launches its kernels on the default stream, so that no graph captures them.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from random import Random

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import _random
from benchmarks._measure import Workload
from svexport.ops.deform_conv2d import OP


def arguments(
    n: int,
    channels: int,
    outputs: int,
    size: tuple[int, int],
    dtype: torch.dtype,
    *,
    kernel: int = 3,
    stride: int = 1,
    dilation: int = 1,
    groups: int = 1,
    offset_groups: int = 1,
    mask: bool = True,
    layout: torch.memory_format = torch.contiguous_format,
) -> tuple[str, list, list]:
    """A name, the arguments of the op, and those of torchvision's."""
    padding = dilation * (kernel - 1) // 2
    out = [(s + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1 for s in size]
    taps = offset_groups * kernel * kernel

    def make(*shape: int) -> Tensor:
        return torch.randn(shape, device="cuda")

    tensors = [
        make(n, channels, *size),
        make(n, 2 * taps, *out) * 2,
        make(outputs, channels // groups, kernel, kernel) * (channels * kernel * kernel / groups) ** -0.5,
        make(outputs),
        make(n, taps, *out).sigmoid() if mask else None,
    ]
    image, offset, weight, bias, factors = (None if t is None else t.to(dtype) for t in tensors)
    image = image.to(memory_format=layout)
    weight = weight.to(memory_format=layout)
    numbers = [[stride] * 2, [padding] * 2, [dilation] * 2]
    ours = [image, offset, weight, bias, factors, *numbers, groups, offset_groups, 1.0]
    text = f"{n}x{channels}x{size[0]}x{size[1]} to {outputs}, {kernel}x{kernel}"
    for key, value, default in (
        ("stride", stride, 1),
        ("dilation", dilation, 1),
        ("groups", groups, 1),
        ("offset_groups", offset_groups, 1),
        ("mask", mask, True),
    ):
        text += "" if value == default else f" {key} {value}"
    text += f" {str(dtype)[6:]}" + (" channels_last" if layout == torch.channels_last else "")
    return text, ours, [image, offset, weight, bias, *numbers, factors]


def traffic(args: list) -> int:
    return sum(t.numel() * t.element_size() for t in args if isinstance(t, Tensor))


def forward(*sizes: object, **options: object) -> Workload:
    from torchvision.ops import deform_conv2d

    text, ours, theirs = arguments(*sizes, **options)
    image, offset, weight, bias = theirs[:4]
    output = image.new_empty(image.shape[0], weight.shape[0], *offset.shape[2:])
    return Workload(
        f"deform_conv2d {text}",
        lambda: OP(*ours),
        {
            "torchvision": lambda: deform_conv2d(*theirs),
            "conv2d": lambda: F.conv2d(image, weight, bias, *theirs[4:7], ours[8]),
        },
        bytes=traffic([*ours, output]),
        goal=1.0,
        capturable=False,
    )


def backward(*sizes: object, **options: object) -> Workload:
    from torchvision.ops import deform_conv2d

    text, ours, theirs = arguments(*sizes, **options)
    theirs = [t.detach().requires_grad_() if isinstance(t, Tensor) else t for t in theirs]
    inputs = [t for t in theirs if isinstance(t, Tensor)]
    output = deform_conv2d(*theirs)
    grad = torch.randn_like(output)
    call = torch.ops.svexport.deform_conv2d_backward
    return Workload(
        f"deform_conv2d backward {text}",
        lambda: call([grad], *ours, [True] * len(inputs)),
        {"torchvision": lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)},
        bytes=2 * traffic(ours) + traffic([grad]),
        goal=1 / 2,
        capturable=False,
    )


def workloads() -> Iterator[Workload]:
    for dtype in (torch.float16, torch.float32):
        for size in ((58, 100), (29, 50)):
            for layout in (torch.contiguous_format, torch.channels_last):
                yield forward(1, 256, 256, size, dtype, layout=layout)
            yield backward(1, 256, 256, size, dtype)
        yield forward(6, 256, 256, (58, 100), dtype)
        yield backward(6, 256, 256, (58, 100), dtype)
        yield forward(1, 512, 512, (29, 50), dtype)
        yield backward(1, 512, 512, (29, 50), dtype)


def sweep() -> Iterator[Workload]:
    for dtype in (torch.float16, torch.float32):
        for n, size in ((1, (15, 25)), (2, (29, 50)), (4, (40, 40)), (1, (116, 200))):
            for channels, outputs in ((3, 64), (64, 64), (128, 130), (256, 27), (512, 512)):
                yield forward(n, channels, outputs, size, dtype)
        for options in (
            {"kernel": 1},
            {"kernel": 5},
            {"kernel": 7, "groups": 64},
            {"stride": 2},
            {"dilation": 3},
            {"groups": 2},
            {"groups": 32},
            {"groups": 64},
            {"offset_groups": 4},
            {"offset_groups": 64},
            {"groups": 4, "offset_groups": 8, "mask": False},
            {"mask": False},
        ):
            yield forward(2, 64, 64, (58, 100), dtype, **options)
            yield backward(2, 64, 64, (58, 100), dtype, **options)


def at_random(r: Random) -> Workload:
    def draw() -> tuple:
        kernel, groups, offset_groups = (
            r.choice([1, 3, 3, 3, 5]),
            r.choice([1, 1, 1, 1, 2, 4, 8]),
            r.choice([1, 1, 2, 4]),
        )
        height, both = _random.count(r, 5, 120), groups * offset_groups
        channels = -(-_random.size(r, 3, 512) // both) * both
        outputs = -(-_random.size(r, 8, 512) // groups) * groups
        return (r.choice([1, 1, 2, 4, 6]), channels, outputs, (height, round(height * r.uniform(0.7, 2)))), {
            "kernel": kernel,
            "stride": r.choice([1, 1, 2]),
            "dilation": r.choice([1, 1, 2]),
            "groups": groups,
            "offset_groups": offset_groups,
            "mask": r.random() < 0.7,
            "layout": _random.layout(r),
        }

    sizes, options = _random.drawn(
        draw, lambda s: s[0][0] * s[0][1] * math.prod(s[0][3]) * s[1]["kernel"] ** 2 < 2 * _random.LARGEST
    )
    function = r.choice([forward, forward, backward])
    if function is backward:
        options["layout"] = torch.contiguous_format  # torchvision's fails for some weights in channels-last
    return function(*sizes, r.choice([torch.float16, torch.float32]), **options)
