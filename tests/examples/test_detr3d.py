from __future__ import annotations

import json
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from examples import detr3d

RIG = json.loads(detr3d.CAMERAS_FILE.read_text(encoding="utf-8"))
YAW = {"front": 0, "front_right": -55, "front_left": 55, "back": 180, "back_left": 110, "back_right": -110}
ROUND = ["front", "front_left", "back_left", "back", "back_right", "front_right"]  # once around the car
PHOTO = tuple(RIG["image_size"])


@pytest.fixture(scope="module")
def small() -> detr3d.DETR3D:
    return detr3d.model("small")


# -------------------------------------------------------------------------------------------------------- cameras


def rotate(quaternion, vector):
    """Rodrigues on a quaternion (w, x, y, z), with no matrix."""
    w, *axis = np.asarray(quaternion) / np.linalg.norm(quaternion)
    twice = 2 * np.cross(axis, vector)
    return vector + w * twice + np.cross(axis, twice)


def camera_to_lidar(camera, point):
    ego = rotate(camera["rotation"], np.asarray(point, dtype=float)) + camera["translation"]
    w, *axis = RIG["lidar"]["rotation"]
    return rotate([w, *(-np.asarray(axis))], ego - RIG["lidar"]["translation"])


def pixel(lidar2img, point):
    """Pixel and depth of a LiDAR point."""
    u, v, depth, one = lidar2img.double().numpy() @ np.append(point, 1.0)
    assert one == 1
    return np.array([u, v]) / depth, depth


def seen(points, image_size=(928, 1600)):
    """(cams, Q): which cameras, in the order of the rig's file, see LiDAR points given in metres."""
    box = (-64.0, -64.0, -64.0, 64.0, 64.0, 64.0)
    matrices = torch.stack(list(detr3d.surround_cameras(image_size).values()))[None]
    points = (torch.as_tensor(points, dtype=torch.float32)[None] + 64) / 128
    _, valid = detr3d.project(points, matrices, image_size=image_size, pc_range=box)
    return valid[0, :, :, 0]


def ring(radius=20.0, height=-0.5, count=720):
    angle = np.arange(count) * 2 * np.pi / count
    return np.stack([radius * np.cos(angle), radius * np.sin(angle), np.full(count, height)], axis=-1)


@pytest.mark.parametrize("camera", RIG["cameras"], ids=lambda camera: camera["name"])
def test_camera_is_a_pinhole_in_its_place(camera):
    matrix = detr3d.surround_cameras(PHOTO)[camera["name"]]
    k = camera["intrinsics"]

    ahead, depth = pixel(matrix, camera_to_lidar(camera, (0, 0, 20)))
    assert depth == pytest.approx(20, abs=1e-3)
    np.testing.assert_allclose(ahead, (k["cx"], k["cy"]), atol=0.05)
    np.testing.assert_allclose(ahead, (800, 450), atol=60)  # near the middle of the photo

    aside, _ = pixel(matrix, camera_to_lidar(camera, (2, -1, 20)))  # right of and above the view
    np.testing.assert_allclose(aside, (k["cx"] + k["fx"] * 2 / 20, k["cy"] - k["fy"] / 20), atol=0.05)

    _, depth = pixel(matrix, camera_to_lidar(camera, (1, 1, -5)))
    assert depth == pytest.approx(-5, abs=1e-3)

    view = rotate(camera["rotation"], np.array([0.0, 0.0, 1.0]))  # in the ego frame
    yaw = math.degrees(math.atan2(view[1], view[0]))
    assert abs((yaw - YAW[camera["name"]] + 180) % 360 - 180) < 2
    assert abs(view[2]) < 0.02  # level
    assert rotate(camera["rotation"], np.array([0.0, 1.0, 0.0]))[2] < -0.99  # the image's down is down
    assert 1.4 < camera["translation"][2] < 1.7


