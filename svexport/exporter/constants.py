"""Constant values for Python while ``torch.export`` traces: values of tensors that do not depend on inputs."""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import CodeType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes

from svexport.errors import ExportError
from svexport.tracing.reach import bytes_of
from svexport.tracing.source import is_library, is_standard, shown_line, user_line
from svexport.tracing.swapped import swapped

__all__ = [
    "LINE",
    "MOST_BYTES",
    "ConstantValues",
    "NotTraced",
    "called",
    "leaves_of",
    "mapped",
    "lines_of_sizes",
    "sizes_stay_dynamic",
    "texts_of_sizes",
    "without_assertions",
]

LINE = "svexport_line"
"""Attribute of an error that holds the user's line at which it was raised."""

MOST_BYTES = 16 * 2**20
"""Largest constant, in bytes, that is computed from constants."""

_VALUES = {"__array__", "__bool__", "__complex__", "__contains__", "__float__", "__index__", "__int__", "allclose"}
_VALUES |= {"equal", "is_nonzero", "item", "numpy", "tolist"}
"""Functions by which Python reads the values of tensors."""

_SIZED_BY_VALUES = {"argwhere", "bincount", "masked_select", "nonzero", "repeat_interleave", "unique"}
_SIZED_BY_VALUES |= {"unique_consecutive", "_unique2"}
"""Functions whose result sizes depend on values, as do those of one-argument ``where`` and of masks as indices."""

_OF_MATRICES = {"cholesky", "geqrf", "inverse", "matrix_exp", "matrix_power", "orgqr", "ormqr", "pinverse", "qr", "svd"}
_OF_MATRICES |= {
    f"linalg_{name}"
    for name in (
        *("cholesky", "det", "eigh", "eigvalsh", "householder_product", "inv", "lstsq", "lu", "lu_factor", "lu_solve"),
        *("matrix_exp", "matrix_power", "pinv", "qr", "slogdet", "solve", "solve_triangular", "svd", "svdvals"),
    )
}
"""Functions that ONNX lacks, or needs many nodes for. Applied to constants, such as parametrized weights, they fold."""

_TAKE_SIZES = {"arange", "broadcast_to", "empty", "expand", "narrow", "new_empty", "new_ones"}
_TAKE_SIZES |= {"new_zeros", "ones", "rand", "randn", "repeat", "reshape", "tile", "unflatten", "view", "zeros"}
_TAKE_SIZES |= {"chunk", "linspace", "logspace", "one_hot", "roll", "tensor_split", "unfold"}
_TAKE_SIZES |= {f"{kind}_pool{n}d" for kind in ("adaptive_avg", "adaptive_max", "avg", "max") for n in (1, 2, 3)}
"""Functions that accept 0-d integer tensors as sizes, and read their values without a Python call."""

_RANDOM = {"bernoulli", "cauchy", "dropout", "empty", "exponential", "geometric", "multinomial", "normal", "poisson"}
_RANDOM |= {"rand", "seed", "uniform"}
"""Parts of the names of random functions, whose values cannot be computed again."""

_OF_SIZES = {"__len__", "data_ptr", "dim", "element_size", "is_contiguous", "numel", "size", "storage_offset", "stride"}
_OF_SIZES |= {"__get__", "__set__", "untyped_storage"}
"""Functions that make no tensor; ``__get__`` is any property except those of :data:`_VIEWS`."""

_IMMUTABLE = {bool, complex, float, int, str, torch.Size, torch.device, torch.dtype, torch.layout, torch.memory_format}
"""Argument types with which a function may be called again later; arrays and other objects may change meanwhile."""

_MAY_BE_IN_PLACE = {"celu", "elu", "hardsigmoid", "hardswish", "hardtanh", "leaky_relu", "mish", "relu", "relu6"}
_MAY_BE_IN_PLACE |= {"rrelu", "selu", "silu", "threshold"}
"""Functions with an ``inplace`` argument."""

_NOT_IN_PLACE = {"__index__", "__int__", "__invert__", "__iter__"}

_VIEWS = {"H", "T", "data", "mH", "mT"}


class NotTraced(ExportError):
    """An error after which no other strategy of torch.export is to be tried."""


