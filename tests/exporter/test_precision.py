"""Half models keep float32 where half precision is not enough, and nowhere else."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import TensorProto, shape_inference
from torch import Tensor, nn

import svexport
from svexport import ExportError
from svexport.exporter.trace import torch_export_first
from svexport.exporter.typed import BIAS

pytestmark = pytest.mark.usefixtures("no_gradients")

HALF, SINGLE = TensorProto.FLOAT16, TensorProto.FLOAT


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Attention(nn.Module):
    """Logits of up to a million before they are divided."""

    def __init__(self, width: int, gain: float) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.gain = gain

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x) * self.gain, self.k(x) * self.gain, self.v(x)
        logits = q @ k.transpose(-2, -1)
        weights = (logits / self.gain**2).softmax(-1)
        return x + self.out(weights @ v)


class Logits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(16, 32), nn.Linear(32, 5)
        self.blocks = nn.ModuleList([Attention(32, 600.0 if i == 2 else 1.0) for i in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RMSNorm(nn.Module):
    """Of numbers whose squares half has no number for."""

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 24)
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(24, 24), nn.Tanh()) for _ in range(40)])
        self.norm, self.head = RMSNorm(), nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(1000 * self.first(x))
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)


class Coordinates(nn.Module):
    """Points in metres, far from the origin, in a camera and into its image."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.backbone = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(16)])
        self.head = nn.ModuleList([nn.Linear(8, 8) for _ in range(16)])

    def forward(self, image: Tensor, points: Tensor, camera: Tensor) -> Tensor:
        seen = points @ camera.transpose(-2, -1)  # (N, Q, 3)
        pixels = seen[..., :2] / seen[..., 2:].clamp(min=1e-5)
        features = self.stem(image)
        for layer in self.backbone:
            features = features + layer(features).tanh()
        found = F.grid_sample(features, pixels[:, None] / 800 - 1, align_corners=False)
        x = found[:, :, 0].transpose(1, 2)
        for layer in self.head:
            x = x + layer(x).tanh()
        return x


def coordinates() -> tuple[Tensor, Tensor, Tensor]:
    """Points around a car two kilometres off, and a camera that takes the difference."""
    points = torch.cat([torch.rand(1, 9, 2) * 8 + 2000, torch.rand(1, 9, 1) * 8 + 2010], -1)
    camera = torch.tensor([[[1000.0, 0, -995.5], [0, 1000.0, -995.5], [0, 0, 0.004]]])
    return torch.randn(1, 3, 40, 40) * 3, points, camera


OVERFLOWING: dict[str, Any] = {
    "logits": (Logits, lambda: torch.randn(2, 7, 16)),
    "norm": (Norm, lambda: torch.randn(5, 12)),
    "coordinates": (Coordinates, coordinates),
}


def types(path: Path) -> list[tuple[str, int]]:
    """Of every node that has a floating-point result, but casts."""
    model = shape_inference.infer_shapes(onnx.load(path), strict_mode=False, data_prop=True)
    known = {v.name: v.type.tensor_type.elem_type for v in (*model.graph.value_info, *model.graph.output)}
    results = [(node.op_type, known.get(node.output[0], 0)) for node in model.graph.node if node.op_type != "Cast"]
    return [(kind, dtype) for kind, dtype in results if dtype in (HALF, SINGLE)]


def error(model: nn.Module, args: Any, path: Path) -> float:
    """Of the file, in the mean, relative to the results in float64."""
    args = args if isinstance(args, tuple) else (args,)
    expected = model.double()(*(x.double() for x in args))
    model.float()
    found = svexport.load(path)(*args).double()
    return float(((found - expected).square().mean() / expected.square().mean()).sqrt())


