"""Half-precision files sample where the model does: which calls stay float32 for that, and which do not."""

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
from torch import Tensor, nn

import svexport
from svexport.cli._model import load_file
from svexport.exporter.coordinates import half_model
from svexport.exporter.trace import torch_export_first
from svexport.exporter.typed import BIAS
from tests.exporter.test_precision import HALF, SINGLE, types

pytestmark = pytest.mark.usefixtures("no_gradients")

EXAMPLES = Path(__file__).parents[2] / "examples"
RANGE = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)


@pytest.fixture
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Camera(nn.Module):
    """As detectors have it: points made in place, a matrix in the type of the features, masks, and a layer after."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.stem, self.head = nn.Embedding(97, 3), nn.Conv2d(3, 8, 1), nn.Linear(8, 5)

    def forward(self, image: Tensor, lidar2img: Tensor) -> tuple[Tensor, Tensor]:
        points = self.points.weight[None].sigmoid().clone()
        for axis in range(3):
            points[..., axis] = points[..., axis] * (RANGE[axis + 3] - RANGE[axis]) + RANGE[axis]
        points = torch.cat((points, torch.ones_like(points[..., :1])), -1)
        seen = (lidar2img.to(image.dtype)[:, None] @ points[..., None]).squeeze(-1)
        depth = torch.maximum(seen[..., 2:3], torch.full_like(seen[..., 2:3], 1e-5))
        uv = seen[..., :2] / depth
        uv[..., 0] /= 400
        uv[..., 1] /= 30
        uv = (uv - 0.5) * 2
        valid = (seen[..., 2:3] > 1e-5) & (uv > -1).all(-1, keepdim=True) & (uv < 1).all(-1, keepdim=True)
        found = F.grid_sample(self.stem(image), uv[:, :, None].to(image.dtype), align_corners=False)
        return self.head(found.squeeze(-1).transpose(1, 2) * valid.to(found.dtype)), points


def camera() -> tuple[Tensor, Tensor]:
    lidar2img = torch.tensor([[[200.0, -200.0, 0, 0], [15.0, 0, -30.0, 0], [1.0, 0.1, 0, 0], [0, 0, 0, 1.0]]])
    return torch.randn(1, 3, 30, 400), lidar2img


class Flow(nn.Module):
    """A layer's flow on a mesh, filled into a tensor of zeros, counted in pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.flow, self.out = nn.Conv2d(4, 2, 3, padding=1), nn.Conv2d(4, 3, 1)
        self.register_buffer("scale", torch.tensor([1.3, 0.7]).view(1, 2, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        height, width = x.shape[-2:]
        mesh = torch.meshgrid(torch.arange(height), torch.arange(width), indexing="ij")
        at = torch.stack(mesh[::-1])[None].to(x.dtype) + self.flow(x) * self.scale
        grid = at.new_zeros(1, height, width, 2)
        grid[..., 0] = 2 * at[:, 0] / (width - 1) - 1
        grid[..., 1] = 2 * at[:, 1] / (height - 1) - 1
        return self.out(F.grid_sample(x, grid, align_corners=True))


class Given(nn.Module):
    """Coordinates that are an input, and looked at otherwise, too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.place = nn.Conv2d(3, 4, 1), nn.Linear(2, 4)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        found = F.grid_sample(self.layer(x), grid, align_corners=False)
        return found + self.place(grid).permute(0, 3, 1, 2)


class Ours(nn.Module):
    """svexport's own samplers, whose arguments are of one type in a half model."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.weights = nn.Conv2d(3, 4, 1), nn.Linear(6, 2)

    def forward(self, x: Tensor, points: Tensor, lidar2img: Tensor, query: Tensor) -> Tensor:
        features = [self.layer(x)[:, None], F.avg_pool2d(self.layer(x), 2)[:, None]]
        weights = self.weights(query)[:, :, None, None]
        options: dict[str, Any] = {"image_size": (30, 400), "pc_range": RANGE}
        return svexport.ops.camera_sample(features, points * 0.9 + 0.05, lidar2img[None], weights, **options)


MODELS: dict[str, Any] = {
    "camera": (Camera, camera),
    "flow": (Flow, lambda: (torch.randn(1, 4, 9, 500),)),
    "given": (Given, lambda: (torch.randn(2, 3, 7, 1200), torch.rand(2, 5, 11, 2) * 2 - 1)),
    "ours": (Ours, lambda: (torch.randn(1, 3, 30, 400), torch.rand(1, 97, 3), camera()[1], torch.randn(1, 97, 6))),
}


def off(found: Tensor, expected: Tensor) -> float:
    """Root of the mean square of the difference, over that of what was expected."""
    return float((found.double() - expected).square().mean().sqrt() / expected.square().mean().sqrt())


def first(result: Any) -> Tensor:
    return result[0] if isinstance(result, (tuple, list)) else result


def model_of(name: str) -> tuple[nn.Module, tuple[Tensor, ...], Tensor]:
    """A model, inputs, and its first result in float64."""
    make, inputs = MODELS[name]
    model, args = make().eval(), inputs()
    return model, args, first(copy.deepcopy(model).double()(*(x.double() for x in args)))


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("name", MODELS)
def test_a_half_file_samples_where_the_model_does(name: str, opset: int, tmp_path: Path) -> None:
    """To within what half types leave of features; all in half, torch is tens of times as far off."""
    model, args, expected = model_of(name)
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=opset, dtype=torch.float16)
    assert report.verified
    assert any("kept in float32: coordinates" in note for note in report.notes)
    assert {kind.partition("[")[0] for kind in report.outputs.values()} == {"float16"}
    assert off(first(svexport.load(report.path)(*args)), expected) < 2e-3
    whole = first(copy.deepcopy(model).half()(*(x.half() for x in args)))
    assert not off(whole, expected) < 0.01


@pytest.mark.parametrize("name", MODELS)
def test_traced_by_torchscript(name: str, tmp_path: Path) -> None:
    model, args, expected = model_of(name)
    with torch_export_first(False):
        report = svexport.export(model, args, tmp_path / "m.onnx", opset=13, dtype=torch.float16)
    assert report.verified
    assert off(first(svexport.load(report.path)(*args)), expected) < 2e-3


def test_what_stays(tmp_path: Path) -> None:
    """The way from the points into the image; nothing that is sampled, and nothing after."""
    model, args, _ = model_of("camera")
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=17, dtype=torch.float16, verify=False)
    assert {one.function for one in report.kept} == {"sigmoid", "mul", "add", "cat", "matmul", "maximum", "div", "sub"}
    assert {one.reason for one in report.kept} == {"coordinates"}
    assert all("test_coordinates.py:" in one.source for one in report.kept)
    found = types(report.path)
    sampled = [kind for kind, _ in found].index("SvGridSample")
    assert {kind for kind, dtype in found if dtype == SINGLE}.isdisjoint({"Conv", "SvGridSample", "Gemm"})
    assert SINGLE not in {dtype for _, dtype in found[sampled:]}
    assert [kind for kind, dtype in found if dtype == SINGLE].count("MatMul") == 1
    assert all(
        weight.data_type == HALF for weight in onnx.load(report.path).graph.initializer if "weight" in weight.name
    )


