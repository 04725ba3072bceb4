"""How far torch differs from itself by rounding alone, and by how much a file may differ because of it."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from svexport.ops._op import DOMAIN
from svexport.parity import ATOL, RTOL, tolerances
from svexport.tracing.quantizers import Copies, computes_again, repeats

__all__ = ["Perturbed", "Rounding", "Tolerances"]

PERTURBATIONS = 4

PIECE = 2**16
"""Elements that are changed by different numbers."""

SOME = 4 * PIECE
"""Elements of a large result that the first perturbation changes: all of them take half as long as the forward."""

BLOCK = 2**18
"""Elements whose sizes are computed at once: more would take memory anew, which costs more than the numbers."""

ROUNDING = 2.0**-18
"""Relative to the largest number: a few times the difference of float32 sums in another order."""


@dataclass(frozen=True)
class Tolerances:
    """The tolerances that verification holds outputs to.

    Tolerances of the caller hold as given. Otherwise the absolute one shrinks with an output's scale, its largest
    number, if that is below 1, and integers have to be equal.

    Attributes:
        rtol: as given, or None.
        atol: as given, or None.
        most: rtol and atol of outputs whose scale is 1 or more.
    """

    rtol: float | None
    atol: float | None
    most: tuple[float, float] = (RTOL, ATOL)

    @classmethod
    def of(cls, rtol: float | None, atol: float | None, dtypes: set[torch.dtype]) -> Tolerances:
        """``dtypes`` take part in the computation: the coarsest decides."""
        return cls(rtol, atol, tolerances(rtol, atol, dtypes))

    @property
    def fine(self) -> bool:
        """Whether no half type takes part; in those, two runtimes compute quite different numbers."""
        return self.most == (RTOL, ATOL)

    def held(self, expected: Tensor, far: bool = False) -> tuple[float, float]:
        """rtol and atol of one output. On ``far`` inputs, where large numbers cancel, atol allows for some rounding."""
        rtol, atol = self.most
        if not expected.is_floating_point():
            return 0.0 if self.rtol is None else rtol, 0.0 if self.atol is None else atol
        if self.atol is None:
            kind = torch.finfo(expected.dtype)
            steps = 16 * kind.smallest_normal * kind.eps  # of the smallest numbers of its type
            scale = _scale(expected)
            atol = max(atol * min(scale, 1.0), steps, scale * ROUNDING if far else 0.0)
        return rtol, atol


class Rounding:
    """Torch's own rounding in one run: how far its results are from those in float64, and from those when every
    intermediate result changes by a rounding error (this also shows numbers that cancel, and needs no float64).

    Nothing is computed before it is asked for.

    Attributes:
        gaps: per output, how far each element is from itself, as far as that was looked for; None where unknown.
        sizes: whether rounding errors change sizes of what torch returns, as far as that was looked for.
        steady: whether all calls took the steps of this run, of the same numbers: then the model remembers nothing.
            ``call`` may say so; None until then.
    """

    FACTOR = 4.0
    """The largest error of a file may be this many times torch's own; its root mean square, twice as many times."""

    def __init__(
        self,
        model: nn.Module,
        inputs: Sequence[Tensor],
        expected: Sequence[Tensor],
        copies: Copies | None = None,
        call: Callable[[Rounding, nn.Module, Sequence[Tensor]], Sequence[Tensor]] = lambda _, model, inputs: model(
            *inputs
        ),
        errors: float = 2.0,
        perturbed_first: bool = False,
    ) -> None:
        """``call`` raises where a model does not compute the same functions as in this run; ``errors`` of rounding is
        what its every result changes by at most. With ``perturbed_first`` float64 is the second that is looked at: of
        large inputs it takes twice as long, and where all ways count that are needed, their order does not matter."""
        self._inputs, self._expected = inputs, expected
        self._copies, self._call, self._errors = copies or Copies(model), call, errors
        self._tries: list[tuple[int | None, float]] | None = None
        self._perturbed_first = perturbed_first
        self.gaps: list[Tensor | None] = [None] * len(expected)
        self.sizes = False
        self.steady: bool | None = None

    def allows(self, index: int, actual: Tensor, rtol: float, atol: float) -> float:
        """How far torch is from itself, if that explains ``actual``, the file's output of that index; else 0."""
        if actual.dtype != self._expected[index].dtype or actual.shape != self._expected[index].shape:
            return 0.0
        while not (most := self._explained(index, actual, rtol, atol)):
            if not self._look_further():
                return 0.0
        return most if self.repeats else 0.0

    @cached_property
    def repeats(self) -> bool:
        """Whether torch computes the same once more; asked of what rounding is to explain alone."""
        try:
            # Twice: it may alternate.
            return self.steady or all(computes_again(self._copies, self._inputs, self._expected) for _ in range(2))
        except Exception:  # noqa: BLE001 - a model that cannot be copied; the plain tolerance stands
            return False

    def measured(self) -> list[float | None]:
        """Per output, how far torch is from itself, at least a rounding error of its scale; None where unknown."""
        while self._look_further():
            pass
        return [self._own(index) for index in range(len(self.gaps))]

    def own(self, index: int, least: float) -> float | None:
        """The same of one output, looked for no further than until it is ``least``."""
        while ((own := self._own(index)) is None or own < least) and self._look_further():
            pass
        return own

    def _own(self, index: int) -> float | None:
        """By what is known so far."""
        gap, expected = self.gaps[index], self._expected[index]
        if gap is None or not gap.numel() or not expected.is_floating_point():
            return None
        return max(float(gap.amax()), torch.finfo(expected.dtype).eps * _scale(expected))

    def _explained(self, index: int, actual: Tensor, rtol: float, atol: float) -> float:
        """By what is known of the rounding so far."""
        expected = self._expected[index].detach().cpu().double()
        gap = self.gaps[index]
        if gap is None:
            return 0.0
        most = float(gap.amax()) if gap.numel() else 0.0
        actual = actual.double()
        same = (actual == expected) | (actual.isnan() & expected.isnan())
        apart = torch.where(same, 0.0, (actual - expected).abs().nan_to_num(math.inf))
        allowed = atol + rtol * expected.abs().nan_to_num(0.0, 0.0, 0.0)
        beyond = (apart - allowed).clamp(min=0)
        # Of elements that are whole steps apart, indices or classes for one, not many more than in torch.
        count = 8 * self._expected[index].is_floating_point() + 4 * int((self.FACTOR * gap > allowed).sum())
        explained = float(beyond.amax()) <= self.FACTOR * most and int(beyond.count_nonzero()) <= count
        typical = float(beyond.square().mean().sqrt()) <= 2 * self.FACTOR * float(gap.square().mean().sqrt())
        return most if most and explained and typical else 0.0

    def _look_further(self) -> bool:
        """Has torch compute once more, in float64 or changed by rounding errors, if there is another such way."""
        if self._tries is None:
            self._tries = self._ways()
        if not self._tries:
            return False
        seed, most = self._tries.pop(0)
        try:
            others = self._precise() if seed is None else self._perturbed(seed, most)
        except Exception:  # noqa: BLE001 - a model tied to one dtype; one that knows what it gets from torch
            return True
        self.sizes |= any(e.shape != o.shape for e, o in zip(self._expected, others, strict=True))
        for index, (e, o) in enumerate(zip(self._expected, others, strict=True)):
            gap, before = _gap(e, o), self.gaps[index]
            self.gaps[index] = gap if before is None else before if gap is None else before.maximum(gap)
        return True

    def _ways(self) -> list[tuple[int | None, float]]:
        """Float64 as None, and how results are perturbed: the seed, and how many elements of each at most. No methods:
        who has its own has tensors that wait for garbage to be collected."""
        try:
            if not repeats(self._copies, self._inputs, self._expected):
                return []
        except Exception:  # noqa: BLE001 - a model that cannot be copied; the plain tolerance stands
            return []
        ways: list[tuple[int | None, float]] = [(None, math.inf), *((seed, math.inf) for seed in range(PERTURBATIONS))]
        # By parts first, which mostly says enough, and never more than the whole would.
        return [(0, SOME), *ways] if self._perturbed_first else ways

    def _precise(self) -> Sequence[Tensor]:
        inputs = [t.double() if t.is_floating_point() else t.clone() for t in self._inputs]
        return self._call(self, self._copies.double(), inputs)

    def _perturbed(self, seed: int, most: float) -> Sequence[Tensor]:
        with Perturbed(seed, self._errors, most) as perturbed:
            results = self._call(self, self._copies.single(), [t.clone() for t in self._inputs])
        if most < math.inf and not perturbed.in_part and self._tries:  # these were the whole
            self._tries.remove((seed, math.inf))
        return results


