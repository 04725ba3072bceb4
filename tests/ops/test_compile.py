"""torch.compile takes every functional, with its default arguments, as one graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from svexport import ops
from svexport.ops._op import OPS, as_tuple


def make(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)))


MATRICES = make(2, 3, 3) + 4 * torch.eye(3)
PLACES = torch.tensor([[0, 1, 1]])
CALLS: dict[str, tuple] = {
    "add_bias_residual_layer_norm": (make(2, 4), make(4), make(2, 4), make(4), make(4)),
    "deform_conv2d": (make(1, 2, 5, 5), make(1, 18, 3, 3), make(3, 2, 3, 3)),
    "dequantize": (make(1, 2, 4).to(torch.int8), 0.1),
    "einsum": ("ij,jk", make(3, 4), make(4, 5)),
    "fast_tanh": (make(3, 4),),
    "fold": (make(1, 8, 9), (4, 4), 2),
    "grid_sample": (make(1, 2, 4, 5), make(1, 3, 3, 2)),
    "index_add": (make(3, 4), 0, PLACES[0], make(3, 4)),
    "index_put": (make(3, 4), [PLACES[0]], make(3, 4)),
    "interpolate": (make(1, 2, 4, 4), (6, 6)),
    "inverse": (MATRICES,),
    "inverse_ex": (MATRICES,),
    "layer_norm": (make(3, 4), (4,)),
    "max_pool2d": (make(1, 2, 4, 4), 2),
    "quantize": (make(1, 2, 4), 0.1),
    "scaled_dot_product_attention": (make(1, 2, 3, 4), make(1, 2, 5, 4), make(1, 2, 5, 4)),
    "scatter_add": (make(3, 4), 0, PLACES, make(1, 3)),
    "scatter_reduce": (make(3, 4), 0, PLACES, make(1, 3), "sum"),
    "solve": (MATRICES, make(2, 3, 2)),
    "solve_ex": (MATRICES, make(2, 3, 2)),
    "to_chw32": (make(1, 5, 2, 2),),
    "tril": (make(3, 4),),
    "triu": (make(3, 4),),
    "unfold": (make(3, 4), 1, 2, 1),
}
"""Arguments; those of a functional that is not here are the first sample of its op."""
CALLS["camera_sample"] = ([make(1, 2, 4, 3, 5)], make(1, 6, 3), make(1, 2, 4, 4), make(1, 6, 2, 1, 1))
CALLS["ms_deform_attn"] = next(iter(OPS["ms_deform_attn"].samples(make)))[:5]
REQUIRED = {"camera_sample": {"image_size": (24, 40), "pc_range": (-1.0, -1.0, -1.0, 1.0, 1.0, 1.0)}}
BY_ITS_MODULE = {"transformer_decoder"}
"""It takes 138 tensors, which test_every_op compiles."""


@pytest.mark.parametrize("name", [n for n in ops.__all__ if n.islower() and n not in BY_ITS_MODULE])
def test_functional_compiles_in_one_graph(name: str) -> None:
    function: Callable[..., object] = getattr(ops, name)
    args = CALLS[name] if name in CALLS else next(iter(OPS[name].samples(make)))
    required = REQUIRED.get(name, {})
    torch.compiler.reset()
    compiled = torch.compile(lambda *a: function(*a, **required), fullgraph=True, backend="eager")(*args)
    for actual, expected in zip(as_tuple(compiled), as_tuple(function(*args, **required)), strict=True):
        torch.testing.assert_close(actual, expected)
