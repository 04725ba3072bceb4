"""Compares an engine with torch: every output, and layer by layer, to find where an error begins."""

from __future__ import annotations

import difflib
import inspect
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor, nn

from svexport import html
from svexport.errors import SvexportError, UnsupportedError
from svexport.parity import Parity, check_tolerances, parity, tolerances
from svexport.report import Report
from svexport.runtime.engine import Engine
from svexport.runtime.layers import Compared, Inside, OnnxLayers, TorchLayers, compare_layers, converted
from svexport.runtime.samples import SampleComparison, compare_samples
from svexport.runtime.session import OnnxEngine, load
from svexport.runtime.where import Where, locate
from svexport.text import dtype_text, table
from svexport.tracing.arguments import FlatModel, bind, eval_mode, given_arguments
from svexport.tracing.as_in_files import AsInFiles
from svexport.tracing.quantizers import allow_steps
from svexport.tracing.state import unchanged

__all__ = ["Comparison", "compare", "feeds_of", "named", "paired"]

_SHOWN = 8
"""The number of layers that a page shows; it folds the rest."""


@dataclass(frozen=True, repr=False)
class Comparison(Report):
    """Result of :func:`svexport.compare`; ``print`` shows it as tables, a notebook with pictures.

    Attributes:
        model: class name of the torch model.
        engine: file name of the engine, or the class name of a second torch model.
        rtol: relative tolerance.
        atol: absolute tolerance.
        outputs: one entry per output.
        layers: one entry per compared layer output, in order of execution; empty unless asked for.
        notes: remarks: data types that were converted, layers that could not be compared.
        sources: by layer name, the line of the model that its last node came from, or else the line that called it.
        where: where the error lies, for each output outside the tolerances and for the first such layer.
    """

    model: str
    engine: str
    rtol: float
    atol: float
    outputs: list[Parity]
    layers: list[Parity] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    sources: Mapping[str, str] = field(default_factory=dict)
    where: list[Where] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every output is within the tolerances."""
        return all(p.ok for p in self.outputs)

    @property
    def worst(self) -> Parity:
        """The output with the largest ``max_rel``, among those outside the tolerances if there are any."""
        return max(self.outputs, key=lambda p: (not p.ok, p.max_rel))

    @property
    def first(self) -> Parity | None:
        """The first layer outside the tolerances. An error begins in it, or in the surrounding forward between the
        previous layer and this one. None if all agree or none was compared."""
        return next((p for p in self.layers if not p.ok), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as plain JSON-serializable values."""
        return {
            "model": self.model,
            "engine": self.engine,
            "ok": self.ok,
            "rtol": self.rtol,
            "atol": self.atol,
            "outputs": [p.to_dict() for p in self.outputs],
            "layers": [p.to_dict() for p in self.layers],
            "first": self.first.name if self.first else None,
            "source": self.sources.get(self.first.name) if self.first else None,
            "where": [one.to_dict() for one in self.where],
            "notes": list(self.notes),
        }

    def __repr__(self) -> str:
        return f"Comparison({self.model} and {self.engine}: {self._verdict()})"

    def tables(self) -> list[Any]:
        """The comparison as rich renderables: a line and tables."""
        from rich.text import Text

        tables: list[Any] = [Text(f"{self.model} and {self.engine}: {self._verdict()}", "bold")]
        for kind, parities in (("output", self.outputs), ("layer", self.layers)):
            if not parities:
                continue
            made = table(_header(kind), [])
            for column in made.columns[1:]:
                column.no_wrap = True
            for p in parities:
                *cells, verdict = _row(p)
                first = p is self.first
                cells.append(f"{verdict} <- first" if first else verdict)
                made.add_row(*map(Text, cells), style="bold red" if first else "")
            tables.append(made)
        tables += [Text(f"{one.name} differs {one}") for one in self.where]
        return tables

    def _title(self) -> str:
        return f"{self.model} and {self.engine}"

    def html_body(self, picture: Callable[..., str] = html.picture) -> list[str]:
        """The comparison as pieces of a page: verdict, outputs, layers, notes; ``picture`` draws the figures."""
        failed = [i for i, p in enumerate(self.outputs) if not p.ok]
        body = [
            html.verdict(self._verdict().capitalize(), "ok" if self.ok else "fail"),
            html.section(
                "Outputs",
                picture("errors of each output", html.error_figure, self.outputs, self.atol),
                html.table(_header("output"), [_row(p) for p in self.outputs], marked=failed),
            ),
        ]
        if self.layers:
            body.append(html.section("Layers", *self._html_layers(picture)))
        if self.where:
            body.append(html.section("Where in the tensors", *(self._html_where(one, picture) for one in self.where)))
        if self.notes:
            body.append(html.section("Notes", *map(html.note, self.notes)))
        return body

    def _html_where(self, one: Where, picture: Callable[..., str]) -> str:
        return html.note(f"{one.name} differs {one}") + picture(f"errors in {one.name} by axis", html.where_figure, one)

    def _html_layers(self, picture: Callable[..., str]) -> list[str]:
        """Draws all layers and lists them in a table. Many are folded but those where an error begins, or the worst."""
        errors = picture("errors layer by layer", html.layer_figure, self.layers, self.atol)
        everything = range(len(self.layers))
        first = next((i for i, p in enumerate(self.layers) if p is self.first), None)
        shown: Sequence[int] = everything
        if len(everything) > _SHOWN:
            shown = sorted(sorted(everything, key=lambda i: -self.layers[i].max_abs)[:_SHOWN])
            if first is not None:
                start = min(max(first - 2, 0), len(everything) - _SHOWN)
                shown = everything[start : start + _SHOWN]

        def table(indices: Sequence[int]) -> str:
            rows = [_row(self.layers[i]) for i in indices]
            return html.table(_header("layer"), rows, marked=[n for n, i in enumerate(indices) if i == first])

        if len(shown) == len(everything):
            return [errors, table(everything)]
        what = "Where it begins" if first is not None else "The largest errors"
        text = html.note(f"{what}, {len(shown)} of {len(everything)} layers in order of execution:")
        return [errors, text, table(shown), html.folded(f"all {len(everything)} layers", table(everything))]

    def _verdict(self) -> str:
        if self.ok:
            agree = f"all {len(self.outputs)} outputs agree" if len(self.outputs) > 1 else "the output agrees"
            verdict = f"{agree} (rtol {self.rtol:g}, atol {self.atol:g})"
            if self.first is None:
                return verdict
            count = sum(not p.ok for p in self.layers)
            differ = f"{count} layers differ, {self._begins()} first" if count > 1 else f"{self._begins()} differs"
            return f"{verdict}, although {differ}: what comes after makes up for it on these inputs"
        failed = sum(not p.ok for p in self.outputs)
        begins = f", beginning at {self._begins()}" if self.first else ""
        return f"{failed} of {len(self.outputs)} outputs differ (rtol {self.rtol:g}, atol {self.atol:g}){begins}"

    def _begins(self) -> str:
        assert self.first is not None
        source = self.sources.get(self.first.name)
        return f"{self.first.name} ({source})" if source else self.first.name