class Perturbed(TorchDispatchMode):
    """Changes each floating-point result by up to so many of its type's rounding errors, at random.

    Attributes:
        in_part: whether a result had more than ``most`` elements, of which about so many were changed, evenly spread.
    """

    def __init__(self, seed: int, errors: float = 2.0, most: float = math.inf) -> None:
        super().__init__()
        self._errors, self._most = errors, most
        self.in_part = False
        self._generator, self._places = torch.Generator().manual_seed(seed), random.Random(seed)
        self._noise: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not all(r.alias_info is None for r in func._schema.returns) or not _computes(func):
            return result
        if isinstance(result, (list, tuple)) and func.namespace == DOMAIN:  # one op for what others are many
            return type(result)(self._changed(func, item) for item in result)
        terms = None
        of_many = func._schema.name.partition("::")[2] in _MEANS and args[0].is_floating_point()
        if of_many and not self._is_large(args[0]):
            others = {name: value for name, value in (kwargs or {}).items() if name != "dtype"}
            for wide in (torch.promote_types(args[0].dtype, torch.float32), torch.float64):
                terms = func(args[0].abs(), *args[1:], **others, dtype=wide)
                if not terms.numel() or bool(terms.amax().isfinite()):  # else they may not have fitted into the type
                    break
        return self._changed(func, result, terms, own=_is_new(func, result, args))

    def _changed(self, func: Any, result: Any, terms: Tensor | None = None, own: bool = False) -> Any:
        """``own`` says that nobody else has the result's memory."""
        if not isinstance(result, Tensor) or not result.is_floating_point() or not result.numel():
            return result
        name = func._schema.name.partition("::")[2]
        # What is added up may be larger than what comes of it.
        more = _root_mean_square(result) if name in _SUMS else 0.0
        if name in _HALVES:
            more += 0.5
        step = self._errors * torch.finfo(result.dtype).eps
        large = self._is_large(result)
        changed = torch.empty_like(result)  # as dense as it was, so that both are one row of numbers
        if own and changed.stride() == result.stride():
            changed = result
        elif large:
            changed.copy_(result)
        exact, flat = (t.as_strided((t.numel(),), (1,)) for t in (_dense_like(result, changed), changed))
        sums = None if terms is None else _dense_like(terms, changed).as_strided((terms.numel(),), (1,))
        wide = torch.promote_types(result.dtype, torch.float32)
        count = result.numel()
        width = BLOCK if more or sums is not None or result.dtype != wide else count
        starts: Iterable[int] = range(0, count, width)
        if large:
            width, pieces = PIECE, int(self._most) // PIECE
            starts = [(count - PIECE) * piece // (pieces - 1) for piece in range(pieces)]
        for start in starts:
            x = exact[start : start + width].to(wide)
            size = x  # of either sign, as the noise is
            if more:
                size = x.abs().add_(more)
            if sums is not None:
                size = torch.maximum(sums[start : start + width], size.abs())
            self._change(flat[start : start + width], x, size, step)
        return changed

    def _is_large(self, tensor: Tensor) -> bool:
        large = tensor.numel() > self._most
        self.in_part |= large
        return large

    def _change(self, out: Tensor, x: Tensor, size: Tensor, step: float) -> None:
        """Writes ``x + step * size * noise``; all are rows of as many numbers."""
        whole = x.numel() // PIECE * PIECE
        for begin, end in ((0, whole), (whole, x.numel())):
            if begin == end:
                continue
            noise = self._some_noise(end - begin, x.device, size.dtype)
            # Rows in one call: each call is as many threads to start and to wait for.
            into, own, sizes = (t[begin:end].view(noise.shape) for t in (out, x, size))
            if x.dtype == size.dtype == out.dtype:
                torch.addcmul(own, sizes, noise, value=step, out=into)
            else:
                torch.add(own, sizes * noise, alpha=step, out=into)

    def _some_noise(self, count: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """So many numbers from -1 to 1, in rows of ``PIECE`` or one that is shorter: some of those drawn at first,
        which cost more than what they change."""
        noise = self._noise.get((device, dtype))
        if noise is None:
            drawn = 2 * torch.rand(2 * PIECE, generator=self._generator, dtype=torch.float64) - 1
            noise = self._noise[device, dtype] = drawn.to(device, dtype)
        width = min(count, PIECE)
        rows = count // width
        start = self._places.randrange(PIECE)
        apart = (PIECE - start) // max(rows - 1, 1)
        return noise.as_strided((rows, width), (apart, 1), start)


def _is_new(func: Any, result: Any, args: Sequence[Any]) -> bool:
    """Whether a function of ATen made the memory of its result, which some only hand on (``_unsafe_view``)."""
    if func.namespace != "aten" or not isinstance(result, Tensor):
        return False
    place = result.untyped_storage().data_ptr()
    given = (x for arg in args for x in (arg if isinstance(arg, (list, tuple)) else (arg,)) if isinstance(x, Tensor))
    return all(x.untyped_storage().data_ptr() != place for x in given)


def _dense_like(tensor: Tensor, other: Tensor) -> Tensor:
    """The numbers of one tensor in the order in which another, dense one has them in memory."""
    if tensor.stride() == other.stride():
        return tensor
    return torch.empty_like(other, dtype=tensor.dtype).copy_(tensor)


def _root_mean_square(tensor: Tensor) -> float:
    """In float32, unless squares are too large or too small for it."""
    norm = float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)))
    if not 1e-15 < norm < 1e15:
        norm = float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
    return norm / math.sqrt(tensor.numel())


