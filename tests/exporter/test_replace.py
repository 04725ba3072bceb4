"""``svexport.replace`` on the examples, and on stand-ins for other packages' modules that compute the same."""

from __future__ import annotations

import copy
import cProfile
import math
import pickle
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import einsum, nn

import svexport
from svexport import ops
from svexport.cli._model import load_file
from svexport.exporter.functions import WHOLES
from svexport.tracing.arguments import leaves

EXAMPLES = Path(__file__).parents[2] / "examples"


# ------------------------------------------------------------------ stand-ins


def deformed(x, offset, mask, weight, bias, stride, padding, dilation):
    """Deformable convolution tap by tap."""
    kernel_h, kernel_w = weight.shape[2:]
    h, w = x.shape[2:]
    groups = offset.shape[1] // (2 * kernel_h * kernel_w)
    offset = offset.unflatten(1, (groups, kernel_h * kernel_w, 2))
    mask = torch.ones_like(offset[:, :, :, 0]) if mask is None else mask.unflatten(1, offset.shape[1:3])
    rows = torch.arange(offset.shape[4])[:, None] * stride[0] - padding[0]
    columns = torch.arange(offset.shape[5]) * stride[1] - padding[1]
    output = 0.0
    for tap in range(kernel_h * kernel_w):
        i, j = divmod(tap, kernel_w)
        parts = []
        for group, part in enumerate(x.chunk(groups, dim=1)):
            v = rows + i * dilation[0] + offset[:, group, tap, 0]
            u = columns + j * dilation[1] + offset[:, group, tap, 1]
            grid = torch.stack((2 * u / (w - 1) - 1, 2 * v / (h - 1) - 1), dim=-1)
            parts.append(F.grid_sample(part, grid, align_corners=True) * mask[:, group, tap, None])
        output = output + F.conv2d(torch.cat(parts, dim=1), weight[:, :, i, j, None, None])
    return output if bias is None else output + bias[:, None, None]


class DeformConv2d(nn.Module):
    """torchvision's."""

    def __init__(self, in_channels, out_channels, kernel_size, stride=1, padding=0, dilation=1):
        super().__init__()
        self.in_channels, self.out_channels, self.groups = in_channels, out_channels, 1
        self.kernel_size, self.stride = (kernel_size, kernel_size), (stride, stride)
        self.padding, self.dilation = (padding, padding), (dilation, dilation)
        self.weight = nn.Parameter(torch.randn(out_channels, in_channels, kernel_size, kernel_size) * 0.3)
        self.bias = nn.Parameter(torch.randn(out_channels))

    def forward(self, input, offset, mask=None):
        return deformed(input, offset, mask, self.weight, self.bias, self.stride, self.padding, self.dilation)


class ModulatedDeformConv2dPack(DeformConv2d):
    """mmcv's."""

    def __init__(self, *args, deform_groups=1, **kwargs):
        super().__init__(*args, **kwargs)
        self.deform_groups = deform_groups
        channels = deform_groups * 3 * math.prod(self.kernel_size)
        self.conv_offset = nn.Conv2d(self.in_channels, channels, self.kernel_size, self.stride, self.padding)

    def forward(self, x):
        o1, o2, mask = torch.chunk(self.conv_offset(x), 3, dim=1)
        offset, mask = torch.cat((o1, o2), dim=1), torch.sigmoid(mask)
        return deformed(x, offset, mask, self.weight, self.bias, self.stride, self.padding, self.dilation)


def sampled(value, shapes, locations, weights):
    """Multi-scale deformable sampling, one head and level at a time."""
    n, heads = locations.shape[0], locations.shape[2]
    maps = value.split([h * w for h, w in shapes], dim=1)
    outputs = []
    for head in range(heads):
        output = 0.0
        for level, (h, w) in enumerate(shapes):
            image = maps[level][:, :, head].transpose(1, 2).reshape(n, -1, h, w)
            found = F.grid_sample(image, 2 * locations[:, :, head, level] - 1, align_corners=False)  # (N, D, Lq, P)
            output = output + (found * weights[:, None, :, head, level]).sum(-1)
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, dim=-1)


class mmcv:
    class MultiScaleDeformableAttention(nn.Module):
        def __init__(self, embed_dims=12, num_heads=3, num_levels=2, num_points=2, batch_first=False):
            super().__init__()
            self.embed_dims, self.num_heads, self.num_levels = embed_dims, num_heads, num_levels
            self.num_points, self.batch_first, self.im2col_step, self.norm_cfg = num_points, batch_first, 64, None
            self.dropout = nn.Dropout(0.1)
            self.sampling_offsets = nn.Linear(embed_dims, num_heads * num_levels * num_points * 2)
            self.attention_weights = nn.Linear(embed_dims, num_heads * num_levels * num_points)
            self.value_proj = nn.Linear(embed_dims, embed_dims)
            self.output_proj = nn.Linear(embed_dims, embed_dims)

        def forward(
            self,
            query,
            key=None,
            value=None,
            identity=None,
            query_pos=None,
            key_padding_mask=None,
            reference_points=None,
            spatial_shapes=None,
            level_start_index=None,
            **kwargs,
        ):
            value = query if value is None else value
            identity = query if identity is None else identity
            query = query if query_pos is None else query + query_pos
            query, value = query.permute(1, 0, 2), value.permute(1, 0, 2)
            n, queries, _ = query.shape
            value = self.value_proj(value).view(n, value.shape[1], self.num_heads, -1)
            shape = n, queries, self.num_heads, self.num_levels, self.num_points
            offsets = self.sampling_offsets(query).view(*shape, 2)
            weights = self.attention_weights(query).view(*shape[:3], -1).softmax(-1).view(shape)
            sizes = torch.stack([spatial_shapes[..., 1], spatial_shapes[..., 0]], -1)
            locations = reference_points[:, :, None, :, None] + offsets / sizes[None, None, None, :, None]
            output = self.output_proj(sampled(value, spatial_shapes.tolist(), locations, weights)).permute(1, 0, 2)
            return self.dropout(output) + identity


