"""The backend tests of ONNX as the onnx wheel ships them: models, their inputs and expected outputs."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from onnx import TensorProto, numpy_helper
from onnx.backend.test import data
from onnx.backend.test.case.node import collect_testcases
from torch import Tensor

__all__ = ["Case", "cases"]

KINDS = ("simple", "pytorch-operator", "pytorch-converted")


@dataclass
class Case:
    """Attributes:
    feeds: inputs by name; None where one is no tensor that torch has.
    expected: the outputs, likewise.
    """

    name: str
    model: onnx.ModelProto
    feeds: dict[str, Tensor] | None
    expected: list[Tensor] | None

    def on_other_numbers(self) -> Case | None:
        """The same with floats four hundred times as large and in another order, as ONNX Runtime computes it.

        Whether a file is read rightly shows on numbers that it was not written for. None where that does not run, or
        has other sizes.
        """
        if self.feeds is None or self.expected is None:
            return None
        generator = torch.Generator().manual_seed(0)
        feeds = {}
        for name, x in self.feeds.items():
            if x.is_floating_point() and x.numel() > 1:
                x = 400 * x.flatten()[torch.randperm(x.numel(), generator=generator)].reshape(x.shape)
            feeds[name] = x
        try:
            session = onnxruntime.InferenceSession(self.model.SerializeToString(), providers=["CPUExecutionProvider"])
            results = session.run(None, {name: x.numpy() for name, x in feeds.items()})
            expected = [tensor(value) for value in results]
        except Exception:  # noqa: BLE001 - its own, and numpy's of types that it does not have
            return None
        same = [a.shape == b.shape and a.dtype == b.dtype for a, b in zip(expected, self.expected, strict=True)]
        return Case(self.name, self.model, feeds, expected) if all(same) else None


def tensor(value: Any) -> Tensor:
    """Raises TypeError if torch has no such tensor."""
    array = np.array(numpy_helper.to_array(value) if isinstance(value, TensorProto) else value)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def case(name: str, model: onnx.ModelProto, inputs: list[Any], outputs: list[Any]) -> Case:
    names = [value.name for value in model.graph.input][: len(inputs)]
    try:
        feeds = {name: tensor(value) for name, value in zip(names, inputs)}
        expected = [tensor(value) for value in outputs]
    except (TypeError, ValueError):
        return Case(name, model, None, None)
    return Case(name, model, feeds, expected if inputs or outputs else None)


def cases() -> Iterator[Case]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases(None)
    for test in found:
        if test.model is not None:
            inputs, outputs = test.data_sets[0] if test.data_sets else ([], [])
            yield case(test.name, test.model, list(inputs), list(outputs))
    for folder in (Path(path) for kind in KINDS for path in sorted((Path(data.__path__[0]) / kind).iterdir())):
        if (folder / "model.onnx").is_file():
            files = [
                [
                    onnx.load_tensor(str(path))
                    for path in sorted(
                        folder.glob(f"test_data_set_0/{kind}_*.pb"), key=lambda p: int(p.stem[len(kind) + 1 :])
                    )
                ]
                for kind in ("input", "output")
            ]
            yield case(folder.name, onnx.load(folder / "model.onnx"), *files)


def with_constants(test: Case) -> Case | None:
    """The same test with every input but the first as an initializer; None where there is but one, or not all data."""
    if test.feeds is None or test.expected is None or len(test.feeds) < 2:
        return None
    first, *others = test.feeds
    if any(test.feeds[name].dtype in (torch.bfloat16, torch.uint8) for name in others):
        return None
    model = onnx.ModelProto()
    model.CopyFrom(test.model)
    given = {value.name: value for value in model.graph.input}
    model.graph.initializer.extend(numpy_helper.from_array(test.feeds[name].numpy(), name) for name in others)
    del model.graph.input[:]
    model.graph.input.extend(value for name, value in given.items() if name not in others)
    return Case(test.name, model, {first: test.feeds[first]}, test.expected)
