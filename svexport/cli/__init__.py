"""The command line: ``svexport demo | export | check | build | compare | bench | debug | lower | kernels | …``.

Each command is a file with ``add_arguments(parser)`` and ``run(options) -> Outcome``. It imports torch and the like
inside ``run``, so that ``--help`` and usage errors answer at once and ``doctor`` runs where nothing is installed.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from svexport._version import __version__
from svexport.errors import SvexportError, VerificationError

__all__ = ["Outcome", "main"]

COMMANDS = (
    "demo",
    "export",
    "check",
    "build",
    "compare",
    "bench",
    "triton",
    "view",
    "debug",
    "lower",
    "convert",
    "quantize",
    "plugins",
    "kernels",
    "advise",
    "doctor",
    "completion",
)


@dataclass(frozen=True)
class Outcome:
    """The result of a command.

    Attributes:
        ok: whether it succeeded: exit code 0, else 1.
        data: the facts that ``--json`` prints.
        shown: the same facts for people, as rich renderables.
    """

    ok: bool
    data: Mapping[str, Any]
    shown: Sequence[Any] = field(default_factory=list)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit code: 0 success, 1 failure, 2 wrong usage.

    Raises:
        KeyboardInterrupt: on Ctrl-C, also if an extension interrupted during its import raised another error instead.
    """
    if not (sys.argv[1:] if argv is None else argv):
        parser().print_help(sys.stderr)
        return 2
    options = parser().parse_args(argv, argparse.Namespace(json=False, verbose=False))
    stdout = sys.stdout
    with _logging(options.verbose), _stdout_to_stderr() if options.json else nullcontext(), _interrupts() as seen:
        try:
            outcome = options.run(options)
        except Exception as error:
            if seen:
                raise KeyboardInterrupt from error
            outcome = _failed(error, options)
    try:
        if options.json:
            print(json.dumps(_plain({"ok": outcome.ok, **outcome.data}), indent=2, allow_nan=False), file=stdout)
        else:
            _show(outcome)
        stdout.flush()
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # otherwise flushing the rest at exit would fail again
        if not isinstance(error, BrokenPipeError):  # a closed pipe, as with `svexport ... | head`, is no error
            print(f"svexport {options.command}: error: cannot write to stdout: {error.strerror}", file=sys.stderr)
        return 1
    return 0 if outcome.ok else 1


def parser() -> argparse.ArgumentParser:
    """The parser of the whole command line; the help of a command is its file's docstring."""
    # Flags allowed on both sides of the command. They have no defaults, or those on its right would reset its left.
    common = argparse.ArgumentParser(add_help=False)
    for flag, meaning in (
        ("--json", "print one JSON object on stdout, nothing else"),
        ("--verbose", "log on stderr what happens, and tracebacks of errors"),
    ):
        common.add_argument(flag, action="store_true", default=argparse.SUPPRESS, help=meaning)
    whole = argparse.ArgumentParser(
        "svexport", description="PyTorch to TensorRT through ONNX, exact and proven.", parents=[common]
    )
    whole.add_argument("--version", action="version", version=f"svexport {__version__}")
    commands = whole.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name in COMMANDS:
        module = import_module(f"svexport.cli.{name}")
        summary, _, more = (module.__doc__ or "").partition("\n\n")
        command = commands.add_parser(
            name,
            help=summary[0].lower() + summary[1:].rstrip("."),
            description=summary,
            epilog=more,
            parents=[common],
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return whole


def _show(outcome: Outcome) -> None:
    try:
        from rich.console import Console
    except ModuleNotFoundError:  # only `doctor` gets here without rich, and then shows plain lines
        print(*outcome.shown, sep="\n")
        return
    console = Console(highlight=False, markup=False)
    if not console.is_terminal:  # a pipe does not limit the width
        console.width = max(console.width, 160)
    for renderable in outcome.shown:
        console.print(renderable, soft_wrap=isinstance(renderable, str))


@contextmanager
def _interrupts() -> Iterator[list[int]]:
    """Records the signals of Ctrl-C, because an import may swallow the exception: torch goes on without numpy."""
    seen: list[int] = []

    def note(number: int, frame: Any) -> None:
        seen.append(number)
        signal.default_int_handler(number, frame)

    usual = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if not (usual and threading.current_thread() is threading.main_thread()):
        yield seen
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield seen
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """Redirects stdout to stderr, so that output of a model's code or of C++ libraries does not get into the JSON."""
    sys.stdout.flush()
    saved = os.dup(1)
    os.dup2(2, 1)
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


@contextmanager
def _logging(verbose: bool) -> Iterator[None]:
    try:
        from svexport.logging import logger
    except ModuleNotFoundError:  # `doctor` reports this
        yield
        return
    logger.configure(
        handlers=[
            {
                "sink": lambda message: print(message, end="", file=sys.stderr),
                "level": "DEBUG" if verbose else "WARNING",
                "format": "{level: <8}{message}",
            }
        ]
    )
    logger.enable("svexport")
    try:
        yield
    finally:
        logger.disable("svexport")


def _failed(error: Exception, options: argparse.Namespace) -> Outcome:
    if options.verbose:
        traceback.print_exception(error)
    message = str(error)
    if isinstance(error, ModuleNotFoundError):
        message += "; `svexport doctor` says what to install"
    elif not isinstance(error, (SvexportError, OSError)):
        message = f"{type(error).__name__}: {error} (--verbose shows the traceback)"
    print(f"svexport {options.command}: error: {message}", file=sys.stderr)
    data: dict[str, Any] = {"type": type(error).__name__, "message": message}
    if isinstance(error, VerificationError):
        data["parity"] = [p.to_dict() for p in error.parity]
    return Outcome(False, {"error": data})


def _plain(value: Any) -> Any:
    """The value with None for infinities and NaN, which JSON cannot hold."""
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
