"""Show what is installed and usable here, what it enables, and what to install next.

Exit code 0 if the core works: torch, onnx, onnxscript and ONNX Runtime, shown by exporting and running a small model.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from svexport._version import __version__
from svexport.cli import Outcome
from svexport.text import table

CORE = {
    "torch": "everything",
    "onnx": "everything",
    "onnxscript": "export by torch.export",
    "onnxruntime": "verify, compare",
}
SMALL = ("numpy", "opt_einsum", "loguru", "rich")
"""Packages that are also required, but get a row only if they fail."""

APART = ("onnxscript", "tensorrt", "matplotlib")
"""Packages that nothing else here imports; a second process imports them at the same time."""

_IMPORT = """
import gc, importlib, json, sys, warnings
gc.disable()
warnings.simplefilter("ignore")
names, sys.path[:] = json.loads(sys.argv[1])
found, out = {}, sys.stdout
sys.stdout = sys.stderr
for name in names:
    try:
        found[name] = str(getattr(importlib.import_module(name), "__version__", "unknown version"))
    except Exception:
        pass  # who asks imports it, and tells why it fails
print(json.dumps(found), file=out)
"""


@dataclass(frozen=True)
class Check:
    """One row: something that may be installed.

    Attributes:
        name: its name.
        state: ``"ok"``, ``"missing"`` (not found) or ``"broken"`` (found, but it does not work).
        detail: version and place, or what went wrong.
        enables: the parts of svexport that need it.
        install: how to install it if it is not ok.
        required: whether nothing in svexport works without it.
    """

    name: str
    state: str
    detail: str
    enables: str
    install: str = ""
    required: bool = False


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--thorough", action="store_true", help="also export by torch.export, which takes some seconds more"
    )


def run(options: argparse.Namespace) -> Outcome:
    apart = _Apart(APART)
    python = Check("Python", "ok", f"{platform.python_version()}, {sys.executable}", "everything", required=True)
    core = {name: _package(name, enables, name, required=True) for name, enables in CORE.items() if name not in APART}
    small = [_package(name, "everything", name, required=True) for name in SMALL]
    exporter = _exporter("TorchScript exporter", 11, "models that torch.export refuses")  # half the other's time
    gpu = _gpu()
    versions = apart.versions()
    for name in CORE.keys() - core.keys():
        core[name] = _package(name, CORE[name], name, required=True, versions=versions)
    checks = [
        python,
        *(core[name] for name in CORE),
        *(check for check in small if check.state != "ok"),
        exporter,
        *([_exporter("dynamo exporter", 18, "all other models")] if options.thorough else []),
        gpu,
        _nvcc(),
        _compiler(),
        _ninja(),
        _package("tensorrt", "TensorRT plugins in Python", _tensorrt_wheel(), versions=versions),
        _headers(),
        _package("torch_tensorrt", "torch_tensorrt.compile with svexport's ops", "torch-tensorrt"),
        _plugin_library(),
        _package("matplotlib", "pictures in reports", "matplotlib", versions=versions),
    ]
    ok = all(check.state == "ok" for check in checks if check.required)
    return Outcome(ok, {"version": __version__, "checks": [asdict(c) for c in checks]}, _shown(checks, ok))


class _Apart:
    """A second process of this Python that imports packages while this one does other work."""

    def __init__(self, names: Sequence[str]) -> None:
        wanted = [name for name in names if name not in sys.modules and _is_found(name)]
        command = [sys.executable, "-c", _IMPORT, json.dumps([wanted, sys.path])]
        self._process: subprocess.Popen[str] | None = None
        try:
            if wanted:
                self._process = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
        except OSError:
            pass  # this process then imports them itself

    def versions(self) -> dict[str, str]:
        """The versions of the packages that it could import."""
        if self._process is None:
            return {}
        try:
            out, _ = self._process.communicate(timeout=60)
            return dict(json.loads(out))
        except (ValueError, subprocess.TimeoutExpired):
            self._process.kill()
            return {}


def _is_found(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _package(
    name: str, enables: str, requirement: str, required: bool = False, versions: Mapping[str, str] | None = None
) -> Check:
    """Checks a Python package by importing it, unless ``versions`` has it: an installed package may be unusable."""
    if versions and name in versions:
        return Check(name, "ok", versions[name], enables, "", required)
    install = f"pip install {requirement}"
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name == name:
            return Check(name, "missing", "not installed", enables, install, required)
        return Check(name, "broken", _first_line(error), enables, f"pip install {error.name}", required)
    except Exception as error:  # noqa: BLE001 - a missing shared object, an ABI mismatch, ...
        again = f"pip install --force-reinstall {requirement}"
        return Check(name, "broken", _first_line(error), enables, again, required)
    detail = str(getattr(module, "__version__", "unknown version"))
    if name == "torch":
        detail += f", built for CUDA {module.version.cuda}" if module.version.cuda else ", built for the CPU"
    if name == "onnxruntime":
        detail += ": " + ", ".join(p.removesuffix("ExecutionProvider") for p in module.get_available_providers())
    return Check(name, "ok", detail, enables, "", required)


def _exporter(name: str, opset: int, enables: str) -> Check:
    """Checks an exporter by exporting and verifying a small model."""
    try:
        import torch

        import svexport
        from svexport.exporter.trace import torch_export_first

        model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.ReLU())
        with tempfile.TemporaryDirectory() as folder, torch_export_first(False):
            svexport.export(model, (torch.randn(1, 3, 8, 8),), Path(folder) / "doctor.onnx", opset=opset)
    except Exception as error:  # noqa: BLE001
        install = f"pip install {error.name}" if isinstance(error, ModuleNotFoundError) else 'pip install "torch>=2.6"'
        return Check(name, "broken", _first_line(error), enables, install, required=True)
    return Check(name, "ok", f"exported and verified a model at opset {opset}", enables, required=True)


def _gpu() -> Check:
    enables = "svexport's CUDA kernels"
    try:
        import torch
    except Exception as error:  # noqa: BLE001
        return Check("GPU", "missing", f"not known: {_first_line(error)}", enables, "pip install torch")
    if torch.cuda.is_available():
        major, minor = torch.cuda.get_device_capability()
        return Check("GPU", "ok", f"{torch.cuda.get_device_name()}, compute capability {major}.{minor}", enables)
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        again = "pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu130"
        return Check("GPU", "broken", "a driver, but torch is built for the CPU", enables, again)
    return Check("GPU", "missing", "torch sees no CUDA device", enables, "a machine with an NVIDIA GPU and its driver")


def _nvcc() -> Check:
    enables = "building CUDA kernels and TensorRT plugins"
    roots = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    found = shutil.which("nvcc") or next(
        (path for root in roots if root and (path := shutil.which("nvcc", path=str(Path(root) / "bin")))), None
    )
    wanted = _cuda()
    package = f"cuda-toolkit-{wanted.replace('.', '-')}" if wanted else "nvidia-cuda-toolkit"
    install = f"sudo apt-get install {package}"
    if found is None:
        return Check("nvcc", "missing", "not on PATH, not in CUDA_HOME", enables, install)
    release = re.search(r"release ([\d.]+)", _output(found, "--version"))
    if release is None:
        return Check("nvcc", "broken", f"{found} does not tell its version", enables, install)
    if wanted and release[1].split(".")[0] != wanted.split(".")[0]:
        return Check("nvcc", "broken", f"{release[1]}, {found}: torch is built for CUDA {wanted}", enables, install)
    return Check("nvcc", "ok", f"{release[1]}, {found}", enables)


def _compiler() -> Check:
    enables = "building CUDA kernels and TensorRT plugins"
    for name in (os.environ.get("CXX"), "c++", "g++", "clang++"):
        if name and (found := shutil.which(name)):
            return Check("C++ compiler", "ok", f"{_output(found, '--version').partition(chr(10))[0]}, {found}", enables)
    return Check("C++ compiler", "missing", "no c++, g++ or clang++ on PATH", enables, "sudo apt-get install g++")


def _ninja() -> Check:
    enables = "building CUDA kernels on first use"
    found = shutil.which("ninja")
    if found is None:
        return Check("ninja", "missing", "not on PATH", enables, "pip install ninja")
    return Check("ninja", "ok", f"{_output(found, '--version').strip()}, {found}", enables)


def _plugin_library() -> Check:
    enables = "svexport nodes in TensorRT engines"
    try:
        from svexport.tensorrt import libraries

        found = [f"TensorRT {library.major}: {library.path}" for library in libraries()]
    except Exception as error:  # noqa: BLE001
        return Check("plugin library", "missing", f"not known: {_first_line(error)}", enables, "pip install torch")
    if not found:
        return Check("plugin library", "missing", "none was built", enables, "svexport plugins build")
    return Check("plugin library", "ok", ", ".join(found), enables)


def _headers() -> Check:
    enables = "building TensorRT plugins"
    root = os.environ.get("TENSORRT_ROOT")
    install = "unpack TensorRT's tar from developer.nvidia.com/tensorrt, then export TENSORRT_ROOT=/path/to/TensorRT"
    system = Path("/usr/include") / f"{platform.machine()}-linux-gnu"
    for folder in [Path(root) / "include"] if root else [system, Path("/usr/include")]:
        if (folder / "NvInfer.h").is_file():
            return Check("TensorRT headers", "ok", f"{_headers_version(folder)}, {folder}", enables)
    detail = f"no NvInfer.h in TENSORRT_ROOT={root}/include" if root else "TENSORRT_ROOT is not set"
    return Check("TensorRT headers", "broken" if root else "missing", detail, enables, install)


def _headers_version(folder: Path) -> str:
    """The version, such as ``10.12.0``, from NV_TENSORRT_MAJOR etc., or TRT_MAJOR_ENTERPRISE and an alias of it."""
    file = folder / "NvInferVersion.h"
    text = file.read_text(errors="replace") if file.is_file() else ""
    found = dict(re.findall(r"#define \w+_(MAJOR|MINOR|PATCH)\w* (\d+)", text))
    return ".".join(found.get(part, "?") for part in ("MAJOR", "MINOR", "PATCH"))


def _cuda() -> str | None:
    """The CUDA version that torch is built for."""
    try:
        import torch
    except Exception:  # noqa: BLE001
        return None
    return torch.version.cuda


def _tensorrt_wheel() -> str:
    cuda = _cuda()
    return f"tensorrt-cu{cuda.split('.')[0]}" if cuda else "tensorrt"


def _output(*command: str) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]


def _shown(checks: list[Check], ok: bool) -> list[Any]:
    verdict = "svexport works here" if ok else "svexport does not work here yet: a part of the core is missing"
    if any(check.name == "rich" for check in checks):
        return [
            *(f"{c.name}: {c.state}, {c.detail}" + (f"; {c.install}" if c.install else "") for c in checks),
            verdict,
        ]
    from rich.text import Text

    marks = {"ok": Text("ok", "green"), "missing": Text("missing", "yellow"), "broken": Text("broken", "bold red")}
    rows = ((Text(c.name, "bold" if c.required else ""), marks[c.state], c.detail, c.enables) for c in checks)
    shown: list[Any] = [table(("", "state", "what was found", "enables"), rows)]
    wanted = [c for c in checks if c.state != "ok" and c.install]
    if wanted:
        first = sorted(wanted, key=lambda c: not c.required)
        commands = ((number, check.name, check.install) for number, check in enumerate(first, 1))
        shown.append(table(("", "to install next, in this order", "with"), commands))
    return [*shown, Text(verdict, "bold green" if ok else "bold red")]