class ConstantValues(TorchFunctionMode):
    """Gives Python the values of tensors computed from parameters, buffers and numbers alone; fake tensors have no
    values. Examples: ``for h, w in self.shapes: h = int(h)``, ``x[self.mask]``.

    When a value is read, its computation is repeated on the true tensors. A tensor that was written to is no constant;
    nor is one computed from inputs, dynamic sizes or random numbers.

    Args:
        model: its parameters and buffers are constants. The mode is entered inside forward, where they may be fake.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._true = dict(_held(model))
        self._model = model
        self._known: dict[int, tuple[weakref.ref[Tensor], int, Callable[[], Any]]] = {}
        self._written: set[int] = set()
        self._data: set[int] = set()  # storages of results of ``.data``

    def __enter__(self) -> ConstantValues:
        self._outside = sys._getframe(1).f_code
        self._known.clear()
        self._written.clear()
        self._data.clear()
        for name, tensor in _held(self._model):
            if name in self._true:
                self._note(tensor, self._true[name].detach)
        return super().__enter__()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = _name(func)
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            raise NotTraced("forward assigns to the data of a tensor, which may end the process in torch.export")
        if self._data and _is_in_place(name, args, kwargs) and args and _storage(args[0]) in self._data:
            raise NotTraced("forward writes to the data of a tensor, which may end the process in torch.export")
        constant = name not in _OF_SIZES and self._is_constant(name, args, kwargs)
        if constant and (name in _VALUES or name in _OF_MATRICES or _is_sized_by_values(name, args)):
            again = self._again(func, args, kwargs)
            with _outside():
                found, value = _tried(again)
            if found and name in _OF_MATRICES:
                value = mapped(Tensor.clone, value)  # a traced copy: forward may write to it
                self._keep(value, again)
            if found:
                return value
        args, kwargs = self._with_numbers(name, args, kwargs)
        if name in ("__getitem__", "index_put", "index_put_", "__setitem__"):
            args = self._with_places(name, args)
        data = name == "data" and getattr(func, "__self__", None) is Tensor.data
        try:
            result = args[0].detach() if data else func(*args, **kwargs)  # torch.export loses values of .data
        except Exception as error:
            line = user_line(sys._getframe(1), self._outside)
            if line and not hasattr(error, LINE):
                setattr(error, LINE, shown_line(*line))
            raise
        if data:
            self._data.add(_storage(result))
        self._forget_written(name, args, kwargs)
        if constant:
            self._keep(result, self._again(func, args, kwargs))
        return result

    def _is_constant(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        if any(word in name for word in _RANDOM) or kwargs.get("out") is not None or _is_in_place(name, args, kwargs):
            return False
        if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda") or torch.jit.is_tracing():
            return False
        return all(self._is_known(leaf) for leaf in leaves_of((args, kwargs)))

    def _is_known(self, leaf: Any) -> bool:
        if isinstance(leaf, Tensor):
            return self._value_of(leaf) is not None
        return leaf is None or leaf is Ellipsis or type(leaf) in _IMMUTABLE

    def _value_of(self, tensor: Tensor) -> Callable[[], Any] | None:
        """A function that returns the true tensor for a traced one; None if there is none."""
        if self._written and _storage(tensor) in self._written:
            return None
        reference, version, value = self._known.get(id(tensor), (None, 0, None))
        if reference is not None and reference() is tensor:
            with torch._C.DisableTorchFunction():
                return value if tensor._version == version else None
        if type(tensor) is Tensor and not _is_traced(tensor):  # a plain attribute, not a buffer
            return tensor.detach
        return None

    def _again(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[[], Any]:
        """A function that calls ``func`` with the true tensors, at most once."""
        given = mapped(self._held_value, (args, dict(kwargs)))
        results: list[Any] = []

        def value() -> Any:
            if not results:
                positional, keywords = mapped(lambda leaf: leaf() if isinstance(leaf, _Later) else leaf, given)
                result = func(*positional, **keywords)
                if any(bytes_of(t) > MOST_BYTES for t in leaves_of(result) if isinstance(t, Tensor)):
                    raise _TooLarge
                results.append(result)
            return results[0]

        return value

    def _held_value(self, leaf: Any) -> Any:
        value = self._value_of(leaf) if isinstance(leaf, Tensor) else None
        return leaf if value is None else _Later(value)

    def _keep(self, result: Any, value: Callable[[], Any]) -> None:
        if isinstance(result, Tensor):
            self._note(result, value)
        elif isinstance(result, (tuple, list)):
            for index, item in enumerate(result):
                self._keep(item, lambda index=index: value()[index])  # type: ignore[misc]

    def _note(self, tensor: Tensor, value: Callable[[], Any]) -> None:
        with torch._C.DisableTorchFunction():
            self._known[id(tensor)] = weakref.ref(tensor), tensor._version, value

    def _forget_written(self, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        written = kwargs.get("out")
        if written is None and args and _is_in_place(name, args, kwargs):
            written = args[0]
        self._written |= {_storage(tensor) for tensor in leaves_of(written) if isinstance(tensor, Tensor)}

    def _with_numbers(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, with numbers in place of constant tensors that mean a size or the end of a slice."""

        def number(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor) or leaf.dim() or leaf.is_floating_point() or leaf.dtype == torch.bool:
                return leaf
            value = self._value_of(leaf)
            with _outside():
                found, true = (False, None) if value is None else _tried(value)
                return int(true) if found and true is not None else leaf

        if name in ("full", "new_full"):  # the fill value keeps its dtype
            size = slice(0, 1) if name == "full" else slice(1, 2)
            return (*args[: size.start], *mapped(number, args[size]), *args[size.stop :]), kwargs
        if name in _TAKE_SIZES:
            first = args[:1] if args and isinstance(args[0], Tensor) else ()
            return (*first, *mapped(number, args[len(first) :])), mapped(number, kwargs)
        if name in ("__getitem__", "__setitem__") and any(isinstance(i, slice) for i in _as_tuple(args[1])):
            indices = (mapped(number, i) if isinstance(i, slice) else i for i in _as_tuple(args[1]))
            return (args[0], tuple(indices), *args[2:]), kwargs
        return args, kwargs

    def _with_places(self, name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The indices, with each constant mask replaced by integer indices, whose number is constant."""
        if len(args) < 2:
            return args
        indices = tuple(args[1]) if name.startswith("index_put") else _as_tuple(args[1])
        places: list[Any] = []
        for index in indices:
            value = self._value_of(index) if isinstance(index, Tensor) and index.dtype == torch.bool else None
            found = False
            if value is not None and index.dim():
                with _outside():
                    found, mask = _tried(value)
                    places += mask.nonzero(as_tuple=True) if found else ()
            if not found:
                places.append(index)
        changed = len(places) != len(indices) or any(a is not b for a, b in zip(places, indices, strict=True))
        return (args[0], tuple(places), *args[2:]) if changed else args


class _Later:
    """A true tensor, computed when it is needed."""

    def __init__(self, value: Callable[[], Any]) -> None:
        self._value = value

    def __call__(self) -> Any:
        return self._value()


class _TooLarge(Exception):
    pass


def _as_tuple(indices: Any) -> tuple[Any, ...]:
    return indices if isinstance(indices, tuple) else (indices,)


def _tried(value: Callable[[], Any]) -> tuple[bool, Any]:
    """Whether there is a value, and the value. An error is ignored, as the traced function will raise it."""
    try:
        return True, mapped(lambda x: x.clone() if isinstance(x, Tensor) else x, value())
    except Exception:  # noqa: BLE001 - see above
        return False, None


@contextmanager
def _outside() -> Iterator[None]:
    """Leaves every trace and mode, to compute with true tensors."""
    with ExitStack() as stack:
        stack.enter_context(torch._C.DisableTorchFunction())
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        yield


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def called(func: Any) -> str:
    """The name of a method, function, property or operator: ``mul``, ``__getitem__``, ``shape``, ``fft_rfft2``."""
    if isinstance(func, torch._ops.OpOverload):
        return func._schema.name.partition("::")[2]
    name: str = getattr(func, "__name__", "")
    return getattr(func.__self__, "__name__", name) if name == "__get__" else name


def _name(func: Any) -> str:
    """Like :func:`called`, but ``__get__`` for every property that is no view."""
    name = called(func)
    return "__get__" if getattr(func, "__name__", "") == "__get__" and name not in _VIEWS else name


def _is_in_place(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    if name in _MAY_BE_IN_PLACE:
        return bool(kwargs.get("inplace")) or any(argument is True for argument in args)
    if name.startswith("__"):
        return name == "__setitem__" or (name.startswith("__i") and name not in _NOT_IN_PLACE)
    return name.endswith("_")


def _is_sized_by_values(name: str, args: tuple[Any, ...]) -> bool:
    return name in _SIZED_BY_VALUES or (name == "where" and len(args) == 1)


def _is_traced(tensor: Tensor) -> bool:
    return torch._is_functional_tensor(tensor) or isinstance(tensor, torch._subclasses.FakeTensor)


def _storage(tensor: Tensor) -> int:
    try:
        with torch._C.DisableTorchFunction():  # hidden from other modes
            return tensor.untyped_storage()._cdata
    except Exception:  # noqa: BLE001 - sparse, or a stand-in without one
        return id(tensor)


def leaves_of(value: Any) -> Iterator[Any]:
    """The leaves of nested dicts, slices, lists and tuples, including those of a ``torch.Size``."""
    if isinstance(value, dict):
        value = tuple(value.values())
    if isinstance(value, slice):
        value = (value.start, value.stop, value.step)
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from leaves_of(item)
    else:
        yield value


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """The same structure with the function applied to every leaf; a ``torch.Size`` is one leaf."""
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*(mapped(function, item) for item in (value.start, value.stop, value.step)))
    if isinstance(value, (tuple, list)) and not isinstance(value, torch.Size):
        items = [mapped(function, item) for item in value]
        if hasattr(value, "n_sequence_fields"):  # a named result, for example of torch.linalg.qr
            return type(value)(items)  # type: ignore[arg-type, call-arg]
        return items if isinstance(value, list) else tuple(items)
    return function(value)


@contextmanager
def without_assertions() -> Iterator[None]:
    """Drops ``torch._check_tensor_all``: a file has no assertions, and the values that it reads are no constants."""
    # Two lambdas, because dynamo accepts no function with two names.
    with swapped(torch, _check_tensor_all=lambda *_, **__: None, _check_tensor_all_with=lambda *_, **__: None):
        yield


@contextmanager
def texts_of_sizes() -> Iterator[list[str]]:
    """Collects the user's lines that turn dynamic sizes into text, which ``torch.export`` does not notice."""
    lines: list[str] = []
    names = ("__repr__", "__str__", "__format__")
    own = {name: vars(torch.SymInt)[name] for name in names if name in vars(torch.SymInt)}

    def noting(function: Callable[..., str]) -> Callable[..., str]:
        @functools.wraps(function)
        def text(*args: Any) -> str:
            frame = sys._getframe(1)
            if not is_library(frame.f_code.co_filename) and not is_standard(frame.f_code.co_filename):
                lines.append(shown_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name))
            return function(*args)

        return text

    with swapped(torch.SymInt, **{name: noting(function) for name, function in own.items()}):
        yield lines


