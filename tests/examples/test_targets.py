"""What each TensorRT makes of the demo's files, which have no target, judged from the files alone."""

from __future__ import annotations

import onnx
import pytest

import svexport
from svexport.cli import demo
from svexport.cli._model import load_file
from svexport.graph.nodes import svexport_nodes


@pytest.mark.parametrize("name", ["deformable_detr", "detr3d", "fused_decoder", "multicamera", "stgcn", "yolox_stem"])
def test_every_version_takes_a_file_or_refuses_its_nodes_by_name(name: str, tmp_path) -> None:
    module = load_file(demo.examples()[name])
    path = tmp_path / f"{name}.onnx"
    svexport.export(module.model(**module.QUICK), path=path, opset=11, verify=False)
    nodes = sorted(node.name for node in svexport_nodes(onnx.load(path)))
    assert bool(nodes) == (name not in ("stgcn", "yolox_stem"))
    for target in ("8.4", "8.6", "10.7", "11"):
        report = svexport.check(path, target)
        assert report.ok, report
        assert not report.warnings, report
        assert report.verdicts.get("plugin", 0) == len(nodes)
    before = svexport.check(path, "10.1")
    assert sorted(error.node for error in before.errors) == nodes
    assert all("target='10.1'" in error.todo and "plugins=False" in error.todo for error in before.errors)
    for ways in ({"target": "10.1"}, {"plugins": False}):
        svexport.export(module.model(**module.QUICK), path=path, opset=11, verify=False, **ways)
        assert svexport.check(path, "10.1").ok
        assert bool(list(svexport_nodes(onnx.load(path)))) == (bool(nodes) and "target" in ways)
