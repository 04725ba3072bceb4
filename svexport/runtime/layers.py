"""Submodule outputs on both sides of a comparison: torch's by hooks, a file's by the modules that its nodes name."""

from __future__ import annotations

import re
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Collection, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn

from svexport.parity import Parity, parity
from svexport.runtime.session import OnnxEngine
from svexport.runtime.where import Where, locate
from svexport.tracing.arguments import MODEL_ATTRIBUTE, FlatModel, leaves
from svexport.tracing.reach import bytes_of
from svexport.tracing.source import shown_line, user_line

if TYPE_CHECKING:
    import onnx

__all__ = ["Call", "Compared", "Groups", "Layer", "OnnxLayers", "TorchLayers", "compare_layers", "record"]

CHUNK_BYTES = 2**30
"""Layers are compared in groups whose outputs take about this many bytes; both sides run once more for each group."""


@dataclass
class Call:
    """One call of a submodule; calls are listed in order of completion.

    Attributes:
        module: name of the submodule in the model.
        scope: the name as the TorchScript exporter writes it: all modules being called, ``/head/conv.0``.
        leaf: whether the module has no submodules.
        follows: indices of the calls that returned the tensor it was called with.
        identity: whether it returned that tensor, or equal values.
        shapes: shapes of the tensors it returned.
        bytes: total size of these tensors.
        outputs: copies of these tensors, if requested.
        line: line of the user's source that made the call; None if there is none.
    """

    module: str
    scope: str
    leaf: bool
    follows: list[int]
    identity: bool
    shapes: list[tuple[int, ...]]
    bytes: int
    outputs: list[Tensor]
    line: tuple[str, int, str] | None = None


def record(flat: FlatModel, tensors: Sequence[Tensor], keep: Collection[int] = ()) -> list[Call]:
    """Runs the model and reports every call of a submodule, with the outputs of those numbered in ``keep``."""
    calls: list[Call] = []
    active: list[tuple[str, Tensor | None, list[int], tuple[str, int, str] | None]] = []
    producers: dict[int, tuple[weakref.ref[Tensor], list[int]]] = {}

    def enter(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any) -> None:
            source = next(_tensors([args, kwargs]), None)
            known, indices = producers.get(id(source), (None, []))
            scope = (active[-1][0] if active else "") + "/" + _scope_name(name)
            # Compare identities, not addresses: the address of a freed tensor may be reused.
            follows = list(indices) if known is not None and known() is source else []
            active.append((scope, source, follows, user_line(sys._getframe(1), record.__code__)))

        return hook

    def leave(name: str) -> Any:
        def hook(module: nn.Module, args: Any, kwargs: Any, result: Any) -> None:
            scope, source, follows, line = active.pop()
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
                    bytes=sum(map(bytes_of, outputs)),
                    # Copy now: the next module may change it in place.
                    outputs=[t.detach().clone() for t in outputs] if index in keep else [],
                    line=line,
                )
            )

        return hook

    handles = []
    try:
        for name, module in getattr(flat, MODEL_ATTRIBUTE).named_modules():
            if name and not isinstance(module, torch.jit.ScriptModule):  # script modules accept no hooks
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
    """The last part of a module's name, including numbers after it: ``blocks.0`` for ``net.blocks.0``."""
    parts = name.split(".")
    start = max((i for i, part in enumerate(parts) if not part.isnumeric()), default=0)
    return ".".join(parts[start:])


@dataclass
class Layer:
    """A module's output on one side and the values that may hold it on the other.

    Attributes:
        expected: calls whose output it may be, keyed by the layer's name in that case: the module's own call and, if
            the exporter may have folded a later module into it, that module's call as ``conv+bn``.
        modules: all modules involved.
        values: candidate values, as the other side names them.
        certain: False if the exporter changed the weights and the file does not show why.
        source: the line of the model that its last node came from, if the other side knows it.
    """

    expected: dict[str, int]
    modules: set[str]
    values: list[Any]
    certain: bool = True
    source: str = ""


