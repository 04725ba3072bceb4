"""Records the way a forward takes: the functions it calls, and the values Python reads. A traced file has one way."""

from __future__ import annotations

import math
import re
import sys
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from svexport.exporter.assumed import Assumption
from svexport.exporter.followed import Sizes, formula, is_found
from svexport.exporter.found import deciding, finding, returns_found
from svexport.ops._op import DOMAIN
from svexport.tracing.source import caller, is_own, shown_line, user_line

__all__ = ["Exit", "Forced", "ForcedError", "Guards", "TooLong", "Way"]

_TRUTHS = {"__bool__", "__contains__", "allclose", "equal", "is_nonzero"}
_TEXTS = {"__format__", "__reduce_ex__", "__repr__", "__str__"}
_ARRAYS = {"__array__", "__dlpack__", "numpy", "data_ptr", "untyped_storage"}  # pickling calls untyped_storage
_VALUES = {*_TRUTHS, *_TEXTS, *_ARRAYS, "__complex__", "__float__", "__index__", "__int__", "item", "tolist"}
"""Functions by which Python reads the values of tensors."""

_SIZES = {"__get__", "__len__", "nelement", "numel", "size"}
"""Functions by which Python reads sizes of tensors; ``__get__`` also reads other attributes."""

_PARTS = {"__iter__", "chunk", "split", "unbind"}
"""Functions whose number of results depends on a size."""

_FACTORS = {"cholesky", "inverse", "linalg_cholesky", "linalg_inv", "linalg_solve"}
"""Functions that raise for some values. A model may catch the error, so this tells Python a truth value."""

UNGUARDED = frozenset({*_TEXTS, *_ARRAYS, *_FACTORS})
"""Those functions that ``torch.export`` does not notice; it guards, refuses, or traces the others."""

_OF_SIZES = {"empty_like", "full_like", "new_empty", "new_full", "new_ones", "new_tensor", "new_zeros", "ones_like"}
_OF_SIZES |= {"rand_like", "randint_like", "randn_like", "zeros_like"}
"""Functions whose result does not depend on the values of their first argument."""

_IN_PLACE = {"__setitem__", *(f"__i{op}__" for op in ("add", "sub", "mul", "truediv", "floordiv", "and", "or", "xor"))}
_IN_PLACE |= {"__imod__", "__ipow__", "__ilshift__", "__irshift__"}

_INDEXING: dict[str, tuple[int, int]] = {
    "embedding": (0, 1),
    "gather": (2, 0),
    "index_select": (2, 0),
    "one_hot": (0, 1),
    "__getitem__": (1, 0),
}
"""For each function, which argument has the indices, and which one is indexed."""


@dataclass(frozen=True)
class Exit:
    """A value that a line of the user's code read from a tensor that depends on the values of inputs.

    Attributes:
        line: path, line number and function.
        inputs: indices of the inputs on which the value depends.
        name: name of the function that read it, such as ``__bool__``.
    """

    line: tuple[str, int, str]
    inputs: frozenset[int]
    name: str


@dataclass(frozen=True)
class Forced:
    """Replaces a value that a line of the user's code reads.

    Attributes:
        line: path, line number and function.
        which: number of the replacement.
        place: which of the values that the line reads, in order; None for all.
    """

    line: tuple[str, int, str]
    which: int = 0
    place: int | None = None


@dataclass(frozen=True)
class Guards:
    """What the tracer itself guards in a forward.

    Attributes:
        values: whether it guards the values that Python reads from tensors.
        sizes: whether it guards the sizes that Python reads.
        assumed: conditions on the sizes under which the trace holds.
    """

    values: bool
    sizes: bool
    assumed: Sequence[Assumption] = ()


class TooLong(Exception):
    """A forward called more functions than the limit allows."""


