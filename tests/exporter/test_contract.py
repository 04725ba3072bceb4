"""What export promises for odd models and bad input: the result or the error's text, and no other side effect."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import logging
import os
import re
import threading
from collections import namedtuple
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.exporter import dynamo, torchscript
from svexport.exporter import export as export_module
from svexport.exporter.opsets import LAST_TORCHSCRIPT_OPSET, OPSETS
from svexport.exporter.rounding import Rounding
from svexport.exporter.torchscript import registry
from svexport.exporter.trace import torch_export_first
from svexport.graph import saving
from svexport.tracing.arguments import FlatModel, Types, bind

BOTH_EXPORTERS = pytest.mark.parametrize("opset", [11, 18])


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nchw,nchw->nc", self.drop(self.norm(self.conv(x))), self.conv(x))


X = (torch.randn(2, 3, 6, 7),)


def registry_state() -> dict:
    return {
        name: (dict(group._functions._base), dict(group._functions._overrides), dict(group._functions._merged))
        for name, group in registry._registry.items()
    }


# ---------------------------------------------------------------- arguments


@pytest.mark.core
def test_bare_call_takes_example_inputs_and_class_name(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    model = Small()
    model.example_inputs = X
    report = svexport.export(model, opset=11)
    assert (tmp_path / "Small.onnx").is_file()
    assert report.path.name == "Small.onnx"
    assert report.verified


@pytest.mark.core
def test_bare_call_takes_lightning_example_input_array(tmp_path) -> None:
    model = Small()
    model.example_input_array = X[0]
    assert svexport.export(model, path=tmp_path / "m.onnx").verified


@pytest.mark.core
def test_bare_call_takes_recorded_arguments(tmp_path) -> None:
    class Masked(nn.Module):
        def forward(self, x: Tensor, *, mask: Tensor, scale: float = 1.0) -> Tensor:
            return x * mask * scale

    model = Masked()
    with svexport.record(model):
        model(torch.randn(3, 4), mask=torch.rand(3, 4) > 0.5, scale=3.0)
    hooks = len(model._forward_pre_hooks)
    report = svexport.export(model, path=tmp_path / "m.onnx")
    assert list(report.inputs) == ["x", "mask"]
    assert hooks == 0


def test_without_arguments_the_error_says_how_to_give_them(tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=r"example_inputs = .* or run one forward under svexport.record"):
        svexport.export(Small(), path=tmp_path / "m.onnx")


@pytest.mark.core
@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((), r"missing a required argument: 'x'"),
        ((X[0], X[0]), r"too many positional arguments"),
        ({"y": X[0]}, r"the model itself fails on these arguments: TypeError: conv2d\(\) .* got \(dict,"),
        ((3,), r"expected at least one tensor among the arguments, got int"),
    ],
)
def test_wrong_arity(args, message, tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(Small(), args, tmp_path / "m.onnx")
    assert not list(tmp_path.iterdir())


@pytest.mark.core
def test_wrong_arity_shows_signature_and_what_came(tmp_path) -> None:
    with pytest.raises(
        svexport.ExportError, match=r"(?s)Small\.forward\(x: .*Got \(float32\[2, 3, 6, 7\], float32"
    ) as info:
        svexport.export(Small(), (X[0], X[0]), tmp_path / "m.onnx")
    assert "Give a tuple with one entry per parameter" in str(info.value)


@pytest.mark.core
@pytest.mark.parametrize(
    "args",
    [(X[0], X[0]), {"a": X[0], "b": X[0]}, (X[0], {"b": X[0]})],
    ids=["tuple", "dict", "last dict"],
)
def test_spellings_of_arguments(args, tmp_path) -> None:
    class Two(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: bool = True) -> Tensor:
            return a - b * 2 if c else a

    assert list(svexport.export(Two(), args, tmp_path / "m.onnx").inputs) == ["a", "b"]


@pytest.mark.core
@BOTH_EXPORTERS
def test_nested_arguments_and_results(opset, tmp_path) -> None:
    Pair = namedtuple("Pair", "first second")

    @dataclasses.dataclass
    class Result:
        boxes: Tensor
        extra: dict

    class Nested(nn.Module):
        def forward(self, features: list, meta: dict, flag: bool = False):
            total = features[0] + features[1] * meta["scale"]
            pair = Pair(total, features[1] * 2)
            return {"result": Result(total * 3, {"n": None, "k": [total * 4, 7]}), "pair": pair, "same": total}

    features, meta = [torch.randn(2, 3), torch.randn(2, 3)], {"scale": torch.randn(2, 1)}
    report = svexport.export(Nested(), (features, meta), tmp_path / "m.onnx", opset=opset)
    assert list(report.inputs) == ["features_0", "features_1", "meta_scale"]
    assert list(report.outputs) == ["result_boxes", "result_extra_k_0", "pair_first", "pair_second", "same"]
    engine = svexport.load(report.path)
    got = dict(zip(engine.output_names, engine(*features, meta["scale"]), strict=True))
    total = features[0] + features[1] * meta["scale"]
    torch.testing.assert_close(got["result_extra_k_0"], total * 4)
    torch.testing.assert_close(got["pair_first"], total)
    torch.testing.assert_close(got["same"], total)


@BOTH_EXPORTERS
def test_names_of_tuples_and_given_names(opset, tmp_path) -> None:
    class Tuples(nn.Module):
        def forward(self, x: Tensor):
            return x, (x * 2, [x * 3]), x

    report = svexport.export(Tuples(), X, tmp_path / "m.onnx", opset=opset)
    assert list(report.outputs) == ["output_0", "output_1_0", "output_1_1_0", "output_2"]
    names = ["a", "b", "c", "d"]
    report = svexport.export(Tuples(), X, tmp_path / "m.onnx", opset=opset, input_names=["image"], output_names=names)
    assert list(report.inputs) == ["image"]
    assert list(report.outputs) == names
    file = onnx.load(report.path)
    assert [o.name for o in file.graph.output] == names
    with pytest.raises(svexport.ExportError, match=r"output_names expects 4 different names .* got \['a'\]"):
        svexport.export(Tuples(), X, tmp_path / "m.onnx", opset=opset, output_names=["a"])


@pytest.mark.parametrize("opset", [11, 18])
@pytest.mark.parametrize(("result", "message"), [(None, "without any tensor"), ({1, 2}, "returned a set")])
def test_results_without_tensors(result, message, opset, tmp_path) -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor):
            return result

    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(Nothing(), X, tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


@BOTH_EXPORTERS
@pytest.mark.parametrize("axes", [None, {"x": {0: "n", 2: "h"}}])
def test_numbers_are_no_outputs(axes, opset, tmp_path) -> None:
    """Sizes are tensors to one tracer and symbols to the other."""

    class Sized(nn.Module):
        def forward(self, x: Tensor) -> dict:
            rows, half = x.shape[0] * 2, x.shape[2] / 2
            return {"rows": rows, "sum": x.sum(), "sizes": [half, x.shape[2], "nchw"], "best": x.flatten().argmax()}

    report = svexport.export(Sized(), X, tmp_path / "m.onnx", opset=opset, dynamic_axes=axes)
    assert list(report.outputs) == ["sum", "best"]
    assert report.verified


def test_a_defaultdict_and_empty_keys(tmp_path) -> None:
    class Dicts(nn.Module):
        def forward(self, maps: dict) -> dict:
            return {"": maps["a"] + maps["b"], "other": maps["a"] - maps["b"]}

    maps = collections.defaultdict(list, a=X[0], b=X[0] + 1)
    report = svexport.export(Dicts(), (maps,), tmp_path / "m.onnx")
    assert list(report.outputs) == ["output", "other"]


def test_not_a_module(tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=r"expected a torch\.nn\.Module, got function"):
        svexport.export(lambda x: x, X, tmp_path / "m.onnx")


# ---------------------------------------------------------------- options


@pytest.mark.core
@pytest.mark.parametrize("opset", [8, 24, 0, -1, "11", 11.5])
def test_unsupported_opset(opset, tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=f"opset must be an integer from 9 to {OPSETS[-1]}, got"):
        svexport.export(Small(), X, tmp_path / "m.onnx", opset=opset)


@pytest.mark.core
@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        (X, {"rtol": -1}, "rtol and atol must be finite and 0 or more, got -1"),
        (X, {"rtol": float("inf")}, "finite and 0 or more, got inf"),
        (X, {"atol": float("nan")}, "0 or more, got None and nan"),  # with which nothing would ever differ
        (
            {"image": X[0]},
            {},
            r"(?s)the model itself fails.*the dict with image was given to forward as its argument x",
        ),
        ([X[0]], {}, r"(?s)the model itself fails.*the list was given to forward as its argument x; .* use a tuple"),
        (X, {"simplify": "yes"}, "simplify must be True or False, got 'yes'"),
        (X, {"output_names": ["x"]}, r"expects 1 different names \(output .*\) that no input has, got \['x'\]"),
        (X, {"output_names": [""]}, "output_names expects 1 different names"),
        (X, {"dtype": torch.bfloat16}, "bfloat16 needs opset 13 or later, got opset=11"),
        ((X[0].bfloat16(),), {}, "bfloat16 needs opset 13"),
        ((X[0].cfloat(),), {"opset": 18}, "x is a complex64 tensor, which ONNX does not compute with"),
        ((X[0].numpy(),), {}, r"expected at least one tensor among the arguments, got ndarray; torch\.from_numpy"),
    ],
)
def test_what_cannot_be(args, options, message, tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(Small(), args, tmp_path / "m.onnx", **options)
    assert not list(tmp_path.iterdir())


def test_models_that_cannot_be_copied(tmp_path) -> None:
    model = Small()
    model.lock = threading.Lock()
    with pytest.raises(svexport.UnsupportedError, match=r"Small cannot be copied: copy\.deepcopy raised TypeError"):
        svexport.export(model, X, tmp_path / "m.onnx", dtype=torch.float16)


@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_models_with_tensors_that_were_computed(tmp_path) -> None:
    model = nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)), nn.ReLU(), nn.Linear(4, 2))
    x = torch.randn(3, 4)
    model.last = model(x)
    assert svexport.export(model, x, tmp_path / "m.onnx", dtype=torch.float16).verified
    torch.testing.assert_close(svexport.replace(model, x)(x), model(x))
    assert model.last.grad_fn is not None


@torch.no_grad()
def test_how_far_half_models_are_from_themselves() -> None:
    """In float64 from the same rounded inputs: what a file cannot do better."""
    model = nn.Linear(256, 4)
    x = torch.randn(8, 256)
    half = copy.deepcopy(model).half()
    flat = FlatModel(half, bind(half, (x,)), types=Types(torch.float16))
    rounding = Rounding(flat, [x], flat(x))
    rounding.allows(0, flat(x)[0] + 1, 0.0, 0.0)  # which nothing explains
    (found,) = rounding.gaps
    gap = found.max()
    exact = copy.deepcopy(half).double()(x.half().double())
    assert 0 < (half(x.half()).double() - exact).abs().max() <= gap < 0.01


def test_unknown_plugin(tmp_path) -> None:
    model = Small()
    model.register_forward_pre_hook(lambda *_: pytest.fail("ran before the names were read"))
    with pytest.raises(svexport.UnsupportedError, match=r"expected names of ops \(.*einsum.*\), got 'gridsample'"):
        svexport.export(model, X, tmp_path / "m.onnx", plugins=["gridsample"])


@pytest.mark.parametrize(
    ("target", "message"), [("7.0", "one of 8.2, 8.4"), ("x", "got 'x'"), ("8.6", "opset 9 to 17")]
)
def test_bad_target(target, message, tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(Small(), X, tmp_path / "m.onnx", opset=18, target=target)


@pytest.mark.core
@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        ({"y": {0: "n"}}, r"names \['y'\]; the inputs are x"),
        ({"x": {9: "n"}}, "x has 4 dimensions, axis 9"),
        (({0: "n"}, {0: "n"}), "tuple of 1 entries"),
        (3, "expects a dict by name"),
        ({"x": {0}}, r"x expects sizes by axis, \{0: 'batch'\} for one, got \{0\}"),
        ({"x": "batch"}, "x expects sizes by axis"),
        ({"x": 0}, "x expects sizes by axis"),
        ({"x": {2: "size", 3: "size"}}, r"'size' is 6 in x \(axis 2\) and 7 in x \(axis 3\)"),
        ({"x": {3: 4 * torch.export.Dim("k")}}, r"x \(axis 3\) is 7, never 4\*k"),
        ({"x": {3: torch.export.Dim("n", max=6)}}, r"x \(axis 3\) is 7, so n is 7, and its Dim has the range 0 to 6"),
        ({"x": {3: 1 + 2 * torch.export.Dim("k", min=4)}}, r"is 7, so k is 3, and its Dim has the range 4 to"),
        ({"x": {2: "k", 3: 1 + torch.export.Dim("k") * 2}}, r"'k' is 6 in x \(axis 2\) and 3 in x \(axis 3\)"),
    ],
)
def test_bad_dynamic_shapes(shapes, message, tmp_path) -> None:
    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(Small(), X, tmp_path / "m.onnx", dynamic_shapes=shapes)


@pytest.mark.core
def test_opsets_that_need_a_newer_torch(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(export_module, "OPSETS", range(9, 21))
    with pytest.raises(svexport.ExportError, match=r"from 9 to 20, got 21; this is torch \d.*, 21 to 23 need 2\.11"):
        svexport.export(Small(), X, tmp_path / "m.onnx", opset=21)


@pytest.mark.core
def test_dynamic_axes_of_nothing(tmp_path) -> None:
    axes = {"images": {0: "n"}, "output": {0: "n"}}
    with pytest.raises(svexport.ExportError, match=r"names \['images'\]; the inputs are x, the outputs output"):
        svexport.export(Small(), X, tmp_path / "m.onnx", dynamic_axes=axes)
    assert not list(tmp_path.iterdir())


@BOTH_EXPORTERS
def test_symbols_that_are_no_identifiers_are_shared_all_the_same(opset, tmp_path) -> None:
    class Sum(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return x + y + z

    static = torch.export.Dim.STATIC
    shapes = {"x": {0: "batch size", 1: static}, "y": {0: "batch size", 1: "2d"}, "z": {0: "batch size", 1: "2d"}}
    args = (torch.randn(2, 1), torch.randn(2, 3), torch.randn(2, 3))
    report = svexport.export(Sum(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
    shown = {"x": "float32[batch_size, 1]", "y": "float32[batch_size, _2d]", "z": "float32[batch_size, _2d]"}
    assert report.inputs == shown


@BOTH_EXPORTERS
@pytest.mark.parametrize(("divisor", "run"), [(4, "h=16"), (6, "h=24")])
def test_sizes_that_a_model_divides(divisor, run, opset, tmp_path) -> None:
    """One more of everything is not what such a model takes."""

    class Pyramid(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            coarse = F.avg_pool2d(x, (divisor, 1))
            return x + F.interpolate(coarse, scale_factor=(divisor, 1))

    args = (torch.randn(1, 2, 12, 3),)
    report = svexport.export(Pyramid(), args, tmp_path / "m.onnx", opset=opset, dynamic_axes={"x": {2: "h"}})
    assert {"given", "scaled", "zeros", run} <= {p.run for p in report.parity}
    assert not report.notes


@pytest.mark.core
@BOTH_EXPORTERS
def test_sizes_that_are_computed_from_others(opset, tmp_path) -> None:
    class Twice(nn.Module):
        def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            return (torch.cat([x, x, x], 1) + y).unflatten(1, (3, -1)) + z[:, :-1]

    k = torch.export.Dim("k")
    shapes = {"x": {1: 4 * k}, "y": {1: 12 * k}, "z": {1: 4 * k + 1}}
    for size, other in ((1, 2), (3, 4)):
        args = (torch.randn(2, 4 * size), torch.randn(2, 12 * size), torch.randn(3, 4 * size + 1))
        args = (args[0][:1], args[1][:1], args[2])
        report = svexport.export(Twice(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
        assert {"given", "scaled", "zeros", f"k={other}"} <= {p.run for p in report.parity}
        assert report.inputs == {"x": "float32[1, 4*k]", "y": "float32[1, 12*k]", "z": "float32[3, 4*k+1]"}
        assert not report.notes


@BOTH_EXPORTERS
@pytest.mark.parametrize(("size", "run"), [(1, "length=2"), (5, "length=6"), (6, "length=5")])
def test_sizes_that_end_somewhere(size, run, opset, tmp_path) -> None:
    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(6, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.table[: x.shape[0]]

    shapes = {"x": {0: torch.export.Dim("length", min=1, max=6)}}
    report = svexport.export(Positions(), torch.randn(size, 3), tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
    assert {"given", "scaled", "zeros", run} <= {p.run for p in report.parity}
    assert not report.notes


@BOTH_EXPORTERS
def test_integers_that_fit_one_another(opset, tmp_path) -> None:
    """Drawn anew, the sizes of maps are those of no maps."""

    class Levels(nn.Module):
        def forward(self, value: Tensor, shapes: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
            start = torch.cat([shapes.new_zeros(1), shapes.prod(1).cumsum(0)[:-1]])
            return svexport.ops.ms_deform_attn(value, shapes, start, locations, weights)

    shapes = torch.tensor([[5, 3], [2, 4]])
    args = (torch.randn(2, 23, 2, 4), shapes, torch.rand(2, 6, 2, 2, 3, 2), torch.rand(2, 6, 2, 2, 3))
    axes = {name: {0: "n"} for name in ("value", "locations", "weights")}
    report = svexport.export(Levels(), args, tmp_path / "m.onnx", opset=opset, dynamic_axes=axes)
    assert [p.run for p in report.parity] == ["given", "scaled", "zeros", "n=3", "n=1", "n=12", "n=0"]
    assert not report.notes


def test_no_size_that_a_model_takes(tmp_path) -> None:
    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + torch.ones(6)

    report = svexport.export(Only(), torch.randn(2, 6), tmp_path / "m.onnx", dynamic_axes={"x": {1: "w"}})
    assert [p.run for p in report.parity] == ["given", "scaled", "zeros", "w=1"]  # of which there can be six
    traced, verified = report.notes
    assert traced.startswith("traced by TorchScript, because torch.export refuses the model: axis 1 of x is to")
    assert "not verified with w=7 or w=8 or w=12: the model itself fails there" in verified


@BOTH_EXPORTERS
@pytest.mark.parametrize(
    "shapes",
    [{"x": {0: "n"}}, ({0: "n"},), {"x": ["n", None, None, None]}, {"x": {0: torch.export.Dim("n")}}, {"x": {-4: "n"}}],
)
def test_spellings_of_dynamic_shapes(shapes, opset, tmp_path) -> None:
    report = svexport.export(Small(), X, tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
    assert report.inputs["x"] == "float32[n, 3, 6, 7]"


@BOTH_EXPORTERS
@pytest.mark.parametrize(
    "shapes",
    [
        {"features": {0: "n"}},
        {"features": [{0: "n"}, {0: "n"}]},
        {"features_0": {0: "n"}, "features_1": {0: "n"}},
        ([{0: "n"}, {0: "n"}],),
    ],
)
def test_dynamic_shapes_of_a_list(shapes, opset, tmp_path) -> None:
    class Levels(nn.Module):
        def forward(self, features: list[Tensor]) -> Tensor:
            return features[0].sum(1) + features[1].sum(1)

    args = ([torch.randn(2, 3), torch.randn(2, 4)],)
    report = svexport.export(Levels(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
    assert list(report.inputs.values()) == ["float32[n, 3]", "float32[n, 4]"]


@pytest.mark.core
@BOTH_EXPORTERS
def test_dynamic_axes(opset, tmp_path) -> None:
    axes = {"x": [0], "output": {0: "n"}}  # torch.onnx.export's spelling; outputs may be named too
    report = svexport.export(Small(), X, tmp_path / "m.onnx", opset=opset, dynamic_axes=axes)
    assert report.inputs["x"] == "float32[x_dim_0, 3, 6, 7]"
    assert svexport.load(report.path)(torch.randn(5, 3, 6, 7)).shape == (5, 4)


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 17, 18])
def test_dynamic_sizes_of_outputs(opset, tmp_path) -> None:
    class Sizes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3, stride=2)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {
                "conv": self.conv(x),
                "same": x * 2,
                "turned": x.permute(3, 0, 1, 2),
                "norm": F.layer_norm(x, x.shape[3:]),
                "flat": x.flatten(1),
                "larger": F.interpolate(x, scale_factor=2),
                "places": (x > 0).nonzero(),
            }

    shapes = {"x": {0: "batch", 3: "width"}}
    report = svexport.export(
        Sizes(), (torch.randn(2, 3, 5, 8),), tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes
    )
    outputs = {name: text.partition("[")[2][:-1].split(", ") for name, text in report.outputs.items()}
    assert outputs["same"] == outputs["norm"] == ["batch", "3", "5", "width"]
    assert outputs["turned"] == ["width", "batch", "3", "5"]
    assert outputs["conv"][:3] == ["batch", "4", "2"]
    assert outputs["flat"][0] == "batch"
    assert outputs["places"] == ["places_dim_0", "4"]
    if LAST_TORCHSCRIPT_OPSET >= 18:  # an old torch, without torch.export: what is computed of a size has a new name
        return
    assert "width" in outputs["conv"][3]
    assert [outputs["flat"][1], outputs["larger"][3]] == ["15*width", "2*width"]
    model = onnx.load(report.path)
    named = {d.dim_param for v in model.graph.value_info for d in v.type.tensor_type.shape.dim}
    assert all(not name or {"batch", "width"}.intersection(re.findall(r"\w+", name)) for name in named)


@BOTH_EXPORTERS
def test_outputs_named_like_other_values(opset, tmp_path) -> None:
    """A parameter, an input, a node's value of the exporter's, its folded constant."""

    class Names(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.y = nn.Parameter(torch.randn(3))
            self.linear = nn.Linear(3, 3)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            product = torch.einsum("ni,ij->nj", x, self.linear.weight.t())
            outputs = {"y": x + self.y, "x": x * 2, "same": x, "parameter": self.y}
            return outputs | {"linear.weight": x - 1, "t": product, "mul": x - 2, "/Mul_output_0": x - 3}

    report = svexport.export(Names(), (torch.randn(2, 3),), tmp_path / "m.onnx", opset=opset)
    names = ["y", "x_2", "same", "parameter", "linear.weight", "t", "mul", "/Mul_output_0"]
    assert list(report.outputs) == names
    assert report.verified


@pytest.mark.core
@BOTH_EXPORTERS
def test_half_model(opset, tmp_path) -> None:
    model = Small()
    before = {k: v.dtype for k, v in model.state_dict().items()}
    report = svexport.export(model, X, tmp_path / "m.onnx", opset=opset, dtype=torch.float16)
    assert report.inputs["x"].startswith("float32")  # inputs stay as given
    assert report.outputs["output"].startswith("float16")
    file = onnx.load(report.path)
    assert {t.data_type for t in file.graph.initializer if t.name.endswith("weight")} <= {onnx.TensorProto.FLOAT16}
    assert report.verified
    assert before == {k: v.dtype for k, v in model.state_dict().items()}


@BOTH_EXPORTERS
def test_half_model_that_casts_by_itself(opset, tmp_path) -> None:
    class Casts(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (x.float() * 2).half().float() + y.double().float()

    report = svexport.export(
        Casts(), (torch.randn(3), torch.randn(3)), tmp_path / "m.onnx", opset=opset, dtype=torch.half
    )
    assert report.verified
    assert report.outputs == {"output": "float32[3]"}


class Sampled(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, x: Tensor, grid: Tensor) -> Tensor:
        return F.grid_sample(input=x, grid=grid, **self.options).relu()


@BOTH_EXPORTERS
@pytest.mark.parametrize("mode", ["bilinear", "nearest", "bicubic"])
@pytest.mark.parametrize("padding", ["zeros", "border", "reflection"])
def test_points_of_a_half_model_are_counted_as_on_cuda(mode, padding, opset, tmp_path) -> None:
    """Far outside, where torch's CPU kernel has NaN or a pixel that is not there, and in a wide image, where it is off.

    What is off in the file is found as ever.
    """
    image, grid = torch.randn(2, 3, 5, 1500), torch.rand(2, 4, 6, 2) * 2 - 1
    grid[:, 0] *= 3e3
    model = Sampled(mode=mode, padding_mode=padding, align_corners=False)
    report = svexport.export(model, (image, grid), tmp_path / "m.onnx", opset=opset, dtype=torch.float16)
    assert report.verified
    assert any("kept in float32: coordinates" in note for note in report.notes)
    expected = model(image.half().float(), grid)
    torch.testing.assert_close(svexport.load(report.path)(image, grid).float(), expected, rtol=2e-3, atol=2e-3)
    args = image.half(), grid.half()
    comparison = svexport.compare(model, report.path, args, rtol=2e-3, atol=2e-3)
    assert comparison.ok
    assert any("with coordinates in float32" in note for note in comparison.notes)
    aligned = Sampled(mode=mode, padding_mode=padding, align_corners=True)
    assert not svexport.compare(aligned, report.path, args).ok
    assert svexport.compare(model, model, (image, grid)).notes == []


# ---------------------------------------------------------------- files


@BOTH_EXPORTERS
@pytest.mark.parametrize("modules", [[nn.Conv2d(3, 8, 3)], []])
def test_a_model_that_is_half_already(modules, opset, tmp_path) -> None:
    class Layers(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(*modules).half()

        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            return F.grid_sample(self.layers(x), grid, align_corners=False)

    args = (torch.randn(2, 3, 9, 9).half(), (torch.rand(2, 8, 8, 2) * 2 - 1).half())
    report = svexport.export(Layers(), args, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert report.rtol == report.atol == 16 * torch.finfo(torch.float16).eps
    report = svexport.export(Layers(), args, tmp_path / "m.onnx", opset=opset, rtol=0.1, atol=0.2)
    assert (report.rtol, report.atol) == (0.1, 0.2)


def test_unwritable_path(tmp_path) -> None:
    blocker = tmp_path / "file"
    blocker.write_text("x")
    with pytest.raises(svexport.ExportError, match=r"cannot write .*; choose a writable folder"):
        svexport.export(Small(), X, blocker / "m.onnx")
    with pytest.raises(svexport.ExportError, match="expected the path of a file, got the folder"):
        svexport.export(Small(), X, tmp_path)


def test_folders_are_made(tmp_path) -> None:
    assert svexport.export(Small(), X, tmp_path / "a" / "b" / "m.onnx").path.is_file()


@pytest.mark.core
@BOTH_EXPORTERS
def test_verification_error_names_the_worst_output_and_leaves_no_file(opset, tmp_path) -> None:
    calls = itertools.count(1)  # of no attribute, which would be put back for each comparison

    class Random(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"good": x * 2, "bad": x * 2 + 0.01 * next(calls)}

    old = tmp_path / "m.onnx"
    old.write_text("an older file")
    with pytest.raises(svexport.VerificationError, match=r"output 'bad' differs by up to 0\.0") as info:
        svexport.export(Random(), X, old, opset=opset)
    assert {p.name for p in info.value.parity} == {"bad"}
    assert old.read_text() == "an older file"
    assert os.listdir(tmp_path) == ["m.onnx"]
    assert not svexport.export(Random(), X, tmp_path / "n.onnx", opset=opset, verify=False).verified


@BOTH_EXPORTERS
def test_verification_error_tells_of_numbers_that_are_not_finite(opset, tmp_path) -> None:
    """Half precision ends at 65504; ONNX Runtime has what is between in float32."""

    class Large(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * 6e4 * 10 / 1e5

    with pytest.raises(svexport.VerificationError, match=r"3 elements of torch's result are NaN or infinite, 0"):
        svexport.export(Large(), torch.rand(3) + 2, tmp_path / "m.onnx", opset=opset, dtype=torch.float16)
    assert not list(tmp_path.iterdir())


@BOTH_EXPORTERS
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_verification_error_tells_of_half_precision(opset, dtype, tmp_path) -> None:
    """Where it is one: outputs may be float32 all the same."""

    calls = itertools.count(1)

    class Noise(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).float() + 0.01 * next(calls)

    with pytest.raises(
        svexport.VerificationError, match=r"  Usual causes: (half .*argmax and topk .*values\), )?random nu"
    ) as info:
        svexport.export(Noise(), torch.randn(2, 3), tmp_path / "m.onnx", opset=opset, dtype=dtype, rtol=0, atol=1e-4)
    assert ("half precision itself" in str(info.value)) == (dtype is not None)


def test_files_that_do_not_run_are_not_verified(tmp_path) -> None:
    """For want of kernels in ONNX Runtime, or because a size of the given inputs is in the file."""

    class Fixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.reshape(int(x.numel()))

    class Parts(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x[i] * 2 for i in range(x.shape[0])]

    path = tmp_path / "m.onnx"
    with pytest.raises(
        svexport.VerificationError, match=r"(?s)lacks a kernel.*Conv.*verify=False\) writes the file any"
    ):
        svexport.export(Small(), X, path, dtype=torch.float64)
    with (
        torch_export_first(False),
        pytest.raises(svexport.VerificationError, match=r"(?s)torch computes n=3 inputs, the exported file does not"),
    ):
        svexport.export(Fixed(), X, path, dynamic_axes={"x": {0: "n"}})
    with pytest.raises(
        svexport.VerificationError, match="torch returns 3 tensors on n=3 inputs, the exported file always"
    ):
        svexport.export(Parts(), torch.randn(2, 3), path, dynamic_axes={"x": {0: "n"}})
    assert not list(tmp_path.iterdir())


class Positive(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x * 2
        return x - 1


class Loud(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x if x.max() < 50 else x / x.max()


class Masked(nn.Module):
    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x * 2 if torch.equal(mask, torch.ones_like(mask)) else x * mask


class Found(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        found = x[x > 0]
        count = found.numel()
        return found.sum() if count > 0 else x.sum() - 1


@pytest.mark.parametrize(
    ("model", "inputs", "message"),
    [
        (
            Positive(),
            {"x": torch.rand(3, 4)},
            r"values out of tensors, .* at .*test_contract\.py:\d+ in forward: if x\.sum\(\) > 0:",
        ),
        (
            Loud(),
            {"x": torch.rand(3, 4)},
            r"on (scaled|hundredfold) inputs.*in forward: return x if x\.max\(\) < 50 else",
        ),
        (
            Masked(),
            {"x": torch.rand(3, 4), "mask": torch.ones(3, 4, dtype=torch.bool)},
            r"on scaled inputs.*in forward: return x \* 2 if torch\.equal\(mask",
        ),
        (Found(), {"x": torch.rand(3, 4)}, r"test_contract\.py:\d+: Converting a tensor to a Python boolean"),
    ],
)
@pytest.mark.filterwarnings("default::torch.jit.TracerWarning")
def test_branches_on_values_are_found_with_other_inputs(model, inputs, message, tmp_path) -> None:
    with pytest.raises(svexport.VerificationError, match=rf"(?s){message}"):
        svexport.export(model, inputs, tmp_path / "m.onnx", opset=11)
    assert not list(tmp_path.iterdir())


class Attempts(nn.Module):
    """Errors that forward catches end a trace of torch's, and with it the process."""

    def __init__(self, first: nn.Module) -> None:
        super().__init__()
        self.first = first
        self.other = Shaped()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        try:
            y = x.t().view(-1)
        except RuntimeError:
            y = x.t().reshape(-1)
        try:
            y = svexport.ops.einsum("ab,bc->ac", x, x)
        except Exception:  # noqa: BLE001 - whatever it is
            y = y.sum() + self.other(x)
        return y


