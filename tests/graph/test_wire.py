"""Files written one weight at a time have the same bytes as those that the library writes at once."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from svexport.graph.wire import write_model

pytestmark = pytest.mark.core


def model(*tensors: onnx.TensorProto) -> onnx.ModelProto:
    """With something in every field around the weights, nested graphs and functions included."""
    inner = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["y"])], "inner", [], [helper.make_tensor_value_info("y", 1, None)]
    )
    inner.initializer.append(numpy_helper.from_array(np.ones(20_000, np.float32), "w"))
    graph = helper.make_graph(
        [helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner)],
        "graph",
        [helper.make_tensor_value_info("c", TensorProto.BOOL, [])],
        [helper.make_tensor_value_info("y", 1, ["n"])],
        doc_string="text",
        value_info=[helper.make_tensor_value_info("x", 1, [3])],
    )
    graph.initializer.extend(tensors)
    function = helper.make_function("d", "f", ["a"], ["b"], [helper.make_node("Abs", ["a"], ["b"])], [])
    made = helper.make_model(
        graph, functions=[function], opset_imports=[helper.make_opsetid("", 17)], producer_name="p", doc_string="m"
    )
    made.metadata_props.add(key="k", value="v")
    return made


def array(*shape: int, dtype: type = np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(np.random.randn(*shape), dtype), f"w{shape}")


def described() -> onnx.TensorProto:
    tensor = array(300, 301)
    tensor.doc_string = "of the first layer"
    tensor.metadata_props.add(key="k", value="v")
    return tensor


def outside() -> onnx.TensorProto:
    tensor = TensorProto(name="far", data_type=1, dims=[1000, 1000], data_location=TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.bin")
    return tensor


TENSORS = {
    "none": list,
    "small": lambda: [array(3), array(0, 4)],
    "between": lambda: [array(5), array(129, 131), array(), array(40_000, dtype=np.float64), array(7)],
    "length of four bytes": lambda: [array(1500, 1401)],
    "described": lambda: [described(), array(2)],
    "numbers apart": lambda: [helper.make_tensor("w", 1, [20_000], np.arange(20_000.0))],
    "words": lambda: [helper.make_tensor("w", TensorProto.STRING, [3], [b"a", b"", b"c"])],
    "outside": lambda: [outside()],
    "bfloat16": lambda: [helper.make_tensor("w", TensorProto.BFLOAT16, [50_000], bytes(100_000), raw=True)],
    "int4": lambda: [helper.make_tensor("w", TensorProto.INT4, [200_000], bytes(100_000), raw=True)],
}


@pytest.mark.parametrize("kind", TENSORS)
def test_bytes_are_the_librarys(kind: str) -> None:
    made = model(*TENSORS[kind]())
    stream = io.BytesIO()
    write_model(made, stream)
    assert stream.getvalue() == made.SerializeToString(deterministic=True)


def test_no_write_holds_many_weights() -> None:
    class Sizes(io.BytesIO):
        largest = 0

        def write(self, data) -> int:
            self.largest = max(self.largest, len(data))
            return super().write(data)

    stream = Sizes()
    write_model(model(*(array(257, 259) for _ in range(40))), stream)
    assert stream.largest < 2 * 257 * 259 * 4
    assert len(stream.getvalue()) > 40 * 257 * 259 * 4
