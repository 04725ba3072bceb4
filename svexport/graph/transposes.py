"""Removing Transposes: every node may run on transposed tensors, and as few tensors as possible are transposed.

All Transposes are taken out first. What is left of one is the *frame* in which a use reads a tensor: the permutation it
wants it in. Producers have a frame too, and nodes that a Transpose commutes with (:mod:`svexport.graph.motion`) may choose
theirs. A tensor then costs one Transpose for each frame it is wanted in beyond the first, so that chains compose, equal
ones are shared and opposite ones vanish without a rule for any of it. All that remains is to choose frames.

A move starts at one node and takes all that are connected along, each to the frame that leaves no Transpose between them.
Which of them had better stay is a minimum cut: a tensor costs the same however many uses share a frame. A move is made
only if it leaves fewer Transposes or fewer transposed bytes and not more of either, so the search ends; when no move is
left, the graph is written anew.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, helper

from svexport.graph.cut import Network
from svexport.graph.motion import Motion, motion_of
from svexport.graph.nodes import graphs
from svexport.graph.permutation import Perm, compose, extend, identity, inverse, restrict
from svexport.graph.scope import Scope, scopes

__all__ = ["remove_transposes"]

DYNAMIC_SIZE = 64
"""What a dynamic size counts as where transposed bytes are compared."""

SMALL_BYTES = 2**16
"""Constants up to here are stored once for each frame they are wanted in."""


def remove_transposes(model: onnx.ModelProto) -> None:
    """Removes Transposes from a model, in place: those that cancel, also around the nodes they commute with, those that
    constants can be stored without, and those that move nothing but sizes of 1, which become a Reshape.

    Neither their number nor the bytes they move grow, with every dynamic size taken as 64. Inputs, outputs, opset and IR
    version stay as they are; local functions are left alone.

    Source: the cost of a tensor is a label cost (Delong, Osokin, Isack, Boykov: *Fast Approximate Energy Minimization with
    Label Costs*, 2012), a move an expansion move.
    """
    if any(is_standard(node, "Transpose") for graph in graphs(model.graph) for node in graph.node):
        for scope in scopes(model):
            layout = _Layout(scope)
            layout.improve()
            _Writer(scope, layout).write()


def is_standard(node: onnx.NodeProto, op_type: str) -> bool:
    return node.op_type == op_type and node.domain in ("", "ai.onnx")


class _Use(NamedTuple):
    """Something that has a tensor in a frame: the frame ``via``, followed by what a node's own does to ``dims``."""

    tensor: _Tensor
    node: int | None
    via: Perm
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

    @cached_property
    def reshapable(self) -> bool:
        return 0 not in self.shape and self.shape.count(None) < 2

    def order(self, frame: Perm) -> Perm:
        """Equal for two frames if a Reshape leads from one to the other."""
        return tuple([i for i in frame if self.shape[i] != 1]) if self.reshapable else frame

    @property
    def is_free(self) -> bool:
        return self.constant and self.bytes <= SMALL_BYTES

    def copies(self, frames: Mapping[int, Perm]) -> int:
        """How many Transposes it takes."""
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
            shape = self.scope.shape(name)
            if shape is None:
                return None
            self._new_tensor(name, shape)
            if not self.tensors[name].constant:  # of a node without a choice, or from outside
                self._add_use(name)
        return self.tensors[name], identity(len(self.tensors[name].shape))

    def _new_tensor(self, name: str, shape: tuple[int | None, ...]) -> _Tensor:
        dtype = self.scope.infos[name].elem_type
        known = dtype not in (TensorProto.UNDEFINED, TensorProto.STRING)
        size = helper.tensor_dtype_to_np_dtype(dtype).itemsize if known else 4
        count = prod(DYNAMIC_SIZE if s is None else s for s in shape)
        tensor = self.tensors[name] = _Tensor(name, shape, size * count, name in self.scope.constants)
        return tensor

    def _note_rank(self, node: onnx.NodeProto) -> None:
        """A permutation tells the rank where nothing else does."""
        for attribute in node.attribute:
            for name in (*node.input, *node.output):
                if self.scope.shape(name) is None:
                    self.scope.set_shape(name, (None,) * len(attribute.ints))

    def _add(self, index: int, node: onnx.NodeProto) -> None:
        if is_standard(node, "Transpose") and (found := self.view(node.input[0])) is not None:
            tensor, via = found
            perm = tuple(node.attribute[0].ints) if node.attribute else identity(len(via))[::-1]
            self.views[node.output[0]] = tensor, compose(via, perm)
        elif is_standard(node, "Shape") and self.reads_any_frame(node.input[0]):
            return
        elif (motion := motion_of(node, self.scope)) is None:
            for name in (*node.input, *self.scope.captured(node)):
                self._add_use(name)
        else:
            self.motions[index], self.frames[index] = motion, identity(motion.rank)
            for name, dims in zip(node.input, motion.inputs, strict=True):
                found = self.view(name)
                if found is not None and dims is not None:
                    self._add_use(name, index, dims)
                else:
                    self._add_use(name)
            ranks = [len(dims) for dims in motion.outputs]
            for name, dims in zip(node.output, motion.outputs, strict=True):
                ...

    def _add_use(self, name: str, node: int | None = None, dims: Perm = ()) -> None:
        if (found := self.view(name)) is not None:
            ...