class Shaped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        try:
            return torch.cat([x, x[:, :2]]) + self.missing(x)
        except RuntimeError:
            return x - 1


@pytest.mark.parametrize("opset", [11, 17])
@pytest.mark.parametrize("first", [nn.ReLU(), torch.jit.script(nn.ReLU())])
def test_errors_that_forward_catches(first, opset, tmp_path) -> None:
    report = svexport.export(Attempts(first), (torch.rand(3, 4),), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert report.nodes == {"Relu": 1, "Transpose": 1, "Reshape": 1, "ReduceSum": 1, "Sub": 1, "Add": 1}


def test_errors_that_come_of_values(tmp_path) -> None:
    class Factored(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            try:
                torch.linalg.cholesky(x)
            except RuntimeError:
                return x * 2
            return x * 3

    with pytest.raises(svexport.VerificationError, match=r"(?s)on negated.*in forward: torch\.linalg\.chol"):
        svexport.export(Factored(), (-torch.eye(3),), tmp_path / "m.onnx", opset=11)


class Checked(nn.Module):
    """Its checks of values and sizes change nothing where they hold."""

    def forward(self, x: Tensor) -> Tensor:
        assert x.shape[1] == 4
        assert x.min() >= 0
        if x.max() > 50:
            x = x.clamp(min=-1)
        return x / x.mean()


@pytest.mark.parametrize("opset", [11, 17])
def test_branches_that_change_nothing(opset, tmp_path) -> None:
    report = svexport.export(Checked(), (torch.rand(3, 4),), tmp_path / "m.onnx", opset=opset)
    assert [p.run for p in report.parity] == ["given", "random", "hundredfold"]
    assert [skipped.partition(":")[0] for skipped in report.skipped] == ["scaled", "zeros"]
    assert not any("not verified" in note for note in report.notes)


class Ranked(nn.Module):
    """Of zeros any order is right."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        self.scale = x.mean().item()
        if not x.any():
            self.scale = 1.0
        return x.argsort(1), (x * 0.04).exp()


@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_values_that_are_only_looked_at(dtype, tmp_path) -> None:
    x = 2.0 ** torch.arange(-16, 8).flip(0)[None]
    report = svexport.export(Ranked(), (x,), tmp_path / "m.onnx", opset=11, dtype=dtype)
    assert {p.run for p in report.parity} - {"scaled", "zeros"} == {"given", "random first", "random next"}
    assert all("equal values" in skipped or "not finite" in skipped for skipped in report.skipped)


class Chooses(nn.Module):
    """Calls the same functions whatever the values; the last one that is another decides."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.experts = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: Tensor) -> Tensor:
        self.mean = x.mean().item()
        loud = bool(x.max() > 50)
        if self.how == "expert":
            return self.experts[int(loud)](x)
        if self.how == "number":
            return x * int(loud)
        if self.how == "numpy":
            return x * torch.from_numpy(np.float32([loud]))
        first, second = x + 1, x + 2
        return first if loud else second


@pytest.mark.parametrize("how", ["expert", "number", "numpy", "result"])
def test_values_that_choose_among_the_same_functions(how, tmp_path) -> None:
    with pytest.raises(svexport.VerificationError, match=r"(?s)on (scaled|hundredfold).*in forward: loud = bool\("):
        svexport.export(Chooses(how), (torch.rand(3, 4),), tmp_path / "m.onnx", opset=11)


class Chosen(nn.Module):
    """The best of scores of which many are equal: a heatmap of a rounded or saturated activation."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, scores: Tensor, boxes: Tensor) -> Tensor:
        scores = scores.round()
        if self.how == "topk":
            best = torch.topk(scores, 7).indices
        elif self.how == "argsort":
            best = scores.argsort(dim=1, descending=True)[:, :7]
        elif self.how == "sort":
            best = scores.sort(1)[1][:, -7:]
        elif self.how == "stable":
            best = torch.sort(scores, dim=-1, descending=True, stable=True)[1][:, :7]
        else:
            best = torch.topk(scores, 7)[1]
            boxes = boxes + float(self.how) * torch.rand(1)  # small: by chance within the tolerance
        return boxes.gather(1, best[..., None].expand(-1, -1, 4))


@BOTH_EXPORTERS
@pytest.mark.parametrize("how", ["topk", "argsort", "sort"])
def test_ties_in_another_order_are_named(how, opset, tmp_path) -> None:
    args = torch.rand(2, 61) * 3, torch.rand(2, 61, 4)
    with pytest.raises(svexport.VerificationError) as caught:
        svexport.export(Chosen(how), args, tmp_path / "m.onnx", opset=opset)
    text = str(caught.value)
    assert re.search(
        rf"equal.* ONNX returns them by position: {how} at \S*test_contract.py:\d+ in forward: best = ", text
    ), text
    assert "random numbers" not in text


class Detected(nn.Module):
    """Some boxes of the best scores, which are equal where the image is empty, and stay so where it nearly is."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        scores = (x[..., 0] * 1e-3).sigmoid()
        best = scores.topk(7).indices if self.how == "topk" else scores.argsort(1, descending=True)[:, :7]
        boxes = x.gather(1, best[..., None].expand(-1, -1, 4)) + best[..., None]
        return boxes[boxes[..., 0] % 4 < 2]


@BOTH_EXPORTERS
@pytest.mark.parametrize("how", ["topk", "argsort"])
def test_ties_of_inputs_made_by_verification(how, opset, tmp_path) -> None:
    """Any order of them is right: the file is compared with torch's results where equal values come by their places."""
    x = torch.stack([torch.randperm(61) - 30.0 for _ in range(2)])[..., None] + torch.rand(2, 61, 4) / 4
    report = svexport.export(Detected(how), x, tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert "zeros" in {p.run for p in report.parity}
    note = next(note for note in report.notes if note.startswith("zeros inputs: equal values"))
    assert re.search(rf"{how} at \S*test_contract.py:\d+ in forward: best = ", note)
    engine = svexport.load(tmp_path / "m.onnx")
    assert engine(torch.zeros(2, 61, 4))[:, 0].tolist() == 2 * [0, 1, 4, 5]


class Sorted(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        x = x.round()
        values, places = torch.sort(x, dim=1, stable=True)
        return values, places, x.argsort(dim=0, descending=True, stable=True)


@BOTH_EXPORTERS
@pytest.mark.parametrize("shape", [(3, 47, 2), (1, 2, 1)])
def test_stable_sort(shape, opset, tmp_path) -> None:
    x = torch.rand(shape) * 3
    report = svexport.export(Sorted(), x, tmp_path / "m.onnx", opset=opset, dynamic_shapes={"x": {1: "n"}})
    assert report.verified
    x = torch.rand(shape[0], shape[1] + 7, shape[2]) * 3
    for found, expected in zip(svexport.load(tmp_path / "m.onnx")(x), Sorted()(x), strict=True):
        assert torch.equal(found, expected)


def test_another_type_is_no_infinity(tmp_path, monkeypatch) -> None:
    """torch.export's promotion of types leaves sums of halves in float32, as is seen where nobody casts them back."""
    monkeypatch.setattr(dynamo, "_cast_back", lambda *_: None)

    class Sum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.sum(1)

    with pytest.raises(svexport.VerificationError, match=r"came as float32.*\n.*result is float16\[2, 5\]") as caught:
        svexport.export(Sum(), torch.randn(2, 3, 5), tmp_path / "m.onnx", opset=20, dtype=torch.float16)
    assert "infinite" not in str(caught.value)


@BOTH_EXPORTERS
def test_ties_are_not_blamed_for_else(opset, tmp_path) -> None:
    args = torch.rand(2, 61) * 3, torch.rand(2, 61, 4)
    assert svexport.export(Chosen("stable"), args, tmp_path / "m.onnx", opset=opset).verified
    for scale, cause, other in (("1", "draws random numbers", "places"), ("1e-6", "topk at", "random numbers")):
        with pytest.raises(svexport.VerificationError, match=cause) as caught:
            svexport.export(Chosen(scale), args, tmp_path / "m.onnx", opset=opset)
        assert other not in str(caught.value)


@BOTH_EXPORTERS
def test_large_models_keep_their_weights_beside_the_file(opset, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(saving, "MAX_PROTOBUF_BYTES", 1000)
    model = nn.Sequential(nn.Linear(64, 32), Small_head())
    report = svexport.export(model, (torch.randn(2, 64),), tmp_path / "big.onnx", opset=opset)
    assert sorted(os.listdir(tmp_path)) == ["big.onnx", "big.onnx.data"]
    assert report.verified
    x = torch.randn(2, 64)
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    for name in ("big.onnx", "big.onnx.data"):
        os.rename(tmp_path / name, moved / name)
    torch.testing.assert_close(svexport.load(moved / "big.onnx")(x), model(x), rtol=1e-4, atol=1e-5)


@pytest.mark.core
def test_large_models_are_traced_into_a_file(tmp_path, monkeypatch) -> None:
    """As one protobuf in memory they would be refused; the exporter puts their weights beside that file."""
    monkeypatch.setattr(torchscript, "_LARGE", 1000)
    model = nn.Sequential(nn.Linear(64, 32), Small_head())
    report = svexport.export(model, (torch.randn(2, 64),), tmp_path / "big.onnx", opset=11)
    assert report.verified
    assert os.listdir(tmp_path) == ["big.onnx"]


class Small_head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(32, 5))

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("nc,cd->nd", x, self.weight)


# ---------------------------------------------------------------- models


class Unsupported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        return torch.linalg.svdvals(y)


@pytest.mark.core
@BOTH_EXPORTERS
def test_operator_that_cannot_be_exported_is_named_with_its_source(opset, tmp_path) -> None:
    with pytest.raises(
        svexport.ExportError, match=r"(?s)svd.*at .*test_contract\.py:\d+ in forward: return torch\.linalg"
    ):
        svexport.export(Unsupported(), (torch.randn(3, 3),), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3


class Rows(nn.Module):
    def forward(self, y: Tensor, x: Tensor) -> Tensor:
        return y.sum() + sum(x * i for i in range(int(x.shape[2])))


class Fails(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[0, 0] @ x[0, 0]


class Eigenvalues(nn.Module):
    """Which torch does not have in half precision."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.linalg.eigvalsh(x)


@pytest.mark.core
def test_nothing_is_logged(tmp_path, caplog) -> None:
    """What the optimizer of onnxscript does not fold, of which it warns."""

    class Halves(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(3, 4)

        def forward(self, x: Tensor) -> Tensor:
            position, content = self.embedding.weight.chunk(2, dim=-1)
            return x * position + content

    assert svexport.export(Halves(), torch.randn(2, 3, 2), tmp_path / "m.onnx", opset=18).verified
    assert not [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


class Samples(nn.Module):
    """As many as the largest of its numbers says."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([x.sum() * i for i in range(int(x.max().item()) + 1)])


@pytest.mark.skipif(LAST_TORCHSCRIPT_OPSET >= 18, reason="torch.export is not asked in an old torch")
@pytest.mark.core
@pytest.mark.parametrize(
    ("model", "args", "axes", "message"),
    [
        (
            Branch(),
            X,
            {},
            r"forward needs the value of a tensor in Python: (?s:.*) at .*x\.sum\(\) > 0(?s:.*)torch\.where",
        ),
        (Rows(), X * 2, {"x": {2: "h"}}, r"forward makes a Python number of a dynamic size\n  at .*range\(int\("),
        (
            Samples(),
            (torch.rand(2, 3) * 4,),
            {},
            r"forward makes a Python number of values of its inputs\n  at .*\.item\(\)(?s:.*)freeze=",
        ),
    ],
)
def test_what_torch_export_does_not_take(model, args, axes, message, tmp_path, monkeypatch) -> None:
    logged: list[logging.LogRecord] = []  # hundreds of lines about what is raised as well
    monkeypatch.setattr(logging.getLogger("torch._subclasses.fake_tensor"), "handle", logged.append)
    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(model, args, tmp_path / "m.onnx", opset=18, dynamic_axes=axes)
    assert not logged
    assert not list(tmp_path.iterdir())


class Packed(nn.Module):
    """The last states of rows of different lengths, of a packed sequence or of a padded one."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 8, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor, packed: bool = True) -> Tensor:
        if packed:
            x = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return self.lstm(x)[1][0][-1]
        output, _ = self.lstm(x)
        return output.gather(1, (lengths - 1)[:, None, None].expand(-1, 1, 8))[:, 0]


@BOTH_EXPORTERS
def test_projected_states(opset, tmp_path) -> None:
    """Of which ONNX has none."""

    class Projected(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(4, 3, bidirectional=True, batch_first=True, proj_size=2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            output, (state, cell) = self.lstm(x)
            return output, state, cell

    model, axes = Projected().eval(), {"x": {0: "b"}}
    svexport.export(model, torch.randn(2, 3, 4), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    x = torch.randn(5, 3, 4)
    torch.testing.assert_close(tuple(svexport.load(tmp_path / "m.onnx")(x)), model(x))


@BOTH_EXPORTERS
def test_packed_sequences(opset, tmp_path) -> None:
    """Of which torch's errors say ``vector::_M_range_check`` and ``zeros(): argument 'size'``."""
    model, args = Packed().eval(), (torch.randn(3, 7, 4), torch.tensor([7, 2, 5]))
    message = r"model\.lstm is given a packed sequence(?s:.*)pass the padded sequence(?s:.*)lengths - 1"
    with pytest.raises(svexport.ExportError, match=message):
        svexport.export(model, args, tmp_path / "m.onnx", opset=opset)
    report = svexport.export(model, (*args, False), tmp_path / "m.onnx", opset=opset)
    torch.testing.assert_close(svexport.load(report.path)(*args), model(*args), rtol=1e-4, atol=1e-5)


@BOTH_EXPORTERS
@pytest.mark.parametrize("dtype", [None, torch.float16])
def test_model_that_fails_by_itself(opset, dtype, tmp_path) -> None:
    """An assertion and what a type does not have, too; with the line."""
    matrices = torch.eye(5).expand(2, 3, 5, 5) if dtype else X
    message = r"the model itself fails on these arguments: (?s:.*)\n  at .*test_contract\.py:\d+ in forward: return "
    model = Eigenvalues() if dtype else Fails()
    with pytest.raises(svexport.ExportError, match=message) as raised:
        svexport.export(model, matrices, tmp_path / "m.onnx", opset=opset, dtype=dtype)
    assert ("not implemented for 'Half'" if dtype else "RuntimeError: mat1 and mat2") in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.core
@BOTH_EXPORTERS
def test_everything_is_as_before(opset, tmp_path) -> None:
    """Mode, hooks, parameters, buffers and torch.onnx's registry, after success and after failure."""
    model = Small().train()
    model.norm.eval()
    calls: list[int] = []
    model.conv.register_forward_hook(lambda *_: calls.append(1))
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(svexport.ExportError):  # torch fills its registry when it is first used
        svexport.export(nn.Sequential(Small(), Unsupported()), X, tmp_path / "n.onnx", opset=opset)
    registered = registry_state()
    attributes = set(vars(model))

    svexport.export(model, X, tmp_path / "m.onnx", opset=opset)
    assert calls  # hooks run during tracing, as in any forward
    with pytest.raises(svexport.ExportError, match=r"no matrix factorization.*torch\.linalg\.solve"):
        svexport.export(nn.Sequential(model, Unsupported()), X, tmp_path / "n.onnx", opset=opset)

    assert [m.training for m in (model, model.conv, model.norm, model.drop)] == [True, True, False, True]
    assert len(model.conv._forward_hooks) == 1
    assert not model._forward_hooks
    assert not model._forward_pre_hooks
    assert set(vars(model)) == attributes
    for key, value in model.state_dict().items():
        torch.testing.assert_close(value, state[key], rtol=0, atol=0)
    assert registry_state() == registered
    assert torch.is_grad_enabled()


def test_layers_that_stay_in_training_mode_are_said(tmp_path) -> None:
    """In a model that is in eval mode, as for statistics of the batch, or dropout that is meant to draw."""
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(), nn.Dropout(0.0)).eval()
    x = torch.randn(2, 3, 7, 5)
    assert not svexport.export(model, x, tmp_path / "m.onnx").notes
    for layer in model[1:]:
        layer.train()
    assert svexport.export(model, x, tmp_path / "m.onnx").notes == [
        "exported in eval mode, including 1 (BatchNorm2d), 2 (Dropout), which the model keeps in training mode"
    ]
    assert model[1].training
    model.train()
    assert not svexport.export(model, x, tmp_path / "m.onnx").notes


@pytest.mark.core
def test_registrations_of_the_user_survive(tmp_path) -> None:
    def mine(g, *args):
        raise AssertionError("ours is used during svexport.export")

    torch.onnx.register_custom_op_symbolic("aten::einsum", mine, 13)
    try:
        svexport.export(Small(), X, tmp_path / "m.onnx", opset=13)
        assert registry.get_function_group("aten::einsum").get(13) is mine
    finally:
        torch.onnx.unregister_custom_op_symbolic("aten::einsum", 13)


class Switched(nn.Sequential):
    """Knows training by a name of its own."""

    learns = True

    def train(self, mode: bool = True) -> nn.Module:
        self.learns = mode
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + (1 if self.learns else 0)


def test_modules_with_a_switch_of_their_own_are_said(tmp_path) -> None:
    """Modes are changed without their methods: what a file computes is then neither."""
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3), Switched(nn.BatchNorm2d(4))), torch.randn(2, 3, 7, 5)
    assert svexport.export(model, x, tmp_path / "m.onnx").notes == [
        "exported in eval mode without a call of the train() that 1 (Switched) overrides: call model.eval() before, "
        "if it changes more than training"
    ]
    assert not svexport.export(model.eval(), x, tmp_path / "m.onnx").notes


@BOTH_EXPORTERS
def test_train_mode_is_exported_in_eval(opset, tmp_path) -> None:
    model = Small().train()
    report = svexport.export(model, X, tmp_path / "m.onnx", opset=opset)
    assert "Dropout" not in report.nodes
    assert model.training
    expected = model.eval()(*X)
    torch.testing.assert_close(svexport.load(report.path)(*X), expected, rtol=1e-4, atol=1e-4)


@BOTH_EXPORTERS
def test_inputs_that_need_grad(opset, tmp_path) -> None:
    x = X[0].clone().requires_grad_()
    assert svexport.export(Small(), (x,), tmp_path / "m.onnx", opset=opset).verified
    assert x.requires_grad
    assert x.grad is None


@pytest.mark.core
@BOTH_EXPORTERS
def test_shared_parameters_are_stored_once(opset, tmp_path) -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(96, 96)
            self.b = nn.Linear(96, 96)
            self.b.weight = self.a.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.b(self.a(x).relu())

    report = svexport.export(Shared(), (torch.randn(2, 96),), tmp_path / "m.onnx", opset=opset)
    file = onnx.load(report.path)
    assert sum(list(t.dims) == [96, 96] for t in file.graph.initializer) == 1


@pytest.mark.core
def test_parameter_names_are_the_models_own(tmp_path) -> None:
    for opset in (11, 18):
        model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU(), nn.Conv2d(4, 4, 1))
        file = onnx.load(svexport.export(model, X, tmp_path / "m.onnx", opset=opset).path)
        assert {"0.weight", "0.bias", "2.weight", "2.bias"} <= {t.name for t in file.graph.initializer}
        assert "_svexport_model" not in str(file)


@pytest.mark.core
@BOTH_EXPORTERS
def test_wrapped_models(opset, tmp_path) -> None:
    """What torch.compile and DataParallel make of a model is exported, and compared, as that model."""
    inner = Small()
    inner.conv = torch.compile(inner.conv)
    inner.norm.compile()
    compiled = inner.norm._compiled_call_impl
    forward = inner.conv.forward
    model = torch.compile(nn.DataParallel(inner))
    report = svexport.export(model, X, tmp_path / "m.onnx", opset=opset)
    assert report.model == "Small"
    assert list(report.inputs) == ["x"]
    assert svexport.compare(model, report.path, X).ok
    assert inner.norm._compiled_call_impl is compiled
    assert inner.conv.forward is forward


@pytest.mark.core
def test_wrapped_models_have_their_own_examples(tmp_path) -> None:
    inner = Small()
    with svexport.record(inner):
        inner(*X)
    assert svexport.export(nn.DataParallel(inner), path=tmp_path / "m.onnx").verified


@pytest.mark.gpu
@BOTH_EXPORTERS
def test_model_on_gpu(opset, tmp_path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    report = svexport.export(Small().cuda(), (X[0].cuda(),), tmp_path / "m.onnx", opset=opset)
    assert report.verified


def test_inputs_on_another_device_than_the_model(tmp_path) -> None:
    model = Small().to("meta")
    with pytest.raises(svexport.ExportError, match=r"model is on meta, its inputs on cpu"):
        svexport.export(model, X, tmp_path / "m.onnx")


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 13, 17])
def test_scripted_submodules(opset, tmp_path) -> None:
    class Loop(nn.Module):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:
            if x.size(0) > 1:
                x = x + 1
            return torch.einsum("nc,cd->nd", x, w)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.script(Loop())
            self.w = nn.Parameter(torch.randn(5, 6))

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x * 2, self.w)

    model = Outer()
    report = svexport.export(model, (torch.randn(3, 5),), tmp_path / "m.onnx", opset=opset)
    assert report.traced_nodes["SvEinsum"] == 1


