"""Reductions, ArgMax, CumSum, TopK."""

from svexport.graph.opsets.dtypes import moves

moves("ArgMax ArgMin ReduceMax ReduceMin TopK")
