"""svexport's kernels in ONNX Runtime on CUDA: every node, whole models, streams, threads and refusals."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper
from torch import Tensor, nn

import svexport
from svexport.cli._model import load_file
from svexport.errors import EngineError, PluginBuildError
from svexport.ops._einsum.labels import parse
from svexport.ops._op import OPS, Op, as_tuple
from svexport.ops.grid_sample import OP as GRID_SAMPLE
from svexport.runtime import OnnxEngine
from svexport.runtime.kernels import find_headers
from svexport.tensorrt.nodes import plugin_ops
from svexport.tracing.arguments import leaves
from tests.gpu.support import TOLERANCES, gpu, moved, relative_error
from tests.ops.test_every_op import cases, flat, samples
from tests.support import op_model

EXAMPLES = Path(__file__).parents[2] / "examples"


def missing() -> str:
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "needs onnxruntime-gpu"
    try:
        find_headers()
    except PluginBuildError as error:
        return str(error)
    return ""


pytestmark = [*gpu, pytest.mark.skipif(bool(missing()), reason=missing())]

KERNELS = {op.name for op in plugin_ops()} | {"einsum"}
every_sample = pytest.mark.parametrize(("op", "index"), [case for case in cases() if case.values[0].name in KERNELS])


def engine_of(model: onnx.ModelProto, **options: Any) -> OnnxEngine:
    return OnnxEngine(model, device="cuda", kernels=True, **options)


def has_kernel(op: Op, args: tuple) -> bool:
    """Of an einsum, where there are two tensors, without a label twice, and a sum over labels that both have."""
    if op.name != "einsum":
        return True
    _, labels, ranks = args
    terms = [labels[sum(ranks[:i]) : sum(ranks[: i + 1])] for i in range(len(ranks))]
    unique = all(len(set(term)) == len(term) for term in terms)
    return len(ranks) == 3 and unique and bool(set(terms[0]) & set(terms[1]) - set(terms[2]))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@every_sample
def test_every_node(op: Op, index: int, dtype: torch.dtype, dynamic: bool) -> None:
    args = samples(op, dtype, 1)[index]
    engine = engine_of(op_model(op, args, 17, lowered=False, dynamic=dynamic))
    assert engine.kernels == (("node",) if has_kernel(op, args) else ())
    outputs = engine.run([t.cuda() for t in flat(args)])
    expected = as_tuple(op.reference(*moved(args, torch.float64)))
    for actual, same_type, wanted in zip(outputs, as_tuple(op.reference(*args)), expected, strict=True):
        assert actual.dtype == same_type.dtype
        assert relative_error(actual, wanted) < TOLERANCES[dtype]


EQUATIONS = [
    ("nctw,cd->ndtw", (7, 64, 13, 25), (64, 96)),
    ("nkctv,kvw->nctw", (5, 3, 32, 31, 25), (3, 25, 25)),
    ("nctw,ndtw->cd", (4, 32, 30, 25), (4, 48, 30, 25)),
    ("bhnm,bdhm->bdhn", (2, 3, 5, 4), (2, 6, 3, 4)),
    ("zij,yzjk->yzik", (1, 3, 4), (5, 7, 4, 2)),
    ("zij,zjk->zik", (20011, 3, 5), (20011, 5, 2)),
    ("i,i->", (1009,), (1009,)),
    ("abcd,efcd->abef", (2, 3, 5, 7), (3, 1, 5, 7)),
    ("ij,jk->ki", (1, 17), (17, 1)),
    ("bij,jk->bik", (0, 3, 5), (5, 2)),
    ("bij,jk->bik", (2, 3, 0), (0, 4)),
    ("ai,i->a", (3, 1), (11,)),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("equation", "left", "right"), EQUATIONS)
def test_einsum_of_any_shape(equation: str, left: tuple[int, ...], right: tuple[int, ...], dtype: torch.dtype) -> None:
    args = parse(equation, (len(left), len(right)))
    operands = [torch.randn(left).to(dtype), torch.randn(right).to(dtype)]
    model = op_model(OPS["einsum"], (operands, *map(list, args)), 17, lowered=False, dynamic=True)
    engine = engine_of(model)
    assert engine.kernels == ("node",)
    [output] = engine.run([t.cuda() for t in operands])
    wanted = torch.einsum(equation, *(t.double() for t in operands))
    assert relative_error(output, wanted) < TOLERANCES[dtype]


def images(n: int, channels: int = 5) -> tuple[Tensor, Tensor]:
    return torch.randn(n, channels, 37, 41), torch.rand(n, 11, 13, 2) * 2.4 - 1.2


def grid_sampler(dtype: torch.dtype = torch.float32) -> OnnxEngine:
    image, grid = images(2)
    return engine_of(op_model(GRID_SAMPLE, (image.to(dtype), grid, 0, 0, False, 1.0), 17, lowered=False, dynamic=True))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_batches_from_none_on(n: int) -> None:
    image, grid = images(n)
    output = grid_sampler()(image.cuda(), grid.cuda())
    torch.testing.assert_close(output.cpu(), nn.functional.grid_sample(image, grid, align_corners=False))


def test_what_does_not_fit_is_an_error_and_the_engine_goes_on() -> None:
    engine = grid_sampler()
    image, grid = images(2)
    with pytest.raises(EngineError, match=r"svexport::SvGridSample_FLOAT: input and grid differ in N"):
        engine(image.cuda(), grid[:1].cuda())
    output = engine(image.cuda(), grid.cuda())
    torch.testing.assert_close(output.cpu(), nn.functional.grid_sample(image, grid, align_corners=False))


def check_order(engine: OnnxEngine, runs: int = 30) -> None:
    """Inputs written just before, outputs read just after, memory of both used again at once."""
    _, grid = images(1)
    grid = grid.clamp(-0.9, 0.9).cuda()
    for i in range(runs):
        image = torch.randn(256, 1024, 64, device="cuda").sort(dim=1).values.mean() * 0 + torch.full(
            (1, 5, 37, 41), float(i), device="cuda"
        )
        output = engine(image, grid)
        del image
        torch.full((1, 5, 37, 41), -1.0, device="cuda")  # where the image was
        assert bool((output - i).abs().max() < 1e-4)


def test_on_the_default_stream_and_others() -> None:
    engine = grid_sampler()
    check_order(engine)
    with torch.cuda.stream(torch.cuda.Stream()):
        check_order(engine)


def test_threads_on_streams_of_their_own() -> None:
    engine = grid_sampler()
    wrong: list[BaseException] = []

    def work(own: bool) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream() if own else None):
                check_order(engine, 10)
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_engines_come_and_go_while_kernels_run() -> None:
    image, grid = (t.cuda() for t in images(16, 64))
    expected = nn.functional.grid_sample(image, grid, align_corners=False)
    for _ in range(10):
        output = grid_sampler()(image, grid)  # whose session is gone by now
        torch.testing.assert_close(output, expected)


def test_closed_and_left_open_at_exit(tmp_path: Path) -> None:
    engine = grid_sampler()
    image, grid = (t.cuda() for t in images(2))
    output = engine(image, grid)
    engine.close()
    engine.close()
    torch.testing.assert_close(output, nn.functional.grid_sample(image, grid, align_corners=False))
    with pytest.raises(EngineError, match="is closed"):
        engine(image, grid)
    onnx.save(op_model(GRID_SAMPLE, (*images(2), 0, 0, False, 1.0), 17, lowered=False), tmp_path / "m.onnx")
    program = (
        "import sys, torch, svexport\n"
        "engine = svexport.load(sys.argv[1], device='cuda', kernels=True)\n"
        "for _ in range(20): kept = engine(torch.randn(2, 5, 37, 41).cuda(), torch.rand(2, 11, 13, 2).cuda())\n"
    )
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", program, str(tmp_path / "m.onnx")], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_sessions_whose_nodes_copy_from_the_host_come_and_go(tmp_path: Path) -> None:
    """Concat of uneven sizes copies pointers to the device from buffers that are let go after the run."""
    shapes = {"a": [3, 5], "b": [3, 7], "c": [3, 1], "d": [3, 13]}
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    graph = helper.make_graph([helper.make_node("Concat", list("abc"), ["d"], axis=1)], "m", infos[:3], infos[3:])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), tmp_path / "m.onnx")
    program = (
        "import sys, torch, svexport\n"
        "given = [torch.randn(3, n).cuda() for n in (5, 7, 1)]\n"
        "for _ in range(30):\n"
        "    engine = svexport.load(sys.argv[1], device='cuda')\n"
        "    for _ in range(20): output = engine(*given)\n"
        "    assert torch.equal(output, torch.cat(given, 1))\n"
        "    engine.close()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "m.onnx")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")


def product() -> tuple[onnx.ModelProto, tuple[Tensor, Tensor]]:
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [384, 384]) for name in "abc"]
    graph = helper.make_graph([helper.make_node("MatMul", ["a", "b"], ["c"])], "graph", infos[:2], infos[2:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    return model, (torch.randn(384, 384, device="cuda"), torch.randn(384, 384, device="cuda"))


def test_float32_is_float32_unless_tf32_is_asked_for() -> None:
    model, (a, b) = product()
    exact = a.double() @ b.double()
    assert relative_error(OnnxEngine(model, device="cuda")(a, b), exact) < 1e-6
    assert relative_error(OnnxEngine(model, device="cuda", precision="tf32")(a, b), exact) > 1e-5


def test_a_model_without_nodes_is_as_without_kernels() -> None:
    model, (a, b) = product()
    engine = engine_of(model)
    assert engine.kernels == ()
    assert relative_error(engine(a, b), a.double() @ b.double()) < 1e-6


def example(name: str) -> tuple[nn.Module, dict[str, Any]]:
    make: Callable[..., nn.Module] = load_file(EXAMPLES / f"{name}.py").model
    return (make("small"), {}) if name == "detr3d" else (make(frames=64), {"plugins": ["einsum"]})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", ["detr3d", "stgcn"])
def test_whole_models(
    name: str, swapped: bool, dtype: torch.dtype, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model, options = example(name)
    inputs = model.example_inputs
    exact = [t for _, t in leaves(model.double()(*moved(inputs, torch.float64)))]
    model.float()
    used = svexport.replace(model, inputs, verbose=False) if swapped else model
    half = {} if dtype is torch.float32 else {"dtype": dtype}
    svexport.export(used, inputs, tmp_path / "m.onnx", opset=17, verify=False, **half, **options)
    capfd.readouterr()
    with svexport.load(tmp_path / "m.onnx", device="cuda", kernels=True) as engine:
        assert isinstance(engine, OnnxEngine)
        assert engine.kernels
        assert capfd.readouterr() == ("", ""), "nothing is said on load"
        given = [t.cuda() for _, t in leaves(inputs)]
        outputs = engine.run(given)
        again = engine.run(given)
    bodies = svexport.load(tmp_path / "m.onnx", device="cuda").run(given)
    for output, same, body, wanted in zip(outputs, again, bodies, exact, strict=True):
        torch.testing.assert_close(output, same)
        error = relative_error(output, wanted)
        # In half the coordinates of samples are off by pixels, in whatever runtime.
        assert error < 1e-4 if dtype is torch.float32 else error < max(1e-3, 1.2 * relative_error(body, wanted))


@pytest.mark.parametrize(("name", "swapped"), [("detr3d", False), ("detr3d", True), ("stgcn", False)])
def test_half_examples_are_near(name: str, swapped: bool, tmp_path: Path) -> None:
    model = load_file(EXAMPLES / f"{name}.py").model()
    options: dict[str, Any] = {"plugins": ["einsum"]} if name == "stgcn" else {}
    inputs = model.example_inputs
    used = svexport.replace(model, inputs, verbose=False) if swapped else model
    svexport.export(used, inputs, tmp_path / "m.onnx", opset=17, verify=False, dtype=torch.float16, **options)
    outputs = svexport.load(tmp_path / "m.onnx", device="cuda", kernels=True).run([t.cuda() for _, t in leaves(inputs)])
    exact = leaves(model.cuda().double()(*moved(moved(inputs, torch.float64), "cuda")))
    for output, (_, wanted) in zip(outputs, exact, strict=True):
        assert (output.double() - wanted).abs().max() < 1e-3 * wanted.abs().max()


# ---------------------------------------------------------------------------------------------------------- CUDA graphs


def recording(model: onnx.ModelProto, size: int = 2, **options: Any) -> OnnxEngine:
    return OnnxEngine(model, device="cuda", cuda_graphs=size, **options)


def layers(count: int = 40) -> onnx.ModelProto:
    """So many small products, which take the GPU less than the CPU takes to launch them."""
    infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 64]) for name in ("x", f"v{count}")]
    weight = helper.make_tensor("w", TensorProto.FLOAT, [64, 64], (torch.randn(64 * 64) / 8).tolist())
    names = ["x", *(f"v{i + 1}" for i in range(count))]
    nodes = [helper.make_node("MatMul", [a, "w"], [f"{b}m"]) for a, b in pairwise(names)]
    nodes += [helper.make_node("Tanh", [f"{b}m"], [b]) for b in names[1:]]
    ordered = [node for pair in zip(nodes[:count], nodes[count:], strict=True) for node in pair]
    graph = helper.make_graph(ordered, "graph", infos[:1], infos[1:], [weight])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_recorded_runs_are_those_of_the_engine() -> None:
    model = layers()
    plain, engine = OnnxEngine(model, device="cuda"), recording(model)
    for n in (3, 17, 3, 5, 17, 3):
        for _ in range(3):
            x = torch.randn(n, 64, device="cuda")
            torch.testing.assert_close(engine(x), plain(x))
    assert set(engine.info()["cuda_graphs"].values()) == {"recorded"}
    assert list(engine.info()["cuda_graphs"]) == ["17x64", "3x64"]
    engine.close()


def test_recorded_runs_cost_less_than_launches() -> None:
    model = layers(200)
    plain, engine = OnnxEngine(model, device="cuda"), recording(model)
    x = torch.randn(8, 64, device="cuda")

    def seconds(run: OnnxEngine) -> float:
        times = []
        for _ in range(30):
            start = time.perf_counter()
            run(x)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - start)
        return sorted(times)[15]

    seconds(plain), seconds(engine)
    assert seconds(engine) < 0.7 * seconds(plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_recorded_runs_of_kernels(dtype: torch.dtype) -> None:
    image, grid = images(2)
    model = op_model(GRID_SAMPLE, (image.to(dtype), grid, 0, 0, False, 1.0), 17, lowered=False, dynamic=True)
    engine = recording(model, kernels=True)
    for _ in range(5):
        image, grid = (t.cuda() for t in images(2))
        wanted = nn.functional.grid_sample(image.to(dtype).double(), grid.double(), align_corners=False)
        assert relative_error(engine(image.to(dtype), grid), wanted) < TOLERANCES[dtype]
    assert list(engine.info()["cuda_graphs"].values()) == ["recorded"]


def test_recorded_runs_in_the_order_of_streams_and_threads() -> None:
    image, grid = images(1)
    model = op_model(GRID_SAMPLE, (image, grid, 0, 0, False, 1.0), 17, lowered=False, dynamic=True)
    engine = recording(model, kernels=True)
    check_order(engine)
    with torch.cuda.stream(torch.cuda.Stream()):
        check_order(engine)
    wrong: list[BaseException] = []

    def work(own: bool) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream() if own else None):
                check_order(engine, 10)
        except BaseException as error:  # noqa: BLE001 - raised where the test waits
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(i % 2 == 0,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert list(engine.info()["cuda_graphs"].values()) == ["recorded"]


NOT_RECORDED = """
import sys, torch, onnx
from onnx import TensorProto, helper
from svexport.runtime import OnnxEngine

