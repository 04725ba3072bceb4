from __future__ import annotations

import ctypes
import math
import random
from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops.camera_sample import OP, reference
from tests.emulation import Kernels, Memory, Structure, View, emulated, in_memory, poisoned
from tests.ops.test_camera_sample import case, node_args

pytestmark = emulated("camera_sample", "camera_sample_backward")

TOLERANCES = {torch.float32: 2e-5, torch.float16: 3e-3, torch.bfloat16: 1.5e-2}
DTYPES = pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
MOST_LEVELS = 8


class CameraLevel(ctypes.Structure):
    _fields_ = (("map", View), ("scale", ctypes.c_float), ("pool", ctypes.c_bool))


class CameraSampleOptions(ctypes.Structure):
    _fields_ = (
        ("image_size", ctypes.c_double * 2),
        ("pc_range", ctypes.c_double * 6),
        ("depth_eps", ctypes.c_double),
        ("in_image", ctypes.c_bool),
        ("uv_clamp", ctypes.c_double * 2),
        ("activation", ctypes.c_int32),
    )


class CameraSampleGradients(ctypes.Structure):
    _fields_ = (
        ("maps", View * MOST_LEVELS),
        ("reference_points", View),
        ("lidar2img", View),
        ("weights", View),
        ("offsets", View),
    )


def levels_of(maps: Sequence[Tensor], scales: Sequence[float], pool: Sequence[bool]) -> Structure:
    levels = [CameraLevel(View.of(m), s, p) for m, s, p in zip(maps, scales, pool, strict=True)]
    return Structure((CameraLevel * len(levels))(*levels), maps)


def options_of(args: Sequence) -> Structure:
    size, pc_range, depth_eps, in_image, clamp, activation = args[5:11]
    two, six = ctypes.c_double * 2, ctypes.c_double * 6
    return Structure(
        CameraSampleOptions(two(*size), six(*pc_range), depth_eps, in_image, two(*clamp), activation),
    )


def precise(args: Sequence) -> tuple:
    """Features and weights in float64, and the projection in float32 as the kernel's.

    So both agree on every point that counts, also within a rounding of the border.
    """
    features, points, lidar2img, weights, offsets, *options = args
    geometry = points.float(), lidar2img.float()
    return [f.double() for f in features], *geometry, weights.double(), offsets.float(), *options


def channels_last(feature: Tensor) -> Tensor:
    return feature.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, feature.shape[:2])


def laid_out(args: tuple, dtype: torch.dtype) -> tuple:
    """Features of a type, all channels-last or NCHW or of any strides; other arguments of any types and strides."""
    features, points, lidar2img, weights, offsets, *options = args
    layout = random.choice([torch.Tensor.contiguous, channels_last, channels_last, in_memory])
    features = [layout(f.to(dtype)) for f in features]
    if random.random() < 0.5:
        points, lidar2img, offsets = (in_memory(t) for t in (points, lidar2img, offsets))
    if random.random() < 0.3:
        points, lidar2img, offsets = (t.to(random.choice([dtype, torch.float32])) for t in (points, lidar2img, offsets))
    weights = weights.to(random.choice([dtype, dtype, torch.float32]))
    if random.random() < 0.3:  # cameras, points and levels as one axis
        weights = in_memory(weights.flatten(2, 4)).unflatten(2, weights.shape[2:5])
    return features, points, lidar2img, weights, offsets, *options


def random_case(channels: int) -> tuple:
    most = 20 if channels < 64 else 7
    levels = [(random.randint(1, most), random.randint(1, most + 5)) for _ in range(random.choice([1, 2, 3, 4, 5]))]
    batch, cams = random.choice([1, 1, 2, 3]), random.choice([1, 3, 4, 6, 6, 7, 12])
    points = random.choice([1, 1, 2, 5, 13])
    queries = 20_000 // (batch * cams * points * len(levels) * max(channels, 16))
    clamp = random.choice([{}, {}, {"uv_clamp": (-1.0, 2.0), "depth_eps": 1e-2}, {"uv_clamp": (0.1, 0.9)}])
    return node_args(
        case(
            levels,
            random.choice([(288, 736), (928, 1600), (101, 53)]),
            batch=batch,
            queries=max(1, min(queries, 40)),
            channels=channels,
            cams=cams,
            points=points,
            groups=random.choice([g for g in (1, 1, 2, 4) if channels % g == 0]),
            offsets=points > 1 or random.random() < 0.5,  # or equal points have sums that cancel
            activation=random.choice(["sigmoid", "sigmoid", "softmax"]),
            **clamp,
        )
    )


