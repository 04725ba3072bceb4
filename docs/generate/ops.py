"""A page per op, all of it from the op's definition, and the tables of what is measured and documented elsewhere."""

from __future__ import annotations

import inspect
import re
from collections import Counter
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import onnx
import torch
from onnx import helper, printer

from docs.generate import reference
from svexport.errors import UnsupportedError
from svexport.graph import lower
from svexport.graph.nodes import set_attributes
from svexport.ops._op import DOMAIN, OPS, Op, as_tuple
from svexport.symbolic import SYMBOLICS
from svexport.symbolic._symbolic import qualified

__all__ = ["body", "functions", "navigation", "pages"]

ROOT = Path(__file__).parents[2]
OPSETS = (11, 17)
_RESULTS = "benchmarks/results/nvidia-h200"


@cache
def functions() -> dict[str, list[str]]:
    """By op, the functions of ``svexport.ops`` that its file defines."""
    public = import_module("svexport.ops").__all__
    found = {}
    for name in OPS:
        module = import_module(f"svexport.ops.{name}")
        found[name] = [member for member in module.__all__ if member in public and inspect.isfunction(_member(member))]
    return found


def navigation() -> list[Any]:
    return ["ops/index.md", *({name: f"ops/{name}.md"} for name in sorted(OPS))]


def pages() -> dict[str, str]:
    """Place on the site -> text."""
    return {"ops/index.md": _index(), **{f"ops/{name}.md": _page(op) for name, op in OPS.items()}}


def sample(op: Op) -> tuple:
    """The first of the op's samples, always of the same numbers."""
    generator = torch.Generator().manual_seed(0)
    return next(iter(op.samples(lambda *shape: torch.randn(*shape, generator=generator))))


def body(op: Op, opset: int, *, dynamic: bool = False) -> onnx.ModelProto | None:
    """The body for the op's first sample as a model of its own; None where the op has none at that opset.

    ``dynamic`` leaves all sizes of the inputs open.
    """
    args = sample(op)
    tensors, attributes = [], []
    for argument, value in zip(op.arguments, args, strict=True):
        if argument.is_tensor:
            tensors += [(argument.name, value)] if not isinstance(value, (list, tuple)) else _numbered(argument, value)
        else:
            attributes.append(value)
    inputs = [_info(name, tensor, dynamic) for name, tensor in tensors if tensor is not None]
    outputs = [_info(f"output_{i}", tensor, dynamic) for i, tensor in enumerate(as_tuple(op(*args)))]
    names = ["" if tensor is None else name for name, tensor in tensors]
    node = helper.make_node(op.node_type, names, [o.name for o in outputs], name=op.name, domain=DOMAIN)
    set_attributes(node, op, attributes)
    imports = [helper.make_opsetid("", opset), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(helper.make_graph([node], op.name, inputs, outputs), opset_imports=imports)
    try:
        return lower(model)
    except UnsupportedError:
        return None


def _numbered(argument: Any, tensors: Any) -> list[tuple[str, torch.Tensor]]:
    return [(f"{argument.name}_{i}", tensor) for i, tensor in enumerate(tensors)]


def _info(name: str, tensor: torch.Tensor, dynamic: bool) -> onnx.ValueInfoProto:
    shape = [f"{name}_{axis}" for axis in range(tensor.dim())] if dynamic else list(tensor.shape)
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(tensor.numpy().dtype), shape)


def _module(op: Op) -> ModuleType:
    return import_module(f"svexport.ops.{op.name}")


def _member(name: str) -> Any:
    return getattr(import_module("svexport.ops"), name)


def _summary(text: str | None) -> str:
    """The first sentence of a docstring, without roles and double backticks."""
    first = re.split(r"\n\n", inspect.cleandoc(text or ""))[0]
    return re.sub(r":\w+:`~?([^`]+)`", r"`\1`", first.replace("``", "`")).replace("\n", " ")


