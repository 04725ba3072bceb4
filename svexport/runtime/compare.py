"""Torch beside an engine: every output, and layer by layer, so that one sees where an error begins."""

from __future__ import annotations

import difflib
import io
import os
import sys
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from svexport import html
from svexport.errors import SvexportError, UnsupportedError
from svexport.exporter.arguments import MODEL_ATTRIBUTE, FlatModel, bind, leaves
from svexport.parity import Parity, parity
from svexport.runtime.engine import Engine
from svexport.runtime.session import OnnxEngine, load

if TYPE_CHECKING:
    import onnx

__all__ = ["Comparison", "compare"]

CHUNK_BYTES = 2**30
"""Layers are compared in groups whose outputs take about this much memory; each group runs both sides once more."""


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`svexport.compare`; ``print`` shows it as tables, a notebook with pictures.

    Attributes:
        model: class name of the torch model.
        engine: file name of the engine, or the class name of a second torch model.
        rtol: relative tolerance.
        atol: absolute tolerance.
        outputs: one entry per output.
        layers: one entry per compared layer output, in order of execution; empty unless asked for.
        notes: remarks: data types that were converted, layers that could not be compared.
    """

    model: str
    engine: str
    rtol: float
    atol: float
    outputs: list[Parity]
    layers: list[Parity] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every output is within the tolerances."""
        return all(p.ok for p in self.outputs)

    @property
    def worst(self) -> Parity:
        """The output furthest off: one outside the tolerances if there is any, of those with the largest ``max_rel``."""
        return max(self.outputs, key=lambda p: (not p.ok, p.max_rel))

    @property
    def first(self) -> Parity | None:
        """The first layer outside the tolerances: where an error begins. None if all agree or none was compared."""
        return next((p for p in self.layers if not p.ok), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serialisable values."""
        return {
            "model": self.model,
            "engine": self.engine,
            "ok": self.ok,
            "rtol": self.rtol,
            "atol": self.atol,
            "outputs": [p.to_dict() for p in self.outputs],
            "layers": [p.to_dict() for p in self.layers],
            "first": self.first.name if self.first else None,
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        from rich.console import Console

        console = Console(file=io.StringIO(), width=110, color_system=None)
        for table in self.tables():
            console.print(table)
        for note in self.notes:
            console.print(f"note: {note}", markup=False, highlight=False, soft_wrap=True)
        return console.file.getvalue().rstrip()  # type: ignore[attr-defined]

    def tables(self) -> list[Any]:
        """The comparison as rich tables."""
        from rich import box
        from rich.table import Table
        from rich.text import Text

        title = f"{self.model} and {self.engine}: {self._verdict()}"
        tables = []
        for kind, parities in (("output", self.outputs), ("layer", self.layers)):
            if not parities:
                continue
            table = Table(*_HEADER(kind), box=box.SIMPLE_HEAD, title=None if tables else Text(title, "bold"))
            table.title_justify = "left"
            for p in parities:
                first = p is self.first
                table.add_row(*map(Text, (*_row(p), "<- begins here" if first else "")), style="bold red" if first else "")
            tables.append(table)
        return tables

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Writes the comparison as one page, its pictures inside.

        Raises:
            SvexportError: if it cannot be written.
        """
        html.write(path, html.page(f"{self.model} and {self.engine}", *self.html_body()))

    def _repr_html_(self) -> str:
        return html.fragment(*self.html_body())

    def html_body(self) -> list[str]:
        """The comparison as pieces of a page: verdict, outputs, layers, notes."""
        failed = [i for i, p in enumerate(self.outputs) if not p.ok]
        body = [
            f'<p class="{"ok" if self.ok else "fail"}">{html.escape(self._verdict().capitalize())}</p>',
            html.section(
                "Outputs",
                html.picture("errors of each output", html.error_figure, self.outputs, self.atol),
                html.table(_HEADER("output"), [(*_row(p), "") for p in self.outputs], marked=failed),
            ),
        ]
        if self.layers:
            rows = [(*_row(p), "error begins here" if p is self.first else "") for p in self.layers]
            marked = [i for i, p in enumerate(self.layers) if p is self.first]
            picture = html.picture("errors layer by layer", html.layer_figure, self.layers, self.atol)
            body.append(html.section("Layers", picture, html.table(_HEADER("layer"), rows, marked=marked)))
        if self.notes:
            body.append(html.section("Notes", *map(html.note, self.notes)))
        return body

    def _verdict(self) -> str:
        if self.ok:
            return f"all {len(self.outputs)} outputs agree (rtol {self.rtol:g}, atol {self.atol:g})"
        failed = sum(not p.ok for p in self.outputs)
        begins = f", beginning at {self.first.name}" if self.first else ""
        return f"{failed} of {len(self.outputs)} outputs differ (rtol {self.rtol:g}, atol {self.atol:g}){begins}"


def _HEADER(kind: str) -> tuple[str, ...]:
    return (kind, "shape", "type", "max abs", "max rel", "cosine", "outside", "", "")


def _row(p: Parity) -> tuple[str, ...]:
    numbers = (f"{p.max_abs:.2e}", f"{p.max_rel:.2e}", f"{p.cosine:.8f}", f"{p.mismatched:,}")
    return (p.name, str(list(p.shape)), p.dtype, *numbers, "ok" if p.ok else "FAIL")


def compare(
    model: nn.Module,
    engine: Engine | str | os.PathLike[str] | onnx.ModelProto | Callable[..., Any],
    args: Any,
    *,
    layers: bool | Collection[str] | None = None,
    rtol: float = 1e-3,
    atol: float = 1e-4,
) -> Comparison:
    """Runs a torch model and an engine on the same inputs and compares what comes out.

    The model runs in eval mode without gradients and is left as it was. Where the engine's floating-point or integer type
    is another than torch's (a half file beside a float model), values are converted, and noted, before they are compared.

    Args:
        model: the torch model.
        engine: an engine, the path of a file for :func:`svexport.load`, or a second torch model or function that takes
            the same arguments.
        args: what ``forward`` is called with, as for :func:`svexport.export`: a tuple, a dict by parameter name, or a
            single argument.
        layers: True compares the outputs of all submodules as well, a list of submodule names only those. It needs an
            ONNX engine, whose nodes name the module they came from, or a second torch model. A module that the exporter
            folded into another is compared together with it (``conv+bn``).
        rtol: relative tolerance.
        atol: absolute tolerance.

    Raises:
        ExportError: if the arguments do not fit ``forward``.
        EngineError: if they do not fit the engine, or it cannot be loaded or run.
        UnsupportedError: if ``layers`` is asked of an engine that does not show its insides.
        SvexportError: if the two do not have the same number of outputs, or a layer is not a submodule.
    """
    from svexport.exporter.export import _eval_mode

    if not isinstance(model, nn.Module):
        raise SvexportError(f"expected a torch.nn.Module first and then the engine, got {type(model).__name__}")
    wanted = _wanted(model, layers)
    other = _other(engine, model, args)
    inside = isinstance(other, (OnnxEngine, FlatModel))
    if wanted and not inside:
        raise UnsupportedError(f"layers needs an ONNX engine or a second torch model, got {_title(engine)}")
    notes: list[str] = []
    with _eval_mode(model), _eval_mode(other) if isinstance(other, FlatModel) else nullcontext(), torch.no_grad():
        flat = FlatModel(model, bind(model, args))
        tensors = [t.detach() for t in flat.tensors]
        expected = flat(*_fresh(tensors))
        if isinstance(other, Engine):
            feeds = _feeds(other, flat.input_names, tensors, notes)
            actual, names = other.run(feeds), other.output_names
        else:
            actual, names = list(other(*_fresh(tensors))), other.output_names
        if len(actual) != len(expected):
            raise SvexportError(
                f"{type(model).__name__} returns {len(expected)} tensors ({', '.join(flat.output_names)}), "
                f"{_title(engine)} returns {len(actual)} ({', '.join(names)}); compare a model with its own export"
            )
        if set(names) == set(flat.output_names):
            actual = [actual[names.index(name)] for name in flat.output_names]
        outputs = []
        for name, e, a in zip(flat.output_names, expected, actual, strict=True):
            outputs.append(parity(name, e, _converted(name, e, a, notes), rtol=rtol, atol=atol))
        found: list[Parity] = []
        if wanted:
            calls = _record(flat, _fresh(tensors))
            inner = _OnnxLayers(other, feeds, calls) if isinstance(other, OnnxEngine) else _TorchLayers(other, tensors, calls)
            found = _compare_layers(flat, tensors, calls, inner, wanted, rtol, atol, notes)
    return Comparison(type(model).__name__, _title(engine), rtol, atol, outputs, found, notes)
