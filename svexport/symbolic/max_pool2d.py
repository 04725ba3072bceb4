"""``SvMaxPool2d``: the body is one MaxPool; an image without a batch becomes a batch of one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from svexport.ops.max_pool2d import OP
from svexport.symbolic._builder import Builder, Value
from svexport.symbolic._symbolic import Symbolic, TensorInfo

__all__: list[str] = []


def body(
    b: Builder,
    input: Value,
    kernel_size: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    ceil_mode: bool,
) -> Value:
    attributes: dict[str, Any] = {
        "kernel_shape": list(kernel_size),
        "strides": list(stride or kernel_size),
        "pads": [*padding, *padding],
        "dilations": None if set(dilation) == {1} else list(dilation),  # from opset 10
        "ceil_mode": int(ceil_mode) or None,
    }
    if input.rank == 4:
        return b.op("MaxPool", input, **attributes)
    return b.squeeze(b.op("MaxPool", b.unsqueeze(input, 0), shape=(None,) * 4, **attributes), 0)


def convert(input: TensorInfo, *numbers: Sequence[int] | bool) -> tuple[Any, ...] | None:
    """``aten::max_pool2d`` without a batch."""
    if input.shape is None or len(input.shape) != 3:
        return None
    return (input, *(list(n) * (2 // len(n)) if isinstance(n, (list, tuple)) and n else n for n in numbers))


Symbolic(OP, body, aten={"max_pool2d": convert}, until=20)
