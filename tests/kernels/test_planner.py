"""The planners of the kernels: valid choices for every GPU, choices known to be right, and refused requests."""

from __future__ import annotations

import ctypes
import random
from pathlib import Path

import pytest
import torch

from svexport.errors import PluginBuildError, UnsupportedError
from svexport.kernels import planner, shapes
from svexport.kernels.planner import GPUS
from svexport.ops import _cuda
from tests.csrc import CXX, built

pytestmark = pytest.mark.skipif(not CXX, reason="needs g++")

SOURCE = Path(__file__).parent / "planners.cpp"
PROBLEMS = 100_000
NORM = "add_bias_residual_layer_norm"


def test_random_problems_on_every_gpu() -> None:
    """At least one tactic that is valid, launches within limits, the cheapest chosen: :file:`planners.cpp`."""
    flags = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", f"-I{_cuda.CSRC / 'cuda'}")
    library = ctypes.CDLL(str(built("planners.so", (CXX, *flags, SOURCE), [SOURCE])))
    library.check_planners.restype = ctypes.c_int64
    gpus = (planner._Gpu * len(GPUS))(*(planner._described(gpu) for gpu in GPUS.values()))
    names = (ctypes.c_char_p * len(GPUS))(*(gpu.name.encode() for gpu in GPUS.values()))
    seed, why = random.getrandbits(32), ctypes.create_string_buffer(1024)
    tried = library.check_planners(
        gpus, names, len(GPUS), ctypes.c_uint64(seed), ctypes.c_int64(PROBLEMS), why, len(why)
    )
    assert tried == PROBLEMS, f"seed {seed}: {why.value.decode()}"


def chosen(gpu: str, **problem: int) -> str:
    return str(planner.plan(NORM, GPUS[gpu], **problem).chosen)


@pytest.mark.parametrize("gpu", ["t4", "orin", "h100"])
@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ({"rows": 40000, "columns": 256, "item_size": 2}, "warp8 vector resident"),
        ({"rows": 40000, "columns": 256, "item_size": 4}, "warp8 vector"),
        ({"rows": 40000, "columns": 250, "item_size": 2, "strides": 4}, "warp8 pair resident"),
        ({"rows": 40000, "columns": 499, "item_size": 2, "strides": 2}, "block8 shifted resident"),
        ({"rows": 40000, "columns": 64, "item_size": 4}, "warp8 vector resident"),
        ({"rows": 200000, "columns": 17, "item_size": 2, "strides": 2}, "warp8 shifted resident"),
        ({"rows": 40000, "columns": 64, "item_size": 2}, "warp8 vector resident"),
        ({"rows": 40000, "columns": 511, "item_size": 2, "strides": 2, "dense": 0}, "block8 single"),
        ({"rows": 6000, "columns": 4096, "item_size": 2}, "block32 vector"),
        ({"rows": 100, "columns": 30000, "item_size": 4}, "long vector"),
        ({"rows": 900, "columns": 256, "backward": 1}, "warp8 vector resident"),
    ],
)
def test_known_choices(gpu: str, problem: dict[str, int], expected: str) -> None:
    """As they were measured to be the fastest."""
    assert chosen(gpu, **problem) == expected


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ({"rows": 160_000, "channels": 32, "samples": 16, "item_size": 2}, (8, 4)),
        ({"rows": 160_000, "channels": 32, "samples": 16, "item_size": 4}, (4, 8)),
        ({"rows": 160_000, "channels": 32, "samples": 16, "item_size": 2, "alignment": 8}, (1, 32)),
        ({"rows": 160_000, "channels": 32, "samples": 16, "item_size": 2, "backward": 1}, (4, 8)),
        ({"rows": 7200, "channels": 1024, "samples": 16, "item_size": 2}, (8, 32)),
        ({"rows": 160_000, "channels": 32, "samples": 16, "item_size": 1}, (16, 2)),
        ({"rows": 800, "channels": 32, "samples": 16, "item_size": 1}, (8, 4)),
    ],
)
def test_known_choices_of_deformable_attention(problem: dict[str, int], expected: tuple[int, int]) -> None:
    """Whole vectors, a lane for each."""
    for gpu in GPUS.values():
        constants = planner.plan("ms_deform_attn", gpu, **problem).chosen.constants
        assert (constants["width"], constants["lanes"]) == expected


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ({"queries": 900, "levels": 4}, "planes"),  # detr3d
        ({"queries": 512, "levels": 4}, "planes"),
        ({"queries": 900, "levels": 1}, "channels"),
        ({"queries": 300, "levels": 4, "images": 4}, "channels"),
        ({"queries": 200, "levels": 4}, "channels"),
        ({"queries": 900, "levels": 4, "planes": 0, "vectors": 1}, "vectors"),
        ({"queries": 900, "levels": 4, "planes": 0, "channels": 250}, "channels"),
    ],
)
def test_known_choices_of_camera_sample(problem: dict[str, int], expected: str) -> None:
    """As they were measured on an H200."""
    problem = {"channels": 256, "item_size": 2, "planes": 1, **problem}
    assert planner.plan("camera_sample", GPUS["h200"], **problem).chosen.constants["kernel"] == expected


