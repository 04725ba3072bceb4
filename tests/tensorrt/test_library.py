"""Finding headers and tools, and the errors if they are missing."""

from __future__ import annotations

from pathlib import Path

import pytest

from svexport.errors import PluginBuildError
from svexport.tensorrt import library

pytestmark = pytest.mark.core

NAMES = ("NvInferRuntime.h", "NvInferRuntimeCommon.h", "NvInferRuntimePlugin.h", "NvInferImpl.h")


def write_headers(folder: Path, version: str) -> None:
    folder.mkdir(parents=True)
    for name in NAMES:
        (folder / name).touch()
    (folder / "NvInferVersion.h").write_text(version)


@pytest.mark.parametrize("folder", ["include", "include/x86_64-linux-gnu", "."])
@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("#define NV_TENSORRT_MAJOR 8 //!< major\n#define NV_TENSORRT_MINOR 6\n", (8, 6)),
        (
            "#define TRT_MAJOR_ENTERPRISE 11\n#define TRT_MINOR_ENTERPRISE 1\n"
            "#define NV_TENSORRT_MAJOR TRT_MAJOR_ENTERPRISE\n#define NV_TENSORRT_MINOR TRT_MINOR_ENTERPRISE\n",
            (11, 1),
        ),
    ],
)
def test_headers_are_found(tmp_path: Path, folder: str, text: str, version: tuple[int, int]) -> None:
    write_headers(tmp_path / "root" / folder, text)
    assert library.find_headers(tmp_path / "root") == library.Headers((tmp_path / "root" / folder).resolve(), version)


def test_the_environment_says_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_headers(tmp_path / "root" / "include", "#define NV_TENSORRT_MAJOR 10\n#define NV_TENSORRT_MINOR 0\n")
    monkeypatch.setenv("TENSORRT_ROOT", str(tmp_path / "root"))
    assert library.find_headers().version == (10, 0)


@pytest.mark.parametrize("name", [*NAMES, "NvInferVersion.h"])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    write_headers(tmp_path / "include", "#define NV_TENSORRT_MAJOR 10\n#define NV_TENSORRT_MINOR 0\n")
    (tmp_path / "include" / name).unlink()
    with pytest.raises(PluginBuildError, match=f"{tmp_path}/include/{name} does not exist"):
        library.find_headers(tmp_path)


def test_a_version_that_is_too_old_is_refused(tmp_path: Path) -> None:
    write_headers(tmp_path / "include", "#define NV_TENSORRT_MAJOR 8\n#define NV_TENSORRT_MINOR 2\n")
    with pytest.raises(PluginBuildError, match=r"TensorRT 8\.2; the plugins need 8\.4 or newer"):
        library.find_headers(tmp_path)


def test_no_compiler_and_wrong_architectures_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_headers(tmp_path / "include", "#define NV_TENSORRT_MAJOR 10\n#define NV_TENSORRT_MINOR 0\n")
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", None)
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(PluginBuildError, match="no nvcc was found"):
        library.build(tmp_path)
    (tmp_path / "nvcc").touch(mode=0o755)
    with pytest.raises(PluginBuildError, match=r"compute capability such as 8\.7 or 9\.0\+PTX; got 'Orin'"):
        library.build(tmp_path, architectures=["Orin"])


def test_what_the_compiler_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_headers(tmp_path / "include", "#define NV_TENSORRT_MAJOR 10\n#define NV_TENSORRT_MINOR 0\n")
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    nvcc.write_text("#!/bin/sh\necho 'x.cu(1): error: no such thing' >&2\nexit 2\n")
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PluginBuildError, match="no such thing"):
        library.build(tmp_path, architectures=["9.0"])
    assert library.libraries() == []


def test_built_libraries_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a compiler that only writes down what it is asked for."""
    write_headers(tmp_path / "include", "#define NV_TENSORRT_MAJOR 10\n#define NV_TENSORRT_MINOR 0\n")
    nvcc, calls = tmp_path / "bin" / "nvcc", tmp_path / "calls"
    nvcc.parent.mkdir()
    nvcc.write_text(f'#!/bin/sh\necho "$@" >> {calls}\nfor last; do :; done\necho > "$last"\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path / "cache"))
    built = library.build(tmp_path, architectures=["8.7", "9.0+PTX"])
    assert [built] == library.libraries()
    assert built.path.name == "libsvexport_tensorrt10.so"
    first = calls.read_text().splitlines()
    sources = {*library.CSRC.glob("cuda/**/*.cu"), *library.CSRC.glob("tensorrt/*.cpp")}
    assert len(first) == len(sources) + 1
    assert "arch=compute_87,code=sm_87" in first[0]
    assert "arch=compute_90a,code=sm_90a" in first[0], "of 9.0 with all that it has"
    assert "arch=compute_90,code=compute_90" in first[0]
    library.build(tmp_path, architectures=["8.7", "9.0+PTX"], output=tmp_path / "here")
    assert (tmp_path / "here" / "libsvexport_tensorrt10.so").is_file()
    assert len(calls.read_text().splitlines()) == len(first) + 1, "only linked again"
