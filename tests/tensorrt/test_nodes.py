"""The C++ descriptions of nodes agree with the ops; neither TensorRT nor a compiler is needed."""

from __future__ import annotations

import re

import pytest

from svexport.ops._op import OPS
from svexport.tensorrt import library
from svexport.tensorrt.nodes import HEADER, header, plugin_ops

pytestmark = pytest.mark.core

KERNELS = library.CSRC / "tensorrt"


def test_the_header_is_written_from_the_ops() -> None:
    assert HEADER.read_text() == header(), "run python -m svexport.tensorrt.nodes"


def test_every_op_with_a_plugin_has_one_and_no_other() -> None:
    expected = {op.name for op in OPS.values() if op.plugin and not op.inline}
    made = {
        name: path.stem
        for path in KERNELS.glob("*.cpp")
        for name in re.findall(r"^SVEXPORT_PLUGIN\((\w+), \w+\)", path.read_text(), re.MULTILINE)
    }
    assert made == {name: name for name in expected}


def test_plugins_use_every_attribute() -> None:
    for op in plugin_ops():
        source = (KERNELS / f"{op.name}.cpp").read_text()
        for shared in {"cameras.h"} & set(re.findall(r'#include "(.*)"', source)):
            source += (KERNELS / shared).read_text()
        unused = [a.name for a in op.attributes if not re.search(rf"\bnode\.{a.name}\b", source)]
        assert not unused, f"{op.name}.cpp never reads {unused}"
