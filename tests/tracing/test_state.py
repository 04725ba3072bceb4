"""Models that change themselves or their inputs in forward: export leaves both as they were."""

from __future__ import annotations

import random
from collections import OrderedDict, deque
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import svexport
from svexport.exporter.opsets import LAST_TORCHSCRIPT_OPSET
from svexport.tracing.state import State

pytestmark = pytest.mark.core

BOTH_EXPORTERS = pytest.mark.parametrize("opset", [11, 18])
X = torch.randn(2, 3, generator=torch.Generator().manual_seed(0))


class Counting(nn.Module):
    """Keeps what does not matter for its results."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frames", torch.zeros(()))
        self.linear = nn.Linear(3, 3)
        self.linear.seen = deque([1])
        self.shapes: dict[str, int] = {}
        self.last = None

    def forward(self, x: Tensor) -> Tensor:
        self.frames += 1
        self.linear.seen.append(len(self.linear.seen))
        self.shapes["x"] = 1
        self.last = x
        self.new = x
        return self.linear(x)


class Memory(nn.Module):
    """Adds its last result to the next."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3)
        self.head.memory = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.head(x)
        if self.head.memory is not None:
            y = y + self.head.memory
        self.head.memory = y
        return y


class Totals(nn.Module):
    """Adds to its buffer in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("total", torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        self.total += x.sum(0)
        return x + self.total


class Best(nn.Module):
    """Attends to the best of what it saw before: where all is zero, or nearly equal, any may be the best."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("memory", torch.zeros(2, 3))

    def forward(self, x: Tensor) -> Tensor:
        seen = torch.cat([x, self.memory])
        y = torch.softmax(x @ seen.T, -1) @ seen
        self.memory = y[y.norm(dim=-1).topk(2).indices]
        return self.linear(y)


def assert_untouched(model: Counting) -> None:
    assert model.frames == 0
    assert list(model.linear.seen) == [1]
    assert model.shapes == {}
    assert model.last is None
    assert not hasattr(model, "new")


@BOTH_EXPORTERS
def test_what_forward_keeps_is_undone(opset, tmp_path) -> None:
    model = Counting()
    buffer = model.frames
    assert svexport.export(model, X, tmp_path / "m.onnx", opset=opset).verified
    assert model.frames is buffer
    assert_untouched(model)
    svexport.compare(model, tmp_path / "m.onnx", X, layers=True)
    assert_untouched(model)


