"""Removes Transposes: nodes may run on transposed tensors, and as few tensors as possible are transposed.

First all Transposes are removed. Each leaves a *frame* at the uses of its output: the permutation in which a use reads
the tensor. Producers have a frame too, and nodes that a Transpose commutes with (:mod:`svexport.graph.motion`) can
choose theirs. A tensor costs one Transpose for each distinct frame of its uses beyond the first. So chains compose,
equal Transposes are shared and opposite ones vanish without special rules; only the frames remain to be chosen.

A move starts at one node and takes all connected nodes along, each to the frame that leaves no Transpose in between. A
minimum cut decides which of them stay, because a tensor costs the same however many uses share a frame. A move is made
only if it leaves fewer Transposes or fewer transposed bytes and not more of either, so the search ends. When no move is
left, the graph is written again.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import numpy as np
import onnx
from onnx import helper

from svexport.graph.cut import Network
from svexport.graph.motion import DYNAMIC_SIZE, Edits, Motion, motion_of
from svexport.graph.permutation import Perm, compose, extend, identity, inverse, restrict
from svexport.graph.scope import LARGE, Scope, drop_unused, is_standard, scopes, used_inside, used_names
from svexport.graph.walk import graphs, remove_attribute

__all__ = ["remove_transposes"]

EFFORT = 10_000
SMALL_MOVE = 16
"""The maximum size of a move in large graphs with many Transposes."""

MANY = 1 << 64
"""More than all Transposes, more than all bytes."""


def remove_transposes(model: onnx.ModelProto) -> None:
    """Removes Transposes from a model, in place: those that cancel, also around nodes they commute with, those of
    constants, and those that move only sizes of 1, which become a Reshape.

    Neither their number nor the bytes they move increase, with every dynamic size taken as 64. Inputs, outputs, opset
    and IR version are kept; local functions are not changed.

    Source: Delong, Osokin, Isack, Boykov, *Fast Approximate Energy Minimization with Label Costs*, 2012: frames are the
    labels.
    """
    if any(is_standard(node, "Transpose") for graph in graphs(model.graph) for node in graph.node):
        for scope in scopes(model):
            layout = _Layout(scope)
            layout.improve()
            _Writer(scope, layout).write()


class _Use(NamedTuple):
    """Something that has a tensor in a frame: the frame ``via``, followed by what a node's own does to ``dims``."""

    tensor: _Tensor
    via: Perm
    node: int | None = None
    dims: Perm = ()

    def frame(self, frames: Mapping[int, Perm]) -> Perm:
        return self.via if self.node is None else compose(self.via, restrict(frames[self.node], self.dims))

    def frame_of_node(self, frame: Perm, frames: Mapping[int, Perm]) -> Perm:
        """The node's frame for which the tensor is in ``frame``."""
        assert self.node is not None
        return extend(compose(inverse(self.via), frame), self.dims, frames[self.node])


@dataclass(eq=False)
class _Tensor:
    """A tensor that comes from anything but a Transpose."""

    name: str
    shape: tuple[int | None, ...]
    bytes: int
    constant: bool
    uses: list[_Use] = field(default_factory=list)  # the producer's among them

    def __post_init__(self) -> None:
        self.is_free = self.constant and self.bytes <= LARGE
        self.reshapable = 1 in self.shape and 0 not in self.shape and self.shape.count(None) < 2

    def order(self, frame: Perm) -> Perm:
        """Equal for two frames if a Reshape leads from one to the other."""
        return tuple([i for i in frame if self.shape[i] != 1]) if self.reshapable else frame

    def copies(self, frames: Mapping[int, Perm]) -> int:
        """The number of Transposes that the tensor costs."""
        return 0 if self.is_free else len({self.order(use.frame(frames)) for use in self.uses}) - 1


