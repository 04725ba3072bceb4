"""Generates trial inputs: like the given ones, far from them, and with other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from svexport.tracing.sizes import Size, tiled

__all__ = ["FIRST", "KINDS", "NEXT", "NOTHING", "FAR", "FAR_SIZE", "Resized", "of_kind", "far", "is_mask", "random"]

KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "negated": (torch.neg, torch.logical_not),
    "hundredfold": (lambda x: x * 100, torch.clone),
    "zero": (torch.zeros_like, torch.zeros_like),
}
"""Inputs of another kind than the given ones, for models that decide by values: of floating-point numbers, of masks."""

FAR = ("scaled", "zeros")
"""Inputs of every model that are far from the given ones."""

NOTHING = ("zeros", "zero")
"""Inputs for which most functions are zero; a path taken only with these has not been compared."""

FIRST = ("random first",)
"""Inputs for models that forward changes: what these remember of the given inputs is not in a file."""

NEXT = ("random next",)
"""Runs with the FIRST inputs again, right after: results must not depend on remembered state."""

FAR_SIZE = 4096
"""Sizes up to this one are asked one by one, then those around powers of two."""

MOST_ELEMENTS = 2**14
"""Maximum elements of inputs with other sizes, or else a multiple of the elements given."""

PIECE = 2**16
"""Elements that are computed in float64 at once: more would take memory anew, which costs more than the numbers."""

DRAWN = 2**20
"""Random numbers that are drawn for one tensor at most: more cost more than what a model makes of them, and so larger
tensors have the same ones again, of random places."""


def of_kind(kind: str, tensor: Tensor) -> Tensor:
    """A tensor of the shape and dtype of another, filled as one of ``KINDS`` says; integers as they are."""
    number, mask = KINDS[kind]
    return number(tensor) if tensor.is_floating_point() else mask(tensor) if tensor.dtype == torch.bool else tensor


def far(name: str, tensors: Sequence[Tensor], ranges: Mapping[int, int]) -> Iterator[list[Tensor]]:
    """Inputs far from the given ones; with the given integers, and masks, where a model does not take others."""
    change = _scaled if name == "scaled" else _zeros
    changed = [change(t, ranges.get(index)) for index, t in enumerate(tensors)]
    yield changed
    for kept in (lambda t: not t.is_floating_point() and t.dtype != torch.bool, lambda t: not t.is_floating_point()):
        if any(map(kept, tensors)):
            yield [t if kept(t) else c for t, c in zip(tensors, changed, strict=True)]


def _scaled(tensor: Tensor, size: int | None) -> Tensor:
    """The tensor scaled by 0.1, 1, 10 or 100 with both signs; other integers; masks all set or half set."""
    if tensor.is_floating_point():
        return _of_other_scales(tensor)
    noise = torch.rand(tensor.shape, dtype=torch.float64, device=tensor.device)
    if size is not None:
        return (noise * size).long().clamp(max=size - 1).to(tensor.dtype)
    if tensor.dtype == torch.bool or is_mask(tensor):
        return (noise < 0.5).to(tensor.dtype) if bool(tensor.all()) else torch.ones_like(tensor)
    least = min(int(tensor.min()), 0) if tensor.numel() else 0
    return (tensor + (4 * noise).long().to(tensor.dtype) - 1).clamp(min=least)


def _of_other_scales(tensor: Tensor) -> Tensor:
    kind = tensor.dtype
    most, wide = torch.finfo(kind).max, torch.promote_types(kind, torch.float32)
    count, device = min(tensor.numel(), DRAWN), tensor.device
    powers = 10 ** torch.arange(-1.0, 3.0, dtype=torch.float64)
    scales = torch.empty(count, dtype=torch.uint8, device=device)
    for piece in scales.split(PIECE):
        piece.copy_(torch.rand(piece.shape, dtype=torch.float64, device=device).mul_(4))
    factors = powers.to(device)[scales.long()]
    for piece in factors.split(PIECE):
        piece.mul_(torch.randint(2, piece.shape, dtype=torch.float64, device=device).mul_(2).sub_(1))
    if tensor.numel() > count:
        factors = factors.to(wide)
    places = _places()

    def scaled(piece: Tensor) -> Tensor:
        start = next(places)
        return (piece * factors[start : start + piece.numel()]).clamp_(-most, most)

    return _in_pieces(scaled, tensor)


def _places() -> Iterator[int]:
    """The positions, among the numbers drawn, at which the random numbers of each piece begin."""
    yield from range(0, DRAWN, PIECE)
    while True:
        yield int(torch.randint(DRAWN - PIECE, ()))


def _zeros(tensor: Tensor, size: int | None) -> Tensor:
    """All zeros, with no mask set; integers in another order."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool or is_mask(tensor):
        return torch.zeros_like(tensor)
    return tensor.flatten().flip(0).reshape(tensor.shape) if size is None else (size - 1 - tensor).clamp(0, size - 1)


