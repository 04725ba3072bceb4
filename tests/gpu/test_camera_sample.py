from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops import _cuda
from svexport.ops.camera_sample import OP, reference
from svexport.ops.from_chw32 import from_chw32
from svexport.ops.to_chw32 import to_chw32
from tests.gpu.support import TOLERANCES, gpu, moved, relative_error
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
every_layout = pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def expected_of(args: Sequence, function: Callable = reference) -> Tensor:
    """The reference on the CPU: features and weights in float64, and the projection in float32 as the kernel's.

    So both have to agree on every point that counts, also within a rounding of the border.
    """
    features, points, lidar2img, weights, offsets, *options = args
    precise = [f.double() for f in features], points.float(), lidar2img.float(), weights.double(), offsets.float()
    return function(*precise, *options)


def check(
    args: tuple, layout: Callable[[Tensor], Tensor] = torch.Tensor.contiguous, function: Callable = reference
) -> None:
    features = [layout(f.cuda()) for f in args[0]]
    output = OP(features, *moved(args[1:], "cuda"))
    assert output.dtype == features[0].dtype
    assert output.is_contiguous()
    assert (error := relative_error(output, expected_of(args, function))) < TOLERANCES[output.dtype], error


@every_layout
@every_dtype
@pytest.mark.parametrize("sizes", CASES.values(), ids=CASES)
def test_is_the_reference(sizes: dict, dtype: torch.dtype, layout: Callable) -> None:
    args = node_args(case(**sizes))
    check(([f.to(dtype) for f in args[0]], *args[1:]), layout)


@every_layout
@pytest.mark.parametrize("channels", [1, 2, 3, 5, 8, 31, 64, 65, 96, 130, 256, 257, 512, 1032, 2056])
def test_channels(channels: int, layout: Callable) -> None:
    for dtype in DTYPES:
        args = node_args(case(**{**DETR3D, "queries": 5, "channels": channels, "batch": 2}))
        check(([f.to(dtype) for f in args[0]], *args[1:]), layout)


@every_layout
@pytest.mark.parametrize(("channels", "groups"), [(6, 6), (96, 3), (256, 8), (256, 32), (40, 5), (264, 1), (300, 300)])
@pytest.mark.parametrize("activation", ["sigmoid", "softmax"])
def test_groups(channels: int, groups: int, activation: str, layout: Callable) -> None:
    sizes = {**STREAM, "channels": channels, "groups": groups, "queries": 3, "activation": activation, "batch": 2}
    for dtype in DTYPES:
        args = node_args(case(**sizes))
        check(([f.to(dtype) for f in args[0]], *args[1:]), layout)


@every_layout
def test_every_argument_in_half(layout: Callable) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        for sizes in (SEED, STREAM):
            check(moved(node_args(case(**sizes)), dtype), layout)


@every_layout
def test_many_points(layout: Callable) -> None:
    """More samples than a block has threads."""
    check(node_args(case(**{**STREAM, "points": 101, "queries": 4})), layout)


@pytest.mark.parametrize("queries", [1, 900])
@every_layout
def test_full_size(queries: int, layout: Callable) -> None:
    for sizes, count in ((DETR3D, queries), (STREAM, min(queries, 100))):
        levels = [(58, 100), (29, 50), (15, 25), (8, 13)]
        args = node_args(case(**{**sizes, "levels": levels, "queries": count, "channels": 256}))
        check(([f.half() for f in args[0]], *args[1:]), layout)


def test_the_same_points_count() -> None:
    """Bit for bit: of a million projections none is seen by one side only."""
    sizes = {**DETR3D, "levels": [(3, 5)], "channels": 1, "queries": 30000, "batch": 6}
    for clamp in ({}, {"uv_clamp": (-0.5, 1.5), "depth_eps": 1e-2}):
        args = case(**sizes, **clamp)
        args["lidar2img"] = args["lidar2img"] * (1 + 0.1 * torch.rand_like(args["lidar2img"]))
        args["features"] = [torch.ones_like(f) for f in args["features"]]
        args["weights"] = 100 * torch.ones_like(args["weights"])
        given = node_args(args)
        seen = OP(*moved(given, "cuda")).cpu() > 0
        assert int((seen != (expected_of(given) > 0)).sum()) == 0


def test_strided_arguments() -> None:
    args = node_args(case(**{**STREAM, "batch": 2}))
    expected = OP(*moved(args, "cuda"))
    features, *rest = moved(args, "cuda")
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) if isinstance(t, Tensor) else t for t in rest]
    gaps = [torch.stack([t, t + 1], -1)[..., 0] if isinstance(t, Tensor) else t for t in rest]
    for given in (strided, gaps):
        assert torch.equal(OP(features, *given), expected)


