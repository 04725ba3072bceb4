from __future__ import annotations

import math
from collections.abc import Sequence

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from examples import detr3d
from svexport.graph.nodes import svexport_nodes
from svexport.ops import CameraSample, camera_sample, quantize
from svexport.ops.camera_sample import OP, reference
from tests.support import OPSETS, run_model, run_op

RANGE = (-51.2, -51.2, -5.0, 51.2, 51.2, 3.0)


def composition(
    features: Sequence[Tensor],
    reference_points: Tensor,
    lidar2img: Tensor,
    weights: Tensor,
    *,
    image_size: Sequence[int],
    pc_range: Sequence[float],
    depth_eps: float = 1e-5,
    uv_clamp: tuple[float, float] | None = None,
    activation: str = "sigmoid",
    offsets: Tensor | None = None,
) -> Tensor:
    """The definition in torch functions, step by step."""
    if weights.dim() == 5:
        weights = weights[..., None]
    batch, queries, cams, points, _, groups = weights.shape
    low, high = reference_points.new_tensor(pc_range).split(3)
    place = (reference_points * (high - low) + low)[:, :, None].expand(-1, -1, points, -1)
    if offsets is not None:
        place = place + offsets
    image = torch.einsum("bkij,bqpj->bkqpi", lidar2img, F.pad(place, (0, 1), value=1.0))
    depth = image[..., 2:3]
    valid = depth > depth_eps
    uv = image[..., :2] / depth.clamp(min=depth_eps) / depth.new_tensor(image_size[::-1])
    if uv_clamp is not None:
        uv = uv.clamp(*uv_clamp)
    grid = (uv - 0.5) * 2
    if uv_clamp is None:
        valid = valid & (grid > -1).all(-1, keepdim=True) & (grid < 1).all(-1, keepdim=True)
    valid = valid.squeeze(-1).permute(0, 2, 1, 3)[..., None, None]  # (B, Q, cams, points, 1, 1)
    weights = weights.sigmoid() if activation == "sigmoid" else weights.flatten(2, 4).softmax(2).view(weights.shape)
    weights = weights * valid
    output = 0
    for level, feature in enumerate(features):
        sampled = F.grid_sample(feature.flatten(0, 1), grid.flatten(0, 1), padding_mode="zeros", align_corners=False)
        sampled = torch.where(sampled.isnan(), 0, sampled).view(batch, cams, groups, -1, queries, points)
        output = output + torch.einsum("bkgcqp,bqkpg->bqgc", sampled, weights[..., level, :])
    return output.flatten(2)


