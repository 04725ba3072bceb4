"""At every opset, with and without plugins, the file has that opset, is valid, and equals torch."""

from __future__ import annotations

import itertools

import onnx
import pytest
import torch
import torch.nn.functional as F
from onnx import helper
from torch import Tensor, nn

import svexport
from examples import stgcn
from svexport.ops._op import OPS
from tests.support import BOTH_EXPORTERS, OPSETS, check_export


class Einsums(nn.Module):
    """The einsum calls of unedited models, by every way to spell them."""

    def forward(self, x: Tensor, a: Tensor, w: Tensor) -> dict[str, Tensor]:
        from torch import einsum

        return {
            "graph_conv": torch.einsum("nkctv,kvw->nctw", (x, a)),
            "linear": einsum("nkctv,cd->ndtkv", x, w),
            "trace": torch.einsum("kvv->k", a),
            "outer": torch.einsum("kvw,cd->kcd", a, w),
            "implicit": torch.einsum("cd,ed", w, w),
            "ellipsis": torch.einsum("...tv,kvw->...tw", x, a[:1]),
            "three": torch.einsum("nkctv,kvw,cd->ndtw", x, a, w),
        }


class GridSamples(nn.Module):
    """All modes, paddings and alignments of ``F.grid_sample``."""

    def forward(self, image: Tensor, grid: Tensor, volume: Tensor, points: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for mode, padding, align in itertools.product(
            ("bilinear", "nearest", "bicubic"), ("zeros", "border", "reflection"), (False, True)
        ):
            name = f"{mode}_{padding}_{'corners' if align else 'centres'}"
            outputs[name] = F.grid_sample(image, grid, mode, padding, align)
            if mode != "bicubic":
                outputs[f"volume_{name}"] = F.grid_sample(volume, points, mode, padding, align)
        return outputs


def example(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    if name == "einsum":
        return Einsums(), (torch.randn(2, 3, 4, 5, 7), torch.randn(3, 7, 7), torch.randn(4, 6))
    if name == "grid_sample":
        image, grid = torch.randn(2, 3, 5, 7), torch.rand(2, 4, 3, 2) * 2.6 - 1.3
        return GridSamples(), (image, grid, torch.randn(2, 2, 3, 4, 5), torch.rand(2, 2, 3, 2, 3) * 2.6 - 1.3)
    model = stgcn.model()
    return model, (torch.randn(1, 3, 24, 25, 2),)


@pytest.mark.parametrize("opset", OPSETS)
@pytest.mark.parametrize(
    ("name", "plugins"),
    [
        ("einsum", ["einsum"]),
        ("einsum", False),
        ("grid_sample", True),
        ("grid_sample", False),
        ("stgcn", True),
        ("stgcn", ["einsum"]),
    ],
)
def test_export(name: str, plugins: bool | list[str], opset: int, tmp_path) -> None:
    torch.manual_seed(opset)
    model, args = example(name)
    report = svexport.export(model, args, tmp_path / "model.onnx", opset=opset, plugins=plugins)
    file = onnx.load(report.path)
    onnx.checker.check_model(file, full_check=True)
    assert report.verified
    assert report.max_abs < 1e-4
    assert {entry.domain: entry.version for entry in file.opset_import}[""] == opset
    for node in (*file.graph.node, *(n for f in file.functions for n in f.node)):
        assert node.op_type != "Einsum"
        assert node.op_type != "GridSample" or 16 <= opset < 20

    # Independently of the exporter's own verification: the engine against a fresh torch forward.
    engine = svexport.load(report.path)
    with torch.no_grad():
        expected = model.eval()(*args)
    actual = engine(*args)
    expected = list(expected.values()) if isinstance(expected, dict) else [expected]
    actual = [actual] if isinstance(actual, Tensor) else list(actual)
    for e, a in zip(expected, actual, strict=True):
        torch.testing.assert_close(a, e, rtol=0, atol=1e-4)

    nodes = [n for n in file.graph.node if n.domain == "svexport"]
    expected_type = "SvGridSample" if name == "grid_sample" else "SvEinsum"
    assert report.traced_nodes[expected_type] > 0
    stay = bool(plugins) and (name, plugins) != ("stgcn", True)  # what no TensorRT has a plugin for is lowered
    assert all(n.lowered is not stay for n in report.svexport_nodes)
    if not stay:
        assert not nodes
        assert not file.functions
        assert [entry.domain for entry in file.opset_import] == [""]
        return
    assert {n.op_type for n in nodes} == {expected_type}
    functions = {(f.name, f.overload) for f in file.functions}
    op = next(op for op in OPS.values() if op.node_type == expected_type)
    for node in nodes:
        attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
        assert set(attributes) == {a.name for a in op.attributes} | {"plugin_namespace", "plugin_version"}
        assert attributes["plugin_namespace"] == b"svexport"
        assert attributes["plugin_version"] == b"1"
        assert (node.op_type, node.overload) in functions


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 17, 18, 20])
@pytest.mark.parametrize("plugins", [True, False])
def test_dynamic_shapes(plugins: bool, opset: int, tmp_path) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, grid: Tensor, w: Tensor) -> Tensor:
            return torch.einsum("nchw,cd->nhwd", F.grid_sample(x, grid, align_corners=False), w)

    args = (torch.randn(1, 3, 8, 9), torch.rand(1, 4, 5, 2) * 2 - 1, torch.randn(3, 6))
    shapes = {"x": {0: "batch", 2: "height"}, "grid": {0: "batch", 1: "rows"}}
    report = svexport.export(Both(), args, tmp_path / "m.onnx", opset=opset, plugins=plugins, dynamic_shapes=shapes)
    assert any("batch=2" in p.run for p in report.parity)
    engine = svexport.load(report.path)
    for n, h, rows in [(1, 8, 4), (3, 11, 1), (5, 1, 7)]:
        x, grid = torch.randn(n, 3, h, 9), torch.rand(n, rows, 5, 2) * 2.4 - 1.2
        torch.testing.assert_close(engine(x, grid, args[2]), Both()(x, grid, args[2]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("plugins", [["grid_sample"], ["einsum"], [], ["einsum", "grid_sample"]])
def test_plugins_as_a_list(plugins: list[str], tmp_path) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            return torch.einsum("nchw,ncij->nhwij", F.grid_sample(x, grid, align_corners=True), x)

    args = (torch.randn(1, 3, 5, 6), torch.rand(1, 4, 5, 2) * 2 - 1)
    report = svexport.export(Both(), args, tmp_path / "m.onnx", plugins=plugins)
    kept = {n.op_type for n in onnx.load(report.path).graph.node if n.domain == "svexport"}
    assert kept == {OPS[name].node_type for name in plugins}


def test_several_bodies_of_one_op_are_overloads(tmp_path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.einsum("ij,jk->ik", x, x) - torch.einsum("ij,jk->ki", x, x)

    x = torch.randn(4, 4)
    report = svexport.export(Two(), (x,), tmp_path / "m.onnx", opset=11, plugins=["einsum"])
    file = onnx.load(report.path)
    assert len(file.functions) == 2
    assert file.ir_version == report.ir_version == 10
    torch.testing.assert_close(svexport.load(report.path)(x), x @ x - (x @ x).t())
    assert svexport.lower(file).ir_version == 8


@pytest.mark.parametrize(
    ("target", "opset", "version"), [("8.4", 11, 8), ("8.6", 17, 8), ("10.1", 18, 8), ("10.1", 20, 10)]
)
def test_ir_version_of_files_without_overloads(target: str, opset: int, version: int, tmp_path) -> None:
    class Two(nn.Module):
        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            return F.grid_sample(x, grid, align_corners=True) - F.grid_sample(x, grid, "nearest", align_corners=True)

    args = (torch.randn(1, 3, 5, 6), torch.rand(1, 4, 5, 2) * 2 - 1)
    report = svexport.export(Two(), args, tmp_path / "m.onnx", opset=opset, target=target)
    file = onnx.load(report.path)
    assert not file.functions
    assert file.ir_version == report.ir_version == version


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 18])
def test_where_nodes_came_from(opset: int, tmp_path) -> None:
    report = svexport.export(Einsums(), example("einsum")[1], tmp_path / "m.onnx", opset=opset)
    sources = [n.source for n in report.svexport_nodes]
    assert all("test_opsets.py:" in source and "in forward" in source for source in sources)
    assert any('torch.einsum("kvv->k", a)' in source for source in sources)
    assert any('einsum("nkctv,cd->ndtkv", x, w)' in source for source in sources)


@pytest.mark.core
@pytest.mark.parametrize(
    ("target", "opset", "bodies"), [("8.4", 11, False), ("8.6", 17, False), ("10.0", 18, False), ("10.12", 11, True)]
)
def test_target(target: str, opset: int, bodies: bool, tmp_path) -> None:
    class Both(nn.Module):
        def forward(self, x: Tensor, grid: Tensor) -> Tensor:
            return torch.einsum("nchw->nc", F.grid_sample(x, grid, align_corners=True))

    args = (torch.randn(1, 3, 5, 6), torch.rand(1, 4, 5, 2) * 2 - 1)
    report = svexport.export(Both(), args, tmp_path / "m.onnx", opset=opset, target=target)
    file = onnx.load(report.path)
    assert report.verified
    assert bool(file.functions) is bodies
    assert {n.op_type for n in file.graph.node if n.domain == "svexport"} == {"SvGridSample"}  # einsum runs natively


class FloorDivisions(nn.Module):
    def forward(self, x: Tensor, i: Tensor, small: Tensor) -> dict[str, Tensor]:
        return {
            "number": x // 0.7,
            "tensor": torch.floor_divide(x, i * 0.9),
            "integer by number": i // 3,
            "by a negative one": i // -2,
            "by tensors": i[:, None] // (i + 2),
            "mixed": i[:, None] // x.T[:, :1],
            "32 bits": i.int() // 4 + small // 3,
            "in place": (i * 3).floor_divide_(4),
            "size": x.reshape(x.shape[0] // 2, -1),
        }


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_floor_division_rounds_down(opset: int, tmp_path) -> None:
    i = torch.tensor([-7, -6, 5, 6, -1])
    args = (torch.randn(4, 5) * 3, i, i.to(torch.int8))
    others = (torch.randn(8, 5) * 3, i + 20, i.to(torch.int8) + 9)
    check_export(FloorDivisions(), tmp_path, opset, args, others, dynamic_shapes={"x": {0: "n"}})


class Permutations(nn.Module):
    """Dimensions counted from the end, which ONNX does not do."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "permute": x.permute(0, -1, 1, 2),
            "all negative": x.permute(-2, -4, -1, -3),
            "none": x.permute(0, 1, -2, -1) + 1,
            "movedim": x.movedim(-1, 1),
            "several": torch.movedim(x, (0, -1), (-1, -2)),
            "not in order": torch.moveaxis(x, (0, 1, 3), (1, -1, 0)),
        }


@pytest.mark.parametrize("opset", [9, 11, 17, 18])
def test_dimensions_from_the_end(opset: int, tmp_path) -> None:
    args = (torch.randn(2, 3, 4, 5),)
    check_export(Permutations(), tmp_path, opset, args, (torch.randn(4, 3, 4, 5),), dynamic_axes={"x": {0: "n"}})


class Concatenations(nn.Module):
    """Along dimensions from the end, before nodes that ask for ranks; Concat has none before opset 11."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.jit.script(ScriptedConcatenation())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        made = {
            "cat": torch.cat((x, 2 * x), -2),
            "deep": torch.cat((torch.cat((x, x), -1), torch.cat((x, x), -1)), -3),
            "first is empty": torch.cat((torch.zeros(0), x, x), -1),
            "stack": torch.stack((x, 2 * x), -1).flatten(2),
            "stack before": torch.stack((x, 2 * x), -4).flatten(0, 1),
            "roll": x.roll(1, -1),
            "roll twice": x.roll((1, -1), (-1, -2)),
            "cross": torch.linalg.cross(x, 2 * x + 1, dim=-2),
            "scripted": self.inner(x),
        }
        return {name: torch.einsum("bij,bkj->bik", y, y) for name, y in made.items()}


class ScriptedConcatenation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, torch.stack([x, x], -2).flatten(1, 2)], -2)


