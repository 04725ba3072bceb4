"""Memory while a model is exported: postpones garbage collection, and reuses large blocks."""

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
"""Largest block that is kept, in bytes."""

USUAL = 2**25
"""Largest block that glibc keeps by itself, in bytes, once such a block has been freed."""


@contextmanager
def without_collections() -> Iterator[None]:
    """Postpones garbage collection: imports and traces make very many objects, most of which stay in use."""
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
    """Restricts garbage collection to new objects. Otherwise each collection scans everything that traces and imports
    have left, most of which stays in use; one takes as long as a forward.

    Nothing happens if the process has frozen objects of its own, as ours could not be unfrozen separately.
    """
    if not gc.isenabled() or gc.get_freeze_count():
        yield
        return
    gc.collect(0)  # garbage of a trace that has not been collected yet
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


_held = 0
_lock = threading.Lock()


@contextmanager
def kept_memory() -> Iterator[None]:
    """Makes glibc keep large freed blocks, and return all of them at the end.

    Otherwise each large tensor maps new pages, which takes a fifth of the time of a verification. Nothing happens with
    another C library, or if the environment sets the limits. Afterwards the limits are the largest that glibc reaches
    by itself: it does not tell what they were, and no longer adapts them once they were set.
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
    """Whether the environment of the process sets malloc's limits."""
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    return "glibc.malloc." in tunables or bool(os.environ.keys() & {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"})


def _keep(libc: ctypes.CDLL, size: int) -> None:
    """Keeps blocks up to ``size``, and twice as much at the end of the heap, as glibc itself does up to ``USUAL``."""
    libc.mallopt(_MMAP_THRESHOLD, size)
    libc.mallopt(_TRIM_THRESHOLD, min(2 * size, 2**31 - 1))
