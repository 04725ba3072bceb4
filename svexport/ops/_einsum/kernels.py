"""Decides which einsums run CUDA kernels because they are faster than a plan, and which plans suit CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import takewhile

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from svexport.ops._einsum.labels import Labels, label_sizes, parse, size_of, split

SHORT = 2**21  # maximum elements of an operand that a GPU copies faster than it launches a plan's further products
_ROWS_OF_FLOATS, _ROWS_OF_HALVES = 300, 700  # matrices with fewer rows than this train faster as one product
_LARGE = 2**18  # minimum elements of each large tensor, for a graph convolution
_WIDTHS = range(8, 65)  # product of the innermost sizes that a large tensor shares with the small one only
_COUNTS = range(1, 9)  # product of the other sizes that a large tensor shares with the small one only
_ROWS = 128  # minimum rows for every matrix of the small tensor
_MIXED = 2**21  # minimum bytes of the larger of the two tensors whose channels are mixed
_MIXED_SUMMED = 2**17  # the same where the product or a gradient sums over samples: a plan has a product for each
_FEW_CHANNELS = 128  # maximum channels for _MIXED_SUMMED to apply
_FEW_SUMMED, _FEW_COLUMNS = 32, 16  # maximum sums or columns for half types, see _channels
_NARROW = 40  # maximum channels
_SUMMED_CHANNELS = range(1, 257)
_CHANNELS = range(1, 513)
_MULTIPLIED = 2**24  # minimum multiplications in one sample
_POSITIONS = 128  # minimum positions of one sample
_SHARED = 222 * 2**10  # bytes of a multiprocessor's shared memory that are left for matrices and tiles


@lru_cache(maxsize=64)
def is_wide(device: int) -> bool:
    """Whether a CUDA device has warpgroup matrix products (wgmma), which the kernels that mix channels use."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=4096)
def kernel_products(
    equation: str, *shapes: tuple[int, ...], item_size: int, wide: bool = False, needs: tuple[bool, ...] = ()
) -> tuple[bool, ...]:
    """Whether the operator's CUDA kernels are faster than a plan: for an einsum, and for each operand's gradient.

    The kernels are for two large tensors and a small one, any of which may be the output: graph convolutions, 1 x 1
    convolutions and their gradients. They read in place what a plan must copy, and multiply float32 on tensor cores.

    Args:
        item_size: bytes of an element.
        wide: whether the kernels that mix channels are available, see :func:`is_wide`.
        needs: for each operand, whether it needs a gradient.
    """
    labels, ranks = parse(equation, tuple(map(len, shapes)))
    *operands, output = split(labels, ranks)
    known, _ = label_sizes(operands, shapes)
    sizes = [size or 0 for size in known]
    none = (False,) * (len(operands) + 1)
    if len(operands) != 2 or 0 in sizes:
        return none
    terms = [tuple(label for label in output if sizes[label] != 1)]
    for operand, shape in zip(operands, shapes, strict=True):
        terms.append(tuple(label for label, size in zip(operand, shape, strict=True) if size != 1))
    at_small, *at_large = sorted(range(3), key=lambda i: size_of(terms[i], sizes))
    small, large = terms[at_small], [terms[i] for i in at_large]
    if {*small} - {*large[0], *large[1]}:
        return none
    if _convolves(small, large, sizes):
        fits = {at_small: 1 in (_own(large[0], large[1], sizes)[1], _own(large[1], large[0], sizes)[1])}
        for at, (target, source) in zip(at_large, (large, large[::-1]), strict=True):
            fits[at] = _fits(source, target, sizes, item_size)
        return tuple(fits[i] for i in range(3))
    if not wide or not _mixes(small, large, sizes):
        return none
    products = {at_small: _correlates(small, large, sizes, item_size)}
    learned = at_small == 0 or any(needs[at_small - 1 : at_small])
    for at, (target, source) in zip(at_large, (large, large[::-1]), strict=True):
        products[at] = _channels(source, target, sizes, item_size, learned)
    if products[at_large[0]] and products[at_large[1]]:
        products[at_small] = True
    return tuple(products[i] for i in range(3))


def _own(term: Labels, other: Labels, sizes: Sequence[int]) -> tuple[int, int]:
    """The sizes of the labels that ``term`` has and ``other`` lacks: product of the innermost run, and of the rest."""
    own = [label for label in term if label not in other]
    width = size_of(takewhile(own.__contains__, reversed(term)), sizes)
    return width, size_of(own, sizes) // width


def _convolves(small: Labels, large: Sequence[Labels], sizes: Sequence[int]) -> bool:
    """Whether the graph convolution kernels suit these terms."""
    shared = {*small}.intersection(*large)
    rows, copied = [], not shared.issuperset(large[0][: len(shared)])  # copied: matrices whose batch is not outermost
    for term, other in (large, reversed(large)):
        own = [label for label in term if label not in other]
        run = list(takewhile(own.__contains__, reversed(term)))
        width, count = _own(term, other, sizes)
        if width not in _WIDTHS or count not in _COUNTS or size_of(term, sizes) < _LARGE or not {*own} <= {*small}:
            return False
        rows.append(term[: -len(run)][-1:])
        copied = copied or count > 1
    alike = [label for label in large[0] if label in large[1] and label not in small]
    return rows[0] == rows[1] and not {*rows[0]} & {*small} and copied and size_of(alike, sizes) >= _ROWS


