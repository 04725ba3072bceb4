"""Engines on hand-made ONNX files: values, types, memory, errors."""

from __future__ import annotations

import copy
import gc
import json
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from svexport.errors import BackendNotAvailableError, SvexportError, UnsupportedError
from svexport.graph.bodies import strip
from svexport.ops.bilinear_sample import OP as BILINEAR_SAMPLE
from svexport.runtime import Engine, EngineError, OnnxEngine, TensorSpec, load
from tests.support import calls, in_threads, op_model

pytestmark = pytest.mark.core

DTYPES = {
    torch.float64: TensorProto.DOUBLE,
    torch.float32: TensorProto.FLOAT,
    torch.float16: TensorProto.FLOAT16,
    torch.bfloat16: TensorProto.BFLOAT16,
    torch.bool: TensorProto.BOOL,
    torch.uint8: TensorProto.UINT8,
    torch.int8: TensorProto.INT8,
    torch.uint16: TensorProto.UINT16,
    torch.int16: TensorProto.INT16,
    torch.uint32: TensorProto.UINT32,
    torch.int32: TensorProto.INT32,
    torch.uint64: TensorProto.UINT64,
    torch.int64: TensorProto.INT64,
}
FLOAT = TensorProto.FLOAT
value = helper.make_tensor_value_info
node = helper.make_node


def make(
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto],
    outputs: Sequence[onnx.ValueInfoProto],
    initializers: Sequence[onnx.TensorProto] = (),
) -> onnx.ModelProto:
    graph = helper.make_graph(list(nodes), "graph", list(inputs), list(outputs), list(initializers))
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 19)])
    model.ir_version = 9
    return model


def unary(op: str, dtype: int = FLOAT, shape: Sequence[int | str | None] | None = ("n", 4)) -> onnx.ModelProto:
    return make([node(op, ["x"], ["y"])], [value("x", dtype, shape)], [value("y", dtype, shape)])


def two_in_two_out() -> onnx.ModelProto:
    """(a, b) -> (a - b, b > a), so that a swap shows."""
    nodes = [node("Sub", ["a", "b"], ["difference"]), node("Greater", ["b", "a"], ["larger"])]
    shape = ["n"]
    outputs = [value("difference", FLOAT, shape), value("larger", TensorProto.BOOL, shape)]
    return make(nodes, [value("a", FLOAT, shape), value("b", FLOAT, shape)], outputs)