class Inside(Protocol):
    """The other side of a comparison.

    Attributes:
        bisects: whether it compares only a few of the layers.
    """

    bisects: bool

    def layers(self, calls: Sequence[Call]) -> list[Layer]:
        """The layers it has values for, in order of execution."""

    def groups(self, layers: Sequence[Layer], calls: Sequence[Call]) -> Groups:
        """Yields indices of the layers to compare next, and is sent their verdicts."""

    def fetch(self, layers: Sequence[Layer]) -> list[list[Tensor]]:
        """The values of each layer's candidates."""


Groups: TypeAlias = "Generator[list[int], dict[int, bool], None]"
"""A verdict says for each layer that could be compared whether it is within the tolerances."""


@dataclass
class Compared:
    """The results of comparing all layers.

    Attributes:
        parities: one per output of each layer, in order of execution.
        sources: by the name of a parity, the line of the model: of the other side's last node, else of the call.
        where: where the error lies in the first parity outside the tolerances; None if all are within them.
    """

    parities: list[Parity] = field(default_factory=list)
    sources: dict[str, str] = field(default_factory=dict)
    where: Where | None = None


def compare_layers(
    flat: FlatModel,
    tensors: Sequence[Tensor],
    inside: Inside,
    wanted: Collection[str] | None,
    *,
    rtol: float,
    atol: float,
    notes: list[str],
) -> Compared:
    """Compares each module (or wanted module) that can be compared, one entry per output; notes name the others."""
    calls = record(flat, tensors)
    layers = [layer for layer in inside.layers(calls) if wanted is None or layer.modules.intersection(wanted)]
    found: dict[int, list[Parity]] = {}
    where: dict[int, Where | None] = {}
    made = Compared()
    choice = inside.groups(layers, calls)
    group = next(choice, None)
    while group is not None:
        chosen = [layers[number] for number in group]
        kept = record(flat, tensors, keep={index for layer in chosen for index in layer.expected.values()})
        for number, layer, values in zip(group, chosen, inside.fetch(chosen), strict=True):
            results = _compare(layer, kept, values, rtol, atol)
            found[number] = [p for p, _, _ in results]
            line = calls[next(reversed(layer.expected.values()))].line
            if source := layer.source or (shown_line(*line) if line else ""):
                made.sources |= dict.fromkeys([p.name for p in found[number]], source)
            failed = [(p.name, e, a) for p, e, a in results if not p.ok]
            if failed and number < min(where, default=len(layers)):
                where = {number: locate(*failed[0], rtol=rtol, atol=atol)}
        try:
            group = choice.send({number: all(p.ok for p in found[number]) for number in group if found[number]})
        except StopIteration:
            group = None
    made.parities = [p for number in sorted(found) for p in found[number]]
    made.where = next(iter(where.values()), None)
    compared = {name for number, results in found.items() if results for name in layers[number].modules}
    _note_missing(calls, compared, wanted, inside.bisects, notes)
    return made


def _note_missing(
    calls: Sequence[Call], compared: Collection[str], wanted: Collection[str] | None, bisected: bool, notes: list[str]
) -> None:
    called = dict.fromkeys(call.module for call in calls if not call.identity)
    missing = [name for name in called if name not in compared and (wanted is None or name in wanted)]
    if bisected and wanted is None:
        missing = []  # bisection skips layers on purpose
    for names, reason in (
        (missing, "the other side has no value that only these compute"),
        ([name for name in wanted or () if name not in {call.module for call in calls}], "never called, or scripted"),
    ):
        if names:
            shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
            notes.append(f"not compared: {shown} ({reason})")


class _Everything:
    """Compares all layers."""

    bisects = False

    def groups(self, layers: Sequence[Layer], calls: Sequence[Call]) -> Groups:
        """Yields groups of about CHUNK_BYTES, with a progress bar on a terminal."""
        from rich.console import Console
        from rich.progress import Progress

        with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
            task = progress.add_task("comparing layers", total=len(layers))
            group: list[int] = []
            size = 0
            for number, layer in enumerate(layers):
                needs = sum(calls[index].bytes for index in layer.expected.values())
                if group and size + needs > CHUNK_BYTES:
                    yield group
                    progress.advance(task, len(group))
                    group, size = [], 0
                group.append(number)
                size += needs
            if group:
                yield group