def test_beyond_32_bits() -> None:
    """A pixel 2^31 elements behind the first."""
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB of device memory")
    sizes = {**DETR3D, "levels": [(5, 7)], "queries": 9, "channels": 16}
    args = node_args(case(**sizes))
    for layout in (torch.Tensor.contiguous, channels_last):
        small = layout(args[0][0].half().cuda())
        memory = torch.empty(6 * 400_000_000, dtype=torch.half, device="cuda")
        strides = list(small.stride())
        strides[1] = 400_000_000
        far = memory.as_strided(small.shape, strides)
        far.copy_(small)
        rest = moved(args[1:], "cuda")
        assert torch.equal(OP([far], *rest), OP([small], *rest))


# ------------------------------------------------------------------ what is not a number


@every_layout
@pytest.mark.parametrize("sizes", [DETR3D, {**STREAM, "uv_clamp": (-1.0, 2.0)}], ids=["detr3d", "stream"])
def test_what_is_not_a_number(sizes: dict, layout: Callable) -> None:
    def changed(change: Callable[[dict], None]) -> tuple:
        args = case(**sizes)
        change(args)
        return node_args(args)

    def fill(tensor: Tensor, index: tuple, value: float) -> None:
        tensor[index] = value

    for value in (math.nan, math.inf, -math.inf):
        check(changed(lambda a, x=value: fill(a["lidar2img"], (0, 2), x)), layout)
        check(changed(lambda a, x=value: fill(a["lidar2img"], (0, 2, 0), x)), layout)
        check(changed(lambda a, x=value: fill(a["reference_points"], (0, 3), x)), layout)
        check(changed(lambda a, x=value: fill(a["reference_points"], (0, 3, 1), x)), layout)
        check(changed(lambda a, x=value: fill(a["weights"], (0, 4, 1, 0, 2), x)), layout)
        check(changed(lambda a, x=value: fill(a["weights"], (0, 4), x)), layout)
        # beyond the border nothing is read, as by grid_sample: the reference reads a pixel there, with weight 0
        check(changed(lambda a, x=value: [fill(f, (0, 2, slice(1, 4)), x) for f in a["features"]]), layout, OP)
    check(changed(lambda a: fill(a["reference_points"], (0,), 1e30)), layout)
    check(changed(lambda a: fill(a["lidar2img"], (0,), 1e30)), layout)


# ------------------------------------------------------------------ int8 and pooled levels


def levels_op(maps: list[Tensor], scales: list[float], pool: list[bool], args: tuple, output: Tensor) -> Tensor:
    torch.ops.svexport.camera_sample_levels(maps, scales, pool, *moved(args[1:], "cuda"), output)
    return output


@every_layout
@every_dtype
@pytest.mark.parametrize("channels", [8, 32, 70, 256])
@pytest.mark.parametrize("sizes", [{**SEED, "pooled": False}, {**STREAM, "groups": 2}], ids=["seed", "stream"])
def test_levels(sizes: dict, channels: int, dtype: torch.dtype, layout: Callable) -> None:
    """Pooled, int8, and a mixture."""
    sizes = {**sizes, "channels": channels, "levels": [*sizes["levels"], (7, 9)]}
    count = len(sizes["levels"])
    for int8 in ((), range(count), range(1, count, 2)):
        args = node_args(case(**{**sizes, "levels": [*sizes["levels"], (3, 4)]}))
        scales = [0.01 + 0.003 * i for i in range(count)]
        maps, precise = [], []
        for i, feature in enumerate(args[0][:count]):
            feature = feature.to(dtype)
            if i in int8:
                codes = torch.randint(-128, 128, feature.shape, dtype=torch.int8)
                blocks = to_chw32(codes.flatten(0, 1)).unflatten(0, codes.shape[:2])
                assert torch.equal(from_chw32(blocks.flatten(0, 1), channels), codes.flatten(0, 1))
                maps.append(blocks.cuda())
                precise.append(codes.double() * scales[i])
            else:
                maps.append(layout(feature.cuda()))
                precise.append(feature.double())
        pooled = F.max_pool2d(precise[-1].flatten(0, 1), 2).unflatten(0, precise[-1].shape[:2])
        expected = expected_of(([*precise, pooled], *args[1:]))
        output = torch.full((1, sizes["queries"], channels), math.nan, dtype=dtype, device="cuda")
        actual = levels_op([*maps, maps[-1]], [*scales, scales[-1]], [False] * count + [True], args, output)
        assert (error := relative_error(actual, expected)) < TOLERANCES[dtype], error
