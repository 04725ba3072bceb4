"""What all commands have in common: exit codes, errors, JSON, logging."""

from __future__ import annotations

import math
import os
import subprocess
import sys

import pytest

from svexport import cli
from svexport._version import __version__
from svexport.cli import COMMANDS, Outcome, lower

pytestmark = pytest.mark.core


def answer(monkeypatch, outcome):
    """Makes `lower` do that: return an outcome, or raise."""

    def act(options):
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    monkeypatch.setattr(lower, "run", act)
    return ["lower", "in.onnx", "-o", "out.onnx"]


def test_help_and_usage_errors_do_not_import_torch():
    code = (
        "import sys, svexport.cli\n"
        "for argv in (['--help'], ['export', '--help'], ['export', 'nonsense'], ['--version'], []):\n"
        "    try: svexport.cli.main(argv)\n"
        "    except SystemExit as e: print(e.code)\n"
        "print({'torch', 'onnx', 'numpy', 'rich'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.endswith("set()\n")
    assert all(command in result.stdout for command in COMMANDS)


def test_module_runs_as_program():
    result = subprocess.run([sys.executable, "-m", "svexport", "--version"], capture_output=True, text=True, check=True)
    assert result.stdout == f"svexport {__version__}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(run, command):
    result = run(command, "--help")
    assert result.code == 0
    assert "--json" in result.out
    assert "--verbose" in result.out


@pytest.mark.parametrize(
    "argv", [[], ["nonsense"], ["lower"], ["export"], ["lower", "a.onnx", "-o", "b", "--nonsense"]]
)
def test_usage_errors_exit_with_2(run, argv):
    result = run(*argv)
    assert result.code == 2
    assert result.out == ""
    assert "usage: svexport" in result.err


@pytest.mark.parametrize("place", [0, 1, 4])
def test_json_stands_on_either_side_of_the_command(run, monkeypatch, place):
    argv = answer(monkeypatch, Outcome(True, {"value": 1}, ["for people"]))
    result = run(*argv[:place], "--json", *argv[place:])
    assert result.json == {"ok": True, "value": 1}
    assert result.err == ""


def test_json_has_null_for_what_is_not_finite(run, monkeypatch):
    argv = answer(monkeypatch, Outcome(False, {"a": [math.inf, 1.5], "b": {"c": math.nan}, "d": (-math.inf,)}))
    result = run(*argv, "--json")
    assert result.code == 1
    assert result.json == {"ok": False, "a": [None, 1.5], "b": {"c": None}, "d": [None]}


def test_people_see_text_as_it_is(run, monkeypatch):
    line = "see [bold]here[/bold]: " + "x" * 300
    assert run(*answer(monkeypatch, Outcome(True, {}, [line]))).out == line + "\n"


def test_own_errors_are_one_message(run, monkeypatch):
    result = run(*answer(monkeypatch, cli.SvexportError("expected this, got that")))
    assert (result.code, result.out, result.err) == (1, "", "svexport lower: error: expected this, got that\n")


def test_errors_as_json(run, monkeypatch):
    result = run(*answer(monkeypatch, cli.SvexportError("expected this")), "--json")
    assert result.code == 1
    assert result.json == {"ok": False, "error": {"type": "SvexportError", "message": "expected this"}}
    assert result.err == "svexport lower: error: expected this\n"


def test_unexpected_errors_name_their_type(run, monkeypatch):
    result = run(*answer(monkeypatch, KeyError("boxes")))
    assert result.code == 1
    assert result.err == "svexport lower: error: KeyError: 'boxes' (--verbose shows the traceback)\n"


def test_missing_package_points_to_doctor(run, monkeypatch):
    result = run(*answer(monkeypatch, ModuleNotFoundError("No module named 'torch'", name="torch")))
    assert result.code == 1
    assert result.err == "svexport lower: error: No module named 'torch'; `svexport doctor` says what to install\n"


def test_verbose_shows_the_traceback_and_the_log(run, monkeypatch):
    def act(options):
        from svexport.logging import logger

        logger.debug("a step")
        raise cli.SvexportError("it failed")

    answer(monkeypatch, None)
    monkeypatch.setattr(lower, "run", act)
    quiet, verbose = (run("lower", "a", "-o", "b.onnx", *words) for words in ([], ["--verbose"]))
    assert quiet.err == "svexport lower: error: it failed\n"
    assert "DEBUG" in verbose.err
    assert "a step" in verbose.err
    assert "Traceback" in verbose.err
    assert verbose.err.endswith("svexport lower: error: it failed\n")
    assert verbose.out == ""


def test_log_is_silent_again_afterwards(run, monkeypatch):
    from svexport.logging import logger

    run(*answer(monkeypatch, Outcome(True, {})), "--verbose")
    lines: list[str] = []
    handler = logger.add(lines.append)
    try:
        namespace = {"__name__": "svexport.test", "logger": logger}
        exec("logger.info('still on')", namespace)  # noqa: S102 - loguru goes by the caller's module
    finally:
        logger.remove(handler)
    assert lines == []


@pytest.mark.parametrize(
    "code",
    [
        "sys.modules['svexport.cli.lower'].run = interrupt",
        "sys.modules['svexport.cli'].import_module = interrupt",
        "sys.meta_path.insert(0, Interrupted('svexport.cli.'))",
        "sys.meta_path.insert(0, Interrupted('loguru'))",
        "sys.modules['svexport.cli.lower'].run = swallow",
    ],
)
def test_interrupt(code):
    """By Ctrl-C at any time: while modules are imported, and where an extension makes another error of it."""
    setup = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # not ignored, as of what a shell runs behind
if "meta_path" not in CODE:
    import svexport.cli.lower

def interrupt(*_):
    os.kill(os.getpid(), signal.SIGINT)

def swallow(_):
    try:
        interrupt()
    except KeyboardInterrupt:
        raise RecursionError("maximum recursion depth exceeded") from None

class Interrupted:
    def __init__(self, name):
        self.name = name
    def find_spec(self, name, *_):
        if name.startswith(self.name):
            interrupt()

exec(CODE)
sys.argv = ["svexport", "lower", "in.onnx", "-o", "out.onnx"]
from svexport.__main__ import main

sys.exit(main())
"""
    program = f"CODE = {code!r}\n{setup}"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout, result.stderr) == (130, "", "interrupted\n")


@pytest.mark.parametrize("words", [[], ["--json"]])
def test_output_that_nobody_takes(words):
    code = (
        "import sys\nfrom svexport import cli\nfrom svexport.cli import lower\n"
        "lower.run = lambda options: cli.Outcome(True, {'a': 1}, ['a'])\n"
        f"sys.exit(cli.main(['lower', 'in.onnx', '-o', 'out.onnx', *{words}]))"
    )
    read, write = os.pipe()
    os.close(read)
    closed = subprocess.run([sys.executable, "-c", code], stdout=write, stderr=subprocess.PIPE, text=True, check=False)
    os.close(write)
    assert (closed.returncode, closed.stderr) == (1, "")
    if os.path.exists("/dev/full"):
        with open("/dev/full", "w") as full:
            process = subprocess.run(
                [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, check=False
            )
        assert process.returncode == 1
        assert process.stderr == "svexport lower: error: cannot write to stdout: No space left on device\n"