@pytest.mark.parametrize(
    ("problem", "expected"),
    [
        ({"pixels": 58 * 100}, "packed"),
        ({"pixels": 29 * 50}, "planes"),
        ({"pixels": 29 * 50, "packed": 1}, "packed"),
        ({"pixels": 58 * 100, "channels": 64, "offset_groups": 64, "runs": 0}, "planes"),
        ({"pixels": 29 * 50, "planes": 0}, "packed"),
    ],
)
def test_known_choices_of_deform_conv2d(problem: dict[str, int], expected: str) -> None:
    """As they were measured on an H200, of half types."""
    problem = {"channels": 256, "taps": 9, **problem}
    problem["input_bytes"] = 2 * problem["pixels"] * problem["channels"]
    assert planner.plan("deform_conv2d", GPUS["h200"], **problem).chosen.constants["kernel"] == expected


def einsum_by(gpu: str, sizes: tuple[int, ...], **problem: int) -> str:
    names = ("shared", "outer", "x_count", "rows", "x_width", "z_count", "z_width")
    return str(planner.plan("einsum", GPUS[gpu], **dict(zip(names, sizes, strict=True)), **problem).chosen)


@pytest.mark.parametrize(
    ("sizes", "problem", "expected"),
    [
        # nkctv,kvw->nctw of 64x3x64x300x25, its gradient of x and of A
        ((1, 4096, 3, 300, 25, 1, 25), {"whole": 1}, "large one 4 0 engine"),
        ((1, 4096, 1, 300, 25, 3, 25), {"whole": 1}, "large one 5 0 engine"),
        ((1, 4096, 3, 300, 25, 1, 25), {"whole": 1, "sums": 1}, "small one 4 5 engine"),
        # the same of one sample
        ((1, 64, 1, 300, 25, 3, 25), {"whole": 1}, "large apart 4 0 engine"),
        ((1, 64, 3, 300, 25, 1, 25), {"whole": 1, "sums": 1}, "small one 4 3 engine"),
        # kcvw: many sums of few rows each
        ((150, 10, 3, 10, 25, 1, 17), {"sums": 1}, "small one 3 5"),
        # nctw,cd->ndtw of 64x64x300x25 to 128, and few columns
        ((1, 64, 64, 7500, 1, 128, 1), {"aligned": 4}, "channel_product one 64 0"),
        ((1, 64, 64, 7500, 1, 20, 1), {"aligned": 4}, "channel_product one 32 0"),
        ((1, 64, 64, 7500, 1, 128, 1), {"sums": 1}, "channel_correlation one 0 0"),
        ((1, 64, 3, 300, 70, 1, 25), {}, "matrices one 0 0"),
    ],
)
def test_known_choices_of_einsum(sizes: tuple[int, ...], problem: dict[str, int], expected: str) -> None:
    """As they were measured on an H200."""
    assert einsum_by("h200", sizes, **problem) == expected


def test_einsum_on_other_gpus() -> None:
    """Groups of warps multiply on 9.0 alone, tensor cores float32 from 8.0 on; the copy engine came with 9.0."""
    channels, graph = (1, 64, 64, 7500, 1, 128, 1), (1, 4096, 3, 300, 25, 1, 25)
    for gpu, of_channels, of_graph in [
        ("t4", "matrices one 0 0", "matrices one 0 0"),
        ("l4", "matrices one 0 0", "large one 4 0"),
        ("orin", "matrices one 0 0", "large one 4 0"),
        ("b200", "matrices one 0 0", "large one 4 0 engine"),
        ("5090", "matrices one 0 0", "large one 4 0 engine"),
    ]:
        assert einsum_by(gpu, channels, whole=1) == of_channels
        assert einsum_by(gpu, graph, whole=1) == of_graph