def lost_in_half(model: nn.Module, args: Any) -> float:
    """As :func:`error`, of torch with everything in half, which is what TensorRT computes of a file that says so."""
    args = args if isinstance(args, tuple) else (args,)
    expected = model(*args).double()
    found = copy.deepcopy(model).half()(*(x.half() for x in args)).double()
    return float(((found - expected).square().mean() / expected.square().mean()).sqrt())


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 17, 18])
@pytest.mark.parametrize("name", OVERFLOWING)
def test_what_overflows_is_kept(name: str, opset: int, tmp_path: Path) -> None:
    """With a tenth of the nodes in float32 at most; without, the file is wrong."""
    make, inputs = OVERFLOWING[name]
    model, args, path = make().eval(), inputs(), tmp_path / "m.onnx"
    report = svexport.export(model, args, path, opset=opset, dtype=torch.float16, keep="auto")
    assert report.verified
    assert error(model, args, path) < 0.01
    found = types(path)
    single = [kind for kind, dtype in found if dtype == SINGLE]
    assert 0 < len(single) <= 0.1 * len(found), single
    assert all("test_precision.py:" in one.source for one in report.kept)
    assert all(one.source in str(report).replace("\n", "") or len(one.source) > 40 for one in report.kept)
    assert not lost_in_half(model, args) < 0.1


def test_what_is_named_and_why(tmp_path: Path) -> None:
    args = (Logits().eval(), torch.randn(2, 7, 16), tmp_path / "m.onnx")
    report = svexport.export(*args, dtype=torch.float16, keep="auto")
    kept = {(one.module, one.function): one for one in report.kept}
    assert set(kept) == {("blocks.2", "matmul"), ("blocks.2", "div")}
    assert kept["blocks.2", "matmul"].reason == "overflows in float16"
    assert "logits = q @ k.transpose(-2, -1)" in kept["blocks.2", "matmul"].source
    assert report.to_dict()["kept"][0]["module"] == "blocks.2"
    assert any("2 calls stay float32" in note and "dB of signal over noise" in note for note in report.notes)
    report.to_html(tmp_path / "report.html")
    assert "overflows in float16" in (tmp_path / "report.html").read_text()


def test_nothing_is_kept_that_need_not(tmp_path: Path) -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3, padding=1)
            self.norm, self.relu = nn.BatchNorm2d(8), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.relu(self.norm(self.a(x)))
            y = self.b(x)
            y += x
            y = y.masked_fill(y > 100, 0.0)
            return torch.cat([y, x], 1).flatten(2).mean(-1)

    report = svexport.export(
        Plain(), torch.randn(2, 3, 9, 7), tmp_path / "m.onnx", opset=13, dtype=torch.float16, keep="auto"
    )
    assert report.verified
    assert report.kept == []
    assert {dtype for _, dtype in types(report.path)} == {HALF}


def test_rules(tmp_path: Path) -> None:
    """Norms and matrices are float32 whatever the numbers; their weights are not rounded."""

    class Ruled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
            nn.init.normal_(self.norm.weight)

        def forward(self, x: Tensor, pose: Tensor) -> Tensor:
            return self.norm(self.layer(x)) @ torch.linalg.inv(pose)

    model, args = Ruled().eval(), (torch.randn(2, 3, 6), torch.eye(6) + 0.1 * torch.rand(2, 6, 6))
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=17, dtype=torch.float16, keep="auto")
    assert report.verified
    assert {one.reason for one in report.kept} == {"a norm", "a matrix", BIAS}
    held = [onnx.numpy_helper.to_array(i) for i in onnx.load(report.path).graph.initializer]
    weight = model.norm.weight.numpy()
    assert any(one.dtype == weight.dtype and np.array_equal(one, weight) for one in held)
    assert error(model, args, report.path) < 2e-3


class Deformable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project, self.offsets, self.out = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, value: Tensor, query: Tensor, reference: Tensor) -> Tensor:
        sizes, start = torch.tensor([[32, 64]]), torch.tensor([0])
        value = self.project(value).unflatten(-1, (2, 4))
        points = reference[:, :, None, None, None] + self.offsets(query).reshape(1, -1, 2, 1, 2, 2) / sizes.flip(1)
        weights = torch.full((1, query.shape[1], 2, 1, 2), 0.5)
        return self.out(svexport.ops.ms_deform_attn(value, sizes, start, points, weights))


