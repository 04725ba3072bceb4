"""The attention layers of torch.nn agree with torch to 1e-5 in all settings, with both exporters."""

from __future__ import annotations

import itertools
import random
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import svexport
from tests.support import exported

OPSETS = [11, 13, 17, 18, 20]
EMBED, HEADS, BATCH, LENGTH, SOURCE = 8, 2, 2, 3, 5
MASKS = (None, "bool", "float", "bool 3-D", "float 3-D")
PADDINGS = (None, "bool", "float")
ACTIVATIONS = ("relu", "gelu")

pytestmark = pytest.mark.filterwarnings("ignore:Support for mismatched", "ignore:enable_nested_tensor")


def mask(kind: str | None, rows: int, columns: int) -> Tensor | None:
    """Boolean (True is hidden) or added to the scores, for all heads or for each; no row is hidden as a whole."""
    if kind is None:
        return None
    shape = (BATCH * HEADS, rows, columns) if kind.endswith("3-D") else (rows, columns)
    generator = torch.Generator().manual_seed(rows * columns)
    hidden = torch.rand(shape, generator=generator) < 0.4
    hidden[..., 0] = False
    if kind.startswith("bool"):
        return hidden
    return torch.randn(shape, generator=generator).masked_fill(hidden, -torch.inf)


def padding(kind: str | None, columns: int) -> Tensor | None:
    """The last sequence ends one position early."""
    if kind is None:
        return None
    hidden = torch.zeros(BATCH, columns, dtype=torch.bool)
    hidden[-1, -1] = True
    return hidden if kind == "bool" else torch.zeros(BATCH, columns).masked_fill(hidden, -torch.inf)