def is_mask(tensor: Tensor) -> bool:
    """Whether all numbers are zero or one."""
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.numel())


def random(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    """Everything random; or floating-point numbers alone, for integers may be sizes that fit one another."""
    yield [_random_like(t, shape) for t, shape in zip(tensors, shapes, strict=True)]
    if not all(t.is_floating_point() for t in tensors):
        yield [
            _random_like(t, shape) if t.is_floating_point() else tiled(t, shape)
            for t, shape in zip(tensors, shapes, strict=True)
        ]


def _random_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Fresh values like the given ones, tiled or cut to ``shape``: each changed by about a tenth where floating point
    (so that what was a projection matrix still is one), drawn from among them for anything else."""
    tensor = tiled(tensor, shape)
    if not tensor.numel():
        return tensor
    if not tensor.is_floating_point():  # indices and masks stay valid
        return tensor.flatten()[torch.randint(tensor.numel(), tensor.shape, device=tensor.device)]
    zero = not tensor.any()  # which alone says nothing: any values will do

    noise = torch.empty(min(tensor.numel(), DRAWN), dtype=torch.float64, device=tensor.device)
    for part in noise.split(PIECE):
        part.normal_()
    if not zero:
        noise.mul_(0.1).add_(1)
    if tensor.numel() > DRAWN:
        noise = noise.to(torch.promote_types(tensor.dtype, torch.float32))
    places = _places()

    def changed(piece: Tensor) -> Tensor:
        start = next(places)
        drawn = noise[start : start + piece.numel()]
        return drawn if zero else piece * drawn

    return _in_pieces(changed, tensor)


def _in_pieces(function: Callable[[Tensor], Tensor], tensor: Tensor) -> Tensor:
    """Applies an elementwise function piece by piece, in the tensor's own type."""
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    pieces = result.view(-1).split(PIECE), tensor.detach().reshape(-1).split(PIECE)
    for piece, given in zip(*pieces, strict=True):
        piece.copy_(function(given))
    return result


class Resized:
    """Inputs of other dynamic sizes.

    A model may halve its sizes, or divide them by other numbers: of each run there are alternatives.

    Attributes:
        given: the root of each dynamic size of the given inputs.
        ranges: the least and the largest value of each root.
        axes: by input and axis, its dynamic size.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        names: Sequence[str],
        dynamic_axes: Mapping[str, Mapping[int, str]],
        sizes: Mapping[str, Size],
    ) -> None:
        self._tensors = tensors
        self.axes = [{axis: sizes[symbol] for axis, symbol in dynamic_axes.get(name, {}).items()} for name in names]
        self._roots: dict[str, tuple[Size, int]] = {}
        for axes, tensor in zip(self.axes, tensors, strict=True):
            for axis, size in axes.items():
                self._roots.setdefault(size.root, (size, tensor.shape[axis]))
        self.given = self.roots(tensors)
        self.ranges = {
            root: (max(size.low, *(s.root_for(1) for s in sizes.values() if s.root == root)), size.high)
            for root, (size, _) in self._roots.items()
        }
        self._declared = {root: (size.low, size.high) for root, (size, _) in self._roots.items()}
        self._tried = {self._run(self.given)}

    def roots(self, tensors: Sequence[Tensor]) -> dict[str, int]:
        """The roots of the dynamic sizes in these inputs, by symbol."""
        found: dict[str, int] = {}
        for axes, tensor in zip(self.axes, tensors, strict=True):
            for axis, size in axes.items():
                found.setdefault(size.root, size.root_for(tensor.shape[axis]))
        return found

    def at(
        self, wanted: Mapping[str, int], most: int = MOST_ELEMENTS, tried: bool = True
    ) -> Iterator[tuple[str, list[Tensor]]]:
        """Runs with some sizes changed, which have not been before, of no more elements than ``most`` in all (or four
        times as many as are given); ``tried`` counts them as been."""
        run = ", ".join(f"{root}={size}" for root, size in wanted.items())
        whole = self._run({**self.given, **wanted})
        shapes = self.shapes(wanted)
        if whole in self._tried or self.too_large(wanted, most):
            return
        if tried:
            self._tried.add(whole)
        yield from ((run, inputs) for inputs in random(self._tensors, shapes))

    def shapes(self, wanted: Mapping[str, int]) -> list[list[int]]:
        """The shape of every input when the symbols have the wanted sizes."""
        shapes = [list(tensor.shape) for tensor in self._tensors]
        for axes, shape in zip(self.axes, shapes, strict=True):
            for axis, size in axes.items():
                if size.root in wanted:
                    shape[axis] = size.size(wanted[size.root])
        return shapes

    def others(self, root: str, n: int, step: int = 1, far: int = FAR_SIZE) -> Iterator[int]:
        """Sizes that a root may have, multiples of ``step``, by how far they are from one; then powers of two, and what
        is next to them."""
        low, high = self.ranges[root]
        near = sorted(range(max(low, 1), int(min(high, far)) + 1), key=lambda size: abs(size - n))
        powers = (size for exponent in range(12, 31) for size in (2**exponent, 2**exponent + 1, 3 * 2**exponent // 2))
        yield from (size for size in (*near, *powers) if size % step == 0 and low <= size <= high and size != n)

    def too_large(self, wanted: Mapping[str, int], most: int) -> bool:
        """Whether inputs of these sizes have more elements than a run may take."""
        return sum(map(math.prod, self.shapes(wanted))) > max(most, 4 * sum(t.numel() for t in self._tensors))

    def runs(self) -> Iterator[Iterator[tuple[str, list[Tensor]]]]:
        """Every dynamic size larger, then as small as can be, then each alone much larger.

        Of several the larger ones are unequal where a model takes that.
        """
        if not self._roots:
            return
        yield self._larger()
        yield self._smaller()
        for root in list(self._roots)[:3]:
            yield self._much(root)

    def _larger(self) -> Iterator[tuple[str, list[Tensor]]]:
        for apart in (1, 0) if len(self._roots) > 1 else (0,):
            for more in (lambda n, k: n + 1 + k, lambda n, k: n + (n & -n) * (1 + k), lambda n, k: n * (2 + k)):
                wanted = {}
                for place, (root, (size, given)) in enumerate(self._roots.items()):
                    wanted[root] = size.other(given, partial(more, k=place * apart))
                yield from self.at(wanted)

    def _smaller(self) -> Iterator[tuple[str, list[Tensor]]]:
        for less in (lambda n: 1, lambda n: n & -n, lambda n: n // 2, lambda n: n - 1):
            wanted = {}
            for root, n in self.given.items():
                low = self.ranges[root][0]
                wanted[root] = n if n <= low else max(less(n), low)
            yield from self.at(wanted)

    def _much(self, root: str) -> Iterator[tuple[str, list[Tensor]]]:
        n = self.given[root]
        for wanted in (-(-4 * n // 12) * 12, -(-2 * n // 12) * 12, 4 * n, 2 * n):
            if n < wanted <= self.ranges[root][1]:
                yield from self.at({root: wanted})

    def empty(self) -> Iterator[tuple[str, list[Tensor]]]:
        """Each dynamic size of 0 alone, where its range has that: the symbol, and inputs with the given numbers."""
        for root, (low, _) in self._declared.items():
            shapes = self.shapes({root: 0})
            if low <= 0 < self.given[root] and all(size >= 0 for shape in shapes for size in shape):
                yield root, [tiled(t, shape) for t, shape in zip(self._tensors, shapes, strict=True)]

    @staticmethod
    def _run(wanted: Mapping[str, int]) -> tuple[tuple[str, int], ...]:
        return tuple(sorted(wanted.items()))