def describe(args: Sequence) -> str:
    tensors = " ".join(f"{t.dtype} {tuple(t.shape)} {t.stride()}" for t in (*args[0], *args[1:5]))
    return f"{tensors} {args[5:]}"


def sampled(
    kernels: Kernels,
    args: Sequence,
    levels: Structure | None = None,
    dtype: torch.dtype | None = None,
    tactic: int = 0,
) -> Tensor:
    features, points, lidar2img, weights, offsets, *_ = args
    ones = [1.0] * len(features), [False] * len(features)
    levels = levels or levels_of(features, *ones)
    output = in_memory(poisoned(*weights.shape[:2], features[0].shape[2], dtype=dtype or features[0].dtype))
    absent = not offsets.any() and random.random() < 0.5
    given = points, lidar2img, weights, None if absent else offsets, options_of(args), output, tactic
    assert kernels("camera_sample", levels, len(levels.value), *given), describe(args)
    return output


def compare(result: Tensor, expected: Tensor, shown: str, factor: float = 1) -> None:
    assert torch.equal(result.isnan(), expected.isnan()), f"{shown}: not NaN where it should be, or NaN elsewhere"
    if expected.numel():
        difference = (result.double() - expected).nan_to_num(0, math.inf, -math.inf).abs().max()
        error = difference / expected.nan_to_num(0).abs().max().clamp_min(1e-2)
        assert error < factor * TOLERANCES[result.dtype], f"{shown}: {error}"


def check(kernels: Kernels, args: tuple) -> None:
    compare(sampled(kernels, args), reference(*precise(args)), describe(args))


def check_gradients(kernels: Kernels, args: tuple, deterministic: bool = False, every: bool = True) -> list[Tensor]:
    """Those of all tensors, or of some; returns them."""
    features, points, lidar2img, weights, offsets, *options = args
    batch, queries, _, count, *_ = weights.shape
    spread = offsets.expand(batch, queries, count, 3)
    leaves = precise((features, points, lidar2img, weights, spread.clone(), *options))
    inputs = [t.requires_grad_() for t in (*(f.clone() for f in leaves[0]), *(t.clone() for t in leaves[1:5]))]
    expected = reference(inputs[: len(features)], *inputs[len(features) :], *options)
    grad = torch.randn(expected.shape).to(features[0].dtype)
    wanted = torch.autograd.grad(expected, inputs, grad.double())

    results = [
        poisoned(*t.shape, dtype=t.dtype) if every or random.random() < 0.5 else None
        for t in (*features, points, lidar2img, weights, spread)
    ]
    views = [View.of(t) for t in results]
    maps = (View * MOST_LEVELS)(*views[: len(features)])
    gradients = Structure(CameraSampleGradients(maps, *views[len(features) :]), results)
    levels = levels_of(features, [1.0] * len(features), [False] * len(features))
    workspace = Memory.of(kernels.bytes("camera_sample_backward_workspace", levels, len(features), weights))
    given = levels, len(features), points, lidar2img, weights, offsets, options_of(args), grad, gradients
    assert kernels("camera_sample_backward", *given, deterministic, workspace), describe(args)
    names = [*(f"level {i}" for i in range(len(features))), "reference_points", "lidar2img", "weights", "offsets"]
    for result, gradient, name in zip(results, wanted, names, strict=True):
        if result is not None:
            compare(result, gradient.double(), f"gradient of {name} {describe(args)}", 3)
    return [t for t in results if t is not None]


@DTYPES
@pytest.mark.parametrize("channels", [1, 3, 8, 31, 64, 130, 256, 520])
def test_random_cases(kernels: Kernels, channels: int, dtype: torch.dtype) -> None:
    kernels.multiprocessors(132)
    for _ in range(2):
        args = laid_out(random_case(channels), dtype)
        check(kernels, args)
        check_gradients(kernels, args, random.random() < 0.3, random.random() < 0.6)


