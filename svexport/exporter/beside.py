"""A file in ONNX Runtime, beside torch: in a thread of its own where there are processors for both."""

from __future__ import annotations

import operator
import os
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from svexport.errors import EngineError, VerificationError
from svexport.exporter.borders import ANYWAY

if TYPE_CHECKING:
    from svexport.runtime.session import OnnxEngine

__all__ = ["AHEAD", "FileBeside"]

AHEAD = 3
"""Runs that torch may compute ahead of the comparison. With only one, the file would wait whenever a comparison has
torch compute a run again."""

TURN = 1e-4
"""Seconds that the thread which writes the file runs Python before torch's thread gets its turn, which it needs for
every function that it calls."""

T = TypeVar("T")
Written = TypeVar("Written")


class FileBeside(Generic[Written]):
    """Has a file written, loads it and runs it, one run after another.

    With ``apart``, and processors for it, in a thread of its own: ``start`` and the constructor return at once, and
    errors come with what is asked for. Where there are not enough for as many threads as torch has, each of the two has
    some of those, until the context of this object ends or :meth:`end` does. After that, and otherwise, what is started
    is done first, and the file loaded with the first run.

    If apart, the file runs the ``given`` tensors once it is loaded; :meth:`start` returns that run when it gets them.

    Attributes:
        path: of the file.
        waits: whether each run is over before ``start`` returns.
    """

    def __init__(
        self, path: Path, write: Callable[[], Written], apart: bool = True, given: Sequence[Tensor] = ()
    ) -> None:
        self.path = path
        self._usual = torch.get_num_threads()
        own = _threads(self._usual, _processors()) if apart else 0
        self._pool = ThreadPoolExecutor(1, "svexport-file") if own else None
        self._shares = bool(own) and self._usual + own > _processors()
        self._left = self._usual - own if self._shares else self._usual
        self._written = self._started(write if self._pool is None else partial(_in_short_turns, write))
        self._threads = own or self._usual
        self._engine = None if self._pool is None else self._started(self._loaded)
        self._first: tuple[Sequence[Tensor], Future[list[Tensor]]] | None = None
        if self._pool is not None and given:
            self._first = given, self.start(given)

    def __enter__(self) -> FileBeside[Written]:
        if self._shares:
            torch.set_num_threads(self._left)
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def end(self) -> None:
        """Has what is started from now on done first; torch has its usual threads again."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None
            if self._shares:
                torch.set_num_threads(self._usual)

    @property
    def waits(self) -> bool:  # noqa: D102 - among the attributes
        return self._pool is None

    @property
    def written(self) -> Written:
        """What writing it has returned; raises what that has raised."""
        return self._written.result()

    def _loaded(self) -> OnnxEngine:
        from svexport.runtime.session import OnnxEngine

        self._written.result()
        return OnnxEngine(self.path, device="cpu", threads=self._threads)

    @property
    def engine(self) -> OnnxEngine:
        """The file, loaded.

        Raises:
            VerificationError: if it cannot be.
        """
        if self._engine is None:
            self._engine = self._started(self._loaded)
        try:
            return self._engine.result()
        except EngineError as error:
            raise VerificationError(f"{error}. No file was written.\n  {ANYWAY}") from error

    def load(self) -> None:
        """Waits until the file is loaded; raises as ``engine`` does."""
        self.engine  # noqa: B018

    def start(self, inputs: Sequence[Tensor]) -> Future[list[Tensor]]:
        """What the file will make of inputs, which stay as they are until then."""
        if self._first is not None and all(map(operator.is_, inputs, self._first[0])):
            (_, run), self._first = self._first, None
            return run
        given = [t.detach().cpu() for t in inputs]
        return self._started(lambda: self.engine.run(given))

    def _started(self, work: Callable[[], T]) -> Future[T]:
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - who asks for the result gets it
            done.set_exception(error)
        return done


def _threads(torchs: int, processors: int) -> int:
    """For the file: as many as torch has, what torch leaves, or half of torch's, the first for which there is one; 0 of
    a single processor."""
    return min(torchs, max(processors - torchs, torchs // 2))


def _in_short_turns(work: Callable[[], T]) -> T:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(TURN)
    try:
        return work()
    finally:
        sys.setswitchinterval(usual)


def _processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
