"""svexport plugins build | list | path; tests/tensorrt tests that the library compiles and works."""

from __future__ import annotations

import pytest

from svexport.tensorrt import library
from svexport.tensorrt.nodes import plugin_ops

pytestmark = pytest.mark.core


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SVEXPORT_CACHE", str(tmp_path))
    monkeypatch.delenv("TENSORRT_ROOT", raising=False)
    return tmp_path / "tensorrt"


def built(cache, *majors):
    cache.mkdir()
    for major in majors:
        (cache / library.library_name(major)).touch()


def test_list_names_nodes_and_libraries(run, cache):
    built(cache, 8, 10)
    result = run("plugins", "list", "--json")
    assert result.code == 0
    assert list(result.json["nodes"]) == [op.node_type for op in plugin_ops()]
    assert result.json["nodes"]["SvGridSample"] == {
        "inputs": ["input", "grid"],
        "attributes": {"interpolation_mode": "int", "padding_mode": "int", "align_corners": "int", "scale": "float"},
    }
    assert [entry["tensorrt"] for entry in result.json["libraries"]] == [10, 8]
    assert "bias?" in run("plugins", "list").out


def test_path_is_the_newest_or_the_one_asked_for(run, cache):
    built(cache, 8, 10)
    assert run("plugins", "path").out == f"{cache / 'libsvexport_tensorrt10.so'}\n"
    assert run("plugins", "path", "--tensorrt", 8).out == f"{cache / 'libsvexport_tensorrt8.so'}\n"
    missing = run("plugins", "path", "--tensorrt", 11)
    assert missing.code == 1
    assert "no plugin library was built for TensorRT 11; run `svexport plugins build`" in missing.err


def test_build_without_headers_says_which_file_and_where_from(run, tmp_path):
    result = run("plugins", "build", "--tensorrt-root", tmp_path, "--json")
    assert result.code == 1
    assert result.json["error"]["type"] == "PluginBuildError"
    assert f"{tmp_path / 'include' / 'NvInferRuntime.h'} does not exist" in result.err
    assert "libnvinfer-headers-dev" in result.err
