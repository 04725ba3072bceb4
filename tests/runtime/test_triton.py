"""Triton model repositories, parsed by Triton's published protobuf, and its client against a stand-in server."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import svexport
from svexport import EngineError, UnsupportedError
from svexport.graph.nodes import svexport_nodes
from svexport.runtime.triton import TritonRepository
from svexport.runtime.triton_config import pbtxt
from tests.tensorrt.models import Sampler, exported
from tests.tensorrt.reference import Reference

BATCH = {0: "batch"}


def published() -> Path | None:
    """The folder of tritonclient, whichever has it: this Python, or one that make test has put beside it."""
    found = importlib.util.find_spec("tritonclient")
    folders = [Path(p) for p in (found.submodule_search_locations or ())] if found else []
    folders += sorted(Path(sys.prefix).glob("tensorrt-*/tritonclient"))
    return next((folder for folder in folders if (folder / "grpc" / "model_config_pb2.py").is_file()), None)


@pytest.fixture(scope="module")
def protobuf() -> Any:
    """The module of messages, without the gRPC around it."""
    folder = published()
    if folder is None:
        pytest.skip(f"no tritonclient in {sys.prefix}: make test installs it")
    spec = importlib.util.spec_from_file_location("model_config_pb2", folder / "grpc" / "model_config_pb2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def parse(protobuf: Any) -> Callable[[Path], Any]:
    """A configuration as the published message, held to what the server's own sources ask of one."""
    from google.protobuf import text_format

    def parse(folder: Path) -> Any:
        config = text_format.Parse((folder / "config.pbtxt").read_text(encoding="utf-8"), protobuf.ModelConfig())
        assert config.name == folder.name
        assert (folder / "1").is_dir()
        for end in (*config.input, *config.output):
            assert end.name
            assert end.data_type != protobuf.TYPE_INVALID
            assert len(end.dims) > 0
            assert all(size >= 1 or size == -1 for size in end.dims)
            assert not (end.HasField("reshape") and not config.max_batch_size)
        if config.HasField("ensemble_scheduling"):
            assert (config.backend, config.platform) == ("", "ensemble")
            assert not config.instance_group
            assert not config.model_warmup
            assert not config.HasField("optimization")
            assert list((folder / "1").iterdir()) == []
        else:
            pair = (config.backend, config.platform)
            assert pair in (("onnxruntime", "onnxruntime_onnx"), ("tensorrt", "tensorrt_plan"))
            assert (folder / "1" / ("model.onnx" if pair[0] == "onnxruntime" else "model.plan")).is_file()
        for warmup in config.model_warmup:
            assert 1 <= warmup.batch_size <= max(config.max_batch_size, 1)
            for end in config.input:
                given = warmup.inputs[end.name]
                assert given.data_type == end.data_type
                assert all(a == b or b == -1 for a, b in zip(given.dims, end.dims, strict=True))
                assert -1 not in given.dims
        return config

    return parse


def dims(ends: Any) -> dict[str, list[int]]:
    return {end.name: list(end.dims) for end in ends}


def file_of(function: Callable[..., Any], path: Path, *args: Tensor, **options: Any) -> Path:
    class Model(nn.Module):
        def forward(self, *args: Tensor) -> Any:
            return function(*args)

    svexport.export(Model(), args, path, verify="quick", **options)
    return path


@pytest.fixture(scope="module")
def sampler(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    return exported(
        Sampler(), tmp_path_factory.mktemp("t") / "sampler.onnx", dynamic_shapes={"image": BATCH, "grid": BATCH}
    )


def test_an_onnx_file(sampler: Path, tmp_path: Path, parse: Callable[[Path], Any]) -> None:
    made = svexport.triton_repository(tmp_path / "models", sampler, instances=2, max_batch_size=16)
    config = parse(tmp_path / "models" / "sampler")
    assert config.max_batch_size == 16
    assert dims(config.input) == {"image": [3, 8, 8], "grid": [5, 5, 2]}
    assert list(dims(config.output).values()) == [[4], [4, 5, 5], [4]]
    assert config.instance_group[0].count == 2
    assert config.dynamic_batching.max_queue_delay_microseconds == 100
    accelerator = config.optimization.execution_accelerators.gpu_execution_accelerator[0]
    assert (accelerator.name, dict(accelerator.parameters)) == ("cuda", {"use_tf32": "0"})
    assert [warmup.batch_size for warmup in config.model_warmup] == [1, 16]
    served = tmp_path / "models" / "sampler" / "1" / "model.onnx"
    model = onnx.load(served)
    assert not list(svexport_nodes(model))  # for an ONNX Runtime of any age
    assert not model.functions
    args = torch.randn(3, 3, 8, 8), torch.rand(3, 5, 5, 2)
    for a, b in zip(svexport.load(served)(*args), svexport.load(sampler)(*args), strict=True):
        torch.testing.assert_close(a, b)
    assert made.command.startswith(f"docker run --rm --gpus all -p 8000:8000 -p 8001:8001 -v {tmp_path / 'models'}:")
    assert "sampler" in str(made)
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]


