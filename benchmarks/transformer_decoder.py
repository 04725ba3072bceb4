"""``transformer_decoder`` beside the same decoder in torch: eager and compiled, both replayed from a CUDA graph.

``python -m benchmarks.transformer_decoder [folder]`` writes what no timing of whole calls says, as
``transformer_decoder-stages.json``: the time of every stage of a layer, launches, peak memory beside eager. It draws
them, and how time grows with batch and queries if ``transformer_decoder-sweep.json`` is there.
"""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import RESULTS, Workload, write
from svexport.ops import TransformerDecoder, TransformerDecoderConfig, _cuda
from svexport.ops.transformer_decoder import OP, rig

SMALL = {"num_layers": 6, "feature_sizes": ((36, 92), (18, 46), (9, 23)), "pool": False}

STAGES = {
    "rows": [
        (2, "loads, projection"), (3, "out_proj"), (4, "norm"), (5, "camera weights"), (6, "sampling"), (7, "exchange"),
        (8, "output_proj"), (9, "norm"), (10, "ffn.0"), (11, "ffn.2"), (12, "norm"), (13, "in_proj, queries and keys"),
        (14, "in_proj, values"), (15, ""),
    ],
    "branches": [
        (2, "loads"), (3, "reg.0"), (4, "reg.2"), (5, "reg.4"), (6, "points, encoder.0"), (7, "norm"), (8, "encoder.3"),
        (9, "norm"), (10, ""),
    ],
    "attention": [(2, "queries"), (3, "keys and values"), (4, "parts"), (5, "merge"), (6, "")],
}  # fmt: skip
"""By kernel (the second one has two kinds of blocks): the clock a stage begins with, and its name."""


def channels_last(feature: Tensor) -> Tensor:
    return feature.flatten(0, 1).to(memory_format=torch.channels_last).unflatten(0, feature.shape[:2])


def arguments(
    config: TransformerDecoderConfig, batch: int, queries: int, dtype: torch.dtype, layout: str
) -> tuple[Any, ...]:
    torch.manual_seed(0)
    module = TransformerDecoder(config)
    for p in module.parameters():
        if p.dim() > 1:
            torch.nn.init.normal_(p, std=p.shape[1] ** -0.5)
    query, query_pos = (torch.randn(batch, queries, 256, device="cuda").to(dtype) for _ in range(2))
    points = torch.rand(batch, queries, 3, device="cuda")
    shape = batch, config.num_cams, 256
    features = [torch.randn(*shape, *size, device="cuda").to(dtype) for size in config.feature_sizes]
    if layout == "channels_last":
        features = [channels_last(f) for f in features]
    lidar2img = rig(config).cuda().expand(batch, -1, -1, -1).contiguous()
    weights = [w.detach().to("cuda", dtype) for w in module.weights()]
    return query, query_pos, points, features, lidar2img, weights, *config.attributes()


