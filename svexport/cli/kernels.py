"""Say how the CUDA kernels of an op run: the tactics for a shape, which is chosen, and what each would take.

`list` and `explain` need no GPU: `--gpu` names one, and times are the planner's estimates. `tune` times the tactics on
this machine's GPU and keeps the fastest, which run from then on; without an op it tunes all named shapes.

examples:
  svexport kernels list
  svexport kernels explain add_bias_residual_layer_norm --shape 6x900x256 --dtype float16 --gpu orin
  svexport kernels explain add_bias_residual_layer_norm --shape 2000x8192 --backward --gpu t4 --set dense=0
  svexport kernels tune grid_sample --shape 6x256x116x200x900 --dtype float16
"""

from __future__ import annotations

import argparse
from typing import Any

from svexport.cli import Outcome
from svexport.cli._progress import status
from svexport.errors import UnsupportedError
from svexport.progress import phase
from svexport.text import table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", choices=("list", "explain", "tune"))
    parser.add_argument("op", nargs="?", metavar="OP", help="explain, tune: the op")
    parser.add_argument(
        "--shape", type=_shape, metavar="AxBxC", help="explain, tune: shape of the tensor that `list` names"
    )
    parser.add_argument("--dtype", metavar="TYPE", help="its type (default: float32; tune: float32 and float16)")
    parser.add_argument("--backward", action="store_true", help="kernels of the gradient")
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
    return {"list": _list, "explain": _explain, "tune": _tune}[options.action](options)


def _list(options: argparse.Namespace) -> Outcome:
    from svexport.kernels import planner
    from svexport.kernels.shapes import SHAPES

    problems = planner.problems()
    data = {op: {"shape": SHAPES[op][0], "problem": numbers} for op, numbers in problems.items()}
    rows = ((op, SHAPES[op][0], ", ".join(f"{n}={v}" for n, v in numbers.items())) for op, numbers in problems.items())
    shown = table(("op", "shape of", "a problem is made of"), rows)
    return Outcome(True, {"ops": data, "gpus": list(planner.GPUS)}, [shown, f"GPUs: {', '.join(planner.GPUS)}"])


def _explain(options: argparse.Namespace) -> Outcome:
    from dataclasses import asdict

    from svexport.kernels import planner
    from svexport.kernels.shapes import problem

    if options.op is None or options.shape is None:
        raise UnsupportedError(
            "explain expects an op and --shape; `svexport kernels list` has the ops and their shapes"
        )
    gpu = _gpu(options.gpu)
    asked = problem(options.op, options.shape, options.dtype or "float32", backward=options.backward)
    more = dict(options.set)
    if twice := more.keys() & asked.keys() - {"strides"}:
        raise UnsupportedError(
            f"{', '.join(sorted(twice))} follows from --shape, --dtype and --backward; leave it out of --set"
        )
    asked |= more
    plan = planner.plan(options.op, gpu, **asked)
    rows = []
    for tactic in sorted(plan.tactics, key=lambda t: t.microseconds):
        launch = tactic.launch
        sizes = ["x".join(map(str, launch.grid)), "x".join(map(str, launch.block)), str(launch.shared_memory)]
        mark = "*" if tactic == plan.chosen else ""
        rows.append((mark, tactic, tactic.id, f"{tactic.microseconds:.1f}", *sizes))
    shown = table(("", "tactic", "id", "us", "grid", "block", "shared memory"), rows)
    data = {
        "op": options.op,
        "gpu": asdict(gpu),
        "problem": planner.problems()[options.op] | asked,
        "chosen": plan.chosen.id,
        "tactics": [asdict(tactic) for tactic in plan.tactics],
    }
    why = "timed to be the fastest" if plan.timed else "runs"
    return Outcome(True, {**data, "timed": plan.timed}, [f"{options.op} on {gpu.name}: * {why}", shown])


def _tune(options: argparse.Namespace) -> Outcome:
    from svexport.kernels import tune
    from svexport.kernels.shapes import problem

    if options.gpu or options.set:
        raise UnsupportedError("tune runs on this machine's GPU with contiguous tensors; leave out --gpu and --set")
    if options.shape and not options.op:
        raise UnsupportedError(
            "tune expects the op that --shape belongs to; `svexport kernels list` has the ops and their shapes"
        )
    shapes = {options.op: [(options.shape, options.backward)]} if options.shape else tune.NAMED
    dtypes = [options.dtype] if options.dtype else ["float32", "float16"]
    cases = [
        (op, shape, dtype, backward)
        for op in ([options.op] if options.op else shapes)
        for shape, backward in shapes.get(op, [((), False)])  # an op without shapes is refused by name below
        for dtype in dtypes
    ]
    for op, shape, dtype, backward in cases:
        problem(op, shape, dtype, backward=backward)
    gpu = tune.needed()
    rows, shown = [], []
    with status("timing tactics"):
        for op, shape, dtype, backward in cases:
            name = op + (" backward" if backward and not op.endswith("backward") else "")
            phase(f"{name} {'x'.join(map(str, shape))} {dtype}")
            one = tune.tune(tune.call_of(op, shape, dtype, backward=backward))
            file = str(tune.keep(gpu.name, [one]))  # kept one by one, so that an interrupt loses nothing
            cells = [text for t in (one.chosen, one.winner) for text in (str(t), f"{one.times[t.id]:.1f}")]
            shown.append((name, "x".join(map(str, shape)), dtype, *cells))
            row = {"op": one.op, "problem": one.problem, "chosen": one.chosen.id, "tactic": one.winner.id}
            rows.append({**row, "microseconds": one.times})
    made = table(("op", "shape", "type", "planner's choice", "us", "fastest", "us"), shown)
    return Outcome(True, {"gpu": gpu.name, "table": file, "tuned": rows}, [f"on {gpu.name}", made, file])


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
