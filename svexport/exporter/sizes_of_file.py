"""What a file computes from the sizes of its inputs, and whether it runs at sizes of 0."""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import onnx
from torch import Tensor

from svexport.graph.integers import PLACES
from svexport.graph.scope import constants_in, light_copy
from svexport.graph.walk import attributes_of, graphs, graphs_of
from svexport.logging import logger

if TYPE_CHECKING:
    import onnxruntime

__all__ = ["SizesOfFile", "may_end_the_process", "unlike"]

_OPS = {"Abs", "Add", "Cast", "Ceil", "Concat", "Constant", "Div", "Floor", "Gather", "Identity", "Max", "Min", "Mod"}
_OPS |= {"Mul", "Neg", "Pow", "Range", "Reshape", "Round", "Shape", "Size", "Slice", "Sqrt", "Squeeze", "Sub"}
_OPS |= {"Unsqueeze"}
"""Ops that compute with sizes."""

_FLOATS = (onnx.TensorProto.FLOAT, onnx.TensorProto.DOUBLE)

_FLOATING = {*_FLOATS, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16}

LIKE = 0.5
"""Fraction of sizes at which a file's number must equal Python's to count as the same number."""


class SizesOfFile:
    """Computes the integers that a file derives from the sizes of its inputs, and nothing else.

    Args:
        path: path of the file.
        names: names of its inputs.
        tensors: the given inputs.
        shapes: computes the inputs' shapes from the dynamic sizes.
    """

    def __init__(
        self,
        path: Path,
        names: Sequence[str],
        tensors: Sequence[Tensor],
        shapes: Callable[[Mapping[str, int]], list[list[int]]],
    ) -> None:
        self._path, self._names, self._tensors, self._shapes = path, names, tensors, shapes
        self._session: onnxruntime.InferenceSession | None = None
        self._asked = False

    def at(self, roots: Mapping[str, int]) -> list[int]:
        """The integers, always in the same order; for a list, its length. Empty if there are none, or if it fails."""
        if not self._asked:
            self._asked, self._session = True, self._opened()
        if self._session is None:
            return []
        given = {
            name: tensor.new_empty(shape).cpu().numpy()
            for name, tensor, shape in zip(self._names, self._tensors, self._shapes(roots), strict=True)
        }
        try:
            found = self._session.run(None, {i.name: given[i.name] for i in self._session.get_inputs()})
        except Exception as error:  # noqa: BLE001 - the file may not run at these sizes
            logger.info("what the file computes of sizes does not run at {}: {}", dict(roots), error)
            return []
        whole = [value for value in found if value.ndim or value.dtype.kind in "iu"]
        return [int(v.item()) if v.size == 1 and v.dtype.kind in "iu" else v.size for v in whole]

    def _opened(self) -> onnxruntime.InferenceSession | None:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level, options.intra_op_num_threads = 4, 1
        try:
            model = _of_sizes(light_copy(onnx.load(self._path, load_external_data=False)), self._names)
            return onnxruntime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - sizes are then tried without the file
            logger.info("what the file computes of sizes does not run by itself: {}", error)
            return None


def _of_sizes(model: onnx.ModelProto, names: Sequence[str]) -> onnx.ModelProto:
    """A model of the nodes that depend only on sizes of the named inputs, with their values as outputs."""
    graph = model.graph
    values = _constants(graph)
    constants = {name for name, value in values.items() if value.all()}
    known = {tensor.name for tensor in graph.initializer}
    floats = {name for name, value in values.items() if value.dtype.kind == "f"}
    nodes = []
    for node in graph.node:
        measures = node.op_type in ("Shape", "Size") and node.input[0] in names
        if node.op_type not in _OPS or node.domain or not (measures or all(n in known or not n for n in node.input)):
            continue
        if node.op_type in ("Div", "Mod") and not (node.input[0] in floats or node.input[1] in constants):
            continue  # integer division by 0 ends the process
        if attributes_of(node)["to"] in _FLOATS if node.op_type == "Cast" else floats.intersection(node.input):
            floats.update(node.output)
        nodes.append(node)
        known.update(node.output)
    used = {name for node in nodes for name in node.input}
    made = onnx.helper.make_graph(
        nodes,
        "sizes",
        [info for info in graph.input if info.name in used],
        [onnx.ValueInfoProto(name=name) for node in nodes for name in node.output if node.op_type != "Constant"],
        [tensor for tensor in graph.initializer if tensor.name in used],
    )
    return onnx.helper.make_model(made, opset_imports=model.opset_import, ir_version=model.ir_version)


