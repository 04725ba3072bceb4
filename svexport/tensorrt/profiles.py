"""Optimization profiles: the sizes that an engine is built for, from the caller's shapes and the file's open sizes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, TypeAlias

import onnx

from svexport.errors import BuildError
from svexport.text import shape_text

__all__ = ["DEFAULT_BATCH", "Profile", "Range", "profiles_of"]

DEFAULT_BATCH = (1, 1, 8)
"""Smallest, usual and largest size of an open first axis without a given size."""

Range: TypeAlias = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Smallest, usual and largest shape (or values) of an input."""
_Size: TypeAlias = "int | str | None"


@dataclass
class Profile:
    """A range of sizes that an engine is built for.

    Attributes:
        shapes: shapes of each input with open sizes.
        values: values of each input whose values are sizes.
        notes: assumptions.
    """

    shapes: dict[str, Range] = field(default_factory=dict)
    values: dict[str, Range] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        given = {**self.shapes, **self.values}
        return ", ".join(f"{name} {' / '.join('x'.join(map(str, s)) for s in r)}" for name, r in given.items())


def profiles_of(
    graph: onnx.GraphProto,
    shapes: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None,
    values: Mapping[str, Any] | None = None,
) -> list[Profile]:
    """One profile for each mapping in ``shapes``; none if every size is fixed.

    Args:
        graph: graph of the file.
        shapes: by input, ``(smallest, usual, largest)`` or one shape for all three; several mappings make several
            profiles. Missing sizes follow from sizes of the same name elsewhere, else are :data:`DEFAULT_BATCH`.
        values: likewise, for inputs whose values are sizes.

    Raises:
        BuildError: if a shape does not fit the file, or an open size is neither given nor a first axis.
    """
    open_inputs = dict(_inputs(graph))
    given: Sequence[Any] = [shapes or {}] if shapes is None or isinstance(shapes, Mapping) else shapes
    if not given or not all(isinstance(one, Mapping) for one in given):
        raise BuildError(
            'shapes expects {"input": (smallest, usual, largest)}, or several of these in a list for several profiles; '
            f"got {shapes!r}"
        )
    if values is not None and not isinstance(values, Mapping):
        raise BuildError(f'values expects {{"input": (smallest, usual, largest)}}, got {values!r}')
    made_values = {name: _range(name, spec, "values") for name, spec in (values or {}).items()}
    for name in made_values:
        _known(name, open_inputs, "values")
    profiles = [_profile(open_inputs, one) for one in given]
    if not any(profile.shapes for profile in profiles) and not made_values:
        return []
    for profile in profiles:
        profile.values.update(made_values)
    return profiles


def _inputs(graph: onnx.GraphProto) -> Iterator[tuple[str, tuple[_Size, ...]]]:
    constants = {tensor.name for tensor in graph.initializer}
    for value in graph.input:
        if value.name not in constants:
            dims = value.type.tensor_type.shape.dim
            yield value.name, tuple(d.dim_value if d.HasField("dim_value") else d.dim_param or None for d in dims)


def _profile(inputs: Mapping[str, tuple[_Size, ...]], given: Mapping[str, Any]) -> Profile:
    profile = Profile()
    symbols: dict[str, tuple[tuple[int, int, int], str]] = {}
    for name, spec in given.items():
        _known(name, inputs, "shapes")
        shapes = _range(name, spec, "shapes")
        _fits(name, shapes, inputs[name])
        profile.shapes[name] = shapes
        for axis, size in enumerate(inputs[name]):
            if isinstance(size, str):
                here = (shapes[0][axis], shapes[1][axis], shapes[2][axis])
                known, where = symbols.setdefault(size, (here, name))
                if known != here:
                    raise BuildError(
                        f"{size!r} is one size in the file; shapes gives it {_text(known)} in {where!r} and "
                        f"{_text(here)} in {name!r}: give the same ones"
                    )
    left = {name: sizes for name, sizes in inputs.items() if name not in given}
    for sizes in left.values():
        first = sizes[0] if sizes else 0
        if isinstance(first, str) and first not in symbols:
            symbols[first] = DEFAULT_BATCH, ""
            profile.notes.append(
                f"{first!r} is built for {_text(DEFAULT_BATCH)}; give shapes= (--shapes) for other sizes"
            )
    missing: list[str] = []
    for name, sizes in left.items():
        if all(isinstance(size, int) for size in sizes):
            continue
        columns = []
        for axis, size in enumerate(sizes):
            if isinstance(size, int):
                columns.append((size, size, size))
            elif size is None and axis == 0:
                columns.append(DEFAULT_BATCH)
                profile.notes.append(
                    f"axis 0 of {name!r} is built for {_text(DEFAULT_BATCH)}; give shapes= (--shapes) for other sizes"
                )
            elif size in symbols:
                columns.append(symbols[size][0])
            else:
                missing.append(f"{name!r} axis {axis}" + (f" ({size!r})" if size else ""))
        if len(columns) == len(sizes):
            low, usual, high = (tuple(column[i] for column in columns) for i in range(3))
            profile.shapes[name] = low, usual, high
    if missing:
        example = next(name for name in left if any(name in text for text in missing))
        like = ", ".join("?" if not isinstance(size, int) else str(size) for size in left[example])
        raise BuildError(
            f"the file leaves open {', '.join(missing)}, and an engine is built for a range of sizes: give shapes="
            f'{{"{example}": (smallest, usual, largest)}}, each like ({like}); on the command line '
            f"--shapes {example}=MIN:OPT:MAX"
        )
    return profile


def _known(name: str, inputs: Mapping[str, Any], what: str) -> None:
    if name not in inputs:
        raise BuildError(f"{what} names {name!r}, which is no input of the file; it has {', '.join(inputs) or 'none'}")


def _range(name: str, spec: Any, what: str) -> Range:
    try:
        rows = [spec] * 3 if all(hasattr(size, "__index__") for size in spec) else list(spec)
        low, usual, high = (tuple(index(size) for size in row) for row in rows)
    except (TypeError, ValueError) as error:
        raise BuildError(
            f"{what} of {name!r} expects (smallest, usual, largest), each a tuple of integers, got {spec!r}"
        ) from error
    ordered = all(a <= b <= c for a, b, c in zip(low, usual, high))
    if not len(low) == len(usual) == len(high) or not ordered or (what == "shapes" and any(size < 0 for size in low)):
        raise BuildError(
            f"{what} of {name!r} expects three of one length, no size larger than in the next and none negative, "
            f"got {low}, {usual}, {high}"
        )
    return low, usual, high


def _fits(name: str, shapes: Range, sizes: tuple[_Size, ...]) -> None:
    for shape in shapes:
        fits = len(shape) == len(sizes) and all(not isinstance(w, int) or w == g for w, g in zip(sizes, shape))
        if not fits:
            raise BuildError(f"{name!r} is {shape_text(sizes)} in the file, got the shape {list(shape)}")


def _text(sizes: Sequence[int]) -> str:
    low, usual, high = sizes
    return f"{low} to {high}, usually {usual}"