def test_a_plan(
    sampler: Path, tmp_path: Path, parse: Callable[[Path], Any], tensorrt: Callable[..., Reference]
) -> None:
    tensorrt()
    shapes = {"image": ((1, 3, 8, 8), (2, 3, 8, 8), (6, 3, 8, 8))}
    svexport.build(sampler, tmp_path / "m.plan", shapes=shapes).close()
    made = svexport.triton_repository(tmp_path / "models", {"sampler": tmp_path / "m.plan"}, device="cuda:1")
    config = parse(tmp_path / "models" / "sampler")
    assert config.max_batch_size == 6
    assert list(config.instance_group[0].gpus) == [1]
    assert not config.HasField("optimization")
    assert (tmp_path / "models/sampler/1/model.plan").read_bytes() == (tmp_path / "m.plan").read_bytes()
    assert any("10.16.1" in note for note in made.notes)
    assert "version-compatible" not in made.command
    with pytest.raises(EngineError, match="built for batches up to 6, got max_batch_size 7"):
        svexport.triton_repository(tmp_path / "more", tmp_path / "m.plan", max_batch_size=7)
    with pytest.raises(UnsupportedError, match="runs on a GPU"):
        svexport.triton_repository(tmp_path / "more", tmp_path / "m.plan", device="cpu")
    again = svexport.triton_repository(tmp_path / "again", tmp_path / "m.plan", trusted=True)
    assert again.command.endswith("--backend-config=tensorrt,version-compatible=true")


def test_plans_that_take_no_single_rows(
    sampler: Path, tmp_path: Path, parse: Callable[[Path], Any], tensorrt: Callable[..., Reference]
) -> None:
    tensorrt()
    svexport.build(sampler, tmp_path / "m.plan", shapes={"image": ((4, 3, 8, 8),) * 3}).close()
    made = svexport.triton_repository(tmp_path / "models", tmp_path / "m.plan")
    config = parse(tmp_path / "models" / "m")
    assert config.max_batch_size == 0
    assert config.input[0].dims[0] == -1
    assert any("built for batches from 4 on" in note for note in made.notes)


ROWS: dict[str, tuple[Callable[..., Any], str]] = {
    "mean over the batch": (lambda x: x - x.mean(0), "depends on the other rows"),
    "another first axis": (lambda x: x.flatten()[: x.shape[0] * 2], "it is no batch|different sizes"),
    "sum": (lambda x: x.sum(0, keepdim=True) + x[:1], "is of one size"),
    "no axes": (lambda x: x.sum(), "is of one size"),
    "largest of all": (lambda x: torch.where(x.abs().max() > 50, x * 2, x), "depends on the other rows"),
    "not finite": (lambda x: x / 0 * 0, "is not finite"),
}


@pytest.mark.parametrize("kind", ROWS)
def test_rows_that_are_not_computed_alone_are_not_batched(
    tmp_path: Path, parse: Callable[[Path], Any], kind: str
) -> None:
    function, reason = ROWS[kind]
    file_of(function, tmp_path / "m.onnx", torch.randn(4, 6), input_names=["x"], dynamic_shapes=({0: "batch"},))
    made = svexport.triton_repository(tmp_path / "models", tmp_path / "m.onnx")
    config = parse(tmp_path / "models" / "m")
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert dims(config.input) == {"x": [-1, 6]}
    assert any(note.startswith("m is not batched") for note in made.notes)
    with pytest.raises(EngineError, match=f"m cannot be batched, and max_batch_size is 4.*({reason})"):
        svexport.triton_repository(tmp_path / "more", tmp_path / "m.onnx", max_batch_size=4)
    assert not (tmp_path / "more").exists()