class transformers:
    class MultiScaleDeformableAttention(nn.Module):
        def forward(
            self,
            value,
            value_spatial_shapes,
            value_spatial_shapes_list,
            level_start_index,
            sampling_locations,
            attention_weights,
            im2col_step,
        ):
            return sampled(value, value_spatial_shapes_list, sampling_locations, attention_weights)


class Detr3DCrossAtten(nn.Module):
    """DETR3D's, one camera and level at a time."""

    def __init__(self, embed_dims=8, num_levels=2, num_points=1, num_cams=2):
        super().__init__()
        self.embed_dims, self.num_heads, self.num_levels = embed_dims, 2, num_levels
        self.num_points, self.num_cams, self.batch_first = num_points, num_cams, False
        self.pc_range = [-8.0, -8.0, -2.0, 8.0, 8.0, 2.0]
        self.dropout = nn.Dropout(0.1)
        self.attention_weights = nn.Linear(embed_dims, num_cams * num_levels * num_points)
        self.output_proj = nn.Linear(embed_dims, embed_dims)
        self.position_encoder = nn.Sequential(
            nn.Linear(3, embed_dims),
            nn.LayerNorm(embed_dims),
            nn.ReLU(inplace=True),
            nn.Linear(embed_dims, embed_dims),
            nn.LayerNorm(embed_dims),
            nn.ReLU(inplace=True),
        )

    def forward(
        self,
        query,
        key,
        value,
        residual=None,
        query_pos=None,
        key_padding_mask=None,
        reference_points=None,
        spatial_shapes=None,
        level_start_index=None,
        **kwargs,
    ):
        inp_residual = query
        query = (query if query_pos is None else query + query_pos).permute(1, 0, 2)
        b, q, _ = query.shape
        weights = self.attention_weights(query).view(b, q, self.num_cams, self.num_points, self.num_levels).sigmoid()
        low, high = reference_points.new_tensor(self.pc_range).view(2, 3)
        place = torch.cat((reference_points * (high - low) + low, torch.ones(b, q, 1)), dim=-1)
        height, width = kwargs["img_metas"][0]["img_shape"][0][:2]
        output = 0.0
        for cam in range(self.num_cams):
            matrices = np.stack([meta["lidar2img"][cam] for meta in kwargs["img_metas"]])
            image = place @ reference_points.new_tensor(matrices).transpose(1, 2)
            depth = image[..., 2:3]
            uv = image[..., :2] / torch.clamp(depth, min=1e-5) / image.new_tensor([width, height]) * 2 - 1
            seen = (depth > 1e-5) & ((uv > -1) & (uv < 1)).all(-1, keepdim=True)
            for level, feature in enumerate(value):
                found = F.grid_sample(feature[:, cam], uv[:, :, None], align_corners=False)[..., 0].transpose(1, 2)
                output = output + found * weights[:, :, cam, :, level].sum(-1, keepdim=True) * seen
        x = reference_points.clamp(0, 1)
        position = self.position_encoder(torch.log(x.clamp(min=1e-5) / (1 - x).clamp(min=1e-5)))
        return self.dropout(self.output_proj(output.permute(1, 0, 2))) + inp_residual + position.permute(1, 0, 2)


# ------------------------------------------------------------------ models of them


class Net(nn.Module):
    """One module under test behind a convolution, so that gradients go through it."""

    def __init__(self, module, call, *inputs):
        super().__init__()
        self.module, self.call, self.scale = module, call, nn.Parameter(torch.tensor(0.9))
        self.example_inputs = inputs

    def forward(self, x, y=None):
        return self.call(self.module, x * self.scale, y)


def pack():
    module = ModulatedDeformConv2dPack(4, 6, 3, stride=2, padding=1, deform_groups=2)
    return Net(module, lambda m, x, _: m(x), torch.randn(2, 4, 9, 7))


def torchvision():
    module = DeformConv2d(3, 5, 3, padding=1, dilation=1)
    return Net(module, lambda m, x, y: m(x, y), torch.randn(2, 3, 6, 7), torch.randn(2, 18, 6, 7))


SHAPES = [(5, 7), (3, 2)]


def attention():
    def call(module, x, y):
        shapes, start = torch.tensor(SHAPES), torch.tensor([0, 35])
        return module(x, query_pos=y, reference_points=points, spatial_shapes=shapes, level_start_index=start)

    points = torch.rand(2, 41, 2, 2)
    return Net(mmcv.MultiScaleDeformableAttention(), call, torch.randn(41, 2, 12), torch.randn(41, 2, 12))


def sampling():
    def call(module, x, y):
        return module(x, torch.tensor(SHAPES), SHAPES, torch.tensor([0, 35]), y, weights, 64)

    weights = torch.rand(2, 4, 3, 2, 2)
    value, locations = torch.randn(2, 41, 3, 4), torch.rand(2, 4, 3, 2, 2, 2) * 1.2 - 0.1
    return Net(transformers.MultiScaleDeformableAttention(), call, value, locations)


