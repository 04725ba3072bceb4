"""Why torch.export, or the exporter behind it, does not take a model: errors that name the user's line."""

from __future__ import annotations

import io
import os
import re
import traceback
from collections.abc import Sequence
from contextlib import redirect_stderr
from typing import TypeVar

import torch
from torch import Tensor, nn

from svexport.errors import ExportError, SvexportError
from svexport.exporter.constants import LINE
from svexport.exporter.decompose import advice_on
from svexport.tracing.arguments import MODEL_ATTRIBUTE, FlatModel, own_failure
from svexport.tracing.source import is_library, is_standard, shown_line, user_frame

__all__ = ["chain", "failure", "line_of", "located", "reason_of"]

Error = TypeVar("Error", bound=SvexportError)

_BITS = {"and_": "&", "or_": "|", "xor": "^", "lshift": "<<", "rshift": ">>"}

_KNOWN = (
    (
        "registered for the complex-valued input",
        "forward computes with complex numbers, for which a function has no form in ONNX",
        "compute with the real and imaginary parts, torch.view_as_real(z)",
    ),
    (
        "Tensor that doesn't have storage",
        "forward takes derivatives in reverse mode (torch.func.grad, vjp or jacrev), which are not traced",
        "write the derivative out, or take it in forward mode by torch.func.jvp",
    ),
    (
        r"op='aten\.(\w+)', overload='(?:\w+_)?generator",
        "forward draws random numbers ({0}) from a generator of its own",
        "draw them outside, and pass them as inputs, or keep them in a buffer if they are always the same",
    ),
    (
        "unhashable type: non-nested SymInt",
        "forward looks a dynamic size up in a dict, a set or a cache",
        "compute from the size what is kept for it, or make the size static",
    ),
    (
        "Unsupported attribute type: .*Symbolic",
        "a dynamic size is given for what is an attribute in ONNX, such as groups=x.shape[0] of a convolution",
        "make that size static, or compute it by functions that take tensors, such as torch.einsum",
    ),
)
"""For each known error: a pattern of its text, the reason with the pattern's groups, and the advice."""

_SOLVER = f"{os.sep}sympy{os.sep}"


def failure(
    model: nn.Module, tensors: Sequence[Tensor], opset: int | None, input_names: Sequence[str], error: BaseException
) -> ExportError:
    """The root cause of the exporter's chain of errors, with the user's source line where one is known.

    Args:
        opset: that was asked for; None where torch.export was asked which axes may be dynamic.
    """
    for one in reversed(chain(error)):
        if isinstance(one, ExportError):
            return located(one, line_of(error))
    if own := own_failure(model, tensors):
        return own
    where = line_of(error) or _source_of(_text(error), model, tensors)
    reason, advice = reason_of(error, input_names)
    scripted = [name for name, m in model.named_modules() if isinstance(m, torch.jit.ScriptModule)]
    if scripted:
        place = scripted[0].replace(MODEL_ATTRIBUTE, "model", 1)
        advice = (
            f"{place} is scripted, which torch.export does not take: use the module that was scripted, or export with "
            "opset=17 or less (another exporter)"
        )
    what = f"cannot be exported at opset {opset}"
    if opset is None:
        what = "dynamic_shapes='auto' finds no axes, because torch.export does not take the model"
        advice = 'name the axes that are to be dynamic: dynamic_shapes={"x": {0: "batch"}}'
    return ExportError(f"{what}: {reason}" + (f"\n  at {where}" if where else "") + f"\n  {advice}")


def reason_of(error: BaseException, input_names: Sequence[str]) -> tuple[str, str]:
    """Why torch.export, or the exporter behind it, does not take a model, and what to do about it."""
    text, causes = _text(error), chain(error)
    reason = _first_line(next((one for one in reversed(causes) if isinstance(one, ExportError)), causes[-1]))
    fixed = re.findall(r"static shape of (\d+) for dimension inputs\['tensors'\]\[(\d+)\]\.shape\[(\d+)\]", text)
    if fixed:
        size, index, axis = fixed[0]
        return (
            f"axis {axis} of {input_names[int(index)]} is to be dynamic, but forward uses it as the number {size}",
            "use no int(), range() or branch on that size, make it static, or try opset=17 (another exporter)",
        )
    if "data-dependent" in text:
        return (
            f"forward needs the value of a tensor in Python: {reason}",
            "a file takes the same branches for all inputs: compute both and choose by torch.where, or make a constant "
            "of it; opset=17 or less exports the branch of the given inputs, and tries inputs that take another",
        )
    for pattern, why, advice in _KNOWN:
        if found := re.search(pattern, text):
            return why.format(*found.groups()), advice
    if bitwise := re.search(r"(?:target=operator\.|<built-in function )(and_|or_|xor|lshift|rshift)\b", text):
        return (
            f"forward computes with the bits of a dynamic size ({_BITS[bitwise[1]]}), which has no form in ONNX",
            "compute with //, * and %, or make that size static",
        )
    return reason, advice_on(reason) or "replace the function by supported ones, or try opset=17 (another exporter)"


def located(error: Error, where: str) -> Error:
    """An error with the user's line, where it has none."""
    known = not where or "\n  at " in str(error)
    return error if known else type(error)(f"{error}\n  at {where}").with_traceback(error.__traceback__)


def line_of(error: BaseException) -> str:
    """The user's line, where the error is one of what a function was given, or names one."""
    causes = chain(error)
    known = next((getattr(one, LINE) for one in causes if hasattr(one, LINE)), "") or user_frame(_text(error))
    return known or next(filter(None, map(_line_within, reversed(causes))), "")


def _line_within(error: BaseException) -> str:
    """The innermost of the user's lines within the model's forward that an error came through."""
    line, within = "", False
    for frame, number in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        within |= code is FlatModel.forward.__code__
        path = code.co_filename
        if within and not (is_library(path) or is_standard(path) or _SOLVER in path):
            line = shown_line(path, number, code.co_name)
    return line


def _text(error: BaseException) -> str:
    return "\n".join(map(str, chain(error)))


def chain(error: BaseException) -> list[BaseException]:
    """An error, and what led to it, the first cause last."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return causes


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _source_of(text: str, model: nn.Module, tensors: Sequence[Tensor]) -> str:
    """The source line of the operator that an error message names, found by tracing once more."""
    try:
        with redirect_stderr(io.StringIO()):  # torch.export prints its graph
            program = torch.export.export(model, tuple(tensors), strict=False)
        nodes = [*program.graph.nodes, *program.run_decompositions().graph.nodes]
    except Exception:  # noqa: BLE001 - only the source line would be lost
        return ""
    for node in nodes:
        if node.op == "call_function" and (f"%{node.name} " in text or f"'{node.target}'".rsplit(".", 1)[0] in text):
            return user_frame(node.meta.get("stack_trace") or "")
    return ""
