"""Exports cases, runs the files in ONNX Runtime, and compares the results with torch."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import signal
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from torch import Tensor, nn

import svexport
from tests.sweep.samples import Case

OPSETS = (11, 13, 17, 18, 20, 23)
EXPORTERS = ("svexport", "torch")
SECONDS = 60
"""A function that is not done at an opset then counts as refused."""
LIMITS = ("large", "infinite", "nan")
"""Runs in which a function that is right of tame numbers differs: the page says which functions do."""
EXPORTS = 8
"""Of a function at an opset, to find out which of its samples are refused."""


class Calls(nn.Module):
    """All cases as one model."""

    def __init__(self, cases: Sequence[Case]) -> None:
        super().__init__()
        self.cases = tuple(cases)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        results: list[Tensor] = []
        for case in self.cases:
            given, tensors = tensors[: len(case.tensors)], tensors[len(case.tensors) :]
            results += case.call(given)
        return tuple(results)


@dataclasses.dataclass
class Verdict:
    """Of a function at an opset: how many of its samples are right, refused and wrong, and why.

    ``limits`` counts those that are wrong of NaN alone, or of numbers near the end of their type, ``untried`` those
    that :data:`EXPORTS` left.
    """

    right: int = 0
    refused: int = 0
    wrong: int = 0
    limits: int = 0
    untried: int = 0
    reasons: list[str] = dataclasses.field(default_factory=list)

    def add(self, kind: str, reason: str, count: int = 1) -> None:
        setattr(self, kind, getattr(self, kind) + count)
        if reason and len(self.reasons) < 6 and reason not in self.reasons:
            self.reasons.append(reason)


@dataclasses.dataclass
class Expected:
    """What torch makes of one run of a case; ``exact`` with more digits."""

    name: str
    inputs: list[Tensor]
    outputs: list[Tensor]
    exact: list[Tensor | None]


def expected(case: Case) -> list[Expected] | str:
    """The runs of a case that torch takes, or why it is not compared."""
    found: list[Expected] = []
    for name, inputs in case.runs():
        try:
            outputs = _called(case, inputs)
            again = _called(case, inputs, seed=1)
        except Exception as error:  # noqa: BLE001 - an extreme that torch refuses
            if not found:
                return f"torch itself: {_line(error)}"
            continue
        if not outputs or any(t.is_complex() for t in (*inputs, *outputs)):
            return "complex numbers" if outputs else "no tensor"
        if any(t.is_sparse or t.is_quantized for t in outputs):
            return "not a plain tensor"
        if not all(a.shape == b.shape and _equal(a, b) for a, b in zip(outputs, again, strict=True)):
            return "random"
        exact: list[Tensor | None] = [None] * len(outputs)
        if case.dtype != torch.bool and any(t.dtype.is_floating_point for t in outputs):
            more = torch.float32 if case.dtype == torch.float16 else torch.float64
            with contextlib.suppress(Exception):
                precise = _called(case, [t.to(more) if t.dtype == case.dtype else t for t in inputs])
                alike = [t.shape for t in precise] == [t.shape for t in outputs]
                if alike and (case.dtype.is_floating_point or all(map(_same_but_rounded, outputs, precise))):
                    exact = list(precise)
        found.append(Expected(name, inputs, outputs, exact))
    return found


def _same_but_rounded(output: Tensor, precise: Tensor) -> bool:
    """Whether a function of integers is the same one of floating-point numbers."""
    if not output.dtype.is_floating_point or not output.numel():
        return output.dtype == precise.dtype and torch.equal(output, precise)
    scale = precise.double().abs().max().nan_to_num(0, 0, 0)
    return bool(((output.double() - precise.double()).abs() <= 1e-5 * scale).all())


def _called(case: Case, inputs: Sequence[Tensor], seed: int = 0) -> list[Tensor]:
    own = torch.manual_seed
    torch.manual_seed = lambda number: own(number + seed)  # type: ignore[assignment]  # PyTorch's samples seed some functions
    torch.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings(), contextlib.ExitStack() as stack:
        stack.callback(setattr, torch, "manual_seed", own)
        warnings.simplefilter("ignore")
        return [t.detach().clone() for t in case.call([t.clone() for t in inputs])]


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(torch.nan_to_num(a.double()), torch.nan_to_num(b.double()))


def judge(cases: Sequence[tuple[Case, list[Expected]]], opset: int, exporter: str) -> Verdict:
    """The cases at an opset, exported together where that works, and by halves where it does not."""
    verdict, waiting, left = Verdict(), [list(cases)], EXPORTS
    with _limit(SECONDS):
        while waiting:
            group = waiting.pop()
            if not left:
                verdict.add("untried", "", len(group))
                continue
            left -= 1
            try:
                judged = _judged(group, opset, exporter)
            except _OutOfTime:
                verdict.add("refused", f"not done in {SECONDS} s", len(group) + sum(map(len, waiting)))
                break
            except Exception as error:  # noqa: BLE001 - exporters raise anything
                if len(group) == 1:
                    verdict.add("refused", f"{group[0][0].text}: {_line(error)}")
                    if (
                        not (verdict.right or verdict.wrong or verdict.limits)
                        and len(set(map(_reason, verdict.reasons))) < verdict.refused
                    ):
                        verdict.add("refused", "", sum(map(len, waiting)))  # the first and the last, for one reason
                        break
                elif len(group) == len(cases) > 2:
                    waiting += [group[1:-1], group[-1:], group[:1]]
                else:
                    waiting += [group[len(group) // 2 :], group[: len(group) // 2]]
                continue
            for (case, _), problem in zip(group, judged, strict=True):
                kind = "right" if not problem else "limits" if problem.startswith(LIMITS) else "wrong"
                verdict.add(kind, f"{case.text}: {problem}" if problem else "")
    return verdict


def _reason(text: str) -> str:
    """Why a sample was refused, without the sample."""
    return text.partition("Error: ")[2][:60]


def _judged(cases: Sequence[tuple[Case, list[Expected]]], opset: int, exporter: str) -> list[str]:
    """What is wrong with each case, empty where nothing is; raises where one cannot be exported or run."""
    tensors = [t.clone() for case, _ in cases for t in case.tensors]
    written = _file([case for case, _ in cases], tensors, opset, exporter)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    session = onnxruntime.InferenceSession(written, options, providers=["CPUExecutionProvider"])
    inputs, outputs = [i.name for i in session.get_inputs()], [o.name for o in session.get_outputs()]
    problems = [""] * len(cases)
    for run in range(max(len(runs) for _, runs in cases)):
        chosen = [runs[min(run, len(runs) - 1)] for _, runs in cases]
        given = [t for one in chosen for t in one.inputs]
        if len(inputs) != len(given):
            raise ValueError(f"the file has {len(inputs)} inputs, not {len(given)}")
        got = session.run(outputs, {n: _array(t) for n, t in zip(inputs, given, strict=True)})
        place = 0
        for i, one in enumerate(chosen):
            mine = got[place : place + len(one.outputs)]
            place += len(one.outputs)
            if not problems[i] or problems[i].startswith(LIMITS):
                problems[i] = _problem(one, mine, cases[i][0].dtype, cases[i][0].places) or problems[i]
    return problems


def _array(tensor: Tensor) -> Any:
    return tensor.contiguous().numpy()


def _file(cases: Sequence[Case], tensors: Sequence[Tensor], opset: int, exporter: str) -> bytes:
    model = Calls(cases).eval()
    with tempfile.TemporaryDirectory() as folder, silent():
        path = Path(folder) / "m.onnx"
        if exporter == "svexport":
            svexport.export(model, tuple(tensors), path, opset=opset, verify=False)
        else:
            names = [f"i{i}" for i in range(len(tensors))]
            options: dict[str, Any] = {"dynamo": opset >= 18, "opset_version": opset, "input_names": names}
            if opset >= 18:
                options["verbose"] = False
            with torch.no_grad():
                torch.onnx.export(model, tuple(tensors), path, **options)
        file = onnx.load(path)
    version = next(entry.version for entry in file.opset_import if not entry.domain)
    if version != opset:
        raise ValueError(f"the file has opset {version}")
    return file.SerializeToString()


def _problem(run: Expected, got: Sequence[Any], dtype: torch.dtype, places: bool) -> str:
    for i, (want, exact, array) in enumerate(zip(run.outputs, run.exact, got, strict=True)):
        place = f"{run.name}: output {i}: " if len(run.outputs) > 1 else f"{run.name}: "
        have = torch.as_tensor(np.asarray(array))
        if have.dtype != want.dtype:
            return f"{place}{have.dtype} for {want.dtype}"
        if have.shape != want.shape:
            return f"{place}{list(have.shape)} for {list(want.shape)}"
        if places and dtype != torch.float32 and i:  # among equal values
            continue
        if places and len(run.outputs) == 1 and _sorts_alike(run.inputs[0], have, want):
            continue
        right = _close(have, want, dtype)
        if exact is not None and exact.dtype.is_floating_point:
            error = (want.double() - exact.double()).abs().nan_to_num(0, 0, 0)
            # What torch overflows on the way to, rounded to its type, is right as well.
            right |= _close(have, exact.to(want.dtype), dtype) | ((have.double() - want.double()).abs() <= 10 * error)
        if not right.all():
            first = tuple((~right).nonzero()[0].tolist()) if want.dim() else ()
            at = "; ".join(
                f"{t[first].item():.6g}" if t.shape == want.shape else "" for t in run.inputs if t.shape == want.shape
            )
            return f"{place}{have[first].item()} for {want[first].item()}" + (f" at ({at})" if at else "")
    return ""


def _sorts_alike(input: Tensor, have: Tensor, want: Tensor) -> bool:
    """Whether both are orders of the input along an axis that differ among equal values only, as ``argsort`` may."""
    if have.dtype != torch.int64 or have.shape != input.shape or not input.dim():
        return False
    ordered = (
        torch.equal(have.sort(axis)[0], want.sort(axis)[0])
        and torch.equal(input.gather(axis, have), input.gather(axis, want))
        for axis in range(input.dim())
        if have.min() >= 0 and have.max() < input.shape[axis] and want.max() < input.shape[axis]
    )
    return have.numel() == 0 or any(ordered)


def _close(have: Tensor, want: Tensor, dtype: torch.dtype) -> Tensor:
    if not have.dtype.is_floating_point:
        return have == want
    rtol, atol = (1e-2, 2e-3) if torch.float16 in (dtype, have.dtype) else (2e-4, 1e-5)
    return torch.isclose(have.double(), want.double(), rtol=rtol, atol=atol, equal_nan=True)


def _line(error: BaseException) -> str:
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and cause not in chain:
        chain.append(cause)
    last = error if isinstance(error, svexport.SvexportError) else chain[-1]
    text = (str(last).strip() or type(last).__name__).splitlines()[0]
    return f"{type(last).__name__}: {text}"[:220]


class _OutOfTime(BaseException):
    pass


@contextlib.contextmanager
def _limit(seconds: int) -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def warm_up() -> None:
    """Imports what an export imports, once for all processes that start from here."""
    case = Case(lambda given: [given[0] + 1], [torch.ones(2)], torch.float32, "")
    for opset in (11, 18):
        _file([case], case.tensors, opset, "svexport")


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Exporters print, warn and log."""
    level, log = logging.root.manager.disable, torch._C._jit_onnx_log
    logging.disable(logging.CRITICAL)
    torch._C._jit_onnx_log = lambda *_: None  # which prints the whole graph before an error
    try:
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        torch._C._jit_onnx_log = log
        logging.disable(level)
