"""Say how the CUDA kernels of an op run: the tactics for a shape, which is chosen, and what each would take.

No GPU is needed; `--gpu` names the one that is meant. Times are what the planner believes, not measurements.

examples:
  svexport kernels list
  svexport kernels explain add_bias_residual_layer_norm --shape 6x900x256 --dtype float16 --gpu orin
  svexport kernels explain add_bias_residual_layer_norm --shape 2000x8192 --backward --gpu t4 --set dense=0
"""

from __future__ import annotations

import argparse
from typing import Any

from svexport.cli import Outcome
from svexport.errors import UnsupportedError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "explain"))
    parser.add_argument("op", nargs="?", metavar="OP", help="explain: the op")
    parser.add_argument("--shape", type=_shape, metavar="AxBxC", help="explain: of the tensor that `list` names")
    parser.add_argument("--dtype", default="float32", metavar="TYPE", help="of that tensor (default: float32)")
    parser.add_argument("--backward", action="store_true", help="the gradient's kernels")
    parser.add_argument("--gpu", metavar="NAME", help="t4, orin, h100, … (default: this machine's, else h100)")
    parser.add_argument(
        "--set",
        metavar="NAME=N",
        action="append",
        default=[],
        type=_number,
        help="another number of the problem, as `list` names them; may be repeated",
    )


def run(options: argparse.Namespace) -> Outcome:
    return {"list": _list, "explain": _explain}[options.action](options)


def _list(options: argparse.Namespace) -> Outcome:
    from rich import box
    from rich.table import Table

    from svexport.kernels import planner
    from svexport.kernels.shapes import SHAPES

    table = Table("op", "shape of", "a problem is made of", box=box.SIMPLE_HEAD)
    data = {}
    for op, numbers in planner.problems().items():
        data[op] = {"shape": SHAPES[op][0], "problem": numbers}
        table.add_row(op, SHAPES[op][0], ", ".join(f"{name}={value}" for name, value in numbers.items()))
    return Outcome(True, {"ops": data, "gpus": list(planner.GPUS)}, [table, f"GPUs: {', '.join(planner.GPUS)}"])


def _explain(options: argparse.Namespace) -> Outcome:
    from dataclasses import asdict

    from rich import box
    from rich.table import Table

    from svexport.kernels import planner
    from svexport.kernels.shapes import problem

    if options.op is None or options.shape is None:
        raise UnsupportedError("explain takes an op and its --shape; `svexport kernels list` has them")
    gpu = _gpu(options.gpu)
    asked = problem(options.op, options.shape, options.dtype, backward=options.backward)
    more = dict(options.set)
    if twice := more.keys() & asked.keys() - {"strides"}:
        raise UnsupportedError(f"--shape, --dtype and --backward say what {', '.join(sorted(twice))} is, not --set")
    asked |= more
    plan = planner.plan(options.op, gpu, **asked)
    table = Table("", "tactic", "id", "us", "grid", "block", "shared memory", box=box.SIMPLE_HEAD)
    for tactic in sorted(plan.tactics, key=lambda t: t.microseconds):
        launch = tactic.launch
        sizes = ["x".join(map(str, launch.grid)), "x".join(map(str, launch.block)), str(launch.shared_memory)]
        mark = "*" if tactic == plan.chosen else ""
        table.add_row(mark, str(tactic), str(tactic.id), f"{tactic.microseconds:.1f}", *sizes)
    data = {
        "op": options.op,
        "gpu": asdict(gpu),
        "problem": planner.problems()[options.op] | asked,
        "chosen": plan.chosen.id,
        "tactics": [asdict(tactic) for tactic in plan.tactics],
    }
    return Outcome(True, data, [f"{options.op} on {gpu.name}: * runs", table])


def _gpu(name: str | None) -> Any:
    from svexport.kernels import planner

    if name is None:
        return planner.this_gpu() or planner.GPUS["h100"]
    if name.lower() not in planner.GPUS:
        raise UnsupportedError(f"--gpu takes {', '.join(planner.GPUS)}; got {name}")
    return planner.GPUS[name.lower()]


def _shape(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"expects sizes such as 6x900x256, got {text!r}") from None


def _number(text: str) -> tuple[str, int]:
    name, _, value = text.partition("=")
    if not value.isdecimal():
        raise argparse.ArgumentTypeError(f"expects NAME=N, got {text!r}")
    return name, int(value)