def rig(cams: int, image_size: Sequence[int]) -> Tensor:
    """Cameras around the vertical axis at 1.5 m, a little off the centre: (cams, 4, 4)."""
    height, width = image_size
    intrinsics = torch.tensor(
        [[0.6 * width, 0, width / 2, 0], [0, 0.6 * width, height / 2, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    )
    matrices = []
    for i in range(cams):
        angle = 2 * math.pi * i / cams
        sin, cos = math.sin(angle), math.cos(angle)
        rows = [[sin, -cos, 0, 0.1], [0, 0, -1, 1.5], [cos, sin, 0, -0.7], [0, 0, 0, 1]]
        matrices.append(intrinsics @ torch.tensor(rows))
    return torch.stack(matrices)


def case(
    levels: Sequence[tuple[int, int]],
    image_size: tuple[int, int],
    *,
    batch: int = 1,
    queries: int = 19,
    channels: int = 8,
    cams: int = 6,
    points: int = 1,
    groups: int | None = None,
    pooled: bool = False,
    offsets: bool = False,
    **options: object,
) -> dict:
    """Arguments; ``pooled`` appends the 2x2 maximum of the last level as a further one."""
    features = [torch.randn(batch, cams, channels, *size) for size in levels]
    if pooled:
        features.append(F.max_pool2d(features[-1].flatten(0, 1), 2, ceil_mode=True).unflatten(0, (batch, cams)))
    six = torch.stack(list(detr3d.surround_cameras(image_size).values())) if cams == 6 else rig(cams, image_size)
    group = () if groups is None else (groups,)
    return {
        "features": features,
        "reference_points": torch.rand(batch, queries, 3),
        "lidar2img": six.expand(batch, -1, -1, -1).contiguous(),
        "weights": torch.randn(batch, queries, cams, points, len(features), *group),
        "image_size": image_size,
        "pc_range": RANGE,
        "offsets": torch.randn(batch, queries, points, 3) * 2 if offsets else None,
        **options,
    }


SEED = {"levels": [(18, 46), (9, 23), (5, 12)], "pooled": True, "image_size": (288, 736), "queries": 37}
DETR3D = {"levels": [(29, 50), (15, 25), (8, 13), (4, 7)], "image_size": (928, 1600), "queries": 53}
STREAM = {
    "levels": [(20, 50), (10, 25), (5, 13), (3, 7)],
    "image_size": (320, 800),
    "queries": 11,
    "channels": 16,
    "points": 13,
    "groups": 8,
    "offsets": True,
    "activation": "softmax",
}
CASES = {
    "seed": SEED,
    "seed-4-cameras": {**SEED, "cams": 4},
    "seed-12-cameras": {**SEED, "cams": 12, "depth_eps": 1e-2},
    "detr3d": DETR3D,
    "stream": STREAM,
    "clamped": {**DETR3D, "uv_clamp": (-1.0, 2.0), "depth_eps": 1e-2},
    "clamped-inside": {**SEED, "uv_clamp": (0.1, 0.9)},
    "points": {**DETR3D, "points": 3, "batch": 2, "queries": 5},
    "offsets": {**SEED, "points": 3, "offsets": True, "batch": 2, "queries": 7, "channels": 3},
    "groups": {**DETR3D, "groups": 4, "batch": 3, "queries": 2},
    "softmax": {**DETR3D, "activation": "softmax", "cams": 12},
    "one-of-each": {"levels": [(1, 1)], "image_size": (7, 11), "cams": 1, "queries": 1, "channels": 1},
    "odd": {"levels": [(1, 13), (11, 1)], "image_size": (101, 53), "cams": 3, "queries": 7, "channels": 5, "batch": 2},
}
every_case = pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)


def converted(args: dict, dtype: torch.dtype) -> dict:
    def convert(value: object) -> object:
        if isinstance(value, list):
            return [convert(v) for v in value]
        return value.to(dtype) if isinstance(value, Tensor) else value

    return {name: convert(value) for name, value in args.items()}


def tensors(args: dict) -> list[Tensor]:
    rest = [t for name, t in args.items() if isinstance(t, Tensor)]
    return [*args["features"], *rest]


def node_args(args: dict) -> tuple:
    """The same as arguments of the torch operator."""
    weights, offsets, uv_clamp = args["weights"], args.get("offsets"), args.get("uv_clamp")
    return (
        args["features"],
        args["reference_points"],
        args["lidar2img"],
        weights if weights.dim() == 6 else weights[..., None],
        weights.new_zeros(1, 1, 1, 3) if offsets is None else offsets,
        args["image_size"],
        args["pc_range"],
        args.get("depth_eps", 1e-5),
        uv_clamp is None,
        uv_clamp or (0.0, 1.0),
        ("sigmoid", "softmax").index(args.get("activation", "sigmoid")),
        args.get("scales", [1.0] * len(args["features"])),
    )


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(1)


@every_case
def test_is_the_composition(sizes: dict) -> None:
    args = case(**sizes)
    expected = composition(**args)
    if sizes.get("queries", 19) > 5:
        assert (expected.abs().amax(-1) > 0).float().mean() > 0.3  # cameras do see the points
    torch.testing.assert_close(camera_sample(**args), expected, rtol=1e-4, atol=1e-4)

    args = converted(args, torch.float64)
    inputs = [t.requires_grad_() for t in tensors(args)]
    expected = composition(**args)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), inputs)
    for actual in (camera_sample(**args), reference(*node_args(args))):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-9)
        for a, e in zip(torch.autograd.grad((actual * weight).sum(), inputs), gradients, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-7, atol=1e-7 * max(1.0, float(e.abs().max())))


