"""Einsum as matrix products, with no intermediate tensor larger than the operands and the output."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from string import ascii_letters
from typing import Any

import torch
from torch import Tensor, nn

from svexport.ops import _cuda
from svexport.ops._einsum.kernels import SHORT, few_rows, is_wide, kernel_products, takes_kernels
from svexport.ops._einsum.labels import Labels, parse, split, subscript
from svexport.ops._einsum.plan import Diagonal, Reshape, Transpose, plan
from svexport.ops._einsum.program import Program, bind, planned, run, trains
from svexport.ops._op import Op, autocast, tracing

__all__ = ["Einsum", "einsum"]


def reference(operands: Sequence[Tensor], labels: Sequence[int], ranks: Sequence[int]) -> Tensor:
    # Sizes stay symbolic under torch.export; the layout of the output must not depend on them, so it is contiguous.
    shapes = tuple(tuple(s if isinstance(s, int) else None for s in x.shape) for x in operands)
    chosen = plan(tuple(labels), tuple(ranks), shapes, trains(operands))
    output = run(bind(chosen, [operands[i].shape[dim] for i, dim in chosen.sources]), operands)
    if all(isinstance(step, Diagonal | Reshape | Transpose) for step in chosen.steps):
        return output.clone(memory_format=torch.contiguous_format)  # a view of an operand so far
    return output.contiguous()


def samples(make: Callable[..., Tensor]) -> Iterator[tuple[Any, ...]]:
    for equation, *shapes in [
        ("nctw,cd->ndtw", (2, 3, 5, 4), (3, 6)),
        ("nkctv,kvw->nctw", (2, 3, 4, 5, 7), (3, 7, 7)),
        ("nkctv,kcvw->nctw", (2, 3, 4, 5, 7), (3, 4, 7, 7)),
        ("bhnm,bdhm->bdhn", (2, 3, 5, 4), (2, 6, 3, 4)),
        ("...ij,...jk", (2, 1, 3, 4), (5, 4, 2)),
        ("iji->j", (3, 4, 3)),
        ("ij->ji", (3, 4)),
        ("bn,anm,bm->ba", (2, 5), (3, 5, 4), (2, 4)),
        ("i,j->ij", (3,), (1,)),
    ]:
        operands = [make(*shape) for shape in shapes]
        labels, ranks = parse(equation, tuple(map(len, shapes)))
        yield operands, list(labels), list(ranks)


OP = Op(
    name="einsum",
    schema="(Tensor[] operands, int[] labels, int[] ranks) -> Tensor",
    reference=reference,
    samples=samples,
    plugin=False,
)


def einsum(equation: str | Tensor, *operands: Any) -> Tensor:
    """``torch.einsum`` by matrix products, with no intermediate tensor larger than the operands and the output.

    It accepts all that ``torch.einsum`` accepts: ``einsum("bij,bjk->bik", x, y)`` with ellipsis, repeated subscripts
    (diagonals), implicit output, any number of operands (also as one list) and broadcasting of dimensions of size 1;
    and the sublist form ``einsum(x, [0, 1], y, [1, 2], [0, 2])``.
    Source: https://docs.pytorch.org/docs/stable/generated/torch.einsum.html

    Shape:
        - operands: as the equation says, one dimension for each subscript
        - output: one dimension for each output subscript; as in ``torch.einsum``, it may be a view of a single operand,
          or not contiguous

    It supports the dtypes and devices of ``torch.einsum``; the output has the same dtype as there. On CUDA, graph
    convolutions, 1 x 1 convolutions and their gradients (two large tensors, a small one) run dedicated kernels.

    In a file a dynamic size may be 0 from opset 14 on, but not a batch size that a matrix is broadcast to
    (``nctw,cd->ndtw`` with n = 0): ONNX Runtime refuses such a product, torch.matmul's too, with an error.

    Raises:
        RuntimeError: if the equation is malformed, or does not fit the operands.
        ValueError: if there is no operand, or a sublist holds a number outside ``[0, 52)``.
        TypeError: if the equation is not a string or an operand is not a tensor.
    """
    if isinstance(equation, Tensor):
        return einsum(*_from_sublists(equation, *operands))
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not operands:
        raise ValueError(
            "einsum(): expected an equation and at least one operand, or operands each with its list of subscripts"
        )
    if not isinstance(equation, str) or not all(isinstance(x, Tensor) for x in operands):
        kinds = ", ".join(type(x).__name__ for x in (equation, *operands))
        raise TypeError(f"einsum(): expected a string and tensors, or tensors and lists of subscripts; got {kinds}")
    if tracing():
        labels, ranks = parse.__wrapped__(equation, tuple(x.dim() for x in operands))  # torch.compile warns of caches
        return torch.ops.svexport.einsum(_autocast(operands, labels, ranks), labels, ranks)
    first, shapes = operands[0], [x.shape for x in operands]
    needs = tuple([torch.is_grad_enabled() and x.requires_grad for x in operands])
    if not first.is_cuda:
        return run(planned(equation, any(needs), False, *shapes), operands)
    item_size = first.element_size()
    way = _way(equation, needs, item_size, first.get_device(), *shapes)
    if way is not None and takes_kernels(operands) and _cuda.load():
        labels, ranks = parse(equation, tuple(map(len, shapes)))
        if way is OP:
            return OP(_autocast(operands, labels, ranks), labels, ranks)
        return way.apply(equation, *_autocast(operands, labels, ranks))
    return run(_cuda_program(equation, any(needs), item_size, *shapes), operands)


def _autocast(operands: Sequence[Tensor], labels: Labels, ranks: tuple[int, ...]) -> list[Tensor]:
    """Converts the operands as autocast does, if a label is contracted: they are factors of matrix products then."""
    converted = autocast(operands)
    if any(new.dtype != old.dtype for new, old in zip(converted, operands, strict=True)):
        *terms, output = split(labels, ranks)
        if not any(label not in output and sum(label in term for term in terms) > 1 for label in labels):
            return list(operands)
    return list(converted)


@lru_cache(maxsize=4096)
def _way(equation: str, needs: tuple[bool, ...], item_size: int, device: int, *shapes: tuple[int, ...]) -> Any:
    """What runs an einsum by CUDA kernels: the operator, or a function whose gradients are einsums too; or None."""
    kernels = kernel_products(equation, *shapes, item_size=item_size, wide=is_wide(device), needs=needs)
    wanted = [kernel for kernel, need in zip(kernels, (True, *needs), strict=True) if need]
    if all(wanted):
        return OP
    return _Products if any(wanted) and _gradients(equation, *shapes) else None


@lru_cache(maxsize=4096)
def _cuda_program(equation: str, training: bool, item_size: int, *shapes: tuple[int, ...]) -> Program:
    """A plan for operands on CUDA."""
    short = all(math.prod(shape) <= SHORT for shape in shapes)
    view = short and few_rows(equation, *shapes, item_size=item_size) if training else True
    return planned(equation, short or training, view, *shapes)


@lru_cache(maxsize=4096)
def _gradients(equation: str, *shapes: tuple[int, ...]) -> tuple[str, str] | None:
    """For two operands, the einsums of the output's gradient and the other operand. None unless both gradients are."""
    labels, ranks = parse(equation, tuple(map(len, shapes)))
    terms = split(labels, ranks)
    sizes = {pair for term, shape in zip(terms, shapes, strict=False) for pair in zip(term, shape, strict=True)}
    counts = Counter(labels)
    if len(sizes) > len(counts) or min(counts.values()) == 1 or any(len({*term}) < len(term) for term in terms):
        return None
    x, y, output = ("".join(map(ascii_letters.__getitem__, term)) for term in terms)
    return f"{output},{y}->{x}", f"{output},{x}->{y}"


