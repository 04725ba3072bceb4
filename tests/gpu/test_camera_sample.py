from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops import _cuda
from svexport.ops.camera_sample import OP, reference
from tests.gpu.support import TOLERANCES, gpu, moved, outputs_and_gradients, relative_error
from tests.ops.test_camera_sample import CASES, DETR3D, SEED, STREAM, case, node_args

pytestmark = gpu

DTYPES = tuple(TOLERANCES)


@pytest.fixture(autouse=True)
def loaded() -> None:
    assert _cuda.load()
    torch.manual_seed(2)


def channels_last(feature: Tensor) -> Tensor:
    return feature.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, feature.shape[:2])


def sliced(feature: Tensor) -> Tensor:
    """Unaligned, with gaps between rows."""
    return F.pad(feature, (1, 2))[..., 1:-2]


LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "nchw": torch.Tensor.contiguous,
    "channels-last": channels_last,
    "sliced": sliced,
    "sliced-channels-last": lambda f: channels_last(F.pad(f, (0, 0, 0, 0, 1, 0)))[:, :, 1:],
}


def cast(args: tuple, dtype: torch.dtype) -> tuple:
    """The same with features of another type."""
    return [f.to(dtype) for f in args[0]], *args[1:]


def precise(args: Sequence) -> tuple:
    """Features and weights in float64, and the projection in float32 as the kernel's.

    So both have to agree on every point that counts, also within a rounding of the border.
    """
    features, points, lidar2img, weights, offsets, *options = args
    geometry = points.float(), lidar2img.float()
    return [f.double() for f in features], *geometry, weights.double(), offsets.float(), *options


def check(args: tuple, function: Callable = reference) -> None:
    """In every layout against ``function`` on the CPU."""
    expected = function(*precise(args))
    rest = moved(args[1:], "cuda")
    for name, layout in LAYOUTS.items():
        output = OP([layout(f.cuda()) for f in args[0]], *rest)
        assert output.dtype == args[0][0].dtype
        assert output.is_contiguous()
        assert (error := relative_error(output, expected)) < TOLERANCES[output.dtype], f"{name}: {error:.2e}"


def check_gradients(args: tuple, layouts: Sequence[str] = tuple(LAYOUTS)) -> None:
    """Of every tensor among the arguments."""
    grad = torch.randn(*args[3].shape[:2], args[0][0].shape[2]).to(args[0][0].dtype)
    _, expected = outputs_and_gradients(reference, precise(args), [grad.double()])
    rest = moved(args[1:], "cuda")
    for name in layouts:
        features = [LAYOUTS[name](f.cuda()) for f in args[0]]
        actual, inputs = gradients(features, rest, grad.cuda())
        for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
            assert a.dtype == inputs[i].dtype
            error = relative_error(a, e)
            assert error < 3 * TOLERANCES[a.dtype], f"{name}, gradient {i}: relative error {error:.2e}"


def gradients(features: list[Tensor], rest: tuple, grad: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """They, and what they belong to. Layouts are kept."""
    inputs = [t.detach().requires_grad_() for t in (*features, *rest[:4])]
    output = OP(inputs[: len(features)], *inputs[len(features) :], *rest[4:])
    return list(torch.autograd.grad(output, inputs, grad)), inputs


every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@every_dtype
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_is_the_reference(sizes: dict, dtype: torch.dtype) -> None:
    args = cast(node_args(case(**sizes)), dtype)
    check(args)
    check_gradients(args)


@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 31, 64, 65, 96, 130, 256, 257, 520, 1032])
def test_channels(channels: int) -> None:
    sizes = {**DETR3D, "queries": 5, "channels": channels, "batch": 2, "levels": [(15, 25), (4, 7)]}
    for dtype in DTYPES:
        args = cast(node_args(case(**sizes)), dtype)
        check(args)
        check_gradients(args, ["nchw", "channels-last"])


@pytest.mark.parametrize(("channels", "groups"), [(6, 6), (96, 3), (256, 8), (256, 32), (40, 5), (264, 1), (300, 300)])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_groups(channels: int, groups: int, activation: str) -> None:
    sizes = {**STREAM, "channels": channels, "groups": groups, "queries": 3, "activation": activation, "batch": 2}
    for dtype in DTYPES:
        args = cast(node_args(case(**sizes)), dtype)
        check(args)
        check_gradients(args, ["nchw", "channels-last"])