def _header(kind: str) -> tuple[str, ...]:
    return (kind, "shape", "type", "max abs", "max rel", "cosine", "outside", "")


def _row(p: Parity) -> tuple[str, ...]:
    numbers = (f"{p.max_abs:.2e}", f"{p.max_rel:.2e}", f"{p.cosine:.8f}", f"{p.mismatched:,}")
    return (p.name, str(list(p.shape)), p.dtype, *numbers, "ok" if p.ok else "FAIL")


@overload
def compare(
    model: nn.Module,
    engine: Any,
    args: Any = None,
    *,
    layers: bool | Collection[str] | None = None,
    onnx: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
    samples: None = None,
    metric: None = None,
) -> Comparison: ...


@overload
def compare(
    model: nn.Module,
    engine: Any,
    args: None = None,
    *,
    layers: None = None,
    onnx: None = None,
    rtol: float | None = None,
    atol: float | None = None,
    samples: Iterable[Any],
    metric: Callable[[Any, Any], Any] | None = None,
) -> SampleComparison: ...


def compare(
    model: nn.Module,
    engine: Any,
    args: Any = None,
    *,
    layers: bool | Collection[str] | None = None,
    onnx: Any = None,
    rtol: float | None = None,
    atol: float | None = None,
    samples: Iterable[Any] | None = None,
    metric: Callable[[Any, Any], Any] | None = None,
) -> Comparison | SampleComparison:
    """Runs a torch model and an engine on the same inputs and compares their outputs.

    The model runs in eval mode without gradients, and its state is restored. ``F.grid_sample`` in half precision runs
    as on CUDA, with coordinates in float32; a note says so. If the engine's floating-point or integer type differs from
    torch's (a half file and a float model), values are converted before they are compared, with a note. Rounding errors
    amplified by quantizers are allowed, with a note, as in :func:`svexport.export`.

    Args:
        model: the torch model.
        engine: an engine, the path of a file for :func:`svexport.load`, or a second torch model or function that takes
            the same arguments.
        args: the arguments of ``forward``, as for :func:`svexport.export` and with its defaults: a tuple, a dict by
            parameter name, or a single argument.
        layers: True also compares the outputs of all submodules; a list of names compares those submodules. It needs an
            ONNX engine, whose nodes name the module they came from, or a second torch model. A module that the exporter
            folded into another is compared together with it (``conv+bn``). A TensorRT engine is rebuilt with a few more
            outputs at a time; True bisects until the first module that differs is found.
        onnx: for ``layers``, the file that a TensorRT engine was built from; default: the file that
            :func:`svexport.build` used.
        rtol: relative tolerance; default: 1e-3, or what a half type that either computes with can resolve.
        atol: absolute tolerance; default: 1e-4, or what a half type can resolve.
        samples: instead of ``args``, an iterable of them, such as a DataLoader: the result has statistics over all, and
            keeps the worst. ``engine`` may then be several, in a list or in a dict by name.
        metric: with ``samples``, ``metric(outputs, sample)`` returns a number or a dict of numbers, for torch and each
            engine; the result shows their means. ``outputs`` is a tensor, or several by position and name.

    Returns:
        A :class:`Comparison`; for samples a :class:`~svexport.runtime.samples.SampleComparison`.

    Raises:
        ExportError: if the arguments do not fit ``forward``, or a tolerance is not a number of at least 0.
        EngineError: if they do not fit the engine, or it cannot be loaded or run.
        UnsupportedError: if ``layers`` is requested for an engine that does not expose its inner values.
        SvexportError: if the two do not have the same number of outputs, or a layer is not a submodule.
    """
    if not isinstance(model, nn.Module):
        raise SvexportError(f"expected a torch.nn.Module first and then the engine, got {type(model).__name__}")
    check_tolerances(rtol, atol)
    if samples is not None:
        if args is not None or layers:
            raise SvexportError("samples excludes args and layers; to compare layers, give one sample as args")
        return _over_samples(model, engine, samples, rtol, atol, metric)
    if metric is not None or isinstance(engine, (list, tuple, dict)):
        raise SvexportError("metric and several engines need samples; for a single sample give samples=[args]")
    wanted = _wanted(model, layers)
    arguments = given_arguments(model, args)
    bound = bind(model, *arguments)
    flat = FlatModel(model, bound)
    tensors = [t.detach() for t in flat.tensors]
    other = _other(engine, bound, arguments)
    title = str(other) if isinstance(other, Engine) else getattr(engine, "__name__", type(engine).__name__)
    notes: list[str] = []
    loaded = other if isinstance(engine, (str, os.PathLike)) and isinstance(other, Engine) else nullcontext()
    with (
        loaded,
        eval_mode(model),
        unchanged(model),
        eval_mode(other) if isinstance(other, nn.Module) else nullcontext(),
        torch.no_grad(),
        AsInFiles() as as_files,
    ):
        expected = flat(*(t.clone() for t in tensors))  # a model may change its inputs in place
        if layers:
            _check_inside(engine, other, onnx, title)
        if isinstance(other, Engine):
            feeds: Sequence[Tensor] = feeds_of(other, flat.input_names, tensors, notes)
            actual = other.run(feeds)
        else:
            feeds = tensors
            actual = other(*(t.clone() for t in tensors))
        kinds = {tensor.dtype for tensor in (*expected, *actual)}
        rtol, atol = tolerances(rtol, atol, kinds | flat.dtypes | other.dtypes)
        pairs = []
        for name, e, a in paired(flat.output_names, expected, other.output_names, actual, title):
            if a.dtype != e.dtype:
                notes.append(f"output {name} is {dtype_text(a.dtype)}, {dtype_text(e.dtype)} in torch")
            pairs.append((name, e, converted(e, a)))
        outputs = [parity(name, e, a, rtol=rtol, atol=atol) for name, e, a in pairs]
        if not all(p.ok for p in outputs):
            allow_steps(outputs, flat, tensors, pairs, notes)
        failed = [p.name for p in outputs if not p.ok]
        located = [locate(name, e, a, rtol=rtol, atol=atol) for name, e, a in pairs if name in failed]
        found = Compared()
        if layers:
            rtol_, atol_ = rtol, atol

            def agrees(outputs: Sequence[Tensor]) -> bool:
                own = paired(flat.output_names, expected, other.output_names, outputs, title)
                return all(parity(name, e, converted(e, a), rtol=rtol_, atol=atol_).ok for name, e, a in own)

            inside = _inside(other, feeds, onnx, _names_in(other, flat, failed), wanted, agrees, notes)
            found = compare_layers(flat, tensors, inside, wanted, rtol=rtol, atol=atol, notes=notes)
            located.append(found.where)
        notes += as_files.notes
    where = [one for one in located if one is not None]
    parities, sources = found.parities, found.sources
    return Comparison(type(model).__name__, title, rtol, atol, outputs, parities, notes, sources, where)


