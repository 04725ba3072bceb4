"""Logging through loguru, silent by default as a library should be; the command line switches it on."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from loguru import logger

__all__ = ["logger", "quiet"]

logger.disable("svexport")


@contextmanager
def quiet(*names: str) -> Iterator[None]:
    """Nothing from the loggers of these names: what libraries remark on, and errors that they raise as well."""
    levels = [(log, log.level) for log in map(logging.getLogger, names)]
    for log, _ in levels:
        log.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for log, level in levels:
            log.setLevel(level)
