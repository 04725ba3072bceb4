"""Memory during an export: defers garbage collection, and reuses large blocks."""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import threading
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["kept_memory", "without_collections"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # glibc's malloc.h

KEPT = 2**28
"""Bytes of the largest blocks that are kept."""

USUAL = 2**25
"""Bytes of those that glibc keeps by itself, once it has seen such a block freed."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Defers garbage collection: imports and traces create many objects, most of which stay in use."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def old_objects_left_alone() -> Iterator[None]:
    """Collects garbage among new objects alone: a collection looks at all that traces and imports have left, most of
    which stays in use, again and again, and takes as long as a forward.

    Nothing happens where the process has frozen objects of its own, which nobody else may thaw.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.collect(0)  # what a trace has left behind, of which no collection has been yet
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_held = 0
_lock = threading.Lock()


@contextmanager
def kept_memory() -> Iterator[None]:
    """Has glibc keep large blocks that are freed, and give all back at the end.

    Otherwise each large tensor is new memory, page by page, which takes a fifth of the time of a verification. Nothing
    happens with another C library, or where the environment says what is kept. Afterwards the limits are the largest
    that glibc comes to by itself: what they were it does not tell, nor does it change them again once they were set.
    """
    global _held
    if platform.libc_ver()[0] != "glibc" or _is_set_already():
        yield
        return
    libc = ctypes.CDLL(None)
    with _lock:
        _held += 1
        _keep(libc, KEPT)
    try:
        yield
    finally:
        with _lock:
            _held -= 1
            if not _held:
                _keep(libc, USUAL)
                libc.malloc_trim(0)


def _is_set_already() -> bool:
    """Whether who started the process has set limits of its own."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or bool(os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})


def _keep(libc: ctypes.CDLL, size: int) -> None:
    """As glibc does by itself up to ``USUAL``: keeps blocks of that size, and twice as much at the end of the heap."""
    libc.mallopt(_MMAP_THRESHOLD, size)
    libc.mallopt(_TRIM_THRESHOLD, min(2 * size, 2**31 - 1))
