"""Logging through loguru, silent by default as a library should be; the command line switches it on."""

from __future__ import annotations

from loguru import logger

__all__ = ["logger"]

logger.disable("svexport")