class Variants(nn.Module):
    """Modules by name, and how each is called on the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList()
        self.calls: list[tuple[str, Callable[..., Tensor | tuple[Tensor, ...]]]] = []

    def add(self, name: str, layer: nn.Module, call: Callable[..., Tensor | tuple[Tensor, ...]]) -> None:
        self.layers.append(layer)
        self.calls.append((name, call))

    def forward(self, x: Tensor, memory: Tensor) -> dict[str, Tensor]:
        outputs = {}
        for layer, (name, call) in zip(self.layers, self.calls, strict=True):
            result = call(layer, x, memory)
            for i, output in enumerate(result if isinstance(result, tuple) else (result,)):
                if output is not None:
                    outputs[f"{name} {i}"] = output
        return outputs


def check(model: Variants, opset: int, folder: Path, dynamic: bool = False) -> None:
    """The file agrees with torch in eval mode, with and without fast paths; on another batch too if that is dynamic."""
    torch.manual_seed(opset)
    model.eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    x, memory = torch.randn(BATCH, LENGTH, EMBED), torch.randn(BATCH, SOURCE, EMBED)
    shapes = {"x": {0: "batch"}, "memory": {0: "batch"}} if dynamic else None
    report = svexport.export(
        model, (x, memory), folder / "m.onnx", opset=opset, dynamic_shapes=shapes, verify=False, plugins=False
    )
    engine = svexport.load(report.path)
    for n in (BATCH, 5) if dynamic else (BATCH,):
        x, memory = torch.randn(n, LENGTH, EMBED), torch.randn(n, SOURCE, EMBED)
        with torch.no_grad():
            fast = model(x, memory)
        expected = {name: output.detach() for name, output in model(x, memory).items()}
        for (name, e), a in zip(expected.items(), engine(x, memory), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")
            if "float" not in name:  # for which the fast path gives NaN
                torch.testing.assert_close(fast[name], e, rtol=1e-5, atol=1e-5)


def settings(together: int, *choices: tuple) -> Iterator[tuple]:
    """So many combinations that every ``together`` of the choices meet in one: exporters take its square in time."""
    combinations = list(itertools.product(*choices))
    random.Random(1).shuffle(combinations)
    met: set[tuple] = set()
    for chosen in combinations:
        groups = set(itertools.combinations(enumerate(chosen), together))
        if not groups <= met:
            yield chosen
        met |= groups


def first(batch_first: bool, *tensors: Tensor) -> tuple[Tensor, ...]:
    return tensors if batch_first else tuple(t.transpose(0, 1) for t in tensors)


@pytest.fixture
def at_most(everything: bool, opset: int) -> int:
    """How many choices need to meet."""
    return 5 if everything else 1 + (opset == 11)


@pytest.mark.parametrize("opset", OPSETS)
def test_multihead_attention(opset: int, at_most: int, tmp_path) -> None:
    model = Variants()
    for batch_first, attn, pad, weights, own in settings(
        min(at_most, {11: 5, 20: 1}.get(opset, 2)),
        (True, False),
        MASKS,
        PADDINGS[: 2 if opset == 11 else 3],
        (True, False),
        (True, False),
    ):
        columns = LENGTH if own else SOURCE
        options = {
            "attn_mask": mask(attn, LENGTH, columns),
            "key_padding_mask": padding(pad, columns),
            "need_weights": weights,
        }

        def call(layer: nn.Module, x: Tensor, memory: Tensor, own=own, options=options) -> tuple:
            query, key = first(layer.batch_first, x, x if own else memory)
            key = query if own else key  # the very same tensor: a condition of the fast path
            return layer(query, key, key, **options)

        name = f"{batch_first=} {attn=} {pad=} {weights=} {own=}"
        model.add(name, nn.MultiheadAttention(EMBED, HEADS, batch_first=batch_first), call)
    check(model, opset, tmp_path)


@pytest.mark.parametrize("opset", [11, 17, 20])
def test_multihead_attention_with_options(opset: int, tmp_path) -> None:
    """Without biases, other sizes of keys and values, learned, zero keys, causal, weights of each head, unbatched."""
    attention = lambda **options: nn.MultiheadAttention(EMBED, HEADS, batch_first=True, **options)  # noqa: E731
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    model = Variants()
    model.add("no bias", attention(bias=False), lambda m, x, memory: m(x, memory, memory))
    model.add("add_bias_kv", attention(add_bias_kv=True), lambda m, x, memory: m(x, memory, memory, need_weights=False))
    model.add("add_zero_attn", attention(add_zero_attn=True), lambda m, x, memory: m(x, memory, memory))
    sizes = attention(kdim=5, vdim=3)
    model.add("kdim, vdim", sizes, lambda m, x, memory: m(x, memory[..., :5], memory[..., :3], need_weights=False))
    model.add(
        "is_causal", attention(), lambda m, x, _: m(x, x, x, attn_mask=causal, is_causal=True, need_weights=False)
    )
    model.add("causal mask", attention(), lambda m, x, _: m(x, x, x, attn_mask=causal))
    model.add("each head", attention(), lambda m, x, memory: m(x, memory, memory, average_attn_weights=False))
    model.add("unbatched", attention(), lambda m, x, memory: m(x[0], memory[1], memory[1], need_weights=False))
    check(model, opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_encoder_layer(opset: int, at_most: int, tmp_path) -> None:
    model = Variants()
    for batch_first, attn, pad, norm_first, activation in settings(
        min(at_most, {11: 5, 13: 2, 17: 2}.get(opset, 1)),
        (True, False),
        MASKS,
        (None, "bool"),
        (True, False),
        ACTIVATIONS,
    ):
        layer = nn.TransformerEncoderLayer(
            EMBED, HEADS, 12, activation=activation, batch_first=batch_first, norm_first=norm_first
        )
        options = {"src_mask": mask(attn, LENGTH, LENGTH), "src_key_padding_mask": padding(pad, LENGTH)}

        def call(layer: nn.Module, x: Tensor, _: Tensor, batch_first=batch_first, options=options) -> Tensor:
            return layer(*first(batch_first, x), **options)

        model.add(f"{batch_first=} {attn=} {pad=} {norm_first=} {activation=}", layer, call)
    check(model, opset, tmp_path)


@pytest.mark.parametrize("opset", OPSETS)
def test_decoder_layer(opset: int, at_most: int, tmp_path) -> None:
    model = Variants()
    for batch_first, own, cross, own_pad, cross_pad, norm_first, activation in settings(
        min(at_most, 2 if opset < 18 else 1),
        (True, False),
        (None, "bool", "float 3-D"),
        ("bool 3-D", None, "float"),
        (None, "bool"),
        (None, "bool"),
        (True, False),
        ACTIVATIONS,
    ):
        layer = nn.TransformerDecoderLayer(
            EMBED, HEADS, 12, activation=activation, batch_first=batch_first, norm_first=norm_first
        )
        options = {
            "tgt_mask": mask(own, LENGTH, LENGTH),
            "memory_mask": mask(cross, LENGTH, SOURCE),
            "tgt_key_padding_mask": padding(own_pad, LENGTH),
            "memory_key_padding_mask": padding(cross_pad, SOURCE),
        }

        def call(layer: nn.Module, x: Tensor, memory: Tensor, batch_first=batch_first, options=options) -> Tensor:
            return layer(*first(batch_first, x, memory), **options)

        name = f"{batch_first=} {own=} {cross=} {own_pad=} {cross_pad=} {norm_first=} {activation=}"
        model.add(name, layer, call)
    check(model, opset, tmp_path)


@pytest.mark.parametrize("opset", [11, 17, 18])
def test_stacks(opset: int, tmp_path) -> None:
    """Encoders, decoders and whole transformers, with a dynamic batch."""
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    encoder_layer = nn.TransformerEncoderLayer(EMBED, HEADS, 12, activation=torch.tanh, batch_first=True)
    decoder_layer = nn.TransformerDecoderLayer(EMBED, HEADS, 12, batch_first=True, norm_first=True)
    model = Variants()
    model.add("encoder", nn.TransformerEncoder(encoder_layer, 2, nn.LayerNorm(EMBED)), lambda m, x, _: m(x))
    model.add("causal", nn.TransformerEncoder(encoder_layer, 1), lambda m, x, _: m(x, mask=causal, is_causal=True))
    model.add("causal mask", nn.TransformerEncoder(encoder_layer, 1), lambda m, x, _: m(x, mask=causal))
    decoder = nn.TransformerDecoder(decoder_layer, 1, nn.LayerNorm(EMBED))
    model.add("decoder", decoder, lambda m, x, memory: m(x, memory, tgt_mask=causal, tgt_is_causal=True))
    whole = nn.Transformer(EMBED, HEADS, 1, 1, 12)
    model.add("whole", whole, lambda m, x, memory: m(*first(False, memory, x), tgt_mask=causal, tgt_is_causal=True))
    check(model, opset, tmp_path, dynamic=True)


@pytest.mark.parametrize("opset", [11, 18])
def test_a_mask_that_looks_causal_stays_an_input(opset: int, tmp_path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(EMBED, HEADS, 12, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            return self.encoder(x, mask=mask)

    model, x = Model().eval(), torch.randn(BATCH, LENGTH, EMBED)
    causal = nn.Transformer.generate_square_subsequent_mask(LENGTH)
    report = svexport.export(model, (x, causal), tmp_path / "m.onnx", opset=opset)
    for given in (causal, causal.T, torch.zeros_like(causal)):
        with torch.no_grad():
            expected = model(x, given)
        torch.testing.assert_close(svexport.load(report.path)(x, given), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.core
@pytest.mark.parametrize("opset", [11, 18])
def test_padded_positions(opset: int, tmp_path) -> None:
    """The encoder's fast path puts zeros at padded positions; everywhere else the file agrees with it."""
    torch.manual_seed(0)
    hidden = torch.tensor([[False, False, False], [False, True, True]])

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(EMBED, HEADS, 12, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)

        def forward(self, x: Tensor, hidden: Tensor) -> Tensor:
            return self.encoder(x, src_key_padding_mask=hidden)

    model, x = Model().eval(), torch.randn(BATCH, LENGTH, EMBED)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # nested tensors are a prototype
        fast = model(x, hidden)
    assert not fast[hidden].any()
    report = svexport.export(model, (x, hidden), tmp_path / "m.onnx", opset=opset)
    assert report.verified
    assert torch.backends.mha.get_fastpath_enabled()
    actual = svexport.load(report.path)(x, hidden)
    torch.testing.assert_close(actual[~hidden], fast[~hidden], rtol=1e-5, atol=1e-5)
    assert actual[hidden].all()
    with pytest.raises(svexport.ExportError, match="missing a required argument: 'hidden'"):
        svexport.export(model, (x,), tmp_path / "n.onnx", opset=opset)
    assert torch.backends.mha.get_fastpath_enabled()  # after an error too