class Expected(nn.Module):
    """A soft argmax of products of features, which are large: where it looks is what coordinates begin with."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Conv2d(3, 4, 1)
        self.low = nn.Parameter(torch.full((2,), -0.9))

    def forward(self, query: Tensor, places: Tensor, image: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.q(query) @ self.k(query).transpose(1, 2)
        at = logits.softmax(-1) @ places + self.low
        return F.grid_sample(self.v(image), at[:, None], align_corners=False), at.sin()


def test_followed_up_to_products_of_features_and_on_to_layers() -> None:
    args = torch.randn(1, 6, 8), torch.rand(1, 6, 2), torch.randn(1, 3, 8, 9)
    model, plan = half_model(Expected().eval(), (args, {}), torch.bfloat16)
    assert plan is not None
    kept = {(one.function, "softmax" in one.source): one.reason for one in plan.kept()}
    assert kept == {
        ("softmax", True): "coordinates",
        ("matmul", True): "coordinates",
        ("add", True): "coordinates",
        ("sin", False): "computed only from coordinates or matrices",
    }
    assert {name: p.dtype for name, p in model.named_parameters() if p.dtype != torch.bfloat16} == {
        "low": torch.float32
    }


def test_layers_of_parameters_alone_are_numbers_of_the_file(tmp_path: Path) -> None:
    """DETR3D's first points are a layer of its embedding; those that move them have products in half."""
    model = load_file(EXAMPLES / "detr3d.py").model("small", queries=30)
    features, lidar2img = model.example_inputs
    precise = copy.deepcopy(model).double()([f.double() for f in features], lidar2img.double())
    plain, replaced = model, svexport.replace(model, verbose=False)
    for used in (plain, replaced):
        report = svexport.export(used, model.example_inputs, tmp_path / "m.onnx", opset=17, dtype=torch.float16)
        assert report.verified
        assert ("reference_points", "linear") in {(one.module, one.function) for one in report.kept}
        why = {one.reason for one in report.kept if ".reg" in one.module or "cls" in one.module}
        assert why == ({"a norm", BIAS} if used is plain else set())  # replaced, the decoder is one function
        found = svexport.load(report.path)(*features, lidar2img)
        assert {value.dtype for value in found.values()} == {torch.float16}
        assert {name: off(found[name], precise[name]) < 2e-3 for name in precise} == dict.fromkeys(precise, True)