def _fits(source: Labels, target: Labels, sizes: Sequence[int], item_size: int) -> bool:
    """Whether shared memory holds the small matrix (in two parts if it is float32) and two tiles of 32 rows."""
    (width, count), (columns, _) = _own(source, target, sizes), _own(target, source, sizes)
    matrix = count * -(-width // 2) * 2 * -(-columns // 16) * 16 * (8 if item_size == 4 else item_size)
    return matrix + 2 * 32 * (count * width + columns) * item_size <= _SHARED


def _positions(large: Sequence[Labels], sizes: Sequence[int]) -> int:
    """The number of positions of one sample: the product of the sizes of the labels that both terms end with."""
    same = takewhile(lambda pair: pair[0] == pair[1], zip(*map(reversed, large), strict=False))
    return size_of([label for label, _ in same], sizes)


def _mixes(small: Labels, large: Sequence[Labels], sizes: Sequence[int]) -> bool:
    """Whether one matrix mixes the channels of all positions."""
    return {*small} == {*large[0]} ^ {*large[1]} and _positions(large, sizes) >= _POSITIONS


def _channels(source: Labels, target: Labels, sizes: Sequence[int], item_size: int, learned: bool) -> bool:
    """Whether the kernels that mix the channels of a large tensor are faster. learned: the matrix has a gradient."""
    shared = [label for label in source if label in target]
    total, positions = size_of(shared, sizes), _positions((source, target), sizes)
    summed, count = size_of(source, sizes) // total, size_of(target, sizes) // total
    if total == positions:  # one sample: a plan copies nothing, and one product may have few columns to share all sums
        enough = item_size == 2 or (total * summed * count >= _MULTIPLIED and summed < 4 * count)
        least = _MIXED
    else:
        enough = True
        least = _MIXED_SUMMED if learned and max(summed, count) <= _FEW_CHANNELS else _MIXED
    return (
        summed in _SUMMED_CHANNELS
        and count in _CHANNELS
        and enough
        and max(summed, count) * total * item_size >= least
        # For half types torch is as fast where rows are aligned to 16 bytes, but for products of few columns or sums.
        and (
            item_size > 2
            or positions % 8 != 0
            or (total > positions and (summed <= _FEW_SUMMED or count <= _FEW_COLUMNS))
        )
    )


def _correlates(small: Labels, large: Sequence[Labels], sizes: Sequence[int], item_size: int) -> bool:
    """Whether the kernel that sums over all positions is faster than a plan, which multiplies or copies each sample.

    Each of its blocks writes a partial output; these must be small compared with what is read.
    """
    total = size_of([label for label in large[0] if label in large[1]], sizes)
    samples = total // _positions(large, sizes)
    if samples == 1:
        narrow = size_of(large[0], sizes) // total <= _NARROW  # the fewer channels of the two
        parts = 8 if item_size > 2 else 4 if narrow else 1
    else:  # a plan adds up a product per sample; for two samples of an aligned half type these are fast
        parts = 128 if item_size > 2 else 8 if samples == 2 and total % 16 == 0 else 64
    return total * parts >= size_of(small, sizes)


def takes_kernels(operands: Sequence[Tensor]) -> bool:
    """Whether the kernels take the operands: plain tensors, not those of torch.func or forward-mode differentiation."""
    return all(
        x.is_cuda
        and type(x) in (Tensor, nn.Parameter)
        and x.dtype in (torch.float32, torch.float16, torch.bfloat16)
        and not torch._C._functorch.is_functorch_wrapped_tensor(x)
        and forward_ad.unpack_dual(x).tangent is None
        for x in operands
    )


@lru_cache(maxsize=4096)
def few_rows(equation: str, *shapes: tuple[int, ...], item_size: int) -> bool:
    """Whether an output that is a view trains faster, of two short operands: its gradient is copied.

    Otherwise matrices are, for every sample, and the sum of their gradients is one step more; but those of many rows
    are few products of long sums.
    """
    labels, ranks = parse(equation, tuple(map(len, shapes)))
    *operands, output = split(labels, ranks)
    if len(operands) != 2:
        return False
    known, _ = label_sizes(operands, shapes)
    sizes = [size or 0 for size in known]
    x, y = ([label for label in term if label in output] for term in operands)
    rows = max(size_of({*x} - {*operands[1]}, sizes), size_of({*y} - {*operands[0]}, sizes))
    return rows < (_ROWS_OF_FLOATS if item_size > 2 else _ROWS_OF_HALVES)