def _compare(
    layer: Layer, calls: Sequence[Call], values: Sequence[Tensor], rtol: float, atol: float
) -> list[tuple[Parity, Tensor, Tensor]]:
    results: list[tuple[Parity, Tensor, Tensor]] = []
    for name, index in layer.expected.items():
        outputs = calls[index].outputs
        pairs = _pair(outputs, values)
        results = []
        for number, (output, value) in enumerate(zip(outputs, pairs, strict=True)):
            if value is not None:
                label = f"{name}[{number}]" if len(outputs) > 1 else name
                value = converted(output, value)
                results.append((parity(label, output, value, rtol=rtol, atol=atol), output, value))
        if results and all(p.ok for p, _, _ in results):
            return results
    return results if layer.certain else []


def _pair(outputs: Sequence[Tensor], values: Sequence[Tensor]) -> list[Tensor | None]:
    """For each output the last value of its shape, or, if several outputs have one shape, the closest value."""
    left = list(values)
    pairs: list[Tensor | None] = []
    for output in outputs:
        fitting = [index for index, value in enumerate(left) if value.shape == output.shape]
        if sum(other.shape == output.shape for other in outputs) > 1:
            fitting.sort(key=lambda index: -parity("", output, converted(output, left[index])).max_abs)
        pairs.append(left.pop(fitting[-1]) if fitting else None)
    return pairs


def converted(expected: Tensor, actual: Tensor) -> Tensor:
    """``actual`` in the data type of ``expected``, if both are floating point or both integers."""
    floats = expected.is_floating_point() and actual.is_floating_point()
    integers = not any(t.is_floating_point() or t.is_complex() or t.dtype == torch.bool for t in (expected, actual))
    return actual.to(expected.dtype) if floats or integers else actual


def _numbered(calls: Sequence[Call]) -> list[str]:
    """The names of the calls' modules, numbered if a module is called several times: ``head (2)``."""
    total = Counter(call.module for call in calls)
    seen: Counter[str] = Counter()
    names = []
    for call in calls:
        seen[call.module] += 1
        names.append(f"{call.module} ({seen[call.module]})" if total[call.module] > 1 else call.module)
    return names


class TorchLayers(_Everything):
    """The inside of a second torch model: submodules of the same name."""

    def __init__(self, flat: FlatModel, tensors: Sequence[Tensor]) -> None:
        self._flat = flat
        self._tensors = tensors
        self._indices = {name: index for index, name in enumerate(_numbered(record(flat, tensors)))}

    def layers(self, calls: Sequence[Call]) -> list[Layer]:
        """The layers of this side, with the torch calls that they belong to."""
        return [
            Layer({name: index}, {calls[index].module}, [self._indices[name]])
            for index, name in enumerate(_numbered(calls))
            if name in self._indices
        ]

    def fetch(self, layers: Sequence[Layer]) -> list[list[Tensor]]:
        """The values of each of these layers, from one run."""
        calls = record(self._flat, self._tensors, keep={index for layer in layers for index in layer.values})
        return [calls[index].outputs for layer in layers for index in layer.values]


class OnnxLayers(_Everything):
    """The inside of an ONNX file: values that nodes of one module compute and nodes of other modules use."""

    def __init__(self, engine: OnnxEngine, feeds: Sequence[Tensor]) -> None:
        self._engine = engine
        self._feeds = feeds

    def layers(self, calls: Sequence[Call]) -> list[Layer]:
        """The layers of this side, with the torch calls that they belong to."""
        graph = self._engine.model().graph
        nodes = _nodes_of(graph, calls)
        names = _numbered(calls)
        users = _users(graph)
        outputs = {output.name for output in graph.output}
        found = []
        absorbed: set[int] = set()  # calls folded into an earlier one
        explained: set[int] = set()  # nodes that also do the work of absorbed calls
        for index, call in enumerate(calls):
            own = set(nodes.get(index, ()))
            values: list[str] = []
            last = -1
            for number in sorted(own):
                node = graph.node[number]
                leaving = [v for v in node.output if v and (v in outputs or users[v] - own)]
                if leaving and "Sequence" not in node.op_type and "Optional" not in node.op_type:
                    values += leaving
                    last = number
            if not values:
                continue
            modules, expected = {call.module}, {names[index]: index}
            # The TorchScript exporter folds a BatchNorm into the Conv before it, and renames the Conv's weights.
            node = graph.node[last]
            renamed = node.op_type == "Conv" and node.input[1].startswith("onnx::")
            later = next((i for i, c in enumerate(calls) if index in c.follows and _vanished(nodes, calls, i)), None)
            if renamed and later is not None:
                absorbed.add(later)
                explained.add(last)
                expected[_together(names[index], names[later])] = later
                modules.add(calls[later].module)
            # The dynamo exporter folds the Conv into the BatchNorm after it.
            earlier = next((i for i in call.follows if i not in absorbed and _vanished(nodes, calls, i)), None)
            if call.leaf and earlier is not None:
                expected = {_together(names[earlier], names[index]): index}
                modules.add(calls[earlier].module)
            certain = not renamed or last in explained
            found.append(Layer(expected, modules, values, certain, node.doc_string.split("\n")[0]))
        return found

    def fetch(self, layers: Sequence[Layer]) -> list[list[Tensor]]:
        """The values of each of these layers, from one run."""
        probe = self._engine.with_outputs(value for layer in layers for value in layer.values)
        values = dict(zip(probe.output_names, probe.run(self._feeds), strict=True))
        return [[values[name] for name in layer.values] for layer in layers]