def _check_inside(engine: Any, other: Engine | FlatModel, onnx: Any, title: str) -> None:
    """Raises, before anything runs, if the engine does not expose its inner values."""
    if isinstance(other, OnnxEngine) or (isinstance(other, FlatModel) and isinstance(engine, nn.Module)):
        return
    if not isinstance(other, Engine) or not hasattr(other, "built_from"):
        raise UnsupportedError(f"layers needs an engine or a second torch model, which {title} is not")
    if other.built_from is None and onnx is None:
        raise UnsupportedError(
            f"layers of {title} needs the ONNX file that it was built from: onnx=, on the command line --onnx"
        )


def _names_in(other: Engine | FlatModel, flat: FlatModel, failed: Sequence[str]) -> list[str]:
    """Translates output names to those of the other side, paired as by :func:`paired`."""
    if set(flat.output_names) == set(other.output_names):
        return list(failed)
    return [theirs for ours, theirs in zip(flat.output_names, other.output_names, strict=True) if ours in failed]


def _inside(
    other: Engine | FlatModel,
    feeds: Sequence[Tensor],
    onnx: Any,
    failed: Sequence[str],
    wanted: Collection[str] | None,
    agrees: Callable[[Sequence[Tensor]], bool],
    notes: list[str],
) -> Inside:
    if isinstance(other, FlatModel):
        return TorchLayers(other, feeds)
    if isinstance(other, OnnxEngine):
        return OnnxLayers(other, feeds)
    from svexport.runtime.bisect import EngineLayers
    from svexport.runtime.build import build

    file, options = getattr(other, "built_from", None) or (onnx, {})
    source = OnnxEngine(file if onnx is None else onnx, device="cpu")
    shapes = {
        spec.name: tuple(tensor.shape)
        for spec, tensor in zip(source.inputs, feeds, strict=True)
        if spec.shape is None or not all(isinstance(size, int) for size in spec.shape)
    }

    def built(model: Any) -> Engine:
        return build(model, shapes=shapes or None, check=False, **options)

    return EngineLayers(source, feeds, built, failed, wanted is not None, agrees, notes)