def cameras(points=1):
    ahead = np.array([[16.0, -20, 0, 0], [12, 0, -20, 0], [1, 0, 0, 0], [0, 0, 0, 1]])
    back = ahead * np.array([-1, -1, 1, 1.0])
    metas = [{"lidar2img": [ahead, back], "img_shape": [(24, 32, 3)] * 2} for _ in range(2)]
    features = [torch.randn(2, 2, 8, 6, 8), torch.randn(2, 2, 8, 3, 4)]

    def call(module, x, y):
        return module(x, None, features, query_pos=torch.ones_like(x), reference_points=y, img_metas=metas)

    return Net(Detr3DCrossAtten(num_points=points), call, torch.randn(9, 2, 8), torch.rand(2, 9, 3))


def example(name, **arguments):
    return lambda: load_file(EXAMPLES / f"{name}.py").model(**arguments)


DECODER = {
    "LayerNorm": 7,
    "layer_norm(x + y)": 2,
    "project, mask, sample, weigh, sum": 1,
    "softmax(QK^T)V": 1,
    "a decoder of the DETR3D kind": 1,
}
MODELS = {
    "stgcn": (example("stgcn", frames=8), {"torch.einsum": 1}),
    "detr3d": (
        example("detr3d", config="small", layers=1, queries=20),
        DECODER,
    ),
    "yolox_stem": (example("yolox_stem", height=48, width=64), {"Focus": 1}),
    "deformable_detr": (
        example("deformable_detr", config="small", layers=1),
        {"LayerNorm": 2, "layer_norm(x + y)": 2, "linear layers, softmax, deformable attention": 1},
    ),
    "multicamera": (
        example("multicamera", queries=20, layers=1, cameras=2, image_size=(72, 120)),
        DECODER,
    ),
    "ModulatedDeformConv2dPack": (pack, {"ModulatedDeformConv2dPack": 1}),
    "DeformConv2d": (torchvision, {"DeformConv2d": 1}),
    "mmcv": (attention, {"MultiScaleDeformableAttention": 1}),
    "transformers": (sampling, {"MultiScaleDeformableAttention": 1}),
    "Detr3DCrossAtten": (cameras, {"Detr3DCrossAtten": 1, "LayerNorm": 2}),
    "Detr3DCrossAtten, 3 points": (lambda: cameras(3), {"Detr3DCrossAtten": 1, "LayerNorm": 2}),
}


@pytest.fixture(params=MODELS)
def case(request):
    torch.manual_seed(0)
    make, expected = MODELS[request.param]
    return make(), expected


def tensors(outputs):
    return [leaf for _, leaf in leaves(outputs)]


def state_of(model):
    """What replace could disturb: identities and flags, and values."""
    hooks = "_forward_hooks", "_forward_pre_hooks", "_forward_hooks_with_kwargs", "_state_dict_hooks"
    members = {
        name: (type(m), m.training, [dict(getattr(m, h)) for h in hooks], [(n, id(c)) for n, c in m.named_children()])
        for name, m in model.named_modules()
    }
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    identities = {name: (id(t), t.requires_grad, t.grad) for name, t in held.items()}
    return (members, identities), {name: t.detach().clone() for name, t in held.items()}


def losses(model, inputs):
    torch.manual_seed(1)  # of dropout
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    found = []
    for _ in range(3):  # before, after one step and after two
        loss = sum(output.square().mean() for output in tensors(model(*inputs)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


@pytest.mark.core
def test_copy_is_the_same_model(case, tmp_path):
    model, expected = case
    model.train()
    model.register_forward_hook(lambda *_: None)
    before, values = state_of(model)
    replaced = svexport.replace(model, verbose=False)
    assert state_of(model)[0] == before
    torch.testing.assert_close(state_of(model)[1], values, rtol=0, atol=0)

    kinds = [r.before.rpartition(".")[2] if r.name != "forward" else r.before for r in replaced.svexport_replacements]
    assert {kind: kinds.count(kind) for kind in kinds} == {**dict.fromkeys(kinds, 0), **expected}
    for r in replaced.svexport_replacements:
        assert r.calls > 0
        assert r.max_abs <= 1e-4
    assert {a.kind for a in replaced.svexport_left_alone} <= {"its forward as a graph"}

    assert list(replaced.state_dict()) == list(model.state_dict())
    assert not {id(p) for p in replaced.parameters()} & {id(p) for p in model.parameters()}
    assert all(m.training for m in replaced.modules())
    assert len(replaced._forward_hooks) == 1
    with torch.no_grad():
        for parameter in replaced.parameters():
            parameter.add_(1)
    replaced.load_state_dict(model.state_dict())

    model.eval(), replaced.eval()
    inputs = model.example_inputs
    with torch.no_grad():
        torch.testing.assert_close(tensors(replaced(*inputs)), tensors(model(*inputs)), rtol=1e-5, atol=1e-5)
    report = svexport.export(replaced, path=tmp_path / "replaced.onnx", opset=11)
    assert report.verified
    assert report.svexport_nodes

    ours, theirs = (losses(copy.deepcopy(m), inputs) for m in (replaced, model))
    assert theirs[2] != theirs[0]
    assert ours == pytest.approx(theirs, rel=1e-5)


# ------------------------------------------------------------------ functions


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x, *, times: int = 2):
        y = einsum("bij,bjk->bik", x, self.linear(x))
        inverse = torch.linalg.inv(x) + x.inverse() + torch.inverse(x)
        return times * (y + inverse + torch.linalg.solve(x, y))


METHODS = {"torch.Tensor.inverse"} if sys.version_info >= (3, 11) else set()


def regular(n=2):
    return torch.randn(n, 3, 3) + 4 * torch.eye(3)


@pytest.mark.core
def test_functions_are_ops_wherever_they_are_called(monkeypatch):
    model, x = Functions(), regular()
    replaced = svexport.replace(model, (x,), verbose=False)
    names = {r.before: r.source for r in replaced.svexport_replacements}
    assert set(names) == {"torch.einsum", "torch.linalg.inv", "torch.inverse", "torch.linalg.solve", *METHODS}
    line = Functions.forward.__code__.co_firstlineno
    assert f"test_replace.py:{line + 1} in forward: y = einsum(" in names["torch.einsum"]
    with torch.no_grad():
        graph = torch.export.export(replaced, (x,)).graph
    called = {str(node.target) for node in graph.nodes if "svexport" in str(node.target)}
    assert called == {"svexport.einsum.default", "svexport.inverse.default", "svexport.solve.default"}
    torch.testing.assert_close(replaced(x, times=3), model(x, times=3), rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 18])