def test_lidar_axes():
    names = [camera["name"] for camera in RIG["cameras"]]

    def by(point):
        return {name for name, sees in zip(names, seen([point])[:, 0].tolist(), strict=True) if sees}

    assert by((0, 15, 0)) == {"front"}  # y forward
    assert by((0, -15, 0)) == {"back"}
    assert by((15, 9, 0)) == {"front_right"}  # x right
    assert by((-15, -5, 0)) == {"back_left"}
    assert by((0, 15, 14)) == set()  # z up, out of every view


@pytest.mark.parametrize("height", [-1.5, -0.5, 1.0])
@pytest.mark.parametrize("image_size", [(928, 1600), (232, 400), (320, 800), (288, 736)])
def test_rig_sees_all_around(height, image_size):
    assert seen(ring(height=height), image_size).any(dim=0).float().mean() >= 0.95


def test_neighbours_overlap_and_others_do_not():
    names = [camera["name"] for camera in RIG["cameras"]]
    views = dict(zip(names, seen(ring()), strict=True))
    for i, a in enumerate(ROUND):
        for j, b in enumerate(ROUND):
            both = int((views[a] & views[b]).sum()) / 2  # degrees
            if (i - j) % 6 in (1, 5):
                assert 2 < both < 20, (a, b)
            elif i != j:
                assert both == 0, (a, b)


def test_image_size_scales_pads_below_and_crops_above():
    photo, padded, quarter, low = (
        detr3d.surround_cameras(size) for size in (PHOTO, (928, 1600), (232, 400), (288, 736))
    )
    for camera in RIG["cameras"]:
        point = camera_to_lidar(camera, (-3, 0.5, 12))
        uv = pixel(photo[camera["name"]], point)[0]
        np.testing.assert_allclose(pixel(padded[camera["name"]], point)[0], uv, atol=0.01)
        np.testing.assert_allclose(pixel(quarter[camera["name"]], point)[0], uv / 4, atol=0.01)
        # 1600x900 scales to 736x414, so 126 rows of sky go
        np.testing.assert_allclose(pixel(low[camera["name"]], point)[0], uv * 0.46 - (0, 126), atol=0.01)


# -------------------------------------------------------------------------------------------------------- decoder


def bilinear(feature, u, v):
    """The feature (C, H, W) at (u, v) in [0, 1] across the image, zero outside it."""
    channels, height, width = feature.shape
    x, y = u * width - 0.5, v * height - 0.5  # pixel centres sit at half numbers
    out = np.zeros(channels)
    for row in (math.floor(y), math.floor(y) + 1):
        for column in (math.floor(x), math.floor(x) + 1):
            if 0 <= row < height and 0 <= column < width:
                out += feature[:, row, column] * (1 - abs(x - column)) * (1 - abs(y - row))
    return out


def layer_norm(x, norm):
    mean, variance = x.mean(), ((x - x.mean()) ** 2).mean()
    return (x - mean) / math.sqrt(variance + norm.eps) * norm.weight.numpy() + norm.bias.numpy()


def linear(x, layer):
    return layer.weight.numpy() @ x + layer.bias.numpy()


def svca_by_hand(module, query, query_pos, reference_points, features, lidar2img):
    """One point after the other, in float64; returns the result and how many (point, camera) were sampled."""
    config = module.config
    height, width = config.image_size
    low, high = np.array(config.pc_range[:3]), np.array(config.pc_range[3:])
    features = [feature.numpy() for feature in features]
    lidar2img = lidar2img.numpy()
    result, hits = np.zeros(query.shape), 0
    for b, q in np.ndindex(*query.shape[:2]):
        reference = reference_points[b, q].numpy()
        point = np.append(reference * (high - low) + low, 1)
        logits = linear((query + query_pos)[b, q].numpy(), module.attention_weights)
        weights = (1 / (1 + np.exp(-logits))).reshape(config.cameras, config.points, len(features))
        total = np.zeros(config.dim)
        for camera in range(config.cameras):
            with np.errstate(invalid="ignore"):  # NOWHERE and LOST
                x, y, depth, _ = lidar2img[b, camera] @ point
            if not depth > config.depth_eps:
                continue
            u, v = x / depth / width, y / depth / height
            if not (0 < u < 1 and 0 < v < 1):
                continue
            hits += 1
            for level, feature in enumerate(features):
                total += weights[camera, :, level].sum() * bilinear(feature[b, camera], u, v)

        inside = np.clip(reference, 0, 1)
        position = np.log(np.maximum(inside, 1e-5) / np.maximum(1 - inside, 1e-5))
        encoder = module.position_encoder
        for i in (0, 3):
            position = np.maximum(layer_norm(linear(position, encoder[i]), encoder[i + 1]), 0)
        result[b, q] = linear(total, module.output_proj) + query[b, q].numpy() + position
    return result, hits