def _over_samples(
    model: nn.Module,
    engine: Any,
    samples: Iterable[Any],
    rtol: float | None,
    atol: float | None,
    metric: Callable[[Any, Any], Any] | None,
) -> SampleComparison:
    with ExitStack() as stack:
        others: dict[str, Engine | nn.Module] = {}
        for name, one in named(engine):
            if isinstance(one, (str, os.PathLike)):
                one = stack.enter_context(load(one))
            elif not isinstance(one, (Engine, nn.Module)):
                one = _Function(one) if callable(one) else OnnxEngine(one)
            others[name] = one
        return compare_samples(model, others, samples, rtol=rtol, atol=atol, metric=metric)


def named(engines: Any) -> list[tuple[str, Any]]:
    """One or several engines, files, models or functions, each with a name to show.

    Raises:
        SvexportError: if two have the same name.
    """
    if isinstance(engines, Mapping):
        return [(str(name), one) for name, one in engines.items()]
    found = []
    for one in engines if isinstance(engines, (list, tuple)) else [engines]:
        if isinstance(one, (str, os.PathLike)):
            name = Path(one).name
        else:
            name = str(one) if isinstance(one, Engine) else getattr(one, "__name__", type(one).__name__)
        found.append((name, one))
    if len(dict(found)) < len(found):
        names = [name for name, _ in found]
        raise SvexportError(f"several are named {names}; give them as a dict by name: {{'half': 'a/m.onnx', …}}")
    return found