def test_exported_nodes_are_those_of_the_model(opset, tmp_path):
    model, x = Functions(), regular()
    copied = copy.deepcopy(svexport.replace(model, (x,), verbose=False))
    reports = [svexport.export(m, (x,), tmp_path / f"{i}.onnx", opset=opset) for i, m in enumerate((model, copied))]
    assert {node.type for node in reports[0].svexport_nodes} == {"SvEinsum", "SvInverse", "SvSolve"}
    ours, theirs = ([(node.type, node.source) for node in report.svexport_nodes] for report in reports)
    assert set(ours) == set(theirs)
    if METHODS:  # else the method stays one, and is no node that another of that line can be
        assert ours == theirs
        assert reports[0].nodes == reports[1].nodes


@pytest.mark.core
def test_copies_and_pickles_of_the_copy():
    replaced = svexport.replace(Functions(), (regular(),), verbose=False)
    assert type(replaced).__name__ == "Functions"
    assert isinstance(replaced, Functions)
    x = regular()
    for other in (copy.deepcopy(replaced), pickle.loads(pickle.dumps(replaced))):  # noqa: S301 - written here
        assert type(other) is type(replaced)
        assert other.svexport_replacements == replaced.svexport_replacements
        torch.testing.assert_close(other(x), replaced(x), rtol=0, atol=0)
    again = svexport.replace(replaced, (x,), verbose=False)
    assert type(again) is type(replaced)
    assert again.svexport_replacements == []
    torch.testing.assert_close(again(x), replaced(x), rtol=0, atol=0)


@pytest.mark.core
def test_copy_compiles():
    replaced, x = svexport.replace(Functions(), (regular(),), verbose=False), regular()
    compiled = torch.compile(replaced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), replaced(x), rtol=1e-5, atol=1e-5)


def test_scripted_code_is_left_as_it_is():
    scripted = torch.jit.script(nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3)))
    x = regular()
    for model in (scripted, nn.Sequential(scripted, nn.LayerNorm(3))):
        replaced = svexport.replace(model, x, verbose=False)
        assert len(replaced.svexport_replacements) == (model is not scripted)
        torch.testing.assert_close(replaced(x), model(x), rtol=0, atol=0)


@pytest.mark.core
def test_a_module_in_two_places_stays_one():
    norm = nn.LayerNorm(3)
    replaced = svexport.replace(nn.Sequential(norm, nn.Linear(3, 3), nn.Sequential(norm)), regular(), verbose=False)
    assert type(replaced[0]) is ops.LayerNorm
    assert replaced[0] is replaced[2][0]
    assert [r.calls for r in replaced.svexport_replacements] == [2]
    alone = svexport.replace(norm, regular(), verbose=False)
    assert type(alone) is ops.LayerNorm