def _index() -> str:
    rows = [
        f"| [{name}]({name}.md) | {_summary(_module(op).__doc__)} | `{op.node_type}` | {_kind(op)} |"
        for name, op in sorted(OPS.items())
    ]
    return "\n".join(
        [
            "# Ops",
            "",
            "One definition per op: its reference in plain torch. The torch operator, the ONNX node, the body in",
            "standard ONNX, the TensorRT plugin and the tests all follow from it, or are held to it. These pages are",
            "generated from the definitions.",
            "",
            "| op | what it is | node | in a file |",
            "|---|---|---|---|",
            *rows,
            "",
        ]
    )


def _kind(op: Op) -> str:
    """What becomes of a node of the op in a file."""
    if op.inline:
        return "always standard ONNX"
    if not op.has_plugin:
        return "standard ONNX, unless the node is asked for"
    return "a node with a plugin" + (", or standard ONNX" if callable(op.plugin) else "")


def _page(op: Op) -> str:
    module = _module(op)
    pieces = [f"# {op.name}", _summary(module.__doc__)]
    pieces += [reference.entry(f"svexport.ops.{name}", _member(name)) for name in functions()[op.name]]
    public = {name: getattr(module, name) for name in module.__all__}
    classes = [name for name, value in public.items() if isinstance(value, type) and issubclass(value, torch.nn.Module)]
    if classes:
        linked = ", ".join(f"[`{name}`](../reference/svexport.ops.md#svexport.ops.{name})" for name in classes)
        pieces.append(f"As `nn.Module`: {linked}.")
    pieces += [_equals(op), _node(op), _body(op), _plugin(op), _gradients(op), _kernels(op), _reference(op)]
    return "\n\n".join(filter(None, pieces)) + "\n"


def _equals(op: Op) -> str:
    """The functions of unedited models that it stands for."""
    symbolic = SYMBOLICS[op.node_type]
    if not symbolic.aten:
        return ""
    until = f", up to opset {symbolic.until}; later the exporter's own conversion is right" if symbolic.until else ""
    names = ", ".join(f"`{qualified(name)}`" for name in symbolic.aten)
    return f"## In unedited models\n\n`svexport.export` takes {names} for it{until}."


def _node(op: Op) -> str:
    rows = [
        f"| `{a.name}` | {'input' if a.is_tensor else 'attribute'} | "
        f"{'tensors' if a.kind == 'tensors' else a.kind}{', may be absent' * a.optional}"
        f"{', or computed: then an input after the tensors' * a.symbolic} |"
        for a in op.arguments
    ]
    return "\n".join(
        [
            f"## Node `svexport::{op.node_type}`",
            "",
            f"`torch.ops.svexport.{op.name}{op.schema}`; {_kind(op)}.",
            "",
            "| name | is | kind |",
            "|---|---|---|",
            *rows,
        ]
    )


def _body(op: Op) -> str:
    """Nodes of the body, counted by building it, and its text."""
    args = sample(op)
    shapes = ", ".join(str(list(t.shape)) for t in _tensors(args))
    rows, text = [], ""
    for opset in OPSETS:
        for dynamic in (False, True):
            model = body(op, opset, dynamic=dynamic)
            sizes = "open" if dynamic else "known"
            if model is None:
                rows.append(f"| {opset} | {sizes} | | none at this opset |")
                continue
            counts = Counter(n.op_type for n in model.graph.node if n.op_type != "Constant")
            kinds = ", ".join(f"{kind} {count}" if count > 1 else kind for kind, count in sorted(counts.items()))
            rows.append(f"| {opset} | {sizes} | {counts.total()} | {kinds} |")
            text = text or printer.to_text(_without_values(model).graph)
    lines = "\n".join(f"    {line}" for line in text.splitlines())
    return "\n".join(
        [
            "## Body",
            "",
            f"In standard ONNX, for inputs of {shapes}:",
            "",
            "| opset | sizes | nodes | of these |",
            "|---|---|---|---|",
            *rows,
            "",
            f'??? note "The body at opset {OPSETS[0]}, as ONNX writes it"',
            "",
            "    ```text",
            lines,
            "    ```",
        ]
        if text
        else ["## Body", "", "| opset | sizes | nodes | of these |", "|---|---|---|---|", *rows]
    )


