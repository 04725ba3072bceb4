"""``transformer_decoder`` beside the same decoder in torch: eager and compiled, both replayed from a CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks._measure import Workload
from svexport.ops import TransformerDecoder, TransformerDecoderConfig
from svexport.ops.transformer_decoder import OP, rig

SMALL = {"num_layers": 6, "feature_sizes": ((36, 92), (18, 46), (9, 23)), "pool": False}


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
    compiled = torch.compile(OP.implementation)

    def without_grad(function: Any) -> Any:
        def run() -> Any:
            with torch.no_grad():
                return function(*args)

        return run

    peers = {"compiled": without_grad(compiled)}
    if eager:
        peers["eager"] = without_grad(OP.implementation)
    name = (
        f"transformer_decoder {preset} {batch}x{queries} {config.num_layers} layers {len(config.feature_sizes)} levels"
    )
    size = sum(t.numel() * t.element_size() for t in (*args[:3], *args[5]))
    return Workload(
        f"{name} {str(dtype)[6:]} {layout}",
        without_grad(OP),
        peers,
        bytes=size,
        goal=goal,
        limit=limit,
    )


def workloads() -> Iterator[Workload]:
    for layout in ("channels_last", "nchw"):
        yield workload("seed", layout, goal=1 / 5, limit=140, **SMALL)
        yield workload("detr3d", layout, goal=1 / 5, limit=250)
    yield workload("seed")
    yield workload("stream")
    yield workload("detr3d", dtype=torch.float32)


def sweep() -> Iterator[Workload]:
    """Scaling, by queries and by batch. Compiling the peer takes half a minute for each."""
    for batch, queries in (*((1, q) for q in (256, 512, 900, 1300, 2048)), *((b, 900) for b in (2, 4, 8)), (8, 2048)):
        for layout in ("channels_last", "nchw"):
            yield workload("seed", layout, batch=batch, queries=queries, eager=False, **SMALL)
