"""``transformer_decoder`` beside the same decoder in torch: eager and compiled, both replayed from a CUDA graph.

``python -m benchmarks.transformer_decoder [folder]`` writes what no timing of whole calls says: launches and peak
memory beside eager (``transformer_decoder-memory.json``), and the time of every stage of a layer
(``transformer_decoder-stages.json``). It draws the stages, and how time grows with batch and queries if
``transformer_decoder-sweep.json`` is there.
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

from benchmarks._measure import RESULTS, Workload, peak_memory, write
from svexport.ops import TransformerDecoder, TransformerDecoderConfig, _cuda
from svexport.ops._decoder.config import rig
from svexport.ops.transformer_decoder import OP

SMALL = {"num_layers": 6, "feature_sizes": ((36, 92), (18, 46), (9, 23)), "pool": False}

QUERIES = (
    "attention", "out_proj", "camera weights", "output_proj", "ffn.0", "ffn.0", "ffn.2", "ffn.2", "keys", "values",
    "queries",
)  # fmt: skip
BOXES = ("reg.0", "reg.2", "reg.4", "encoder.3")
"""What the kernel's list has for a layer with ffn 512, in order."""

KINDS = ("waits", "norms, points", "attention, sampling", "products", "exchanges, stores", "box branch")


def kind_of(product: str, part: int) -> tuple[str, str]:
    """What a block does after a mark of its clock: one of KINDS, and its name."""
    if part == 0:
        return KINDS[0], "keys, values" if product == "attention" else "weights"
    if part == 1:
        return KINDS[1], "points, encoder.0, norm" if product == "encoder.3" else "norm"
    if part == 2:
        return KINDS[2], "sampling" if product == "output_proj" else product
    return (KINDS[3], product) if part == 4 and product != "attention" else (KINDS[4], "exchange")


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
    peers = {"compiled": without_grad(torch.compile(OP.implementation, fullgraph=True), args)}
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
    sizes = [(1, 256), (1, 512), (1, 900), (1, 1300), (1, 2048), (2, 900), (4, 900), (8, 256), (8, 900), (8, 2048)]
    for batch, queries in sizes:
        for layout in ("channels_last", "nchw"):
            yield workload("seed", layout, batch=batch, queries=queries, eager=False, **two)