def test_what_an_op_does_not_take_is_left_to_torch():
    class Out(nn.Module):
        def forward(self, x):
            return torch.linalg.inv(x, out=torch.empty_like(x)) + torch.linalg.inv(A=x)

    x = regular()
    replaced = svexport.replace(Out(), (x,), verbose=False)
    assert [r.calls for r in replaced.svexport_replacements] == [1]
    torch.testing.assert_close(replaced(x), 2 * torch.linalg.inv(x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("size", [(7, 9), (151, 211)])
def test_sampling_in_half_is_compared_as_on_cuda(size, dtype, capsys):
    """ATen's CPU kernel rounds coordinates to half, which nobody should have kept.

    It also counts elements of an image in 16 bits, and reads outside of larger images: none has 2^15 elements here.
    """

    class Samples(nn.Module):
        def forward(self, x, grid):
            return F.grid_sample(x, grid, align_corners=False)

    x, grid = torch.randn(2, 3, *size).to(dtype), (torch.rand(2, 5, 4, 2) * 2.4 - 1.2).to(dtype)
    replaced = svexport.replace(Samples(), (x, grid))
    assert [r.before for r in replaced.svexport_replacements] == ["torch.nn.functional.grid_sample"]
    assert not replaced.svexport_left_alone
    assert "is compared as torch has it on CUDA, with coordinates in float32" in capsys.readouterr().out
    expected = F.grid_sample(x.double(), grid.double(), align_corners=False)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(replaced(x, grid).double(), expected, rtol=eps, atol=eps)


# ------------------------------------------------------------------ what is not replaced


def test_a_profiler_goes_on():
    with cProfile.Profile() as profile:
        svexport.replace(Functions(), (regular(),), verbose=False)
        torch.frexp(torch.ones(2))
    assert any("frexp" in str(entry.code) for entry in profile.getstats())


def test_nothing_to_replace(capsys):
    model = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    replaced = svexport.replace(model, torch.randn(1, 3))
    assert capsys.readouterr().out == "Sequential: nothing to replace\n"
    assert type(replaced) is nn.Sequential
    assert replaced is not model
    assert replaced.svexport_replacements == replaced.svexport_left_alone == []


def test_namesakes_are_left_alone_and_mentioned(capsys):
    class Focus(nn.Module):
        """One that weighs its slices."""

        def forward(self, x):
            return x

    class LayerNorm(nn.LayerNorm):
        """One for images."""

        def forward(self, input):
            return super().forward(input.transpose(1, 2)).transpose(1, 2)

    class WithMask(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Identity()

        def forward(self, x, mask):
            return x

    WithMask.__name__ = "Focus"
    model = nn.ModuleDict({"focus": Focus(), "norm": LayerNorm(3), "masked": WithMask()})
    replaced = svexport.replace(model)
    assert [(a.name, a.kind.rpartition(".")[2]) for a in replaced.svexport_left_alone] == [
        ("focus", "Focus"),
        ("norm", "LayerNorm"),
        ("masked", "WithMask"),
    ]
    assert [type(m) for m in replaced.values()] == [type(m) for m in model.values()]
    reasons = [a.reason for a in replaced.svexport_left_alone]
    assert "without conv" in reasons[0]
    assert "expects torch.nn.modules.normalization.LayerNorm" in reasons[1]
    assert "expects forward(self, x), got" in reasons[2]
    assert "left alone" in capsys.readouterr().out


def test_what_differs_is_left_alone():
    class Focus(nn.Module):
        """Its slices are in another order."""

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(4, 2, 1)

        def forward(self, x):
            return self.conv(torch.cat((x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]), 1))

    model, x = nn.Sequential(Focus()), torch.randn(1, 1, 4, 4)
    replaced = svexport.replace(model, x, verbose=False)
    assert "differs by" in replaced.svexport_left_alone[0].reason
    torch.testing.assert_close(replaced(x), model(x), rtol=0, atol=0)


def test_outputs_that_differ_as_a_whole_are_told():
    forwards = []

    class Counting(nn.Module):
        def forward(self, x):
            forwards.append(x)
            return torch.linalg.inv(x) + len(forwards)

    with pytest.warns(UserWarning, match="as a whole, although every part is proven: svexport's differs by 3.0"):
        replaced = svexport.replace(Counting(), regular(), verbose=False)
    assert len(replaced.svexport_replacements) == 1


def test_outputs_that_rounding_decides_are_told_with_the_models_own_change():
    class Thresholds(nn.Module):
        """Numbers that are a little above or below a border, by how they are rounded."""

        def forward(self, x):
            attended = (x @ x.mT * 0.3).softmax(-1) @ x
            return ((attended * 1e7).frac().abs() > 0.5).float() * 7

    with pytest.warns(UserWarning, match=r"differs by 7.*; the original's outputs change by 7.0e\+00 when its inputs"):
        svexport.replace(Thresholds(), torch.randn(2, 3, 50, 8), verbose=False)


def test_without_inputs_nothing_is_proven(capsys):
    model = nn.Sequential(Functions(), nn.LayerNorm(3))  # not the other way: rows of mean 0 have no inverse
    replaced = svexport.replace(model)
    assert {r.proof for r in replaced.svexport_replacements} == {"not proven: no inputs"}
    assert "not proven: no inputs" in capsys.readouterr().out
    x = regular()
    torch.testing.assert_close(replaced(x), model(x), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        graph = torch.export.export(replaced, (x,)).graph
    assert "svexport.inverse" in str(graph)


@pytest.mark.core
def test_recorded_arguments_prove_and_export(tmp_path):
    model = Functions()
    with svexport.record(model):
        model(regular())
    replaced = svexport.replace(model, verbose=False)
    assert all(r.max_abs < 1e-5 for r in replaced.svexport_replacements)
    assert svexport.export(replaced, path=tmp_path / "model.onnx").verified


@pytest.mark.core
def test_report(capsys):
    svexport.replace(MODELS["detr3d"][0]())
    printed = " ".join(capsys.readouterr().out.split())
    assert "and 5 more" in printed
    assert re.search(r"torch/nn/modules/normalization\.py:\d", printed)
    assert "examples/detr3d.py:" in printed
    assert "outputs as a whole: max error" in printed


@pytest.mark.core
def test_report_in_a_notebook(monkeypatch, capsys):
    """As HTML that fits its width; rich alone would print lines of 160 characters."""
    shown = []
    display = SimpleNamespace(HTML=lambda text: text, display=shown.append)
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace(display=display))
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    svexport.replace(MODELS["detr3d"][0]())
    (text,) = shown
    assert capsys.readouterr().out == ""
    assert text.startswith('<div class="svexport">')
    assert "replaced</h2>" in text
    assert "and 5 more" in text
    assert '<p class="ok">DETR3D, outputs as a whole: max error' in text
    svexport.replace(nn.Sequential(nn.ReLU()), torch.randn(2))
    assert "Sequential: nothing to replace" in shown[1]


@pytest.mark.core
def test_refusals():
    with pytest.raises(svexport.UnsupportedError, match=r"expected a torch\.nn\.Module, got function"):
        svexport.replace(lambda x: x)
    model = nn.Linear(2, 2)
    model.stream = (i for i in range(3))
    with pytest.raises(svexport.UnsupportedError, match=r"Linear cannot be copied: .*TypeError"):
        svexport.replace(model)


# ------------------------------------------------------------------ whole functions, and those that only look like them


def core(value, spatial_shapes, sampling_locations, attention_weights, *, change=None):
    """Multi-scale deformable attention in plain torch, as Deformable DETR and mmcv have it, with something changed."""
    change = change or {}
    n, _, m, d = value.shape
    _, queries, m, levels, points, _ = sampling_locations.shape
    shapes = change.get("shapes", lambda s: s)([(int(h), int(w)) for h, w in spatial_shapes])
    maps = value.split([h * w for h, w in shapes], dim=1)
    grids = change.get("grids", lambda x: 2 * x - 1)(sampling_locations)
    found = []
    for level, (h, w) in enumerate(shapes):
        image = maps[level].flatten(2).transpose(1, 2).reshape(n * m, d, h, w)
        options = {"mode": "bilinear", "padding_mode": "zeros", "align_corners": False, **change.get("options", {})}
        found.append(F.grid_sample(image, grids[:, :, :, level].transpose(1, 2).flatten(0, 1), **options))
    weights = change.get("weights", lambda w: w)(attention_weights)
    weights = weights.transpose(1, 2).reshape(n * m, 1, queries, levels * points)
    output = (torch.stack(found, dim=-2).flatten(-2) * weights).sum(-1)
    output = output.view(n, m * d, queries).transpose(1, 2).contiguous()
    return change.get("output", lambda x: x)(output)


def multi_scale_deformable_attn_pytorch(value, value_spatial_shapes, sampling_locations, attention_weights):
    return core(value, value_spatial_shapes, sampling_locations, attention_weights)


def bilinear_grid_sample(im, grid, align_corners=False):
    """What mmcv has for opset 11, pixel by pixel."""
    return gathered(im, grid, align_corners)


def gathered(image, grid, align_corners=False, *, border=False, floor=torch.floor, weight=lambda t: t):
    n, c, h, w = image.shape
    x, y = grid.unbind(-1)
    x, y = (((t + 1) / 2 * (s - 1)) if align_corners else ((t + 1) * s - 1) / 2 for t, s in ((x, w), (y, h)))
    if border:
        x, y = x.clamp(0, w - 1), y.clamp(0, h - 1)
    x0, y0 = floor(x).detach(), floor(y).detach()
    output = 0.0
    for dx, dy in ((0, 0), (0, 1), (1, 0), (1, 1)):
        i, j = x0 + dx, y0 + dy
        inside = (i >= 0) & (i < w) & (j >= 0) & (j < h)
        share = weight(1 - (x - i).abs()) * weight(1 - (y - j).abs()) * inside
        index = (j.clamp(0, h - 1) * w + i.clamp(0, w - 1)).long().flatten(1)[:, None].expand(-1, c, -1)
        output = output + image.flatten(2).gather(2, index).view(n, c, *x.shape[1:]) * share[:, None]
    return output


class Attends(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(0.9))

    def forward(self, value, locations, weights):
        return self.function(value * self.scale, torch.tensor(SHAPES), locations * self.scale, weights * self.scale)


class Takes(Attends):
    """Any arguments, so that there is no graph of it, in which the function would be found without its name."""

    def forward(self, *args):
        return super().forward(*args)


class Samples(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function, self.scale = function, nn.Parameter(torch.tensor(0.9))

    def forward(self, image, grid):
        return self.function(image * self.scale, grid * self.scale)


ATTENDED = torch.randn(2, 41, 3, 4), torch.rand(2, 4, 3, 2, 2, 2) * 1.2 - 0.1, torch.rand(2, 4, 3, 2, 2)
SAMPLED = torch.randn(2, 3, 5, 7), torch.rand(2, 4, 3, 2) * 2.4 - 1.2


def changed(**change):
    def multi_scale_deformable_attn_pytorch(value, value_spatial_shapes, sampling_locations, attention_weights):
        return core(value, value_spatial_shapes, sampling_locations, attention_weights, change=change)

    return multi_scale_deformable_attn_pytorch


def sampler(function):
    def bilinear_grid_sample(im, grid, align_corners=False):
        return function(im, grid)

    return bilinear_grid_sample


def other_parameters():
    def ms_deform_attn_core_pytorch(value, shapes, locations, weights):
        return core(value, shapes, locations, weights) * 2

    return ms_deform_attn_core_pytorch


def one_more():
    def ms_deform_attn_core_pytorch(value, value_spatial_shapes, sampling_locations, attention_weights, power=2):
        return core(value, value_spatial_shapes, sampling_locations, attention_weights) ** power

    return ms_deform_attn_core_pytorch


def names_of_others(image, grid):
    class F:
        @staticmethod
        def grid_sample(image, grid, align_corners):
            return gathered(image, grid, align_corners, border=True)

    def einsum(equation, x):
        return x * len(equation)

    class Rotation:
        def __init__(self, angle):
            self.angle = angle

        def inverse(self):
            return -self.angle

    return F.grid_sample(image, grid, align_corners=True) + einsum("nchw->nchw", image).mean() + Rotation(1.0).inverse()


class lookalike:
    """Whose functions have torch's names."""

    @staticmethod
    def grid_sample(image, grid, **_):
        return F.grid_sample(image, grid, align_corners=True) * 3

    @staticmethod
    def einsum(equation, x):
        return x.sum() * len(equation)


DECOYS = {
    # of multi-scale deformable attention
    "corners": (Attends, changed(options={"align_corners": True})),
    "border": (Attends, changed(options={"padding_mode": "border"})),
    "reflection": (Attends, changed(options={"padding_mode": "reflection"})),
    "nearest": (Attends, changed(options={"mode": "nearest"})),
    "bicubic": (Attends, changed(options={"mode": "bicubic"})),
    "softmax": (Attends, changed(weights=lambda w: w.flatten(3).softmax(-1).view_as(w))),
    "squares": (Attends, changed(weights=lambda w: w * w)),
    "no weights": (Attends, changed(weights=torch.ones_like)),
    "weights in reverse": (Attends, changed(weights=lambda w: w.flip(3))),
    "constant weights": (Attends, changed(weights=lambda w: w.detach())),
    "constant grids": (Attends, changed(grids=lambda x: 2 * x.detach() - 1)),
    "constant output": (Attends, changed(output=lambda x: x.detach() + 0 * x)),
    "straight through": (Attends, changed(weights=lambda w: w + (w.detach() * 2 - w * 2).clone() * 0.5)),
    "normalized": (Attends, changed(grids=lambda x: x)),
    "clamped": (Attends, changed(grids=lambda x: 2 * x.clamp(0, 1) - 1)),
    "y before x": (Attends, changed(grids=lambda x: 2 * x.flip(-1) - 1)),
    "width before height": (Attends, changed(shapes=lambda s: [(w, h) for h, w in s])),
    "levels in reverse": (Attends, changed(shapes=lambda s: s[::-1], grids=lambda x: 2 * x.flip(3) - 1)),
    "mean": (Attends, changed(output=lambda x: x / 4)),
    "not transposed": (Attends, changed(output=lambda x: x.transpose(1, 2).contiguous())),
    "in a tuple": (Attends, changed(output=lambda x: (x, x))),
    "other parameters": (Attends, other_parameters()),
    "one parameter more": (Attends, one_more()),
    # of a bilinear sampler
    "sampled at corners": (Samples, sampler(lambda image, grid: gathered(image, grid, True))),
    "sampled at the border": (Samples, sampler(lambda image, grid: gathered(image, grid, border=True))),
    "nearest pixel": (Samples, sampler(lambda image, grid: gathered(image, grid, weight=lambda t: (t > 0.5) * 1.0))),
    "smooth step": (Samples, sampler(lambda image, grid: gathered(image, grid, weight=lambda t: t * t * (3 - 2 * t)))),
    "in pixels": (Samples, sampler(lambda image, grid: gathered(image, grid * 3))),
    "constant grid": (Samples, sampler(lambda image, grid: gathered(image, grid.detach()))),
    # of torch
    "names of others": (Samples, names_of_others),
    "lookalike": (Samples, lambda image, grid: lookalike.grid_sample(image, grid) + lookalike.einsum("ij", image)),
}


@pytest.mark.parametrize("name", DECOYS)
def test_decoys_are_left_alone_or_right(name):
    make, function = DECOYS[name]
    model = make(function)
    args = ATTENDED if make is Attends else SAMPLED
    replaced = svexport.replace(model, args, verbose=False)
    wholes = [r.before for r in replaced.svexport_replacements if not r.before.startswith("torch.")]
    part = "split, sample, stack, weigh, sum"  # which some are but for what comes before or after
    assert {*wholes} <= {part}, "its meaning is another"
    if function.__name__ in WHOLES and not wholes:
        assert any(function.__name__ in a.kind and a.reason for a in replaced.svexport_left_alone)
    ours, theirs = [], []
    for m, found in ((model, theirs), (replaced, ours)):
        given = [t.clone().requires_grad_() for t in args]
        output = sum(t.square().sum() for t in tensors(m(*given)))
        found += [output, *torch.autograd.grad(output, [*given, m.scale], allow_unused=True)]
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "function", "args", "op"),
    [
        (Takes, multi_scale_deformable_attn_pytorch, ATTENDED, "ms_deform_attn"),
        (Samples, bilinear_grid_sample, SAMPLED, "grid_sample"),
    ],
)
def test_whole_functions_are_ops(make, function, args, op, tmp_path):
    model = make(function)
    replaced = svexport.replace(model, args, verbose=False)
    assert [(r.before.rpartition(".")[2], r.after, r.calls) for r in replaced.svexport_replacements] == [
        (function.__name__, f"svexport.ops.{op}", 1)
    ]
    assert {a.kind for a in replaced.svexport_left_alone} <= {"its forward as a graph"}
    with torch.no_grad():
        targets = [str(node.target) for node in torch.export.export(replaced, args).graph.nodes]
    assert f"svexport.{op}.default" in targets
    reports = [svexport.export(m, args, tmp_path / f"{i}.onnx", opset=16) for i, m in enumerate((model, replaced))]
    assert sum(reports[1].nodes.values()) <= sum(reports[0].nodes.values())
    ours, theirs = losses(replaced, args), losses(model, args)
    assert ours == pytest.approx(theirs, rel=1e-5)


def test_wholes_break_no_graph():
    """Where the encoder asks tensors for sizes, which torch.compile cannot read."""
    model = example("deformable_detr", config="small", layers=1)()
    replaced = svexport.replace(model, verbose=False)
    torch.compiler.reset()
    compiled = torch.compile(replaced, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*model.example_inputs), model(*model.example_inputs), rtol=1e-4, atol=1e-4)


