"""Fails tests whose model falls back to TorchScript, because such a file does not test the rules for torch.export.

A test that gets a file traced by TorchScript fails, unless fallbacks.json names it. A test that fallbacks.json names
fails if it gets none: otherwise torch.export could lose the model again unnoticed. Scripted models, models meant for
TorchScript (``torch_export_first(False)``) and tests that do not run by default are not counted.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch

from svexport.exporter import trace
from svexport.exporter.opsets import FIRST_DYNAMO_OPSET, LAST_TORCHSCRIPT_OPSET
from tests.harness import extent

FALLBACKS = Path(__file__).with_name("fallbacks.json")
"""The torch that it was written with and, by test, why torch.export did not trace."""

FOLDERS = ("tests/exporter/", "tests/ops/", "tests/tracing/")
"""Whose tests are held to that."""

PROPERTY = "fallback"
KNOWN = pytest.StashKey[dict[str, str] | None]()
_SCRIPTED = "it has scripted modules"
_WRONG = "the file by torch.export is not right"

_seen: list[str] = []
"""Of the exports since it was cleared, to opsets that both tracers write: why TorchScript traced, or nothing."""


class Keep:
    """Writes which tests of a run get a file of TorchScript's; of the others it keeps what is known."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}
        self.run: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.run.add(report.nodeid)
        self.found.update(reason for name, reason in report.user_properties if name == PROPERTY)  # type: ignore[misc]

    def pytest_sessionfinish(self) -> None:
        left = {name: reason for name, reason in read()["tests"].items() if name not in self.run}
        kept = {"torch": _torch(), "tests": dict(sorted({**left, **self.found}.items()))}
        FALLBACKS.write_text(json.dumps(kept, indent=0) + "\n")


def add_options(parser: pytest.Parser) -> None:
    parser.getgroup("extent").addoption(
        "--keep-fallbacks", action="store_true", help=f"write the tests of this run that need one to {FALLBACKS.name}"
    )


def configure(config: pytest.Config) -> None:
    keeps = config.getoption("keep_fallbacks")
    known = read()
    # The list is of the tests that run by default.
    judges = not keeps and not extent.is_long(config) and known["torch"] == _torch()
    config.stash[KNOWN] = known["tests"] if judges else None
    if keeps and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Keep())
    config.pluginmanager.register(sys.modules[__name__])
    if LAST_TORCHSCRIPT_OPSET < FIRST_DYNAMO_OPSET:
        exporting = importlib.import_module("svexport.exporter.export")
        exporting.ExportReport = _watched(exporting.ExportReport)


def read() -> dict[str, Any]:
    return dict(json.loads(FALLBACKS.read_text()))


def _torch() -> str:
    return ".".join(torch.__version__.split(".")[:2])


def _watched(report: Any) -> Any:
    """Reports as they are, of which :data:`_seen` has who traced."""

    def made(**fields: Any) -> Any:
        again = bool(trace._converted.get()) and not trace._first
        if fields["opset"] <= LAST_TORCHSCRIPT_OPSET and (trace._first or again):
            refused = [note for note in fields["notes"] if note.startswith("traced by TorchScript")]
            reason = _WRONG if again else "".join(refused).partition(": ")[2]
            if reason != _SCRIPTED:
                _seen.append(reason)
        return report(**fields)

    return made


def _judge(name: str, config: pytest.Config) -> str:
    """Why TorchScript traced one of the models that were seen; fails where that is not known of a test."""
    reason = next(filter(None, _seen), "")
    known = config.stash[KNOWN]
    if known is not None and reason and name not in known:
        pytest.fail(f"torch.export did not trace a model that {FALLBACKS.name} does not name: {reason}", pytrace=False)
    if known is not None and _seen and not reason and name in known:
        pytest.fail(f"torch.export traced all models: take {name} out of {FALLBACKS.name}", pytrace=False)
    return reason


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    _seen.clear()
    result = yield
    if item.nodeid.startswith(FOLDERS) and (reason := _judge(item.nodeid, item.config)):
        item.user_properties.append((PROPERTY, (item.nodeid, reason)))
    return result