@pytest.mark.parametrize("opset", [9, 10, 11])
def test_concatenation_along_dimensions_from_the_end(opset: int, tmp_path) -> None:
    args = (torch.randn(2, 3, 4),)
    other = (torch.randn(4, 3, 4),)
    report = check_export(Concatenations(), tmp_path, opset, args, other, dynamic_axes={"x": {0: "n"}})
    if opset < 11:
        nodes = onnx.load(report.path).graph.node
        axes = [helper.get_attribute_value(a) for n in nodes if n.op_type == "Concat" for a in n.attribute]
        assert len(axes) > 8
        assert min(axes) >= 0


class Expansions(nn.Module):
    """Queries for every image of a batch, and whatever else may be told or left as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("query", torch.randn(3, 4))
        self.inner = torch.jit.script(ScriptedExpansion())

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one = x[:, :1]
        return {
            "queries": self.query[None].expand(x.shape[0], -1, -1),
            "halves": self.query[None].expand(x.shape[0], -1, -1).chunk(2, dim=-1)[1] + 1,
            "static": self.query[:, None].expand(3, 2, -1),
            "first": x[:1].expand(5, -1, -1),
            "computed": one.expand(-1, x.shape[0] + x.shape[1], -1) + 1,
            "like": one.expand_as(x) + 1,
            "shape": x.sum().expand(x.shape[:2]),
            "scalar": x.sum().expand([]),
            "mask": (one > 0).expand(-1, 4, -1),
            "broadcast": torch.broadcast_to(x[:1], x.shape),
            "scripted": self.inner(x),
        }


class ScriptedExpansion(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x[:1].expand(x.size(0), -1, 2) * x[:, :1].expand(x.shape)


@pytest.mark.parametrize("opset", [9, 11, 13, 17])
def test_expand(opset: int, tmp_path) -> None:
    report = check_export(
        Expansions(), tmp_path, opset, (torch.randn(2, 3, 2),), (torch.randn(4, 5, 2),), dynamic_axes={"x": [0, 1]}
    )
    assert report.outputs["queries"].endswith(", 3, 4]")
    assert report.outputs["static"] == "float32[3, 2, 4]"
    assert report.outputs["mask"].endswith(", 4, 2]")
    assert report.nodes["Where"] == 2  # of sizes passed on as they are
    if opset == 17:
        assert report.outputs["queries"] == "float32[x_dim_0, 3, 4]"


class Indexing(nn.Module):
    """Several indices at once, some of them counted from the end."""

    def forward(self, x: Tensor, i: Tensor, j: Tensor) -> dict[str, Tensor]:
        best = x.mean((2, 3)).topk(2).indices
        return {
            "neighbours": x[:, i, j],
            "apart": x[i, :, j],
            "constants": x[[0, 1], [-1, 1]],
            "three": x[i, j, i, j - 1],
            "best": x[torch.arange(x.shape[0])[:, None], best],
        }


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 17, 18])
def test_indices_from_the_end(opset: int, tmp_path) -> None:
    args = (torch.randn(2, 3, 4, 5), torch.tensor([0, 1, 1]), torch.tensor([2, -1, -3]))
    others = (torch.randn(3, 3, 4, 5), torch.tensor([-1, 1, -2]), torch.tensor([-3, 2, 0]))
    check_export(Indexing(), tmp_path, opset, args, others, dynamic_axes={"x": {0: "n"}})


@pytest.mark.parametrize("opset", [11, 17])
def test_what_is_never_negative_is_taken_as_it_is(opset: int, tmp_path) -> None:
    class Best(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            best = x.mean(2).topk(2).indices
            return x[torch.arange(x.shape[0])[:, None], best], x[x.amax((1, 2)) > -9, best[0, :1]]

    report = svexport.export(
        Best(), torch.randn(2, 3, 4), tmp_path / "m.onnx", opset=opset, dynamic_axes={"x": {0: "n"}}
    )
    assert report.verified
    assert "Less" not in report.nodes


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_convolutions_that_keep_the_size(opset: int, tmp_path) -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, (3, 2), padding="same", dilation=(2, 3)),
        nn.Conv2d(4, 4, 4, padding="same", groups=2),
        nn.Flatten(2),
        nn.Conv1d(4, 2, 6, padding="same"),
    )
    assert svexport.export(model, torch.randn(2, 3, 6, 7), tmp_path / "m.onnx", opset=opset).verified


class Clamps(nn.Module):
    def forward(self, x: Tensor, i: Tensor) -> dict[str, Tensor]:
        return {
            "count": x / (x > 0).sum(1).clamp(min=1)[:, None],
            "both": i.clamp(-1, 3),
            "most": i.int().clamp(max=2),
            "tensors": i.clamp(min=i[:, 1:]),
            "floats": x.clamp(-0.3, 0.4),
            "made floats": i.clamp(min=0.5),
        }


@pytest.mark.core
@pytest.mark.parametrize("opset", [9, 11, 12, 17, 18])
def test_clamped_integers_of_dynamic_sizes(opset: int, tmp_path) -> None:
    args = (torch.randn(3, 4), torch.tensor([[2**40, -(2**40)], [1, 7]]))
    others = (torch.randn(4, 4), torch.tensor([[5, -5], [-1, 2], [0, 2**62 + 1]]))
    check_export(Clamps(), tmp_path, opset, args, others, dynamic_axes={"x": {0: "n"}, "i": {0: "m"}})


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18])
def test_constants_that_are_shared_stay_as_they_are(opset: int, tmp_path) -> None:
    """As rotary embeddings have them: the same -1 for repeat_interleave and for what follows."""

    class Rotary(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [x.repeat_interleave(2, -1), x.unsqueeze(-1), torch.stack([x, -x], -1).flatten(-2)]

    check_export(Rotary(), tmp_path, opset, (torch.randn(2, 3, 4),))


@pytest.mark.parametrize("opset", [11, 13, 17, 18, 23])
def test_outputs_that_are_reduced_half_precision(opset: int, tmp_path) -> None:
    """The exporter for opset 18 and later computes them in float32, and left them there."""

    class Reduced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(5, 7)

        def forward(self, x: Tensor) -> list[Tensor]:
            x = self.layer(x)
            return [x.sum(1), x.amax(1) * 2, x.float().sum(1), x.cumsum(1), x.amax(1), x.prod(1)]

    path = tmp_path / "reduced.onnx"
    svexport.export(Reduced(), torch.randn(3, 4, 5), path, opset=opset, dtype=torch.float16)
    kinds = [output.type.tensor_type.elem_type for output in onnx.load(path).graph.output]
    float16, float32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    assert kinds == [float16, float16, float32, float16, float16, float16]


@pytest.mark.parametrize("opset", [9, 11, 17, 18])
def test_pooling_without_a_batch(opset: int, tmp_path) -> None:
    class Pools(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {
                "average": F.avg_pool2d(x, 3, 2, 1),
                "largest": F.max_pool2d(x, 2),
                "adaptive": F.adaptive_avg_pool2d(x, 2),
                "line": F.avg_pool1d(x[0], 2),
                "volume": F.avg_pool3d(x[None], 2),
                "shuffled": F.pixel_shuffle(x, 2),
                "of a batch": F.avg_pool2d(x[None], 2),
            }

    check_export(Pools(), tmp_path, opset, (torch.randn(4, 6, 8),))


@pytest.mark.parametrize("opset", [11, 18])
def test_products_of_many_dynamic_tensors(opset: int, tmp_path) -> None:
    """Which torch.einsum sorts by sizes where opt_einsum is installed."""

    class Chain(nn.Module):
        def forward(self, a: Tensor, b: Tensor, c: Tensor) -> list[Tensor]:
            return [torch.einsum("ij,jk,kl->il", a, b, c)]

    args = (torch.randn(2, 3), torch.randn(3, 4), torch.randn(4, 5))
    enabled = torch.backends.opt_einsum.enabled
    axes = {"a": {0: "n"}, "b": {1: "k"}, "c": {0: "k"}}
    report = check_export(Chain(), tmp_path, opset, args, dynamic_axes=axes, plugins=["einsum"])
    assert torch.backends.opt_einsum.enabled == enabled
    assert report.nodes == {"SvEinsum": 1}
    assert not report.notes


class KernelsOfDynamicSizes(nn.Module):
    """As of a tracker: what is looked for is an input, and of any size."""

    def forward(self, x: Tensor, k: Tensor, bias: Tensor) -> dict[str, Tensor]:
        one = F.conv2d(x.reshape(1, -1, *x.shape[2:]), k.reshape(-1, 1, *k.shape[2:]), groups=12)
        return {
            "correlation": one.reshape(3, 4, *one.shape[2:]),
            "conv": F.conv2d(x, k, stride=2, padding=1),
            "transposed": F.conv_transpose2d(x, k.transpose(0, 1), bias, stride=2, output_padding=1),
        }


@pytest.mark.parametrize("opset", OPSETS)
def test_kernels_of_dynamic_sizes(opset: int, tmp_path) -> None:
    example = torch.randn(3, 4, 11, 13), torch.randn(3, 4, 2, 3), torch.randn(3)
    axes = {"k": {2: "rows", 3: "columns"}}
    check_export(KernelsOfDynamicSizes(), tmp_path, opset, example, dynamic_shapes=axes)


class ConvolutionOfDynamicGroups(nn.Module):
    def forward(self, x: Tensor, kernels: Tensor) -> Tensor:
        n = kernels.shape[0]
        return F.conv2d(
            x.expand(n, -1, -1, -1).reshape(1, -1, *x.shape[2:]), kernels.flatten(0, 1)[..., None, None], groups=n
        )


@pytest.mark.core
@pytest.mark.parametrize(
    ("opset", "reason"),
    [
        (11, "or the groups of a convolution"),
        (18, "such as groups=" if BOTH_EXPORTERS else "or the groups of a convolution"),
    ],
)
def test_groups_are_numbers(opset: int, reason: str, tmp_path) -> None:
    example, axes = (torch.randn(1, 4, 5, 6), torch.randn(3, 2, 4)), {"kernels": {0: "n"}}
    with pytest.raises(svexport.SvexportError, match=reason):
        svexport.export(ConvolutionOfDynamicGroups(), example, tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)


class IntegersAndNumbers(nn.Module):
    """Centres of cells, say, as detectors make them: of integers that a trace knows, and numbers."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        columns, rows = torch.arange(x.shape[1], device=x.device), torch.arange(x.shape[0])
        centres = torch.stack(torch.meshgrid(rows + 0.5, columns + 0.5, indexing="ij"), -1)
        return {
            "centres": centres,
            "added": columns + 0.5 + x,
            "scaled": columns * 0.1,
            "from a number": 1.5 - columns,
            "rest": columns % 1.5 + x,
            "alpha": torch.add(x, columns, alpha=0.5),
            "largest": torch.maximum(columns * 0.5, x),
            "spaced": torch.linspace(0.5, 5.5, 6) + x,
            "counted": (x > 0).sum() * 0.5 + x,
            "smallest": torch.minimum(columns, x),
            "mask": (x > 0) * 0.5,
            "bytes": (x * 9).to(torch.uint8) * 0.5,
            "integers": columns * 3 - 1,
            "doubles": columns.double() + 0.5,
            "outer": torch.outer(rows, x[0]).cos(),
            "floors": columns // 2.5 + x,
            "floors of negative ones": (columns - 3).floor_divide(0.7) + x,
        }


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("opset", OPSETS)
def test_integers_and_numbers(opset: int, dynamic: bool, tmp_path) -> None:
    axes = {"x": {0: "rows"}} if dynamic else None
    check_export(IntegersAndNumbers(), tmp_path, opset, (torch.rand(5, 6),), dynamic_shapes=axes)