class ScaledDotProduct(nn.Module):
    """Every argument of the function."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor, allowed: Tensor) -> dict[str, Tensor]:
        attend = F.scaled_dot_product_attention
        heads = q.shape[1]
        nothing = (torch.arange(LENGTH) > 0)[:, None] & allowed  # leaves the first query nothing
        return {
            "plain": attend(q, k, v),
            "scale": attend(q, k, v, scale=0.7),
            "negative scale": attend(q, k, v, scale=-0.3),
            "causal": attend(q, k, v, is_causal=True),
            "causal, fewer keys": attend(k, q, q, is_causal=True),
            "added": attend(q, k, v, attn_mask=added),
            "added for each head": attend(q, k, v, attn_mask=torch.stack([added] * heads) * 2),
            "allowed": attend(q, k, v, attn_mask=allowed),
            "nothing allowed": attend(q, k, v, attn_mask=nothing),
            "nothing added": attend(q, k, v, attn_mask=torch.where(nothing, added, -torch.inf)),
            "allowed for each head": attend(q, k, v, torch.stack([allowed] * heads), 0.0, False, scale=1.5),
            "groups": attend(q, k[:, :2], v[:, :2], enable_gqa=True),
            "groups with a mask": attend(q, k[:, :1], v[:, :1], added, enable_gqa=True, scale=0.2),
            "groups, causal": attend(q, k[:, :2], v[:, :2], is_causal=True, enable_gqa=True),
            "three dimensions": attend(q[0], k[0], v[0], attn_mask=allowed),
            "two dimensions": attend(q[0, 0], k[0, 0], v[0, 0]),
            "keywords": attend(query=q, key=k, value=v, dropout_p=0.0, is_causal=False),
        }


@pytest.mark.core
@pytest.mark.parametrize(
    ("opset", "dynamic"),
    [(9, True), (11, False), (13, True), (17, False), (18, True), pytest.param(23, True, marks=exported(23))],
)
def test_scaled_dot_product_attention(opset: int, dynamic: bool, tmp_path) -> None:
    torch.manual_seed(opset)

    def inputs(batch: int, length: int) -> tuple[Tensor, ...]:
        q, k, v = (torch.randn(batch, 4, size, EMBED) for size in (LENGTH, length, length))
        hidden = torch.rand(LENGTH, length) < 0.3
        hidden[:, 0] = False
        return q, k, v, torch.randn(LENGTH, length).masked_fill(hidden, -torch.inf), ~hidden

    shapes = None
    if dynamic:
        shapes = {"q": {0: "n"}, "k": {0: "n", 2: "s"}, "v": {0: "n", 2: "s"}, "added": {1: "s"}, "allowed": {1: "s"}}
    model, args = ScaledDotProduct(), inputs(2, SOURCE)
    report = svexport.export(model, args, tmp_path / "m.onnx", opset=opset, dynamic_shapes=shapes)
    assert report.verified
    assert not {"Attention", "Trilu", "SvScaledDotProductAttention"} & report.nodes.keys()
    engine = svexport.load(report.path)
    for given in (args, inputs(3, 9)) if dynamic else (args,):
        for (name, e), a in zip(model(*given).items(), engine(*given), strict=True):
            torch.testing.assert_close(a, e, rtol=1e-5, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("opset", [11, 18])
def test_dropout_outside_of_training_is_refused(opset: int, tmp_path) -> None:
    class Model(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(x, x, x, dropout_p=0.1)

    with pytest.raises(svexport.ExportError, match=r"got 0\.1"):
        svexport.export(Model(), (torch.randn(1, 2, 3, 4),), tmp_path / "m.onnx", opset=opset)
    assert not list(tmp_path.iterdir())
