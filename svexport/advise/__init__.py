"""Finds patterns in the sources of a training repo that cost at export or run time, without importing or running it."""

from __future__ import annotations

from svexport.advise.advise import advise
from svexport.advise.report import AdviseReport, Finding
from svexport.advise.rules import RULES

__all__ = ["RULES", "AdviseReport", "Finding", "advise"]
