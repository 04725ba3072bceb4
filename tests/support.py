"""Helpers shared by the tests: one-node models of an op, run in ONNX Runtime."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import helper

import svexport
from svexport.exporter.opsets import LAST_TORCHSCRIPT_OPSET
from svexport.exporter.opsets import OPSETS as EXPORT_OPSETS
from svexport.graph import attach, lower
from svexport.graph.nodes import set_attributes
from svexport.ops._op import Op
from svexport.runtime.session import broken_optimizers, for_runtime

OPSETS = (9, 11, 13, 16, 17, 18, 20, 23)
BOTH_EXPORTERS = LAST_TORCHSCRIPT_OPSET < 18
"""Whether opset 18 is the exporter's on torch.export, as in all but old versions of torch."""


def in_threads(count: int, work: Callable[[int], object]) -> None:
    """Calls ``work`` with 0, 1, ... in a thread each, and waits for all of them."""
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def exported(opset: int) -> pytest.MarkDecorator:
    """Skips where torch is too old to export to an opset."""
    return pytest.mark.skipif(opset not in EXPORT_OPSETS, reason=f"torch {torch.__version__} is too old for it")


def op_model(
    op: Op, args: Sequence[Any], opset: int, *, lowered: bool = True, dynamic: bool = False
) -> onnx.ModelProto:
    """A model of one node of ``op``, for arguments of the torch operator: its body lowered or attached.

    ``dynamic`` leaves every dimension of the inputs open.
    """
    tensors: list[torch.Tensor] = []
    attributes = []
    for argument, value in zip(op.arguments, args, strict=True):
        if argument.kind == "tensors":
            tensors += value
        elif argument.is_tensor:
            tensors += [value]
        else:
            attributes.append(value)
    expected = op(*args)
    expected = [expected] if isinstance(expected, torch.Tensor) else list(expected)

    def info(name: str, tensor: torch.Tensor) -> onnx.ValueInfoProto:
        shape = [f"{name}_{i}" for i in range(tensor.dim())] if dynamic else list(tensor.shape)
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype), shape)

    inputs = [info(f"x{i}", t) for i, t in enumerate(tensors) if t is not None]
    outputs = [info(f"y{i}", t) for i, t in enumerate(expected)]
    names = ["" if t is None else f"x{i}" for i, t in enumerate(tensors)]
    node = helper.make_node(op.node_type, names, [o.name for o in outputs], name="node", domain="svexport")
    set_attributes(node, op, attributes)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("svexport", 1)]
    model = helper.make_model(helper.make_graph([node], "graph", inputs, outputs), opset_imports=imports)
    model.ir_version = 8 if opset < 20 else 10
    if lowered:
        return lower(model)
    attach(model)
    return model


def run_model(model: onnx.ModelProto, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Checks a model and runs it in ONNX Runtime; inputs in the order of the graph's."""
    onnx.checker.check_model(model, full_check=True)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    file = for_runtime(onnxruntime, model).SerializeToString()
    broken = broken_optimizers(onnxruntime)
    session = onnxruntime.InferenceSession(
        file, options, providers=["CPUExecutionProvider"], disabled_optimizers=broken
    )
    feeds = {i.name: t.detach().contiguous().numpy() for i, t in zip(session.get_inputs(), tensors, strict=True)}
    try:
        return [torch.from_numpy(y) for y in session.run(None, feeds)]
    except Exception as error:
        if "must be larger than 1" in str(error):
            pytest.skip(f"ONNX Runtime {onnxruntime.__version__} normalizes no single elements")
        raise


def run_op(op: Op, args: Sequence[Any], opset: int, **options: Any) -> list[torch.Tensor]:
    """The op's outputs as its body computes them in ONNX Runtime."""
    flat = [t for value in args for t in (value if isinstance(value, (list, tuple)) else [value])]
    return run_model(op_model(op, args, opset, **options), [t for t in flat if isinstance(t, torch.Tensor)])


def calls(function: Callable[[], object]) -> int:
    """How many functions are called on the way: work that depends on no clock."""
    count = 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(called)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def check_export(
    model: torch.nn.Module,
    folder: Path,
    opset: int,
    args: tuple[torch.Tensor, ...],
    *others: tuple[torch.Tensor, ...],
    tolerance: float = 1e-5,
    **options: Any,
) -> svexport.ExportReport:
    """Exports an unedited model that returns a dict or list, and compares every result on ``args`` and ``others``."""
    report = svexport.export(model, args, folder / "model.onnx", opset=opset, **options)
    engine = svexport.load(report.path)
    for given in (args, *others):
        expected = model(*given)
        named = expected if isinstance(expected, dict) else dict(enumerate(expected))
        outputs = engine(*given)
        results = [outputs] if isinstance(outputs, torch.Tensor) else outputs
        for (name, e), a in zip(named.items(), results, strict=True):
            torch.testing.assert_close(a, e, rtol=tolerance, atol=tolerance, msg=lambda m, name=name: f"{name}: {m}")
    return report
