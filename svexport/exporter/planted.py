"""Plants faults in an exported file one after another, and tells which of them inputs would show."""

from __future__ import annotations

import math
from collections import ChainMap, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor

from svexport.exporter.faults import Fault, faults_of
from svexport.graph.scope import constants_in, used_inside
from svexport.graph.walk import STANDARD, graphs_of

__all__ = ["Planted", "Recording", "Site"]

MOST_BYTES = 2**28
"""Most bytes of the values of one recording, and of the parts of a graph that are kept in memory."""

MOST_OF_A_PART = 2**12
"""Largest weight, in bytes, that each part of a graph copies; larger ones are shared."""

_SIZED = {
    *("ConstantOfShape", "Expand", "Loop", "OneHot", "Pad", "Range", "Reshape", "Resize", "Scan", "Slice", "Split"),
    *("Squeeze", "Tile", "TopK", "Unsqueeze", "Upsample", "If", "AffineGrid", "RandomNormal", "RandomUniform"),
}
"""Ops whose later inputs determine the size of their outputs, so that a fault before them may make it arbitrary."""


@dataclass(frozen=True)
class Site:
    """A fault and its place.

    Attributes:
        number: index of the node.
        node: name of the node.
        op: type of the node.
        module: module of the node, as far as its name tells.
        line: the user's line that it came from; empty if unknown.
        fault: the fault itself.
    """

    number: int
    node: str
    op: str
    module: str
    line: str
    fault: Fault

    def __str__(self) -> str:
        where = self.line or (f"in {self.module}" if self.module else self.node)
        return f"{self.op} {self.fault.kind}, {where}"


@dataclass(frozen=True)
class Recording:
    """One run of a graph: its inputs, its outputs, and the values of nodes that have sites.

    Attributes:
        feeds: the inputs.
        outputs: the outputs of the graph.
        values: values of nodes and inputs, by name.
        held: rtol and atol of each output.
    """

    feeds: Mapping[str, np.ndarray]
    outputs: Sequence[np.ndarray]
    values: Mapping[str, np.ndarray]
    held: Sequence[tuple[float, float]]


@dataclass(frozen=True)
class _Behind:
    """The part of a graph that depends on one value.

    Attributes:
        session: runs the part; None if nothing depends on the value.
        feeds: names of its input values.
        outputs: names of the graph outputs that it computes.
        size: size of its model, in bytes.
    """

    session: Any
    feeds: list[str]
    outputs: list[str]
    size: int