def _vanished(nodes: dict[int, list[int]], calls: Sequence[Call], index: int) -> bool:
    """Whether a module computes something but the file has no node for it."""
    return nodes.get(index) == [] and not calls[index].identity


def _together(first: str, second: str) -> str:
    return f"{first}+{second.rsplit('.', 1)[-1]}"


def _nodes_of(graph: onnx.GraphProto, calls: Sequence[Call]) -> dict[int, list[int]]:
    """The nodes of each call, including those of its submodules; calls that cannot be told apart are left out."""
    named = any(_namespace(node) for node in graph.node)  # dynamo exporter: namespaces; else scopes in node names
    known: dict[str, list[int]] = defaultdict(list)
    for index, call in enumerate(calls):
        known[call.module if named else call.scope].append(index)
    found: dict[str, list[int]] = {key: [] for key in known}
    for number, node in enumerate(graph.node):
        if node.op_type != "Constant":  # calls of one module share them
            for key in _namespace(node) if named else _scopes(node.name, known):
                if key in found:
                    found[key].append(number)
    nodes: dict[int, list[int]] = {}
    for key, indices in known.items():
        length, rest = divmod(len(found[key]), len(indices))
        runs = [found[key][i * length : (i + 1) * length] for i in range(len(indices))]
        kinds = {tuple(graph.node[number].op_type for number in run) for run in runs}
        if not rest and len(kinds) == 1:
            nodes |= dict(zip(indices, runs, strict=True))
    return nodes


def _namespace(node: onnx.NodeProto) -> list[str]:
    """Modules of ``": pkg.Net/blocks.0: pkg.Block/blocks.0.conv: torch.nn.Conv2d/conv2d: aten.conv2d.default"``."""
    for entry in node.metadata_props:
        if entry.key == "namespace":
            names = [part.split(": ")[0] for part in entry.value.split("/")[:-1]]
            return [name.removeprefix(MODEL_ATTRIBUTE).removeprefix(".") for name in names if name]
    return []


def _scopes(name: str, known: Collection[str]) -> Iterator[str]:
    """Scopes of ``/blocks.0/conv_1/Conv_3`` from the outermost; ``_1`` marks the second call of a module."""
    scope = ""
    for part in name.removeprefix(f"/{MODEL_ATTRIBUTE}").split("/")[1:-1]:
        again = re.fullmatch(r"(.+)_\d+", part)
        if f"{scope}/{part}" not in known and again:
            part = again[1]
        scope = f"{scope}/{part}"
        if scope not in known:
            return
        yield scope


def _users(graph: onnx.GraphProto) -> dict[str, set[int]]:
    """For each value, the nodes that use it directly or in a nested graph."""
    from svexport.graph.walk import graphs

    users: dict[str, set[int]] = defaultdict(set)
    for number, node in enumerate(graph.node):
        nested = [attribute.g for attribute in node.attribute if attribute.HasField("g")]
        inner = [n for one in nested for g in graphs(one) for n in g.node]
        for name in (name for n in (node, *inner) for name in n.input):
            users[name].add(number)
    return users
