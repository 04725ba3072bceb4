"""A TensorRT that runs on the CPU: the Python API with which svexport builds and runs engines; ONNX Runtime computes
its networks.

Classes have exactly the members, and methods take exactly the arguments, of the version's bindings (``api.json``, read
from those of 8.6.1, 10.1.0, 10.16.1 and 11.4.0); anything else is an error. ``faults`` make it fail on purpose.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache, partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from svexport.runtime import build, tensorrt
from svexport.tensorrt import plugins
from svexport.tensorrt.library import Library
from tests.tensorrt.reference.builder import Builder, OnnxParser, Registry
from tests.tensorrt.reference.objects import API, Subclassed, enumeration, made
from tests.tensorrt.reference.runtime import OnnxParserRefitter, Refitter, Runtime

__all__ = ["API", "VERSIONS", "Host", "Reference", "install"]

VERSIONS = tuple(API)


class Reference:
    """The module ``tensorrt`` of a version.

    Args:
        version: one of :data:`VERSIONS`.
        faults: what goes wrong: ``parse`` and ``deserialize`` with a message of the log, ``build``, ``context``
            and ``execute`` likewise, ``raise`` with an exception in the build; ``layers`` is what the inspector says;
            ``kernel`` changes the model that is built, as a wrong kernel does what an engine computes.

    Attributes:
        alive: engines and contexts that somebody holds.
        loaded: plugin libraries.
        built: the configurations of builds, in order.
        finished: how many of them came to an engine.
    """

    def __init__(self, version: str, **faults: Any) -> None:
        self.__version__ = f"{version}.9" if version != "8.6.1" else version
        self.__spec__ = ModuleSpec("tensorrt", None)  # torch._dynamo, first imported meanwhile, asks for it
        self.faults = faults
        self.alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self.loaded: list[str] = []
        self.built: list[Any] = []
        self.finished = 0
        self.during_build: Callable[[], None] = lambda: None
        self._api = API[version]
        self._registry = made(self, "IPluginRegistry", Registry)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._api:
            raise AttributeError(f"module 'tensorrt' {self.__version__} has no attribute {name!r}")
        return self._member(name)

    @cache  # noqa: B019 - lives as long as the test
    def _member(self, name: str) -> Any:
        facts = self._api[name]
        if isinstance(facts, list):
            return enumeration(name, facts)
        if name in FUNCTIONS:
            return partial(FUNCTIONS[name], self)
        if name in ("ILogger", "IProgressMonitor", "IProfiler", "IOutputAllocator"):
            levels = ("INTERNAL_ERROR", "ERROR", "WARNING", "INFO", "VERBOSE") if name == "ILogger" else ()
            return type(name, (Subclassed,), {"_trt": self, **{level: level for level in levels}})
        cls = CLASSES.get(name)
        if cls is None:
            return type(name, (), {})  # known, and not used here
        return lambda *args, **kwargs: made(self, name, cls, *args, **kwargs)


CLASSES: dict[str, type] = {
    "Builder": Builder,
    "OnnxParser": OnnxParser,
    "OnnxParserRefitter": OnnxParserRefitter,
    "Refitter": Refitter,
    "Runtime": Runtime,
}
FUNCTIONS: dict[str, Callable[..., Any]] = {"get_plugin_registry": lambda trt: trt._registry}


# ------------------------------------------------------------------------------------------------------- the device


class Host:
    """The CPU in the place of a GPU, for :class:`Reference`."""

    device = torch.device("cpu")
    name = "reference"

    def active(self) -> Any:
        return nullcontext()

    def lane(self) -> Any:
        @contextmanager
        def stream() -> Iterator[int]:
            yield 0

        return SimpleNamespace(stream=stream)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.empty(tuple(shape), dtype=dtype)

    def allocate(self, size: int) -> Tensor:
        return torch.empty(max(size, 1), dtype=torch.uint8)

    def keep_for_caller(self, tensors: Sequence[Tensor]) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def capture(self, run: Callable[[int], None]) -> Callable[[], None]:
        run(0)
        return lambda: run(0)


def install(monkeypatch: pytest.MonkeyPatch, folder: Path, version: str, **faults: Any) -> Reference:
    """Makes it the TensorRT of this process, on the CPU, with a plugin library in svexport's cache."""
    reference = Reference(version, **faults)
    library = folder / "libsvexport.so"
    library.touch()
    monkeypatch.setenv("SVEXPORT_CACHE", str(folder / "cache"))
    monkeypatch.setitem(sys.modules, "tensorrt", reference)  # type: ignore[arg-type]
    monkeypatch.setattr(plugins, "libraries", lambda: [Library(library, int(version.split(".")[0]))])
    for module in (build, tensorrt):
        monkeypatch.setattr(module, "place", lambda device: Host())
    return reference
