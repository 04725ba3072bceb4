"""``python -m benchmarks.nodes [--resume] [NAME …]``: how many nodes files have at opset 11 and 17, beside those at 20.

The architectures of ``tests/exporter/test_architectures.py`` and some of timm, static, with weights of the size of
trained ones. Where a
file at 20 has ops that an older opset lacks (LayerNormalization, Gelu), each counts as the nodes that the converter
makes of it alone: the ratio is that of what is left. And ``simplify=True`` beside what onnxslim makes of the same file
in standard ONNX: as it is, and without its fusions that make one weight of two, or a Gemm between Reshapes of a product
and a sum, which ``simplify`` leaves to ONNX Runtime and TensorRT. Of both, the nodes that ONNX Runtime is left with are
counted too. What is not installed is left out.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import logging
import statistics
import tempfile
import warnings
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import torch
from torch import nn

import svexport
from benchmarks._measure import RESULTS, write
from svexport.graph.scope import light_copy
from svexport.graph.types import infer_types
from svexport.graph.walk import graphs

OPSETS = (11, 17)
NEWEST = 20
SIMPLIFIED = 17
"""The opset of the files that are simplified."""
MERGING = ("Gemm", *(f"{conv}{other}" for conv in ("Conv", "ConvTranspose") for other in ("Mul", "Add", "BN")))
"""What onnxslim merges into weights."""
GOALS = {"median": 1.15, "worst": 1.5}
"""The largest ratios of nodes to those at opset 20."""

TIMM: dict[str, dict[str, Any]] = {
    "beit_base_patch16_224": {"img_size": 32, "embed_dim": 48, "depth": 2, "num_heads": 4},
    "coatnet_nano_rw_224": {"img_size": 64},
    "convnext_atto": {},
    "davit_tiny": {"depths": (1, 1, 1, 1)},
    "edgenext_xx_small": {},
    "efficientformer_l1": {"img_size": 224},
    "eva02_tiny_patch14_224": {"img_size": 56, "depth": 2},
    "fastvit_t8": {},
    "halonet26t": {"img_size": 256},
    "hiera_tiny_224": {"img_size": 224, "stages": (1, 1, 1, 1)},
    "hrnet_w18_small": {},
    "levit_128s": {"img_size": 224},
    "maxvit_tiny_rw_224": {"img_size": 224, "depths": (1, 1, 1, 1)},
    "mobilenetv3_small_050": {},
    "mvitv2_tiny": {"img_size": 64},
    "pvt_v2_b0": {"depths": (1, 1, 1, 1)},
    "swin_tiny_patch4_window7_224": {"img_size": 56, "depths": (2, 2), "num_heads": (3, 6)},
    "swinv2_tiny_window8_256": {"img_size": 64, "depths": (2, 2), "num_heads": (3, 6)},
    "vit_small_patch16_dinov3": {"img_size": 64, "depth": 2},
    "xcit_nano_12_p16_224": {"img_size": 64, "depth": 2},
}
"""Models and the arguments that make them small."""


def _of_timm(name: str) -> tuple[nn.Module, Any]:
    import timm

    given = TIMM[name]
    return timm.create_model(name, **given), torch.randn(1, 3, *2 * [given.get("img_size", 64)])


def models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    """A maker of each model and its arguments."""
    made: dict[str, Callable[[], tuple[nn.Module, Any]]] = {}
    with contextlib.suppress(BaseException):  # pytest skips what is not installed
        from tests.exporter.test_architectures import ARCHITECTURES

        made |= {name: build for name, (build, _) in ARCHITECTURES.items()}
    return made | {f"timm {name}": partial(_of_timm, name) for name in TIMM}


def as_trained(model: nn.Module) -> None:
    """Weights and statistics of the size of trained ones, in place: at a neutral initial value (ones of a norm, zeros
    of a bias) nodes can be left out that no trained model does without."""
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if name.endswith("running_mean"):
                tensor.normal_(0, 0.1)
            elif name.endswith("running_var"):
                tensor.uniform_(0.5, 1.5)
            elif not isinstance(tensor, nn.Parameter):
                continue
            elif tensor.dim() > 1:
                tensor.normal_(0, tensor[0].numel() ** -0.5)
            else:
                tensor += 0.1 * torch.randn_like(tensor)


def count(model: onnx.ModelProto) -> int:
    """Nodes, nested graphs included, constants and bodies left out."""
    return sum(node.op_type != "Constant" for graph in graphs(model.graph) for node in graph.node)


def expanded(model: onnx.ModelProto, opset: int) -> tuple[int, dict[str, int]]:
    """How many nodes a model would have if ops that an opset lacks were those that the converter makes of each alone.

    Returns:
        That number, and the nodes of each such op, of the largest of its kind.
    """
    known = {s.name for s in onnx.defs.get_all_schemas_with_history() if not s.domain and s.since_version <= opset}
    types = infer_types(light_copy(svexport.lower(model)))
    held = {tensor.name: tensor for tensor in model.graph.initializer}

    def described(names: Iterable[str]) -> list[onnx.ValueInfoProto]:
        found = (types[name] for name in dict.fromkeys(names) if name in types and name not in held)
        return [onnx.helper.make_tensor_value_info(value.name, value.dtype, value.shape) for value in found]

    total, sizes = count(model), {}
    for node in model.graph.node:
        if node.domain or node.op_type in known:
            continue
        constants = [held[name] for name in node.input if name in held]
        alone = onnx.helper.make_model(
            onnx.helper.make_graph([node], "alone", described(node.input), described(node.output), constants),
            opset_imports=model.opset_import,
            ir_version=model.ir_version,
        )
        nodes = count(svexport.convert(alone, opset=opset))
        total += nodes - 1
        sizes[node.op_type] = max(nodes, sizes.get(node.op_type, 0))
    return total, sizes


def measured(name: str, model: nn.Module, args: Any, folder: Path) -> dict[str, Any]:
    """Of one model: its nodes at each opset, and simplified."""
    row: dict[str, Any] = {"model": name, "nodes": {}, "Shape": {}, "notes": {}}
    files = {}
    for opset in (*OPSETS, NEWEST):
        path = folder / f"{opset}.onnx"
        report = svexport.export(copy.deepcopy(model), args, path, opset=opset, verify=False)
        files[opset] = onnx.load(path)
        row["nodes"][str(opset)] = count(files[opset])
        row["Shape"][str(opset)] = report.lowered_nodes.get("Shape", 0)
        if traced := [note for note in report.notes if note.startswith("traced by TorchScript")]:
            row["notes"][str(opset)] = traced[0]
    row["expanded"], row["ratio"] = {}, {}
    for opset in OPSETS:
        total, row["expanded"][str(opset)] = expanded(files[NEWEST], opset)
        row["ratio"][str(opset)] = row["nodes"][str(opset)] / total
    path = folder / "simplified.onnx"
    svexport.export(copy.deepcopy(model), args, path, opset=SIMPLIFIED, verify=False, plugins=False, simplify=True)
    ours = onnx.load(path)
    row["simplified"], row["run"] = count(ours), {"simplified": run(ours)}
    with contextlib.suppress(ImportError):
        standard = svexport.lower(files[SIMPLIFIED])
        for kind, left_out in (("onnxslim", ()), ("onnxslim, not merging", MERGING)):
            theirs = slimmed(standard, left_out)
            row[kind] = None if theirs is None else count(theirs)
            row["run"][kind] = None if theirs is None else run(theirs)
    return row


def slimmed(model: onnx.ModelProto, left_out: Iterable[str]) -> onnx.ModelProto | None:
    """What onnxslim makes of a file in standard ONNX, some fusions left out; None where it fails."""
    import onnxslim

    given = onnx.ModelProto()
    given.CopyFrom(model)
    with contextlib.redirect_stdout(None):
        try:
            return onnxslim.slim(given, skip_fusion_patterns=[f"Fusion{name}" for name in left_out])
        except Exception:  # noqa: BLE001 - a peer may take less than we do
            return None


def run(model: onnx.ModelProto) -> int | None:
    """The nodes that ONNX Runtime runs, its optimizations done; None where it takes no such file."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
    with tempfile.TemporaryDirectory() as folder:
        options.optimized_model_filepath = str(Path(folder) / "run.onnx")
        try:
            onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        except Exception:  # noqa: BLE001 - of a peer's, too
            return None
        return count(onnx.load(options.optimized_model_filepath))