class Finite(nn.Module):
    """What tells numbers from infinities, as the cameras of DETR3D are put together."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "isinf": torch.isinf(x),
            "isfinite": x.isfinite(),
            "default": torch.nan_to_num(x),
            "numbers": x.nan_to_num(1.5, 2.5, -3.5),
            "infinities": x.nan_to_num(0.0, torch.inf, -torch.inf),
            "turned": x.nan_to_num(nan=7.0, posinf=-torch.inf, neginf=torch.inf),
            "scalar": x[0, 0].nan_to_num(),
        }


@pytest.mark.parametrize("opset", [9, 11, 17, 18])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_infinities(dtype: torch.dtype, opset: int, tmp_path) -> None:
    special = torch.tensor([torch.nan, torch.inf, -torch.inf, torch.finfo(dtype).max, torch.finfo(dtype).min, 0.0])
    x = torch.cat([special.to(dtype), torch.randn(6).to(dtype)]).reshape(3, 4)
    report = check_export(Finite(), tmp_path, opset, (x,), (x.flip(0),))
    if opset < 18 and dtype == torch.float32:  # TensorRT 8.4 has no IsInf, and no DOUBLE in any version
        assert not {"IsInf", "Cast"} & set(report.nodes)
        assert svexport.check(report.path, "8.4").ok


class Twins(nn.Module):
    """Convolutions with equal biases, of which the exporter keeps one, and gives it other names by Identity."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(3, 3, 1) for _ in range(3))
        for conv in self.convs:
            nn.init.ones_(conv.bias)
        self.table = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for conv in self.convs:
            x = conv(x)
        return {"x": x, "table": self.table}