def _constants(graph: onnx.GraphProto) -> dict[str, np.ndarray]:
    """The constants of a graph, by name."""
    return {name: onnx.numpy_helper.to_array(tensor) for name, tensor in constants_in(graph).items()}


_DATA = {"Where": 1, "OneHot": 2}
"""By op, the input that has the type of the result, if that is not the first."""


_ENDING = {"Attention", "GRU", "InstanceNormalization", "LSTM", "RNN"}
"""Ops that may end the process if a size is 0: those of ONNX's node tests whose kernel in ONNX Runtime 1.31 does, RNN,
and those that read the first of no numbers, which is out of bounds."""

MOST_BYTES = 2**28
"""Largest file, in bytes, that is optimized once more to inspect ONNX Runtime's graph."""


def may_end_the_process(path: Path, names: Collection[str]) -> bool:
    """Whether ONNX Runtime may end the process if a size is 0: some of its kernels do, and so does an integer division
    by a computed 0.

    ``names`` are the names of the integer inputs.
    """
    model = onnx.load(path, load_external_data=False)
    bodies = [onnx.GraphProto(node=function.node) for function in model.functions]
    every = itertools.chain.from_iterable(map(graphs, (model.graph, *bodies)))
    nodes = [node for graph in every for node in graph.node]
    if any(node.op_type in _ENDING for node in nodes):
        return True
    if _divides(model.graph, set(names), {}) or any(_divides(body, set(), {}) for body in bodies):
        return True
    moved = any(node.op_type == "Transpose" and attributes_of(node).get("perm", [1])[0] for node in nodes)
    return moved and any(node.op_type == "MatMul" for node in nodes) and _transposes_batches(path)


def _transposes_batches(path: Path) -> bool:
    """Whether ONNX Runtime fuses a MatMul with a Transpose of its batch axes: that kernel divides by sizes."""
    import onnxruntime

    from svexport.runtime.session import broken_optimizers

    if path.stat().st_size > MOST_BYTES:
        return True
    options = onnxruntime.SessionOptions()
    options.log_severity_level, options.intra_op_num_threads = 4, 1
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = os.path.join(folder, "m.onnx")
        onnxruntime.InferenceSession(
            str(path), options, ["CPUExecutionProvider"], disabled_optimizers=broken_optimizers(onnxruntime)
        )
        made = onnx.load(options.optimized_model_filepath, load_external_data=False)
    every = (
        attributes_of(node) for graph in graphs(made.graph) for node in graph.node if node.op_type == "FusedMatMul"
    )
    return any(attributes.get(name) for attributes in every for name in ("transBatchA", "transBatchB"))


def _divides(graph: onnx.GraphProto, whole: set[str], outer: Mapping[str, np.ndarray]) -> bool:
    """Whether integers may be divided by 0. Adds the graph's to ``whole`` (names); ``outer`` are outer constants."""
    values = {**outer, **_constants(graph)}
    whole |= {name for name, value in values.items() if value.dtype.kind in "iu"}
    for node in graph.node:
        if node.op_type in ("Div", "Mod") and whole.intersection(node.input):
            divisor = values.get(node.input[1])
            if divisor is None or not divisor.all():
                return True
        given = node.input[_DATA.get(node.op_type, 0)] if node.input else ""
        attributes = attributes_of(node)
        kind = attributes["to"] if node.op_type == "Cast" else None
        if node.op_type in PLACES or (given in whole if kind is None else kind not in _FLOATING):
            whole.update(node.output)
        if any(_divides(inner, whole, values) for inner in graphs_of(node)):
            return True
    return False


def unlike(sizes: Sequence[int], python: Sequence[int], file: Sequence[Sequence[int]]) -> Iterator[int]:
    """Sizes at which the file's number closest to Python's differs from it; none if it never does, or usually does.

    ``file`` has the file's numbers for each size.
    """
    best: list[bool] = []
    for column in zip(*file, strict=True):
        same = [own == its for own, its in zip(python, column, strict=True)]
        best = max(best, same, key=sum)
    if sum(best) >= LIKE * len(sizes):
        yield from (size for size, same in zip(sizes, best, strict=True) if not same)