# Cameras on exact numbers, for points in the unit cube; image 32 high, 64 wide.
FLAT = [[64, 0, 0, 0], [0, 32, 0, 0], [0, 0, 0, 1], [0, 0, 0, 1]]  # u = x, v = y, always at depth 1
AHEAD = [[16, 0, 32, -24], [0, 8, 16, -12], [0, 0, 1, -0.5], [0, 0, 0, 1]]  # from (0.5, 0.5, 0.5) along z
NOWHERE = [[math.nan] * 4, [math.inf] * 4, [0, 0, 0, 1], [0, 0, 0, 1]]  # projects to NaN and infinity
LOST = [[64, 0, 0, 0], [0, 32, 0, 0], [0, 0, math.nan, 1], [0, 0, 0, 1]]  # depth NaN
POINTS = [
    *[(0.5, 0.5, 0.6), (0.31, 0.77, 0.9), (0.01, 0.99, 0.75), (0.999, 0.002, 1.0)],  # inside; close to the border
    *[(0.0, 0.5, 0.75), (1.0, 0.5, 0.75), (0.5, 0.0, 0.75), (0.5, 1.0, 0.75)],  # on the border of both: not seen
    *[(0.25, 0.25, 0.2), (0.25, 0.25, 0.5)],  # behind AHEAD, and on its plane
    *[(0.5, 0.5, 0.500001), (0.5, 0.5, 0.50002)],  # in its view, nearer and farther than depth_eps
]


@pytest.mark.parametrize("points", [1, 2])
@pytest.mark.parametrize("levels", [((5, 7),), ((8, 16), (3, 5), (1, 2), (1, 1))])
def test_camera_attention_is_the_explicit_sum(points, levels):
    config = detr3d.Config(
        dim=6, cameras=4, points=points, levels=levels, image_size=(32, 64), pc_range=(0, 0, 0, 1, 1, 1)
    )
    torch.manual_seed(0)
    module = detr3d.CameraAttention(config).double().requires_grad_(False)
    reference = torch.tensor([POINTS, POINTS[::-1]], dtype=torch.float64)
    query, query_pos = torch.randn(2, 2, len(POINTS), 6, dtype=torch.float64)
    features = [torch.randn(2, 4, 6, *size, dtype=torch.float64) for size in levels]
    cameras = torch.tensor([[FLAT, AHEAD, NOWHERE, LOST], [LOST, FLAT, AHEAD, FLAT]], dtype=torch.float64)

    got = module(query, query_pos, reference, features, cameras)
    expected, hits = svca_by_hand(module, query, query_pos, reference, features, cameras)
    assert hits == 3 * 8 + 2 * 5  # of 96: three FLAT and two AHEAD see these many
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def test_camera_attention_on_the_real_rig():
    config = detr3d.Config(dim=4, levels=((29, 50), (4, 7)), image_size=(232, 400))
    torch.manual_seed(1)
    module = detr3d.CameraAttention(config).double().requires_grad_(False)
    reference = torch.rand(1, 60, 3, dtype=torch.float64)
    query, query_pos = torch.randn(2, 1, 60, 4, dtype=torch.float64)
    features, cameras = detr3d.example_inputs(config)
    features, cameras = [feature.double() for feature in features], cameras.double()

    got = module(query, query_pos, reference, features, cameras)
    expected, hits = svca_by_hand(module, query, query_pos, reference, features, cameras)
    assert hits > 40
    torch.testing.assert_close(got, torch.from_numpy(expected), rtol=1e-10, atol=1e-10)


