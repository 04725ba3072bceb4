"""Arithmetic, comparisons, logic: ops that go element by element."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import FLOAT_TYPES, Builder, Value

moves("Clip Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Max Min Sign Where")

unchanged("Abs Add Ceil Div Erf Exp Floor Log Mean Mul Neg Reciprocal Sigmoid Sign Sqrt Sub Sum Tanh", 13)
unchanged("Clip Equal Greater IsNaN Less Max Min Mod Pow", 13)
unchanged("Add Div Mul Sub", 14)
unchanged("GreaterOrEqual LessOrEqual Where", 16)
unchanged("IsInf IsNaN", 20)
unchanged("Acos Acosh Asin Asinh Atan Atanh Cos Cosh Round Sin Sinh Softplus Softsign Tan", 22)

BOOL, INT64, UINT64, DOUBLE = TensorProto.BOOL, TensorProto.INT64, TensorProto.UINT64, TensorProto.DOUBLE
_LARGE = (INT64, UINT64)
"""Integers that no floating-point type holds all of."""


# ---------------------------------------------------------------- the smaller and the larger


def _chosen(b: Builder, compare: str, x: Value, y: Value) -> Value:
    """``x`` where it is less than, or greater than, ``y``; else ``y``. For integers, without rounding."""
    return b.op("Where", b.op(compare, x, y), x, y)


@down("Max Min", 12)
def _max(b: Builder, node: Node) -> Value | None:
    """Max of integers that floating-point numbers cannot represent."""
    if node.dtype() not in _LARGE:
        return None
    if node.dtype() == UINT64:
        node.refuse("ONNX Runtime has no Where of uint64")
    compare = "Greater" if node.proto.op_type == "Max" else "Less"
    result, *rest = (node.input(index) for index in range(len(node.proto.input)))
    for each in rest:
        result = _chosen(b, compare, result, each)
    return result


@down("Clip", 12)
def _clip_integers(b: Builder, node: Node) -> Value | None:
    x = node.input()
    if node.dtype() in (TensorProto.FLOAT, TensorProto.FLOAT16):
        return None
    if node.dtype() == UINT64:
        node.refuse("ONNX Runtime has no Where of uint64")
    integers = node.dtype() not in FLOAT_TYPES
    for compare, bound in (("Greater", node.given(1)), ("Less", node.given(2))):
        if bound is not None:
            x = _chosen(b, compare, x, bound) if integers else b.op("Max" if compare == "Greater" else "Min", x, bound)
    return x


@down("Clip", 11)
def _clip_attributes(b: Builder, node: Node) -> Value | None:
    x, low, high = node.input(), node.given(1), node.given(2)
    numbers = [node.constant(index) for index in (1, 2)]
    computed = any(number is None and bound is not None for number, bound in zip(numbers, (low, high), strict=True))
    crossed = not computed and None not in (low, high) and not numbers[0].item() <= numbers[1].item()  # type: ignore[union-attr]
    if computed or crossed or node.dtype() != TensorProto.FLOAT:
        for op_type, bound in (("Max", low), ("Min", high)):
            if bound is not None:
                x = b.op(op_type, x, bound)
        return x
    # The defaults are the largest finite numbers, which would stop infinities.
    node.set(min=-np.inf if numbers[0] is None else numbers[0].item())
    node.set(max=np.inf if numbers[1] is None else numbers[1].item())
    node.give(x)
    return None


# ---------------------------------------------------------------- comparisons


@down("Equal", 19)
def _equal_strings(b: Builder, node: Node) -> None:
    if node.dtype() == TensorProto.STRING:
        node.refuse("no older op compares strings")


@down("Equal", 11)
def _equal(b: Builder, node: Node) -> Value | None:
    """Equal for floating-point numbers: neither less nor greater, and neither is NaN."""
    x, y = node.input(0), node.input(1)
    if node.dtype() not in FLOAT_TYPES:
        if node.dtype() == UINT64:
            return b.op("Not", b.op("Or", b.op("Less", x, y), b.op("Less", y, x)))
        return None
    unequal = b.op("Or", b.op("Less", x, y), b.op("Less", y, x))
    unknown = b.op("Or", b.op("IsNaN", x), b.op("IsNaN", y))
    return b.op("Not", b.op("Or", unequal, unknown))


@down("GreaterOrEqual LessOrEqual", 12)
def _or_equal(b: Builder, node: Node) -> Value:
    x, y = node.input(0), node.input(1)
    strict = b.op(node.proto.op_type.removesuffix("OrEqual"), x, y)
    return b.op("Or", strict, b.op("Equal", x, y))


@down("IsInf", 10)
def _is_infinite(b: Builder, node: Node) -> Value:
    x, signs = node.input(), []
    node.dtype()
    largest = b.like(float(np.finfo(np.float64 if x.dtype == DOUBLE else np.float32).max), x)
    if node.attribute("detect_positive"):
        signs.append(b.op("Greater", x, largest))
    if node.attribute("detect_negative"):
        signs.append(b.op("Less", x, b.op("Neg", largest)))
    if not signs:
        return b.op("And", b.op("Greater", x, x, dtype=BOOL), b.op("Less", x, x, dtype=BOOL), dtype=BOOL)
    return signs[0] if len(signs) == 1 else b.op("Or", *signs)


# ---------------------------------------------------------------- arithmetic


@down("Pow", 15)
def _pow_exponent(b: Builder, node: Node) -> None:
    x, exponent = node.input(0), node.input(1)
    if node.dtype(1) == TensorProto.BFLOAT16:
        node.give(x, b.cast(exponent, TensorProto.FLOAT))


@down("Pow", 12)
def _pow(b: Builder, node: Node) -> Value | None:
    """One floating-point type for both, as ONNX Runtime computes powers of integers too."""
    x, exponent, dtype = node.input(0), node.input(1), node.dtype()
    if dtype == node.dtype(1) and dtype in FLOAT_TYPES:
        return None
    constant = node.constant(1)
    if dtype in FLOAT_TYPES and constant is not None and (constant == constant.astype(np.float32)).all():
        return b.op("Pow", x, b.cast(exponent, dtype), dtype=dtype)
    small = None if constant is None or constant.size != 1 else constant.item()
    if dtype not in FLOAT_TYPES and small in (1, 2, 3, 4):
        result = x
        for _ in range(int(small) - 1):
            result = b.op("Mul", result, x)
        return result
    if dtype == INT64:
        node.refuse("no older op raises int64 to powers without rounding")
    return b.cast(b.op("Pow", b.cast(x, DOUBLE), b.cast(exponent, DOUBLE)), dtype)


@down("Mod", 10)
def _mod(b: Builder, node: Node) -> Value:
    """Division rounds towards zero, so that this remainder has the sign of ``x``; that of Mod has the sign of ``y``."""
    x, y, dtype = node.input(0), node.input(1), node.dtype()
    if dtype in FLOAT_TYPES:
        node.refuse("no older op has the exact remainder of floating-point numbers")
    if dtype == UINT64:
        node.refuse("no older op divides uint64")
    rest = b.op("Sub", x, b.op("Mul", b.op("Div", x, y), y))
    if node.attribute("fmod"):
        return rest
    zero = b.like(0, x)
    opposite = [
        b.op("And", b.op(one, rest, zero), b.op(other, y, zero))
        for one, other in (("Less", "Greater"), ("Greater", "Less"))
    ]
    wrong = b.op("Or", *opposite)
    return b.op("Add", rest, b.op("Mul", b.cast(wrong, dtype), y))


@down("Round", 11)
def _round(b: Builder, node: Node) -> Value:
    """To the nearest integer, to the even one where both are as near."""
    x = node.input()
    node.dtype()
    half = b.like(0.5, x)
    lower = b.op("Floor", x)
    part = b.op("Sub", x, lower)
    odd = b.op("Sub", lower, b.op("Mul", b.op("Floor", b.op("Mul", lower, half)), b.like(2, x)))
    tie = b.op("And", b.op("Not", b.op("Less", part, half)), b.op("Greater", odd, half))
    up = b.op("Or", b.op("Greater", part, half), tie)
    return b.op("Add", lower, b.cast(up, x.dtype))


# ---------------------------------------------------------------- bits

_BITS: dict[int, int] = {
    TensorProto.UINT8: 8,
    TensorProto.INT8: 8,
    TensorProto.UINT16: 16,
    TensorProto.INT16: 16,
    TensorProto.UINT32: 32,
    TensorProto.INT32: 32,
}


@down("BitShift", 11)
def _bit_shift(b: Builder, node: Node) -> Value:
    """Products with powers of two and quotients by them, in int64."""
    dtype = node.dtype()
    if dtype not in _BITS:
        node.refuse("no older op multiplies or divides uint64")
    powers = b.constant(2 ** np.arange(_BITS[dtype], dtype=np.int64))
    power = b.op("Gather", powers, b.cast(node.input(1), INT64), axis=0, dtype=INT64)
    op_type = "Mul" if node.attribute("direction") == "LEFT" else "Div"
    return b.cast(b.op(op_type, b.cast(node.input(), INT64), power, dtype=INT64), dtype)


@down("BitwiseNot", 18)
def _bitwise_not(b: Builder, node: Node) -> Value:
    dtype = node.dtype()
    if dtype == UINT64:
        return b.op("Sub", b.constant(2**64 - 1, dtype), node.input(), dtype=dtype)
    ones = b.constant(2 ** _BITS[dtype] - 1 if dtype in _BITS and _is_unsigned(dtype) else -1, dtype)
    return b.op("Sub", ones, node.input())


def _is_unsigned(dtype: int) -> bool:
    return dtype in (TensorProto.UINT8, TensorProto.UINT16, TensorProto.UINT32, UINT64)


@down("BitwiseAnd BitwiseOr BitwiseXor", 18)
def _bitwise(b: Builder, node: Node) -> Value:
    """Bit by bit, along a dimension of their own behind the others; the sign by itself."""
    dtype, logic = node.dtype(), node.proto.op_type.removeprefix("Bitwise")
    if dtype == UINT64:
        node.refuse("no older op divides uint64")
    mask = node.constant(1)
    if logic == "And" and mask is not None and mask.size == 1 and _is_low_bits(int(mask.item())):
        rest = b.op("Mod", b.cast(node.input(), INT64), b.constant(int(mask.item()) + 1, INT64), dtype=INT64)
        return b.cast(rest, dtype)
    signed = not _is_unsigned(dtype)
    count = _BITS.get(dtype, 64) - signed
    rank = max(node.rank(0), node.rank(1))
    powers = b.constant(2 ** np.arange(count, dtype=np.int64))
    two, zero, lowest = (b.constant(number, INT64) for number in (2, 0, -(2**count) if signed else 0))

    def parts(index: int) -> tuple[Value, Value | None]:
        """The bits (..., count), and where the number is negative."""
        x, negative = b.cast(node.input(index), INT64), None
        if signed:
            negative = b.op("Less", x, zero)
            x = b.op("Where", negative, b.op("Sub", x, lowest), x)
        x = b.unsqueeze(x, node.rank(index))
        bits = b.op("Greater", b.op("Mod", b.op("Div", x, powers), two), zero)
        return bits, negative

    (first, minus), (second, other_minus) = parts(0), parts(1)
    bits = b.op(logic, first, second)
    ones = b.cast(bits, INT64)
    weights = 2 ** (np.arange(count, dtype=np.int64) % 32)
    result: Value | None = None
    for start in range(0, count, 32):  # ONNX Runtime rounds sums beyond 2**53
        of_half = b.constant(weights * (np.arange(count) // 32 == start // 32))
        part = b.op("Mul", ones, of_half)
        part = b.reduce_sum(part, [rank])
        if result is None:
            result = part
        else:
            result = b.op("Add", result, b.op("Mul", part, b.constant(2**start, INT64), dtype=INT64), dtype=INT64)
    assert result is not None
    if minus is not None and other_minus is not None:
        sign = b.op(logic, minus, other_minus)
        result = b.op("Where", sign, b.op("Add", result, lowest), result)
    return b.cast(result, dtype)


def _is_low_bits(mask: int) -> bool:
    return 0 < mask < 2**62 and mask & (mask + 1) == 0