@pytest.mark.parametrize(
    ("shape", "dtype", "problem", "expected"),
    [
        ((6, 256, 116, 200, 900), "float16", {}, "planes"),
        ((6, 256, 116, 200, 900), "float16", {"alignment": 16, "planes": 0, "dense": 0}, "vectors"),
        ((1, 256, 200, 200, 40_000), "float16", {}, "sampled"),
        ((1, 256, 200, 200, 40_000), "float16", {"planes": 0}, "boxes"),
        ((8, 64, 256, 512, 131_072), "float16", {}, "boxes"),
        ((8, 64, 256, 512, 131_072), "float16", {"workspace": 0}, "planes"),
        ((1, 1, 480, 640, 307_200), "float16", {}, "planes"),
        ((12, 256, 18, 46, 2048), "float16", {}, "planes"),
        ((1, 180, 224, 224, 50_176), "float16", {"alignment": 8, "planes": 0, "dense": 0}, "narrow"),
        ((64, 16, 50, 50, 49), "float32", {"alignment": 16, "planes": 0, "dense": 0}, "points"),
        ((2, 20, 37, 41, 3127), "float32", {"planes": 0}, "points"),
    ],
)
def test_known_choices_of_grid_sample(
    shape: tuple[int, ...], dtype: str, problem: dict[str, int], expected: str
) -> None:
    """As they were measured on an H200."""
    problem = {**shapes.problem("grid_sample", shape, dtype), "across": 512, **problem}
    assert planner.plan("grid_sample", GPUS["h200"], **problem).chosen.constants["kernel"] == expected


@pytest.mark.parametrize(
    ("shape", "problem", "expected"),
    [
        ((6, 256, 116, 200, 900), {}, "plane"),
        ((6, 256, 116, 200, 900), {"last": 1, "dense": 0}, "plane"),
        ((1, 256, 200, 200, 40_000), {}, "lists vectors"),
        ((8, 64, 256, 512, 131_072), {}, "lists vectors boxes"),
        ((8, 64, 256, 512, 131_072), {"last": 1, "dense": 0}, "lists vectors"),
        ((8, 64, 256, 512, 131_072), {"item_size": 4}, "lists vectors boxes"),
        ((1, 32, 256, 256, 65_536), {"item_size": 4}, "pixels vectors"),
        ((8, 4, 400, 400, 160_000), {"item_size": 4}, "lists"),
        ((1, 1, 480, 640, 307_200), {}, "pairs"),
        ((1, 1, 480, 640, 307_200), {"item_size": 4}, "pixels"),
        ((1, 256, 200, 200, 40_000), {"deterministic": 1}, "ordered vectors"),
        ((1, 256, 200, 200, 40_000), {"input": 0}, "none"),
        ((1, 256, 200, 200, 40_000), {"input": 0, "last": 1, "dense": 0}, "none vectors"),
        ((8, 5, 8, 14, 40_000), {}, "pairs"),
        ((4, 8, 9, 34, 40_000), {"item_size": 4}, "pixels vectors"),
    ],
)
def test_known_choices_of_its_gradient(shape: tuple[int, ...], problem: dict[str, int], expected: str) -> None:
    """As they were measured on an H200, of half types where nothing is said."""
    across = {40_000: 200, 160_000: 400, 131_072: 512, 65_536: 256, 307_200: 640}.get(shape[-1], 1)
    problem = {**shapes.problem("grid_sample_backward", shape, "float16", backward=True), "across": across, **problem}
    found = planner.plan("grid_sample_backward", GPUS["h200"], **problem).chosen
    assert " ".join(str(found).split()) == expected


def test_rows_that_a_small_gpu_has_no_memory_for_go_another_way() -> None:
    """Bias, weight and norm_bias of 8191 columns, which begin anywhere, are 108 KB on an H100; a Turing has 64."""
    problem = {"rows": 2000, "columns": 8191, "item_size": 2, "strides": 2}
    large, small = (planner.plan(NORM, GPUS[gpu], **problem).chosen for gpu in ("h100", "t4"))
    assert str(large) == "block32 shifted resident"
    assert large.launch.shared_memory == 3 * 288 * 32 * 4
    assert str(small) == "long shifted"
    assert small.launch.shared_memory == 0


def test_more_multiprocessors_more_blocks() -> None:
    problem = {"rows": 10**6, "columns": 256, "item_size": 2}
    blocks = {gpu: planner.plan(NORM, GPUS[gpu], **problem).chosen.launch.grid[0] for gpu in ("orin", "t4", "h100")}
    assert blocks == {"orin": 7 * 16, "t4": 7 * 40, "h100": 7 * 132}


def test_wrong_questions_are_refused() -> None:
    with pytest.raises(UnsupportedError, match="nothing has no planner; those that have one: add_bias_residual"):
        planner.plan("nothing", GPUS["t4"])
    with pytest.raises(UnsupportedError, match=r"made of backward, rows, .*; not of colums"):  # codespell:ignore colums
        planner.plan(NORM, GPUS["t4"], colums=3)  # codespell:ignore colums


def test_without_a_compiler_the_error_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    planner._library.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    try:
        with pytest.raises(PluginBuildError, match=r"no C\+\+ compiler was found"):
            planner.problems()
    finally:
        planner._library.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_the_gpu_at_hand_is_described() -> None:
    found = planner.this_gpu()
    assert found is not None
    assert found.multiprocessors == torch.cuda.get_device_properties(0).multi_processor_count
    assert found.shared_memory >= 48 * 1024
    assert 50 < found.bandwidth < 20000
