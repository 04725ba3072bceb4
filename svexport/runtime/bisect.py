"""Finds the layer of a TensorRT engine where an error begins, by rebuilding it with a few more outputs at a time.

An output keeps TensorRT from fusing the layers on both sides of it. All outputs at once would make a different engine.
A few change little, and each build checks that the error is still there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import onnx
from torch import Tensor

from svexport.errors import SvexportError
from svexport.progress import phase
from svexport.runtime.layers import Call, Groups, Layer, OnnxLayers
from svexport.runtime.session import OnnxEngine, element_type

if TYPE_CHECKING:
    from svexport.runtime.engine import Engine

__all__ = ["PROBES", "EngineLayers"]

PROBES = 3
"""The number of layers whose outputs are added per build."""


class EngineLayers(OnnxLayers):
    """Values inside an engine that was built from an ONNX file.

    Args:
        source: the file.
        feeds: the inputs of the file, in order.
        build: builds an engine of a model with more outputs, for these inputs.
        failed: the names of the file's outputs that are outside the tolerances.
        every: compare all layers, a few at a time, instead of bisecting.
        agrees: whether the file's own outputs, computed by an engine with more outputs, are within the tolerances.
        notes: findings are appended here.
    """

    bisects = True

    def __init__(
        self,
        source: OnnxEngine,
        feeds: Sequence[Tensor],
        build: Callable[[onnx.ModelProto], Engine],
        failed: Sequence[str],
        every: bool,
        agrees: Callable[[Sequence[Tensor]], bool],
        notes: list[str],
    ) -> None:
        super().__init__(source, feeds)
        self._build, self._failed, self._every, self._agrees, self._notes = build, failed, every, agrees, notes
        self._builds = 0

    def groups(self, layers: Sequence[Layer], calls: Sequence[Call]) -> Groups:
        """Yields groups of layer indices; one engine is built per group."""
        if self._every:
            for start in range(0, len(layers), PROBES):
                yield list(range(start, min(start + PROBES, len(layers))))
            return
        if not self._failed:
            self._notes.append("layers were not looked at, since the outputs agree; name some, to compare these")
            return
        before = _Before(self._engine.model().graph, layers)
        verdicts: dict[int, bool] = {}
        worst: int | None = None  # the earliest that is known to differ; None: the outputs
        while True:
            left = before.candidates(worst, self._failed, verdicts)
            if not left:
                break
            group = sorted({left[number * len(left) // (PROBES + 1)] for number in range(1, PROBES + 1)})
            found = yield group
            before.look_through(set(group) - set(found))  # skip layers that could not be compared
            verdicts |= found
            worst = min([number for number, ok in verdicts.items() if not ok], default=None)
        self._notes.append(
            f"{len(verdicts)} of {len(layers)} layers were compared, by {self._builds} engines with up to {PROBES} more"
            " outputs each" + ("; all agree, so the error begins after them" if worst is None else "")
        )

    def fetch(self, layers: Sequence[Layer]) -> list[list[Tensor]]:
        """The values of each of these layers, from one build."""
        names = list(dict.fromkeys(value for layer in layers for value in layer.values))
        phase(f"building an engine that shows {', '.join(names)}")
        try:
            with self._build(self._with_outputs(names)) as probe:
                outputs = probe.run(self._feeds)
        except SvexportError as error:
            if len(layers) > 1:  # most of them may work one by one
                return [self.fetch([layer])[0] for layer in layers]
            reason = str(error).split("\n")[0]
            self._notes.append(f"{', '.join(names)} cannot be outputs of an engine and were skipped: {reason}")
            return [[]]
        self._builds += 1
        values = dict(zip(probe.output_names, outputs, strict=True))
        own = [values[name] for name in self._engine.output_names]
        if self._failed and self._agrees(own):
            self._notes.append(
                f"with {', '.join(names)} as further outputs the engine's own agree: the error comes from how TensorRT "
                "fuses the layers on both sides of them"
            )
        return [[values[name] for name in layer.values] for layer in layers]

    def _with_outputs(self, names: Sequence[str]) -> onnx.ModelProto:
        model = self._engine.file()
        present = {output.name for output in model.graph.output}
        for spec in self._engine.with_outputs(names).outputs:
            if spec.name not in present:
                value = onnx.helper.make_tensor_value_info(spec.name, element_type(spec.dtype), spec.shape)
                model.graph.output.append(value)
        return model


class _Before:
    """Which layers each layer is computed from."""

    def __init__(self, graph: onnx.GraphProto, layers: Sequence[Layer]) -> None:
        self._layers = layers
        self._inputs = {output: _inputs(node) for node in graph.node for output in node.output if output}
        self._skipped: set[int] = set()
        self._direct: dict[int, list[int]] = {}

    def look_through(self, layers: Collection[int]) -> None:
        """Treats these layers as absent, so that searches continue to the layers before them."""
        if layers:
            self._skipped |= set(layers)
            self._direct.clear()

    def candidates(self, worst: int | None, outputs: Sequence[str], verdicts: Mapping[int, bool]) -> list[int]:
        """The layers not yet compared that an error may come from, in order; empty if the error begins at ``worst``.

        Args:
            worst: the layer that differs; None for ``outputs``.
            outputs: names of values.
            verdicts: for each compared layer, whether it agrees.
        """
        end = len(self._layers)
        direct = self._nearest(outputs, end) if worst is None else self._of(worst)
        if all(verdicts.get(number) for number in direct):
            return []
        above = set(direct).union(*(self._above(number) for number in direct))
        behind: set[int] = set().union(*(self._above(number) for number in above if verdicts.get(number)))
        unknown = [number for number in above if number not in verdicts]
        # Layers before one that agrees come last: that layer may still hide an error of theirs.
        return sorted([number for number in unknown if number not in behind] or set(direct) - set(verdicts))

    def _above(self, number: int) -> set[int]:
        """All layers that layer ``number`` is computed from."""
        found: set[int] = set()
        stack = [number]
        while stack:
            for other in self._of(stack.pop()):
                if other not in found:
                    found.add(other)
                    stack.append(other)
        return found

    def _of(self, number: int) -> list[int]:
        if number not in self._direct:
            self._direct[number] = self._nearest(self._layers[number].values, number)
        return self._direct[number]

    def _nearest(self, values: Sequence[str], limit: int) -> list[int]:
        """The layers before ``limit`` that a search backward from ``values`` reaches first."""
        owners: dict[str, int] = {}
        for number in range(limit - 1, -1, -1):
            if number not in self._skipped:
                owners.update(dict.fromkeys(self._layers[number].values, number))
        found: set[int] = set()
        seen = set(values)
        stack = list(values)
        while stack:
            value = stack.pop()
            if value in owners:
                found.add(owners[value])
                continue
            for name in self._inputs.get(value, ()):
                if name not in seen:
                    seen.add(name)
                    stack.append(name)
        return sorted(found)


def _inputs(node: onnx.NodeProto) -> list[str]:
    """Values that a node reads, including those read by its subgraphs."""
    return [name for name in _read(node) if name]


def _read(node: onnx.NodeProto) -> Iterator[str]:
    from svexport.graph.walk import graphs_of

    yield from node.input
    for graph in graphs_of(node):
        for inner in graph.node:
            yield from _read(inner)