class Planted:
    """A graph in standard ONNX, any value of which can be replaced.

    A faulty node is computed alone, from recorded values. Only what depends on it is computed
    again.
    """

    def __init__(
        self,
        model: onnx.ModelProto,
        lines: Mapping[str, str],
        run_as: Callable[[onnx.ModelProto], onnx.ModelProto] = lambda model: model,
    ) -> None:
        """``run_as`` converts a graph to the model that ONNX Runtime runs; it keeps the names of values."""
        self._lines, self._run_as = lines, run_as
        self._graph, self._opsets, self._ir = model.graph, list(model.opset_import), model.ir_version
        self._constants = {name: numpy_helper.to_array(tensor) for name, tensor in constants_in(model.graph).items()}
        sizes = _names_of_sizes(model.graph)
        self._nodes = [
            (number, node)
            for number, node in enumerate(model.graph.node)
            if node.op_type not in ("Constant", "Identity", "Shape", "Size", "Dropout")
            and sum(map(bool, node.output)) == 1
            and node.domain in STANDARD
            and node.output[0] not in sizes
        ]
        self._outputs = [value.name for value in model.graph.output]
        self._names = [value.name for value in model.graph.input]
        self._runnable = run_as(model)
        self._reads = [[*node.input, *used_inside(node)] for node in self._runnable.graph.node]
        self._recorder = _session(self._with_outputs(model.graph))
        found = (*self._recorder.get_inputs(), *self._recorder.get_outputs())
        self._kinds = {o.name: kind for o in found if (kind := _dtype(o.type)) is not None}
        self._nodes = [(number, node) for number, node in self._nodes if node.output[0] in self._kinds]
        self._producers = {
            name: number for number, node in enumerate(self._runnable.graph.node) for name in node.output if name
        }
        self._initializers = {tensor.name: tensor for tensor in self._runnable.graph.initializer}
        self._weights = {
            name: numpy_helper.to_array(tensor)
            for name, tensor in self._initializers.items()
            if tensor.ByteSize() > MOST_OF_A_PART and tensor.data_type in _DTYPES.values()
        }
        self._behind: OrderedDict[str, _Behind] = OrderedDict()
        self._alone: dict[int, Any] = {}

    def _with_outputs(self, graph: onnx.GraphProto) -> onnx.ModelProto:
        """A model of ``graph`` that also outputs every value that a node reads, or that may be faulty."""
        produced = {name for node in graph.node for name in node.output if name} - self._constants.keys()
        read = [name for node in graph.node for name in (*node.input, *used_inside(node))]
        wanted = dict.fromkeys(read + [node.output[0] for _, node in self._nodes])
        probe = onnx.ModelProto()
        probe.CopyFrom(self._runnable)
        probe.graph.output.extend(
            onnx.ValueInfoProto(name=name) for name in wanted if name in produced and name not in self._outputs
        )
        return probe

    def _computed_behind(self, name: str) -> _Behind:
        """The part that computes the outputs from a value, and from recorded values that do not depend on it."""
        if name in self._behind:
            self._behind.move_to_end(name)
            return self._behind[name]
        affected = {name}
        for node, reads in zip(self._runnable.graph.node, self._reads, strict=True):
            if not affected.isdisjoint(reads):
                affected.update(filter(None, node.output))
        outputs = [output for output in self._outputs if output in affected and output != name]
        numbers, feeds, tensors, left = set(), {}, {}, list(outputs)
        while left:
            value = left.pop()
            if value in self._weights:
                feeds[value] = self._initializers[value].data_type
            elif value in self._initializers:
                tensors[value] = self._initializers[value]
            elif value in self._kinds and (value == name or value not in affected):
                feeds[value] = self._kinds[value]
            elif value in self._producers and (number := self._producers[value]) not in numbers:
                numbers.add(number)
                left += self._reads[number]
        part = onnx.ModelProto(ir_version=self._ir)
        part.opset_import.extend(self._runnable.opset_import)
        part.functions.extend(self._runnable.functions)
        part.graph.name = "behind"
        part.graph.node.extend(self._runnable.graph.node[number] for number in sorted(numbers))
        part.graph.input.extend(helper.make_tensor_value_info(feed, kind, None) for feed, kind in feeds.items())
        part.graph.output.extend(onnx.ValueInfoProto(name=output) for output in outputs)
        part.graph.initializer.extend(tensors.values())
        self._behind[name] = _Behind(_session(part) if outputs else None, list(feeds), outputs, part.ByteSize())
        while sum(behind.size for behind in self._behind.values()) > MOST_BYTES and len(self._behind) > 1:
            self._behind.popitem(last=False)
        return self._behind[name]

    def record(self, tensors: Sequence[Tensor], held: Sequence[tuple[float, float]]) -> Recording | None:
        """Runs the graph; ``held`` are rtol and atol of its outputs. None if the values are too large to record."""
        feeds = {name: t.detach().cpu().numpy() for name, t in zip(self._names, tensors, strict=True)}
        names = [value.name for value in self._recorder.get_outputs()]
        values = dict(zip(names, self._recorder.run(names, feeds), strict=True))
        if sum(v.nbytes for v in values.values() if isinstance(v, np.ndarray)) > MOST_BYTES:
            return None
        return Recording(feeds, [values[name] for name in self._outputs], {**values, **feeds}, held)

    def sites(self, recording: Recording) -> Iterator[Site]:
        """All faults of all nodes."""
        for number, node in self._nodes:
            for fault in faults_of(node, self._constants, recording.values):
                yield Site(number, node.name, node.op_type, _module(node), self._line(node), fault)

    def outputs(self, site: Site, recording: Recording) -> list[np.ndarray] | None:
        """The outputs with a fault; None if the faulty node computes the same as without it.

        Raises:
            Exception: ONNX Runtime's, if the graph does not run with the fault.
        """
        faulty = self._computed(site, recording)
        name = self._graph.node[site.number].output[0]
        if _equal(faulty, recording.values[name]):
            return None
        behind = self._computed_behind(name)
        computed = {name: faulty}
        if behind.session is not None:
            known = ChainMap({name: faulty}, self._weights, recording.values)  # type: ignore[arg-type]
            feeds = {feed: known[feed] for feed in behind.feeds}
            computed.update(zip(behind.outputs, behind.session.run(behind.outputs, feeds), strict=True))
        return [computed.get(output, recording.values[output]) for output in self._outputs]

    def shown(self, site: Site, recording: Recording, failing: float = math.inf) -> float:
        """How far outputs with a fault are off, in tolerances; verification notices more than 1. Returns ``failing`` if
        the graph no longer runs."""
        try:
            outputs = self.outputs(site, recording)
        except Exception:  # noqa: BLE001 - ONNX Runtime's: the graph is no longer consistent
            return failing
        if outputs is None:
            return 0.0
        return max(map(_off, recording.outputs, outputs, recording.held), default=0.0)

    def _computed(self, site: Site, recording: Recording) -> np.ndarray:
        """The output of the faulty node, computed alone from recorded values."""
        node, fault = self._graph.node[site.number], site.fault
        if fault.transposed is not None:
            return np.ascontiguousarray(recording.values[node.output[0]].swapaxes(*fault.transposed))
        if fault.node is None:
            name = node.input[0]
            output = recording.values[node.output[0]]
            return recording.values[name] if name in recording.values else self._constants[name].astype(output.dtype)
        if id(fault) not in self._alone:
            # Keep a reference to the fault, so that no other object gets its id.
            self._alone[id(fault)] = fault, _session(self._run_as(self._model_of(fault)))
        _, session = self._alone[id(fault)]
        feeds = {i.name: recording.values[i.name] for i in session.get_inputs()}
        return session.run(None, feeds)[0]

    def _model_of(self, fault: Fault) -> onnx.ModelProto:
        node = fault.node
        assert node is not None
        names = list(dict.fromkeys(filter(None, node.input)))
        changed = fault.constants or {}
        constants = [
            numpy_helper.from_array(changed.get(n, self._constants[n]), n) for n in names if n in self._constants
        ]
        kinds = {n: self._kinds.get(n, TensorProto.FLOAT) for n in names if n not in self._constants}
        inputs = [helper.make_tensor_value_info(n, kind, None) for n, kind in kinds.items()]
        graph = helper.make_graph([node], "planted", inputs, [onnx.ValueInfoProto(name=node.output[0])], constants)
        return helper.make_model(graph, opset_imports=self._opsets, ir_version=self._ir)

    def _line(self, node: onnx.NodeProto) -> str:
        return node.doc_string or self._lines.get(node.name, "")