def test_every_argument_in_half() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for sizes in (SEED, STREAM):
            args = moved(node_args(case(**sizes)), dtype)
            check(args)
            check_gradients(args)


def test_many_points() -> None:
    """More samples than a block has threads."""
    args = node_args(case(**{**STREAM, "points": 101, "queries": 4}))
    check(args)
    check_gradients(args)


# ------------------------------------------------------------------ many queries

# Most are enough for the kernel that reads planes, where maps are NCHW; the others are what it leaves to the other one.
MANY = {
    "seed": {**SEED, "pooled": False, "queries": 516, "channels": 256},
    "odd": {**DETR3D, "queries": 391, "channels": 257, "levels": [(29, 50), (13, 25), (8, 13), (1, 7)]},
    "one-level": {**DETR3D, "queries": 1163, "channels": 64, "levels": [(15, 25)]},
    "five-levels": {**DETR3D, "queries": 900, "channels": 88, "levels": [(15, 25), (9, 13), (4, 7), (2, 4), (1, 1)]},
    "batch": {**DETR3D, "batch": 3, "queries": 300, "channels": 88},
    "several-at-once": {**DETR3D, "queries": 2500, "channels": 60, "cams": 7},
    "12-cameras": {**SEED, "cams": 12, "queries": 520, "channels": 190},
    "points": {**DETR3D, "queries": 259, "channels": 256, "points": 5, "offsets": True},
    "clamped": {**DETR3D, "queries": 400, "channels": 256, "uv_clamp": (-1.0, 2.0), "depth_eps": 1e-2},
    "softmax": {**DETR3D, "queries": 400, "channels": 256, "activation": "softmax"},
    "groups": {**DETR3D, "queries": 257, "channels": 258, "groups": 3, "points": 2},
    "groups-of-odd-channels": {**DETR3D, "queries": 400, "channels": 255, "groups": 3},
}
every_many = pytest.mark.parametrize("sizes", MANY.values(), ids=MANY)


@every_dtype
@every_many
def test_many_queries(sizes: dict, dtype: torch.dtype) -> None:
    check(cast(node_args(case(**sizes)), dtype))


