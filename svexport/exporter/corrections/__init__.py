"""Conversions of the TorchScript exporter that say something else than torch, and ours in their place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from svexport.exporter.corrections.elementwise import ELEMENTWISE
from svexport.exporter.corrections.layers import LAYERS
from svexport.exporter.corrections.order import ORDER
from svexport.exporter.corrections.shapes import SHAPES
from svexport.exporter.corrections.shared import SHARED

__all__ = ["CORRECTIONS"]

CORRECTIONS: dict[str, Callable[..., Any]] = {**SHARED, **ELEMENTWISE, **LAYERS, **ORDER, **SHAPES}
"""Of an aten function: its conversion, which is given the exporter's own."""
