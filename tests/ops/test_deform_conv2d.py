from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from svexport.graph.nodes import svexport_nodes
from svexport.ops import DeformConv2d, deform_conv2d
from svexport.ops.deform_conv2d import OP, reference
from tests.support import OPSETS, run_model, run_op


def loops(
    input: Tensor,
    offset: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: tuple = (1, 1),
    padding: tuple = (0, 0),
    dilation: tuple = (1, 1),
    mask: Tensor | None = None,
) -> Tensor:
    """The definition, tap by tap."""
    n, channels, height, width = input.shape
    outputs, per_group, *kernel = weight.shape
    groups, taps = channels // per_group, kernel[0] * kernel[1]
    offset_groups = offset.shape[1] // 2 // taps
    images = []
    for image, i, j in itertools.product(range(n), *map(range, offset.shape[2:])):
        read = input.new_zeros(channels, taps)
        for group, tap in itertools.product(range(offset_groups), range(taps)):
            number = group * taps + tap
            y = i * stride[0] - padding[0] + tap // kernel[1] * dilation[0] + offset[image, 2 * number, i, j]
            x = j * stride[1] - padding[1] + tap % kernel[1] * dilation[1] + offset[image, 2 * number + 1, i, j]
            top, left = math.floor(y.detach()), math.floor(x.detach())
            value = 0
            for row, column in itertools.product((top, top + 1), (left, left + 1)):
                if 0 <= row < height and 0 <= column < width:
                    value = value + input[image, :, row, column] * (1 - (y - row).abs()) * (1 - (x - column).abs())
            if mask is not None:
                value = value * mask[image, number, i, j]
            chosen = torch.arange(channels) // (channels // offset_groups) == group
            read = read + torch.where(chosen, value, 0.0)[:, None] * F.one_hot(torch.tensor(tap), taps)
        shares = read.view(groups, 1, per_group * taps) * weight.reshape(groups, -1, per_group * taps)
        images.append(shares.sum(-1).flatten() + (0 if bias is None else bias))
    return torch.stack(images).view(n, *offset.shape[2:], outputs).permute(0, 3, 1, 2)