@DTYPES
@pytest.mark.parametrize("sizes", [{}, {"points": 2, "offsets": True}, {"groups": 3, "channels": 18}, {"channels": 17}])
def test_many_queries(kernels: Kernels, sizes: dict, dtype: torch.dtype) -> None:
    """A kernel that reads planes, where maps are NCHW."""
    levels = [(random.randint(1, 12), random.randint(1, 20)) for _ in range(4)]
    options = {"queries": random.randint(300, 400), "channels": 16, "cams": random.choice([4, 6]), **sizes}
    kernels.multiprocessors(-(-options["channels"] // 2))  # as many as blocks
    features, *rest = node_args(case(levels, (928, 1600), **options))
    rest[2] = rest[2].to(dtype)
    kernels.launched()
    check(kernels, ([f.to(dtype) for f in features], *rest))
    assert "camera_sample_planes_kernel" in kernels.launched()


KERNELS = {1: "camera_sample_kernel", 2: "camera_sample_kernel", 3: "camera_sample_planes_kernel"}


@DTYPES
@pytest.mark.parametrize("tactic", KERNELS)
def test_each_tactic(kernels: Kernels, tactic: int, dtype: torch.dtype) -> None:
    """Asked for where it is valid, whatever it costs; where maps are NCHW, there are no vectors."""
    kernels.multiprocessors(random.choice([2, 40, 132]))
    levels = [(random.randint(2, 9), random.randint(2, 9)) for _ in range(random.randint(1, 4))]
    features, *rest = node_args(case(levels, (101, 53), queries=random.randint(257, 300), channels=24, cams=2))
    if tactic == 1:
        features = [f.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, f.shape[:2]) for f in features]
    rest[2] = rest[2].to(dtype)
    args = [f.to(dtype) for f in features], *rest
    kernels.launched()
    compare(sampled(kernels, args, tactic=tactic), reference(*precise(args)), describe(args))
    assert KERNELS[tactic] in kernels.launched()


def test_strides_of_axes_of_one(kernels: Kernels) -> None:
    """Do not matter."""
    args = node_args(case([(3, 5)], (288, 736), queries=3, points=2))
    weights = args[3].as_strided(args[3].shape, (12, 12, 2, 1, 77, 99))
    check(kernels, (*args[:3], weights, *args[4:]))


def test_queries_that_every_camera_sees(kernels: Kernels) -> None:
    """More views than a list has room for."""
    kernels.multiprocessors(4)
    args = case([(5, 7)] * 4, (928, 1600), queries=520, channels=8, cams=16)
    height, width = args["image_size"]
    matrix = torch.tensor(
        [[0.0031 * width, 0, 0, width / 2], [0, 0, 0.02 * height, height / 2], [0, 0, 0, 1], [0, 0, 0, 1]]
    )
    args["lidar2img"] = matrix * (1 + 0.02 * torch.rand(1, 16, 4, 4))
    kernels.launched()
    check(kernels, node_args(args))
    assert "camera_sample_planes_kernel" in kernels.launched()


@pytest.mark.parametrize("queries", [5, 350])
def test_what_is_not_a_number(kernels: Kernels, queries: int) -> None:
    kernels.multiprocessors(8)
    for value in (math.nan, math.inf, -math.inf):
        for name, index in (
            ("lidar2img", (0, 2)),
            ("lidar2img", (0, 2, 0)),
            ("reference_points", (0, 3, 1)),
            ("weights", (0, 4, 1, 0, 2)),
            ("weights", (0, queries - 1)),
        ):
            args = case([(9, 14), (5, 7), (3, 3), (2, 2)], (928, 1600), queries=queries, channels=16)
            args[name][index] = value
            if queries == 5 or (name, value) in (("weights", math.nan), ("lidar2img", math.inf)):
                check(kernels, node_args(args))
        args = node_args(case([(9, 14), (5, 7)], (928, 1600), queries=queries, channels=16))
        for feature in args[0]:
            feature[0, 2, 1:4] = value
        # Beyond the border nothing is read, as by grid_sample: the reference reads a pixel there, with weight 0.
        compare(sampled(kernels, args), OP(*precise(args)), f"{value} in features")


def in_blocks(codes: Tensor, size: int) -> Tensor:
    """CHW4 and CHW32: ``(B, cams, ceil(C/size), H, W, size)``."""
    padded = F.pad(codes, (0, 0, 0, 0, 0, -codes.shape[2] % size))
    return padded.unflatten(2, (-1, size)).movedim(3, -1).contiguous()


FORMATS = {
    "CHW32": lambda codes: in_blocks(codes, 32),
    "CHW4": lambda codes: in_blocks(codes, 4),
    "linear": torch.Tensor.contiguous,
    "channels-last": channels_last,
    "any": in_memory,
}


@DTYPES
@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("channels", [8, 70])
def test_int8_and_pooled_levels(kernels: Kernels, channels: int, format: str, dtype: torch.dtype) -> None:
    """And a mixture with others."""
    kernels.multiprocessors(132)
    for int8 in (range(3), range(1, 3, 2), ()):
        levels = [(18, 46), (9, 23), (random.randint(2, 9), random.randint(2, 9))]
        shape = {"queries": 7, "groups": random.choice([1, 2]), "activation": random.choice(["sigmoid", "softmax"])}
        args = node_args(case(levels, (288, 736), channels=channels, pooled=True, cams=random.choice([3, 6]), **shape))
        scales = [0.01 + 0.003 * i for i in range(3)]
        layout = random.choice([torch.Tensor.contiguous, channels_last, in_memory])
        maps, wide = [], []
        for i, feature in enumerate(args[0][:3]):
            codes = torch.randint(-128, 128, feature.shape, dtype=torch.int8)
            maps.append(FORMATS[format](codes) if i in int8 else layout(feature.to(dtype)))
            wide.append(codes.double() * scales[i] if i in int8 else feature.to(dtype).double())
        wide.append(F.max_pool2d(wide[-1].flatten(0, 1), 2).unflatten(0, wide[-1].shape[:2]))
        expected = reference(*precise((wide, *args[1:-1], [1.0] * 4)))
        structure = levels_of([*maps, maps[-1]], [*scales, scales[-1]], [False, False, False, True])
        output = sampled(kernels, args, structure, dtype)
        compare(output, expected, f"{format} {[(m.dtype, m.shape, m.stride()) for m in maps]}")


@DTYPES
def test_deterministic_gradients(kernels: Kernels, dtype: torch.dtype) -> None:
    """Of many queries at few pixels, more than one block has."""
    kernels.multiprocessors(132)
    args = node_args(case([(5, 6), (3, 4)], (928, 1600), queries=150, channels=9))
    args = laid_out(args, dtype)
    check_gradients(kernels, args, True)


def test_gradients_of_large_maps(kernels: Kernels) -> None:
    """An even and an odd number of pixels."""
    kernels.multiprocessors(132)
    for dtype in (torch.float32, torch.float16):
        features, *rest = node_args(case([(50, 90), (45, 53)], (928, 1600), queries=60, channels=5, cams=2))
        check_gradients(kernels, ([f.to(dtype) for f in features], *rest))


def test_nan_samples_have_no_gradient(kernels: Kernels) -> None:
    args = node_args(case([(29, 50), (15, 25), (8, 13), (4, 7)], (928, 1600), queries=30))
    for feature in args[0]:
        feature[:, 2, 1:3, 1::2, 1::3] = math.nan  # not in the corner, which the reference reads beyond the border
    inputs = [t.requires_grad_() for t in precise(args)[0]]
    expected = reference(inputs, *precise(args)[1:])
    grad = torch.randn(expected.shape)
    wanted = torch.autograd.grad(expected, inputs, grad.double())
    results = [poisoned(*t.shape, dtype=t.dtype) for t in args[0]]
    empty = [View() for _ in range(4)]
    maps = (View * MOST_LEVELS)(*(View.of(t) for t in results))
    levels = levels_of(args[0], [1.0] * 4, [False] * 4)
    workspace = Memory.of(kernels.bytes("camera_sample_backward_workspace", levels, 4, args[3]))
    gradients = Structure(CameraSampleGradients(maps, *empty), results)
    given = levels, 4, *args[1:5], options_of(args), grad, gradients
    assert kernels("camera_sample_backward", *given, False, workspace)
    for result, gradient in zip(results, wanted, strict=True):
        compare(result, gradient, "gradient of a level", 3)


@pytest.mark.parametrize(("batch", "queries"), [(0, 3), (2, 0)])
def test_empty(kernels: Kernels, batch: int, queries: int) -> None:
    args = case([(3, 5), (2, 2)], (288, 736), queries=queries, channels=8, batch=2)
    for name in ("reference_points", "lidar2img", "weights"):
        args[name] = args[name][:batch]
    args["features"] = [f[:batch] for f in args["features"]]
    assert sampled(kernels, node_args(args)).numel() == 0