class _Layout:
    """A graph without its Transposes: its tensors, and the frame of every node that has a choice."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.tensors: dict[str, _Tensor] = {}
        self.views: dict[str, tuple[_Tensor, Perm]] = {}  # what each Transpose made
        self.motions: dict[int, Motion] = {}
        self.frames: dict[int, Perm] = {}
        self._uses: dict[int, list[_Use]] = defaultdict(list)
        self._tried: dict[int, set[Perm]] = defaultdict(set)
        for node in scope.graph.node:
            if is_standard(node, "Transpose"):
                self._note_rank(node)
        for index, node in enumerate(scope.graph.node):
            self._add(index, node)
        for output in scope.graph.output:
            self._add_use(output.name)

    # ------------------------------------------------------------------ reading

    def view(self, name: str) -> tuple[_Tensor, Perm] | None:
        """The tensor that a name stands for and the frame it is in; None where the rank is not known."""
        if name in self.views:
            return self.views[name]
        if name not in self.tensors:
            if self.scope.shape(name) is None:
                return None
            self._new_tensor(name)
            if not self.tensors[name].constant:  # of a node without a choice, or from outside
                self._add_use(name)
        return self.tensors[name], identity(len(self.tensors[name].shape))

    def _new_tensor(self, name: str) -> None:
        shape = self.scope.shape(name)
        assert shape is not None
        count = prod(DYNAMIC_SIZE if size is None else size for size in shape)
        self.tensors[name] = _Tensor(name, shape, count * self.scope.itemsize(name), name in self.scope.constants)

    def _note_rank(self, node: onnx.NodeProto) -> None:
        """A permutation tells the rank where nothing else does."""
        for attribute in node.attribute:
            for name in (*node.input, *node.output):
                if self.scope.shape(name) is None:
                    self.scope.set_rank(name, len(attribute.ints))

    def _add(self, index: int, node: onnx.NodeProto) -> None:
        found = self.view(node.input[0]) if node.input else None
        if found is not None and is_standard(node, "Transpose"):
            tensor, via = found
            perm = tuple(node.attribute[0].ints) if node.attribute else identity(len(via))[::-1]
            self.views[node.output[0]] = tensor, compose(via, perm)
        elif found is not None and is_standard(node, "Shape") and not found[0].constant:
            pass  # whichever frame the tensor is in will do
        elif (motion := motion_of(node, self.scope)) is None:
            for name in (*node.input, *used_inside(node)):
                self._add_use(name)
        else:
            self.motions[index], self.frames[index] = motion, identity(motion.rank)
            for name, dims in zip(node.input, motion.inputs, strict=True):
                self._add_use(name, index, dims)
            for name, dims in zip(node.output, motion.outputs, strict=True):
                if name:
                    if self.scope.shape(name) is None:
                        self.scope.set_rank(name, len(dims))
                    self._new_tensor(name)
                    self._add_use(name, index, dims)

    def _add_use(self, name: str, node: int | None = None, dims: Perm | None = None) -> None:
        if (found := self.view(name)) is not None:
            tensor, via = found
            use = _Use(tensor, via) if node is None or dims is None else _Use(tensor, via, node, dims)
            tensor.uses.append(use)
            if use.node is not None:
                self._uses[use.node].append(use)

    # ------------------------------------------------------------------ choosing frames

    def improve(self) -> None:
        """Makes moves until none helps."""
        effort = EFFORT + 2 * len(self.motions)  # nodes to visit; from then on moves are small
        least = -effort
        improved = True
        while improved:
            improved = False
            for node, frame in list(self._starts()):
                if effort < least or frame in self._tried[node] or not self.motions[node].allows(frame):
                    continue
                move = self._connected(node, frame, max(effort, SMALL_MOVE))
                effort -= len(move)
                made = self._make_best(move)
                for moved, its_frame in move.items():
                    if made:
                        self._tried[moved].clear()
                    elif effort > 0 or moved == node:
                        self._tried[moved].add(its_frame)
                improved |= made

    def _starts(self) -> Iterator[tuple[int, Perm]]:
        """Nodes, each with a frame that would spare a Transpose right beside it."""
        for tensor in self.tensors.values():
            if tensor.copies(self.frames):
                wanted = {tensor.order(frame): frame for frame in (use.frame(self.frames) for use in tensor.uses)}
                for use in tensor.uses:
                    if use.node is not None:
                        own = tensor.order(use.frame(self.frames))
                        for order, frame in wanted.items():
                            if order != own:
                                yield use.node, use.frame_of_node(frame, self.frames)

    def _connected(self, node: int, frame: Perm, limit: int) -> dict[int, Perm]:
        """Frames for a node, the given one, and for those around it that leave no Transpose between any of them."""
        move = {node: frame}
        seen: set[tuple[str, Perm]] = set()
        queue = deque([node])
        while queue and len(move) < limit:
            for reached in self._uses[queue.popleft()]:
                tensor, frame = reached.tensor, reached.frame(move)
                if tensor.constant or (tensor.name, frame) in seen:
                    continue
                seen.add((tensor.name, frame))
                for use in tensor.uses:
                    if use.node is not None and use.node not in move:
                        its_frame = use.frame_of_node(frame, self.frames)
                        if self.motions[use.node].allows(its_frame):
                            move[use.node] = its_frame
                            queue.append(use.node)
        return move

    def _make_best(self, move: dict[int, Perm]) -> bool:
        """Makes the part of a move that is best, if it is better than none."""
        # Fewest Transposes, then fewest bytes; or the other way round, where the bytes would grow.
        for aim in (lambda t: MANY + t.bytes, lambda t: 1 + MANY * t.bytes):
            part = self._best_part(move, aim)
            if not part or self._make(part):
                return bool(part)
        return False

    def _best_part(self, move: dict[int, Perm], weight: Callable[[_Tensor], int]) -> dict[int, Perm]:
        """The nodes of a move that had better make it: the source's side of a minimum cut."""
        network = Network()
        for tensor in dict.fromkeys(use.tensor for node in move for use in self._uses[node] if not use.tensor.is_free):
            price = weight(tensor)
            wanted: set[Perm] = set()  # in any case
            staying: dict[Perm, set[Hashable]] = defaultdict(set)  # by these nodes if they stay
            moving: dict[Perm, set[Hashable]] = defaultdict(set)  # by these if they move
            for use in tensor.uses:
                now = then = tensor.order(use.frame(self.frames))
                if use.node in move:
                    then = tensor.order(use.frame(move))
                if now == then:
                    wanted.add(now)
                else:
                    staying[now].add(use.node)
                    moving[then].add(use.node)
            wanted.update(order for order in staying if staying[order] & moving.get(order, set()))
            if not wanted and staying:  # one copy there is at any rate, a second one if some stay and some move
                network.arc(moving.pop(then), staying.pop(now), price)
            for order in staying.keys() - wanted:
                network.arc({"source"}, staying[order], price)
            for order in moving.keys() - wanted:
                network.arc(moving[order], {"sink"}, price)
        moves = network.source_side("source", "sink")
        return {node: frame for node, frame in move.items() if node in moves and frame != self.frames[node]}

    def _make(self, move: dict[int, Perm]) -> bool:
        """Makes a move if it helps."""
        tensors = dict.fromkeys(use.tensor for node in move for use in self._uses[node])
        frames = {**self.frames, **move}
        spared = [(tensor.copies(self.frames) - tensor.copies(frames), tensor.bytes) for tensor in tensors]
        count, total = sum(n for n, _ in spared), sum(n * size for n, size in spared)
        helps = count >= 0 and total >= 0 and (count, total) != (0, 0)
        if helps:
            self.frames = frames
        return helps