class Way(TorchFunctionMode):
    """Records the torch functions called in this context, the values that Python reads from tensors, and errors.

    Two ways are equal if values and functions are the same, or if values differ but Python does nothing with them (for
    example only logs one): the same functions get the same arguments, or results of the same steps.
    Sizes are not compared: dynamic ones, and those that depend on values (``x[x > 0]``), may differ within one way. A
    number that Python computes from sizes is compared by its formula, as far as tracers follow that.

    Attributes:
        exits: values of inputs that lines of the user's code read, the first of each line.
        taken: all values that these lines read, in order.
        ranges: by index of an integer input, the size of the axis that it indexes.
        finds: the number of elements found, for each call whose result's size depends on values.
        counts: lines of the user's code that read the sizes of such results.
        foreign: whether an op was called that is neither torch's nor ours; such an op may keep state.
    """

    def __init__(
        self,
        inputs: Sequence[Tensor] = (),
        held: Iterable[Tensor] = (),
        *,
        forced: Forced | None = None,
        count: tuple[int | None, int] | None = None,
        most: float = math.inf,
        sizes: Sizes | None = None,
        numbers: Sequence[float] = (),
    ) -> None:
        """``held`` are parameters and buffers, always in the same order.

        ``forced`` replaces what a line reads from tensors: a truth value is negated; a number becomes one of
        :data:`OTHERS`, then of ``numbers``, then a random one. ``count`` is an index into :attr:`finds`, or None for
        all, and the number of elements to find there. More than ``most`` calls raise :class:`TooLong`.
        ``sizes`` records the sizes that Python reads.
        """
        super().__init__()
        self.exits: dict[tuple[str, int, str], Exit] = {}
        self.ranges: dict[int, int] = {}
        self.taken: dict[tuple[str, int, str], list[str]] = {}
        self.finds: list[int] = []
        self.counts: dict[tuple[str, int, str], Exit] = {}
        self.foreign = False
        self._forced, self._count, self._most, self._sizes, self._numbers = forced, count, most, sizes, numbers
        self._dynamic = sizes is not None
        self._random = torch.Generator().manual_seed(forced.which) if forced else None
        self._kept: list[Tensor] = []  # alive, because Python holds their address
        self._found: dict[int, weakref.ref[Tensor]] = {}  # tensors whose size depends on values
        self._origins: dict[int, tuple[weakref.ref[Tensor], Any]] = {}
        self._inputs: dict[int, tuple[weakref.ref[Tensor], frozenset[int]]] = {}  # what a tensor's values depend on
        for index, tensor in enumerate(inputs):
            self._depend(tensor, frozenset({index}))
        for index, tensor in enumerate([*inputs, *held]):
            self._note(tensor, ("known", index))
        self._steps: list[tuple[str, str]] = []
        self._flow: list[Any] = []  # each step with its arguments
        self._lines: dict[int, tuple[str, int, str]] = {}  # the user's lines, by steps that read a value

    def __enter__(self) -> Way:
        self._outside = sys._getframe(1).f_code
        if self._sizes is not None:
            self._sizes.outside = self._outside
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        if len(self._steps) > self._most:
            raise TooLong
        self.foreign |= _is_foreign(func)
        seen = ""
        flow = (str(func) if name == "__get__" else name, self._given(args), self._given(kwargs))
        inputs = self._dependence([args[1:], kwargs] if name in _OF_SIZES else [args, kwargs])
        decisive = bool(inputs) and bool(self._dependence(deciding(name, args, kwargs)))
        taker = self._exit(name, inputs) if (name in _VALUES or name in _FACTORS) and inputs else None
        try:
            if taker is not None and self._is_forced(taker):
                result = self._another(func, name, args, kwargs)
            elif decisive and self._count is not None and self._count[0] in (None, len(self.finds)):
                result = finding(self._count[1], func, name, args, kwargs)
            else:
                result = func(*args, **kwargs)
            if self._sizes is not None and name == "arange":
                self._sizes.steps(args, kwargs)
            if self._sizes is not None and name == "interpolate" and args:
                self._sizes.resizes(self._sizes.of(args[0].shape, self._origin(args[0])), args, kwargs)
            if self._sizes is not None and (name in _SIZES or name in _PARTS):
                result = self._measured(name, args, kwargs, result)
            self._note(result, ("step", len(self._steps)))
            if decisive and returns_found(name):
                self._find(result)
            elif self._found and (self._is_found(args) or self._is_found(kwargs)):
                self._found |= {id(t): weakref.ref(t) for t in _tensors(result)}
            if inputs:
                self._follow(name, args, kwargs, result, inputs)
            if name in _VALUES:
                seen = name if name == "data_ptr" else _written(result)
                if self._found and self._is_found(args):
                    self._count_at(args[0], depth=2)
            if taker is not None:
                self.taken.setdefault(taker, []).append(seen or "True")
            return result
        except Exception as error:
            seen = type(error).__name__
            if taker is not None and name in _FACTORS:
                self.taken.setdefault(taker, []).append("False")
            raise
        finally:
            if seen and (line := user_line(sys._getframe(1), self._outside)):
                self._lines[len(self._steps)] = line
            self._steps.append((name, seen))
            self._flow.append(flow)

    def _measured(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> Any:
        """A size, or sizes, that Python reads from a tensor; or parts whose number depends on a size."""
        assert self._sizes is not None
        x = args[0] if args else kwargs.get("self", kwargs.get("input"))
        if not isinstance(x, Tensor) or (name == "__get__" and not isinstance(result, torch.Size)):
            return result
        found = self._is_found(x)
        if not found and not self._dynamic:
            return result
        if found:
            self._count_at(x)
        origin = self._origin(x)
        if isinstance(result, torch.Size):
            return self._sizes.of(result, origin, found)
        if name in _PARTS:
            by = 1 if name in ("unbind", "__iter__") else args[1] if len(args) > 1 else next(iter(kwargs.values()), 1)
            place = 1 if name in ("unbind", "__iter__") else 2
            dim = args[place] if len(args) > place else kwargs.get("dim", 0)
            if isinstance(by, int) and x.dim() and x.shape[dim]:
                size = self._sizes.size(x.shape[dim], origin, dim % x.dim(), found)
                self._sizes.take(-(-size // (-(-size // by) if name == "chunk" else by)), name, depth=3)
            return result
        shape = self._sizes.of(x.shape, origin, found)
        if name == "size":
            return shape[args[1] if len(args) > 1 else kwargs["dim"]]
        if name in ("numel", "nelement"):
            return math.prod(shape)
        self._sizes.take(shape[0], name, depth=3)
        return result

    def _origin(self, tensor: Tensor) -> Any:
        """The origin of a tensor; None if it is unknown."""
        reference, origin = self._origins.get(id(tensor), (None, None))
        return origin if reference is not None and reference() is tensor else None

    def _find(self, result: Any) -> None:
        """Notes a result whose size depends on values."""
        if self._sizes is None:
            self._sizes = Sizes({}, [])
            self._sizes.outside = self._outside
        first = next(_tensors(result))
        self._found |= {id(t): weakref.ref(t) for t in _tensors(result)}
        self.finds.append(first.shape[0] if first.dim() else 0)

    def _count_at(self, tensor: Tensor, depth: int = 3) -> None:
        """Notes that a line of the user's code reads the sizes of such a result."""
        frame = caller(sys._getframe(depth))
        line = None if is_own(frame.f_code.co_filename) else user_line(frame, self._outside)
        if line is not None:
            self.counts.setdefault(line, Exit(line, self._dependence(tensor), "size"))

    def _is_found(self, value: Any) -> bool:
        """Whether a size of ``value``, or a number in it, depends on values."""
        for tensor in _tensors(value):
            reference = self._found.get(id(tensor))
            if reference is not None and reference() is tensor:
                return True
        return _has_found(value)

    def _exit(self, name: str, inputs: frozenset[int]) -> tuple[str, int, str] | None:
        """Notes that a line of the user's code reads a value; returns the line."""
        frame = caller(sys._getframe(2))
        if is_own(frame.f_code.co_filename):  # ops may read values themselves
            return None
        line = user_line(frame, self._outside)
        if line is not None:
            before = self.exits.get(line)
            self.exits[line] = Exit(
                line, inputs | (before.inputs if before else frozenset()), before.name if before else name
            )
        return line

    def _is_forced(self, line: tuple[str, int, str]) -> bool:
        forced = self._forced
        return forced is not None and forced.line == line and forced.place in (None, len(self.taken.get(line, ())))

    def _another(self, func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The forced result of a function by which Python reads values."""
        assert self._forced is not None
        if name in _FACTORS:
            return _failed(func, args, kwargs)
        if name in _TRUTHS:
            return not func(*args, **kwargs)
        which, x = self._forced.which, args[0]
        if x.dtype == torch.bool:
            other = ~x
        elif which >= OTHERS + len(self._numbers):
            assert self._random is not None
            other = _drawn(x, self._random)
        elif which >= OTHERS:
            other = torch.full_like(x, self._numbers[which - OTHERS])
        elif x.is_complex():
            other = x * -7 - 1
        else:
            whole = not x.is_floating_point()
            near, others = ((x + 1, x - 1), _INTEGERS) if whole else ((x * -7 - 1, x + 1e3, x - 1e3), _FLOATS)
            other = near[which] if which < len(near) else torch.zeros_like(x) + others[which - len(near)]
        self._kept.append(other)
        return func(other, *args[1:], **kwargs)

    def _follow(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any, inputs: frozenset[int]
    ) -> None:
        """Marks what now depends on ``inputs``: results, and tensors written to, with all that share their memory."""
        self._depend(result, inputs)
        target = kwargs.get("out")
        if target is None and args and (name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))):
            target = args[0]
        for written in _tensors(target):
            storage = _storage(written)
            for reference, _ in list(self._origins.values()):
                other = reference()
                if other is not None and (other is written or (storage and _storage(other) == storage)):
                    self._depend(other, inputs)
            self._depend(written, inputs)
        if name in _INDEXING and len(args) > max(_INDEXING[name]):
            place, of = _INDEXING[name]
            indices, indexed = args[place], args[of]
            dim = args[1] if name in ("gather", "index_select") else 0
            size = indexed.shape[dim] if isinstance(indexed, Tensor) and indexed.dim() else indexed
            whole = isinstance(indices, Tensor) and not indices.is_floating_point() and indices.dtype != torch.bool
            if whole and isinstance(size, int) and size > 0:
                for index in self._dependence(indices):
                    self.ranges[index] = min(size, self.ranges.get(index, size))

    def _depend(self, value: Any, inputs: frozenset[int]) -> None:
        for tensor in _tensors(value):
            self._inputs[id(tensor)] = (weakref.ref(tensor), inputs | self._dependence(tensor))

    def _dependence(self, value: Any) -> frozenset[int]:
        found: frozenset[int] = frozenset()
        for tensor in _tensors(value):
            reference, inputs = self._inputs.get(id(tensor), (None, found))
            if reference is not None and reference() is tensor:
                found |= inputs
        return found

    def leaves(self, other: Way) -> bool:
        """Whether this way, which may have ended early, differs from the other up to its end."""
        own, others = ([flow for flow in way._flow if flow[0] not in _TEXTS] for way in (self, other))
        return own != others[: len(own)]

    def same_flow(self, other: Way) -> bool:
        """Whether forward took the same steps, with the same Python values."""
        return self._flow == other._flow

    def decides_like(self, other: Way) -> bool:
        """Whether both call the same functions with the same integers, truth values and texts. False if Python branches
        differently on values that rounding changes."""
        return _decisions(self._flow) == _decisions(other._flow)

    def calls(self, names: Collection[str]) -> bool:
        """Whether any function with one of these names was called."""
        return any(name.partition(".")[0] in names for name, _ in self._steps)

    @property
    def length(self) -> int:
        """The number of steps."""
        return len(self._steps)

    def end(self, results: Iterable[Tensor]) -> None:
        """Adds the results of forward as the last step: branches may differ only in which tensor they return."""
        self._flow.append(self._given(list(results)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Way) and (self._steps == other._steps or self._flow == other._flow)

    __hash__ = None  # type: ignore[assignment]

    @property
    def takes_values(self) -> bool:
        """Whether a line of the user's code read values of tensors, or caught an error that may depend on them."""
        return bool(self._lines)

    def parting(self, other: Way) -> str:
        """The user's line of the last value that differed before the ways part; empty if no value differed."""
        line = ""
        for index, (step, others) in enumerate(zip(self._steps, other._steps, strict=False)):
            if step[0] != others[0] or (line and self._flow[index] != other._flow[index]):
                return line
            if step != others and index in self._lines:
                line = shown_line(*self._lines[index])
        return line if self._flow != other._flow else ""

    def _note(self, result: Any, origin: Any) -> None:
        if isinstance(result, Tensor):
            self._origins[id(result)] = (weakref.ref(result), origin)
        elif isinstance(result, (list, tuple)) and not isinstance(result, torch.Size):
            for index, item in enumerate(result):
                self._note(item, (*origin, index))

    def _given(self, value: Any) -> Any:
        """A tensor by its origin, or by its contents if that is unknown; anything else by its value."""
        if isinstance(value, Tensor):
            origin = self._origin(value)
            return _content(value) if origin is None else origin
        if isinstance(value, (list, tuple)):
            return type(value).__name__, *map(self._given, value)
        if isinstance(value, dict):
            return [(str(key), self._given(item)) for key, item in value.items()]
        if isinstance(value, slice):
            return "slice", *map(self._given, (value.start, value.stop, value.step))
        sizes = formula(value)
        return _written(value) if sizes is None else ("size", sizes)


class ForcedError(torch.linalg.LinAlgError):  # type: ignore[misc, name-defined]
    """The error that a matrix has no inverse or factor, raised although it has one, to see what forward does then."""


def _failed(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Forces the other outcome of a function of ``_FACTORS``: an error if it succeeds, else a result of its shape.

    Raises:
        ForcedError: if ``func`` returns.
    """
    try:
        func(*args, **kwargs)
    except RuntimeError:
        return torch.zeros_like(list(_tensors([args, kwargs]))[-1])
    raise ForcedError("forced, as if values were others")


_FLOATS = (0.0, 1.0, 1e9, -1e9, math.nan, math.inf, -math.inf)
_INTEGERS = (0, 2, -1, 30, 100, -100, 1000, 1000000)

OTHERS = 3 + len(_FLOATS)
"""Number of fixed values tried in place of a number: some relative to it, then ``_FLOATS`` or ``_INTEGERS``.

Small ones come first: forward may use the number as a size, and a large size takes long."""


def _decisions(given: Any) -> Any:
    """A step's arguments without tensors and floats."""
    if isinstance(given, (list, tuple)):
        return None if given[:1] == ("content",) else [_decisions(item) for item in given]
    return None if isinstance(given, str) and _FRACTION.fullmatch(given) else given


_FRACTION = re.compile(r"-?(\d+\.\d*(e[-+]?\d+)?|\d+e[-+]?\d+|nan|inf)")


def _drawn(x: Tensor, generator: torch.Generator) -> Tensor:
    """Random values like those of a tensor: within its range, slightly off its values, or of other scales."""
    kind = int(torch.randint(3, (), generator=generator))
    exact = x.detach().double() if not x.is_complex() else x.detach().abs().double()
    low, high = (float(exact.min()), float(exact.max())) if x.numel() else (0.0, 0.0)
    apart = high - low or abs(high) + 1.0
    noise = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device)
    if kind == 0:
        drawn = low + apart * noise
    elif kind == 1:
        drawn = exact + 0.6 * apart * (noise - 0.5)
    else:
        drawn = exact * 10 ** (4 * noise - 2)
    return drawn.to(x.dtype) if x.is_floating_point() or x.is_complex() else drawn.round().to(x.dtype)


def _is_foreign(func: Any) -> bool:
    """Whether ``func`` is a ``torch.ops.name.op`` of another library."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        name = func._qualified_op_name
    elif isinstance(func, torch._ops.OpOverload):
        name = func._schema.name
    else:
        return False
    return name.partition("::")[0] not in _NAMESPACES


_NAMESPACES = {"aten", "prim", "prims", DOMAIN}


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)) and not isinstance(value, torch.Size):
        for item in value:
            yield from _tensors(item)


def _has_found(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return any(map(_has_found, value))
    return any(map(_has_found, value.values())) if isinstance(value, dict) else is_found(value)


def _storage(tensor: Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except Exception:  # noqa: BLE001 - sparse
        return 0


def _written(value: Any) -> str:
    """A number, list or array as text, without abbreviation, so that NaN equals itself."""
    return str(value.tolist() if isinstance(value, (Tensor, np.ndarray, np.generic)) else value)


def _content(tensor: Tensor) -> Any:
    try:
        values = tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()
        return "content", str(tensor.dtype), tuple(tensor.shape), zlib.crc32(values.tobytes())
    except Exception:  # noqa: BLE001 - sparse or quantized: equal to no other tensor
        return object()