@every_case
def test_body_is_the_composition(sizes: dict) -> None:
    args = case(**sizes)
    expected = composition(**args)
    for opset in OPSETS:
        actual = run_op(OP, node_args(args), opset, dynamic=opset % 2 == 0)[0]
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_is_the_camera_attention_of_the_example() -> None:
    net = detr3d.model("small", queries=50)
    features, lidar2img = net.example_inputs
    attention, config = net.layers[0].svca, net.config
    points = torch.rand(1, 50, 3)
    weights = torch.randn(1, 50, config.cameras, config.points, len(config.levels))
    sampled, valid = attention.sample(features, points, lidar2img)
    expected = (sampled * weights.sigmoid()[:, None] * valid).sum((-1, -2, -3)).transpose(1, 2)
    options = {"image_size": config.image_size, "pc_range": config.pc_range}
    actual = camera_sample(features, points, lidar2img, weights, **options)
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ the image's border


def plain_camera(u: Sequence[float], v: Sequence[float], size: tuple[int, int], depth: float = 1.0) -> dict:
    """One camera that shows the place (u * depth, v * depth, depth) at (u, v), and an image of ones."""
    points = torch.tensor([[u_ * depth, v_ * depth, depth] for u_, v_ in zip(u, v, strict=True)])
    lidar2img = torch.diag(torch.tensor([64.0, 32.0, 1.0, 1.0]))
    return {
        "features": [torch.ones(1, 1, 1, *size)],
        "reference_points": points[None],
        "lidar2img": lidar2img[None, None],
        "weights": torch.full((1, len(u), 1, 1, 1), 50.0),  # 1 after the sigmoid
        "image_size": (32, 64),
        "pc_range": (0.0, 0.0, 0.0, 1.0, 1.0, 1.0),
    }


def everywhere(args: dict) -> list[Tensor]:
    """As every implementation computes it."""
    given = node_args(args)
    return [camera_sample(**args), reference(*given), *(run_op(OP, given, opset)[0] for opset in (9, 11, 20))]


@pytest.mark.parametrize("size", [(116, 200), (9, 23), (1, 1), (2, 1)])
def test_fades_at_the_border_instead_of_clamping(size: tuple[int, int]) -> None:
    """Half a pixel from the border half of what a sample mixes lies outside, and counts as zero."""
    height, width = size
    x = torch.tensor([-0.45, -0.25, 0.0, width / 2 - 0.5, width - 1.0, width - 0.75, width - 0.55])
    y = torch.tensor([height / 2 - 0.5, -0.25, -0.45, height - 0.6, 0.0, height / 2 - 0.5, height - 0.55])

    def fade(t: Tensor, size: int) -> Tensor:
        return 1 - (-t).clamp(min=0) - (t - (size - 1)).clamp(min=0)

    expected = (fade(x, width) * fade(y, height))[None, :, None]
    assert (expected < 0.8).sum() >= 4
    for actual in everywhere(plain_camera(((x + 0.5) / width).tolist(), ((y + 0.5) / height).tolist(), size)):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_points_on_the_border_do_not_count() -> None:
    tiny = 1e-6
    u = [0.0, 1.0, 0.5, 0.5, tiny, 1 - tiny, -tiny, 1 + tiny, 0.5, 3.0]
    v = [0.5, 0.5, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, -2.0, 0.5]
    expected = torch.tensor([0, 0, 0, 0, 0.5, 0.5, 0, 0, 0, 0])[None, :, None]
    for actual in everywhere(plain_camera(u, v, (3, 4))):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    # clamped to (-1, 2) the border itself counts, and far away nothing is left of the image
    args = plain_camera(u, v, (3, 4)) | {"uv_clamp": (-1.0, 2.0)}
    expected = torch.tensor([0.5] * 8 + [0, 0])[None, :, None]
    for actual in everywhere(args):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("uv_clamp", [None, (-1.0, 2.0)])
def test_points_behind_a_camera_do_not_count(uv_clamp: tuple | None) -> None:
    args = plain_camera([0.5] * 5, [0.5] * 5, (3, 4)) | {"uv_clamp": uv_clamp, "depth_eps": 1e-2}
    depth = torch.tensor([-1.0, 0.0, 0.99e-2, 1.01e-2, 5.0])
    args["reference_points"] = args["reference_points"] * depth[:, None]
    expected = torch.tensor([0.0, 0, 0, 1, 1])[None, :, None]
    for actual in everywhere(args):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    inputs = [t.requires_grad_() for t in tensors(args)]
    for actual in (camera_sample(**args), reference(*node_args(args))):
        assert all(g.isfinite().all() for g in torch.autograd.grad(actual.sum(), inputs))


