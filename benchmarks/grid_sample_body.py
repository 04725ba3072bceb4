"""The body of ``grid_sample`` in ONNX Runtime beside other ways to gather the pixels: bilinear, zeros, opset 11.

Every way is the body itself with one method changed: how it gathers (elements of the flattened image, as the body does;
rows of an NHWC image, by one Gather or four; single pixels by Gather or GatherND), and how it gets the zeros outside (a
ring around the image; a mask on the gathered pixels; pixels inside that taps share, and a mask on the points; a mask on
the weights, inexact where the image is not finite). The body takes a ring or shares pixels, by the sizes. Beside them
ONNX Runtime's own GridSample (opset 16), which differs from torch at coordinates that are NaN, infinite or huge.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import onnx
import onnxruntime
import torch
import torch.nn.functional as F
from onnx import TensorProto, helper

from benchmarks._measure import interleaved, write
from svexport.graph import lower
from svexport.graph.nodes import set_attributes
from svexport.ops.grid_sample import BILINEAR, OP, ZEROS
from svexport.symbolic import grid_sample as symbolic
from svexport.symbolic._builder import Value
from svexport.symbolic._sampling import Sampler

WORKLOADS = {
    "decoder, one camera": ((1, 256, 116, 200), (1, 900)),
    "decoder, six cameras": ((6, 256, 36, 92), (1, 512)),
    "features to features": ((1, 64, 128, 128), (128, 128)),
    "wide features, enlarged": ((1, 256, 50, 50), (100, 100)),
    "depth map": ((1, 1, 480, 640), (480, 640)),
    "batch of images": ((8, 3, 64, 64), (64, 64)),
}


class Rows(Sampler):
    """One Gather of NHWC rows."""

    def first_index(self, image: Value, first: Value, ring: int = 0) -> Value:
        return super().first_index(replace(image, shape=(image.shape[0], None, *image.shape[2:])), first, ring)

    def rows(self, image: Value, index: Value) -> tuple[Value, Value]:
        n, c, h, w = image.shape
        if n > 1:
            starts = np.arange(n, dtype=np.int32).reshape(n, 1, 1, 1, 1) * h * w
            index = self.b.op("Add", index, starts)
        return self.b.reshape(self.b.transpose(image, (0, 2, 3, 1)), n * h * w, c), index

    def finish(self, image: Value, index: Value, fraction: Value, outside: Value | None = None) -> Value:
        rows, index = self.rows(image, index)
        pixels = self.op("Gather", rows, index)  # (N, 1, K, gH, gW, C)
        if outside is not None:
            pixels = self.where(self.trailing(outside), self.number(0), pixels)
        weighted = self.op("Mul", pixels, self.trailing(self.weights(fraction)))
        return self.channels_second(self.b.reduce_sum(weighted, [2]))

    def trailing(self, x: Value) -> Value:
        return self.b.unsqueeze(x, 5)

    def channels_second(self, x: Value) -> Value:
        """``(N, 1, gH, gW, C)`` -> ``(N, C, gH, gW)``"""
        return self.b.squeeze(self.b.transpose(x, (0, 4, 2, 3, 1)), 4)


class FourRows(Rows):
    """Four Gathers of NHWC rows, one per tap."""

    def finish(self, image: Value, index: Value, fraction: Value, outside: Value | None = None) -> Value:
        rows, index = self.rows(image, index)
        parts = [self.b.split(x, 2, [1] * 4) for x in (index, self.weights(fraction))]
        if outside is not None:
            parts.append(self.b.split(self.b.cast(outside, TensorProto.INT32), 2, [1] * 4))
        total = None
        for index, weight, *mask in zip(*parts):
            pixels = self.op("Gather", rows, index)
            for m in mask:
                condition = self.b.cast(self.trailing(m), TensorProto.BOOL)
                pixels = self.where(condition, self.number(0), pixels)
            weighted = self.op("Mul", pixels, self.trailing(weight))
            total = weighted if total is None else self.op("Add", total, weighted)
        return self.channels_second(self.b.squeeze(total, 2))


class Single(Sampler):
    """A Gather of single pixels, as the body does up to opset 10."""

    def gather(self, image: Value, index: Value) -> Value:
        n, c, h, w = image.shape
        starts = np.arange(n * c, dtype=np.int32).reshape(n, c, 1, 1, 1) * h * w
        return self.pick(self.b.reshape(image, n * c * h * w), self.b.op("Add", index, starts))

    def pick(self, pixels: Value, index: Value) -> Value:
        return self.op("Gather", pixels, index)


class SingleND(Single):
    """A GatherND of single pixels."""

    def pick(self, pixels: Value, index: Value) -> Value:
        return self.op("GatherND", pixels, self.b.unsqueeze(self.b.cast(index, TensorProto.INT64), 5))


def outside_by(how: str) -> dict[str, Any]:
    """The members of a Sampler that decide what becomes of taps outside."""
    if how != "masked weights":
        by_mask = {"shared": lambda self, x, clipped: self.masked(x)} if how == "masked" else {}
        return {"dense": how == "padded", **by_mask}

    def zeros(self: Sampler, x: Value, clipped: bool) -> Value:
        first, self.fraction = self.split(x)
        positions = self.positions(first)
        self.within = self.b.op(
            "And", self.op("Greater", positions, self.number(-0.5)), self.op("Less", positions, self.size(1, -0.5))
        )
        index = self.tap_index(self.where(self.within, positions, self.number(0)))
        return self.finish(self.image, index, self.fraction)

    def combine(self: Sampler, op_type: str, x: Value) -> Value:
        if op_type == "Mul":
            x = self.where(self.within, x, self.number(0))
        return Sampler.combine(self, op_type, x)

    return {"zeros": zeros, "combine": combine}


GATHERS = {"elements": Sampler, "rows": Rows, "four rows": FourRows, "single": Single, "single, ND": SingleND}
OUTSIDE = ("padded", "masked", "shared", "masked weights")


def session(
    node: onnx.NodeProto, image: torch.Tensor, grid: torch.Tensor, threads: int, opset: int
) -> tuple[Callable[[], np.ndarray], int]:
    """A function that runs the model of one node, and the number of nodes it has lowered."""
    inputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, list(x.shape))
        for name, x in (("image", image), ("grid", grid))
    ]
    output = helper.make_tensor_value_info("output", TensorProto.FLOAT, [*image.shape[:2], *grid.shape[1:3]])
    imports = [helper.make_opsetid("", opset), helper.make_opsetid("svexport", 1)]
    model = helper.make_model(helper.make_graph([node], "graph", inputs, [output]), opset_imports=imports, ir_version=8)
    model = lower(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    runtime = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {"image": image.numpy(), "grid": grid.numpy()}
    return (lambda: runtime.run(None, feeds)[0]), len(model.graph.node)


def formulations(image: torch.Tensor, grid: torch.Tensor, threads: int) -> Iterator[tuple[str, Callable, int]]:
    node = helper.make_node(OP.node_type, ["image", "grid"], ["output"], name="node", domain="svexport")
    set_attributes(node, OP, [BILINEAR, ZEROS, 0, 1.0])
    yield "body", *session(node, image, grid, threads, opset=11)
    for gather, base in GATHERS.items():
        for how in OUTSIDE:
            with patch.object(symbolic, "Sampler", type("Changed", (base,), outside_by(how))):
                yield f"{gather}, {how}", *session(node, image, grid, threads, opset=11)
    yield (
        "GridSample",
        *session(helper.make_node("GridSample", ["image", "grid"], ["output"]), image, grid, threads, opset=16),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="per formulation and workload")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    rows = []
    for workload, (shape, points) in WORKLOADS.items():
        image, grid = torch.randn(shape), torch.rand(shape[0], *points, 2) * 2.2 - 1.1
        expected = F.grid_sample(image, grid, align_corners=False)
        found = {name: (run, nodes) for name, run, nodes in formulations(image, grid, options.threads)}
        for name, (run, _) in found.items():  # coordinates in float32: 1e-7 of 640 pixels, on noise
            torch.testing.assert_close(torch.from_numpy(run()), expected, rtol=1e-3, atol=1e-3, msg=name)
        timings = interleaved({name: run for name, (run, _) in found.items()}, options.seconds)
        others = [timing for name, timing in timings.items() if name not in ("body", "GridSample")]
        best = {key: min(timing[key] for timing in others) for key in ("median", "min")}
        print(f"{workload}: {shape} at {points}")
        for name, timing in sorted(timings.items(), key=lambda item: item[1]["min"]):
            nodes = found[name][1]
            ratios = {f"{key}_ratio": timing[key] / best[key] for key in best}
            case = {"workload": workload, "image": shape, "points": points, "name": name, "nodes": nodes}
            rows.append({**case, **timing, **ratios})
            print(
                f"  {name:<26} {nodes:3} nodes {timing['median'] * 1e3:8.2f} ms"
                f"  {ratios['median_ratio']:.2f}x median  {ratios['min_ratio']:.2f}x min"
            )
    print(write("grid-sample-body-cpu", rows))


if __name__ == "__main__":
    main()