class Graph(nn.Module):
    """As graph convolutions have it: an adjacency that is weighed, of which a half model rounds each number thrice."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("adjacency", torch.rand(3, 11, 11))
        self.importance = nn.Parameter(1 + 0.1 * torch.randn(3, 11, 11))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nkv,kvw->nw", x, self.adjacency * self.importance)


@pytest.mark.parametrize(("opset", "keep"), [(11, None), (18, None), (18, "auto")])
def test_what_is_computed_of_parameters_alone_is_rounded_once(opset: int, keep: str | None, tmp_path: Path) -> None:
    model, x = Graph().eval(), (torch.randn(50, 3, 11) * 8).round() / 8
    report = svexport.export(model, x, tmp_path / "m.onnx", opset=opset, dtype=torch.float16, keep=keep)
    assert [(one.function, one.reason) for one in report.kept] == [("mul", "computed only from parameters")]
    exact = (model.adjacency * model.importance).half().double()
    expected = torch.einsum("nkv,kvw->nw", x.double(), exact)
    whole = copy.deepcopy(model).half()
    rounded = torch.einsum("nkv,kvw->nw", x.double(), (whole.adjacency * whole.importance).double())
    found = svexport.load(report.path)(x)
    assert off(found, expected) < 0.75 * off(rounded, expected)


class Residual(nn.Module):
    """A stream that linear layers add to, at last one that is scaled for each channel, to what ReLU left."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(11, 24)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(24, 37), nn.ReLU(), nn.Linear(37, 24)) for _ in range(6))
        self.norms = nn.ModuleList(nn.LayerNorm(24) for _ in range(8))
        for norm in self.norms:
            nn.init.uniform_(norm.weight, 0.7, 1.3)
        self.scale, self.head = nn.Parameter(1 + 0.1 * torch.randn(24)), nn.Linear(24, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.norms[0](self.first(x))
        for layer, norm in zip(self.layers, self.norms[1:-1], strict=True):
            x = norm(x + layer(x))
        head = self.head(x)
        return self.norms[-1](self.scale * head + x.relu()), head


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("keep", [None, "auto"])
def test_norms_are_float32_back_to_products(keep: str | None, opset: int, tmp_path: Path) -> None:
    """As are their numbers; products and weights are half, and so is what is given to nothing but products."""
    model, x = Residual().eval(), torch.randn(3, 13, 11)
    path = tmp_path / "m.onnx"
    report = svexport.export(model, x, path, opset=opset, dtype=torch.float16, keep=keep)
    assert report.verified
    why = {(one.module, one.function): one.reason for one in report.kept}
    assert why == {
        **{(f"norms.{i}", "layer_norm"): "a norm" for i in range(8)},
        **{(name, "linear"): BIAS for name in ("first", "head", *(f"layers.{i}.2" for i in range(6)))},
        **dict.fromkeys([("", "add"), ("", "mul"), ("", "relu")], "a sum before a norm"),
    }
    found = types(path)
    assert {dtype for kind, dtype in found if kind in ("MatMul", "Gemm")} == {HALF}
    assert {dtype for kind, dtype in found if kind in ("LayerNormalization", "ReduceMean")} == {SINGLE}
    assert [dtype for kind, dtype in found if kind == "Relu"].count(SINGLE) == 1
    held = [onnx.numpy_helper.to_array(i) for i in onnx.load(path).graph.initializer]
    assert all(i.dtype == np.float16 for i in held if i.ndim == 2)
    exact = [model.norms[3].weight, model.layers[2][2].bias, model.head.bias, model.scale]
    assert all(any(i.dtype == np.float32 and np.array_equal(i, one.numpy()) for i in held) for one in exact)


def test_norms_and_sums_lose_less_than_half_does(tmp_path: Path) -> None:
    """Of torch with every function in half, whose products sum in float32, too, a third is left at the most."""
    model, x = Residual().eval(), torch.randn(50, 13, 11)
    expected = copy.deepcopy(model).double()(x.double())[0]
    report = svexport.export(model, x, tmp_path / "m.onnx", opset=17, dtype=torch.float16)
    whole = copy.deepcopy(model).half()(x.half())[0]
    assert off(svexport.load(report.path)(x)[0], expected) < 0.67 * off(whole, expected)


class Recurrent(nn.Module):
    """As training code has it: a state of zeros and positions, float32, meet layers that are half."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.place = nn.Linear(5 + 8, 8), nn.Linear(1, 8)

    def forward(self, x: Tensor, key: Tensor) -> Tensor:
        state = torch.zeros(x.shape[0], 8)
        for one in x.unbind(1):
            state = self.step(torch.cat([one, state], 1)).tanh()
        state = state + self.place(torch.arange(7.0)[:, None] / 7)
        mixed = torch.eye(7) * 0.5 @ state
        return torch.zeros(4, 8).scatter_add(0, key[:, None].expand(-1, 8), mixed.to(x.dtype)) + mixed.sum()


class Frustum(nn.Module):
    """Pixels and depths behind a camera, by its inverse matrix, as embeddings of positions take them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.scale = nn.Linear(3, 11), nn.Parameter(torch.tensor(80.0))

    def forward(self, x: Tensor, lidar2img: Tensor) -> Tensor:
        u, v, depth = torch.meshgrid(torch.arange(0, 400, 37.0), torch.arange(0, 30, 7.0), torch.arange(1.0, 60, 13))
        pixels = torch.stack((u * depth, v * depth, depth, torch.ones_like(depth)), -1)
        points = pixels.flatten(0, 2) @ torch.inverse(lidar2img).transpose(1, 2)
        where = (points[..., :3] / self.scale).clamp(-1, 1)
        return self.embed(where) * F.normalize(x, dim=-1)


@pytest.mark.parametrize("opset", [11, 18])
def test_what_forward_makes_in_float32_meets_half(opset: int, tmp_path: Path) -> None:
    """Functions that take one type are given half; torch's half model fails."""
    model, args = Recurrent().eval(), (torch.randn(7, 3, 5), torch.tensor([0, 2, 2, 1, 3, 0, 2]))
    expected = copy.deepcopy(model)(*args).double()
    with pytest.raises(RuntimeError, match="dtype"):
        copy.deepcopy(model).half()(args[0].half(), args[1])
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=opset, dtype=torch.float16)
    assert report.verified
    assert report.kept == []
    assert {dtype for kind, dtype in types(report.path) if kind in ("MatMul", "Gemm")} == {HALF}
    assert off(svexport.load(report.path)(*args), expected) < 2e-3


