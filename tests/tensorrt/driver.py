"""Launches an ahead-of-time kernel as TensorRT does: with the CUDA driver, called through ctypes."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["launch"]


def launch(
    code: bytes,
    name: str,
    grid: Sequence[int],
    block: int,
    shared: int,
    inputs: Sequence[Tensor],
    sizes: Sequence[int],
    outputs: Sequence[Tensor],
) -> None:
    """Runs a kernel on the current stream: its arguments are the inputs, the sizes and the outputs."""
    driver = ctypes.CDLL("libcuda.so.1")

    def call(function: str, *arguments: object) -> None:
        status = getattr(driver, function)(*arguments)
        if status:
            text = ctypes.c_char_p()
            driver.cuGetErrorString(status, ctypes.byref(text))
            raise RuntimeError(f"{function}: {(text.value or b'?').decode()}")

    torch.cuda.current_stream().synchronize()  # a context is current from here on
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    call("cuModuleGetFunction", ctypes.byref(function), module, name.encode())
    values = [
        *(ctypes.c_void_p(t.data_ptr()) for t in inputs),
        *(ctypes.c_int32(s) for s in sizes),
        *(ctypes.c_void_p(t.data_ptr()) for t in outputs),
    ]
    pointers = (ctypes.c_void_p * len(values))(*(ctypes.addressof(v) for v in values))
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    call("cuLaunchKernel", function, *grid, block, 1, 1, shared, stream, pointers, None)
    torch.cuda.synchronize()
    call("cuModuleUnload", module)