def test_open_sizes_need_a_typical_shape(tmp_path: Path, parse: Callable[[Path], Any]) -> None:
    axes = ({0: "batch", 2: "height"},)
    file_of(lambda x: x.relu(), tmp_path / "m.onnx", torch.randn(2, 3, 8), input_names=["x"], dynamic_shapes=axes)
    made = svexport.triton_repository(tmp_path / "a", tmp_path / "m.onnx")
    assert parse(tmp_path / "a" / "m").max_batch_size == 0
    assert sum("give shapes" in note for note in made.notes) == 2
    svexport.triton_repository(tmp_path / "b", tmp_path / "m.onnx", shapes={"x": (1, 3, 20)})
    config = parse(tmp_path / "b" / "m")
    assert config.max_batch_size == 8
    assert dims(config.input) == {"x": [3, -1]}
    assert list(config.model_warmup[0].inputs["x"].dims) == [3, 20]
    for wrong in ({"y": (1, 3, 20)}, {"x": (1, 4, 20)}, {"x": (3, 20)}, {"x": "1x3x20"}, {"x": (0, 3, 1)}):
        with pytest.raises(EngineError, match="shapes "):
            svexport.triton_repository(tmp_path / "c", tmp_path / "m.onnx", shapes=wrong)


def test_tensors_of_few_axes(tmp_path: Path, parse: Callable[[Path], Any]) -> None:
    def rows(x: Tensor, k: Tensor) -> Tensor:
        return x * k

    file_of(rows, tmp_path / "b.onnx", torch.randn(2), torch.randn(2), dynamic_shapes=((BATCH, BATCH),))
    file_of(rows, tmp_path / "s.onnx", torch.randn(3), torch.tensor(2.0))
    svexport.triton_repository(tmp_path / "models", [tmp_path / "b.onnx", tmp_path / "s.onnx"])
    batched, single = parse(tmp_path / "models" / "b"), parse(tmp_path / "models" / "s")
    assert all(list(end.dims) == [1] and list(end.reshape.shape) == [] for end in batched.input)
    assert all(end.HasField("reshape") for end in (*batched.input, *batched.output))
    assert [list(end.dims) for end in single.input] == [[3], [1]]
    assert not any(end.HasField("reshape") for end in single.input)


def model_of(
    dtype: int = TensorProto.FLOAT, shape: Any = (2, 3), op: str = "Transpose", name: str = "x"
) -> onnx.ModelProto:
    ends = [helper.make_tensor_value_info(n, dtype, shape) for n in (name, "y")]
    graph = helper.make_graph([helper.make_node(op, [name], ["y"])], "g", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def test_data_types(tmp_path: Path, parse: Callable[[Path], Any], protobuf: Any) -> None:
    types = {"BOOL": "BOOL", "UINT8": "UINT8", "UINT16": "UINT16", "UINT32": "UINT32", "UINT64": "UINT64",
             "INT8": "INT8", "INT16": "INT16", "INT32": "INT32", "INT64": "INT64", "FLOAT16": "FP16",
             "FLOAT": "FP32", "DOUBLE": "FP64", "BFLOAT16": "BF16"}  # fmt: skip
    engines = {name.lower(): model_of(getattr(TensorProto, name)) for name in types}
    made = svexport.triton_repository(tmp_path / "models", engines)
    for name, kind in types.items():
        config = parse(tmp_path / "models" / name.lower())
        assert protobuf.DataType.Name(config.input[0].data_type) == f"TYPE_{kind}"
        compile(made.client(name.lower()), "client.py", "exec")
    for number, name in enumerate(("INT4", "FLOAT8E4M3FN", "STRING")):
        with pytest.raises(UnsupportedError, match="engines exchange"):
            svexport.triton_repository(tmp_path / f"no{number}", model_of(getattr(TensorProto, name)))
        assert not (tmp_path / f"no{number}").exists()


def test_what_triton_does_not_have(tmp_path: Path, tensorrt: Callable[..., Reference]) -> None:
    with pytest.raises(UnsupportedError, match="no empty tensors"):
        svexport.triton_repository(tmp_path / "a", model_of(shape=(0, 3)))
    with pytest.raises(UnsupportedError, match="no fixed rank"):
        svexport.triton_repository(tmp_path / "a", model_of(shape=None))
    graph = helper.make_graph(
        [helper.make_node("Constant", [], ["y"], value_float=1.0)],
        "g",
        [],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [])],
    )
    nothing = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    with pytest.raises(UnsupportedError, match="takes no inputs"):
        svexport.triton_repository(tmp_path / "a", nothing)
    tensorrt()
    with svexport.build(model_of(shape=()), tmp_path / "m.plan"):
        pass
    with pytest.raises(UnsupportedError, match="has no axes"):
        svexport.triton_repository(tmp_path / "a", tmp_path / "m.plan")
    with svexport.build(model_of()) as engine, pytest.raises(EngineError, match="copied from its file"):
        svexport.triton_repository(tmp_path / "a", {"m": engine})
    assert [p.name for p in tmp_path.iterdir() if p.name == "a" or p.name.startswith(".a")] == []


