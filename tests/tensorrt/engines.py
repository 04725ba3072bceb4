"""Compares engines of nodes and examples with torch, in a process of its own, with TensorRT and a GPU.

``python -m tests.tensorrt.engines KIND FOLDER`` writes a line of JSON for each of :data:`NAMES` and leaves the plans of
the samples in FOLDER; KIND is how the plugins run: ``C++``, ``AOT`` or ``JIT``. ``python -m tests.tensorrt.engines run
FOLDER`` runs these plans again in a process without registered plugins.
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx
import torch
from torch import Tensor

import svexport
from svexport.graph import strip
from svexport.ops._op import DOMAIN, Op, as_tuple
from svexport.tensorrt import aot, bindings, plugins
from tests.support import op_model
from tests.tensorrt.cases import CASES, COORDINATES, arguments, inputs_of, with_inputs

EXAMPLES = {
    "deformable_detr": {},
    "detr3d": {"config": "small"},
    "fused_decoder": {},
    "multicamera": {},
    "stgcn": {"frames": 20},
    "yolox_stem": {},
}
DTYPES = {"float32": torch.float32, "float16": torch.float16}


def runnable(op: Op, args: Sequence[Any]) -> bool:
    """No empty tensor, and no optional one left out in the middle, which the parser does not take."""
    present = [value is not None for argument, value in zip(op.arguments, args, strict=True) if argument.is_tensor]
    return all(t.numel() for _, t in inputs_of(op, args)) and present == sorted(present, reverse=True)


def of_network(op: Op, args: Sequence[Any]) -> bool:
    """Runnable, and no int8, which in a network comes from a quantizing layer."""
    return runnable(op, args) and all(t.dtype != torch.int8 for _, t in inputs_of(op, args))


SAMPLES = {
    f"{op.name}-{i}-{dtype}-{shapes}": (op, i)
    for op, i in CASES
    if of_network(op, list(arguments(op))[i])
    for dtype in DTYPES
    for shapes in ("static", "dynamic")
}
NAMES = [*SAMPLES, *EXAMPLES]


# ------------------------------------------------------------------------------------------------------ build and run


def build(
    trt: Any, model: bytes, profile: Mapping[str, Sequence[Sequence[int]]] | None = None
) -> tuple[bytes, dict[str, int]]:
    """The plan of an engine, and how many layers of each type the network has.

    Args:
        profile: for every input with open dimensions its smallest, usual and largest shape.
    """
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    if not parser.parse(model):
        errors = [parser.get_error(i) for i in range(parser.num_errors)]
        raise RuntimeError("; ".join(f"{e.desc()} (node {e.node_name()!r})" for e in errors))
    layers = [network.get_layer(i).type for i in range(network.num_layers)]
    config = builder.create_builder_config()
    config.set_memory_pool_limit(trt.MemoryPoolType.WORKSPACE, 1 << 30)
    config.clear_flag(trt.BuilderFlag.TF32)  # compared with float32
    if profile:
        shapes = builder.create_optimization_profile()
        for name, (smallest, usual, largest) in profile.items():
            shapes.set_shape(name, tuple(smallest), tuple(usual), tuple(largest))
        config.add_optimization_profile(shapes)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise RuntimeError("TensorRT builds no engine; its log says why")
    return bytes(plan), {str(t).rsplit(".", 1)[-1]: layers.count(t) for t in layers}


def run(trt: Any, plan: bytes, tensors: Mapping[str, Tensor], device: str = "cuda") -> dict[str, Tensor]:
    """The outputs of an engine by name."""
    runtime = trt.Runtime(trt.Logger(trt.Logger.ERROR))
    engine = runtime.deserialize_cuda_engine(plan)
    if engine is None:
        raise RuntimeError("TensorRT does not load the plan; its log says why")
    context = engine.create_execution_context()
    dtypes = bindings.dtypes(trt)
    memory: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    names = [engine.get_tensor_name(i) for i in range(engine.num_io_tensors)]
    for name in names:
        if engine.get_tensor_mode(name) == trt.TensorIOMode.INPUT:
            memory[name] = tensors[name].to(device, dtypes[engine.get_tensor_dtype(name)]).contiguous()
            if not context.set_input_shape(name, tuple(memory[name].shape)):
                raise RuntimeError(f"the engine does not take {name} of {tuple(memory[name].shape)}")
    for name in names:
        if engine.get_tensor_mode(name) == trt.TensorIOMode.OUTPUT:
            shape = tuple(context.get_tensor_shape(name))
            outputs[name] = torch.empty(shape, dtype=dtypes[engine.get_tensor_dtype(name)], device=device)
    for name, tensor in (*memory.items(), *outputs.items()):
        context.set_tensor_address(name, tensor.data_ptr())
    stream = torch.cuda.Stream() if device == "cuda" else None
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    if not context.execute_async_v3(0 if stream is None else stream.cuda_stream):
        raise RuntimeError("the engine does not run; TensorRT's log says why")
    if stream is not None:
        stream.synchronize()
    return {name: tensor.cpu() for name, tensor in outputs.items()}


# --------------------------------------------------------------------------------------------------------- what to run


def sample(name: str) -> tuple[bytes, dict[str, Tensor], list[Tensor], dict[str, Any] | None]:
    """A model of one node, its inputs, what it should return and the optimization profile."""
    op, i = SAMPLES[name]
    dtype, shapes = name.rsplit("-", 2)[1:]
    args = list(arguments(op))[i]
    inputs = [
        t.to(DTYPES[dtype]) if t.is_floating_point() and n not in COORDINATES.get(op.name, ()) else t
        for n, t in inputs_of(op, args)
    ]
    wide = [t.double() if t.is_floating_point() else t for t in inputs]
    expected = list(as_tuple(op.reference(*with_inputs(op, args, wide))))
    model = op_model(op, with_inputs(op, args, inputs), 17, lowered=False, dynamic=shapes == "dynamic")
    strip(model)  # a body would be what older versions of TensorRT run
    named = {graph_input.name: t for graph_input, t in zip(model.graph.input, inputs, strict=True)}
    profile = {n: [tuple(t.shape)] * 3 for n, t in named.items()} if shapes == "dynamic" else None
    return model.SerializeToString(), named, expected, profile


def example(name: str, version: str, folder: Path) -> tuple[bytes, dict[str, Tensor], list[Tensor]]:
    """The file of a model, its inputs and what it should return."""
    model = importlib.import_module(name).model(**EXAMPLES[name]).eval()
    args = tuple(model.example_inputs)
    path = folder / f"{name}.onnx"
    report = svexport.export(model, args, path, opset=17, target=version)
    with torch.no_grad():
        expected = [t for t in torch.utils._pytree.tree_leaves(model(*args)) if isinstance(t, Tensor)]
    given = [t for t in torch.utils._pytree.tree_leaves(args) if isinstance(t, Tensor)]
    return path.read_bytes(), dict(zip(report.inputs, given, strict=True)), expected


def compare(outputs: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest error of an output, relative to its norm."""
    errors = []
    for got, wanted in zip(outputs, expected, strict=True):
        if got.shape != wanted.shape:
            raise RuntimeError(f"an output is {tuple(got.shape)} and should be {tuple(wanted.shape)}")
        got, wanted = got.double(), wanted.double()
        errors.append(float((got - wanted).norm() / wanted.norm().clamp_min(1e-12)))
    return max(errors)


