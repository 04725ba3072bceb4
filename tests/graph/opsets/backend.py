"""Converts ONNX's own node tests to lower opsets and runs them there.

``python -m tests.graph.opsets.backend [--cases REGEX] [--targets 9,11]`` prints the cases that are wrong.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import pkgutil
import re
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, numpy_helper
from onnx.backend.test.case import node
from onnx.reference import ReferenceEvaluator

import svexport
from svexport import UnsupportedError
from svexport.graph import opsets
from svexport.graph.opsets.rules import schema_of
from svexport.graph.walk import graphs

HIGHEST = 23
LOWEST = opsets.LOWEST
RANDOM = {"Bernoulli", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike", "Multinomial"}


@dataclass(frozen=True)
class Case:
    """A test of ONNX: a model at an opset of ours, what it is given, and what it has to return."""

    name: str
    model: onnx.ModelProto
    opset: int
    data: Sequence[tuple[Sequence[Any], Sequence[Any]]]
    rtol: float
    atol: float
    judged: dict[tuple, Verdict] = field(default_factory=dict, compare=False)
    _known: dict[int, list[Any] | str] = field(default_factory=dict, compare=False)

    def at_home(self, inputs: Sequence[Any]) -> list[Any] | str:
        """What ONNX Runtime makes of the model as it is, or why it does not."""
        key = id(inputs)
        if key not in self._known:
            self._known[key] = attempt(self.model, inputs, reference=False)
        return self._known[key]


@dataclass(frozen=True)
class Verdict:
    """What came of a case at an opset: right, refused, wrong, or unable where nothing runs it, not as it was either."""

    kind: str
    detail: str = ""


@functools.cache
def modules() -> tuple[str, ...]:
    """The files of ONNX's tests of nodes, an op or a few of a kind in each."""
    return tuple(sorted(info.name for info in pkgutil.iter_modules(node.__path__) if not info.ispkg))


@functools.cache
def cases(module: str) -> tuple[Case, ...]:
    """The cases in a file that are valid at an opset up to the highest; each also with small inputs as constants."""
    before = len(node._NodeTestCases)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        importlib.import_module(f"{node.__name__}.{module}")
    found: list[Case] = []
    for test in node._NodeTestCases[before:]:
        if any(entry.domain for entry in test.model.opset_import):
            continue
        if any(each.op_type in RANDOM for graph in graphs(test.model.graph) for each in graph.node):
            continue
        stated = test.model.opset_import[0].version
        for opset in range(HIGHEST, LOWEST, -1):
            model = at_opset(test.model, stated, opset)
            if model is not None:
                data = [([plain(x) for x in inputs], [plain(x) for x in outputs]) for inputs, outputs in test.data_sets]
                found.append(Case(test.name, model, opset, data, test.rtol, test.atol))
                frozen = with_constants(found[-1])
                found += [frozen] if frozen is not None else []
                opened = with_open_sizes(found[-1])
                found += [opened] if opened is not None else []
                break
    return tuple(found)


def with_constants(case: Case) -> Case | None:
    """The case with small inputs behind the first as initializers, as files have axes and bounds; None if none is."""
    inputs, expected = case.data[0]
    names = [value.name for value in case.model.graph.input]
    small = {
        name: x
        for name, x in zip(names[1:], inputs[1:], strict=False)
        if isinstance(x, np.ndarray | np.generic) and x.ndim <= 1 and x.size <= 64
    }
    if not small or len(case.data) > 1:
        return None
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    kept = [value for value in model.graph.input if value.name not in small]
    del model.graph.input[:]
    model.graph.input.extend(kept)
    model.graph.initializer.extend(numpy_helper.from_array(np.asarray(x), name) for name, x in small.items())
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:  # noqa: BLE001 - a library's, which infers other shapes of constants than the test states
        return None
    given = [x for name, x in zip(names, inputs, strict=False) if name not in small]
    return Case(f"{case.name}:constants", model, case.opset, [(given, expected)], case.rtol, case.atol)


def at_opset(model: onnx.ModelProto, stated: int, opset: int) -> onnx.ModelProto | None:
    """The model as one of another opset at which its nodes mean the same; None where there are none."""
    for graph in graphs(model.graph):
        for each in graph.node:
            then, now = schema_of(each.op_type, stated), schema_of(each.op_type, opset)
            if then is None or now is None or (opset > stated and then.since_version != now.since_version):
                return None
            if not {a.name for a in each.attribute} <= set(now.attributes):
                return None
    result = onnx.ModelProto()
    result.CopyFrom(model)
    result.opset_import[0].version = opset
    result.ir_version = 8 if opset < 19 else 10
    try:
        onnx.checker.check_model(result, full_check=True)
    except Exception:  # noqa: BLE001 - any of a library's: it is not valid there
        return None
    return result


def with_open_sizes(case: Case) -> Case | None:
    """The case with every size of its inputs open, and of its outputs; None where ONNX does not take that."""
    model = onnx.ModelProto()
    model.CopyFrom(case.model)
    for value in (*model.graph.input, *model.graph.output):
        for index, dim in enumerate(value.type.tensor_type.shape.dim):
            dim.dim_param = f"{value.name}_{index}"
    try:
        onnx.checker.check_model(model, full_check=True)
    except Exception:  # noqa: BLE001 - any of a library's
        return None
    return Case(f"{case.name}:open", model, case.opset, case.data, case.rtol, case.atol)


