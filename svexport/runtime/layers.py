"""The outputs of submodules on both sides of a comparison: torch's by hooks, a file's by the modules its nodes name."""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from svexport.exporter.arguments import MODEL_ATTRIBUTE, FlatModel, leaves
from svexport.parity import Parity, parity
from svexport.runtime.session import OnnxEngine

if TYPE_CHECKING:
    import onnx

__all__ = ["Call", "Layer", "OnnxLayers", "TorchLayers", "compare_layers", "record"]

CHUNK_BYTES = 2**30
"""Layers are compared in groups whose outputs take about this much memory; both sides run once more for each group."""


@dataclass
class Call:
    """One call of a submodule, in order of completion.

    Attributes:
        module: its name in the model.
        scope: the same as the TorchScript exporter spells it: the names of all modules being called, ``/head/conv.0``.
        leaf: whether it has no submodules.
        follows: indices of the calls that returned the tensor it was called with.
        identity: whether it returned that tensor, or its values.
        shapes: of the tensors it returned.
        bytes: of them together.
        outputs: copies of them, if they were to be kept.
    """

    module: str
    scope: str
    leaf: bool
    follows: list[int]
    identity: bool
    shapes: list[tuple[int, ...]]
    bytes: int
    outputs: list[Tensor]


def record(flat: FlatModel, tensors: Sequence[Tensor], keep: Collection[int] = ()) -> list[Call]:
    """Runs the model and reports every call of a submodule, with the outputs of those numbered in ``keep``."""
    calls: list[Call] = []
    active: list[tuple[str, Tensor | None, list[int]]] = []
    producers: dict[int, tuple[weakref.ref[Tensor], list[int]]] = {}

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            source = next(_tensors([args, kwargs]), None)
            known, indices = producers.get(id(source), (None, []))
            scope = (active[-1][0] if active else "") + "/" + _scope_name(name)
            # By identity and not by address: a freed tensor's may be taken again.
            active.append((scope, source, list(indices) if known is not None and known() is source else []))

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            scope, source, follows = active.pop()
            outputs = list(_tensors(result))
            index = len(calls)
            for tensor in outputs:
                known, indices = producers.get(id(tensor), (None, []))
                if known is None or known() is not tensor:
                    indices = []
                    producers[id(tensor)] = (weakref.ref(tensor), indices)
                indices.append(index)
            calls.append(
                Call(
                    module=name,
                    scope=scope,
                    leaf=not any(module.children()),
                    follows=follows,
                    identity=source is not None and len(outputs) == 1 and _same(source, outputs[0]),
                    shapes=[tuple(t.shape) for t in outputs],
                    bytes=sum(t.numel() * t.element_size() for t in outputs),
                    # Copied at once: the next module may work in place.
                    outputs=[t.detach().clone() for t in outputs] if index in keep else [],
                )
            )

        return hook

    handles = []
    try:
        for name, module in getattr(flat, MODEL_ATTRIBUTE).named_modules():
            if name:
                handles.append(module.register_forward_pre_hook(enter(name), with_kwargs=True))
                handles.append(module.register_forward_hook(leave(name), with_kwargs=True))
        flat(*(t.clone() for t in tensors))
    finally:
        for handle in handles:
            handle.remove()
    return calls


def _tensors(value: Any) -> Iterator[Tensor]:
    return (leaf for _, leaf in leaves(value) if isinstance(leaf, Tensor))


def _same(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b))


def _scope_name(name: str) -> str:
    """The last part of a module's name, with the numbers after it: ``blocks.0`` of ``net.blocks.0``."""
    parts = name.split(".")
    start = max((i for i, part in enumerate(parts) if not part.isnumeric()), default=0)
    return ".".join(parts[start:])


@dataclass
class Layer:
    """One row of a comparison: a module's output and the values that may hold it.

    Attributes:
        name: of the module, or of two where the exporter folded one into the other: ``conv+bn``.
        modules: the same, one by one.
        calls: whose output the values should equal: the module's own or, where a later module may have been folded into
            it, that one's.
        names: for each of ``calls``.
        values: names of candidates in the file.
        certain: False where the exporter changed the weights without a trace of why.
    """

    name: str
    modules: set[str]
    calls: list[int]
    names: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    certain: bool = True