def select(kind: str) -> None:
    """Leaves only this way to register plugins."""
    if kind == "C++":
        assert plugins.libraries(), "svexport plugins build has left no library"
    else:
        plugins.libraries = list  # type: ignore[assignment]
    if kind == "JIT":
        aot.available = lambda: False  # type: ignore[assignment]


def each(names: Sequence[str], one: Callable[[str], dict[str, Any]]) -> None:
    for name in names:
        try:
            result = one(name)
        except Exception:  # noqa: BLE001 - whatever happened is the answer
            result = {"error": traceback.format_exc(limit=-3)}
        print(json.dumps({"name": name, **result}), flush=True)


def main(kind: str, path: str) -> None:
    import tensorrt as trt

    folder = Path(path)
    sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
    if kind == "run":
        names = [f.stem for f in sorted(folder.glob("*.plan"))]

        def again(name: str) -> dict[str, Any]:
            _, inputs, expected, _ = sample(name)
            outputs = run(trt, (folder / f"{name}.plan").read_bytes(), inputs)
            return {"error": None, "difference": compare(list(outputs.values()), expected)}

        return each(names, again)

    select(kind)
    kinds = dict(plugins.register_plugins().kinds)
    version = ".".join(trt.__version__.split(".")[:2])

    def one(name: str) -> dict[str, Any]:
        if name in SAMPLES:
            model, inputs, expected, profile = sample(name)
        else:
            (model, inputs, expected), profile = example(name, version, folder), None
        plan, layers = build(trt, model, profile)
        if name in SAMPLES:
            (folder / f"{name}.plan").write_bytes(plan)
        outputs = run(trt, plan, inputs)
        return {
            "error": None,
            "difference": compare(list(outputs.values()), expected),
            "plugins": layers.get("PLUGIN_V3", 0),
            "nodes": sum(node.domain == DOMAIN for node in onnx.load_from_string(model).graph.node),
            "kind": kinds[SAMPLES[name][0].node_type] if name in SAMPLES else None,
        }

    each(NAMES, one)


if __name__ == "__main__":
    main(*sys.argv[1:])
