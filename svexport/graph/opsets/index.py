"""Ops that gather and scatter: Gather, GatherElements, GatherND, Scatter and their kin, OneHot, Compress."""

from svexport.graph.opsets.dtypes import moves

moves("Compress Gather GatherElements GatherND NonZero OneHot ReverseSequence Scatter ScatterElements ScatterND Unique")
