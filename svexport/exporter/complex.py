"""Traces complex numbers, which ONNX does not compute with, as their real and imaginary parts."""

from __future__ import annotations

import functools
import math
import operator
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from svexport.errors import ExportError
from svexport.exporter.aten.pool import is_known
from svexport.exporter.constants import called, leaves_of, mapped
from svexport.exporter.opsets import LATER
from svexport.tracing.arguments import FlatModel
from svexport.tracing.source import shown_line, user_line
from svexport.tracing.swapped import untraced

__all__ = ["ComplexParts"]


class ComplexParts(TorchFunctionMode):
    """Traces functions of complex tensors as functions of their real and imaginary parts.

    Scripted code calls no Python functions while it is traced, so it keeps its own.

    Args:
        own: whether the exporter supports some complex functions, and gets those that are unknown here. If not, they
            raise :class:`ExportError`, and existing complex tensors, such as buffers, become constants.
    """

    def __init__(self, own: bool) -> None:
        super().__init__()
        self._own = own
        self._known: dict[int, tuple[Tensor, Complex]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        name = called(func)
        if name in _OF_TYPES:
            return func(*args, **kwargs)
        given = list(leaves_of((args, kwargs)))
        tensors = any(isinstance(leaf, Tensor) for leaf in given)
        concerned = any(_is_complex(leaf) for leaf in given)
        if name in _MAKERS or (concerned and (tensors or name in _CREATED)):
            args, kwargs = mapped(self._parts, args), mapped(self._parts, kwargs)
            function = _function(name, func)
            if function is not None:
                return function(*args, **kwargs)
            if self._own:
                return func(*mapped(_whole, args), **mapped(_whole, kwargs))
            raise self._unknown(name)
        result = func(*args, **kwargs)
        if tensors and not self._own and any(_is_complex(leaf) for leaf in leaves_of(result)):
            raise self._unknown(name)
        return result

    def _parts(self, value: Any) -> Any:
        """One of torch's complex tensors as its parts; any other value as it is."""
        if not isinstance(value, Tensor) or isinstance(value, Complex) or not value.dtype.is_complex:
            return value
        if id(value) in self._known:
            return self._known[id(value)][1]
        with untraced():  # torch.export still traces this
            made = Complex(*(part.clone() for part in torch.view_as_real(value.resolve_conj()).unbind(-1)))
        self._known[id(value)] = value, made
        return made

    def _unknown(self, name: str) -> ExportError:
        line = user_line(sys._getframe(2), FlatModel.forward.__code__)
        return ExportError(
            f"{name} cannot be exported with complex numbers"
            + (f"\n  at {shown_line(*line)}" if line else "")
            + f"\n  ONNX has none: compute with the real and imaginary parts, torch.view_as_real(z), or {LATER}"
        )


class Complex(Tensor):
    """Stands for a complex tensor; only :class:`ComplexParts` computes with it.

    Attributes:
        re: its real part.
        im: its imaginary part, of the same shape and type.
    """

    re: Tensor
    im: Tensor

    @staticmethod
    def __new__(cls, re: Any, im: Any) -> Complex:
        """Either part may be a number, but not both."""
        dtype = torch.result_type(re, im)
        if not dtype.is_floating_point:
            dtype = torch.get_default_dtype()
        tensor = re if isinstance(re, Tensor) else im
        re, im = (p if isinstance(p, Tensor) else torch.full_like(tensor, p, dtype=dtype) for p in (re, im))
        re, im = (part if part.dtype == dtype else part.to(dtype) for part in (re, im))
        if re.shape != im.shape:
            re, im = torch.broadcast_tensors(re, im)
        made = Tensor._make_wrapper_subclass(cls, (0,), dtype=dtype.to_complex(), device=re.device)  # type: ignore[attr-defined]
        made.re, made.im = re, im
        return made

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        raise RuntimeError(f"{func} cannot be computed with complex numbers in a file, because ONNX has none")


def _is_complex(value: Any) -> bool:
    if isinstance(value, Tensor):
        with torch._C.DisableTorchFunction():  # hidden from other modes
            value = value.dtype
    return value.is_complex if isinstance(value, torch.dtype) else isinstance(value, complex)


def _re(value: Any) -> Any:
    """The real part of a complex tensor, or the real dtype of a complex one; anything else as it is."""
    if isinstance(value, Complex):
        return value.re
    return value.to_real() if isinstance(value, torch.dtype) and value.is_complex else value


def _im(value: Any) -> Any:
    return value.im if isinstance(value, Complex) else value


def _whole(value: Any) -> Any:
    return torch.complex(value.re, value.im) if isinstance(value, Complex) else value


def _complex(value: Any) -> Any:
    """A real tensor as a complex one with imaginary part 0."""
    real = isinstance(value, Tensor) and not isinstance(value, Complex)
    return Complex(value, 0.0) if real else value


def _pair(value: Any) -> tuple[Any, Any]:
    """Both parts of a tensor or a number; the imaginary part of a real one is 0."""
    if isinstance(value, Complex):
        return value.re, value.im
    return (value.real, value.imag) if isinstance(value, complex) else (value, 0.0)


def _function(name: str, func: Callable[..., Any]) -> Callable[..., Any] | None:
    if name in _FUNCTIONS:
        return _FUNCTIONS[name]
    if name in _OF_SHAPES:
        return lambda *args, **kwargs: func(*mapped(_re, args), **kwargs)
    for names, rule in _RULES:
        if name in names:
            return lambda *args, **kwargs: rule(func, args, kwargs)
    if name.endswith("_") and not name.endswith("__") and name[:-1] in _FUNCTIONS:
        return lambda x, *args, **kwargs: _assigned(x, _FUNCTIONS[name[:-1]](x, *args, **kwargs))
    return None


def _of_each_part(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    re = func(*mapped(_re, args), **mapped(_re, kwargs))
    return _joined(re, func(*mapped(_im, args), **mapped(_im, kwargs)))


def _joined(re: Any, im: Any) -> Any:
    if isinstance(re, Tensor):
        return Complex(re, im)
    return type(re)(_joined(*pair) for pair in zip(re, im, strict=True))


def _product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Both parts of a function that is linear in each of its tensors."""
    flat = [leaf for arg in args for leaf in (arg if isinstance(arg, (tuple, list)) else [arg])]
    place = next((i for i, leaf in enumerate(flat) if isinstance(leaf, Complex)), None)
    if place is None:
        return func(*flat, **kwargs)
    by_re, by_im = (
        _product(func, (*flat[:place], part, *flat[place + 1 :]), kwargs) for part in (flat[place].re, flat[place].im)
    )
    if isinstance(by_re, Complex):
        return Complex(by_re.re - by_im.im, by_re.im + by_im.re)
    return Complex(by_re, by_im)


def _joining(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Both parts of a function that joins tensors, some of which may be real."""
    return _of_each_part(func, mapped(_complex, args), mapped(_complex, kwargs))


def _created(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    made = func(*mapped(_re, args), **mapped(_re, kwargs))
    dtype = kwargs.get("dtype")
    return made if dtype is not None and not dtype.is_complex else _complex(made)


def _assigned(x: Complex, value: Complex) -> Complex:
    x.re.copy_(value.re)
    x.im.copy_(value.im)
    return x


def _sum(of: Callable[[Any, Any], Any]) -> Callable[..., Complex]:
    """The sum or difference of two numbers, one of which may be real."""

    def function(x: Any, y: Any, *, alpha: Any = 1) -> Complex:
        (a, b), (c, d) = _pair(x), _pair(y)
        if alpha != 1:
            c, d = c * alpha, d * alpha
        return Complex(of(a, c), of(b, d))

    return function


_add, _sub = _sum(operator.add), _sum(operator.sub)


def _mul(x: Any, y: Any) -> Complex:
    if isinstance(y, complex):
        x, y = y, x
    if not isinstance(x, complex):
        return _product(torch.mul, (x, y), {})
    a, b = _pair(y)
    if x.real == 0:  # mostly 1j
        return Complex(-b * x.imag, a * x.imag)
    return Complex(a * x.real - b * x.imag, a * x.imag + b * x.real)


def _div(x: Any, y: Any, *, rounding_mode: None = None) -> Complex:
    if isinstance(y, complex):
        return _mul(x, 1 / y)
    if isinstance(y, Complex):
        square = y.re * y.re + y.im * y.im
        return _div(_mul(x, _conj(y)), square)
    return Complex(x.re / y, x.im / y)


def _pow(x: Complex, exponent: Any) -> Complex:
    if not isinstance(exponent, int) or exponent < 1:
        raise ExportError(f"a complex tensor to the power of {exponent} cannot be exported; use torch.polar")
    return functools.reduce(_mul, [x] * exponent)


def _polar(abs: Tensor, angle: Tensor) -> Complex:
    return Complex(abs * angle.cos(), abs * angle.sin())


def _conj(z: Any) -> Any:
    """The conjugate; a real tensor is its own."""
    return Complex(z.re, -z.im) if isinstance(z, Complex) else z


def _abs(z: Complex) -> Tensor:
    return (z.re * z.re + z.im * z.im).sqrt()


def _angle(z: Complex) -> Tensor:
    """The angle, 0 for 0. For negative numbers torch gives -pi if the imaginary part is -0, which files do not tell."""
    return torch.atan2(z.im, torch.where(z.re.abs() + z.im.abs() == 0, 1.0, z.re))


def _setitem(x: Complex, key: Any, value: Any) -> None:
    x.re[key], x.im[key] = _pair(value)


def _where(condition: Tensor, x: Any, y: Any) -> Complex:
    (a, b), (c, d) = _pair(x), _pair(y)
    return Complex(torch.where(condition, a, c), torch.where(condition, b, d))


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Complex:
    product = _product(F.linear, (x, weight), {})
    return product if bias is None else _add(product, bias)


def _to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """``to`` and ``type_as``. A real dtype drops the imaginary part."""
    kinds = [value for value in (*args, *kwargs.values()) if isinstance(value, (Tensor, torch.dtype))]
    args, kwargs = mapped(_re, args), mapped(_re, kwargs)
    re = _re(x).to(*args, **kwargs)
    if not any(map(_is_complex, kinds or [x])):
        return re
    return Complex(re, x.im.to(*args, **kwargs) if isinstance(x, Complex) else 0.0)


# ---------------------------------------------------------------- Fourier transforms: products with matrices


def _waves(rows: Any, columns: Any, size: Any, inverse: bool, norm: str | None, twice: bool, like: Tensor) -> Complex:
    """The matrix ``exp(-2 pi i j k / size)``, conjugated for the inverse, with the factor that ``norm`` asks for. With
    ``twice``, rows that also stand for their conjugates are doubled. Sizes may be dynamic.

    Exact zeros of sine and cosine are set, because rounding would give results random signs. Static sizes use NumPy:
    torch.export would trace torch's computation, and the file would do it in float32.
    """
    dynamic = any(isinstance(n, torch.SymInt) for n in (rows, columns, size))
    of: Any = torch if dynamic else np
    dtype = like.dtype if like.dtype.is_floating_point else torch.get_default_dtype()
    row, column = of.arange(rows)[:, None], of.arange(columns)
    whole = torch.full((), size, dtype=torch.int64) if dynamic else np.int64(max(size, 1))
    angle = row * column % whole * (2 * math.pi / whole)
    scale = whole ** -{"ortho": 0.5, "forward": float(not inverse)}.get(norm or "backward", float(inverse))
    if twice:
        scale = scale * of.where((row == 0) | (row + row == whole), 1.0, 2.0)
    parts = of.cos(angle), of.sin(angle) if inverse else -of.sin(angle)
    exact = (of.where(of.abs(part) < (1e-6 if dynamic else 1e-9), 0.0, part * scale) for part in parts)
    return Complex(*(torch.as_tensor(part, dtype=dtype).to(like.device) for part in exact))


def _transformed(x: Any, size: Any, dim: int, inverse: bool, norm: str | None, half: bool) -> Any:
    """The transform along one axis, cut or zero-padded to ``size``. With ``half``, a transform of real numbers omits
    the conjugate half of its result, and the inverse makes real numbers from the remaining half."""
    real = half and inverse
    with untraced():
        given = torch.sym_int(_re(x).shape[dim])  # an int under TorchScript
        size = (2 * (given - 1) if real else given) if size is None else torch.sym_int(size)
        rows = torch.sym_min(given, size // 2 + 1 if real else size)
        matrix = _waves(rows, size // 2 + 1 if half and not inverse else size, size, inverse, norm, real, _re(x))
    if not is_known(given == rows):
        x = _mapped_parts(lambda part: part.narrow(dim, 0, rows), x)
    x = _mapped_parts(lambda part: part.transpose(dim, -1), x)
    if not _re(x).is_floating_point():
        x = x.to(matrix.re.dtype)
    if real:
        y = x.re @ matrix.re - x.im @ matrix.im if isinstance(x, Complex) else x @ matrix.re
    else:
        y = _product(torch.matmul, (x, matrix), {})
    return _mapped_parts(lambda part: part.transpose(dim, -1), y)


def _mapped_parts(function: Callable[[Tensor], Tensor], x: Any) -> Any:
    return Complex(function(x.re), function(x.im)) if isinstance(x, Complex) else function(x)


def _fourier(inverse: bool, half: bool, last: int | None) -> Callable[..., Tensor]:
    """``fft``, ``fft2`` or ``fftn``: by default along the ``last`` one or two axes, or all axes if it is None."""

    def transform(input: Tensor, s: Any = None, dim: Any = None, norm: str | None = None, *, n: Any = None) -> Tensor:
        s = n if s is None else s
        if dim is None:
            dim = range(-(last or (_re(input).dim() if s is None else len(s))), 0)
        dims = [dim] if isinstance(dim, int) else list(dim)
        sizes = list(s) if isinstance(s, (tuple, list)) else [s] * len(dims)
        pairs = list(zip(sizes, dims, strict=True))
        for size, axis in reversed(pairs) if half and not inverse else pairs:  # the last axis is the real one
            input = _transformed(input, size, axis, inverse, norm, half and axis == dims[-1])
        return input

    return transform


def _hermitian(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """``hfft`` of Hermitian input as the inverse transform of the conjugate, and ``ihfft`` of real input as the
    conjugate of the transform. The norm factors of the two directions are exchanged."""

    def transform(input: Tensor, s: Any = None, dim: Any = None, norm: str | None = None, **kwargs: Any) -> Tensor:
        turned = {"forward": "backward", "ortho": "ortho"}.get(norm or "", "forward")
        return _conj(function(_conj(input), s, dim, turned, **kwargs))

    return transform


def _transforms(axes: str, last: int | None) -> dict[str, Callable[..., Tensor]]:
    """The functions of ``torch.fft`` whose names end with ``axes``."""
    fft, ifft, rfft, irfft = (_fourier(inverse, half, last) for half in (False, True) for inverse in (False, True))
    names = ("fft", "ifft", "rfft", "irfft", "hfft", "ihfft")
    functions = (fft, ifft, rfft, irfft, _hermitian(irfft), _hermitian(rfft))
    return {f"fft_{name}{axes}": function for name, function in zip(names, functions, strict=True)}


_FOURIER = _transforms("", 1) | _transforms("2", 2) | _transforms("n", None)
"""Transforms of ``torch.fft``."""


def _istft(z: Complex, *args: Any, **kwargs: Any) -> Tensor:
    """``istft`` of a batch of one: torch would unsqueeze a complex tensor, which the exporter does not support."""
    if z.re.dim() > 2:
        return torch.istft(_whole(z), *args, **kwargs)
    return torch.istft(torch.complex(z.re.unsqueeze(0), z.im.unsqueeze(0)), *args, **kwargs).squeeze(0)


_OF_TYPES = {"dtype", "is_complex", "is_floating_point", "requires_grad", "__hash__"}
"""Functions that are answered by the complex stand-in itself."""

_OF_SHAPES = {
    *("__len__", "device", "dim", "get_device", "is_contiguous", "is_cuda", "ndim", "ndimension", "nelement", "numel"),
    *("shape", "size"),
}
"""Functions that give the same for a complex tensor and for its real part."""

_OF_EACH_PART = {
    *("__getitem__", "alias", "broadcast_tensors", "broadcast_to", "chunk", "clone", "contiguous", "cpu", "cumsum"),
    *("detach", "diag_embed", "diagonal", "diff", "dropout", "expand", "expand_as", "fft_fftshift", "fft_ifftshift"),
    *("flatten", "flip", "gather", "index", "index_select", "mT", "mean", "moveaxis", "movedim", "narrow", "neg"),
    *("pad", "permute", "ravel", "repeat", "repeat_interleave", "reshape", "reshape_as", "resolve_conj"),
    *("resolve_neg", "roll", "select", "slice", "split", "split_with_sizes", "squeeze", "sum", "swapaxes", "swapdims"),
    *("T", "t", "take_along_dim", "tensor_split", "tile", "transpose", "tril", "triu", "unbind", "unflatten"),
    *("unsqueeze", "view", "view_as"),
}
"""Functions that apply to each part separately."""

_JOINING = {"cat", "concat", "stack"}

_PRODUCTS = {"bmm", "dot", "einsum", "kron", "matmul", "mm", "mv", "outer", "tensordot"}

_CREATED = {"empty", "empty_like", "new_empty", "new_ones", "new_zeros", "ones", "ones_like", "zeros", "zeros_like"}

_RULES = (_OF_EACH_PART, _of_each_part), (_JOINING, _joining), (_PRODUCTS, _product), (_CREATED, _created)

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("H", "adjoint", "mH"), lambda z: _mapped_parts(lambda part: part.mT, _conj(z))),
    **dict.fromkeys(("abs", "absolute"), _abs),
    **dict.fromkeys(("conj", "conj_physical"), _conj),
    **dict.fromkeys(("div", "divide", "true_divide"), _div),
    **dict.fromkeys(("mul", "multiply"), _mul),
    **dict.fromkeys(("rsub", "__rsub__"), lambda x, y, alpha=1: _sub(y, x, alpha=alpha)),
    **dict.fromkeys(("sub", "subtract"), _sub),
    **dict.fromkeys(("to", "type", "type_as"), _to),
    "__iter__": lambda z: iter([Complex(*pair) for pair in zip(z.re.unbind(0), z.im.unbind(0), strict=True)]),
    "__rdiv__": lambda x, y: _div(y, x),
    "__setitem__": _setitem,
    "add": _add,
    "angle": _angle,
    "cdouble": lambda x: _to(x, torch.complex128),
    "cfloat": lambda x: _to(x, torch.complex64),
    "complex": lambda real, imag: Complex(real, imag),  # torch's argument names
    "copy_": lambda x, y: _assigned(x, _add(torch.zeros_like(x.re), y)),
    "exp": lambda z: _polar(z.re.exp(), z.im),
    **_FOURIER,
    "imag": _im,
    "istft": _istft,
    "linear": _linear,
    "log": lambda z: Complex(_abs(z).log(), _angle(z)),
    "masked_fill": lambda z, mask, value: _where(mask, value, z),
    "polar": _polar,
    "pow": _pow,
    "real": _re,
    "reciprocal": lambda z: _div(1.0, z),
    "square": lambda z: _mul(z, z),
    "view_as_complex": lambda x: Complex(*(x.select(x.dim() - 1, part) for part in (0, 1))),  # opset 9 has no axis -1
    "view_as_real": lambda z: torch.stack((z.re, z.im), -1),
    "where": _where,
}

_MAKERS = _FOURIER.keys() | {"cdouble", "cfloat", "complex", "polar", "view_as_complex"}
"""Functions that make complex tensors from real ones."""
