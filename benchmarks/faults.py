"""``python -m benchmarks.faults [INPUTS [NAME …]]``: how many faults of exported files their verification notices.

Single faults are planted in each file, node by node. One counts where it changes an output by more than ten times what
torch in float32 differs from float64 there, on an input that verification tries or on one of so many others, searched
apart from those (1000 unless given). What changes in float32 has to change in float64 as well, where file and model can
be computed there: a fault that is far below rounding makes other rounding errors, which may be larger than torch's own.
With names the results of other models stay as they are.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from torch import Tensor, nn

import svexport
from benchmarks._apart import Apart
from benchmarks._measure import RESULTS, write
from svexport.cli._model import load_file
from svexport.exporter import thorough
from svexport.exporter.planted import Planted, Recording, Site
from svexport.exporter.precise import Precise
from svexport.exporter.verify import Verification

OPSET = 13
TIMES = 10.0
"""Torch's rounding: what a fault changes by more counts."""
MOST_DRAWN = 2
"""Inputs for one that is valid."""


def _convolutions() -> tuple[nn.Module, Any]:
    layers = [nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU6(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3)]
    return nn.Sequential(*layers, nn.Hardswish(), nn.Flatten(), nn.Linear(72, 5), nn.Softmax(-1)), torch.randn(
        2, 3, 10, 10
    )


def _example(name: str, **options: Any) -> Any:
    return load_file(Path(__file__).parents[1] / "examples" / f"{name}.py").model(**options), None


def _architecture(name: str) -> Any:
    from tests.exporter.test_architectures import ARCHITECTURES  # needs transformers

    return ARCHITECTURES[name][0]()


MODELS: dict[str, Callable[[], Any]] = {
    "convolutions": _convolutions,
    "example stgcn": lambda: _example("stgcn", frames=8),
    "example deformable_detr": lambda: _example(
        "deformable_detr", config="small", layers=1, levels=((8, 10), (4, 5), (2, 3), (2, 2))
    ),
    "example yolox_stem": lambda: _example("yolox_stem", height=32, width=40),
    "example detr3d": lambda: _example(
        "detr3d", config="small", queries=12, image_size=(116, 200), levels=((15, 25), (8, 13), (4, 7), (2, 4))
    ),
    "example fused_decoder": lambda: _example(
        "fused_decoder", num_queries=12, image_size=(72, 184), feature_sizes=((18, 46), (9, 23), (5, 12))
    ),
    "example multicamera": lambda: _example(
        "multicamera", queries=12, cameras=3, image_size=(64, 96), levels=((8, 12), (4, 6), (2, 3), (1, 2))
    ),
    **{name: partial(_architecture, name) for name in ("bert", "dinov2", "clip", "detr", "swin", "patch_tst")},
}


def main(count: int = 1000, *names: str) -> None:
    warnings.simplefilter("ignore")
    file = RESULTS / "faults-cpu.json"
    rows = {row["model"]: row for row in json.loads(file.read_text())["rows"]} if names and file.exists() else {}
    for name in names or MODELS:
        torch.manual_seed(0)
        model, args = MODELS[name]()
        try:
            rows[name] = {"model": name, **measured(model.eval(), args, count)}
        except svexport.VerificationError as error:
            rows[name] = {"model": name, "refused": str(error)}
        print(rows[name], flush=True)
        write("faults-cpu", [rows[known] for known in MODELS if known in rows])  # stays, if a later one is broken off


def measured(model: nn.Module, args: Any, count: int) -> dict[str, Any]:
    """Of one model: how many faults count, and are noticed, and how long that takes thorough verification (CPU)."""
    row: dict[str, Any] = {}
    own = thorough.plant

    def plant(verification: Verification, file: onnx.ModelProto, *rest: Any) -> thorough.Planting | None:
        started = time.process_time()
        planting = own(verification, file, *rest)
        row["seconds"] = round(time.process_time() - started, 1)
        if planting is not None:
            precise = None
            with suppress(Exception):  # ONNX Runtime's, of a node that it has no kernel for
                precise = Precise(file, verification.copies)
            tried, seen, took = telling(verification, planting.planted, precise, planting.unnoticed, count)
            counts = len(planting.sites) - len(planting.unnoticed) + len(seen)
            missed = [str(site) for site in planting.missed if id(site) in set(map(id, seen))]
            by_default = len(planting.sites) - len(planting.unnoticed)
            row.update(planted=len(planting.sites), inputs=tried, counted=counts, default=by_default / counts)
            row.update(thorough=1 - len(missed) / counts, missed=missed, **took)
        return planting

    thorough.plant = plant
    try:
        with tempfile.TemporaryDirectory() as folder:
            svexport.export(model, args, Path(folder, "m.onnx"), opset=OPSET, verify="thorough")
    finally:
        thorough.plant = own
    return row