@BOTH_EXPORTERS
@pytest.mark.parametrize(("kind", "name"), [(Memory, "head.memory"), (Totals, "total"), (Best, "memory")])
def test_state_that_matters_is_named(kind, name, opset, tmp_path) -> None:
    model = kind()
    with pytest.raises(svexport.VerificationError, match=rf"forward changes {name} of the model"):
        svexport.export(model, X, tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
    assert not any(buffer.any() for buffer in model.buffers())
    assert getattr(model, "head", model).__dict__.get("memory") is None


class Anchors(nn.Module):
    """Keeps a grid of the last size, as YOLO's heads do; what it keeps while it is traced has no values."""

    shape: torch.Size | None = None
    anchors = torch.empty(0)

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        if self.shape != y.shape:
            places = (torch.arange(size, dtype=y.dtype) + 0.5 for size in y.shape[2:])
            self.anchors = torch.stack(torch.meshgrid(*places, indexing="ij"))
            self.shape = y.shape
        return (y + self.anchors) * 2


@pytest.mark.parametrize("shape", [(1, 1, 3, 4), (2, 1, 3, 4)])
@BOTH_EXPORTERS
def test_a_kept_grid(shape, opset, tmp_path) -> None:
    model, x = Anchors(), torch.randn(shape)
    assert svexport.export(model, x, tmp_path / "m.onnx", opset=opset).verified
    assert vars(model).keys() == vars(Anchors()).keys()
    torch.testing.assert_close(svexport.load(tmp_path / "m.onnx")(x), model(x))


@BOTH_EXPORTERS
def test_inputs_that_forward_changes(opset, tmp_path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y[:, 0] = 0
            return x.add_(1) * y

    x, y = X.clone(), X + 1
    report = svexport.export(InPlace(), (x, y), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    torch.testing.assert_close(x, X, rtol=0, atol=0)
    torch.testing.assert_close(y, X + 1, rtol=0, atol=0)
    torch.testing.assert_close(svexport.load(report.path)(x, y), InPlace()(x.clone(), y.clone()))


class Writing(nn.Module):
    """Writes into its parameters, seeds, draws, and changes the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([1.0, 2.0, 3.0]))
        self.shift = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        torch.manual_seed(5)
        np.random.seed(5)
        random.seed(5)
        with torch.no_grad():
            self.scale.clamp_(max=2)
            self.shift.sub_(0)
        torch.set_default_dtype(torch.float64)
        return x * self.scale + self.shift


@BOTH_EXPORTERS
def test_parameters_and_global_state_are_as_before(opset, tmp_path) -> None:
    model = Writing()
    scale, storage = model.scale, model.scale.data_ptr()
    torch.manual_seed(1)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
    try:
        svexport.export(model, X, tmp_path / "m.onnx", opset=opset, verify=False)
        assert torch.get_default_dtype() == torch.float32
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(states[0], torch.get_rng_state())
    assert states[1:] == (random.getstate(), np.random.get_state()[1].tolist())
    assert model.scale is scale
    assert scale.data_ptr() == storage
    assert model.scale.tolist() == [1, 2, 3]


def test_a_parameter_gets_its_storage_back(tmp_path) -> None:
    class Replacing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            self.weight.data = self.weight.data + 1
            return super().forward(x)

    model = Replacing(3, 2)
    storage, weight = model.weight.data_ptr(), model.weight.detach().clone()
    svexport.export(model, X, tmp_path / "m.onnx", opset=17, verify=False)
    assert model.weight.data_ptr() == storage
    assert torch.equal(model.weight, weight)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)


class Masked(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 0
        ctx.save_for_backward(y)
        return y.add_(1) if ctx.needs_input_grad[0] else y + 1


class Filled(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor, out: Tensor) -> Tensor:
        return out.copy_(x * 3)

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:
        ctx.mark_dirty(inputs[1])


@pytest.mark.parametrize("opset", [11, 17, 18, 20])
def test_autograd_functions_that_write_in_place(opset, tmp_path) -> None:
    class Functions(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            y, out = x + 1, torch.zeros_like(x)
            return {
                "masked": Masked.apply(x),
                "filled": Filled.apply(x, out),
                "out": out,
                "doubled": Doubled.apply(y),
                "y": y,
            }

    report = svexport.export(Functions(), X, tmp_path / "m.onnx", opset=opset)
    for actual, expected in zip(svexport.load(report.path)(X), Functions()(X).values(), strict=True):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("opset", [11, 17, 18, 20])
def test_autograd_functions_with_a_symbolic_stay_theirs(opset, tmp_path) -> None:
    class Named(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            return x.relu()

        @staticmethod
        def symbolic(g, x):
            return g.op("Max", x, g.op("Constant", value_t=torch.tensor(0.0)))

    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Named.apply(x)

    report = svexport.export(Model(), X, tmp_path / "m.onnx", opset=opset)
    assert ("Max" in report.nodes) == (opset <= LAST_TORCHSCRIPT_OPSET)


@pytest.mark.parametrize("opset", [11, 20])
def test_writing_to_data_is_refused(opset, tmp_path) -> None:
    """torch.export ends the process with it."""

    class Writing(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.weight.data.mul_(1.5)
            return super().forward(x)

    with pytest.raises(svexport.SvexportError):
        svexport.export(Writing(3, 3), torch.rand(2, 3), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


class Jacobian(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.func.jacfwd(lambda v: v.sin() * v)(x)


@pytest.mark.parametrize("opset", [17, 20])
def test_a_capture_that_failed_leaves_forward_derivatives(opset: int, tmp_path: Path) -> None:
    """Dynamo stays in the level of the derivatives that it was in, and torch nests none."""
    model, x = Jacobian().eval(), torch.randn(3)
    expected = model(x)
    with pytest.raises(svexport.SvexportError):
        svexport.export(model, x, tmp_path / "m.onnx", opset=opset)
    torch.testing.assert_close(model(x), expected)


class Counted(type):
    """Of classes whose attribute of that name it hides, as sympy does."""

    @property
    def count(cls) -> object:
        return object()


def test_attributes_that_a_metaclass_hides(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.settings = Counted("Settings", (), {"count": 3, "factor": 2.0})

        def forward(self, x: Tensor) -> Tensor:
            self.calls = getattr(self, "calls", 0) + 1
            return x * self.settings.factor

    assert svexport.export(Model(), torch.rand(3), tmp_path / "m.onnx", opset=11).verified


def test_modules_behind_much_data() -> None:
    """What a trainer has is data: so many values of it are looked at, and all modules after it."""

    class Trained(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.samples = [[SimpleNamespace(at=at, box=torch.zeros(4)) for at in range(5000)] for _ in range(6)]
            self.counting = Counting()

    model = Trained()
    state = State(model)
    model.counting(X)
    model.samples[0][0].at = -1
    assert {"counting.frames", "counting.shapes['x']", "samples[0][0].at"} <= {*state.changed()}
    state.restore()
    assert_untouched(model.counting)
    assert model.samples[0][0].at == 0
    assert not state.changed()


class Config(dict[str, Any]):
    """As configurations are: made of keywords, and copied as themselves."""

    def __init__(self, *, scale: float) -> None:
        super().__init__(scale=scale)

    def copy(self) -> Config:
        return type(self)(**self)


class Outputs(OrderedDict[str, Tensor]):
    """As transformers returns them: of arguments by name, and of no other changes."""

    def __init__(self, last: Tensor) -> None:
        super().__init__(last=last)

    def update(self, *args: Any, **kwargs: Any) -> None:
        raise TypeError("no update")

    def __delitem__(self, key: str) -> None:
        raise TypeError("nor that")


class Window(deque[float]):
    def __init__(self, length: int) -> None:
        super().__init__([2.0], length)


class Holds(nn.Module):
    """Keeps what it computes in a container of a class of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.config, self.outputs, self.window = Config(scale=2.0), Outputs(torch.ones(1)), Window(3)
        self.graphs = [torch.eye(3).to_sparse()]

    def forward(self, x: Tensor) -> Tensor:
        self.outputs["first"] = x
        self.window.append(3.0)
        return x * self.config["scale"] * self.window[0] ** 0


@pytest.mark.parametrize("opset", [11, 18])
def test_containers_of_the_users_own(opset: int, tmp_path: Path) -> None:
    model = Holds()
    assert svexport.export(model, torch.randn(3), tmp_path / "m.onnx", opset=opset).verified
    assert list(model.outputs) == ["last"]
    assert list(model.window) == [2.0]
    assert (type(model.outputs), type(model.window), type(model.config)) == (Outputs, Window, Config)
