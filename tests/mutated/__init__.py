"""Reading a damaged ONNX file ends in a result or in an svexport error, whatever the file holds."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import torch
from onnx import helper
from torch import Tensor, nn

import svexport

__all__ = ["ACTIONS", "bases", "mutated", "outcome"]

SIZES = (0, 1, -1, 2, 7, 2**31 - 1, 2**31, -(2**31), 2**40, 2**63 - 1, -(2**63))


class Small(nn.Module):
    """A little of everything: svexport nodes with and without plugins, sizes, constants, a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.LayerNorm(4)

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        y = nn.functional.grid_sample(self.conv(x), grid, align_corners=False)
        y = torch.einsum("nchw,nchv->nhwv", y, y)
        return self.norm(y.mean(-1, keepdim=True).expand(-1, -1, -1, 4)).flatten(1)[:, :3]


INPUTS = torch.rand(1, 2, 5, 5), torch.rand(1, 3, 4, 2)


def bases(folder: Path) -> list[bytes]:
    """Whole files to damage: as exported at several opsets, for a target, without bodies, and one with a loop."""
    torch.manual_seed(0)
    found = []
    for options in ({"opset": 11}, {"opset": 18}, {"opset": 13, "plugins": False}, {"opset": 13, "target": "8.6"}):
        report = svexport.export(
            Small(), INPUTS, folder / "m.onnx", dynamic_axes={"x": {0: "n"}, "grid": {0: "n"}}, **options
        )
        found.append(report.path.read_bytes())
    body = helper.make_graph(
        [helper.make_node("Add", ["a", "a"], ["b"]), helper.make_node("Identity", ["c"], ["d"])],
        "body",
        [helper.make_tensor_value_info(name, kind, []) for name, kind in (("i", 7), ("c", 9), ("a", 1))],
        [helper.make_tensor_value_info(name, kind, []) for name, kind in (("d", 9), ("b", 1))],
    )
    graph = helper.make_graph(
        [
            helper.make_node("Constant", [], ["most"], value=helper.make_tensor("", 7, [], [3])),
            helper.make_node("ReduceSum", ["x"], ["s"], keepdims=0),
            helper.make_node("Loop", ["most", "", "s"], ["t"], body=body),
            helper.make_node("SvFastSigmoid", ["t"], ["y"], domain="svexport"),
        ],
        "loop",
        [helper.make_tensor_value_info("x", 1, [2, 3])],
        [helper.make_tensor_value_info("y", 1, None)],
    )
    opsets = [helper.make_opsetid("", 13), helper.make_opsetid("svexport", 1)]
    found.append(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())
    return found


def mutated(base: bytes, seed: int) -> bytes:
    """A damaged file: bytes that are others, gone or doubled, or fields of the message that say something else."""
    chance = random.Random(seed)
    if chance.random() < 0.4:
        return _bytes(bytearray(base), chance)
    model = onnx.load_model_from_string(base)
    for _ in range(chance.choice((1, 1, 2, 5))):
        _field(model, chance)
    try:
        return model.SerializeToString()
    except Exception:  # noqa: BLE001 - beyond what a protobuf holds
        return _bytes(bytearray(base), chance)


def _bytes(data: bytearray, chance: random.Random) -> bytes:
    for _ in range(chance.choice((1, 1, 2, 8, 64))):
        place = chance.randrange(len(data))
        kind = chance.randrange(5)
        if kind == 0:
            data[place] ^= 1 << chance.randrange(8)
        elif kind == 1:
            data[place] = chance.randrange(256)
        elif kind == 2:
            del data[place : place + chance.choice((1, 4, 100))]
        elif kind == 3:
            data[place:place] = data[place : place + chance.choice((1, 4, 100))]
        elif chance.random() < 0.2:
            del data[place:]
        if not data:
            return b""
    return bytes(data)


def _field(message: Any, chance: random.Random) -> None:
    """Changes one field, somewhere below a message."""
    while True:
        fields = message.ListFields()
        if not fields:
            return
        field, value = chance.choice(fields)
        many = field.is_repeated if hasattr(field, "is_repeated") else field.label == field.LABEL_REPEATED
        if many and not len(value):
            return
        if field.message_type is not None:
            if many and chance.random() < 0.15:
                place = chance.randrange(len(value))
                if chance.random() < 0.5:
                    del value[place]
                else:
                    value.add().CopyFrom(value[chance.randrange(len(value))])
                return
            if not many and chance.random() < 0.05:
                message.ClearField(field.name)
                return
            message = value[chance.randrange(len(value))] if many else value
            continue
        place = chance.randrange(len(value)) if many else None
        old = value[place] if many else value
        try:
            new = _value(old, chance)
            if many:
                value[place] = new
            else:
                setattr(message, field.name, new)
        except (ValueError, TypeError, OverflowError):
            message.ClearField(field.name)
        return


def _value(old: Any, chance: random.Random) -> Any:
    if isinstance(old, bool):
        return not old
    if isinstance(old, int):
        return chance.choice((*SIZES, old + 1, old - 1, old * 2, chance.randrange(30)))
    if isinstance(old, float):
        return chance.choice((0.0, -1.0, float("nan"), float("inf"), old * 1e10))
    if isinstance(old, bytes):
        return chance.choice((b"", old[:-1], old + b"\x00", b"\xff" * len(old), old * 3))
    names = (
        "",
        "x",
        "grid",
        "output",
        old + "_",
        old[:-1],
        "Identity",
        "Loop",
        "If",
        "Reshape",
        "svexport",
        "SvEinsum",
    )
    return chance.choice(names)


def _check(path: Path) -> None:
    svexport.check(path, target="8.6")


def _lower(path: Path) -> None:
    svexport.lower(path)


def _load(path: Path) -> None:
    engine = svexport.load(path, device="cpu")
    shapes = [[s if isinstance(s, int) else 1 for s in spec.shape or ()] for spec in engine.inputs]
    if all(math.prod(shape) < 2**20 for shape in shapes):
        engine.run([torch.zeros(shape, dtype=spec.dtype) for shape, spec in zip(shapes, engine.inputs, strict=True)])


def _compare(path: Path) -> None:
    svexport.compare(Small().eval(), path, INPUTS)


def _convert(path: Path) -> None:
    svexport.convert(path, opset=11)


ACTIONS: dict[str, Callable[[Path], None]] = {
    "check": _check,
    "lower": _lower,
    "load": _load,
    "compare": _compare,
    "convert": _convert,
}


def outcome(action: str, path: Path) -> str:
    """``""`` of a result or an error of svexport, else the name of the error."""
    try:
        ACTIONS[action](path)
    except svexport.SvexportError:
        return ""
    except Exception as error:  # noqa: BLE001 - which is what is looked for
        frames = []
        trace = error.__traceback__
        while trace is not None:
            frames.append(f"{Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno}")
            trace = trace.tb_next
        return f"{type(error).__name__} at {' '.join(frames[-6:])}: {str(error)[:100]!r}"
    return ""