def _computes(func: Any) -> bool:
    """Whether a function of ATen rounds: not those that only move what there is, or make constants."""
    name = func._schema.name.partition("::")[2]
    return any(isinstance(a.type, torch._C.TensorType) for a in func._schema.arguments) and name not in _MOVES


_SUMS = {"addmm", "baddbmm", "bmm", "convolution", "cumsum", "linear", "mean", "mm", "mv", "sum"}
_MEANS = {"mean", "sum"}
"""Functions whose rounding error follows from the size of their terms, which may cancel in the result."""

_HALVES = {"sigmoid", "transformer_decoder"}
"""What ends in a sigmoid: ONNX Runtime computes it as a quotient plus a half, and so rounds the smallest as a half."""

_MOVES = {
    *("abs", "cat", "ceil", "clamp", "clone", "constant_pad_nd", "copy", "empty_like", "floor", "full_like", "gather"),
    *("index", "index_select", "masked_fill", "max_pool2d_with_indices", "neg", "new_zeros", "new_ones", "ones_like"),
    *("clamp_max", "clamp_min", "nan_to_num"),
    *("relu", "repeat", "round", "scatter", "sign", "stack", "trunc", "where", "zeros_like", "_to_copy"),
}


def _gap(expected: Tensor, other: Tensor) -> Tensor | None:
    if other.shape != expected.shape or expected.is_complex():
        return None
    e, o = expected.detach().cpu().double(), other.detach().cpu().double()
    return torch.where(e == o, 0.0, (e - o).abs()).nan_to_num(0.0, 0.0, 0.0)


def _scale(tensor: Tensor) -> float:
    """The largest finite number of a tensor."""
    finite = tensor.detach().abs()
    finite = finite[finite.isfinite()]
    return float(finite.amax()) if finite.numel() else 0.0
