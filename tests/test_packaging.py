"""What an installed svexport consists of."""

from __future__ import annotations

from pathlib import Path

import pytest

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