def _without_values(model: onnx.ModelProto) -> onnx.ModelProto:
    """Without large constants, of which a reader wants the size alone."""
    shown = onnx.ModelProto()
    shown.CopyFrom(model)
    for tensor in shown.graph.initializer:
        if onnx.numpy_helper.to_array(tensor).size > 16:
            tensor.ClearField("raw_data")
    return shown


def _tensors(args: tuple) -> list[torch.Tensor]:
    flat = [t for value in args for t in (value if isinstance(value, (list, tuple)) else (value,))]
    return [t for t in flat if isinstance(t, torch.Tensor)]


def _plugin(op: Op) -> str:
    """Types and formats, as the page on TensorRT has them."""
    if not op.has_plugin:
        return ""
    header, rows = _formats()
    own = [row for row in rows if f"`{op.node_type}`" in row]
    table = "\n".join([*header, *own]) if own else ""
    return f"## Plugin\n\n{table}\n\n[TensorRT](../tensorrt.md#types-and-formats) says what holds for all of them."


@cache
def _formats() -> tuple[list[str], list[str]]:
    text = (ROOT / "docs" / "tensorrt.md").read_text("utf-8")
    section = text[text.index("### Types and formats") :]
    table = section[section.index("| node |") :].split("\n\n")[0].splitlines()
    return table[:2], table[2:]


def _gradients(op: Op) -> str:
    """Which inputs have one, as a backward through the first sample finds it."""
    names: list[str] = []
    args: list[Any] = []
    leaves: list[torch.Tensor] = []
    for argument, value in zip(op.arguments, sample(op), strict=True):
        many = argument.is_tensor and isinstance(value, (list, tuple))
        group = list(value) if many else [value]
        floating = [isinstance(t, torch.Tensor) and t.is_floating_point() for t in group]
        made = [t.clone().requires_grad_() if leaf else t for t, leaf in zip(group, floating, strict=True)]
        for tensor, leaf in zip(made, floating, strict=True):
            if leaf:
                names.append(argument.name)
                leaves.append(tensor)
        args.append(made if many else made[0])
    outputs = [o for o in as_tuple(op(*args)) if o.requires_grad]
    if not outputs:
        return "## Gradients\n\nNone: what it returns is constant wherever it is differentiable."
    found = torch.autograd.grad([o.sum() for o in outputs], leaves, allow_unused=True)
    by = dict.fromkeys(f"`{name}`" for name, gradient in zip(names, found, strict=True) if gradient is not None)
    return f"## Gradients\n\nOf any order, by {', '.join(by)}; the tests hold them to finite differences."


def _kernels(op: Op) -> str:
    """The picture and notes of the benchmarks."""
    pieces = []
    if (ROOT / "svexport" / "csrc" / "torch" / f"{op.name}.cpp").is_file():
        pieces.append("It has CUDA kernels of its own, forward and backward, in float32, float16 and bfloat16.")
    if (ROOT / _RESULTS / f"{op.name}.svg").is_file():
        pieces.append(f"![{op.name} beside torch on an NVIDIA H200](../../{_RESULTS}/{op.name}.svg)")
    if (ROOT / "benchmarks" / "notes" / f"{op.name}.md").is_file():
        pieces.append(f"[What was tried, and what limits it](../../benchmarks/notes/{op.name}.md).")
    return "\n\n".join(["## On a GPU", *pieces]) if pieces else ""


def _reference(op: Op) -> str:
    """The source that defines the op, unfolded by who wants it."""
    source = inspect.getsource(op.reference).rstrip()
    lines = "\n".join(f"    {line}".rstrip() for line in source.splitlines())
    place = Path(inspect.getsourcefile(op.reference) or "").relative_to(ROOT).as_posix()
    return (
        "## Reference\n\nWhat defines it, whatever the device and data type, float64 included; "
        f"in [{place}](../../{place}).\n\n"
        f'??? note "Source"\n\n    ```python\n{lines}\n    ```'
    )