def test_wholes_that_no_name_reaches():
    class Table(Samples):
        def forward(self, image, grid):
            return self.function["sampler"](image * self.scale, grid)

    replaced = svexport.replace(Table({"sampler": bilinear_grid_sample}), SAMPLED, verbose=False)
    assert replaced.svexport_replacements == []
    assert [a.kind.rpartition(".")[2] for a in replaced.svexport_left_alone] == ["bilinear_grid_sample"]
    assert "by no name that can be bound" in replaced.svexport_left_alone[0].reason


def test_functions_of_a_whole_are_replaced_where_it_is_not():
    model = Attends(changed(options={"align_corners": True}))
    replaced = svexport.replace(model, ATTENDED, verbose=False)
    assert [r.before for r in replaced.svexport_replacements] == ["torch.nn.functional.grid_sample"]
    assert len(replaced.svexport_left_alone) == 2  # by its name, and as a graph
    assert "differs by" in replaced.svexport_left_alone[0].reason


def test_gradients_decide_too():
    replaced = svexport.replace(Attends(DECOYS["constant grids"][1]), ATTENDED, verbose=False)
    assert all("gradient differs by" in a.reason for a in replaced.svexport_left_alone)


# ------------------------------------------------------------------ what is asked for


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"only": "torch.einsum"}, {"torch.einsum"}),
        ({"only": ["einsum", "LayerNorm"]}, {"torch.einsum", "torch.nn.modules.normalization.LayerNorm"}),
        ({"only": "svexport.ops.inverse"}, {"torch.linalg.inv", "torch.inverse", *METHODS}),
        ({"only": "1"}, {"torch.nn.modules.normalization.LayerNorm"}),
        ({"skip": ["inverse", "solve", "1"]}, {"torch.einsum"}),
        ({"only": "inverse", "skip": "torch.Tensor.inverse"}, {"torch.linalg.inv", "torch.inverse"}),
    ],
)
@pytest.mark.parametrize("given", [True, False])
def test_only_and_skip(options, expected, given):
    model = nn.Sequential(Functions(), nn.LayerNorm(3))
    replaced = svexport.replace(model, regular() if given else None, **options, verbose=False)
    assert {r.before for r in replaced.svexport_replacements} == expected
    assert not METHODS or replaced.svexport_left_alone == []