def _off(expected: np.ndarray, actual: np.ndarray, held: tuple[float, float]) -> float:
    """The largest difference, in units of the tolerance."""
    if expected.shape != actual.shape:
        return math.inf
    rtol, atol = held
    e, a = expected.astype(np.float64), actual.astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
        off = np.where((e == a) | (np.isnan(e) & np.isnan(a)), 0.0, np.abs(e - a) / (atol + rtol * np.abs(e)))
    return float(np.nan_to_num(off, nan=math.inf, posinf=math.inf).max(initial=0.0))


def _names_of_sizes(graph: onnx.GraphProto) -> set[str]:
    """Names of values from which sizes are computed, directly or through other integers."""
    sizes = {name for node in graph.node if node.op_type in _SIZED for name in node.input[1:]}
    sizes |= {name for node in graph.node for nested in graphs_of(node) for n in nested.node for name in n.input}
    for node in reversed(graph.node):
        if sizes.intersection(node.output) and node.op_type not in ("Shape", "Size"):
            sizes.update(node.input)
    return sizes


def _module(node: onnx.NodeProto) -> str:
    for entry in node.metadata_props:
        if entry.key == "namespace":
            return next((part.split(": ")[0] for part in reversed(entry.value.split("/")[:-1]) if part[:1] != ":"), "")
    return ".".join(node.name.split("/")[1:-1])


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))


_DTYPES = {"float": 1, "uint8": 2, "int8": 3, "int32": 6, "int64": 7, "bool": 9, "float16": 10, "double": 11}


def _dtype(name: str) -> int | None:
    """ONNX's number for a type such as ONNX Runtime's ``tensor(float)``; None for types without faults."""
    return _DTYPES.get(name.removeprefix("tensor(").removesuffix(")"))


def _session(model: onnx.ModelProto) -> Any:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.use_deterministic_compute = True
    options.add_session_config_entry("session.disable_prepacking", "1")  # weights may be inputs
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"], enable_fallback=0
    )