@contextmanager
def lines_of_sizes(forward: CodeType) -> Iterator[None]:
    """Adds to errors the first of the user's lines, called by ``forward``, that specialized a dynamic size."""
    from torch.fx.experimental.sym_node import SymNode

    lines: list[str] = []
    own = SymNode.guard_int

    def guard_int(node: Any, file: str, number: int) -> int:
        line = None if lines or node.expr.is_number else user_line(sys._getframe(1), forward)
        if line:
            lines.append(shown_line(*line))
        return own(node, file, number)

    with swapped(SymNode, guard_int=guard_int):
        try:
            yield
        except Exception as error:
            if lines and not hasattr(error, LINE):
                setattr(error, LINE, lines[0])
            raise


@contextmanager
def sizes_stay_dynamic() -> Iterator[None]:
    """Refuses ``int(n)``, ``int(n / 4)`` and ``float(n)`` of a dynamic size or of ``x.item()`` in the user's code:
    non-strict torch.export would continue with the current number."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    def refusing(own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def number(size: Any) -> Any:
            frame = sys._getframe(1)
            if is_library(frame.f_code.co_filename) or size.node.expr.is_number:
                return own(size)
            line = shown_line(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            what, advice = "a dynamic size", "divide by //, or make the size static"
            if free_unbacked_symbols(size):
                what, advice = "values of its inputs", "keep it a tensor, or make these inputs constants by freeze="
            raise ExportError(f"forward makes a Python number of {what}\n  at {line}\n  {advice}")

        return number

    with ExitStack() as stack:
        for kind in (torch.SymInt, torch.SymFloat):
            names = [name for name in ("__int__", "__float__") if hasattr(kind, name)]
            stack.enter_context(swapped(kind, **{name: refusing(getattr(kind, name)) for name in names}))
        yield
