"""ONNX Runtime on CUDA with svexport's kernels beside the same file with bodies, torch, and torch.compile.

Whole models, plain calls, launches included, in float32 as it is (no TF32) and in half, torch by autocast; and both
files as recorded launches (``cuda_graphs=1``), which torch.compile's ``reduce-overhead`` replays too. Needs
onnxruntime-gpu.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import svexport
from benchmarks._measure import Workload
from svexport.cli._model import load_file
from svexport.tracing.arguments import leaves, rebuild

MODELS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "detr3d": ({}, {}),
    "stgcn": ({}, {"plugins": ["einsum"]}),
}
GOAL = 0.5


def model_of(name: str) -> nn.Module:
    return load_file(Path(__file__).parents[1] / "examples" / f"{name}.py").model(**MODELS[name][0])


def workload(name: str, swapped: bool, dtype: torch.dtype) -> Workload:
    """A model as it is, or its copy by svexport.replace, exported in a type and run by each."""
    model = model_of(name)
    inputs = model.example_inputs
    used = svexport.replace(model, inputs, verbose=False) if swapped else model
    half: dict[str, Any] = {} if dtype is torch.float32 else {"dtype": dtype}
    folder = tempfile.mkdtemp(prefix="svexport-")
    path = Path(folder, "m.onnx")
    svexport.export(used, inputs, path, opset=17, verify=False, **half, **MODELS[name][1])
    kernels = svexport.load(path, device="cuda", kernels=True)
    bodies = svexport.load(path, device="cuda")
    recorded = svexport.load(path, device="cuda", kernels=True, cuda_graphs=1)
    bodies_recorded = svexport.load(path, device="cuda", cuda_graphs=1)
    given = [t.cuda() for _, t in leaves(inputs)]
    model, arguments = model.cuda(), rebuild(inputs, lambda t: t.cuda())
    compiled = torch.compile(model, mode="reduce-overhead")

    def torch_runs(function: Callable[..., Any]) -> Any:
        with torch.no_grad(), torch.autocast("cuda", enabled=dtype is torch.float16):
            return function(*arguments)

    return Workload(
        f"{name}{' replaced' if swapped else ''} {str(dtype).removeprefix('torch.')}",
        lambda: kernels.run(given),
        {
            "bodies": lambda: bodies.run(given),
            "recorded": lambda: recorded.run(given),
            "bodies recorded": lambda: bodies_recorded.run(given),
            "torch": partial(torch_runs, model),
            "torch.compile": partial(torch_runs, compiled),
        },
        goal=GOAL,
        whole=True,
    )


def workloads() -> Iterator[Workload]:
    for dtype in (torch.float32, torch.float16):
        for name in MODELS:
            for swapped in (False, True):
                yield workload(name, swapped, dtype)