def test_names_that_nothing_has():
    with pytest.raises(
        svexport.UnsupportedError, match=r"expect names of modules of Linear, or among .*; got 'einsumm'"
    ):
        svexport.replace(nn.Linear(2, 2), only="einsumm")


# ------------------------------------------------------------------ one by one


def test_from_module_shares_what_it_holds():
    norm = nn.LayerNorm(5).eval()
    norm.register_forward_hook(lambda module, args, output: output + 1)
    ours = ops.LayerNorm.from_module(norm)
    assert type(ours) is ops.LayerNorm
    assert ours.weight is norm.weight
    assert not ours.training
    x = torch.randn(2, 5)
    torch.testing.assert_close(ours(x), norm(x), rtol=0, atol=0)
    ours.weight = nn.Parameter(torch.zeros(5))
    ours.register_buffer("more", torch.zeros(1))
    assert norm.weight.sum() == 5
    assert list(norm.state_dict()) == ["weight", "bias"]


@pytest.mark.parametrize(
    ("cls", "make"),
    [
        (ops.Focus, lambda: load_file(EXAMPLES / "yolox_stem.py").Focus(3, 4)),
        (ops.ModulatedDeformConv2dPack, lambda: pack().module),
        (ops.DeformConv2d, lambda: torchvision().module),
        (ops.MultiScaleDeformableAttention, lambda: attention().module),
        (ops.MultiScaleDeformableSampling, lambda: sampling().module),
        (ops.Detr3DCrossAtten, lambda: cameras().module),
    ],
)
def test_from_module_of_every_drop_in(cls, make):
    module = make()
    ours = cls.from_module(module)
    assert type(ours) is cls
    assert ours.state_dict().keys() == module.state_dict().keys()
    assert repr(ours)
    for refused in (nn.Linear(2, 2), nn.LayerNorm(3)):
        with pytest.raises(
            svexport.UnsupportedError, match=f"{cls.__name__}.from_module expects {cls.replaces[0]}, got"
        ):
            cls.from_module(refused)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ops.ModulatedDeformConv2dPack(4, 6, 3, 2, 1, deform_groups=2), lambda: pack().module),
        (ops.Detr3DCrossAtten(8, 2, 2, 1, 2, pc_range=[0.0] * 6), lambda: cameras().module),
        (ops.MultiScaleDeformableAttention(12, 3, 2, 2), lambda: attention().module),
    ],
)
def test_constructors_make_the_same_parameters(ours, theirs):
    ours.load_state_dict(theirs().state_dict())