@pytest.mark.parametrize("opset", [9, 11, 17, 18])
def test_equal_constants_stay_initializers(opset: int, tmp_path) -> None:
    report = check_export(Twins(), tmp_path, opset, (torch.randn(1, 3, 4, 4),))
    model = onnx.load(report.path)
    held = {tensor.name for tensor in model.graph.initializer}
    convs = [node for node in model.graph.node if node.op_type == "Conv"]
    assert len(convs) == 3
    assert {node.input[2] for node in convs} <= held
    assert svexport.check(model, "10.15" if opset == 18 else "8.4").ok


class Clamped(nn.Module):
    """What the optimizer of onnxscript 0.7 breaks, beside what TensorRT does not take as it is traced."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 1, bias=False)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        a, b = self.conv(x).split(2, dim=1)
        c, d, e = x.split([1, 1, 2], dim=2)
        return {"one": a.clamp(0, 1) + b, "other": a.clamp(0, 1) * 2, "parts": c * d + e}


@pytest.mark.core
@pytest.mark.parametrize("opset", [18, 20])
def test_graphs_that_the_optimizer_breaks(opset: int, tmp_path) -> None:
    report = check_export(Clamped(), tmp_path, opset, (torch.randn(1, 3, 4, 4),), target="10.15")
    assert report.check is not None
    assert report.check.ok, report.check
    assert not {"Expand", "CastLike", "SequenceAt"} & set(report.nodes)


class Bounded(nn.Module):
    """Constants that the optimizer makes of one name: the bounds of one tensor. Of two kinds of numbers, too."""

    def forward(self, x: Tensor) -> list[Tensor]:
        return [x.clamp(0, 1) + 1, x.clamp(0, 1) * 2, x.clamp(-1, 0.5), (x * 9).int().clamp(-2.5, 4)]


@pytest.mark.parametrize("opset", [11, 18])
def test_bounds_of_one_tensor(opset: int, tmp_path) -> None:
    report = check_export(Bounded(), tmp_path, opset, (torch.randn(4, 3, 5),))
    assert report.nodes.get("Clip", 0) == 3
    assert not {"Max", "Min"} & set(report.nodes)
    assert not report.notes


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_sums_of_masks(opset: int, tmp_path) -> None:
    class Places(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            return [(x > 0).cumsum(1), (x > 0).cumsum(0) * 0.1, (x > 0).cumsum(1, dtype=torch.float32)]

    check_export(Places(), tmp_path, opset, (torch.randn(5, 6),))


class Extremes(nn.Module):
    """LoFTR takes the first match of a row as ``mask.max(dim=2)``."""

    def forward(self, x: Tensor) -> list[Tensor]:
        mask, other = x > 0.5, x < -0.5
        values, places = mask.max(dim=-1)
        least = mask.min(0, keepdim=True)
        whole = [mask.amax((0, 1)), torch.amin(mask, 1), mask.max(), torch.min(mask)]
        return [values, places, *least, *whole, torch.maximum(mask, other), torch.min(mask, other), x.max(1).values]


@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20])
def test_extremes_of_masks(opset: int, tmp_path) -> None:
    check_export(Extremes(), tmp_path, opset, (torch.randn(3, 7),), dynamic_axes={"x": {0: "rows"}})


@pytest.mark.parametrize("opset", [9, 11, 17, 18])
def test_unsorted_topk_is_sorted(opset: int, tmp_path) -> None:
    """Which order it has in torch depends on the device; TensorRT has no other than sorted."""

    class Unsorted(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            values, places = x.flatten(1).topk(7, sorted=False)
            return values, places, *torch.topk(x, 3, 2, True, False)

    model, x = Unsorted(), torch.randn(2, 6, 10)
    report = svexport.export(model, x, tmp_path / "model.onnx", opset=opset)
    torch.testing.assert_close(svexport.load(report.path)(x), (*x.flatten(1).topk(7), *x.topk(3)))
    assert [note for note in report.notes if "sorted order" in note] == [
        "topk(sorted=False) is compared in sorted order, which files have: torch's own may be any"
    ]
    nodes = [node for node in onnx.load(str(report.path)).graph.node if node.op_type == "TopK"]
    assert len(nodes) == 2
    assert not any(attribute.name == "sorted" for node in nodes for attribute in node.attribute)
    comparison = svexport.compare(model, report.path, (x,))
    assert comparison.ok
    assert any("sorted" in note for note in comparison.notes)


def test_places_in_what_is_not_sorted(tmp_path) -> None:
    """As inputs that verification draws are not; torch looks at some of them, files at all."""

    class Places(nn.Module):
        def forward(self, ends: Tensor, x: Tensor) -> Tensor:
            return torch.searchsorted(ends, x, right=True)

    ends, x = torch.randn(9).sort().values, torch.randn(5)
    report = svexport.export(Places(), (ends, x), tmp_path / "model.onnx", opset=18)
    assert report.verified
    assert [note for note in report.notes if "sorted" in note] == [
        "searchsorted is compared in sorted order where what it searches in is not sorted"
    ]
    torch.testing.assert_close(svexport.load(report.path)(ends, x), torch.searchsorted(ends, x, right=True))


def test_distances_are_differences(tmp_path) -> None:
    """Torch's own are 1e-3 for 0 where there are more than 25 rows."""

    class Distances(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cdist(x, x)

    x = torch.randn(31, 3)
    report = svexport.export(Distances(), x, tmp_path / "model.onnx", opset=18, dynamic_shapes={"x": {0: "rows"}})
    assert report.verified
    assert any("cdist is compared by differences" in note for note in report.notes)
    torch.testing.assert_close(
        svexport.load(report.path)(x).double(), (x.double()[:, None] - x.double()).norm(dim=-1), rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("opset", [9, 11])
def test_integers_of_a_least_or_greatest_size(opset: int, dynamic: bool, tmp_path) -> None:
    class Bounds(nn.Module):
        def forward(self, i: Tensor) -> list[Tensor]:
            return [i.clamp_min(2), i.clamp_max(3), i.clamp_min(i.shape[1] // 2), i.clamp_max(i.shape[0])]

    axes = {"i": {0: "rows", 1: "columns"}} if dynamic else None
    check_export(Bounds(), tmp_path, opset, (torch.randint(-9, 9, (4, 6)),), dynamic_axes=axes)


SIZES = {
    "coordinates_of_places": lambda x, i: (torch.stack([i % x.shape[2], i // x.shape[2]]), i.remainder(x.shape[1] * 8)),
    "remainder_of_floats": lambda x, i: (x % x.shape[1], torch.remainder(x, x.shape[2] / 4)),
    "powers": lambda x, i: (x.abs() + 0.1) ** (x.shape[2] / 8),
    "power_by_name": lambda x, i: torch.pow(x.abs() + 0.1, exponent=x.shape[2] / 8),
    "chunks_by_name": lambda x, i: torch.chunk(input=torch.cat([x, x * 2], 1), chunks=2, dim=1),
    "reference_points": lambda x, i: torch.linspace(0.5, x.shape[1] - 0.5, x.shape[1])[:, None] / x.shape[1] + x,
    "linspace_of_a_size": lambda x, i: torch.linspace(-1, 1, x.shape[2], dtype=x.dtype) * x,
    "rolled_by_half": lambda x, i: torch.roll(x, (x.shape[2] // 2, -(x.shape[1] // 3) - 1), (2, 1)),
    "rolled_by_more": lambda x, i: x.roll(2 * x.shape[2] + 1, 1),
    "linspace_to_a_size": lambda x, i: torch.linspace(0, x.shape[2] - 1, 5),
    "padding_to_a_multiple": lambda x, i: F.pad(x, (0, -(-x.shape[2] // 4) * 4 - x.shape[2], 0, -x.shape[1] % 4)),
    "halves_of_two_batches": lambda x, i: torch.cat([x, x * 2], 1).chunk(2, dim=1),
    "split_in_two": lambda x, i: x.split([x.shape[2] // 2, x.shape[2] - x.shape[2] // 2], -1),
}


@pytest.mark.parametrize("opset", [11, 17, 18, 20])
@pytest.mark.parametrize("name", SIZES)
def test_numbers_made_of_dynamic_sizes(name: str, opset: int, tmp_path) -> None:
    class Sizes(nn.Module):
        def forward(self, x: Tensor, i: Tensor) -> tuple[Tensor, ...]:
            result = SIZES[name](x, i)
            return (result,) if isinstance(result, Tensor) else tuple(result)

    axes = {0: "batch", 1: "height", 2: "width"}
    args, one_row = ((torch.randn(size), torch.randint(-9, 90, size)) for size in ((2, 5, 10), (3, 1, 12)))
    report = check_export(Sizes(), tmp_path, opset, args, one_row, dynamic_axes={"x": axes, "i": axes})
    assert not {"SequenceAt", "SplitToSequence"} & set(report.nodes)


class NearestExact(nn.Module):
    """Also to sizes at which a place falls between two, or Resize rounds otherwise."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        def resized(x: Tensor, **options: object) -> Tensor:
            return F.interpolate(x, mode="nearest-exact", **options)  # type: ignore[arg-type]

        line, volume = x.flatten(1, 2), x[:, None]
        return {
            **{f"to {size}": resized(x, size=size) for size in [(41, 1), (47, 5), (4, 23), (55, 28), (2, 7), (3, 9)]},
            **{f"by {scale}": resized(x, scale_factor=scale) for scale in (2, 0.5, 1.1, 1.3, (0.7, 3), 1 / 3, 0.3)},
            "computed": resized(x, scale_factor=0.7, recompute_scale_factor=True),
            "line": resized(line, size=61),
            "line by": resized(line, scale_factor=1.6),
            "volume": resized(volume, size=(5, 3, 23)),
            "volume by": resized(volume, scale_factor=(2, 0.8, 1.1)),
        }


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20])
def test_nearest_exact(opset: int, batches: bool, tmp_path) -> None:
    axes = {"x": {0: "n"}} if batches else None
    args, other = (torch.randn(2, 3, 4, 14),), (torch.randn(3 if batches else 2, 3, 4, 14),)
    check_export(NearestExact(), tmp_path, opset, args, other, dynamic_shapes=axes, tolerance=0)


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_whole_multiples_of_any_size(opset: int, tmp_path) -> None:
    model = nn.Sequential(nn.Upsample(scale_factor=3, mode="nearest-exact"), nn.Identity())
    axes = {"input": {0: "n", 2: "h", 3: "w"}}
    report = svexport.export(model, torch.randn(2, 3, 4, 5), tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    assert "Gather" not in report.nodes, report.nodes
    x = torch.randn(3, 3, 7, 2)
    torch.testing.assert_close(svexport.load(report.path)(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("opset", [11, 13, 18])
def test_nearest_to_any_size(opset: int, tmp_path) -> None:
    """Of two inputs' sizes: Resize takes the pixel beside for 14 and 2, 20 and 12, 21 and 3."""

    class As(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.interpolate(x, size=y.shape[2:])

    axes = {"x": {2: "h", 3: "w"}, "y": {2: "height", 3: "width"}}
    args = torch.randn(1, 2, 5, 7), torch.randn(1, 1, 9, 12)
    report = svexport.export(As(), args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=axes)
    engine, model = svexport.load(report.path), As()
    pairs = [(14, 2), (20, 12), (21, 3), (14, 46), (1, 5), (5, 1), (3, 3)]
    pairs += [tuple(pair) for pair in torch.randint(1, 70, (60, 2)).tolist()]
    for old, new in pairs:
        x, y = torch.randn(1, 2, 3, old), torch.zeros(1, 1, 6, new)
        torch.testing.assert_close(engine(x, y), model(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("opset", [11, 18])
def test_nearest_to_a_size(opset: int, tmp_path) -> None:
    """Resize stays where it is right."""

    class To(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            line = x.flatten(2)
            return {
                "twice": F.interpolate(x, size=(28, 40)),
                "less": F.interpolate(x, (2, 12)),
                "line": F.interpolate(line, size=line.shape[2] // 7),
                "upsampled": nn.Upsample(size=(7, 3))(x),
            }

    report = check_export(To(), tmp_path, opset, (torch.randn(2, 3, 14, 20),), tolerance=0)
    assert report.nodes["Resize"] >= 1
    assert report.nodes["Gather"] >= 2
    assert not [note for note in report.notes if "TorchScript" in note]


class Unpools(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        values, places = F.max_pool2d(x, 2, return_indices=True)
        rows, row_places = F.max_pool1d(x[0], 3, return_indices=True)
        return {
            "of a size": F.max_unpool2d(values * 2, places, 2, output_size=x.shape),
            "of an image": F.max_unpool2d(values[0], places[0], 2, output_size=(7, 9)),
            "overlapping": F.max_unpool2d(*F.max_pool2d(x, 3, 2, 1, return_indices=True), 3, 2, 1),
            "even": F.max_unpool2d(*F.max_pool2d(x[:, :, :6, :8], 2, return_indices=True), 2),
            "line": F.max_unpool1d(rows, row_places, 3, output_size=(9,)),
            "volume": F.max_unpool3d(*F.max_pool3d(x[:, :2, :6, :8], 2, return_indices=True), 2),
        }


@pytest.mark.parametrize("batches", [False, True])
@pytest.mark.parametrize("opset", [9, 11, 13, 17, 18, 20])
def test_max_unpool(opset: int, batches: bool, tmp_path) -> None:
    axes = {"x": {0: "n"}} if batches else None
    args, other = (torch.randn(2, 4, 7, 9),), (torch.randn(3 if batches else 2, 4, 7, 9),)
    own = F._unpool_output_size
    check_export(Unpools(), tmp_path, opset, args, other, dynamic_shapes=axes, tolerance=0)
    assert F._unpool_output_size is own


@pytest.mark.parametrize("opset", [11, 18, 20])
def test_rrelu(opset: int, tmp_path) -> None:
    class Slopes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.RReLU(0.1, 0.7)

        def forward(self, x: Tensor) -> list[Tensor]:
            return [self.layer(x), F.rrelu(x), torch.rrelu(x + 1, 0.2)]

    check_export(Slopes().eval(), tmp_path, opset, (torch.randn(3, 5),), (torch.randn(3, 5),))