def _wanted(model: nn.Module, layers: bool | Collection[str] | None) -> list[str] | None:
    """Names of the submodules to compare; None if ``layers`` is a bool or None."""
    if layers is None or isinstance(layers, bool):
        return None
    names = [name for name, _ in model.named_modules() if name]
    wanted = [layers] if isinstance(layers, str) else list(layers)
    for name in wanted:
        if name not in names:
            close = difflib.get_close_matches(name, names, n=3)
            hint = f"; did you mean {' or '.join(close)}?" if close else "; model.named_modules() lists them"
            raise SvexportError(f"{type(model).__name__} has no submodule {name!r}{hint}")
    return wanted


def _other(engine: Any, bound: inspect.BoundArguments, arguments: tuple[Any, dict[str, Any]]) -> Engine | FlatModel:
    """The engine, or a torch model or function wrapped as a flat model."""
    if isinstance(engine, Engine):
        return engine
    if isinstance(engine, (str, os.PathLike)):
        return load(engine)
    if isinstance(engine, nn.Module):
        return FlatModel(engine, bind(engine, *arguments))
    if callable(engine):
        function = _Function(engine)
        return FlatModel(function, bind(function, bound.args, bound.kwargs))
    return OnnxEngine(engine)  # a model in memory; it says what it expects


class _Function(nn.Module):
    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def feeds_of(engine: Engine, names: Sequence[str], tensors: Sequence[Tensor], notes: list[str]) -> list[Tensor]:
    """The model's inputs as the engine takes them: matched by name, else by position, and converted to its types."""
    by_name = dict(zip(names, tensors, strict=True))
    if set(engine.input_names).issubset(names):  # the exporter may have dropped an unused one
        tensors = [by_name[name] for name in engine.input_names]
    elif len(engine.inputs) != len(tensors):
        raise SvexportError(
            f"{engine} takes {len(engine.inputs)} inputs ({', '.join(engine.input_names)}), "
            f"the model {len(tensors)} ({', '.join(names)}); compare a model with its own export"
        )
    feeds = []
    for spec, tensor in zip(engine.inputs, tensors, strict=True):
        floats = tensor.is_floating_point() and spec.dtype.is_floating_point
        narrower = (tensor.dtype, spec.dtype) == (torch.int64, torch.int32)  # TensorRT before 10 has no other integers
        if tensor.dtype != spec.dtype and (floats or narrower):
            notes.append(f"input {spec.name} is {dtype_text(spec.dtype)}, {dtype_text(tensor.dtype)} in torch")
            tensor = tensor.to(spec.dtype)
        feeds.append(tensor)
    return feeds


def paired(
    names: Sequence[str], expected: Sequence[Tensor], others: Sequence[str], actual: Sequence[Tensor], title: str
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Pairs the outputs of both sides, by name if all names agree, else by position."""
    if len(actual) != len(expected):
        raise SvexportError(
            f"torch returns {len(expected)} tensors ({', '.join(names)}), {title} returns {len(actual)} "
            f"({', '.join(others)}); compare a model with its own export"
        )
    by_name = dict(zip(others, actual, strict=True))
    for name, e, a in zip(names, expected, actual, strict=True):
        yield name, e, by_name[name] if set(names) == set(others) else a