def cases(dtype: torch.dtype = torch.float16, layout: str = "channels_last") -> dict[str, tuple[Any, ...]]:
    """What stages, launches and memory are told of."""
    made = {}
    for name, preset, overrides in (("512 queries, 3 levels", "seed", SMALL), ("detr3d", "detr3d", {})):
        config = replace(TransformerDecoderConfig.preset(preset), **overrides)
        made[name] = arguments(config, 1, config.num_queries, dtype, layout)
    return made


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
    blocks, marked, parts, layer = 132, 240, 7, 3
    clocks = (ctypes.c_longlong * (blocks * marked * parts))()
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
        times = torch.tensor(clocks[:]).view(blocks, marked, parts)
        times = times[times[:, -1, 0] > 0]
        whole = times[:, -1]  # clocks and nanoseconds at the begin, and at the end
        ticks = ((whole[:, 2] - whole[:, 0]).double() / (whole[:, 3] - whole[:, 1])).median() * 1e3
        offsets = (whole[:, 1] - whole[:, 1].min()).double() / 1e3 - whole[:, 0] / ticks  # of clocks, in microseconds
        blocks_of_rows = 2 * -(-args[0].shape[1] // 16)
        split = len(times) > blocks_of_rows  # the box branch has blocks of its own
        main = QUERIES if split else (*QUERIES, *BOXES)
        lists = [(main, slice(0, blocks_of_rows), 3 if split else 4)]  # after what comes before the first layer
        if split:
            lists.append(((*BOXES, "position"), slice(blocks_of_rows, None), 2 - 5))  # what this layer is given
        rows, begin = [], 0.0
        for products, own, first in lists:
            us = times[own] / ticks + offsets[own, None, None]
            first += layer * len(products)
            begin = begin or float(us[:, first, 0].median())
            for at, product in enumerate(products, first):
                kept = [*times[own, at].unbind(1), times[own, at + 1, 0]]
                marks = [*us[:, at].unbind(1), us[:, at + 1, 0]]
                known = [(part, mark) for part, mark in enumerate(marks) if bool((kept[part] > 0).all())]
                for (part, start), (following, stop) in pairwise(known):
                    if (part, following) == (2, 4):  # neither attention nor sampling
                        continue
                    kind, stage = kind_of(product, part) if products is main else (KINDS[-1], product)
                    began, took = float(start.median()) - begin, float((stop - start).median())
                    if rows and kind == KINDS[-1] and rows[-1]["stage"] == stage:
                        rows[-1]["us"] += took
                    elif kind != KINDS[-1] or part > 0:  # not how long it waits for the queries
                        rows.append({"kind": kind, "stage": stage, "start": began, "us": took})
        found[name] = rows
    return found


def build_with_clocks(folder: Path) -> Path:
    """The decoder's sources alone, as a library whose kernels keep the clock; loads it, too."""
    from torch.utils.cpp_extension import load

    folder.mkdir(parents=True, exist_ok=True)
    names = ["transformer_decoder", "transformer_decoder_fused", "gemm", "attention", "camera_sample"]
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
            y = KINDS.index(stage["kind"])
            axis.barh(y, stage["us"], left=stage["start"], color=colors[stage["stage"]], edgecolor="white")
            if stage["us"] > 0.7:
                label = f"{stage['stage']}\n{stage['us']:.1f}"
                axis.text(stage["start"] + stage["us"] / 2, y, label, ha="center", va="center", fontsize=6)
        axis.set_yticks(range(len(KINDS)), KINDS)
        axis.invert_yaxis()
        axis.set_title(f"{row['workload']}: a block in the fourth layer, microseconds", fontsize=9)
    if scaling:
        axis = axes[-1, 0]
        series: dict[tuple[str, str, int], list[tuple[int, float]]] = {}
        for *words, row in scaling:
            batch, queries = map(int, words[2].split("x"))
            for who in ("ours", "compiled"):
                series.setdefault((who, words[-1], batch), []).append((queries, row["times"][who]["median"]))
        for (who, layout, batch), points in sorted(series.items(), key=lambda item: (item[0][1:], item[0][0])):
            style = {"color": f"C{batch.bit_length() % 10}", "linestyle": "-" if who == "ours" else "--"}
            marker = "o" if layout == "channels_last" else "x"
            axis.plot(*zip(*sorted(points), strict=True), marker=marker, label=f"{who}, {batch} x, {layout}", **style)
        axis.set(xscale="log", yscale="log", xlabel="queries", ylabel="microseconds, 2 layers, 3 levels")
        axis.legend(fontsize=7, ncols=3)
        axis.grid(alpha=0.3)
    written = [folder / f"transformer_decoder-stages{suffix}" for suffix in (".png", ".svg")]
    for target in written:
        figure.savefig(target, dpi=150)
    plt.close(figure)
    return written


def memory(folder: Path) -> Path:
    """Writes launches and peak memory of :func:`cases`, beside eager."""
    rows = []
    for dtype, layout in ((torch.float16, "channels_last"), (torch.float16, "nchw"), (torch.float32, "channels_last")):
        for name, args in cases(dtype, layout).items():
            calls = {"ours": without_grad(OP, args), "eager": without_grad(OP.implementation, args)}
            row = {
                "workload": f"{name} {str(dtype)[6:]} {layout}",
                "launches": {who: launches(call) for who, call in calls.items()},
                "peak_bytes": {who: peak_memory(call) for who, call in calls.items()},
            }
            rows.append(row)
            print(*row.values())
    return write("transformer_decoder-memory", rows, folder)


def main() -> None:
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS / device
    assert _cuda.load(), "expected the kernels of svexport"
    print(memory(folder))
    code = (
        "import json, sys; from pathlib import Path; from benchmarks import transformer_decoder as d;"
        "print(json.dumps(d.stages(str(d.build_with_clocks(Path(sys.argv[1]))))))"
    )
    capability = "{}.{}".format(*torch.cuda.get_device_capability())
    environment = {
        **os.environ,
        "SVEXPORT_KERNELS": "0",  # one library that registers the operator
        "TORCH_CUDA_ARCH_LIST": _cuda.with_features(capability),
    }
    command = [sys.executable, "-c", code, str(_cuda.cache_folder() / "stages")]
    told = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    table = json.loads(told.stdout.splitlines()[-1])
    rows = [{"workload": name, "stages": stages} for name, stages in table.items()]
    for row in rows:
        print(row["workload"])
        for stage in row["stages"]:
            print(f"  {stage['kind']:20} {stage['stage']:24} {stage['start']:6.2f} {stage['us']:6.2f}")
    path = write("transformer_decoder-stages", rows, folder)
    for written in (path, *plot(folder, json.loads(path.read_text()))):
        print(written)


if __name__ == "__main__":
    main()