def test_coordinates_of_our_samplers(tmp_path: Path) -> None:
    """The product that makes offsets is half, its bias, the sums of them and the points are not."""
    args = (torch.randn(1, 2048, 8) * 5, torch.randn(1, 11, 8), torch.rand(1, 11, 2))
    model = Deformable().eval()
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=17, dtype=torch.float16, keep="auto")
    assert report.verified
    kept = {(one.function, one.reason) for one in report.kept}
    assert kept == {("add", "coordinates"), ("div", "coordinates"), ("linear", BIAS)}
    assert report.nodes["SvMsDeformAttn"] == 1
    assert error(model, args, report.path) < 2e-3


def test_losses_that_only_the_results_show(tmp_path: Path) -> None:
    """Each function rounds a little; what is left of a difference is a hundred times less."""

    class Difference(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*(layer for _ in range(9) for layer in (nn.Linear(8, 8), nn.Tanh())))

        def forward(self, x: Tensor) -> Tensor:
            y = x + 300
            z = y.reshape(-1, 2, 4).flatten(1)
            return z - 300 + 0.001 * self.layers(x)

    model, x = Difference().eval(), torch.randn(64, 8)
    path = tmp_path / "m.onnx"
    report = svexport.export(model, x, path, dtype=torch.float16, keep="auto", opset=17)
    assert {one.function for one in report.kept} == {"add", "sub"}
    assert error(model, x, path) < 0.01
    assert lost_in_half(model, x) > 0.05


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_modules_by_name(dtype: torch.dtype, tmp_path: Path) -> None:
    model = Logits().eval()
    known = dtype == torch.float16  # ONNX Runtime has no product of bfloat16
    options: dict[str, Any] = {"opset": 17, "dtype": dtype, "verify": known, "keep": ["blocks.2", "hea?"]}
    report = svexport.export(model, torch.randn(2, 7, 16), tmp_path / "m.onnx", **options)
    assert report.verified == known
    assert {one.module for one in report.kept} == {
        "blocks.2", *(f"blocks.2.{name}" for name in ("q", "k", "v", "out")), "head",
    }  # fmt: skip
    assert {one.reason for one in report.kept} == {"named in keep"}
    assert report.outputs["output"].startswith("float32")


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x)[0]


@pytest.mark.parametrize(
    ("make", "args"),
    [
        (Recurrent, torch.randn(2, 4, 6)),
        (lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), torch.randn(2, 5, 8)),
        (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU6(True)), torch.randn(1, 3, 6, 5)),
    ],
    ids=["lstm", "transformer", "group norm"],
)
@pytest.mark.parametrize("opset", [13, 18])
def test_modules_of_torch(make: Any, args: Tensor, opset: int, tmp_path: Path) -> None:
    model, path = make().eval(), tmp_path / "m.onnx"
    report = svexport.export(model, args, path, opset=opset, dtype=torch.float16, keep="auto")
    assert report.verified
    assert error(model, args, path) < 5e-3


def test_dynamic_sizes_and_the_model_stays(tmp_path: Path) -> None:
    model = Norm().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = svexport.export(
        model,
        torch.randn(5, 12),
        tmp_path / "m.onnx",
        dtype=torch.float16,
        keep="auto",
        dynamic_shapes={"x": {0: "batch"}},
    )
    assert report.verified
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    x = torch.randn(11, 12)
    torch.testing.assert_close(svexport.load(report.path)(x).float(), model.eval()(x), rtol=0.02, atol=0.02)