value, node = helper.make_tensor_value_info, helper.make_node
x = value("x", TensorProto.FLOAT, ["n"])
then = helper.make_graph([node("Neg", ["x"], ["a"])], "then", [], [value("a", TensorProto.FLOAT, ["n"])])
other = helper.make_graph([node("Abs", ["x"], ["b"])], "else", [], [value("b", TensorProto.FLOAT, ["n"])])
MODELS = {
    "sizes that follow from numbers": ([node("NonZero", ["x"], ["y"])], [x], TensorProto.INT64, ["r", "k"]),
    "a number read on the CPU": (
        [node("Expand", ["x", "s"], ["y"])], [x, value("s", TensorProto.INT64, [2])], TensorProto.FLOAT, ["a", "b"],
    ),
    "control flow": (
        [node("ReduceSum", ["x"], ["s"], keepdims=0), node("Cast", ["s"], ["c"], to=TensorProto.BOOL),
         node("If", ["c"], ["y"], then_branch=then, else_branch=other)], [x], TensorProto.FLOAT, ["n"],
    ),
    "random numbers": (
        [node("RandomNormalLike", ["x"], ["r"]), node("Mul", ["r", "x"], ["q"]), node("Abs", ["q"], ["y"])],
        [x], TensorProto.FLOAT, ["n"],
    ),
}
for name, (nodes, inputs, kind, shape) in MODELS.items():
    graph = helper.make_graph(nodes, "graph", inputs, [value("y", kind, shape)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    plain, engine = (OnnxEngine(model, device="cuda", cuda_graphs=n) for n in (0, 1))
    for i in range(4):
        given = [torch.randn(6).cuda()]
        if len(inputs) > 1:
            given.append(torch.tensor([i + 2, 6]).cuda())
        got, wanted = engine(*given), plain(*given)
        assert got.shape == wanted.shape, name
        assert name == "random numbers" or torch.equal(got, wanted), name
    [reason] = engine.info()["cuda_graphs"].values()
    assert reason != "recorded", name
    print(name, "|", reason)
    x2 = torch.randn(512, 512, device="cuda")
    assert torch.isfinite(x2 @ x2).all()  # the device is as it was
    engine.close(), plain.close()
"""


def test_what_cannot_be_recorded_runs_and_says_why() -> None:
    done = subprocess.run([sys.executable, "-c", NOT_RECORDED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = dict(line.split(" | ") for line in done.stdout.splitlines())
    assert len(said) == 4
    assert said["a number read on the CPU"] == "the numbers of s are read on the CPU in every run"


def test_recorded_whole_models_come_and_go(tmp_path: Path) -> None:
    model, options = example("stgcn")
    inputs = model.example_inputs
    svexport.export(model, inputs, tmp_path / "m.onnx", opset=17, verify=False, **options)
    given = [t.cuda() for _, t in leaves(inputs)]
    with svexport.load(tmp_path / "m.onnx", device="cuda") as plain:
        wanted = plain.run(given)
    for _ in range(3):
        with svexport.load(tmp_path / "m.onnx", device="cuda", kernels=True, cuda_graphs=1) as engine:
            for _ in range(3):
                for output, same in zip(engine.run(given), wanted, strict=True):
                    assert relative_error(output, same) < 1e-4
            assert list(engine.info()["cuda_graphs"].values()) == ["recorded"]
