"""Arithmetic, comparisons, logic: ops that go element by element."""

from __future__ import annotations

from svexport.graph.opsets.dtypes import moves
from svexport.graph.opsets.rules import Node, down, unchanged
from svexport.symbolic._builder import Builder, Value

moves("Clip Equal Greater GreaterOrEqual IsInf IsNaN Less LessOrEqual Max Min Relu Sign Where")

unchanged("Abs Ceil Div Erf Exp Floor Log Mul Neg Reciprocal Sigmoid Sqrt Sub Tanh Add", 13)
unchanged("Add Div Mul Sub", 14)
unchanged("Acos Acosh Asin Asinh Atan Atanh Cos Cosh Sin Sinh Tan Round Softplus Softsign", 22)


@down("BitwiseXor", 18)
def _bitwise_xor(b: Builder, node: Node) -> Value:
    node.refuse("no op below has bits of integers")