class Looks(nn.Module):
    """Goes on by what Python gets of tensors, where only numbers decide that are none of the given inputs'."""

    def __init__(self, look: str) -> None:
        super().__init__()
        self.layer, self.look = nn.Linear(4, 4), look

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        most = {
            "bool": lambda: y.sum() > 3e4,
            "item": lambda: y.sum().item() > 3e4,
            "float": lambda: float(y.amax()) > 3e4,
            "tolist": lambda: y[0].tolist()[0] > 3e4,
            "text": lambda: f"{y.sum()}"[-3:] in ("inf", "0.0"),
            "unbind": lambda: any(row.sum() > 3e4 for row in y),
            "count": lambda: len(x[x > 3e4]) > 2,
            "parts": lambda: len((x > 2e4).nonzero().unbind()) > 3,
        }[self.look]()
        return y * 2 if most else y


@pytest.mark.parametrize("look", ["bool", "item", "float", "tolist", "text", "unbind", "count", "parts"])
def test_values_in_python_are_refused_as_ever(look: str, tmp_path: Path) -> None:
    """Whose line it is shows through the mode that computes in other types."""
    options: dict[str, Any] = {"opset": 13, "dtype": torch.float16}
    said = []
    for keep in (None, "auto", ["layer"]):
        with pytest.raises(svexport.SvexportError) as caught:
            svexport.export(Looks(look), torch.randn(3, 4), tmp_path / "m.onnx", keep=keep, **options)
        said.append((type(caught.value), str(caught.value).split(":")[0]))
    assert len(set(said)) == 1, said
    assert not list(tmp_path.iterdir())


class Sizes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] > 6 else x + 1


def test_sizes_in_python_are_refused_as_ever(tmp_path: Path) -> None:
    said = []
    for first in (True, False):
        for keep in (None, "auto"):
            with torch_export_first(first), pytest.raises(svexport.SvexportError) as caught:
                svexport.export(
                    Sizes(),
                    torch.randn(3, 4),
                    tmp_path / "m.onnx",
                    opset=13,
                    dtype=torch.float16,
                    keep=keep,
                    dynamic_shapes={"x": {0: "n"}},
                )
            said.append((type(caught.value), str(caught.value).split("\n")[0][:60]))
    assert said[0] == said[1]
    assert said[2] == said[3]


@pytest.mark.parametrize("name", OVERFLOWING)
def test_traced_by_torchscript(name: str, tmp_path: Path) -> None:
    make, inputs = OVERFLOWING[name]
    model, args, path = make().eval(), inputs(), tmp_path / "m.onnx"
    with torch_export_first(False):
        report = svexport.export(model, args, path, opset=13, dtype=torch.float16, keep="auto")
    assert report.verified
    assert report.kept
    assert error(model, args, path) < 0.01


def test_refused(tmp_path: Path) -> None:
    args = (Norm(), torch.randn(5, 12), tmp_path / "m.onnx")
    with pytest.raises(ExportError, match=r"keep says what stays float32 in a half model, got dtype=None"):
        svexport.export(*args, keep="auto")
    with pytest.raises(ExportError, match=r"keep expects 'auto' or a list of names of modules, got 'norm'"):
        svexport.export(*args, dtype=torch.float16, keep="norm")
    with pytest.raises(ExportError, match=r"no module of Norm is named 'tail'; expected 'auto', or names as in"):
        svexport.export(*args, dtype=torch.float16, keep=["norm", "tail"])
    with pytest.raises(ExportError, match="scripted modules"):
        svexport.export(torch.jit.script(args[0]), *args[1:], dtype=torch.float16, keep="auto")
    assert not list(tmp_path.iterdir())


class Unit(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / (x * x).sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("seed", [2, 5])
def test_a_copy_in_float64_may_take_other_steps(seed: int, tmp_path: Path) -> None:
    """A norm beyond float16, after which torch says 0, and ONNX Runtime, which drops the cast, a number."""
    x = 300 * torch.randn(4, 64, generator=torch.Generator().manual_seed(seed))
    assert svexport.export(Unit(), x, tmp_path / "m.onnx", opset=11, dtype=torch.float16, keep="auto").verified
