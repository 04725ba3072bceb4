"""A file in ONNX Runtime, beside torch: in a thread of its own where torch leaves a processor free."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor

from svexport.errors import EngineError, VerificationError
from svexport.exporter.borders import ANYWAY

if TYPE_CHECKING:
    from svexport.runtime.session import OnnxEngine

__all__ = ["FileBeside"]

T = TypeVar("T")


class FileBeside:
    """Loads a file and runs it, one run after another.

    With as many threads as torch has. Where there are processors for both, ``start`` and the constructor return at
    once, torch may compute meanwhile, and errors come with what is asked for; else each does its work first.

    Attributes:
        waits: whether each run is over before ``start`` returns.
    """

    def __init__(self, path: Path) -> None:
        from svexport.runtime.session import OnnxEngine

        threads = torch.get_num_threads()
        self._pool = ThreadPoolExecutor(1, "svexport-file") if _processors() >= 2 * threads else None
        self._engine = self._started(partial(OnnxEngine, path, device="cpu", threads=threads))

    @property
    def waits(self) -> bool:  # noqa: D102 - among the attributes
        return self._pool is None

    @property
    def engine(self) -> OnnxEngine:
        """The file, loaded.

        Raises:
            VerificationError: if it cannot be.
        """
        try:
            return self._engine.result()
        except EngineError as error:
            raise VerificationError(f"{error}. No file was written.\n  {ANYWAY}") from error

    def load(self) -> None:
        """Waits until the file is loaded; raises as ``engine`` does."""
        self.engine  # noqa: B018

    def start(self, inputs: Sequence[Tensor]) -> Future[list[Tensor]]:
        """What the file will make of inputs, which stay as they are until then."""
        given = [t.detach().cpu() for t in inputs]
        return self._started(lambda: self.engine.run(given))

    def close(self) -> None:
        """Ends the thread; runs after this are in the caller's."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)
            self._pool = None

    def _started(self, work: Callable[[], T]) -> Future[T]:
        if self._pool is not None:
            return self._pool.submit(work)
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:  # noqa: BLE001 - who asks for the result gets it
            done.set_exception(error)
        return done


def _processors() -> int:
    """Those that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