def case(
    n: int = 2,
    channels: int = 4,
    outputs: int = 6,
    size: tuple = (4, 5),
    kernel: tuple = (3, 2),
    stride: tuple = (1, 1),
    padding: tuple = (1, 1),
    dilation: tuple = (1, 1),
    groups: int = 1,
    offset_groups: int = 1,
    bias: bool = True,
    mask: bool = True,
    dtype: torch.dtype = torch.float64,
) -> dict:
    """Arguments whose offsets reach far out of the image."""
    image = torch.randn(n, channels, *size, dtype=dtype)
    weight = torch.randn(outputs, channels // groups, *kernel, dtype=dtype)
    out = F.conv2d(image[:, :1].float(), torch.zeros(1, 1, *kernel), None, stride, padding, dilation).shape[2:]
    taps = offset_groups * kernel[0] * kernel[1]
    return {
        "input": image,
        "offset": torch.randn(n, 2 * taps, *out, dtype=dtype) * 2,
        "weight": weight,
        "bias": torch.randn(outputs, dtype=dtype) if bias else None,
        "stride": stride,
        "padding": padding,
        "dilation": dilation,
        "mask": torch.rand(n, taps, *out, dtype=dtype) if mask else None,
    }


def node_args(args: dict, groups: int = 1, offset_groups: int = 1) -> tuple:
    """The same as arguments of the torch operator."""
    names = ("input", "offset", "weight", "bias", "mask", "stride", "padding", "dilation")
    return (*(args[name] for name in names), groups, offset_groups, 1.0)


def cases() -> Iterator:
    for groups, offset_groups in [(1, 1), (2, 1), (1, 2), (2, 4), (4, 2), (2, 2)]:
        yield {"channels": 4, "outputs": 4, "groups": groups, "offset_groups": offset_groups}
    yield {"channels": 6, "groups": 2, "offset_groups": 3, "n": 1}
    for bias, mask in [(True, False), (False, True), (False, False)]:
        yield {"bias": bias, "mask": mask}
    yield {"stride": (2, 1), "padding": (0, 2), "dilation": (1, 2)}
    yield {"stride": (3, 2), "padding": (2, 0), "dilation": (2, 1), "groups": 2, "offset_groups": 2}
    yield {"kernel": (1, 1), "padding": (0, 0), "size": (1, 7), "channels": 1, "outputs": 1}
    yield {"kernel": (2, 5), "padding": (0, 2), "size": (7, 1), "n": 1}


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("sizes", list(cases()), ids=lambda sizes: "-".join(f"{k}{v}" for k, v in sizes.items()))
def test_is_its_definition(sizes: dict) -> None:
    args = case(**sizes)
    tensors = [t.requires_grad_() for t in args.values() if isinstance(t, Tensor)]
    expected = loops(**args)
    weight = torch.randn_like(expected)
    gradients = torch.autograd.grad((expected * weight).sum(), tensors)
    groups = {name: sizes.get(name, 1) for name in ("groups", "offset_groups")}
    for actual in (deform_conv2d(**args), reference(*node_args(args, **groups))):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
        for a, e in zip(torch.autograd.grad((actual * weight).sum(), tensors), gradients, strict=True):
            torch.testing.assert_close(a, e, rtol=1e-10, atol=1e-10)

    args = {k: t.detach().float() if isinstance(t, Tensor) else t for k, t in args.items()}
    torch.testing.assert_close(deform_conv2d(**args), expected.float(), rtol=1e-5, atol=1e-5)
    for opset in (9, 11, 20):
        for dynamic in (False, True):
            actual = run_op(OP, node_args(args, **groups), opset, dynamic=dynamic)[0]
            torch.testing.assert_close(actual, expected.float(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", [(5, 7), (8, 3), (1, 1)])
def test_without_offsets_is_a_convolution(size: tuple) -> None:
    """Where training starts. From there offsets lead to the pixels right and below, and so does their gradient."""
    args = case(n=1, size=size, kernel=(3, 3), groups=2, mask=False, dtype=torch.float32)
    expected = F.conv2d(args["input"], args["weight"], args["bias"], padding=1, groups=2)
    args["offset"] = torch.zeros_like(args["offset"], requires_grad=True)
    actual = deform_conv2d(**args)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    for integer in (-2, 1):
        image = F.pad(args["input"], (1 - integer, 1 + integer, 1, 1))
        moved = torch.zeros_like(args["offset"])
        moved[:, 1::2] = integer
        shifted = F.conv2d(image, args["weight"], args["bias"], groups=2)
        torch.testing.assert_close(deform_conv2d(**args | {"offset": moved}), shifted, rtol=1e-5, atol=1e-5)

    actual.sum().backward()
    precise = {k: t.detach().double() if isinstance(t, Tensor) else t for k, t in args.items()}
    slopes = torch.zeros_like(precise["offset"])
    for i in range(slopes.numel()):
        step = torch.zeros_like(slopes)
        step.view(-1)[i] = 1e-3
        moved = deform_conv2d(**precise | {"offset": step}) - deform_conv2d(**precise)
        slopes.view(-1)[i] = moved.sum() / 1e-3
    torch.testing.assert_close(args["offset"].grad, slopes.float(), rtol=1e-4, atol=1e-4)


def test_fades_to_zero_beyond_the_border() -> None:
    args = case(n=1, channels=1, outputs=1, size=(1, 1), kernel=(1, 1), padding=(0, 0), bias=False, mask=False)
    args["input"], args["weight"] = torch.full((1, 1, 1, 1), 4.0), torch.ones(1, 1, 1, 1)
    for y, x, expected in [(0, 0, 4), (0, -0.25, 3), (0.5, 0, 2), (0.5, 0.5, 1), (-1, 0, 0), (0, 1, 0), (0, 1e9, 0)]:
        args["offset"] = torch.tensor([y, x], dtype=torch.float32).view(1, 2, 1, 1)
        for actual in (deform_conv2d(**args), reference(*node_args(args)), run_op(OP, node_args(args), 11)[0]):
            assert actual.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf, 1e30, -1e30])
def test_a_strange_offset_reads_zero(strange: float) -> None:
    args = case(dtype=torch.float32)
    args["offset"][:, ::3] = strange
    expected = deform_conv2d(**args)
    silent = {**args, "offset": args["offset"].nan_to_num(1e6, 1e6, -1e6).clamp(-1e6, 1e6)}
    torch.testing.assert_close(expected, deform_conv2d(**silent))
    assert expected.isfinite().all()
    torch.testing.assert_close(reference(*node_args(args)), expected, rtol=1e-5, atol=1e-5)
    for opset in OPSETS:
        torch.testing.assert_close(run_op(OP, node_args(args), opset)[0], expected, rtol=1e-5, atol=1e-5)


def test_positions_stay_float32_beside_half_inputs() -> None:
    """Half would put a tap far in a wide image half a pixel off."""
    args = case(n=1, channels=1, outputs=1, size=(1, 3000), kernel=(1, 1), padding=(0, 0), bias=False, mask=False)
    args["input"] = (torch.arange(3000) % 7 / 7).half().view(1, 1, 1, 3000)
    args["offset"] = (torch.rand(1, 2, 1, 3000) / 2).half()
    args["weight"] = torch.ones(1, 1, 1, 1).half()
    expected = loops(**{k: t.double() if isinstance(t, Tensor) else t for k, t in args.items()})
    for actual in (deform_conv2d(**args), reference(*node_args(args)), run_op(OP, node_args(args), 11)[0]):
        assert actual.dtype == torch.float16
        torch.testing.assert_close(actual.double(), expected, rtol=2e-3, atol=2e-3)


def test_second_derivatives() -> None:
    args = case(n=1, channels=2, outputs=2, size=(2, 2), kernel=(1, 2), padding=(0, 0), groups=2, offset_groups=2)
    names = [name for name, t in args.items() if isinstance(t, Tensor)]

    def function(*tensors: Tensor) -> Tensor:
        return deform_conv2d(**args | dict(zip(names, tensors, strict=True)))

    assert torch.autograd.gradgradcheck(function, [args[name].requires_grad_() for name in names])


def test_no_images() -> None:
    args = case(n=0, dtype=torch.float32)
    expected = torch.zeros(0, 6, 4, 6)
    torch.testing.assert_close(deform_conv2d(**args), expected)
    torch.testing.assert_close(reference(*node_args(args)), expected)
    for opset in OPSETS:
        torch.testing.assert_close(run_op(OP, node_args(args), opset)[0], expected)


def test_compile_with_open_sizes() -> None:
    compiled = torch.compile(deform_conv2d, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in ((4, 5), (7, 6)):
        args = case(size=size, bias=False, groups=2, dtype=torch.float32)
        torch.testing.assert_close(compiled(**args), deform_conv2d(**args))


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"input": torch.zeros(4, 4, 5)}, r"expects input \(N, C, H, W\).*got input \(4, 4, 5\)"),
        ({"input": torch.zeros(2, 4, 0, 5)}, r"got input \(2, 4, 0, 5\)"),
        ({"weight": torch.zeros(6, 3, 3, 2)}, r"expects weight \(O, C/groups, kH, kW\).*weight \(6, 3, 3, 2\)"),
        ({"weight": torch.zeros(5, 2, 3, 2)}, r"divides O and C"),
        (
            {"offset": torch.zeros(2, 10, 4, 6)},
            r"expects offset \(2, 2\*offset_groups\*6, 4, 6\).*got.*\(2, 10, 4, 6\)",
        ),
        ({"offset": torch.zeros(2, 36, 4, 6)}, r"offset groups that divides C"),
        ({"offset": torch.zeros(2, 12, 4, 5)}, r"expects offset \(2, 2\*offset_groups\*6, 4, 6\)"),
        ({"offset": torch.zeros(1, 12, 4, 6)}, r"offset \(1, 12, 4, 6\)"),
        ({"mask": torch.zeros(2, 12, 4, 6)}, r"expects mask \(2, 6, 4, 6\).*got.*mask \(2, 12, 4, 6\)"),
        ({"bias": torch.zeros(5)}, r"expects bias \(6,\).*got.*bias \(5,\)"),
        ({"stride": 0}, r"strides and dilations of at least 1, got \(0, 0\)"),
        ({"dilation": -1}, r"strides and dilations of at least 1, got .*\(-1, -1\)"),
        ({"dilation": 99}, r"an image that its kernel fits into"),
    ],
)
def test_errors(change: dict, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        deform_conv2d(**case() | change)


def test_integers_are_refused() -> None:
    args = case()
    with pytest.raises(TypeError, match=r"expects a floating-point or int8 input .*, got torch.int32 and"):
        deform_conv2d(**args | {"input": args["input"].int()})


# ------------------------------------------------------------------ the module


def test_module_has_the_parameters_of_the_one_it_replaces() -> None:
    module = DeformConv2d(4, 6, (3, 2), stride=2, padding=(1, 0), dilation=1, groups=2)
    assert {name: tuple(p.shape) for name, p in module.state_dict().items()} == {"weight": (6, 2, 3, 2), "bias": (6,)}
    assert set(DeformConv2d(4, 6, 3, bias=False).state_dict()) == {"weight"}
    assert (module.kernel_size, module.stride, module.padding, module.dilation) == ((3, 2), (2, 2), (1, 0), (1, 1))
    assert "groups=2" in repr(module)
    bound = 1 / math.sqrt(2 * 3 * 2)
    assert 0.5 * bound < module.weight.abs().max() <= bound
    assert 0 < module.bias.abs().max() <= bound
    for channels in ((3, 4), (4, 3)):
        with pytest.raises(ValueError, match="groups=2"):
            DeformConv2d(*channels, 3, groups=2)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_module_is_its_definition(bias: bool, masked: bool) -> None:
    module = DeformConv2d(4, 6, (3, 2), stride=(1, 2), padding=1, dilation=(1, 2), groups=2, bias=bias).double()
    options = {"stride": (1, 2), "padding": (1, 1), "dilation": (1, 2)}
    args = case(groups=2, bias=False, mask=masked, **options)
    expected = loops(**args | {"weight": module.weight, "bias": module.bias})
    torch.testing.assert_close(module(args["input"], args["offset"], args["mask"]), expected)


# ------------------------------------------------------------------ exports


class Layer(nn.Module):
    """A deformable convolution with what predicts its offsets, as models have it."""

    def __init__(self, bias: bool, masked: bool) -> None:
        super().__init__()
        self.convolution = DeformConv2d(4, 6, 3, stride=2, padding=1, groups=2, bias=bias)
        self.offset = nn.Conv2d(4, 18, 3, stride=2, padding=1)
        self.mask = nn.Conv2d(4, 9, 3, stride=2, padding=1) if masked else None

    def forward(self, x: Tensor) -> Tensor:
        return self.convolution(x, self.offset(x), None if self.mask is None else self.mask(x).sigmoid())


@pytest.mark.core
@pytest.mark.parametrize(
    ("opset", "bias", "masked", "inputs"),
    [(11, True, True, 5), (11, False, True, 5), (11, False, False, 3), (18, False, True, 5)],
)
def test_export(opset: int, bias: bool, masked: bool, inputs: int, tmp_path) -> None:
    model, path = Layer(bias, masked).eval(), tmp_path / "model.onnx"
    dynamic = {"x": {0: "n", 2: "h", 3: "w"}}
    svexport.export(model, (torch.randn(2, 4, 9, 7),), path, opset=opset, dynamic_shapes=dynamic)
    exported = onnx.load(path)
    (node,) = svexport_nodes(exported)
    assert (node.op_type, len(node.input)) == ("SvDeformConv2d", inputs)
    assert all(node.input)  # none absent: TensorRT's parser takes no absent input
    x = torch.randn(3, 4, 6, 12)
    torch.testing.assert_close(run_model(exported, [x])[0], model(x), rtol=1e-4, atol=1e-5)


def _torchvision() -> None:
    """torchvision's operator: its own, or where it is not installed one of its schema."""
    try:
        import torchvision  # noqa: F401
    except ImportError:
        if hasattr(torch.ops.torchvision, "deform_conv2d"):
            return
        _library.define(
            "deform_conv2d(Tensor input, Tensor weight, Tensor offset, Tensor mask, Tensor bias, SymInt stride_h, "
            "SymInt stride_w, SymInt pad_h, SymInt pad_w, SymInt dilation_h, SymInt dilation_w, SymInt groups, "
            "SymInt offset_groups, bool use_mask) -> Tensor"
        )

        def function(x, weight, offset, mask, bias, sh, sw, ph, pw, dh, dw, groups, offset_groups, use_mask) -> Tensor:
            pairs = (sh, sw), (ph, pw), (dh, dw)
            return reference(x, offset, weight, bias, mask if use_mask else None, *pairs, groups, offset_groups, 1.0)

        _library.impl("deform_conv2d", function, "CompositeExplicitAutograd")
        torch.library.register_fake("torchvision::deform_conv2d", function, lib=_library)


_library = torch.library.Library("torchvision", "FRAGMENT")


class Unedited(Layer):
    def forward(self, x: Tensor) -> Tensor:
        # as torchvision.ops.deform_conv2d calls it
        mask = x.new_zeros(x.shape[0], 1) if self.mask is None else self.mask(x).sigmoid()
        weight, bias = self.convolution.weight, self.convolution.bias
        pairs = (2, 2, 1, 1, 1, 1)
        return torch.ops.torchvision.deform_conv2d(
            x, weight, self.offset(x), mask, bias, *pairs, 2, 1, self.mask is not None
        )


@pytest.mark.core
@pytest.mark.parametrize(("opset", "masked"), [(11, False), (11, True), (18, False)])
def test_export_of_an_unedited_torchvision_model(opset: int, masked: bool, tmp_path) -> None:
    _torchvision()
    model, path = Unedited(True, masked).eval(), tmp_path / "model.onnx"
    x = torch.randn(2, 4, 9, 7)
    report = svexport.export(model, (x,), path, opset=opset)
    assert report.nodes["SvDeformConv2d"] == 1
    torch.testing.assert_close(run_model(onnx.load(path), [x])[0], model(x), rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ int8


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize(
    "sizes", [{}, {"groups": 2, "offset_groups": 4, "channels": 8}, {"mask": False, "bias": False}]
)
def test_int8_inputs_are_their_numbers(sizes: dict, dtype: torch.dtype) -> None:
    """In the op, its reference and the body; the output has the type of the weight, whose gradient is right."""
    args = case(**sizes, dtype=dtype)
    if dtype == torch.float16:
        args["offset"] = args["offset"].to(random.choice([dtype, torch.float32]))
    codes, scale = (args["input"] * 50).round().clamp(-128, 127).to(torch.int8), 0.023
    exact = {k: t.double() if isinstance(t, Tensor) else t for k, t in args.items()} | {"input": codes.double() * scale}
    expected = loops(**exact)
    tolerance = {torch.float16: 4e-3, torch.float32: 1e-5}.get(dtype, 1e-7)  # the scale of a body is float32
    smallest = tolerance * float(expected.abs().max())
    given = args | {"input": codes}
    groups = {name: sizes.get(name, 1) for name in ("groups", "offset_groups")}
    node = (*node_args(given, **groups)[:-1], scale)
    for actual in (deform_conv2d(**given, scale=scale), reference(*node), run_op(OP, node, random.choice(OPSETS))[0]):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=smallest)
    if dtype == torch.float64:
        leaves = [{name: given[name].clone().requires_grad_() for name in ("weight", "offset")} for _ in range(2)]
        outputs = deform_conv2d(**given | leaves[0], scale=scale), deform_conv2d(**exact | leaves[1])
        own, wanted = (
            torch.autograd.grad(y.square().sum(), [*of.values()]) for y, of in zip(outputs, leaves, strict=True)
        )
        for a, e in zip(own, wanted, strict=True):
            torch.testing.assert_close(a.double(), e.double(), rtol=1e-4, atol=1e-4)
