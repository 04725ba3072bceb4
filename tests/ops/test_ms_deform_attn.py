from __future__ import annotations

import importlib
import itertools
import math
import random
from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import svexport
from svexport.ops import MultiScaleDeformableAttention, ms_deform_attn, quantize
from svexport.ops.ms_deform_attn import OP, reference
from tests.support import OPSETS, run_model, run_op


def loops(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    """The published formula, sample by sample."""
    n, _, m, d = value.shape
    queries, levels, points = (locations.shape[i] for i in (1, 3, 4))
    output = []
    for image, query, head in itertools.product(range(n), range(queries), range(m)):
        total = value.new_zeros(d)
        for level, point in itertools.product(range(levels), range(points)):
            height, width = shapes[level].tolist()
            location = locations[image, query, head, level, point]
            x, y = location[0] * width - 0.5, location[1] * height - 0.5
            left, top = math.floor(x.detach()), math.floor(y.detach())
            for column, row in itertools.product((left, left + 1), (top, top + 1)):
                if 0 <= column < width and 0 <= row < height:
                    pixel = value[image, starts[level] + row * width + column, head]
                    factor = (1 - (x - column).abs()) * (1 - (y - row).abs())
                    total = total + weights[image, query, head, level, point] * factor * pixel
        output.append(total)
    return torch.stack(output).view(n, queries, m * d)


def by_grid_sample(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
    n, queries, m, _, points, _ = locations.shape
    output = value.new_zeros(n * m, value.shape[3], queries)
    for level, ((height, width), start) in enumerate(zip(shapes.tolist(), starts.tolist(), strict=True)):
        image = value[:, start : start + height * width].permute(0, 2, 3, 1).reshape(n * m, -1, height, width)
        grid = 2 * locations[:, :, :, level].transpose(1, 2).reshape(n * m, queries, points, 2) - 1
        sampled = F.grid_sample(image, grid, padding_mode="zeros", align_corners=False)
        output = output + (sampled * weights[:, :, :, level].transpose(1, 2).reshape(n * m, 1, queries, points)).sum(-1)
    return output.view(n, -1, queries).transpose(1, 2)


def case(
    n: int = 2,
    queries: int = 3,
    m: int = 2,
    d: int = 3,
    points: int = 2,
    levels: tuple = ((3, 5), (2, 1)),
    dtype: torch.dtype = torch.float32,
) -> list[Tensor]:
    """Arguments with locations in and around the image."""
    shapes = torch.tensor(levels)
    sizes = shapes.prod(1)
    value = torch.randn(n, int(sizes.sum()), m, d, dtype=dtype)
    locations = torch.rand(n, queries, m, len(levels), points, 2, dtype=dtype) * 1.6 - 0.3
    weights = torch.randn(n, queries, m, len(levels), points, dtype=dtype)
    return [value, shapes, sizes.cumsum(0) - sizes, locations, weights]


SHAPES = [
    {"n": 1, "queries": 1, "m": 1, "d": 1, "points": 1, "levels": ((1, 1),)},
    {"n": 3, "queries": 2, "m": 5, "d": 7, "points": 3, "levels": ((1, 7), (5, 1), (2, 3))},
    {"n": 1, "queries": 11, "m": 2, "d": 2, "points": 1, "levels": ((13, 2),)},
]


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_is_the_published_formula(dtype: torch.dtype, tolerance: float) -> None:
    value, shapes, starts, locations, weights = case(dtype=dtype)
    inputs = [t.requires_grad_() for t in (value, locations, weights)]
    expected = loops(value, shapes, starts, locations, weights)
    weight = torch.randn_like(expected)
    for function in (ms_deform_attn, lambda *x: reference(*x, 1.0)):
        actual = function(value, shapes, starts, locations, weights)
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
        for a, e in zip(
            torch.autograd.grad((actual * weight).sum(), inputs),
            torch.autograd.grad((expected * weight).sum(), inputs, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(a, e, rtol=tolerance, atol=10 * tolerance)


@pytest.mark.parametrize("indices", [1, 50, 1000])
def test_in_pieces(indices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of few indices each: of 2 levels, 2 points and 4 pixels there are 16 a row, of which there are 12."""
    monkeypatch.setattr(importlib.import_module("svexport.ops.ms_deform_attn"), "_MOST_INDICES", indices)
    value, shapes, starts, locations, weights = case(dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (value, locations, weights)]
    found = []
    for function in (ms_deform_attn, by_grid_sample):
        output = function(value, shapes, starts, locations, weights)
        found.append([output, *torch.autograd.grad((output * torch.linspace(-1, 2, output.shape[-1])).sum(), inputs)])
    for actual, expected in zip(*found, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("sizes", SHAPES)
def test_is_grid_sample_on_every_level(sizes: dict) -> None:
    args = case(**sizes, dtype=torch.float64)
    torch.testing.assert_close(ms_deform_attn(*args), by_grid_sample(*args), rtol=1e-12, atol=1e-12)


def test_levels_may_lie_in_any_order() -> None:
    value, shapes, _, locations, weights = case(dtype=torch.float64)
    args = [value, shapes, torch.tensor([2, 0]), locations, weights]
    torch.testing.assert_close(ms_deform_attn(*args), by_grid_sample(*args), rtol=1e-12, atol=1e-12)
    expected = by_grid_sample(*args).float()
    args = [t.float() if t.is_floating_point() else t for t in args]
    for opset in OPSETS:
        torch.testing.assert_close(run_op(OP, (*args, 1.0), opset)[0], expected)


def test_second_derivatives() -> None:
    value, shapes, starts, locations, weights = case(n=1, queries=1, m=1, d=2, points=1, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in (value, locations, weights)]
    assert torch.autograd.gradgradcheck(lambda v, l, w: ms_deform_attn(v, shapes, starts, l, w), inputs)


def test_locations_stay_float32_beside_half_values() -> None:
    """Half would put a sample of a wide level up to a pixel off."""
    value, shapes, starts, locations, weights = case(levels=((3, 2000),), dtype=torch.float16)
    ramp = (torch.arange(6000) % 2000 % 7 / 7).half()  # changes from pixel to pixel
    value = ramp[None, :, None, None].expand(value.shape).contiguous()
    expected = by_grid_sample(value.double(), shapes, starts, locations.double(), weights.double())
    args = [value, shapes, starts, locations, weights]
    for actual in (ms_deform_attn(*args), reference(*args, 1.0), run_op(OP, (*args, 1.0), 11)[0]):
        assert actual.dtype == torch.float16
        torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3)
    # float32 locations are not rounded to the half of the values
    fine = locations.float() + torch.rand(locations.shape) / 4000
    expected = by_grid_sample(value.double(), shapes, starts, fine.double(), weights.double())
    actual = ms_deform_attn(value, shapes, starts, fine, weights)
    assert actual.dtype == torch.float16
    torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e30, -1e30, 3e9, -2.0])
def test_a_strange_location_reads_zero(strange: float) -> None:
    args = case(levels=((3, 5), (4, 4)))
    args[3][:, 0, ..., 0] = strange
    args[3][:, 1, :, 0, 0, 1] = strange
    clean = [t.clone() for t in args]
    clean[3][:, 0, ..., 0] = clean[3][:, 1, :, 0, 0, 1] = 0
    clean[4][:, 0] = clean[4][:, 1, :, 0, 0] = 0
    expected = ms_deform_attn(*clean)
    assert not expected[:, 0].any()
    bodies = [run_op(OP, (*args, 1.0), opset)[0] for opset in (9, 11, 20)]
    for actual in (ms_deform_attn(*args), reference(*args, 1.0), *bodies):
        torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("empty", [{"n": 0}, {"queries": 0}, {"points": 0}, {"d": 0}, {"m": 0}])
def test_empty(empty: dict) -> None:
    args = case(**empty)
    expected = torch.zeros(args[0].shape[0], args[3].shape[1], args[0].shape[2] * args[0].shape[3])
    for opset in OPSETS:
        for dynamic in (False, True) if empty.keys() <= {"n", "queries"} else (False,):
            torch.testing.assert_close(run_op(OP, (*args, 1.0), opset, dynamic=dynamic)[0], expected)
    for t in (args[0], args[3], args[4]):
        t.requires_grad_()
    output = ms_deform_attn(*args)
    torch.testing.assert_close(output, expected)
    output.sum().backward()


def test_no_levels() -> None:
    args = [t[:, :, :, :0] if t.dim() > 4 else t for t in case()]
    args[1:3] = args[1][:0], args[2][:0]
    for actual in (ms_deform_attn(*args), run_op(OP, (*args, 1.0), 11)[0]):
        torch.testing.assert_close(actual, torch.zeros(2, 3, 6))


def test_sizes_of_few_bits_do_not_overflow() -> None:
    value, shapes, starts, *rest = case(levels=((3, 200),))
    expected = ms_deform_attn(value, shapes, starts, *rest)
    torch.testing.assert_close(ms_deform_attn(value, shapes.to(torch.uint8), starts, *rest), expected)


def test_sizes_are_data() -> None:
    """Nothing reads them: not under fake tensors, nor under torch.compile, nor in an exported file."""
    args = case()
    with FakeTensorMode() as mode:
        assert ms_deform_attn(*map(mode.from_tensor, args)).shape == (2, 3, 6)
    compiled = torch.compile(ms_deform_attn, fullgraph=True, dynamic=True, backend="aot_eager")
    for levels in (((3, 5), (2, 1)), ((1, 7), (5, 2))):
        args = case(levels=levels, queries=len(levels[0]) + levels[0][0])
        torch.testing.assert_close(compiled(*args), ms_deform_attn(*args))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"value": torch.zeros(2, 17, 6)}, r"value \(2, 17, 6\)"),
        ({"value": torch.zeros(2, 0, 2, 3)}, "S > 0"),
        ({"value": torch.zeros(3, 17, 2, 3)}, r"value \(3, 17, 2, 3\)"),
        ({"value": torch.zeros(2, 17, 3, 3)}, r"value \(2, 17, 3, 3\)"),
        ({"value": torch.zeros(2, 16, 2, 3)}, r"value has 16 rows, which do not hold levels of \[\[3, 5\], \[2, 1\]\]"),
        ({"level_start_index": torch.tensor([0, 16])}, r"start at rows \[0, 16\]"),
        ({"level_start_index": torch.tensor([-1, 15])}, r"start at rows \[-1, 15\]"),
        ({"spatial_shapes": torch.tensor([[3, 5], [-2, 1]])}, r"levels of \[\[3, 5\], \[-2, 1\]\]"),
        ({"spatial_shapes": torch.ones(3, 2, dtype=torch.int64)}, r"spatial_shapes \(3, 2\)"),
        ({"level_start_index": torch.zeros(3, dtype=torch.int64)}, r"level_start_index \(3,\)"),
        ({"sampling_locations": torch.zeros(2, 3, 2, 2, 2, 3)}, r"sampling_locations \(2, 3, 2, 2, 2, 3\)"),
        ({"attention_weights": torch.zeros(2, 3, 2, 2, 1)}, r"attention_weights \(2, 3, 2, 2, 1\)"),
    ],
)
def test_errors(change: dict, match: str) -> None:
    names = ("value", "spatial_shapes", "level_start_index", "sampling_locations", "attention_weights")
    with pytest.raises(ValueError, match=match):
        ms_deform_attn(**dict(zip(names, case(), strict=True)) | change)


@pytest.mark.parametrize(("at", "dtype"), [(0, torch.int32), (1, torch.float32), (2, torch.float32)])
def test_wrong_dtypes(at: int, dtype: torch.dtype) -> None:
    args = list(case())
    args[at] = args[at].to(dtype)
    with pytest.raises(TypeError, match=f"value in floating point, .* in integers; got .*{dtype}"):
        ms_deform_attn(*args)


# ------------------------------------------------------------------ the module


def test_module_has_the_parameters_of_the_one_it_replaces() -> None:
    module = MultiScaleDeformableAttention(embed_dims=12, num_heads=3, num_levels=2, num_points=5, value_proj_ratio=0.5)
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == {
        "sampling_offsets.weight": (60, 12),
        "sampling_offsets.bias": (60,),
        "attention_weights.weight": (30, 12),
        "attention_weights.bias": (30,),
        "value_proj.weight": (6, 12),
        "value_proj.bias": (6,),
        "output_proj.weight": (12, 6),
        "output_proj.bias": (12,),
    }
    module = MultiScaleDeformableAttention(
        256, 8, 4, 4, 64, 0.1, False, norm_cfg={"type": "LN"}, init_cfg=None, value_proj_ratio=1.0
    )
    assert not module.batch_first
    assert module.dropout.p == 0.1
    with pytest.raises(ValueError, match="num_heads=5 and embed_dims=12"):
        MultiScaleDeformableAttention(embed_dims=12, num_heads=5)
    for zero in ("embed_dims", "num_heads", "num_levels", "num_points"):
        with pytest.raises(ValueError, match="of at least 1, got"):
            MultiScaleDeformableAttention(**{zero: 0})


def test_module_starts_with_every_head_looking_elsewhere() -> None:
    module = MultiScaleDeformableAttention(embed_dims=16, num_heads=8, num_levels=2, num_points=3)
    bias = module.sampling_offsets.bias.view(8, 2, 3, 2)
    directions = [(1, 0), (1, 1), (0, 1), (-1, 1), (-1, 0), (-1, -1), (0, -1), (1, -1)]
    for head, level, point in itertools.product(range(8), range(2), range(3)):
        expected = torch.tensor(directions[head]) * (point + 1.0)
        torch.testing.assert_close(bias[head, level, point], expected, rtol=0, atol=1e-5)
    for zero in (module.sampling_offsets.weight, module.attention_weights.weight, module.output_proj.bias):
        assert not zero.any()
    assert module.value_proj.weight.any()


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("box", [False, True])
def test_module_is_its_definition(batch_first: bool, box: bool) -> None:
    n, queries, channels, levels = 2, 5, 8, [(3, 4), (2, 2)]
    module = MultiScaleDeformableAttention(channels, 2, 2, 3, batch_first=batch_first).double().eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.5)
    shapes, starts = torch.tensor(levels), torch.tensor([0, 12])
    query, query_pos, identity = (torch.randn(n, queries, channels, dtype=torch.float64) for _ in range(3))
    value = torch.randn(n, 16, channels, dtype=torch.float64)
    points = torch.rand(n, queries, 2, 4 if box else 2, dtype=torch.float64)
    padding = torch.rand(n, 16) < 0.3

    where = query + query_pos
    offsets = module.sampling_offsets(where).view(n, queries, 2, 2, 3, 2)
    sizes = torch.tensor([[4, 3], [2, 2]], dtype=torch.float64)  # width, height
    locations = torch.empty_like(offsets)
    for level in range(2):
        centre = points[:, :, level][:, :, None, None]
        scale = centre[..., 2:] / 2 / 3 if box else 1 / sizes[level]
        locations[:, :, :, level] = centre[..., :2] + offsets[:, :, :, level] * scale
    weights = module.attention_weights(where).view(n, queries, 2, 6).softmax(-1).view(n, queries, 2, 2, 3)
    projected = module.value_proj(value)
    projected[padding] = 0
    mixed = by_grid_sample(projected.view(n, 16, 2, 4), shapes, starts, locations, weights)

    def order(t: Tensor) -> Tensor:
        return t if batch_first else t.transpose(0, 1)

    def call(**changes: Tensor | None) -> Tensor:
        arguments = {
            "query": order(query),
            "key": None,
            "value": order(value),
            "identity": order(identity),
            "query_pos": order(query_pos),
            "key_padding_mask": padding,
            "reference_points": points,
            "spatial_shapes": shapes,
            "level_start_index": starts,
            "attn_mask": None,
        }
        return module(**arguments | changes)

    expected = module.output_proj(mixed)
    torch.testing.assert_close(call(), order(expected + identity))
    torch.testing.assert_close(call(identity=None), order(expected + query))
    torch.testing.assert_close(call(query=order(where), query_pos=None), order(expected + identity))


def test_module_attends_to_the_query_itself() -> None:
    module = MultiScaleDeformableAttention(8, 2, 1, 2, batch_first=True).eval()
    query, points = torch.randn(1, 6, 8), torch.rand(1, 6, 1, 2)
    sizes = {"spatial_shapes": torch.tensor([[2, 3]]), "level_start_index": torch.tensor([0])}
    torch.testing.assert_close(
        module(query, reference_points=points, **sizes), module(query, value=query, reference_points=points, **sizes)
    )
    with pytest.raises(ValueError, match="reference_points, spatial_shapes and level_start_index"):
        module(query, reference_points=points)
    with pytest.raises(ValueError, match=r"\(N, Lq, L, 4\), got \(1, 6, 1, 3\)"):
        module(query, reference_points=torch.rand(1, 6, 1, 3), **sizes)
    with pytest.raises(ValueError, match=r"\(N, Lq, L, 4\), got \(1, 6, 2\)"):
        module(query, reference_points=points[:, :, 0], **sizes)
    with pytest.raises(ValueError, match=r"num_levels=1, got \(2, 2\) and \(1, 6, 1, 2\)"):
        module(query, reference_points=points, spatial_shapes=torch.ones(2, 2).long(), level_start_index=torch.zeros(2))
    for value in (torch.randn(2, 6, 8), torch.randn(6, 8)):
        with pytest.raises(ValueError, match=r"of one N, got \(1, 6, 8\) and \(.*6, 8\), batch first"):
            module(query, value=value, reference_points=points, **sizes)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = MultiScaleDeformableAttention(8, 2, 2, 2, batch_first=True)
        nn.init.normal_(self.attention.sampling_offsets.weight)
        nn.init.normal_(self.attention.attention_weights.weight)

    def forward(self, query: Tensor, points: Tensor, shapes: Tensor, starts: Tensor) -> Tensor:
        return self.attention(query, reference_points=points, spatial_shapes=shapes, level_start_index=starts)


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 18])
def test_export(opset: int, tmp_path) -> None:
    model = Encoder().eval()
    args = (torch.randn(2, 17, 8), torch.rand(2, 17, 2, 2), torch.tensor([[3, 5], [1, 2]]), torch.tensor([0, 15]))
    path = tmp_path / "model.onnx"
    shapes = {"query": {0: "n", 1: "s"}, "points": {0: "n", 1: "s"}}
    # not verified: random sizes would not fit the random values
    report = svexport.export(model, args, path, opset=opset, dynamic_shapes=shapes, verify=False)
    assert report.nodes["SvMsDeformAttn"] == 1
    # other levels in the same file
    args = (torch.randn(3, 20, 8), torch.rand(3, 20, 2, 2), torch.tensor([[2, 4], [3, 4]]), torch.tensor([0, 8]))
    torch.testing.assert_close(run_model(onnx.load(path), args)[0], model(*args), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ int8


@pytest.mark.parametrize("precisions", [*itertools.product((torch.float32, torch.float16), repeat=2)], ids=str)
@pytest.mark.parametrize("sizes", SHAPES)
def test_int8_values_are_their_numbers(sizes: dict, precisions: tuple[torch.dtype, torch.dtype]) -> None:
    """In the op, its reference and the body; what is sampled has the type of the weights, whose gradient is right."""
    value, shapes, starts, locations, weights = case(**sizes)
    codes, scale = (value * 50).round().clamp(-128, 127).to(torch.int8), 0.02
    locations, weights = locations.to(precisions[0]), weights.to(precisions[1])
    exact = codes.double() * scale, shapes, starts, locations.double(), weights.double()
    expected = by_grid_sample(*exact)
    tolerance = 1e-5 if precisions[1] == torch.float32 else 2e-3
    args = codes, shapes, starts, locations, weights
    opset = random.choice(OPSETS)
    for actual in (ms_deform_attn(*args, scale=scale), reference(*args, scale), run_op(OP, (*args, scale), opset)[0]):
        assert actual.dtype == precisions[1]
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance)
    if precisions[1] == torch.float32:
        leaves = [weights.clone().requires_grad_(), exact[4].clone().requires_grad_()]
        outputs = ms_deform_attn(*args[:4], leaves[0], scale=scale), ms_deform_attn(*exact[:4], leaves[1])
        own, wanted = (torch.autograd.grad(y.square().sum(), leaf)[0] for y, leaf in zip(outputs, leaves, strict=True))
        torch.testing.assert_close(own.double(), wanted, rtol=1e-4, atol=1e-4)


class Quantized(nn.Module):
    """A value in int8 between two nodes."""

    def forward(self, value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return ms_deform_attn(quantize(value, 0.03), shapes, starts, locations, weights, scale=0.03)


@pytest.mark.parametrize(("opset", "target"), [(11, None), (18, "10.0")])
def test_int8_value_in_a_file(opset: int, target: str | None, tmp_path: Path) -> None:
    report = svexport.export(Quantized(), tuple(case()), tmp_path / "m.onnx", opset=opset, target=target)
    graph = onnx.load(report.path).graph
    (node,) = (n for n in graph.node if n.op_type == "SvMsDeformAttn")
    assert next(a.f for a in node.attribute if a.name == "scale") == pytest.approx(0.03)
    (before,) = (n for n in graph.node if node.input[0] in n.output)
    assert before.op_type == "QuantizeLinear"