def without_grad(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[[], Any]:
    def run() -> Any:
        with torch.no_grad():
            return function(*args)

    return run


def workload(
    preset: str,
    layout: str = "channels_last",
    *,
    batch: int = 1,
    queries: int | None = None,
    dtype: torch.dtype = torch.float16,
    goal: float | None = 1.0,
    limit: float | None = None,
    eager: bool = True,
    **overrides: Any,
) -> Workload:
    config = replace(TransformerDecoderConfig.preset(preset), **overrides)
    queries = config.num_queries if queries is None else queries
    args = arguments(config, batch, queries, dtype, layout)
    peers = {"compiled": without_grad(torch.compile(OP.implementation), args)}
    plain = {}
    if eager:
        peers["eager"] = without_grad(OP.implementation, args)
        plain["eager, no graph"] = peers["eager"]
    name = (
        f"transformer_decoder {preset} {batch}x{queries} {config.num_layers} layers {len(config.feature_sizes)} levels"
    )
    size = sum(t.numel() * t.element_size() for t in (*args[:3], *args[5]))
    return Workload(
        f"{name} {str(dtype)[6:]} {layout}",
        without_grad(OP, args),
        peers,
        bytes=size,
        goal=goal,
        limit=limit,
        eager=plain,
    )


def workloads() -> Iterator[Workload]:
    for layout in ("channels_last", "nchw"):
        yield workload("seed", layout, goal=1 / 5, limit=140, **SMALL)
        yield workload("detr3d", layout, goal=1 / 5, limit=250)
    yield workload("seed")
    yield workload("stream")
    yield workload("detr3d", dtype=torch.float32)


def sweep() -> Iterator[Workload]:
    """Scaling, by queries and by batch, of two layers: compiling six takes minutes for each."""
    two = {**SMALL, "num_layers": 2}
    for batch, queries in (*((1, q) for q in (256, 512, 900, 1300, 2048)), *((b, 900) for b in (2, 4, 8)), (8, 2048)):
        for layout in ("channels_last", "nchw"):
            yield workload("seed", layout, batch=batch, queries=queries, eager=False, **two)


def cases() -> dict[str, tuple[Any, ...]]:
    """What stages, launches and memory are told of."""
    made = {}
    for name, preset, overrides in (("512 queries, 3 levels", "seed", SMALL), ("detr3d", "detr3d", {})):
        config = replace(TransformerDecoderConfig.preset(preset), **overrides)
        made[name] = arguments(config, 1, config.num_queries, torch.float16, "channels_last")
    return made


def peak_memory(function: Callable[[], Any]) -> int:
    """Bytes allocated at once during a call, its results among them."""
    function()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def launches(function: Callable[[], Any]) -> int:
    """Kernels, copies and fills on the device in a call."""
    function()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in profile.events())


def stages(library: str) -> dict[str, list[dict[str, Any]]]:
    """Of a middle layer, in microseconds: median of blocks, of a library whose kernels keep the clock."""
    clocks = (ctypes.c_longlong * (8 * 3 * 160 * 24))()
    found = {}
    for name, args in cases().items():
        function = without_grad(OP, args)
        graph = torch.cuda.CUDAGraph()
        function()
        with torch.cuda.graph(graph):
            function()
        for _ in range(3):
            ctypes.CDLL(library).svexport_stages(None)
            graph.replay()
            torch.cuda.synchronize()
        ctypes.CDLL(library).svexport_stages(clocks)
        rows = []
        for kernel, (label, marks) in enumerate(STAGES.items()):
            times = torch.tensor(clocks[:]).view(8, 3, 160, 24)[3, kernel].double()
            times = times[times[:, marks[-1][0]] > 0]
            ticks = (times[:, marks[-1][0]] - times[:, 2]) / (times[:, 23] - times[:, 22]).clamp(min=1)
            times = times / ticks.median() / 1e3  # in microseconds
            for (begin, stage), (end, _) in pairwise(marks):
                start, stop = (float((times[:, at] - times[:, 2]).median()) for at in (begin, end))
                rows.append({"kernel": label, "stage": stage, "start": round(start, 2), "us": round(stop - start, 2)})
        found[name] = rows
    return found


def build_with_clocks(folder: Path) -> Path:
    """The decoder's sources alone, as a library whose kernels keep the clock; loads it, too."""
    from torch.utils.cpp_extension import load

    folder.mkdir(parents=True, exist_ok=True)
    names = ["transformer_decoder", "transformer_decoder_fused", "gemm", "attention", "camera_sample", "permute"]
    sources = [_cuda.CSRC / "cuda" / f"{n}.cu" for n in names] + [_cuda.CSRC / "torch/transformer_decoder.cpp"]
    load(
        "decoder_stages",
        [str(s) for s in sources],
        extra_include_paths=[str(_cuda.CSRC / "cuda"), str(_cuda.CSRC / "torch")],
        extra_cuda_cflags=["-O3", "-std=c++17", "-DSVEXPORT_STAGES"],
        build_directory=str(folder),
        is_python_module=False,
    )
    return folder / "decoder_stages.so"