# ------------------------------------------------------------------ what is not a number


@pytest.mark.parametrize("sizes", [DETR3D, {**STREAM, "uv_clamp": (-1.0, 2.0)}], ids=["detr3d", "stream"])
@pytest.mark.parametrize("dead", ["features", "lidar2img", "a row", "infinite"])
def test_a_dead_camera_adds_nothing(sizes: dict, dead: str) -> None:
    args = case(**sizes)
    blind = {**args, "features": [f.clone() for f in args["features"]]}
    for feature in blind["features"]:
        feature[:, 2] = 0
    expected = composition(**blind)
    if dead == "features":
        for feature in args["features"]:
            feature[:, 2] = math.nan
    elif dead == "a row":
        args["lidar2img"][:, 2, 0] = math.nan
    else:
        args["lidar2img"][:, 2, :3] = math.nan if dead == "lidar2img" else math.inf
    for actual in everywhere(args):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_a_lost_query_reads_zero_and_features_may_be_infinite() -> None:
    args = case(**DETR3D)
    args["reference_points"][0, 3] = math.nan
    for actual in everywhere(args):
        assert not actual[0, 3].any()
        assert actual.isfinite().all()
    args = plain_camera([0.5, 0.1], [0.5, 0.1], (3, 4))
    args["features"][0][..., 1, :] = math.inf
    for actual in everywhere(args):
        torch.testing.assert_close(actual.flatten(), torch.tensor([math.inf, 0.9 * 0.8]))


# ------------------------------------------------------------------ precision


def test_coordinates_stay_float32_beside_half_features() -> None:
    """In half a pixel of a wide map is not even an integer."""
    args = case(levels=[(4, 3000)], image_size=(928, 1600), queries=64, channels=1)
    args["features"] = [(torch.arange(3000) % 7 / 7).expand(1, 6, 1, 4, 3000).half()]
    expected = composition(**converted(args, torch.float64))
    actual = camera_sample(**args)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3)
    body = run_op(OP, node_args(args), 11)[0]
    assert body.dtype == torch.float16
    torch.testing.assert_close(body.double(), expected, rtol=3e-3, atol=3e-3)


def test_half_inputs() -> None:
    args = converted(case(**SEED), torch.float16)
    expected = composition(**converted(args, torch.float64))
    for actual in (camera_sample(**args), *(run_op(OP, node_args(args), opset)[0] for opset in OPSETS)):
        assert actual.dtype == torch.float16
        torch.testing.assert_close(actual.double(), expected, rtol=5e-3, atol=5e-3)


def test_autocast_leaves_the_projection_alone() -> None:
    args = case(**DETR3D)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(camera_sample(**args), composition_in_float32(args), rtol=1e-2, atol=1e-2)


def composition_in_float32(args: dict) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return composition(**args)


# ------------------------------------------------------------------ shapes


def test_empty() -> None:
    args = case(**{**DETR3D, "queries": 0})
    for opset in OPSETS:
        assert run_op(OP, node_args(args), opset)[0].shape == (1, 0, 8)
        if opset >= 14:  # before, Reshape reads a size of 0 that it computes as "keep"
            assert run_op(OP, node_args(args), opset, dynamic=True)[0].shape == (1, 0, 8)
    for t in tensors(args):
        t.requires_grad_()
    camera_sample(**args).sum().backward()
    assert reference(*node_args(args)).shape == (1, 0, 8)


def test_strided_inputs() -> None:
    args = case(**STREAM)
    strided = dict(args)
    strided["features"] = [
        f.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, (1, 6)) for f in args["features"]
    ]
    for name in ("reference_points", "lidar2img", "weights", "offsets"):
        strided[name] = args[name].transpose(0, 2).contiguous().transpose(0, 2)
    torch.testing.assert_close(camera_sample(**strided), camera_sample(**args))