def summary(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """How many models were measured, medians, worst, and those of which onnxslim leaves fewer nodes than we do."""
    found: list[dict[str, Any]] = []
    for opset in map(str, OPSETS):
        ratios = {row["model"]: row["ratio"][opset] for row in rows if "ratio" in row}
        if not ratios:
            continue
        worst = max(ratios, key=ratios.__getitem__)
        plain = {row["model"]: row["nodes"][opset] / row["nodes"][str(NEWEST)] for row in rows if "ratio" in row}
        most = max(plain, key=plain.__getitem__)
        found.append(
            {
                "summary": f"opset {opset}",
                "median": statistics.median(ratios.values()),
                "worst": ratios[worst],
                "of": worst,
                "not expanded": {"median": statistics.median(plain.values()), "worst": plain[most], "of": most},
            }
        )
    kinds = ("onnxslim", "onnxslim, not merging")
    larger = {
        kind: {r["model"]: [r["simplified"], r[kind]] for r in rows if r.get(kind) and r["simplified"] > r[kind]}
        for kind in kinds
    }
    more = {
        r["model"]: [r["run"]["simplified"], r["run"]["onnxslim"]]
        for r in rows
        if (r.get("run") or {}).get("onnxslim") and r["run"]["simplified"] > r["run"]["onnxslim"]
    }
    shapes = [row["model"] for row in rows if any(row.get("Shape", {}).values())]
    notes = [row["model"] for row in rows if row.get("notes")]
    return [
        *found,
        {
            "summary": "all",
            "models": sum("model" in row for row in rows),
            "measured": sum("ratio" in row for row in rows),
            "failed": [row["model"] for row in rows if "error" in row],
            "goals": GOALS,
            **{f"larger than {kind}": models for kind, models in larger.items()},
            "more run than onnxslim's": more,
            "with Shape": shapes,
            "by TorchScript": notes,
        },
    ]


def run_models(
    module: str,
    description: str,
    done: str,
    measure: Callable[[str, nn.Module, Any, Path], dict[str, Any]],
    summed: Callable[[list[dict[str, Any]]], list[dict[str, Any]]],
) -> None:
    """``python -m benchmarks.<module>``: a row of results for each model that is named and has none with ``done``."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{module}", description=description)
    parser.add_argument("names", nargs="*", help="models; all unless given, whose results are kept")
    parser.add_argument("--resume", action="store_true", help="keep what the results have, measure what they lack")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    kept = RESULTS / f"{module}-cpu.json"
    rows = json.loads(kept.read_text())["rows"] if options.resume and kept.exists() else []
    rows = [row for row in rows if done in row and row["model"] not in options.names]
    for name, build in models().items():
        if any(row["model"] == name for row in rows) or (options.names and name not in options.names):
            continue
        torch.manual_seed(0)
        try:
            model, args = build()
            with tempfile.TemporaryDirectory() as folder:
                as_trained(model.eval())
                row = measure(name, model, args, Path(folder))
        except (Exception, SystemExit) as error:  # noqa: BLE001 - what is not installed, or fails, is said
            row = {"model": name, "error": f"{type(error).__name__}: {error}".splitlines()[0]}
        except BaseException as error:  # pytest's, of what is not installed
            if isinstance(error, KeyboardInterrupt):
                raise
            row = {"model": name, "error": str(error)}
        rows.append(row)
        print(row, flush=True)
        if not options.names or options.resume:
            write(f"{module}-cpu", [*rows, *summed(rows)])
    for row in summed(rows):
        print(row)


def main() -> None:
    run_models("nodes", "nodes of exported files by opset", "ratio", measured, summary)


if __name__ == "__main__":
    main()