def plot(folder: Path, record: dict[str, Any]) -> list[Path]:
    """The stages of a layer, and the scaling of the sweep where it was measured, as PNG and SVG in ``folder``."""
    import matplotlib.pyplot as plt

    file = folder / "transformer_decoder-sweep.json"
    scaling = [[*r["workload"].split(), r] for r in json.loads(file.read_text())["rows"]] if file.exists() else []
    rows = record["rows"]
    figure, axes = plt.subplots(
        len(rows) + bool(scaling), 1, figsize=(12, 2.4 * len(rows) + 4 * bool(scaling)), squeeze=False,
        layout="constrained", gridspec_kw={"height_ratios": [2] * len(rows) + [4] * bool(scaling)},
    )  # fmt: skip
    names = list(dict.fromkeys(s["stage"] for row in rows for s in row["stages"]))
    colors = dict(zip(names, plt.get_cmap("tab20").colors * 2, strict=False))
    for axis, row in zip(axes[:, 0], rows, strict=False):
        for stage in row["stages"]:
            y = list(STAGES).index(stage["kernel"])
            axis.barh(y, stage["us"], left=stage["start"], color=colors[stage["stage"]], edgecolor="white")
            if stage["us"] > 0.55:
                label = f"{stage['stage']}\n{stage['us']:.1f}"
                axis.text(stage["start"] + stage["us"] / 2, y, label, ha="center", va="center", fontsize=6)
        axis.set_yticks(range(len(STAGES)), list(STAGES))
        axis.invert_yaxis()
        axis.set_title(f"{row['workload']}: a block of either kernel in the fourth layer, microseconds", fontsize=9)
    if scaling:
        axis = axes[-1, 0]
        for who, style in (("ours", "-"), ("compiled", "--")):
            for layout in ("channels_last", "nchw"):
                points = sorted(
                    (batch * queries, row["times"][who]["median"])
                    for *words, row in scaling
                    for batch, queries in [map(int, words[2].split("x"))]
                    if words[-1] == layout
                )
                if points:
                    axis.plot(*zip(*points, strict=True), style, marker=".", label=f"{who}, {layout}")
        axis.set(xscale="log", yscale="log", xlabel="batch x queries", ylabel="microseconds, 2 layers, 3 levels")
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    written = [folder / f"transformer_decoder-stages{suffix}" for suffix in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=150)
    plt.close(figure)
    return written


def main() -> None:
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / device
    assert _cuda.load(), "expected the kernels of svexport"
    code = (
        "import json, sys; from pathlib import Path; from benchmarks import transformer_decoder as d;"
        "print(json.dumps(d.stages(str(d.build_with_clocks(Path(sys.argv[1]))))))"
    )
    environment = {**os.environ, "SVEXPORT_KERNELS": "0"}  # one library that registers the operator
    command = [sys.executable, "-c", code, str(_cuda.cache_folder() / "stages")]
    told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    table = json.loads(told.stdout.splitlines()[-1])
    rows = []
    for name, args in cases().items():
        calls = {"ours": without_grad(OP, args), "eager": without_grad(OP.implementation, args)}
        rows.append(
            {
                "workload": name,
                "launches": {who: launches(call) for who, call in calls.items()},
                "peak_bytes": {who: peak_memory(call) for who, call in calls.items()},
                "stages": table[name],
            }
        )
        print(name, {key: value for key, value in rows[-1].items() if key in ("launches", "peak_bytes")})
        for stage in table[name]:
            print(f"  {stage['kernel']:10} {stage['stage']:24} {stage['start']:6.2f} {stage['us']:6.2f}")
    path = write("transformer_decoder-stages", rows, folder)
    for written in (path, *plot(folder, json.loads(path.read_text()))):
        print(written)


if __name__ == "__main__":
    main()