class Copies(TorchDispatchMode):
    """Names of the torch operators that moved data."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in ("clone", "copy_", "_to_copy", "contiguous", "empty", "empty_strided", "zeros"):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


# ---------------------------------------------------------------------------------------------------------- values


@pytest.mark.parametrize("shape", [(2, 3), (), (1,), (7, 1, 5), (0, 3), (2, 0)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_type_and_shape_passes_unchanged(dtype, shape):
    engine = OnnxEngine(unary("Identity", DTYPES[dtype], list(shape)))
    x = torch.randint(0, 100, shape).to(dtype)
    y = engine(x)
    assert y.dtype == dtype
    assert y.shape == shape
    assert torch.equal(y.double(), x.double())
    assert not x.numel() or y.data_ptr() != x.data_ptr()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64, torch.int32, torch.int64, torch.int8])
def test_it_computes(dtype):
    x = torch.arange(-6, 6).reshape(3, 4).to(dtype)
    assert torch.equal(OnnxEngine(unary("Neg", DTYPES[dtype]))(x), -x)


def test_bool():
    x = torch.tensor([[True, False, True, True]])
    y = OnnxEngine(unary("Not", TensorProto.BOOL))(x)
    assert torch.equal(y, ~x)


def layouts() -> dict[str, torch.Tensor]:
    x = torch.randn(6, 8)
    return {
        "transposed": torch.randn(4, 6).t(),
        "strided": x[:, ::2],
        "expanded": torch.randn(4).expand(5, 4),
        "offset": torch.randn(40)[3:23].view(5, 4),
        "channels last": torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last).flatten(0, 2),
        "requires grad": torch.randn(3, 4, requires_grad=True),
        "computed with grad": torch.randn(3, 4, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.randn(3, 4)),
        "negated view": torch.randn(3, 4, dtype=torch.complex64).conj().imag,
        "contiguous negated view": torch._neg_view(torch.randn(3, 4)),
        "inference": torch.inference_mode()(lambda: torch.randn(3, 4))(),
    }


@pytest.mark.parametrize("layout", layouts())
def test_any_layout(layout):
    x = layouts()[layout]
    y = OnnxEngine(unary("Neg"))(x)
    assert torch.equal(y, -x.detach())
    assert not y.requires_grad


def test_inputs_are_not_changed():
    x = torch.randn(3, 4)
    before = x.clone()
    OnnxEngine(unary("Relu"))(x)
    assert torch.equal(x, before)


def test_one_output_is_a_tensor_and_more_are_a_tuple():
    engine = OnnxEngine(two_in_two_out())
    a, b = torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0])
    result = engine(a, b)
    assert isinstance(result, tuple)
    assert torch.equal(result[0], a - b)
    assert torch.equal(result[1], b > a)
    assert isinstance(engine.run([a, b]), list)
    assert isinstance(OnnxEngine(unary("Neg"))(torch.ones(1, 4)), torch.Tensor)
    assert len(OnnxEngine(unary("Neg")).run([torch.ones(1, 4)])) == 1


def test_inputs_by_position_by_name_and_both():
    engine = OnnxEngine(two_in_two_out())
    a, b = torch.tensor([1.0, 5.0]), torch.tensor([2.0, 3.0])
    for result in (engine(a, b), engine(b=b, a=a), engine(a, b=b)):
        assert torch.equal(result[0], a - b)


def test_input_names_that_are_no_identifiers():
    model = make([node("Neg", ["self"], ["y/0"])], [value("self", FLOAT, [2])], [value("y/0", FLOAT, [2])])
    engine = OnnxEngine(model)
    assert torch.equal(engine(self=torch.ones(2)), -torch.ones(2))
    assert engine.output_names == ["y/0"]


def test_dynamic_sizes():
    engine = OnnxEngine(unary("Neg"))
    for n in (1, 5, 0, 3):
        x = torch.randn(n, 4)
        assert torch.equal(engine(x), -x)


def test_sizes_that_depend_on_the_data():
    output = value("y", TensorProto.INT64, [1, None])
    engine = OnnxEngine(make([node("NonZero", ["x"], ["y"])], [value("x", FLOAT, ["n"])], [output]))
    assert engine(torch.tensor([0.0, 2.0, 0.0, 3.0])).tolist() == [[1, 3]]
    assert engine(torch.zeros(3)).shape == (1, 0)


def test_unknown_rank():
    engine = OnnxEngine(unary("Neg", shape=None))
    for shape in [(), (3,), (2, 0, 1)]:
        x = torch.randn(shape)
        assert torch.equal(engine(x), -x)


def test_output_shapes_that_the_file_states_wrongly():
    model = make([node("Neg", ["x"], ["y"])], [value("x", FLOAT, ["n"])], [value("y", FLOAT, [7])])
    assert OnnxEngine(model)(torch.ones(3)).shape == (3,)


def test_no_inputs():
    constant = numpy_helper.from_array(np.arange(3, dtype=np.float32))
    model = make([node("Constant", [], ["y"], value=constant)], [], [value("y", FLOAT, [3])])
    assert OnnxEngine(model)().tolist() == [0, 1, 2]


def test_specs():
    graph_input = value("x", FLOAT, ["batch", 3, None, 0])
    model = make([node("Identity", ["x"], ["y"])], [graph_input], [value("y", FLOAT, None)])
    engine = OnnxEngine(model, device="cpu")
    assert engine.inputs == (TensorSpec("x", torch.float32, ("batch", 3, None, 0)),)
    assert engine.input_names == ["x"]
    assert engine.output_names == ["y"]
    assert str(engine.inputs[0]) == "float32[batch, 3, ?, 0]"
    assert str(TensorSpec("x", torch.bool, None)) == "bool[...]"
    assert engine.path is None
    assert engine.device == torch.device("cpu")
    assert isinstance(engine, Engine)
    assert "x: float32[batch, 3, ?, 0]" in repr(engine)


def test_initializers_are_not_inputs():
    weight = numpy_helper.from_array(np.ones(4, dtype=np.float32), "w")
    inputs = [value("x", FLOAT, [4]), value("w", FLOAT, [4])]  # listed as well, as old exporters do
    model = make([node("Add", ["x", "w"], ["y"])], inputs, [value("y", FLOAT, [4])], [weight])
    engine = OnnxEngine(model)
    assert engine.input_names == ["x"]
    assert torch.equal(engine(torch.ones(4)), torch.full((4,), 2.0))


# ---------------------------------------------------------------------------------------------------------- memory


class Addresses:
    """A session that notes the addresses it was given and those of its own outputs."""

    def __init__(self, session):
        self._session = session
        self._sess = self
        self.inputs: list[int] = []
        self.outputs: list[int] = []

    def run_with_ort_values(self, feeds, names, options):
        self.inputs += [one.data_ptr() for one in feeds.values()]
        values = self._session._sess.run_with_ort_values(feeds, names, options)
        self.outputs += [values[i].data_ptr() for i in range(len(values))]
        return values

    def __getattr__(self, name):
        return getattr(self._session, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool])
def test_nothing_is_copied(dtype):
    engine = OnnxEngine(unary("Identity", DTYPES[dtype]))
    engine._session = addresses = Addresses(engine._session)
    x = torch.ones(3, 4, dtype=dtype)
    with Copies() as copies:
        y = engine(x)
    assert copies.found == []
    assert addresses.inputs == [x.data_ptr()]
    assert addresses.outputs == [y.data_ptr()]


def test_what_is_not_contiguous_is_copied_once():
    engine = OnnxEngine(unary("Identity"))
    x = torch.randn(4, 3).t()
    with Copies() as copies:
        engine(x)
    assert len(copies.found) <= 2  # a clone, and the allocation it makes


def test_outputs_outlive_the_engine_and_later_runs():
    engine = OnnxEngine(unary("Neg", shape=["n"]))
    results = [engine(torch.full((1000,), float(i))) for i in range(20)]
    del engine
    gc.collect()
    junk = [torch.randn(1000) for _ in range(50)]
    assert all(bool((y == -i).all()) for i, y in enumerate(results))
    del junk


def test_info(tmp_path):
    onnx.save(unary("Neg", shape=["n", 4]), tmp_path / "net.onnx")
    told = json.loads(json.dumps(load(tmp_path / "net.onnx", device="cpu").info()))
    assert told["onnxruntime"] == onnxruntime.__version__
    assert (told["path"], told["device"]) == (str(tmp_path / "net.onnx"), "cpu")
    assert told["inputs"] == {"x": "float32[n, 4]"}
    assert list(told["outputs"]) == ["y"]


def test_writing_to_an_output_changes_nothing_else():
    weight = numpy_helper.from_array(np.arange(4, dtype=np.float32), "w")
    nodes = [node("Identity", ["x"], ["y"]), node("Identity", ["w"], ["z"])]
    outputs = [value("y", FLOAT, [4]), value("z", FLOAT, [4]), value("w", FLOAT, [4])]
    engine = OnnxEngine(make(nodes, [value("x", FLOAT, [4])], outputs, [weight]))
    x = torch.ones(4)
    for y in engine(x):
        y.fill_(9.0)
    assert torch.equal(x, torch.ones(4))
    assert [y.tolist() for y in engine(x)] == [[1.0] * 4, [0.0, 1.0, 2.0, 3.0], [0.0, 1.0, 2.0, 3.0]]


def test_an_input_that_is_an_output_too():
    outputs = [value("y", FLOAT, [4]), value("x", FLOAT, [4])]
    engine = OnnxEngine(make([node("Neg", ["x"], ["y"])], [value("x", FLOAT, [4])], outputs))
    x = torch.ones(4)
    _, passed = engine(x)
    assert torch.equal(passed, x)
    passed.fill_(9.0)
    assert torch.equal(x, torch.ones(4))


def test_a_call_costs_little_beside_the_run():
    """Counted in calls of functions, which depend on no clock: ten more were 4 us."""
    engine, x = OnnxEngine(unary("Neg")), torch.ones(3, 4)
    engine(x)
    assert calls(lambda: engine(x)) <= 24


def test_memory_is_flat_over_many_calls():
    """What is kept of a call is nothing: neither objects nor memory."""
    engine = OnnxEngine(unary("Neg", shape=["n", 1024]))
    x = torch.ones(64, 1024)  # 256 kB, of which 10,000 would be 2.6 GB
    for _ in range(500):
        engine(x)
    gc.collect()
    objects, before = len(gc.get_objects()), resident()
    for _ in range(10_000):
        engine(x)
    gc.collect()
    assert len(gc.get_objects()) - objects < 100
    assert resident() - before < 20e6


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_threads():
    engine = OnnxEngine(unary("Neg", shape=["n", 64]))
    wrong: list[int] = []

    def work(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        for _ in range(1000):
            x = torch.randn(1 + seed, 64, generator=generator)
            if not torch.equal(engine(x), -x):
                wrong.append(seed)

    in_threads(8, work)
    assert wrong == []


# ----------------------------------------------------------------------------------------------------------- files


def test_load(tmp_path):
    path = tmp_path / "net.onnx"
    onnx.save(unary("Neg"), str(path))
    for given in (path, str(path)):
        engine = load(given)
        assert torch.equal(engine(torch.ones(2, 4)), -torch.ones(2, 4))
        assert engine.path == path
        assert str(engine) == "net.onnx"


def external(location: str, length: int = 16, offset: int = 0) -> onnx.ModelProto:
    weight = TensorProto(name="w", data_type=FLOAT, dims=[4], data_location=TensorProto.EXTERNAL)
    for key, text in (("location", location), ("offset", str(offset)), ("length", str(length))):
        weight.external_data.add(key=key, value=text)
    return make([node("Add", ["x", "w"], ["y"])], [value("x", FLOAT, [4])], [value("y", FLOAT, [4])], [weight])


@pytest.fixture
def folder(tmp_path):
    """in/ with weights and room for a model, a secret beside it."""
    inner = tmp_path / "in"
    inner.mkdir()
    np.arange(4, dtype=np.float32).tofile(inner / "w.bin")
    np.full(4, 42, dtype=np.float32).tofile(tmp_path / "secret.bin")
    (inner / "link.bin").symlink_to(tmp_path / "secret.bin")
    return inner


def test_external_data(folder, monkeypatch):
    onnx.save(external("w.bin"), str(folder / "net.onnx"))
    monkeypatch.chdir(folder)
    engine = load("net.onnx")
    monkeypatch.chdir("/")
    assert engine(torch.zeros(4)).tolist() == [0, 1, 2, 3]
    assert engine.with_outputs(["y"])(torch.zeros(4)).tolist() == [0, 1, 2, 3]  # reads the file again
    engine = OnnxEngine(external("w.bin"), data_folder=folder)
    assert engine(torch.zeros(4)).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("where", ["path", "memory"])
@pytest.mark.parametrize("location", ["../secret.bin", "sub/../../secret.bin", "link.bin", "{folder}/../secret.bin"])
@pytest.mark.parametrize("holder", ["initializer", "constant", "function", "branch"])
def test_external_data_from_elsewhere_is_refused(folder, location, where, holder):
    model = external(location.format(folder=folder))
    if holder != "initializer":
        constant = node("Constant", [], ["w"], value=model.graph.initializer.pop())
        model.graph.node.insert(0, constant)
    if holder == "function":
        model.functions.append(helper.make_function("own", "F", [], ["w"], [constant], model.opset_import))
        del model.graph.node[0]
    if holder == "branch":
        branch = helper.make_graph([constant], "branch", [], [value("w", FLOAT, [4])])
        model.graph.node[0].CopyFrom(node("If", ["x"], ["w"], then_branch=branch, else_branch=branch))
    onnx.save(model, str(folder / "net.onnx"))
    with pytest.raises(EngineError, match="external data of 'w' must lie in the folder"):
        OnnxEngine(folder / "net.onnx") if where == "path" else OnnxEngine(model, data_folder=folder)


@pytest.mark.parametrize("place", [("missing.bin",), ("w.bin", 32), ("w.bin", 16, 8), ("w.bin", 1 << 60), ("",)])
def test_external_data_that_is_not_there(folder, place):
    onnx.save(external(*place), str(folder / "net.onnx"))
    with pytest.raises(
        EngineError, match=r"ONNX Runtime cannot load net.onnx: .*([Ee]xternal|initializer: w|model format error)"
    ):
        load(folder / "net.onnx")


@pytest.fixture(scope="module")
def sampler():
    """A file with one svexport node and its body, inputs, and what torch makes of them."""
    torch.manual_seed(0)
    args = (torch.randn(2, 3, 5, 7), torch.rand(2, 4, 3, 2) * 8 - 1)
    return op_model(BILINEAR_SAMPLE, args, 11, lowered=False), args, BILINEAR_SAMPLE.reference(*args)


@pytest.mark.parametrize("bodies", [True, False])
@pytest.mark.parametrize("where", ["path", "memory"])
def test_svexport_nodes_run_with_and_without_their_bodies(sampler, tmp_path, bodies, where):
    source, args, expected = sampler
    model = onnx.ModelProto()
    model.CopyFrom(source)
    if not bodies:
        strip(model)
        assert not model.functions
    before = model.SerializeToString(deterministic=True)
    path = tmp_path / "net.onnx"
    path.write_bytes(before)
    engine = OnnxEngine(path if where == "path" else model)
    for got, want in zip(engine(*args), expected, strict=True):
        torch.testing.assert_close(got, want)
    assert model.SerializeToString(deterministic=True) == before
    assert path.read_bytes() == before
    assert any(n.domain == "svexport" for n in engine.model().graph.node) == bodies


def test_a_node_that_this_svexport_does_not_have(sampler):
    model = onnx.ModelProto()
    model.CopyFrom(sampler[0])
    strip(model)
    model.graph.node[0].op_type = "SvFromTheFuture"
    with pytest.raises(UnsupportedError, match="SvFromTheFuture"):
        OnnxEngine(model)


def test_values_from_inside():
    model = make(
        [node("Neg", ["x"], ["negative"]), node("Exp", ["negative"], ["y"])],
        [value("x", FLOAT, ["n"])],
        [value("y", FLOAT, ["n"])],
    )
    before = model.SerializeToString()
    engine = OnnxEngine(model).with_outputs(["negative", "y", "negative"])
    assert engine.output_names == ["y", "negative"]
    x = torch.randn(5)
    y, negative = engine(x)
    assert torch.equal(negative, -x)
    torch.testing.assert_close(y, torch.exp(-x))
    assert model.SerializeToString() == before
    with pytest.raises(EngineError, match="'nothing'"):
        engine.with_outputs(["nothing"])


# ---------------------------------------------------------------------------------------------------------- errors


def wrong_calls():
    a = torch.ones(2)
    return {
        "too few": ((a,), {}, "lacks the input 'b'"),
        "too many": ((a, a, a), {}, "expects 2 inputs, got 3"),
        "none": ((), {}, "lacks the input 'a', 'b'"),
        "unknown name": ((a,), {"c": a}, "no input named 'c'"),
        "twice": ((a, a), {"a": a}, "'a' twice"),
        "numpy": ((a.numpy(), a), {}, "torch.from_numpy"),
        "a list": (([1.0], a), {}, "got list for 'a'"),
        "none given": ((None, a), {}, "got NoneType"),
        "type": ((a.double(), a), {}, r"expects float32\[n\], got float64\[2\]; convert it with .to\(torch.float32\)"),
        "half": ((a, a.half()), {}, r"input 'b' expects float32"),
        "int": ((a, a.long()), {}, r"got int64\[2\]"),
        "rank": ((a[None], a), {}, r"expects float32\[n\], got float32\[1, 2\]; the rank differs"),
        "scalar": ((a[0], a), {}, r"got float32\[\]; the rank differs"),
        "sparse": ((a.to_sparse(), a), {}, "a sparse tensor"),
        "meta": ((a.to("meta"), a), {}, "a meta tensor"),
        "nested": ((torch.nested.nested_tensor([a], layout=torch.strided), a), {}, "a nested tensor"),
        "fake": ((FakeTensorMode().from_tensor(a), a), {}, "a FakeTensor, whose memory holds no values"),
        "sizes that do not fit": ((torch.ones(2), torch.ones(3)), {}, r"a: \[2\], b: \[3\]"),
    }


@pytest.mark.parametrize("case", wrong_calls())
def test_inputs_that_do_not_fit(case, capfd):
    args, kwargs, message = wrong_calls()[case]
    engine = OnnxEngine(two_in_two_out())
    with pytest.raises(EngineError, match=message):
        engine(*args, **kwargs)
    assert capfd.readouterr() == ("", "")
    assert torch.equal(engine(torch.ones(1), torch.ones(1))[0], torch.zeros(1))  # it still works


def test_inputs_of_transforms():
    """They have no memory that could be read."""
    engine = OnnxEngine(unary("Neg"))
    with pytest.raises(EngineError, match="storage"):
        torch.vmap(engine)(torch.ones(2, 3, 4))
    with pytest.raises(EngineError, match="storage"):
        torch.func.grad(lambda x: engine(x).sum())(torch.ones(3, 4))


def test_engines_are_not_copied(tmp_path):
    onnx.save(unary("Neg"), tmp_path / "net.onnx")
    for copied in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(EngineError, match=r"net\.onnx is an engine, which is not copied or pickled"):
            copied(load(tmp_path / "net.onnx", device="cpu"))


@pytest.mark.parametrize("threads", [-1, 1.5, "2", True])
def test_wrong_numbers_of_threads(threads):
    with pytest.raises(EngineError, match="threads expects"):
        OnnxEngine(unary("Neg"), device="cpu", threads=threads)


def test_a_static_size_that_differs():
    message = r"expects float32\[n, 4\], got float32\[2, 5\]; export the model with dynamic_shapes"
    with pytest.raises(EngineError, match=message):
        OnnxEngine(unary("Neg"))(torch.ones(2, 5))


def test_a_run_that_fails_inside(capfd):
    model = make(
        [node("Reshape", ["x", "shape"], ["y"])],
        [value("x", FLOAT, ["n"]), value("shape", TensorProto.INT64, [2])],
        [value("y", FLOAT, ["a", "b"])],
    )
    engine = OnnxEngine(model)
    with pytest.raises(EngineError, match=r"failed in ONNX Runtime on x: \[5\], shape: \[2\]: .*Reshape"):
        engine(torch.ones(5), torch.tensor([2, 2]))
    assert capfd.readouterr() == ("", "")


def test_files_of_other_kinds(tmp_path, capfd):
    (tmp_path / "folder.onnx").mkdir()
    files = {
        "empty.onnx": b"",
        "text.onnx": b"import torch\n" * 20,
        "page.onnx": b"<!DOCTYPE html><html></html>",
        "zip.onnx": b"PK\x03\x04" + bytes(100),
        "pickle.onnx": b"\x80\x04\x95" + bytes(50),
        "zeros.onnx": bytes(1000),
        "flatbuffer.onnx": b"\x18\x00\x00\x00ORTM" + bytes(200),
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    for name in [*files, "folder.onnx", "missing.onnx", "missing/net.onnx"]:
        with pytest.raises(EngineError, match=name):
            load(tmp_path / name)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("given", ["net.pt", "net", "net.onnx.data", 3, None, b"net.onnx"])
def test_paths_that_are_no_model(given):
    with pytest.raises(EngineError, match=r"\.onnx, \.engine or \.plan"):
        load(given)


@pytest.mark.parametrize("name", ["net.engine", "net.plan", "NET.ENGINE"])
def test_tensorrt_engines_say_what_is_missing(name, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    (tmp_path / name).write_bytes(b"ftrt".ljust(64, b"\0"))
    with pytest.raises(BackendNotAvailableError, match="needs TensorRT's Python bindings"):
        load(tmp_path / name)
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(EngineError, match="0 bytes, which is no TensorRT engine"):
        load(tmp_path / name)
    with pytest.raises(EngineError, match="cannot read"):
        load(tmp_path / "none" / name)


def test_a_closed_engine_is_not_run():
    x = torch.randn(2, 3)
    with OnnxEngine(unary("Neg", shape=[2, 3])) as engine:
        assert torch.equal(engine(x), -x)
    for given in (x, torch.randn(3, 2).t(), x.requires_grad_()):
        with pytest.raises(EngineError, match="is closed; load it again"):
            engine(given)
    engine.close()


def test_options_of_tensorrt_are_not_for_onnx_files(tmp_path):
    onnx.save(unary("Neg"), tmp_path / "net.onnx")
    with pytest.raises(EngineError, match="engines of TensorRT"):
        load(tmp_path / "net.onnx", trusted=True)
    with pytest.raises(UnsupportedError, match="cuda_graphs is for engines on CUDA, and this one is on cpu"):
        load(tmp_path / "net.onnx", device="cpu", cuda_graphs=4)


def test_not_a_model_at_all():
    with pytest.raises(EngineError, match=r"onnx\.ModelProto, got Linear"):
        OnnxEngine(torch.nn.Linear(1, 1))


def test_operators_and_types_that_cannot_run(capfd):
    with pytest.raises(EngineError, match="NoSuchOperator"):
        OnnxEngine(unary("NoSuchOperator"))
    with pytest.raises(UnsupportedError, match=r"'x' is a tensor\(string\)"):
        OnnxEngine(unary("Identity", TensorProto.STRING))
    sequence = helper.make_tensor_sequence_value_info("y", FLOAT, None)
    with pytest.raises(UnsupportedError, match=r"'y' is a seq\(tensor\(float\)\)"):
        OnnxEngine(make([node("SequenceConstruct", ["x"], ["y"])], [value("x", FLOAT, [2])], [sequence]))
    newer = unary("Neg")
    newer.ir_version = 99
    with pytest.raises(EngineError, match="IR version"):
        OnnxEngine(newer)
    assert capfd.readouterr() == ("", "")


def functions(calls: dict[str, list[str]]) -> onnx.ModelProto:
    """A model that calls the function A; each function calls others, one after the other."""
    imports = [helper.make_opsetid("", 19), helper.make_opsetid("own", 1)]
    model = make([node("A", ["x"], ["y"], domain="own")], [value("x", FLOAT, [2])], [value("y", FLOAT, [2])])
    model.opset_import.append(imports[1])
    for name, called in calls.items():
        chain = [f"v{i}" for i in range(len(called) + 1)]
        domains = ["own" if other in calls else "" for other in called]
        nodes = [node(c, [chain[i]], [chain[i + 1]], domain=domains[i]) for i, c in enumerate(called)]
        model.functions.append(helper.make_function("own", name, chain[:1], chain[-1:], nodes, imports))
    return model


def test_functions_that_call_themselves():
    for called in ({"A": ["A"]}, {"A": ["B"], "B": ["Neg", "C"], "C": ["B"]}, {"A": ["Neg"], "B": ["B"]}):
        with pytest.raises(EngineError, match="must not be recursive"):
            OnnxEngine(functions(called))


def test_functions_that_multiply():
    doubling = {"A": ["F0", "F0"], **{f"F{i}": [f"F{i + 1}"] * 2 for i in range(40)}, "F40": ["Neg"]}
    with pytest.raises(EngineError, match="unfolded it has 2,199,023,255,552"):
        OnnxEngine(functions(doubling))
    few = {"A": ["B", "B", "Neg"], "B": ["C", "Abs"], "C": ["Neg"]}
    assert OnnxEngine(functions(few))(torch.tensor([1.0, -2.0])).tolist() == [-1.0, -2.0]


def damaged(content: bytes, rng: random.Random) -> bytes:
    data = bytearray(content)
    kind = rng.choice(["cut", "flip", "flip", "flip", "drop", "insert", "noise"])
    at = rng.randrange(len(data))
    if kind == "cut":
        del data[at:]
    elif kind == "drop":
        del data[at : at + rng.randrange(1, 30)]
    elif kind == "insert":
        data[at:at] = rng.randbytes(rng.randrange(1, 30))
    elif kind == "noise":
        return rng.randbytes(rng.randrange(200))
    else:
        for _ in range(rng.choice([1, 1, 2, 8])):
            data[rng.randrange(len(data))] = rng.randrange(256)
    return bytes(data)


@pytest.mark.parametrize("bodies", [True, False])
def test_damaged_files_load_or_say_why_not(sampler, tmp_path, bodies, capfd):
    model = onnx.ModelProto()
    model.CopyFrom(sampler[0])
    if not bodies:
        strip(model)
    content = model.SerializeToString()
    rng = random.Random(0)
    refused = 0
    for number in range(250):
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(damaged(content, rng))
        try:
            load(path)
        except SvexportError:
            refused += 1
        path.unlink()
    assert refused > 100
    assert capfd.readouterr().out == ""


# --------------------------------------------------------------------------------------------------------- backends


def test_without_onnx_runtime(monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(BackendNotAvailableError, match="pip install onnx onnxruntime"):
        OnnxEngine(unary("Neg"))


def test_it_is_imported_on_first_use():
    code = "import sys, svexport.runtime; print([m for m in ('onnx', 'onnxruntime', 'tensorrt') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_devices():
    assert OnnxEngine(unary("Neg"), device="cpu").device.type == "cpu"
    assert OnnxEngine(unary("Neg"), device=torch.device("cpu")).device.type == "cpu"
    with pytest.raises(EngineError, match='"cuda:1"'):
        OnnxEngine(unary("Neg"), device="tpu")
    with pytest.raises(UnsupportedError, match="mps"):
        OnnxEngine(unary("Neg"), device="mps")


HAS_CUDA = torch.cuda.is_available() and "CUDAExecutionProvider" in onnxruntime.get_available_providers()


@pytest.mark.skipif(HAS_CUDA, reason="this machine has CUDA")
def test_cuda_where_there_is_none():
    assert OnnxEngine(unary("Neg")).device.type == "cpu"
    with pytest.raises(BackendNotAvailableError, match="onnxruntime-gpu"):
        OnnxEngine(unary("Neg"), device="cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="needs a CUDA GPU, torch with CUDA and onnxruntime-gpu")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bool, torch.int64])
def test_cuda(dtype):
    engine = OnnxEngine(unary("Identity", DTYPES[dtype]))
    assert engine.device.type == "cuda"
    x = torch.randint(0, 2, (300, 4)).to(dtype).cuda()
    for given in (x, x.cpu(), x.t().contiguous().t()):
        y = engine(given)
        assert y.device == engine.device
        assert torch.equal(y, x)
    with Copies() as copies:
        engine(x)
    assert copies.found == []