def test_nan_feature_counts_as_zero():
    config = detr3d.Config(dim=2, cameras=1, levels=((4, 4),), image_size=(32, 64), pc_range=(0, 0, 0, 1, 1, 1))
    module = detr3d.CameraAttention(config)
    inputs = torch.zeros(1, 1, 2), torch.zeros(1, 1, 2), torch.full((1, 1, 3), 0.5)
    camera = torch.tensor([[FLAT]], dtype=torch.float32)
    poisoned, empty = torch.full((1, 1, 2, 4, 4), math.nan), torch.zeros(1, 1, 2, 4, 4)
    assert torch.equal(module(*inputs, [poisoned], camera), module(*inputs, [empty], camera))


def test_update_moves_the_centre_only():
    reference = torch.tensor([[[0.5, 0.2, 0.9], [0.0, 1.0, 1e-7]]], dtype=torch.float64)
    reg = torch.arange(20, dtype=torch.float64).view(1, 2, 10) / 10 - 1
    got = detr3d.update(reference, reg)
    for q in range(2):
        for axis, column in enumerate((0, 1, 4)):
            r = reference[0, q, axis].item()
            odds = max(r, 1e-5) / max(1 - r, 1e-5) * math.exp(reg[0, q, column].item())
            assert got[0, q, axis].item() == pytest.approx(odds / (1 + odds), rel=1e-12)
    assert ((got > 0) & (got < 1)).all()


def test_self_attention_is_multi_head_attention():
    torch.manual_seed(0)
    ours, theirs = detr3d.SelfAttention(24, 4), nn.MultiheadAttention(24, 4, batch_first=True)
    with torch.no_grad():
        projections = (ours.q_proj, ours.k_proj, ours.v_proj)
        theirs.in_proj_weight.copy_(torch.cat([projection.weight for projection in projections]))
        theirs.in_proj_bias.copy_(torch.cat([projection.bias for projection in projections]))
        theirs.out_proj.load_state_dict(ours.output_proj.state_dict())
    query, query_pos = torch.randn(2, 2, 7, 24)
    expected, _ = theirs(query + query_pos, query + query_pos, query)
    torch.testing.assert_close(ours(query, query_pos), expected)


# ----------------------------------------------------------------------------------------------------------- head


@pytest.mark.parametrize("config", detr3d.CONFIGS.values(), ids=detr3d.CONFIGS)
def test_levels_are_the_image_at_strides_8_to_64(config):
    height, width = config.image_size
    for stride, level in zip((8, 16, 32, 64), config.levels, strict=True):
        assert level == (math.ceil(height / stride), math.ceil(width / stride))
    assert config.dim % config.heads == 0


def test_head_answers_for_every_query(small):
    result = small(*small.example_inputs)
    assert {name: tuple(value.shape) for name, value in result.items()} == {
        "classes": (1, 100, 10),
        "boxes": (1, 100, 10),
        "reference_points": (1, 100, 3),
    }
    metres = result["reference_points"] * torch.tensor([102.4, 102.4, 8.0]) - torch.tensor([51.2, 51.2, 5.0])
    torch.testing.assert_close(result["boxes"][..., [0, 1, 4]], metres)
    assert all(value.isfinite().all() for value in result.values())
    assert result["classes"].std(dim=1).min() > 0.05  # the queries differ


def test_model_is_deterministic_and_leaves_the_random_state_alone(small):
    state = torch.get_rng_state()
    again, other = detr3d.model("small"), detr3d.model("small", seed=1, layers=1)
    assert torch.equal(state, torch.get_rng_state())
    assert not again.training
    torch.testing.assert_close(again.state_dict(), small.state_dict(), rtol=0, atol=0)
    with torch.inference_mode():
        first, second = small(*small.example_inputs), again(*again.example_inputs)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert len(other.layers) == 1
    assert not torch.equal(other.cls[0].weight, small.cls[0].weight)


