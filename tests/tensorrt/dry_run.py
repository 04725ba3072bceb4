"""Prints as JSON, in a process of its own, how Torch-TensorRT would divide models between TensorRT and torch.

``python -m tests.tensorrt.dry_run STUB [plain]``: STUB is the compiled stub of TensorRT's libraries; ``plain`` leaves
out svexport's converters. If torch has no CUDA, stand-ins answer what Torch-TensorRT first asks of a device.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from svexport.errors import BackendNotAvailableError
from svexport.ops._op import OPS, Op
from svexport.tensorrt.nodes import plugin_ops

EXAMPLES = ("detr3d", "stgcn", "fused_decoder")


def main(stub: str, *options: str) -> dict[str, Any]:
    ctypes.CDLL(stub, mode=ctypes.RTLD_GLOBAL)
    cuda = torch.cuda.is_available()
    if not cuda:
        answer_for_device()
    import torch_tensorrt
    from torch_tensorrt.dynamo import _compiler

    if not cuda:
        for name, module in list(sys.modules.items()):
            if name.startswith("torch_tensorrt") and hasattr(module, "to_torch_device"):
                module.to_torch_device = lambda *args, **kwargs: torch.device("cpu")  # type: ignore[attr-defined]
    import svexport
    import svexport.tensorrt

    kinds = {} if "plain" in options else dict(svexport.tensorrt.register_torch_tensorrt().kinds)
    if kinds:
        svexport.tensorrt.register_torch_tensorrt()  # a second time changes nothing
    trackers: list[Any] = []
    _compiler.dryrun_stats_display = lambda tracker, enabled: trackers.append(tracker)

    def divided(model: nn.Module, args: tuple) -> dict[str, Any]:
        if cuda:
            model, args = model.cuda(), torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cuda, args)
        with torch.no_grad():
            program = torch.export.export(model, args, strict=False)
            torch_tensorrt.dynamo.compile(
                program, inputs=list(args), dryrun=True, min_block_size=1, device="cuda:0", immutable_weights=True
            )
        if not trackers:  # nothing for TensorRT at all
            return {"engines": 0, "supported": False, "torch": ["everything"]}
        found = trackers.pop()
        return {
            "engines": found.tensorrt_graph_count,
            "supported": found.supported_ops_in_graph == found.total_ops_in_graph,
            "torch": found.to_run_in_torch,
        }

    result: dict[str, Any] = {"version": torch_tensorrt.__version__, "kinds": kinds, "models": {}, "ops": {}}
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    for name in EXAMPLES:
        small = {"detr3d": {"config": "small"}, "stgcn": {"frames": 20}}.get(name, {})
        model = importlib.import_module(name).model(**small)
        args = tuple(model.example_inputs)
        result["models"][name] = divided(svexport.replace(model, args=args).eval(), args)
    result["models"]["F.grid_sample"] = divided(Sample(), (torch.randn(1, 2, 4, 5), torch.randn(1, 3, 3, 2)))
    result["models"]["F.grid_sample 5-D"] = divided(Sample(), (torch.randn(1, 2, 3, 4, 5), torch.randn(1, 2, 3, 3, 3)))
    if kinds:
        result["plugins"] = {op.name: converted(op) for op in plugin_ops()}
        result["models"]["inverse of 9x9"] = divided(Call(OPS["inverse"], (None, 9)), (torch.eye(9)[None],))
        for op in (op for op in OPS.values() if not op.inline):
            op_args = next(iter(op.samples(lambda *shape: torch.randn(shape))))
            tensors = tuple(a for a, argument in zip(op_args, op.arguments, strict=True) if argument.is_tensor)
            result["ops"][op.name] = divided(Call(op, op_args), tensors)
    return result


def converted(op: Op) -> dict[str, Any]:
    """What the converter of an op adds to a network."""
    from torch_tensorrt.dynamo import conversion

    added: list[Any] = []

    class Network:
        def add_plugin_v3(self, inputs: list, shape_inputs: list, plugin: Any) -> Any:
            added.append((inputs, shape_inputs, plugin))
            return SimpleNamespace(name="", get_output=lambda i: f"output {i}")

    args = next(iter(op.samples(lambda *shape: torch.randn(shape))))
    conversion.converter_utils.get_trt_tensor = lambda context, tensor, name: name
    convert = conversion.DYNAMO_ATEN_CONVERTERS[op.torch_op][0].converter_implementation
    try:
        outputs = convert(SimpleNamespace(net=Network()), op.torch_op, args, {}, "node")
    except BackendNotAvailableError as error:
        return {"error": str(error)}
    [(inputs, shape_inputs, plugin)] = added
    return {
        "inputs": inputs,
        "shape inputs": shape_inputs,
        "attributes": plugin.attributes,
        "type": plugin.plugin_name,
        "outputs": outputs,
    }


class Sample(nn.Module):
    def forward(self, image: torch.Tensor, grid: torch.Tensor) -> torch.Tensor:
        return nn.functional.grid_sample(image, grid, align_corners=False)


class Call(nn.Module):
    """An op as a model: tensors are its inputs, all else is fixed."""

    def __init__(self, op: Any, args: tuple) -> None:
        super().__init__()
        self.op, self.args = op, [None if a.is_tensor else v for a, v in zip(op.arguments, args, strict=True)]

    def forward(self, *tensors: Any) -> Any:
        rest = iter(tensors)
        return self.op(*(next(rest) if a.is_tensor else v for a, v in zip(self.op.arguments, self.args, strict=True)))


def answer_for_device() -> None:
    torch.cuda.get_device_capability = lambda *args: (9, 0)  # type: ignore[assignment]
    torch.cuda.get_device_name = lambda *args: "none"
    torch.cuda.get_device_properties = lambda *args: SimpleNamespace(major=9, minor=0)
    torch.cuda.current_device = lambda: 0
    torch.cuda.mem_get_info = lambda *args: (2**36, 2**36)  # type: ignore[assignment]
    if not hasattr(torch._C, "_CudaDeviceProperties"):
        torch._C._CudaDeviceProperties = SimpleNamespace  # type: ignore[attr-defined]


if __name__ == "__main__":
    print(json.dumps(main(*sys.argv[1:])))
    sys.stdout.flush()
    # The bindings tear down what the stub never built.
    os._exit(0)