def test_calibrations_stay_float32_in_half_models(monkeypatch):
    """A pixel counts in thousandths of their numbers, which half precision does not have."""
    module = sys.modules["svexport.ops.camera_sample"]
    given, camera_sample = [], module.camera_sample

    def spy(features, points, lidar2img, *args, **options):
        given.append(lidar2img)
        return camera_sample(features, points, lidar2img, *args, **options)

    monkeypatch.setattr(module, "camera_sample", spy)
    ours = ops.Detr3DCrossAtten(8, 2, 2, 1, 2, pc_range=[-8.0, -8.0, -2.0, 8.0, 8.0, 2.0]).half()
    features = [torch.randn(1, 2, 8, 6, 8).half(), torch.randn(1, 2, 8, 3, 4).half()]
    matrices = torch.randn(2, 4, 4) * 1e5  # half ends at 65504
    metas = [{"lidar2img": matrices.tolist(), "img_shape": [(24, 32, 3)] * 2}]
    output = ours(
        torch.randn(9, 1, 8).half(), None, features, reference_points=torch.rand(1, 9, 3).half(), img_metas=metas
    )
    assert torch.equal(given[0][0], matrices)
    assert output.dtype == torch.float16


def test_transformers():
    name = "transformers.models.deformable_detr.modeling_deformable_detr"
    theirs = pytest.importorskip(name).MultiScaleDeformableAttention()
    net = sampling()
    x, y = net.example_inputs
    ours = ops.MultiScaleDeformableSampling.from_module(theirs)
    torch.testing.assert_close(net.call(ours, x, y), net.call(theirs, x, y), rtol=1e-5, atol=1e-5)
