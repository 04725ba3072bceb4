from __future__ import annotations

import shutil
import subprocess
import sys

import pytest

from svexport.cli import doctor
from svexport.tensorrt import library

pytestmark = pytest.mark.core


@pytest.fixture
def checks(run, monkeypatch):
    """Runs the doctor without exporting anything, and returns its checks by name."""
    monkeypatch.setattr(doctor, "_exporter", lambda name, opset, enables: doctor.Check(name, "ok", "", enables))

    def checks():
        result = run("doctor", "--json")
        found = {check["name"]: check for check in result.json["checks"]}
        assert result.code == (0 if all(c["state"] == "ok" for c in found.values() if c["required"]) else 1)
        return found

    return checks


def pretend_missing(monkeypatch, *names):
    for name in names:
        for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
            monkeypatch.delitem(sys.modules, module)
        monkeypatch.setitem(sys.modules, name, None)  # makes its import fail


def test_doctor(run):
    result = run("doctor")
    assert result.code == 0, result.out
    assert "exported and verified a model at opset 11" in result.out
    assert "at opset 18" not in result.out
    assert "svexport works here" in result.out
    assert result.err == ""


def test_thorough_is_every_exporter(run):
    result = run("doctor", "--thorough")
    assert result.code == 0, result.out
    assert "exported and verified a model at opset 18" in result.out


def test_everything_has_a_row(checks):
    found = checks()
    core = ["Python", "torch", "onnx", "onnxscript", "onnxruntime"]
    optional = [
        "GPU",
        "nvcc",
        "C++ compiler",
        "ninja",
        "tensorrt",
        "TensorRT headers",
        "torch_tensorrt",
        "plugin library",
        "matplotlib",
    ]
    assert [name for name in found if "exporter" not in name] == core + optional
    assert all(found[name]["required"] and found[name]["state"] == "ok" for name in core)
    assert not any(found[name]["required"] for name in optional)
    assert "CPU" in found["onnxruntime"]["detail"]
    assert all(c["install"] for c in found.values() if c["state"] != "ok")
    assert not any("later" in c["enables"] for c in found.values())


def test_plugin_library(checks, tmp_path, monkeypatch):
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path))
    missing = checks()["plugin library"]
    assert (missing["state"], missing["install"]) == ("missing", "svexport plugins build")
    built = library.plugins_folder() / library.library_name(10)
    built.parent.mkdir(parents=True)
    built.touch()
    found = checks()["plugin library"]
    assert (found["state"], found["detail"]) == ("ok", f"TensorRT 10: {built}")


@pytest.mark.parametrize("name", ["onnxruntime", "onnxscript", "matplotlib", "opt_einsum"])
def test_missing_package(checks, monkeypatch, name):
    pretend_missing(monkeypatch, name)
    check = checks()[name]
    assert (check["state"], check["install"]) == ("missing", f"pip install {name}")
    assert check["required"] == (name != "matplotlib")


def test_package_that_lacks_another(checks, tmp_path, monkeypatch):
    (tmp_path / "torch_tensorrt.py").write_text("import tensorrt_of_long_ago\n")
    monkeypatch.syspath_prepend(tmp_path)
    check = checks()["torch_tensorrt"]
    assert check["state"] == "broken"
    assert check["detail"] == "ModuleNotFoundError: No module named 'tensorrt_of_long_ago'"
    assert check["install"] == "pip install tensorrt_of_long_ago"


def test_package_that_cannot_load(checks, tmp_path, monkeypatch):
    (tmp_path / "tensorrt.py").write_text("raise OSError('libnvinfer.so.10: cannot open shared object file')\n")
    monkeypatch.syspath_prepend(tmp_path)
    check = checks()["tensorrt"]
    assert check["state"] == "broken"
    assert check["detail"] == "OSError: libnvinfer.so.10: cannot open shared object file"
    assert check["install"].startswith("pip install --force-reinstall tensorrt")


def test_exporter_that_fails(run, monkeypatch):
    pretend_missing(monkeypatch, "onnxscript", "onnxruntime")
    result = run("doctor")
    assert result.code == 1
    assert "svexport does not work here yet" in result.out
    assert "broken" in result.out


def test_nothing_at_all(tmp_path):
    """A Python without any package: plain lines, exit code 1, no traceback."""
    code = (
        "import sys, os\n"
        "class Nothing:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        known = name.partition('.')[0] in {'svexport', *sys.stdlib_module_names}\n"
        "        if not known: raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Nothing())\n"
        "from svexport.cli import main\n"
        "sys.exit(main(['doctor']))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env={"PATH": str(tmp_path)}
    )
    assert result.returncode == 1, result.stderr
    assert result.stderr == ""
    for name in ("torch", "onnx", "onnxruntime", "onnxscript", "numpy", "loguru", "rich"):
        assert f"{name}: missing, not installed; pip install {name}\n" in result.stdout
    assert "C++ compiler: missing" in result.stdout
    assert result.stdout.endswith("svexport does not work here yet: a part of the core is missing\n")


def test_no_compilers(checks, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda *args, **kwargs: None)
    found = checks()
    assert found["nvcc"]["state"] == found["C++ compiler"]["state"] == found["ninja"]["state"] == "missing"
    assert found["nvcc"]["install"].startswith("sudo apt-get install")
    assert found["C++ compiler"]["install"] == "sudo apt-get install g++"


@pytest.mark.parametrize(
    ("says", "built_for", "state"),
    [
        ("Cuda compilation tools, release 12.4, V12.4.131", "12.6", "ok"),
        ("Cuda compilation tools, release 12.4, V12.4.131", None, "ok"),
        ("Cuda compilation tools, release 12.4, V12.4.131", "13.0", "broken"),
        ("Segmentation fault", None, "broken"),
    ],
)
def test_nvcc(tmp_path, monkeypatch, says, built_for, state):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text(f"#!/bin/sh\necho '{says}'\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("PATH", "/bin:/usr/bin")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setattr(doctor, "_cuda", lambda: built_for)
    check = doctor._nvcc()
    assert check.state == state
    assert str(nvcc) in check.detail


def test_tensorrt_headers(tmp_path, monkeypatch):
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path))
    check = doctor._headers()
    assert (check.state, check.detail) == ("broken", f"no NvInfer.h in TENSORRT_ROOT={tmp_path}/include")
    include = tmp_path / "include"
    include.mkdir()
    (include / "NvInfer.h").touch()
    assert doctor._headers().detail == f"?.?.?, {include}"
    for version in (
        "#define NV_TENSORRT_MAJOR 8 //!< major\n#define NV_TENSORRT_MINOR 6\n#define NV_TENSORRT_PATCH 1\n",
        "#define TRT_MAJOR_ENTERPRISE 8\n#define TRT_MINOR_ENTERPRISE 6\n#define TRT_PATCH_ENTERPRISE 1\n"
        "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n",
    ):
        (include / "NvInferVersion.h").write_text(version)
        assert (doctor._headers().state, doctor._headers().detail) == ("ok", f"8.6.1, {include}")


def test_gpu(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    assert doctor._gpu().detail == "NVIDIA H200, compute capability 9.0"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi")
    assert doctor._gpu().detail == "a driver, but torch is built for the CPU"


def test_without_rich(run, monkeypatch):
    monkeypatch.setattr(doctor, "_exporter", lambda name, opset, enables: doctor.Check(name, "ok", "", enables))
    pretend_missing(monkeypatch, "rich")
    result = run("doctor")
    assert result.code == 1
    assert "rich: missing, not installed; pip install rich" in result.out
