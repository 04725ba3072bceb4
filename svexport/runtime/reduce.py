"""``svexport.reduce``: reduces a file to the smallest one that still fails, ready for a bug report."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch

from svexport import html
from svexport.errors import SvexportError
from svexport.graph.reading import read_model
from svexport.graph.reduce import reduce as reduced
from svexport.graph.saving import check_name
from svexport.parity import parity
from svexport.progress import phase
from svexport.runtime.session import OnnxEngine
from svexport.tensorrt.builder import write
from svexport.tensorrt.check import check
from svexport.tensorrt.source import read_source

__all__ = ["FAILURES", "Reduction", "reduce"]

Failing = Callable[[onnx.ModelProto], str]
"""Describes the failure of a model, with the same text for the same failure; empty if the model does not fail."""


@dataclass(frozen=True)
class Reduction:
    """Result of :func:`reduce`.

    Attributes:
        model: the smallest part that fails.
        before: number of nodes of the original file.
        nodes: names and types of the remaining nodes.
        failure: description of the failure.
        tried: number of models tried.
        path: the file, if it was written.
        script: a Python script next to it that reproduces the failure.
    """

    model: onnx.ModelProto
    before: int
    nodes: list[tuple[str, str]]
    failure: str
    tried: int
    path: Path | None = None
    script: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        """All fields except the model, as plain JSON-serializable values."""
        path, script = (None if p is None else str(p) for p in (self.path, self.script))
        nodes = [list(node) for node in self.nodes]
        return {"before": self.before, "nodes": nodes, "failure": self.failure, "tried": self.tried, "path": path,
                "script": script}  # fmt: skip

    def __str__(self) -> str:
        left = ", ".join(f"{kind} {name!r}" for name, kind in self.nodes)
        return f"{len(self.nodes)} of {self.before} nodes ({self.tried} models tried): {left}\n{self.failure}"


def check_fails(target: str) -> Failing:
    """Fails if :func:`svexport.check` still finds the first error of the whole file in the part."""
    wanted: list[str] = []

    def failing(model: onnx.ModelProto) -> str:
        errors = [f"{f.rule}: {f.op}: expected {f.expected}, came {f.came}" for f in check(model, target).errors]
        wanted.extend(errors[: not wanted])
        return next((error for error in errors if _alike(error) == _alike(wanted[0])), "")

    return failing


def load_fails() -> Failing:
    """Fails if ONNX Runtime does not load the model."""

    def failing(model: onnx.ModelProto) -> str:
        try:
            OnnxEngine(model, device="cpu")
        except SvexportError as error:
            return str(error)
        return ""

    return failing


def build_fails(**options: Any) -> Failing:
    """Fails if TensorRT cannot build an engine from the model."""

    def failing(model: onnx.ModelProto) -> str:
        from svexport.runtime.build import build

        try:
            build(model, check=False, **options).close()
        except SvexportError as error:
            return str(error)
        return ""

    return failing


def differs(values: dict[str, torch.Tensor], rtol: float = 1e-3, atol: float = 1e-4, **options: Any) -> Failing:
    """Fails if a TensorRT engine's outputs differ from ONNX Runtime's, on values from a run of the whole model."""

    def failing(model: onnx.ModelProto) -> str:
        from svexport.runtime.build import build

        try:
            expected = OnnxEngine(model, device="cpu")
            feeds = [values[spec.name] for spec in expected.inputs]
            shapes = {spec.name: tuple(t.shape) for spec, t in zip(expected.inputs, feeds, strict=True)}
            with build(model, check=False, shapes=shapes, **options) as engine:
                actual = engine.run([t.to(s.dtype) for s, t in zip(engine.inputs, feeds, strict=True)])
        except (SvexportError, KeyError):
            return ""
        for name, e, a in zip(expected.output_names, expected.run(feeds), actual, strict=True):
            if not parity(name, e, a.cpu().to(e.dtype), rtol=rtol, atol=atol).ok:
                return "TensorRT computes something else than ONNX Runtime"
        return ""

    return failing


FAILURES = ("check", "load", "build", "differs")
_SCRIPTS = {
    "check": "print(svexport.check(FILE, target={target!r}))",
    "load": "svexport.load(FILE)",
    "build": "svexport.build(FILE, check=False)",
    "differs": (
        "reference, engine = svexport.load(FILE, device='cpu'), svexport.build(FILE, check=False)\n"
        "given = np.load(FILE.replace('.onnx', '.npz'))\n"
        "inputs = [torch.from_numpy(given[n]).to(i.dtype) for n, i in zip(given, reference.inputs)]\n"
        "print(reference.run(inputs), engine.run(inputs))"
    ),
}  # fmt: skip


def reduce(
    model: str | os.PathLike[str] | onnx.ModelProto,
    fails: str | Callable[[onnx.ModelProto], Any],
    path: str | os.PathLike[str] | None = None,
    *,
    target: str | None = None,
    inputs: dict[str, torch.Tensor] | None = None,
) -> Reduction:
    """Reduces a failing file to the smallest part that still fails in the same way.

    Args:
        model: the path of an ONNX file, or a model; its weights must be inside it.
        fails: ``"check"`` (``svexport.check`` for ``target`` finds an error), ``"load"`` (ONNX Runtime does not load
            it), ``"build"`` (TensorRT builds no engine), ``"differs"`` (its engine's outputs differ from ONNX
            Runtime's); or a function of a model that returns the failure (True, or a text, which must stay the same) or
            nothing.
        path: the .onnx file to write the part to. A script next to it reproduces the failure; for ``"differs"`` the
            part's inputs are written too.
        target: target of ``"check"``.
        inputs: inputs of ``"differs"``, by name; default: random ones.

    Raises:
        BuildError: if the file cannot be read.
        SvexportError: if it does not fail, or ``fails`` is none of these.
    """
    source = read_source(model)
    loaded = source.model if source.path is None else read_model(source.path)
    if path is not None:
        check_name(Path(path))
        html.check_place(path)
    values = _values(loaded, inputs) if fails == "differs" else {}
    failing, kind = _failing(fails, target, values)
    first = said = failing(loaded)
    if not first:
        raise SvexportError("the file as a whole does not fail that way: there is nothing to reduce")
    tried = 0

    def same(part: onnx.ModelProto) -> bool:
        nonlocal tried, said
        if part is loaded:
            return True  # known to fail
        tried += 1
        phase(f"model {tried}, {len(part.graph.node)} nodes")
        text = failing(part)
        alike = _alike(text) == _alike(first)
        said = text if alike else said
        return alike

    smallest = reduced(loaded, same)
    nodes = [(n.name or n.output[0], n.op_type) for n in smallest.graph.node if n.op_type != "Constant"]
    failure = failing(smallest)
    if _alike(failure) != _alike(first):
        failure = f"{said}\n(not when it was tried once more: the failure comes and goes, and nodes may be missing)"
    if path is None:
        return Reduction(smallest, len(loaded.graph.node), nodes, failure, tried)
    place = Path(path)
    write(place, smallest.SerializeToString())
    if kind == "differs":
        stream = io.BytesIO()
        given = [values[value.name] for value in smallest.graph.input]
        np.savez(stream, *((t.float() if t.dtype == torch.bfloat16 else t).numpy() for t in given))
        write(place.with_suffix(".npz"), stream.getvalue())
    script = place.with_suffix(".py")
    lines = _SCRIPTS.get(kind, "print(onnx.load(FILE))").format(target=target)
    said = "\n".join(f"# {line}" for line in failure.splitlines())
    imports = "import numpy as np\nimport onnx\nimport torch\n\nimport svexport\n"
    write(script, f"{imports}\nFILE = {place.name!r}\n\n{said}\n{lines}\n".encode())
    return Reduction(smallest, len(loaded.graph.node), nodes, failure, tried, place, script)


def _failing(fails: Any, target: str | None, values: dict[str, torch.Tensor]) -> tuple[Failing, str]:
    if callable(fails):
        function = fails
        return lambda part: str(found) if (found := function(part)) else "", ""
    if fails == "check":
        if target is None:
            raise SvexportError('fails="check" needs target= (--target), a TensorRT version such as "8.6"')
        return check_fails(target), fails
    if fails == "differs":
        return differs(values), fails
    if fails in FAILURES:
        return (load_fails() if fails == "load" else build_fails()), fails
    raise SvexportError(f"fails expects one of {', '.join(map(repr, FAILURES))}, or a function; got {fails!r}")


def _values(model: onnx.ModelProto, inputs: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """All values of a run in ONNX Runtime, so that a part gets the inputs that it has in the whole model."""
    engine = OnnxEngine(model, device="cpu")
    generator = torch.Generator().manual_seed(0)
    if unknown := sorted(set(inputs or {}) - set(engine.input_names)):
        listed = ", ".join(engine.input_names)
        raise SvexportError(f"inputs names {unknown[0]!r}, which is no input; there are {listed}")
    feeds = {}
    for spec in engine.inputs:
        shape = [size if isinstance(size, int) else 2 for size in spec.shape or ()]
        drawn = torch.randn(shape, generator=generator)
        feeds[spec.name] = (inputs or {}).get(spec.name, drawn.to(spec.dtype))
    names = [name for node in model.graph.node for name in node.output if name]
    probe = engine.with_outputs(names)
    found = dict(zip(probe.output_names, probe.run(list(feeds.values())), strict=True))
    return feeds | found


def _alike(said: str) -> str:
    """A failure text without names and numbers, because these differ between parts."""
    return re.sub(r"'[^']*'|\"[^\"]*\"|\([^()]*\)|[\w/.:]*\d[\w/.:]*|\s+", " ", said)[:200].strip()