@pytest.mark.core
def test_scripted_model(tmp_path) -> None:
    class Sample(nn.Module):
        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            return F.grid_sample(x, grid, align_corners=False)

    model = torch.jit.script(Sample())
    args = (torch.randn(1, 2, 5, 6), torch.rand(1, 3, 4, 2))
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=11)
    assert report.traced_nodes["SvGridSample"] == 1


@pytest.mark.core
@pytest.mark.skipif(LAST_TORCHSCRIPT_OPSET >= 18, reason="there is none in an old torch")
def test_scripted_modules_are_for_the_other_exporter(tmp_path) -> None:
    for scripted, name in ((nn.Sequential(nn.ReLU(), torch.jit.script(nn.Tanh())), "model.1"), (nn.Tanh(), "model")):
        model = torch.jit.script(scripted) if name == "model" else scripted
        with pytest.raises(svexport.ExportError, match=rf"{name} is scripted, .* opset=17 or less"):
            svexport.export(model, (torch.randn(2, 3),), tmp_path / "m.onnx", opset=18)
        assert svexport.export(model, (torch.randn(2, 3),), tmp_path / "m.onnx", opset=17).verified


@pytest.mark.core
def test_svexport_ops_used_directly(tmp_path) -> None:
    class Direct(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.sample = svexport.ops.BilinearSample()

        def forward(self, x: Tensor, grid: Tensor) -> tuple[Tensor, Tensor]:
            return self.sample(svexport.ops.einsum("nchw,cd->ndhw", x, x[0, :, :2, 0]), grid)

    args = (torch.randn(1, 3, 5, 6), torch.rand(1, 3, 4, 2) * 5)
    for opset in (9, 11, 17, 18):
        report = svexport.export(Direct(), args, tmp_path / "m.onnx", opset=opset)
        assert set(report.traced_nodes) >= {"SvBilinearSample", "SvEinsum"}


@pytest.mark.core
def test_report(tmp_path) -> None:
    import json

    report = svexport.export(Small(), X, tmp_path / "m.onnx", opset=11)
    text = str(report)
    for expected in ("Small -> m.onnx: verified", "opset / IR", "11 / 8", "SvEinsum", "max abs", "test_contract.py"):
        assert expected in text
    values = json.loads(json.dumps(report.to_dict()))
    assert values["verified"] is True
    assert values["opset"] == 11
    assert values["lowered_nodes"].get("SvEinsum") is None
    assert values["traced_nodes"]["SvEinsum"] == 1
    report.to_html(tmp_path / "r.html")
    assert "<svg" in (tmp_path / "r.html").read_text() or "<img" in (tmp_path / "r.html").read_text()


@pytest.mark.core
def test_a_model_that_only_the_fallback_of_torch_export_traces(tmp_path, capfd) -> None:
    class FromTensors(nn.Module):
        """Python numbers out of a tensor: torch.export needs its jit fallback, which traces a copy of the model."""

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            sizes = torch.tensor([[2, 3], [1, 6]])
            return {"last": [x.reshape(x.shape[0], int(h), int(w)) * 2 for h, w in sizes][-1]}

    report = svexport.export(FromTensors(), (torch.randn(4, 6),), tmp_path / "m.onnx", opset=18)
    assert list(report.outputs) == ["last"]
    assert "def forward" not in capfd.readouterr().err  # the graph that torch.export gave up


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_parts_of_one_tensor(opset, tmp_path) -> None:
    """ONNX Runtime takes two Splits of a tensor for one, whatever their numbers of outputs are."""

    class Chunks(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.chunk(3, 1)[0].exp(), x.chunk(2, 1)[0].exp()

    report = svexport.export(Chunks(), torch.randn(2, 6), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert not any("TorchScript" in note for note in report.notes)


ARGUMENTS = {
    "of its own memory": lambda: (torch.randn(3, 4), torch.randn(3, 4)),
    "expanded": lambda: (torch.randn(3, 4), torch.randn(1, 4).expand(3, 4)),
    "transposed": lambda: (torch.randn(4, 3).t(), torch.randn(3, 4)),
    "the same twice": lambda: (torch.randn(3, 4),) * 2,
    "parts of one": lambda: torch.randn(8, 4).unfold(0, 3, 2)[:2].mT.unbind(),
}


@pytest.mark.parametrize("tracer", ["torch.export", "TorchScript"])
@pytest.mark.parametrize("kind", ARGUMENTS)
def test_arguments_stay_as_they_are(kind: str, tracer: str, tmp_path) -> None:
    """Nobody writes to them, though forward does, and none is taken for another that shares its memory."""

    class InPlace(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x.mul_(2)
            x[:, 0] = 3
            return x - y

    args = ARGUMENTS[kind]()
    before, versions = [t.clone() for t in args], [t._version for t in args]
    with torch_export_first(tracer == "torch.export"):
        report = svexport.export(InPlace(), args, tmp_path / "m.onnx", opset=13)
    assert [t._version for t in args] == versions
    assert all(map(torch.equal, args, before))
    assert report.verified
    x, y = torch.randn(3, 4), torch.randn(3, 4)
    got = svexport.load(tmp_path / "m.onnx", device="cpu")(x, y)
    torch.testing.assert_close(got, InPlace()(x.clone(), y))