def test_second_derivatives() -> None:
    args = converted(
        case(levels=[(2, 3)], image_size=(32, 64), queries=1, cams=1, channels=2, points=2, offsets=True), torch.float64
    )
    args["lidar2img"] = args["lidar2img"] * 1.01
    inputs = [args[name].requires_grad_() for name in ("weights", "offsets")]
    args["reference_points"] = torch.tensor([[[0.7, 0.5, 0.6]]], dtype=torch.float64)
    assert camera_sample(**args).abs().max() > 0

    def function(weights: Tensor, offsets: Tensor) -> Tensor:
        return camera_sample(**args | {"weights": weights, "offsets": offsets})

    assert torch.autograd.gradgradcheck(function, inputs)


def test_compile_with_open_sizes() -> None:
    compiled = torch.compile(camera_sample, fullgraph=True, dynamic=True, backend="aot_eager")
    for queries in (5, 7):
        args = case(**{**STREAM, "levels": [(10, 25)], "queries": queries})
        torch.testing.assert_close(compiled(**args), camera_sample(**args))


# ------------------------------------------------------------------ int8


def quantized(args: dict) -> dict:
    scales = [0.02 + 0.005 * level for level in range(len(args["features"]))]
    return args | {
        "features": [quantize(f, s) for f, s in zip(args["features"], scales, strict=True)],
        "scales": scales,
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("sizes", [DETR3D, STREAM], ids=["detr3d", "stream"])
def test_int8_features_are_their_values(sizes: dict, dtype: torch.dtype) -> None:
    args = quantized(case(**sizes))
    values = [q.double() * s for q, s in zip(args["features"], args["scales"], strict=True)]
    args["weights"] = args["weights"].to(dtype)
    doubles = {n: v.double() if isinstance(v, Tensor) else v for n, v in args.items()}
    expected = camera_sample(**doubles | {"features": values, "scales": None})
    tolerance = 1e-5 if dtype == torch.float32 else 2e-3
    for actual in (camera_sample(**args), reference(*node_args(args)), run_op(OP, node_args(args), 11)[0]):
        assert actual.dtype == dtype
        assert (actual.double() - expected).norm() < tolerance * expected.norm()
    assert expected.norm() > 0.1


class Quantized(nn.Module):
    """Features in int8 between two nodes."""

    def forward(self, feature: Tensor, points: Tensor, lidar2img: Tensor, weights: Tensor) -> Tensor:
        options = {"image_size": (32, 48), "pc_range": RANGE, "scales": [0.03]}
        return camera_sample([quantize(feature, 0.03)], points, lidar2img, weights, **options)


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize("target", [None, "10.0"])
def test_int8_features_in_a_file(opset: int, target: str | None, tmp_path) -> None:
    args = case([(6, 9)], (32, 48), queries=30)
    tensors = args["features"][0], args["reference_points"], args["lidar2img"], args["weights"]
    report = svexport.export(Quantized(), tensors, tmp_path / "m.onnx", opset=opset, target=target)
    graph = onnx.load(report.path).graph
    (node,) = (n for n in graph.node if n.op_type == "SvCameraSample")
    assert next(a.floats for a in node.attribute if a.name == "scales") == pytest.approx([0.03])
    types = {v.name: v.type.tensor_type.elem_type for v in graph.value_info}
    assert types[node.input[0]] == onnx.TensorProto.INT8
    (before,) = (n for n in graph.node if node.input[0] in n.output)
    assert before.op_type == "QuantizeLinear"


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"weights": torch.zeros(1, 53, 6, 1, 3)}, r"L of them, and weights \(B, Q, cams, points, L\[, G\]\); got"),
        ({"weights": torch.zeros(1, 53, 6, 4)}, r"weights \(1, 53, 6, 4\)"),
        ({"weights": torch.zeros(1, 53, 6, 1, 4, 3)}, "divides the 8 channels"),
        ({"weights": torch.zeros(1, 53, 4, 1, 4)}, r"expects features \(1, 4, 8, H, W\)"),
        ({"features": [], "weights": torch.zeros(1, 53, 6, 1, 0)}, "expects features"),
        ({"features": [torch.zeros(1, 6, 8, 3, 3)] * 3 + [torch.zeros(1, 6, 7, 3, 3)]}, r"features\[3\] \(1, 6, 7, 3"),
        ({"features": [torch.zeros(1, 6, 8, 3, 0)] * 4}, "none empty"),
        ({"reference_points": torch.zeros(1, 52, 3)}, r"reference_points \(1, 53, 3\)"),
        ({"lidar2img": torch.zeros(1, 6, 3, 4)}, r"lidar2img \(1, 6, 4, 4\); got .*lidar2img \(1, 6, 3, 4\)"),
        ({"offsets": torch.zeros(1, 53, 2, 3)}, r"expects offsets \(1, 53, 1, 3\).*got.*offsets \(1, 53, 2, 3\)"),
        ({"activation": "tanh"}, "'sigmoid' or 'softmax', got 'tanh'"),
        ({"image_size": (928, 1600, 3)}, r"image_size \(height, width\)"),
        ({"image_size": (0, 1600)}, r"image_size \(height, width\) in pixels"),
        ({"weights": torch.zeros(1, 53, 6, 1, 4, 0)}, "divides the 8 channels"),
        ({"pc_range": (0, 1)}, "pc_range of 6 numbers"),
        ({"uv_clamp": (0,)}, r"uv_clamp None or \(low, high\)"),
        ({"scales": [1.0]}, r"a scale for each of the 4 features, got \[1.0\]"),
    ],
)
def test_errors(change: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        camera_sample(**case(**DETR3D) | change)


@pytest.mark.parametrize("name", ["features", "weights"])
def test_integers_are_refused(name: str) -> None:
    args = case(**DETR3D)
    args[name] = [f.int() for f in args[name]] if name == "features" else args[name].int()
    with pytest.raises(TypeError, match=r"features in floating point or int8, and weights, got .*int32"):
        camera_sample(**args)


# ------------------------------------------------------------------ the module and its export


def test_module() -> None:
    args = case(**STREAM)
    options = {name: args.pop(name) for name in ("image_size", "pc_range", "activation")}
    module = CameraSample(**options, depth_eps=1e-2, uv_clamp=(-1.0, 2.0))
    assert not module.state_dict()
    assert "activation='softmax'" in repr(module)
    expected = camera_sample(**args, **options, depth_eps=1e-2, uv_clamp=(-1.0, 2.0))
    torch.testing.assert_close(module(**args), expected)


class Attention(nn.Module):
    """What surrounds the op in a decoder."""

    def __init__(self, sizes: dict) -> None:
        super().__init__()
        self.shape = (6, sizes.get("points", 1), 4, *([sizes["groups"]] if "groups" in sizes else []))
        self.points = sizes.get("points", 1)
        self.weights = nn.Linear(8, math.prod(self.shape))
        self.offsets = nn.Linear(8, 3 * self.points) if sizes.get("offsets") else None
        self.sample = CameraSample(sizes["image_size"], RANGE, activation=sizes.get("activation", "sigmoid"))

    def forward(self, query: Tensor, points: Tensor, features: list[Tensor], lidar2img: Tensor) -> Tensor:
        weights = self.weights(query).unflatten(-1, self.shape)
        offsets = None if self.offsets is None else self.offsets(query).unflatten(-1, (self.points, 3))
        return self.sample(features, points, lidar2img, weights, offsets)


@pytest.mark.core
@pytest.mark.parametrize(("opset", "sizes"), [(11, DETR3D), (11, STREAM), (18, DETR3D)])
def test_export(opset: int, sizes: dict, tmp_path) -> None:
    args = case(**sizes)
    model, path = Attention(sizes).eval(), tmp_path / "model.onnx"
    rest = (args["features"], args["lidar2img"])
    count = sizes["queries"]
    dynamic = {"query": {1: "queries"}, "points": {1: "queries"}}
    inputs = (torch.randn(1, count, 8), args["reference_points"], *rest)
    svexport.export(model, inputs, path, opset=opset, dynamic_shapes=dynamic)
    exported = onnx.load(path)
    (node,) = svexport_nodes(exported)
    assert len(node.input) == 8  # 4 levels, points, lidar2img, weights, offsets
    assert all(node.input)  # none absent: TensorRT's parser takes no absent input
    kinds = {a.name: a.type for a in node.attribute if not a.name.startswith("plugin_")}
    number = onnx.AttributeProto
    assert set(kinds.values()) <= {number.INT, number.INTS, number.FLOAT, number.FLOATS}
    query, points = torch.randn(1, count + 3, 8), torch.rand(1, count + 3, 3)
    expected = model(query, points, *rest)
    actual = run_model(exported, [query, points, *rest[0], rest[1]])[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
