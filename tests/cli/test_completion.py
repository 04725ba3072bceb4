"""What the shells complete; bash itself is asked if it is installed."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from svexport.cli import COMMANDS, completion

pytestmark = pytest.mark.core


def completed(script: str, *words: str) -> set[str]:
    """What bash offers for the last of the words."""
    line = " ".join(f"'{word}'" for word in words)
    shown = 'printf "%s\\n" "${COMPREPLY[@]}"'
    program = f"{script}\nCOMP_WORDS=({line}); COMP_CWORD={len(words) - 1}; _svexport; {shown}"
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    return set(done.stdout.split())


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
def test_bash(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.onnx").touch()
    script = run("completion", "bash").out
    assert set(COMMANDS) <= completed(script, "svexport", "")
    assert completed(script, "svexport", "comp") == {"compare", "completion"}
    assert completed(script, "svexport", "check", "--re") == {"--report"}
    assert completed(script, "svexport", "--json", "check", "--t") == {"--target"}
    assert completed(script, "svexport", "export", "--dtype", "") == {"float16", "bfloat16", "float32", "float64"}
    assert "model.onnx" in completed(script, "svexport", "lower", "mo")
    assert completed(script, "svexport", "plugins", "bu") == {"build"}  # codespell:ignore bu
    assert completed(script, "svexport", "completion", "f") == {"fish"}


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_every_option_is_in_every_script(run, shell):
    script = run("completion", shell).out
    for name, _, actions in completion._commands():
        assert name in script
        for flag in (flag for action in actions for flag in action.option_strings):
            spelled = flag if shell != "fish" else f"-{'l' if flag.startswith('--') else 's'} {flag.lstrip('-')}"
            assert spelled in script


@pytest.mark.parametrize("shell", completion.SHELLS)
def test_scripts_are_of_their_shell(run, shell):
    program = shutil.which(shell)
    if program is None:
        pytest.skip(f"no {shell}")
    subprocess.run([program, "-n"], input=run("completion", shell).out, text=True, check=True)


def test_json_has_the_script(run):
    result = run("completion", "bash", "--json")
    assert result.json["shell"] == "bash"
    assert "_svexport()" in result.json["script"]