def run(model: onnx.ModelProto, inputs: Sequence[Any]) -> list[Any]:
    """What ONNX Runtime computes."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds = {i.name: x for i, x in zip(session.get_inputs(), inputs, strict=False)}
    return session.run(None, feeds)


def plain(x: Any) -> Any:
    """An array, a list of them, or None."""
    if isinstance(x, list):
        return [plain(item) for item in x]
    return numpy_helper.to_array(x) if isinstance(x, TensorProto) else x if x is None else np.asarray(x)


def difference(actual: Sequence[Any], expected: Sequence[Any], rtol: float, atol: float) -> str:
    """What differs first; empty where nothing does."""
    for index, (a, e) in enumerate(zip(actual, expected, strict=False)):
        if isinstance(e, list):
            if len(a) != len(e):
                return f"output {index}: {len(a)} items for {len(e)}"
            inner = difference(a, e, rtol, atol)
            if inner:
                return f"output {index}: {inner}"
            continue
        if a is None or e is None:
            if (a is None) != (e is None):
                return f"output {index}: {a!r} for {e!r}"
            continue
        a, e = np.asarray(a), np.asarray(e)
        if a.shape != e.shape:
            return f"output {index}: shape {a.shape} for {e.shape}"
        if a.dtype != e.dtype and not (a.dtype.kind in "OUS" and e.dtype.kind in "OUS"):
            return f"output {index}: type {a.dtype} for {e.dtype}"
        if e.dtype.kind in "OUSb":
            if not (a.astype(str) == e.astype(str)).all():
                return f"output {index}: {a.ravel()[:8]} for {e.ravel()[:8]}"
        elif not close(a, e, rtol, atol):
            return f"output {index}: {a.ravel()[:8]} for {e.ravel()[:8]}"
    return ""


def close(actual: np.ndarray, expected: np.ndarray, rtol: float, atol: float) -> bool:
    """Within the tolerance, two units of a short type, or a millionth of the largest number: sums are rounded."""
    if expected.dtype.itemsize == 2 and expected.dtype.kind not in "iu":
        rtol = max(rtol, 2**-6 if expected.dtype.name == "bfloat16" else 2**-9)
    a, e = wide(actual), wide(expected)
    if e.dtype.kind in "fc" and np.isfinite(e).any():
        atol = max(atol, 1e-6 * float(np.abs(e[np.isfinite(e)]).max()))
    return np.allclose(a, e, rtol=rtol, atol=atol, equal_nan=True)


def wide(x: np.ndarray) -> np.ndarray:
    return x if x.dtype.kind in "iufc" else x.astype(np.float32)


def attempt(model: onnx.ModelProto, inputs: Sequence[Any], *, reference: bool) -> list[Any] | str:
    """Outputs, or why there are none."""
    try:
        if not reference:
            return run(model, inputs)
        names = [value.name for value in model.graph.input]
        return ReferenceEvaluator(model).run(None, dict(zip(names, inputs, strict=False)))
    except Exception as error:  # noqa: BLE001 - a library's
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"


def judge(case: Case, target: int) -> Verdict:
    """Converts a case and runs it; once for opsets at which the result is the same."""
    try:
        converted = svexport.convert(case.model, target)
    except UnsupportedError as error:
        return Verdict("refused", str(error))
    if converted.opset_import[0].version != target:
        return Verdict("wrong", "another opset")
    kinds = {each.op_type for graph in graphs(converted.graph) for each in graph.node}
    schemas = [schema_of(kind, target) for kind in sorted(kinds)]
    same = converted.graph.SerializeToString(), *(schema and schema.since_version for schema in schemas)
    if same not in case.judged:
        case.judged[same] = _judge(case, converted)
    return case.judged[same]


def _judge(case: Case, converted: onnx.ModelProto) -> Verdict:
    try:
        onnx.checker.check_model(converted, full_check=True)
    except Exception as error:  # noqa: BLE001 - a library's
        return Verdict("wrong", f"not valid: {error}")
    for inputs, expected in case.data:
        before = case.at_home(inputs)
        actual = attempt(converted, inputs, reference=False)
        if isinstance(actual, str):
            if not isinstance(before, str):
                return Verdict("wrong", f"ONNX Runtime no longer runs it: {actual}")
            actual = attempt(converted, inputs, reference=True)
            if isinstance(actual, str):
                return Verdict("unable", actual)
            before = attempt(case.model, inputs, reference=True)
        differs = difference(actual, expected, case.rtol, case.atol)
        if differs and (isinstance(before, str) or difference(actual, before, 1e-5, 1e-6)):
            return Verdict("wrong", differs)
    return Verdict("right")


def verdicts(pattern: str = "", targets: Sequence[int] = range(LOWEST, HIGHEST)) -> Iterator[tuple[Case, int, Verdict]]:
    """Verdicts of the cases whose names match, at each target below their opsets."""
    for module in modules():
        for case in cases(module):
            if re.search(pattern, case.name):
                for target in targets:
                    if target < case.opset:
                        yield case, target, judge(case, target)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", default="", help="regular expression of their names")
    parser.add_argument("--targets", default="9,10,11,12,13,15,17,18,19,20,21,22")
    parser.add_argument("--all", action="store_true", help="count what is refused by its reasons, too")
    options = parser.parse_args()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    for case, target, verdict in verdicts(options.cases, [int(t) for t in options.targets.split(",")]):
        counts[verdict.kind] += 1
        if verdict.kind == "refused":
            reasons[reason(verdict)] += 1
        elif verdict.kind != "right":
            detail = (verdict.detail.splitlines() or [""])[0][:300]
            print(f"{verdict.kind:8} {case.name} {case.opset} -> {target}: {detail}", flush=True)
    if options.all:
        for text, count in sorted(reasons.items()):
            print(f"{count:5} {text}")
    print(dict(counts))


def reason(verdict: Verdict) -> str:
    """Of a refusal: what decides it first, without the name of the node."""
    return re.sub(r"^node '[^']*' ", "", verdict.detail.splitlines()[1].strip())


if __name__ == "__main__":
    main()