class _Writer:
    """Writes a graph in its layout."""

    def __init__(self, scope: Scope, layout: _Layout) -> None:
        self.scope = scope
        self.layout = layout
        self.nodes: list[onnx.NodeProto] = []
        self._copies: dict[str, dict[Perm, str]] = defaultdict(dict)  # of a tensor by frame, the produced one first
        self._provided: set[str] = set()
        self._unsqueezed: dict[tuple[str, Perm], str] = {}
        self._transposes: dict[str, onnx.NodeProto] = {}
        self._views: dict[tuple[str, Perm], str] = {}  # what the graph called a tensor in a frame
        for name, (tensor, frame) in layout.views.items():
            self._views.setdefault((tensor.name, frame), name)

    def write(self) -> None:
        graph = self.scope.graph
        used = used_names(graph)
        nodes = list(graph.node)
        del graph.node[:]
        for index, node in enumerate(nodes):
            if is_standard(node, "Transpose") and node.output[0] in self.layout.views:
                self._transposes[node.output[0]] = node
                continue
            for name in used_inside(node):
                self._provide(name)
            if index in self.layout.motions:
                self._write_moved(index, node)
            elif is_standard(node, "Shape"):
                self._write_shape(node)
            else:
                node.input[:] = map(self._read, node.input)
                self.nodes.append(node)
        for output in graph.output:
            self._provide(output.name)
        graph.node.extend(self.nodes)

        drop_unused(graph, used)

    def _add(self, op_type: str, inputs: list[str], output: str, **attributes: Any) -> str:
        name = self.scope.fresh(f"{output}/{op_type}")
        self.nodes.append(helper.make_node(op_type, inputs, [output], name=name, **attributes))
        return output

    def _write_moved(self, index: int, node: onnx.NodeProto) -> None:
        motion, frame = self.layout.motions[index], self.layout.frames[index]
        for i, (name, dims) in enumerate(zip(node.input, motion.inputs, strict=True)):
            found = self.layout.view(name)
            if found is None or dims is None:
                node.input[i] = self._read(name)
            else:
                tensor, via = found
                node.input[i] = self._copy(tensor, compose(via, restrict(frame, dims)))
                if motion.broadcast:
                    node.input[i] = self._aligned(node.input[i], frame, dims)
        for i, (name, dims) in enumerate(zip(node.output, motion.outputs, strict=True)):
            if name:
                its_frame = restrict(frame, dims)
                node.output[i] = self._copies[name][its_frame] = self._name(self.layout.tensors[name], its_frame)
        if frame != identity(motion.rank):
            self._edit(node, motion.edit(frame))
        self.nodes.append(node)

    def _edit(self, node: onnx.NodeProto, edits: Edits) -> None:
        for key, value in edits.items():
            if isinstance(key, int):
                node.input.extend([""] * (key + 1 - len(node.input)))
                node.input[key] = self.scope.constant(value, f"{node.output[0]}_{key}")
            else:
                _set_attribute(node, key, value)

    def _write_shape(self, node: onnx.NodeProto) -> None:
        """The shape of a tensor in the frame it has, reordered."""
        found = self.layout.view(node.input[0])
        if found is None or found[0].constant or found[1] in self._copies_of(found[0]):
            node.input[0] = self._read(node.input[0])
            self.nodes.append(node)
            return
        tensor, via = found
        frame, name = next(iter(self._copies_of(tensor).items()))
        bounds = {attribute.name: attribute.i for attribute in node.attribute}
        order = compose(inverse(frame), via)[bounds.get("start") : bounds.get("end")]
        shape = self._add("Shape", [name], self.scope.fresh(f"{node.output[0]}_shape"))
        indices = self.scope.constant(np.array(order, np.int64), f"{node.output[0]}_order")
        self._add("Gather", [shape, indices], node.output[0], axis=0)

    # ------------------------------------------------------------------ values

    def _read(self, name: str) -> str:
        """The name under which a value is to be had now."""
        found = self.layout.view(name)
        return name if found is None else self._copy(*found)

    def _provide(self, name: str) -> None:
        """Makes a value available under its own name, as outputs and nested graphs need it."""
        if (now := self._read(name)) != name and name not in self._provided:
            self._provided.add(name)
            self._add("Identity", [now], name)

    def _copy(self, tensor: _Tensor, frame: Perm) -> str:
        """The name of a tensor in a frame; what makes it so is added where it is missing."""
        copies = self._copies_of(tensor)
        if frame not in copies:
            wanted = {use.frame(self.layout.frames) for use in tensor.uses}
            if tensor.constant and (tensor.is_free or wanted == {frame}):
                array = self.scope.array(tensor.name)
                assert array is not None
                copies[frame] = self.scope.constant(array.transpose(frame), f"{tensor.name}_transposed")
            else:
                copies[frame] = self._permuted(tensor, frame, copies)
        return copies[frame]

    def _copies_of(self, tensor: _Tensor) -> dict[Perm, str]:
        copies = self._copies[tensor.name]
        if not copies:
            copies[identity(len(tensor.shape))] = tensor.name
        return copies

    def _permuted(self, tensor: _Tensor, frame: Perm, copies: Mapping[Perm, str]) -> str:
        name = self._name(tensor, frame)
        order = tensor.order(frame)
        for other, source in copies.items():
            if tensor.order(other) == order:
                sizes = [-1 if (size := tensor.shape[i]) is None else size for i in frame]
                return self._add("Reshape", [source, self._ints(sizes, name)], name)
        produced, source = next(iter(copies.items()))
        perm = list(compose(inverse(produced), frame))
        if (known := self._transposes.get(name)) is None:
            return self._add("Transpose", [source], name, perm=perm)
        known.input[0] = source
        _set_attribute(known, "perm", perm)
        self.nodes.append(known)
        return name

    def _aligned(self, name: str, frame: Perm, dims: Perm) -> str:
        """An input of lower rank, with a size of 1 for each dimension that it lacks behind its first one."""
        first = next((i for i, dim in enumerate(frame) if dim in dims), len(frame))
        axes = tuple(i - first for i, dim in enumerate(frame[first:], first) if dim not in dims)
        if not axes or ((array := self.scope.array(name)) is not None and array.size == 1):
            return name
        if (name, axes) not in self._unsqueezed:
            if array is not None and array.nbytes <= LARGE:
                result = self.scope.constant(np.expand_dims(array, axes), name)
            else:
                result = self.scope.fresh(f"{name}_unsqueezed")
                if self.scope.opset < 13:
                    self._add("Unsqueeze", [name], result, axes=axes)
                else:
                    self._add("Unsqueeze", [name, self._ints(axes, result)], result)
            self._unsqueezed[name, axes] = result
        return self._unsqueezed[name, axes]

    def _ints(self, values: Iterable[int], stem: str) -> str:
        return self.scope.constant(np.array(list(values), np.int64), f"{stem}_constant")

    def _name(self, tensor: _Tensor, frame: Perm) -> str:
        if frame == identity(len(frame)):
            return tensor.name
        if (name := self._views.get((tensor.name, frame))) is None:
            name = self.scope.fresh(f"{tensor.name}_transposed")
            self.scope.add_info(name, tensor.name, frame)
        return name


def _set_attribute(node: onnx.NodeProto, name: str, value: Any) -> None:
    remove_attribute(node, name)
    node.attribute.append(helper.make_attribute(name, value))
