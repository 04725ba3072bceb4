"""The contents of an installed svexport."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.core

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def installed():
    """Paths of everything a wheel holds."""
    from setuptools import Distribution  # noqa: F401 - provides distutils
    from distutils.core import run_setup  # isort: skip

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(ROOT)
        patch.delenv("SVEXPORT_BUILD_CUDA", raising=False)
        build = run_setup("setup.py", stop_after="config").get_command_obj("build_py")
        build.ensure_finalized()
        return {Path(output).relative_to(build.build_lib) for output in build.get_outputs(include_bytecode=False)}


def test_every_module_is_installed(installed):
    modules = {path.relative_to(ROOT) for path in (ROOT / "svexport").rglob("*.py")}
    assert {path for path in installed if path.suffix == ".py" and "examples" not in path.parts} == modules
    assert Path("svexport", "py.typed") in installed


def test_examples_are_installed_with_their_data(installed):
    examples = [path for path in (ROOT / "examples").rglob("*") if path.suffix in (".py", ".json")]
    assert len(examples) >= 3
    assert {Path("svexport", path.relative_to(ROOT)) for path in examples} <= installed


SOURCES = {path.relative_to(ROOT) for path in (ROOT / "svexport" / "csrc").rglob("*") if path.is_file()}


def test_sources_of_the_kernels_are_installed(installed):
    """They are compiled where they run: headers and the list of architectures as well."""
    assert {".cu", ".cuh", ".cpp", ".h", ".txt"} <= {path.suffix for path in SOURCES}
    assert installed >= SOURCES


def test_sources_of_the_kernels_are_in_the_source_distribution(monkeypatch, tmp_path):
    from distutils.core import run_setup  # isort: skip

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SVEXPORT_BUILD_CUDA", raising=False)
    distribution = run_setup("setup.py", stop_after="config")
    distribution.get_command_obj("egg_info").egg_base = str(tmp_path)
    command = distribution.get_command_obj("sdist")
    command.ensure_finalized()
    command.run_command("egg_info")
    command.filelist = distribution.get_command_obj("egg_info").filelist
    assert {str(path) for path in SOURCES} | {"setup.py", "pyproject.toml"} <= set(command.filelist.files)


@pytest.mark.parametrize("given", [None, "8.6;9.0"])
def test_what_is_compiled_ahead_of_time(monkeypatch, tmp_path, given):
    """The same sources and flags as on first use, for the architectures that were asked for or else all."""
    from distutils.core import run_setup  # isort: skip

    from torch.utils import cpp_extension

    from svexport.ops import _cuda

    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("SVEXPORT_BUILD_CUDA", "1")
    monkeypatch.setenv("TORCH_CUDA_ARCH_LIST", given or "")
    monkeypatch.setattr(cpp_extension, "CUDA_HOME", str(tmp_path))
    (extension,) = run_setup("setup.py", stop_after="init").ext_modules
    assert extension.name == "svexport._C"
    assert {ROOT / source for source in extension.sources} == set(_cuda.sources())
    assert {Path(source).suffix for source in extension.sources} == {".cu", ".cpp"}
    assert str(_cuda.CSRC / "cuda") in extension.include_dirs
    for compiler in ("cxx", "nvcc"):
        assert set(_cuda.FLAGS[compiler]) <= set(extension.extra_compile_args[compiler])
    assert os.environ["TORCH_CUDA_ARCH_LIST"] == ("8.6 9.0a" if given else _cuda.architectures())


def test_nothing_is_compiled_unasked(monkeypatch):
    from distutils.core import run_setup  # isort: skip

    monkeypatch.chdir(ROOT)
    monkeypatch.delenv("SVEXPORT_BUILD_CUDA", raising=False)
    assert not run_setup("setup.py", stop_after="init").ext_modules


def test_everything_public_is_there_after_one_import():
    code = "import svexport; [getattr(svexport, name) for name in svexport.__all__]; svexport.tensorrt.register_plugins"
    subprocess.run([sys.executable, "-c", code], check=True)