def telling(
    verification: Verification, planted: Planted, precise: Precise | None, sites: Sequence[Site], count: int
) -> tuple[int, list[Site], dict[str, Any]]:
    """How many inputs were valid, the faults that change an output there by more than ten times its rounding, and what
    that took: of each fault the inputs that it was computed of."""
    apart = Apart(verification.tensors, verification.ranges, seed=4711)
    left, seen, tried, computed = list(sites), [], 0, 0
    double = copy.deepcopy(verification.model).double()
    started = time.process_time()
    for _ in range(MOST_DRAWN * count):
        if tried == count:
            break
        inputs = apart.next()
        recording = None
        with suppress(Exception):  # ONNX Runtime's, of inputs that do not go together
            recording = planted.record(inputs, [])
        if recording is None or not all(np.isfinite(o).all() for o in recording.outputs if o.dtype.kind == "f"):
            continue
        rounding = _Rounding(verification, double, inputs, precise)
        found = [site for site in left if _changes(planted, site, recording, rounding)]
        if not rounding.valid:
            continue
        tried += 1
        computed += len(left)
        if found:
            apart.good(inputs)
            seen += found
            left = [site for site in left if id(site) not in set(map(id, found))]
    seconds = round(time.process_time() - started, 1)
    return tried, seen, {"inputs of a fault": round(computed / max(len(sites), 1)), "seconds of these": seconds}


class _Rounding:
    """What torch in float32 differs from float64, per output, and what faults change there; computed when it is first
    asked for.

    Attributes:
        valid: whether torch makes finite numbers of the inputs, as far as that was asked.
    """

    def __init__(
        self, verification: Verification, double: nn.Module, inputs: list[Tensor], precise: Precise | None
    ) -> None:
        self._verification, self._double, self._inputs, self._precise = verification, double, inputs, precise
        self.valid = True

    @cached_property
    def _expected(self) -> tuple[Tensor, ...] | None:
        return self._verification.computed("searched apart", self._inputs)

    @cached_property
    def of_outputs(self) -> list[float] | None:
        """None of inputs that are not valid."""
        expected = self._expected
        if expected is None:
            self.valid = False
            return None
        try:
            exact = self._double(*(t.double() if t.is_floating_point() else t.clone() for t in self._inputs))
        except Exception:  # noqa: BLE001 - a model tied to one data type
            exact = expected
        return [_most(e.double() - o) for e, o in zip(exact, expected, strict=True)]

    def shows(self, site: Site) -> bool:
        """Whether a fault changes an output in float64, too; True where there is no float64."""
        if self._precise is None or self._in_float64 is None:
            return True
        return not self._precise.shown(site, self._in_float64) <= 1  # NaN where that cannot be computed

    @cached_property
    def _in_float64(self) -> Recording | None:
        expected, own = self._expected, self.of_outputs
        if self._precise is None or expected is None or own is None:
            return None
        with suppress(Exception):  # of a model that is tied to float32
            there = self._precise.expected(self._inputs, expected)
            if there is not None:
                held = [(0.0, TIMES * max(r, _least(e.numpy()))) for r, e in zip(own, expected, strict=True)]
                return self._precise.record(dataclasses.replace(there, held=held))
        return None


def _most(difference: Tensor) -> float:
    return float(difference.abs().nan_to_num(0.0, 0.0, 0.0).amax()) if difference.numel() else 0.0


def _changes(planted: Planted, site: Site, recording: Recording, rounding: _Rounding) -> bool:
    outputs = None
    with suppress(Exception):  # ONNX Runtime's, of what no longer fits together: such a fault shows on any input
        outputs = planted.outputs(site, recording)
    if outputs is None:
        return False
    for index, (before, after) in enumerate(zip(recording.outputs, outputs, strict=True)):
        if before.shape != after.shape:
            return rounding.of_outputs is not None
        apart = float(np.nan_to_num(np.abs(before.astype(np.float64) - after.astype(np.float64))).max(initial=0))
        least = _least(before)
        if (
            apart > TIMES * least
            and (own := rounding.of_outputs) is not None
            and apart > TIMES * max(own[index], least)
        ):
            return rounding.shows(site)
    return False


def _least(output: np.ndarray) -> float:
    """A rounding error of an output's largest number; none of whole numbers."""
    return float(np.finfo(np.float32).eps * np.abs(output).max(initial=0)) if output.dtype.kind == "f" else 0.0


if __name__ == "__main__":
    main(*map(int, sys.argv[1:2]), *sys.argv[2:])