def test_any_name_of_a_tensor(tmp_path: Path, parse: Callable[[Path], Any]) -> None:
    name = 'a "quoted"\\path\n/größe\t'
    svexport.triton_repository(tmp_path / "models", {"m": model_of(name=name)})
    assert parse(tmp_path / "models" / "m").input[0].name == name
    assert pbtxt({"a": "ü"}) == 'a: "\\303\\274"\n'


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "batch": ({"max_batch_size": -1}, "max_batch_size expects"),
    "large batch": ({"max_batch_size": 2**31}, "max_batch_size expects"),
    "fraction": ({"max_batch_size": 1.5}, "max_batch_size expects"),
    "instances": ({"instances": 0}, "instances expects"),
    "no instances": ({"instances": None}, "instances expects"),
    "delay": ({"queue_delay": -1}, "queue_delay expects"),
    "device": ({"device": "tpu:x"}, "device expects"),
    "connect": ({"connect": {"x": "y"}}, "connect goes with"),
    "alone": ({"ensemble": "all"}, "of two models or more"),
    "connect in a list": ({"connect": ["x"], "ensemble": "all"}, "connect expects a dict"),
    "shapes in a list": ({"shapes": [1]}, "shapes expects a dict"),
    "number of an ensemble": ({"ensemble": 5}, "ensemble expects the name"),
    "number of a folder": ({"folder": 5}, "path of a folder, got 5"),
    "NUL": ({"folder": "a\0b"}, "NUL"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_options(tmp_path: Path, kind: str) -> None:
    options, message = WRONG[kind]
    with pytest.raises(EngineError, match=message):
        svexport.triton_repository(**{"folder": tmp_path / "a", "engines": {"m": model_of()}, **options})
    assert list(tmp_path.iterdir()) == []


def test_wrong_names_and_places(tmp_path: Path) -> None:
    for name in ("a/b", "..", ".a", "a b", "", "ü"):
        with pytest.raises(EngineError, match="the name of a model"):
            svexport.triton_repository(tmp_path / "a", {name: model_of()})
    with pytest.raises(EngineError, match="several models are named"):
        svexport.triton_repository(tmp_path / "a", {"m": model_of(), "M": model_of()})
    with pytest.raises(EngineError, match="several models are named"):
        svexport.triton_repository(tmp_path / "a", {"m": model_of(), "n": model_of()}, ensemble="m")
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        onnx.save(model_of(), tmp_path / folder / "same.onnx")
    with pytest.raises(svexport.SvexportError, match="several are named"):
        svexport.triton_repository(tmp_path / "a", [tmp_path / "one/same.onnx", tmp_path / "two/same.onnx"])
    with pytest.raises(EngineError, match="got none"):
        svexport.triton_repository(tmp_path / "a", [])
    assert not (tmp_path / "a").exists()
    with pytest.raises(EngineError, match="is not empty"):
        svexport.triton_repository(tmp_path / "one", {"m": model_of()})
    with pytest.raises(EngineError, match="is no folder"):
        svexport.triton_repository(tmp_path / "one" / "same.onnx", {"m": model_of()})
    (tmp_path / "empty").mkdir()
    svexport.triton_repository(tmp_path / "empty", {"m": model_of()})
    assert (tmp_path / "empty" / "m" / "config.pbtxt").is_file()


def test_nothing_is_left_of_what_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("svexport.graph.saving.save", full)
    with pytest.raises(EngineError, match="No space left"):
        svexport.triton_repository(tmp_path / "a", {"m": model_of()})
    assert list(tmp_path.iterdir()) == []


def test_data_beside_a_file_comes_along(tmp_path: Path, parse: Callable[[Path], Any]) -> None:
    linear = nn.Linear(64, 64)
    file_of(lambda x: linear(x), tmp_path / "m.onnx", torch.randn(2, 64))
    model = onnx.load(tmp_path / "m.onnx")
    (tmp_path / "src").mkdir()
    onnx.save(model, tmp_path / "src/m.onnx", save_as_external_data=True, location="w.bin", size_threshold=0)
    svexport.triton_repository(tmp_path / "models", tmp_path / "src/m.onnx")
    shutil.rmtree(tmp_path / "src")
    x = torch.randn(2, 64)
    torch.testing.assert_close(svexport.load(tmp_path / "models/m/1/model.onnx")(x), linear(x))


def test_quantizers_are_noted(tmp_path: Path) -> None:
    file_of(
        lambda x: torch.fake_quantize_per_tensor_affine(x, 0.02, 0, -128, 127),
        tmp_path / "m.onnx",
        torch.randn(2, 3),
        opset=17,
    )
    made = svexport.triton_repository(tmp_path / "models", tmp_path / "m.onnx")
    assert any("a quantizer's step off" in note for note in made.notes)


# ---------------------------------------------------------------------------------------------------------- ensembles


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A preprocessing and a model: bytes to pixels, images to scores."""
    folder = tmp_path_factory.mktemp("pair")
    raw = torch.randint(0, 255, (2, 3, 8, 8), dtype=torch.uint8)
    first = file_of(lambda raw: raw.float() / 255, folder / "prepare.onnx", raw, input_names=["raw"],
                    output_names=["pixels"], dynamic_shapes=({0: "batch"},))  # fmt: skip
    second = file_of(lambda x: (x.mean((2, 3)), x.amax((1, 2, 3))), folder / "model.onnx", raw.float(),
                     input_names=["images"], output_names=["scores", "best"],
                     dynamic_shapes=({0: "batch"},))  # fmt: skip
    return {"prepare": first, "model": second}


def test_an_ensemble(pair: dict[str, Path], tmp_path: Path, parse: Callable[[Path], Any]) -> None:
    made = svexport.triton_repository(tmp_path / "models", pair, ensemble="all", connect={"images": "pixels"})
    config = parse(tmp_path / "models" / "all")
    assert config.max_batch_size == 8
    assert dims(config.input) == {"raw": [3, 8, 8]}
    assert dims(config.output) == {"scores": [3], "best": [1]}
    assert not any(end.HasField("reshape") for end in config.output)  # the server compares with the steps' dims
    first, second = config.ensemble_scheduling.step
    assert (first.model_name, first.model_version) == ("prepare", -1)
    assert dict(first.input_map) == {"raw": "raw"}
    assert dict(second.input_map) == {"images": dict(first.output_map)["pixels"]}
    assert dict(second.output_map) == {"scores": "scores", "best": "best"}
    assert list(made.models) == ["prepare", "model", "all"]


def test_tensors_of_one_name(tmp_path: Path, parse: Callable[[Path], Any]) -> None:
    """Every output is used or handed out, each under a name of its own."""
    batch = ({0: "batch"},)
    x = torch.randn(2, 3)
    names = {"input_names": ["x"], "output_names": ["y", "z"], "dynamic_shapes": batch}
    engines = {name: file_of(lambda x: (x + 1, x * 2), tmp_path / f"{name}.onnx", x, **names) for name in "abc"}
    options = {"ensemble": "all", "connect": {"b.x": "y", "c.x": "a.y"}}
    svexport.triton_repository(tmp_path / "models", engines, **options)
    a, b, c = parse(tmp_path / "models" / "all").ensemble_scheduling.step
    assert dict(a.output_map) == {"y": "y", "z": "z"}
    assert dict(b.input_map) == dict(c.input_map) == {"x": "y"}
    assert dict(b.output_map) == {"y": "b.y", "z": "b.z"}
    outputs = [end.name for end in parse(tmp_path / "models" / "all").output]
    assert outputs == ["z", "b.y", "b.z", "c.y", "c.z"]


def test_wrong_ensembles(pair: dict[str, Path], tmp_path: Path) -> None:
    def fails(match: str, engines: Any = pair, **options: Any) -> None:
        with pytest.raises(EngineError, match=match):
            svexport.triton_repository(tmp_path / "a", engines, ensemble="all", **options)
        assert list(tmp_path.iterdir()) == []

    fails("model takes nothing of what the models before it return.*pixels.*images")
    fails("'images' of model from 'none', which no model before it returns.*pixels", connect={"images": "none"})
    fails("connect names 'bogus'", connect={"images": "pixels", "bogus": "pixels"})
    fails("cannot be one tensor", connect={"images": "pixels"}, engines={**pair, "model": model_of(name="images")})
    fails("from 'scores'", dict(reversed(pair.items())), connect={"images": "scores"})


def test_one_model_that_is_not_batched_keeps_all_from_it(
    pair: dict[str, Path], tmp_path: Path, parse: Callable[[Path], Any]
) -> None:
    mixing = file_of(lambda s: s - s.mean(0), tmp_path / "m.onnx", torch.randn(2, 3), input_names=["scores"],
                     output_names=["last"], dynamic_shapes=({0: "batch"},))  # fmt: skip
    engines = {**pair, "mixing": mixing}
    made = svexport.triton_repository(tmp_path / "models", engines, ensemble="all", connect={"images": "pixels"})
    for name in made.models:
        config = parse(tmp_path / "models" / name)
        assert config.max_batch_size == 0
        assert all(end.dims[0] == -1 for end in (*config.input, *config.output))
    assert any("because another model of all cannot be" in note for note in made.notes)


# ------------------------------------------------------------------------------------------------------------- client


class Server(BaseHTTPRequestHandler):
    """As much of the inference protocol as a client's request needs: binary tensors in, binary tensors out."""

    engines: dict[str, Any]

    def do_POST(self) -> None:
        length, total = int(self.headers["Inference-Header-Content-Length"]), int(self.headers["Content-Length"])
        body = self.rfile.read(total)
        request, data = json.loads(body[:length]), body[length:]
        name = self.path.split("/")[3]
        tensors: dict[str, Tensor] = {}
        for one in request["inputs"]:
            size = one["parameters"]["binary_data_size"]
            dtype = {"FP32": np.float32, "UINT8": np.uint8}[one["datatype"]]
            tensors[one["name"]] = torch.from_numpy(np.frombuffer(data[:size], dtype).reshape(one["shape"]).copy())
            data = data[size:]
        engine = self.engines[name]
        results = dict(zip(engine.output_names, engine.run([tensors[n] for n in engine.input_names]), strict=True))
        raw = {n: t.numpy().tobytes() for n, t in results.items()}
        outputs = [
            {"name": n, "datatype": "FP32", "shape": list(t.shape), "parameters": {"binary_data_size": len(raw[n])}}
            for n, t in results.items()
        ]
        head = json.dumps({"model_name": name, "outputs": outputs}).encode()
        content = head + b"".join(raw.values())
        self.send_response(200)
        self.send_header("Inference-Header-Content-Length", str(len(head)))
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def address(sampler: Path) -> Iterator[str]:
    Server.engines = {"sampler": svexport.load(sampler)}
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def test_the_client_asks_for_a_result(sampler: Path, tmp_path: Path, address: str) -> None:
    """The published client's own request and reading of the answer; in the place of the server, ONNX Runtime."""
    folder = published()
    path = os.pathsep.join([str(folder.parent)] if folder else [])
    env = {**os.environ, "PYTHONPATH": path}
    if subprocess.run([sys.executable, "-c", "import tritonclient.http"], env=env, capture_output=True).returncode:
        pytest.skip("needs tritonclient[http]")
    made = svexport.triton_repository(tmp_path / "models", sampler)
    program = made.client("sampler").replace("localhost:8000", address)
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[0] == "scores (1, 4)"


def test_the_client_fits_the_configuration(sampler: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same program on a client that looks at what it is asked."""
    made = svexport.triton_repository(tmp_path / "models", sampler)
    engine = svexport.load(sampler)

    class Input:
        def __init__(self, name: str, shape: list[int], kind: str) -> None:
            self.name, self.shape, self.kind = name, shape, kind

        def set_data_from_numpy(self, array: np.ndarray) -> None:
            assert (list(array.shape), array.dtype, self.kind) == (self.shape, np.float32, "FP32")
            self.data = torch.from_numpy(array)

    class Client:
        def __init__(self, url: str) -> None:
            assert url == "localhost:8000"

        def infer(self, model: str, inputs: list[Input]) -> Any:
            assert model == "sampler"
            self.results = engine(**{one.name: one.data for one in inputs})
            return self

        def as_numpy(self, name: str) -> np.ndarray:
            return self.results[name].numpy()

    http = type(sys)("tritonclient.http")
    http.InferInput, http.InferenceServerClient = Input, Client  # type: ignore[attr-defined]
    package = type(sys)("tritonclient")
    package.http = http  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tritonclient", package)
    monkeypatch.setitem(sys.modules, "tritonclient.http", http)
    exec(compile(made.client("sampler"), "client.py", "exec"), {})  # noqa: S102 - what is written for a user to run
    with pytest.raises(EngineError, match="no model is named 'other'; there are sampler"):
        made.client("other")
    assert isinstance(made, TritonRepository)
