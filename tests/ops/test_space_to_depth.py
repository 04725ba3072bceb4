from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import svexport
from svexport.ops.space_to_depth import OP, Focus, SpaceToDepth, space_to_depth
from svexport.symbolic import SYMBOLICS
from svexport.symbolic._builder import Builder, Value
from tests.support import OPSETS, op_model, run_op


def focus(x: Tensor) -> Tensor:
    """As YOLOX defines it: rows down, columns right."""
    top_left, top_right = x[..., ::2, ::2], x[..., ::2, 1::2]
    bottom_left, bottom_right = x[..., 1::2, ::2], x[..., 1::2, 1::2]
    return torch.cat((top_left, bottom_left, top_right, bottom_right), dim=1)


@settings(deadline=None, derandomize=True, database=None)
@given(
    shape=st.tuples(*(st.integers(0, 4) for _ in range(4))),
    dtype=st.sampled_from([torch.float64, torch.float16, torch.int8, torch.bool]),
)
def test_values(shape, dtype) -> None:
    n, c, h, w = shape
    x = torch.arange(n * c * 4 * h * w).reshape(n, c, 2 * h, 2 * w).to(dtype)
    expected = focus(x)
    assert torch.equal(space_to_depth(x), expected)
    assert torch.equal(SpaceToDepth()(x.to(memory_format=torch.channels_last)), expected)
    if x.numel():
        unshuffled = F.pixel_unshuffle(x.double(), 2)  # the channel slowest, the row before the column
        permuted = unshuffled.unflatten(1, (c, 2, 2)).permute(0, 3, 2, 1, 4, 5).flatten(1, 3)
        assert torch.equal(space_to_depth(x).double(), permuted)


@pytest.mark.parametrize("opset", OPSETS)
def test_body(opset) -> None:
    for shape in [(1, 3, 4, 6), (2, 5, 2, 14), (3, 1, 22, 26), (1, 1, 2, 2), (0, 3, 4, 4)]:
        for dtype in (torch.float32, torch.float16, torch.int8):
            x = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
            for dynamic in (False, True):
                assert torch.equal(run_op(OP, (x,), opset, dynamic=dynamic)[0], focus(x))
    empty = torch.randn(1, 3, 0, 4)
    assert torch.equal(run_op(OP, (empty,), opset)[0], focus(empty))


@pytest.mark.parametrize("opset", OPSETS)
def test_body_is_one_transpose(opset) -> None:
    model = op_model(OP, (torch.randn(1, 3, 4, 6),), opset)
    assert [node.op_type for node in model.graph.node] == ["Reshape", "Transpose", "Reshape"]


def test_odd_sizes_are_refused() -> None:
    for shape in [(1, 3, 5, 4), (1, 3, 4, 7)]:
        with pytest.raises(ValueError, match=r"even H and W, got \(1, 3, .*; pad"):
            space_to_depth(torch.randn(shape))
        with pytest.raises(svexport.UnsupportedError, match="even H and W"):
            SYMBOLICS["SvSpaceToDepth"].build(Builder(11), [Value("x", 1, shape)])
    with pytest.raises(ValueError, match=r"expects \(N, C, H, W\), got \(3, 4, 6\)"):
        space_to_depth(torch.randn(3, 4, 6))


class TheirFocus(nn.Module):
    """YOLOX's module, from its description: slices, then conv, batch norm and activation."""

    def __init__(self, channels: int, out: int, ksize: int, stride: int, act: nn.Module) -> None:
        super().__init__()
        self.conv = nn.Module()
        self.conv.conv = nn.Conv2d(4 * channels, out, ksize, stride, padding=(ksize - 1) // 2, bias=False)
        self.conv.bn = nn.BatchNorm2d(out)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.conv.bn(self.conv.conv(focus(x))))


@pytest.mark.parametrize(
    ("ksize", "stride", "act", "activation"),
    [(1, 1, "silu", nn.SiLU()), (3, 1, "relu", nn.ReLU()), (5, 2, "lrelu", nn.LeakyReLU(0.1))],
)
def test_focus_is_a_drop_in(ksize, stride, act, activation) -> None:
    torch.manual_seed(ksize)
    theirs, ours = TheirFocus(3, 8, ksize, stride, activation), Focus(3, 8, ksize, stride, act)
    for p in theirs.parameters():
        nn.init.normal_(p)
    names = ["weight", "bias", "running_mean", "running_var", "num_batches_tracked"]
    assert list(ours.state_dict()) == ["conv.conv.weight", *(f"conv.bn.{name}" for name in names)]
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(2, 3, 12, 10)
    for mode in (True, False):
        torch.testing.assert_close(ours.train(mode)(x), theirs.train(mode)(x))


def test_focus_has_the_defaults_of_yolox() -> None:
    focus = Focus(3, 8)
    assert focus.conv.conv.kernel_size == (1, 1)
    assert isinstance(focus.conv.act, nn.SiLU)
    with pytest.raises(ValueError, match="one of silu, relu, lrelu; got 'gelu'"):
        Focus(3, 8, act="gelu")


@pytest.mark.parametrize("opset", [9, 11, 18])
def test_export_with_dynamic_sizes(opset, tmp_path) -> None:
    torch.manual_seed(0)
    model, shapes = Focus(3, 4, 3), {"x": {0: "n", 2: "h"}}
    for plugins in (True, False) if opset < 18 else (True,):
        report = svexport.export(
            model, torch.randn(1, 3, 8, 6), tmp_path / "m.onnx", opset=opset, plugins=plugins, dynamic_shapes=shapes
        )
        assert report.traced_nodes["SvSpaceToDepth"] == 1
        engine = svexport.load(report.path)
        for n, h in [(1, 8), (3, 2), (2, 14)]:
            x = torch.randn(n, 3, h, 6)
            with torch.no_grad():
                torch.testing.assert_close(engine(x), model.eval()(x), rtol=1e-4, atol=1e-5)


def test_compile_with_dynamic_sizes() -> None:
    function = torch.compile(space_to_depth, fullgraph=True, dynamic=True, backend="eager")
    for shape in [(1, 3, 4, 6), (2, 3, 8, 10), (1, 5, 2, 2)]:
        x = torch.randn(shape)
        assert torch.equal(function(x), focus(x))