@pytest.mark.parametrize("keep", [None, "auto"])
def test_matrices_are_inverted_in_float32(keep: str | None, tmp_path: Path) -> None:
    """With what is computed of them alone; torch has no inverse of half numbers."""
    model, args = Frustum().eval(), (torch.randn(1, 275, 11), camera()[1])
    expected = copy.deepcopy(model)(*args).double()
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=17, dtype=torch.float16, keep=keep)
    assert report.verified
    kept = {one.function: one.reason for one in report.kept}
    assert kept["inverse"] == "a matrix"
    assert {"matmul", "div", "clamp"} <= kept.keys()
    assert kept.keys().isdisjoint({"linear"})
    assert off(svexport.load(report.path)(*args), expected) < 1e-3


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.grid_sample(x, self.layer(x).tanh_().permute(0, 2, 3, 1).contiguous(), align_corners=False)


class Out(Flow):
    def forward(self, x: Tensor) -> Tensor:
        torch.add(x, 1, out=x)
        return super().forward(x)


class Normalized(Flow):
    """By a function of torch that hands its ``out=None`` on."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(F.normalize(x, dim=1))


class Looks(Given):
    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return super().forward(x, grid) * len(torch.arange(3.0).tolist()) / int(torch.tensor([3.0]).sum())


def test_what_cannot_be_followed_is_half(tmp_path: Path) -> None:
    """Coordinates as a layer makes them, tensors that are written behind forward's back, scripts; as does what asks for
    nothing; a forward that looks at numbers is followed with numbers."""
    x, grid = torch.randn(1, 4, 5, 6), torch.rand(1, 3, 4, 2)
    for model, args in [(Plain(), (x,)), (Out(), (x,)), (torch.jit.script(Plain()), (x,)), (nn.Conv2d(4, 2, 1), (x,))]:
        half, plan = half_model(model.eval(), (args, {}), torch.float16)
        assert plan is None
        assert {p.dtype for p in half.parameters()} == {torch.float16}
    for model, args in [(Looks(), (x[:, :3], grid)), (Normalized(), (x,))]:
        _, plan = half_model(model, (args, {}), torch.float16)
        assert plan is not None


def test_keep_says_it_all(tmp_path: Path) -> None:
    """With ``keep=[]`` nothing is computed in float32."""
    model, args, expected = model_of("flow")
    report = svexport.export(model, args, tmp_path / "m.onnx", dtype=torch.float16, keep=[], verify=False)
    assert report.kept == []
    assert off(svexport.load(report.path)(*args), expected) > 0.01


def test_the_model_stays(tmp_path: Path) -> None:
    model, args, _ = model_of("flow")
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    dynamic = {"x": {3: "width"}}
    report = svexport.export(model, args, tmp_path / "m.onnx", dtype=torch.float16, dynamic_shapes=dynamic)
    assert model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    x = torch.randn(1, 4, 9, 731)
    assert off(svexport.load(report.path)(x), copy.deepcopy(model).eval().double()(x.double())) < 2e-3