def test_queries_start_around_the_car_and_most_are_seen(small):
    *_, reference = small.queries(1)
    metres = reference[0, :, :2] * 102.4 - 51.2
    assert metres.norm(dim=1).min() > 5.9
    quadrant = (metres > 0).long() @ torch.tensor([1, 2])
    assert quadrant.bincount(minlength=4).min() > 10

    config = small.config
    _, valid = detr3d.project(
        reference, small.example_inputs[1], image_size=config.image_size, pc_range=config.pc_range
    )
    assert 0.8 < valid.any(dim=1).float().mean() < 1  # some are seen by nobody, and that has to work too
    assert (valid.sum(dim=1) > 1).any()  # and some by two cameras


def test_head_looks_at_every_camera_and_level(small):
    features, cameras = small.example_inputs
    with torch.inference_mode():
        expected = small(features, cameras)["classes"]
        for level in range(4):
            for camera in range(6):
                changed = [feature.clone() for feature in features]
                changed[level][:, camera] = 0
                assert (small(changed, cameras)["classes"] - expected).abs().max() > 0.01


def test_batch_entries_do_not_mix():
    net = detr3d.model("small", batch=2)
    features, cameras = net.example_inputs
    cameras[1] = cameras[1].roll(1, dims=0)
    with torch.inference_mode():
        together = net(features, cameras)
        for b in range(2):
            alone = net([feature[b : b + 1] for feature in features], cameras[b : b + 1])
            for name, value in alone.items():
                torch.testing.assert_close(together[name][b : b + 1], value, rtol=1e-4, atol=1e-4)
    assert (together["classes"][0] - together["classes"][1]).abs().max() > 0.1


def test_rounding_stays_rounding(small):
    """The example must be fit for comparing exports: float32 and float64 answer alike, layer upon layer."""
    exact = detr3d.model("small").double()
    features, cameras = small.example_inputs
    with torch.inference_mode():
        expected = exact([feature.double() for feature in features], cameras.double())
        got = small(features, cameras)
    for name, value in got.items():
        torch.testing.assert_close(value.double(), expected[name], rtol=1e-4, atol=1e-4)


def test_gradient_reaches_everything():
    net = detr3d.model("small")
    features, cameras = net.example_inputs
    leaves = [feature.requires_grad_() for feature in features] + [cameras.requires_grad_()]
    result = net(features, cameras)
    (result["classes"].square().mean() + result["boxes"].square().mean()).backward()
    named = dict(net.named_parameters()) | {f"input {i}": leaf for i, leaf in enumerate(leaves)}
    for name, value in named.items():
        assert value.grad is not None, name
        assert value.grad.isfinite().all(), name
        if not name.endswith("k_proj.bias"):  # adds the same to every score of a softmax, so it has no gradient
            assert value.grad.abs().max() > 0, name


def test_script_exports_at_opset_11(monkeypatch, capsys):
    calls = []

    def export(model, **options):
        calls.append((type(model).__name__, options))
        return "exported"

    monkeypatch.setitem(sys.modules, "svexport", SimpleNamespace(export=export))
    monkeypatch.setattr(sys, "argv", ["detr3d.py", "--config", "small", "--output", "there.onnx"])
    detr3d.main()
    assert calls == [("DETR3D", {"path": "there.onnx", "opset": 11})]
    assert capsys.readouterr().out.endswith("exported\n")


def test_script_runs_without_svexport(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "svexport", None)  # makes the import fail
    monkeypatch.setattr(sys, "argv", ["detr3d.py", "--config", "small"])
    detr3d.main()
    output = capsys.readouterr().out
    assert "of the queries start in some image" in output
    assert "nothing exported" in output
