"""Converts the user's spellings of dynamic sizes to the form used internally: ``{input: {axis: symbol}}``."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from svexport.errors import ExportError
from svexport.tracing.arguments import FlatModel
from svexport.tracing.sizes import Size, tiled

__all__ = ["allowed_batches", "check_axes_names", "dynamic_axes", "traceable"]


def allowed_batches(flat: FlatModel, names: Sequence[str], spec: str, notes: list[str]) -> dict[str, dict[int, Any]]:
    """``dynamic_shapes="auto"``: makes the first axis of each input dynamic, if torch.export finds that it may be."""
    if spec != "auto":
        raise ExportError(f"dynamic_shapes expects sizes by input, or 'auto', got {spec!r}")
    from svexport.exporter import dynamo

    found = dict(zip(names, dynamo.batch_axes(flat, [t.detach() for t in flat.tensors]), strict=True))
    dynamic = {name: {0: dim} for name, dim in found.items() if dim is not None}
    static = ", ".join(name for name, tensor in zip(names, flat.tensors, strict=True) if name not in dynamic)
    shown = ", ".join(
        f"{name} ({_within(Size.of(dim, name))})"
        for name, (dim,) in ((name, tuple(spec.values())) for name, spec in dynamic.items())
    )
    notes.append(
        f"dynamic_shapes='auto': the first size is dynamic for {shown or 'no inputs'}"
        + (f"; static, because the model uses the size as a number, for {static}" if static else "")
    )
    return dynamic


def _within(size: Size) -> str:
    """A size's formula and range. The range excludes sizes at which forward takes another branch, as with few rows."""
    low, high = size.size(size.low), size.size(int(size.high)) if size.high < _ANY else _ANY
    return size.formula + (f" from {low}" if low > 1 else "") + (f" to {high}" if high < _ANY else "")


_ANY = 2**31 - 1
"""An upper limit from which a size counts as unbounded."""


def dynamic_axes(
    flat: FlatModel, names: Sequence[str], shapes: Any, axes: Mapping[str, Any] | None
) -> tuple[dict[str, dict[int, str]], dict[str, Size]]:
    """Converts either spelling to ``{input name: {axis: symbol}}``, and returns the :class:`Size` of each symbol too.

    Raises:
        ExportError: for an unknown input, an axis that it does not have, or sizes that do not fit.
    """
    if shapes is not None and axes is not None:
        raise ExportError("give dynamic_shapes or dynamic_axes, not both")
    given = shapes if shapes is not None else axes
    if given is None:
        return {}, {}
    paths = flat.input_paths
    if not isinstance(given, Mapping):
        order = list(dict.fromkeys(path[0] for path in paths))
        if not isinstance(given, (tuple, list)) or len(given) != len(order):
            raise ExportError(
                f"dynamic_shapes expects a dict by name or a tuple of {len(order)} entries ({', '.join(order)}), "
                f"got {given!r}"
            )
        given = dict(zip(order, given, strict=True))
    known = {path[0] for path in paths} | set(names)
    unknown = set(given) - known
    if unknown and axes is None:  # dynamic_axes may also name outputs, whose sizes are inferred
        raise ExportError(f"dynamic_shapes names {sorted(unknown)}; the inputs are {', '.join(names)}")
    result: dict[str, dict[int, str]] = {}
    symbols: dict[str, Size] = {}
    roots: dict[str, tuple[int, str]] = {}
    for name, path, tensor in zip(names, paths, flat.tensors, strict=True):
        spec = given.get(name) if name in given else _follow(given, path)
        if not (spec is None or isinstance(spec, (Mapping, list, tuple))):
            raise ExportError(f"dynamic_shapes: {name} expects sizes by axis, {{0: 'batch'}} for one, got {spec!r}")
        found = {}
        for axis, size in _axes(spec):
            if not isinstance(axis, int) or not -tensor.dim() <= axis < tensor.dim():
                raise ExportError(
                    f"dynamic_shapes: {name} has {tensor.dim()} dimensions, axis {axis!r} is none of them"
                )
            axis %= tensor.dim()
            if (isinstance(size, int) and not isinstance(size, bool)) or size is torch.export.Dim.STATIC:
                continue
            one = Size.of(size, f"{name}_dim_{axis}")
            found[axis] = one.symbol
            symbols.setdefault(one.symbol, one)
            root = one.root_for(tensor.shape[axis])
            if one.size(root) != tensor.shape[axis]:
                raise ExportError(f"dynamic_shapes: {name} (axis {axis}) is {tensor.shape[axis]}, never {one.formula}")
            if not one.low <= root <= one.high:
                raise ExportError(
                    f"dynamic_shapes: {name} (axis {axis}) is {tensor.shape[axis]}, so {one.root} is {root}, and "
                    f"its Dim has the range {one.low} to {one.high}; widen it, or give an input within"
                )
            place = f"in {name} (axis {axis})"
            first, where = roots.setdefault(one.root, (root, place))
            if first != root:
                raise ExportError(
                    f"dynamic_shapes: {one.root!r} is {first} {where} and {root} {place}; "
                    "sizes that may differ need names of their own"
                )
        if found:
            result[name] = found
    return result, symbols


def check_axes_names(
    axes: Mapping[str, Any] | None, flat: FlatModel, names: Collection[str], result_names: Collection[str]
) -> None:
    """Raises ExportError if ``dynamic_axes`` names anything but inputs and outputs; outputs' sizes are inferred."""
    unknown = set(axes or ()) - {path[0] for path in flat.input_paths} - {*names, *result_names}
    if unknown:
        raise ExportError(
            f"dynamic_axes names {sorted(unknown)}; the inputs are {', '.join(names)}, the outputs "
            f"{', '.join(result_names)}"
        )


def _follow(spec: Any, path: Sequence[str]) -> Any:
    """The entry of one tensor in a nested spec. ``{axis: size}`` at an outer level applies to every tensor below it."""
    for key in path:
        nested = isinstance(spec, Mapping) and any(isinstance(v, (Mapping, list, tuple)) for v in spec.values())
        if isinstance(spec, Mapping) and (nested or key in spec):
            spec = spec.get(key, spec.get(int(key)) if key.isdigit() else None)
        elif isinstance(spec, (list, tuple)) and key.isdigit():
            spec = spec[int(key)] if int(key) < len(spec) else None
        elif not isinstance(spec, Mapping):
            return None
    return spec


def _axes(spec: Any) -> Iterator[tuple[Any, Any]]:
    """The (axis, size) pairs of one tensor's entry: a dict, a list of axes, or a list with one size per axis."""
    if isinstance(spec, Mapping):
        yield from ((axis, size) for axis, size in spec.items() if size is not None)
    elif isinstance(spec, (list, tuple)):
        if all(isinstance(axis, int) for axis in spec):
            yield from ((axis, "") for axis in spec)
        else:
            yield from ((axis, size) for axis, size in enumerate(spec) if size is not None)


def traceable(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
) -> list[Tensor]:
    """The inputs to trace with: dynamic sizes of 0 and 1 become 2 or more, as both exporters take 0 and 1 as static."""
    least: dict[str, int] = {}
    for size in sizes.values():
        least[size.root] = max(least.get(size.root, 0), size.root_for(2))
    result = []
    for name, tensor in zip(names, tensors, strict=True):
        shape = list(tensor.shape)
        for axis, symbol in axes.get(name, {}).items():
            size = sizes[symbol]
            shape[axis] = max(shape[axis], size.size(least[size.root]))
        result.append(tiled(tensor, shape))
    return result