@every_dtype
@pytest.mark.parametrize("name", ["several-at-once", "points", "groups", "five-levels"])
def test_many_queries_with_weights_that_are_not_numbers(name: str, dtype: torch.dtype) -> None:
    """Wherever they are: only the sums of their queries, and groups, are NaN."""
    args = case(**MANY[name])
    queries = args["weights"].shape[1]
    args["weights"][:, [3, queries // 2, queries - 1], -1] = math.nan
    args["weights"][:, 4, 0, 0, ..., -1] = math.nan
    args["weights"][:, [5, queries - 2], :, :, 0] = math.inf
    args["weights"][:, [6, queries - 3], :, 0] = -math.inf
    check(cast(node_args(args), dtype))


def test_many_queries_with_every_argument_in_half() -> None:
    for dtype in (torch.float16, torch.bfloat16):
        check(moved(node_args(case(**MANY["points"])), dtype))


def test_many_queries_of_strided_arguments() -> None:
    args = node_args(case(**{**MANY["points"], "batch": 2}))
    features, *rest = moved(args, "cuda")
    expected = OP(features, *rest)
    gaps = [torch.stack([t, t + 1], -1)[..., 0] if isinstance(t, Tensor) else t for t in rest]
    assert torch.equal(OP(features, *gaps), expected)
    output = torch.full((2, 259, 300), math.nan, device="cuda")
    levels = [1.0] * len(features), [False] * len(features)
    torch.ops.svexport_internal.camera_sample_levels(features, *levels, *rest[:-1], output[:, :, 1:257])
    assert torch.equal(output[:, :, 1:257], expected)
    assert output[:, :, :1].isnan().all()
    assert output[:, :, 257:].isnan().all()


@pytest.mark.parametrize("cams", [5, 16])
def test_many_queries_that_every_camera_sees(cams: int) -> None:
    """More views than a list has room for."""
    args = case(**{**DETR3D, "queries": 1030, "channels": 130, "cams": cams})
    height, width = args["image_size"]
    matrix = torch.tensor(
        [[0.0031 * width, 0, 0, width / 2], [0, 0, 0.02 * height, height / 2], [0, 0, 0, 1], [0, 0, 0, 1]]
    )
    args["lidar2img"] = matrix * (1 + 0.02 * torch.rand(1, cams, 4, 4))
    for dtype in DTYPES:
        check(cast(node_args(args), dtype))


@every_many
def test_many_queries_are_as_few(sizes: dict) -> None:
    """Twice the same, bit for bit, also of a graph; and but for rounding what a few at a time are."""
    features, points, lidar2img, weights, offsets, *options = moved(node_args(case(**sizes)), "cuda")
    args = (features, points, lidar2img, weights, offsets, *options)
    first = OP(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = OP(*args)
    for _ in range(3):
        captured.fill_(math.nan)
        graph.replay()
        assert torch.equal(captured, first)
    few = []
    for i in range(0, weights.shape[1], 128):
        some = offsets if offsets.shape[1] == 1 else offsets[:, i : i + 128]
        few.append(OP(features, points[:, i : i + 128], lidar2img, weights[:, i : i + 128], some, *options))
    torch.testing.assert_close(first, torch.cat(few, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.large
@pytest.mark.parametrize("queries", [1, 900])
def test_full_size(queries: int) -> None:
    for sizes, count in ((DETR3D, queries), (STREAM, min(queries, 100))):
        levels = [(58, 100), (29, 50), (15, 25), (8, 13)]
        args = node_args(case(**{**sizes, "levels": levels, "queries": count, "channels": 256}))
        check(cast(args, torch.float16))


@pytest.mark.large
@pytest.mark.parametrize("many", [False, True])
def test_the_same_points_count(many: bool) -> None:
    """Bit for bit: of a million projections none is seen by one side only, nor of as many as there are in planes."""
    sizes = {**DETR3D, "levels": [(3, 5)], "channels": 1, "queries": 30000, "batch": 6}
    if many:
        sizes |= {"levels": [(3, 5)] * 4, "channels": 66, "queries": 3000}
    for clamp in ({}, {"uv_clamp": (-0.5, 1.5), "depth_eps": 1e-2}):
        args = case(**sizes, **clamp)
        args["lidar2img"] = args["lidar2img"] * (1 + 0.1 * torch.rand_like(args["lidar2img"]))
        args["features"] = [torch.ones_like(f) for f in args["features"]]
        args["weights"] = 100 * torch.ones_like(args["weights"])
        given = node_args(args)
        seen = OP(*moved(given, "cuda")).cpu() > 0
        assert int((seen != (reference(*precise(given)) > 0)).sum()) == 0


def test_strided_arguments() -> None:
    args = node_args(case(**{**STREAM, "batch": 2}))
    expected = OP(*moved(args, "cuda"))
    features, *rest = moved(args, "cuda")
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(t, Tensor) else t for t in rest]
    gaps = [torch.stack([t, t + 1], -1)[..., 0] if isinstance(t, Tensor) else t for t in rest]
    for given in (strided, gaps):
        assert torch.equal(OP(features, *given), expected)


def spread(small: Tensor, axis: int) -> Tensor:
    """The same on the GPU, with its last pixel 2^31 elements behind the first."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of device memory")
    memory = torch.empty(2_410_000_000, dtype=torch.half, device="cuda")
    strides = list(small.stride())
    strides[axis] = [2_400_000_000, 400_000_000][axis]
    return memory.as_strided(small.shape, strides).copy_(small)


@pytest.mark.large
def test_beyond_32_bits() -> None:
    sizes = {**DETR3D, "levels": [(5, 7)], "queries": 9, "channels": 16}
    args = node_args(case(**sizes))
    for layout in (torch.Tensor.contiguous, channels_last):
        small = layout(args[0][0].half().cuda())
        far = spread(small, 1)
        rest = moved(args[1:], "cuda")
        assert torch.equal(OP([far], *rest), OP([small], *rest))


@pytest.mark.large
@pytest.mark.parametrize("queries", [9, 1100])
@pytest.mark.parametrize("axis", [0, 1], ids=["image", "camera"])
def test_levels_beyond_32_bits(axis: int, queries: int) -> None:
    """Of many queries, which read planes where these are near: sums in another order."""
    sizes = {**DETR3D, "levels": [(5, 7)] * 4, "queries": queries, "channels": 64, "batch": 2 - axis}
    args = node_args(case(**sizes))
    for layout in (torch.Tensor.contiguous, channels_last):
        small = layout(args[0][0].half().cuda())
        far = spread(small, axis)
        rest = moved(args[1:], "cuda")
        others = [layout(f.half().cuda()) for f in args[0][1:]]
        torch.testing.assert_close(OP([far, *others], *rest), OP([small, *others], *rest), rtol=2e-3, atol=2e-3)


# ------------------------------------------------------------------ what is not a number


@pytest.mark.parametrize(
    "sizes",
    [DETR3D, {**STREAM, "uv_clamp": (-1.0, 2.0)}, MANY["batch"]],
    ids=["detr3d", "stream", "many"],
)
def test_what_is_not_a_number(sizes: dict) -> None:
    def changed(change: Callable[[dict], None]) -> tuple:
        args = case(**sizes)
        change(args)
        return node_args(args)

    def fill(tensor: Tensor, index: tuple, value: float) -> None:
        tensor[index] = value

    for value in (math.nan, math.inf, -math.inf):
        for name, index in (
            ("lidar2img", (0, 2)),
            ("lidar2img", (0, 2, 0)),
            ("reference_points", (0, 3)),
            ("reference_points", (0, 3, 1)),
            ("weights", (0, 4, 1, 0, 2)),
            ("weights", (0, 4)),
        ):
            check(changed(lambda a, name=name, index=index, x=value: fill(a[name], index, x)))
        # beyond the border nothing is read, as by grid_sample: the reference reads a pixel there, with weight 0
        check(changed(lambda a, x=value: [fill(f, (0, 2, slice(1, 4)), x) for f in a["features"]]), OP)
    check(changed(lambda a: fill(a["reference_points"], (0,), 1e30)))
    check(changed(lambda a: fill(a["lidar2img"], (0,), 1e30)))


# ------------------------------------------------------------------ int8 and pooled levels


def blocks(codes: torch.Tensor, size: int) -> torch.Tensor:
    """TensorRT's CHW4 and CHW32: ``(B, cams, ceil(C/size), H, W, size)``."""
    padded = F.pad(codes, (0, 0, 0, 0, 0, -codes.shape[2] % size))
    return padded.unflatten(2, (-1, size)).movedim(3, -1).contiguous()


INT8 = {
    "CHW32": lambda codes: blocks(codes, 32),
    "CHW4": lambda codes: blocks(codes, 4),
    "linear": torch.Tensor.contiguous,
    "channels-last": channels_last,
}


@every_dtype
@pytest.mark.parametrize("channels", [8, 32, 70, 256])
@pytest.mark.parametrize("sizes", [SEED, {**STREAM, "groups": 2}], ids=["seed", "stream"])
def test_levels(sizes: dict, channels: int, dtype: torch.dtype) -> None:
    """Pooled, int8, and a mixture."""
    sizes = {**sizes, "channels": channels, "levels": [*sizes["levels"][:2], (7, 9)], "pooled": True}
    for int8 in ((), range(3), range(1, 3, 2)):
        args = node_args(case(**sizes))
        scales = [0.01 + 0.003 * i for i in range(3)]
        maps, levels = [], []
        for i, feature in enumerate(args[0][:3]):
            codes = torch.randint(-128, 128, feature.shape, dtype=torch.int8)
            maps.append(codes if i in int8 else feature.to(dtype))
            levels.append(codes.double() * scales[i] if i in int8 else feature.to(dtype).double())
        levels.append(F.max_pool2d(levels[-1].flatten(0, 1), 2).unflatten(0, levels[-1].shape[:2]))
        expected = reference(*precise((levels, *args[1:-1], [1.0] * 4)))
        for name, layout in LAYOUTS.items():
            for format, pack in INT8.items() if int8 else {"": None}.items():
                given = [pack(m).cuda() if m.dtype == torch.int8 else layout(m.cuda()) for m in maps]
                output = torch.full((1, sizes["queries"], channels), math.nan, dtype=dtype, device="cuda")
                torch.ops.svexport_internal.camera_sample_levels(
                    [*given, given[-1]],
                    [*scales, scales[-1]],
                    [False, False, False, True],
                    *moved(args[1:-1], "cuda"),
                    output,
                )
                assert (error := relative_error(output, expected)) < TOLERANCES[dtype], f"{name} {format}: {error:.2e}"


# ------------------------------------------------------------------ gradients


@every_dtype
def test_gradients_of_large_maps(dtype: torch.dtype) -> None:
    """An even and an odd number of pixels."""
    sizes = {**DETR3D, "levels": [(50, 90), (45, 53)], "queries": 200, "channels": 70}
    check_gradients(cast(node_args(case(**sizes)), dtype), ["nchw", "channels-last"])


@pytest.mark.parametrize("sizes", [DETR3D, {**STREAM, "channels": 64}], ids=["detr3d", "stream"])
def test_deterministic_gradients(sizes: dict) -> None:
    """Many queries at few pixels, so that sums have many orders."""
    args = node_args(case(**{**sizes, "levels": [(5, 6), (3, 4)], "queries": 700}))
    grad = torch.randn(1, 700, args[0][0].shape[2], device="cuda")
    features, *rest = moved(args, "cuda")
    runs = []
    torch.use_deterministic_algorithms(True)
    try:
        for layout in (torch.Tensor.contiguous, torch.Tensor.contiguous, channels_last):
            runs.append(gradients([layout(f) for f in features], tuple(rest), grad)[0])
    finally:
        torch.use_deterministic_algorithms(False)
    for first, second in zip(*runs[:2], strict=True):
        assert torch.equal(first, second)
    for first, third in zip(runs[0][:2], runs[2][:2], strict=True):
        assert torch.equal(first, third)
    check_gradients(args, ["nchw"])


def test_gradients_that_are_asked_for() -> None:
    args = moved(node_args(case(**STREAM)), "cuda")
    features, *rest = args
    grad = torch.randn(1, args[3].shape[1], 16, device="cuda")
    every, _ = gradients(features, tuple(rest), grad)
    for chosen in range(len(every)):
        inputs = [t.detach().requires_grad_(i == chosen) for i, t in enumerate((*features, *rest[:4]))]
        output = OP(inputs[: len(features)], *inputs[len(features) :], *rest[4:])
        (alone,) = torch.autograd.grad(output, inputs[chosen], grad)
        torch.testing.assert_close(alone, every[chosen], rtol=1e-5, atol=1e-5)


@every_dtype
@pytest.mark.parametrize("tactic", [1, 2, 3])
def test_each_tactic_is_the_reference(tactic: int, dtype: torch.dtype) -> None:
    """Whatever it costs; where a layout has no such tactic, the cheapest runs."""
    torch.ops.svexport._force_tactic("camera_sample", tactic)
    try:
        for sizes in ({**DETR3D, "queries": 300}, {**SEED, "queries": 700, "channels": 24, "batch": 2}):
            args = cast(node_args(case(**sizes)), dtype)
            check((*args[:3], args[3].to(dtype), *args[4:]))
    finally:
        torch.ops.svexport._force_tactic("camera_sample", 0)


def test_gradients_of_offsets_that_broadcast() -> None:
    args = node_args(case(**{**STREAM, "queries": 5}))
    for shape in ((1, 1, 1, 3), (1, 5, 1, 3), (1, 1, 13, 3)):
        check_gradients((*args[:4], torch.randn(shape), *args[5:]), ["nchw"])


def test_nan_samples_have_no_gradient() -> None:
    """Nor do they have one by their place, where autograd would multiply 0 by NaN."""
    args = node_args(case(**DETR3D))
    for feature in args[0]:
        feature[:, 2, 1:3, 1::2, 1::3] = math.nan  # not in the corner, which the reference reads beyond the border
    grad = torch.randn(1, args[3].shape[1], 8)
    _, expected = outputs_and_gradients(reference, precise(args), [grad.double()])
    for layout in LAYOUTS.values():
        features = [layout(f.cuda()) for f in args[0]]
        actual, _ = gradients(features, moved(args[1:], "cuda"), grad.cuda())
        for i in (0, 1, 2, 3, 6):
            assert (error := relative_error(actual[i], expected[i])) < 3e-5, f"gradient {i}: {error:.2e}"
        assert actual[4].isfinite().all()
        assert actual[5].isfinite().all()