class _Products(torch.autograd.Function):
    """An einsum of two operands whose gradients are einsums too; each of the three runs in its fastest way."""

    @staticmethod
    def forward(ctx: Any, equation: str, x: Tensor, y: Tensor) -> Tensor:
        ctx.equation = equation
        ctx.save_for_backward(x, y)
        return _product(equation, x, y)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        of_x, of_y = _gradients(ctx.equation, x.shape, y.shape)  # type: ignore[misc]
        if 0 in grad.stride():  # expanded, such as the gradient of a sum
            grad = grad.contiguous()
        function = einsum if torch.is_grad_enabled() else _product  # create_graph=True
        return (
            None,
            function(of_x, grad, y) if ctx.needs_input_grad[1] else None,
            function(of_y, grad, x) if ctx.needs_input_grad[2] else None,
        )


def _product(equation: str, x: Tensor, y: Tensor) -> Tensor:
    """An einsum of operands that the kernels take, without recording a gradient."""
    wide = x.is_cuda and is_wide(x.get_device())
    return _fastest(equation, x.shape, y.shape, item_size=x.element_size(), wide=wide)([x, y])


@lru_cache(maxsize=4096)
def _fastest(
    equation: str, *shapes: tuple[int, ...], item_size: int, wide: bool
) -> Callable[[Sequence[Tensor]], Tensor]:
    if kernel_products(equation, *shapes, item_size=item_size, wide=wide)[0]:
        labels, ranks = parse(equation, tuple(map(len, shapes)))
        return lambda operands: OP(operands, labels, ranks)
    program = planned(equation, all(math.prod(shape) <= SHORT for shape in shapes), True, *shapes)
    return lambda operands: run(program, operands)


def _from_sublists(*arguments: Any) -> tuple[Any, ...]:
    """``x, [0, 1], y, [1, 2], [0, 2]`` -> ``"AB,BC->AC", x, y``."""
    if len(arguments) == 1:
        return ("",)
    equation = ",".join("".join(map(subscript, sublist)) for sublist in arguments[1::2])
    if len(arguments) % 2 == 0:
        return equation, *arguments[::2]
    return equation + "->" + "".join(map(subscript, arguments[-1])), *arguments[:-1:2]


class Einsum(nn.Module):
    """Module form of :func:`einsum` for one equation."""

    def __init__(self, equation: str) -> None:
        super().__init__()
        self.equation = equation

    def forward(self, *operands: Tensor) -> Tensor:
        """Calls :func:`einsum` with the module's equation."""
        return einsum(self.equation, *operands)

    def extra_repr(self) -> str:
        """The equation, as ``print(module)`` shows it."""
        return repr(self.equation)
