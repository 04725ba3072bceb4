"""From what a tracer wrote to the file that was asked for."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import onnx
from torch import Tensor

from svexport._version import __version__
from svexport.errors import ExportError
from svexport.exporter.clean import clean, keep_inputs, keep_zero_padding, name_sizes
from svexport.exporter.report import NodeSource
from svexport.graph.bodies import attach, ir_version, lower_in_place, node_types, state_types
from svexport.graph.conditions import take_decided_branches
from svexport.graph.fold import fold_constants
from svexport.graph.integers import write_exactly
from svexport.graph.log_sigmoid import write_log_sigmoids
from svexport.graph.means import write_means
from svexport.graph.nodes import beyond_plugin, separate_names, svexport_nodes
from svexport.graph.nothing import write_for_nothing
from svexport.graph.opsets.dtypes import fit_all
from svexport.graph.quantized_weights import FIRST_WITH_INT8_WEIGHTS, store_quantized
from svexport.graph.returned import note_returned
from svexport.graph.saving import FROM_ONE, save
from svexport.graph.scope import light_copy
from svexport.graph.simplify import simplify
from svexport.graph.types import infer_types
from svexport.graph.walk import graphs, opset_of
from svexport.graph.weights import hold_weights
from svexport.ops._op import OPS
from svexport.symbolic._builder import Value, dtype_name
from svexport.tensorrt.forms import write_for, write_plainly
from svexport.tensorrt.support.target import Target
from svexport.tracing.sizes import Size

__all__ = ["Finished", "Signature", "Wanted", "description", "finish"]


@dataclass(frozen=True)
class Wanted:
    """The options of :func:`svexport.export` that say what the file is to be like."""

    opset: int
    plugins: bool | Collection[str]
    target: Target | None
    simplify: bool
    weights: str


@dataclass(frozen=True)
class Signature:
    """What the file takes and returns.

    Attributes:
        inputs: by name.
        axes: the symbols of dynamic axes, by input.
        sizes: what is known of each symbol.
        outputs: their names.
        returned: the keys of each, where the model returns a dict.
        frozen: inputs that became constants, with what they are.
    """

    inputs: Mapping[str, Tensor]
    axes: Mapping[str, Mapping[int, str]]
    sizes: Mapping[str, Size]
    outputs: Sequence[str]
    returned: Sequence[tuple[str, ...]]
    frozen: Mapping[str, str]


@dataclass(frozen=True)
class Finished:
    """What :func:`finish` learned of the file, besides writing it.

    Attributes:
        svexport_nodes: as traced.
        lines: the user's, by name of a node, as far as the tracer tells.
        facts: of the report, by field.
        notes: remarks.
    """

    svexport_nodes: list[NodeSource]
    lines: Mapping[str, str]
    facts: dict[str, Any]
    notes: list[str] = field(default_factory=list)


def finish(model: onnx.ModelProto, file: Path, wanted: Wanted, signature: Signature) -> Finished:
    """Names, sources, bodies, IR version: changes what a tracer wrote, checks and saves it.

    Raises:
        ExportError: if it has another opset, or is no valid ONNX.
    """
    if opset_of(model) != wanted.opset:
        raise ExportError(
            f"the exporter wrote opset {opset_of(model)} where {wanted.opset} was asked for; try another opset"
        )
    keep_inputs(model, signature.inputs, signature.axes)
    lines = clean(model, list(signature.inputs), signature.outputs)
    traced = _counts(model)
    keep = _kept_types(wanted)
    nodes = _keep(model, keep, wanted.opset)
    notes: list[str] = []
    if wanted.simplify:
        model = _simplified(model, keep, notes)
    keep_zero_padding(model)
    lowered = _standard(model, wanted.target)
    name_sizes(model, lowered, signature.sizes)
    if wanted.weights == "attributes":
        hold_weights(model)
    attach(model)
    _sign(model, signature)
    _check(model)
    save(model, file)
    facts = {
        "opset": opset_of(model),
        "ir_version": model.ir_version,
        "inputs": {i.name: _describe(i) for i in model.graph.input},
        "outputs": {o.name: _describe(o) for o in model.graph.output},
        "nodes": _counts(model),
        "traced_nodes": traced,
        "lowered_nodes": _counts(lowered),
    }
    return Finished(nodes, lines, facts, notes)


def _check(model: onnx.ModelProto) -> None:
    """Of nodes that take no integers as narrow as they are given, makes others that do; then the file has to be valid.

    Raises:
        ExportError: if it is not.
    """
    for fits in (fit_all, None):
        try:
            onnx.checker.check_model(light_copy(model), full_check=True)
        except Exception as error:
            if fits is not None and fits(model):
                continue
            later = _later(str(error), opset_of(model))
            raise ExportError(f"the exported file is not valid ONNX: {error}{later}") from error
        return


def _kept_types(wanted: Wanted) -> set[str]:
    """Of svexport nodes that stay nodes."""
    plugins = wanted.plugins
    keep = set() if plugins is False else node_types(None if plugins is True else plugins)
    only_plugins = plugins is True or wanted.target is not None
    return keep - {op.node_type for op in OPS.values() if op.inline or (only_plugins and not op.has_plugin)}


def _keep(model: onnx.ModelProto, keep: Collection[str], opset: int) -> list[NodeSource]:
    """Lowers all svexport nodes but those of the types, and tells of all of them."""

    def goes(node: onnx.NodeProto) -> bool:
        return node.op_type not in keep or beyond_plugin(node)

    nodes = [NodeSource(n.name, n.op_type, n.doc_string, goes(n)) for n in svexport_nodes(model)]
    model.ir_version = ir_version(opset)
    state_types(model)
    lower_in_place(model, goes)
    return nodes


def _simplified(model: onnx.ModelProto, keep: Collection[str], notes: list[str]) -> onnx.ModelProto:
    before = _counts(model)
    model = simplify(model, plugins=OPS["space_to_depth"].node_type in keep)
    after = _counts(model)
    notes.append(
        f"simplify: {sum(before.values())} nodes became {sum(after.values())}, "
        f"{before.get('Transpose', 0)} Transposes {after.get('Transpose', 0)}"
    )
    return model


def _standard(model: onnx.ModelProto, target: Target | None) -> onnx.ModelProto:
    """Brings the model into forms that all runtimes read alike, or the target; returns it in standard ONNX."""
    write_plainly(model)
    infer = partial(_inferred, model)
    write_exactly(model, infer)
    write_means(model, infer)
    write_for_nothing(model, infer)
    write_log_sigmoids(model, infer)
    lowered = _lowered(model)
    while fold_constants(model, lowered) or take_decided_branches(model, lowered):
        lowered = _lowered(model)
    if target is not None:
        if target.version >= FIRST_WITH_INT8_WEIGHTS:
            store_quantized(model)
        separate_names(model)
        write_for(model, target, infer_types(lowered))
        lowered = _lowered(model)
    return lowered


def _sign(model: onnx.ModelProto, signature: Signature) -> None:
    model.producer_name, model.producer_version = "svexport", __version__
    model.graph.name = "svexport"
    if signature.returned:
        note_returned(model, signature.returned)
    model.doc_string = description(signature)


def description(signature: Signature, from_one: Sequence[str] = ()) -> str:
    """What a file says of itself: inputs that became constants, and dynamic sizes that may not be 0."""
    constants = (f"{name} is a constant: {text}" for name, text in signature.frozen.items())
    return "\n".join((*constants, *(f"{root}{FROM_ONE}" for root in from_one)))


def _inferred(model: onnx.ModelProto) -> Mapping[str, Value]:
    return infer_types(_lowered(model))


def _lowered(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model in standard ONNX, without its large weights."""
    lowered = light_copy(model)
    lower_in_place(lowered, lambda _: True)
    return lowered


def _later(error: str, opset: int) -> str:
    """Of an operator that a model's own symbolic wrote: the opset from which it is another one."""
    found = re.search(r"for operator (\w+)", error) or re.search(r"OpType: (\w+)", error)
    schemas = onnx.defs.get_all_schemas_with_history() if found else []
    versions = sorted({s.since_version for s in schemas if found and s.name == found[1] and not s.domain})
    later = next((version for version in versions if version > opset), None)
    return f"\n  {found[1]} has changed in opset {later}: try opset={later} or later" if found and later else ""


def _counts(model: onnx.ModelProto) -> dict[str, int]:
    """Nodes by type, nested graphs included, constants left out."""
    return dict(Counter(n.op_type for g in graphs(model.graph) for n in g.node if n.op_type != "Constant"))


def _describe(info: onnx.ValueInfoProto) -> str:
    tensor = info.type.tensor_type
    dims = ", ".join(d.dim_param or (str(d.dim_value) if d.HasField("dim_value") else "?") for d in tensor.shape.dim)
    return f"{dtype_name(tensor.elem_type)}[{dims}]"
