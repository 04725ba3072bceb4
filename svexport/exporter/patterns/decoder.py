"""Finds a whole decoder of the DETR3D kind, however its layers are divided into modules.

Its parts are found first: in a graph of everything down to torch's modules, each layer has an attention among queries
and one to cameras. The nodes between them lead to the parameters, and these to a :class:`TransformerDecoderConfig`.
Then outputs and gradients, also of parameters, are proven equal. Gradients either stop at the points between layers, as
in DETR3D's own code, or pass: both are tried. If neither matches the author's, the decoder replaces the layers only
where no gradient is recorded.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from svexport import ops
from svexport.exporter.patterns.camera_sample import CROP, looking
from svexport.exporter.patterns.pattern import ADDS, RELUS, VIEWS
from svexport.exporter.patterns.traced import NotTraced, Traced
from svexport.exporter.proof import Proof, Random
from svexport.ops._decoder.gradients import recorded, takes
from svexport.parity import parity

__all__ = ["OP", "PARTS", "WHAT", "Decoder", "decode", "find", "prove", "put"]

OP, WHAT = "transformer_decoder", "a decoder of the DETR3D kind"
PARTS = "camera_sample", "scaled_dot_product_attention"
"""Ops of which every layer has one, in the graph in which a decoder is searched."""

_MOVES = VIEWS | {"transpose", "permute", torch.transpose, torch.permute}

Node = Any  # a node of a graph, whose arguments may be anything
Step = tuple[str, ...]
"""The path of a module, or the three paths of an attention's projections."""


@dataclass(frozen=True)
class Decoder:
    """A decoder in a graph.

    Attributes:
        query, query_pos, points, cameras: nodes that the first layer starts from.
        features: nodes of the features.
        options: options of its configuration.
        modules: paths of the modules that have its parameters, in the order of the op; three for an ``in_proj``.
        outputs: nodes of classes, boxes and points; a model need not return them.
    """

    query: Node
    query_pos: Node
    points: Node
    cameras: Node
    features: tuple[Node, ...]
    options: tuple[tuple[str, Any], ...]
    modules: tuple[Step, ...]
    outputs: tuple[Node | None, ...]


_configs: dict[tuple[tuple[str, Any], ...], ops.TransformerDecoderConfig] = {}


def _config(options: tuple[tuple[str, Any], ...]) -> ops.TransformerDecoderConfig:
    if options not in _configs:  # torch.compile warns of functools.cache
        _configs[options] = ops.TransformerDecoderConfig(**dict(options))
    return _configs[options]


def decode(
    options: tuple[tuple[str, Any], ...],
    joined: bool,
    query: Tensor,
    query_pos: Tensor,
    points: Tensor,
    features: list[Tensor],
    cameras: Tensor,
    weights: list[Tensor],
) -> tuple[Tensor, ...]:
    """:func:`svexport.ops.transformer_decoder` with a configuration of plain values.

    Args:
        joined: whether recorded gradients pass between layers through their points.
    """
    config = _config(options)
    if torch.is_grad_enabled():
        return recorded(query, query_pos, points, features, cameras, weights, config, joined=joined)
    return tuple(ops.transformer_decoder(query, query_pos, points, features, cameras, weights, config))


class _Walk:
    """Walks from node to node; each method raises NotTraced if there is no such node."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced

    def is_a(self, node: Node, kind: type) -> bool:
        return isinstance(self.traced.called(node), kind)

    def relu(self, node: Node) -> bool:
        return node.target in RELUS or self.is_a(node, nn.ReLU)

    def back(self, node: Any, kind: type) -> Node:
        """The call of a module of class ``kind`` whose output the node views."""
        while isinstance(node, fx.Node) and node.target in _MOVES | {getattr} and node.args:
            node = node.args[0]
        if isinstance(node, fx.Node) and self.is_a(node, kind):
            return node
        raise NotTraced(f"expects a {kind.__name__} before {node}")

    def forth(self, node: Node, *kinds: type) -> list[Node]:
        """The chain of modules of these kinds after a node; a ReLU may be a function, and views are skipped."""
        found = list(self._chains(node, kinds))
        if len(found) != 1:
            raise NotTraced(f"expects one {', '.join(k.__name__ for k in kinds)} after {node}, got {len(found)}")
        return found[0]

    def _chains(self, node: Node, kinds: Sequence[type]) -> Iterator[list[Node]]:
        if not kinds:
            yield []
            return
        for user in node.users:
            if user.target in _MOVES:
                yield from self._chains(user, kinds)
            elif self.relu(user) if kinds[0] is nn.ReLU else self.is_a(user, kinds[0]):
                for rest in self._chains(user, kinds[1:]):
                    yield [user, *rest]

    def norm(self, node: Node) -> tuple[Node, list[Node]]:
        """The norm of the sum that a node is part of, and the other summands."""
        others: list[Node] = []
        while True:
            norms = [user for user in node.users if self.is_a(user, nn.LayerNorm)]
            if norms:
                return norms[0], others
            sums = [user for user in node.users if user.target in ADDS]
            if len(sums) != 1 or len(node.users) != 1:
                raise NotTraced(f"expects a LayerNorm of a sum after {node}")
            others += [n for n in sums[0].all_input_nodes if n is not node]
            node = sums[0]


_LINEAR, _NORM, _RELU = nn.Linear, nn.LayerNorm, nn.ReLU


def find(traced: Traced) -> Decoder | None:
    """The decoder in a graph whose parts are already ops; None if there is none."""
    samples = [n for n in traced.graph.nodes if n.target is ops.camera_sample]
    attends = [n for n in traced.graph.nodes if n.target is ops.scaled_dot_product_attention]
    if not samples or len(samples) != len(attends):
        return None
    walk = _Walk(traced)
    modules: list[Step] = []
    starts = []
    for attend, sample in zip(attends, samples, strict=True):
        layer, norm, reg, start = _layer(walk, attend, sample)
        modules += [tuple(str(n.target) for n in step) for step in layer]
        starts.append(start)
    cls = walk.forth(norm, _LINEAR, _NORM, _RELU, _LINEAR, _NORM, _RELU, _LINEAR)
    modules += [(str(n.target),) for n in cls if not walk.relu(n)]
    query, query_pos = starts[0]
    sample, attend = samples[0], attends[0]
    options = _options(walk, modules, sample, attend, len(samples), traced)
    features, points, cameras, _ = sample.args
    found = Decoder(query, query_pos, points, cameras, tuple(features), options, tuple(modules), (cls[-1], None, None))
    return _with_outputs(traced, found, reg)


def _layer(walk: _Walk, attend: Node, sample: Node) -> tuple[list[tuple[Node, ...]], Node, Node, tuple[Node, Node]]:
    """A layer's modules in the op's order, its last norm, its box branch, and its query and query position."""
    q, k, v = (walk.back(x, _LINEAR) for x in attend.args[:3])
    query = v.args[0]
    where = q.args[0]
    summands = where.all_input_nodes if isinstance(where, fx.Node) and where.target in ADDS else []
    if k.args[0] is not where or query not in summands or len(summands) != 2:
        raise NotTraced("expects attention among query + position")
    query_pos = next(n for n in summands if n is not query)
    (mha_out,) = walk.forth(attend, _LINEAR)
    mha_norm, _ = walk.norm(mha_out)
    scores = walk.back(sample.args[3], _LINEAR)
    (output,) = walk.forth(sample, _LINEAR)
    svca_norm, others = walk.norm(output)
    encoder = _encoder(walk, others)
    ffn = _ffn(walk, svca_norm)
    ffn_norm, _ = walk.norm(ffn[-1])
    reg = walk.forth(ffn_norm, _LINEAR, _RELU, _LINEAR, _RELU, _LINEAR)
    layer: list[tuple[Node, ...]] = [(q, k, v), (mha_out,), (mha_norm,), (scores,), (output,)]
    layer += [(n,) for n in (*encoder, svca_norm, ffn[0], ffn[2], ffn_norm, reg[0], reg[2], reg[4])]
    return layer, ffn_norm, reg[-1], (query, query_pos)


def _encoder(walk: _Walk, nodes: list[Node]) -> list[Node]:
    """The position encoder: linear, norm and ReLU, twice, whose result is added to the samples."""
    for node in nodes:
        found: list[Node] = []
        for kind in (_RELU, _NORM, _LINEAR) * 2:
            if not (walk.relu(node) if kind is _RELU else walk.is_a(node, kind)):
                break
            found.append(node)
            node = node.args[0]
        else:
            return [n for n in reversed(found) if not walk.relu(n)]
    raise NotTraced("expects an encoder of positions")


def _ffn(walk: _Walk, norm: Node) -> list[Node]:
    for user in norm.users:
        if type(walk.traced.called(user)) is _LINEAR:
            try:
                chain = [user, *walk.forth(user, _RELU, _LINEAR)]
                walk.norm(chain[-1])
                return chain
            except NotTraced:
                continue
    raise NotTraced("expects a feed forward")


def _options(
    walk: _Walk, modules: list[Step], sample: Node, attend: Node, layers: int, traced: Traced
) -> tuple[tuple[str, Any], ...]:
    features, _, cameras, scores = sample.args

    def linear(step: Step) -> Any:
        return traced.module.get_submodule(step[0])

    per_layer = (len(modules) - 5) // layers
    cams = traced.values[cameras].shape[1]
    unflattened = scores
    while unflattened.target == "permute":
        unflattened = unflattened.args[0]
    if unflattened is not scores:
        raise NotTraced("expects weights in the order of cameras, points and levels")
    channels = linear(modules[0]).out_features
    head = traced.values[attend].shape[1]
    options = {
        "num_layers": layers,
        "embed_dims": channels,
        "num_heads": head,
        "ffn_dims": linear(modules[10]).out_features,
        "num_classes": linear(modules[-1]).out_features,
        "code_size": linear(modules[per_layer - 1]).out_features,
        "num_cams": cams,
        "num_points": unflattened.args[2][1],
        "feature_sizes": ((1, 1),) * len(features),
        **{k: v for k, v in sample.kwargs.items() if k in ("image_size", "pc_range", "depth_eps", "uv_clamp")},
        "activation": sample.kwargs["activation"],
    }
    return tuple(options.items())


def weights_of(module: nn.Module, modules: Sequence[Step], change: Callable[[Tensor], Tensor]) -> list[Tensor]:
    """The weights of the op, as copies made by ``change``."""
    weights = []
    for step in modules:
        for name in ("weight", "bias"):
            found = [change(getattr(module.get_submodule(path), name)) for path in step]
            weights.append(found[0] if len(found) == 1 else torch.cat(found))
    return weights


def _with_outputs(traced: Traced, decoder: Decoder, reg: Node) -> Decoder | None:
    """The decoder with the nodes of the last layer's boxes and points, which are recognized by their values."""
    given = [decoder.query, decoder.query_pos, decoder.points, [*decoder.features], decoder.cameras]
    values: Any = fx.node.map_arg(given, lambda n: traced.values[n].detach())
    weights = weights_of(traced.module, decoder.modules, lambda t: t.detach())
    with torch.no_grad():
        query, query_pos, points, features, cameras = values
        ours = decode(decoder.options, False, query, query_pos, points, features, cameras, weights)
    outputs = list(decoder.outputs)
    for i in (1, 2):
        for node in traced.graph.nodes:
            value = traced.tensor(node)
            if value is None or value.shape != ours[i].shape or reg not in traced.ancestors(node):
                continue
            if torch.allclose(value, ours[i], rtol=1e-3, atol=1e-3):
                outputs[i] = node
                break
    return Decoder(**{**vars(decoder), "outputs": tuple(outputs)})


def prove(traced: Traced, decoder: Decoder) -> tuple[Proof, bool | None]:
    """Compares all outputs on the model's values, and outputs and gradients on drawn values in float64.

    Returns:
        The proof, and whether gradients pass between layers; None if neither way matches the author's gradients.
    """
    proof = Proof()
    nodes = [decoder.query, decoder.query_pos, decoder.points, decoder.cameras, *decoder.features]
    own = {path for step in decoder.modules for path in step}
    outputs = [(i, node) for i, node in enumerate(decoder.outputs) if node is not None]
    if any(traced.region(node, nodes, own) is None for _, node in outputs):
        proof.fault = "it depends on more than the op is given"
        return proof, None

    def ours(values: Sequence[Tensor], weights: list[Tensor], joined: bool = False) -> list[Tensor]:
        query, query_pos, points, cameras, *features = values
        found = decode(decoder.options, joined, query, query_pos, points, features, cameras, weights)
        return [found[i] for i, _ in outputs]

    weights = weights_of(traced.module, decoder.modules, lambda t: t.detach())
    precise = [w.double() for w in weights]
    random = Random(0)
    draw: list[Tensor] = []
    with torch.no_grad():
        proof.add([traced.values[n] for _, n in outputs], lambda: ours([traced.values[n] for n in nodes], weights))
        for _ in range(2):
            draw = _draw(traced, decoder, random)
            given = dict(zip(nodes, draw, strict=True))
            found = ours(draw, precise) if not proof.fault else []
            for (_, node), value in zip(outputs, found, strict=False):
                proof.add_other(lambda: traced.evaluate(node, given), lambda: value)  # noqa: B023 - called at once
    if proof.fault or not takes(_config(decoder.options)):
        return proof, None
    for joined in (True, False):
        if _same_gradients(traced, decoder, nodes, draw, functools.partial(ours, joined=joined)):
            return proof, joined
    return proof, None


def _same_gradients(
    traced: Traced, decoder: Decoder, nodes: list[Node], draw: list[Tensor], ours: Callable[..., list[Tensor]]
) -> bool:
    """Whether the gradients of inputs and parameters equal the author's, in float64."""
    given = [t.clone().requires_grad_() for t in draw]
    copies: dict[str, nn.Module] = {}
    cotangents = Random(1)
    found: list[Sequence[Tensor | None]] = []
    try:
        with torch.enable_grad():
            known = dict(zip(nodes, given, strict=True))
            theirs = [traced.evaluate(n, known, copies) for n in decoder.outputs if n is not None]
            parameters = [getattr(copies[p], n) for step in decoder.modules for p in step for n in ("weight", "bias")]
            weights = [
                torch.cat([getattr(copies[path], name) for path in step])
                for step in decoder.modules
                for name in ("weight", "bias")
            ]
            rates = [cotangents.uniform(t, t.dtype) for t in theirs]
            for outputs in (theirs, ours(given, weights)):
                total = torch.stack([(t * rate).sum() for t, rate in zip(outputs, rates, strict=True)]).sum()
                found.append(torch.autograd.grad(total, [*given, *parameters], allow_unused=True))
    except Exception:  # noqa: BLE001 - what cannot be compared is not proven
        return False
    for like, *pair in zip([*given, *parameters], *found, strict=True):
        expected, actual = (torch.zeros_like(like) if g is None else g for g in pair)
        atol = 1e-6 * max(1.0, float(expected.abs().max()))
        if not parity("", expected, actual, rtol=1e-6, atol=atol).ok:
            return False
    return True


def _draw(traced: Traced, decoder: Decoder, random: Random) -> list[Tensor]:
    query, query_pos, points, cameras = (
        traced.values[n].detach() for n in (decoder.query, decoder.query_pos, decoder.points, decoder.cameras)
    )
    places = random.uniform(points)
    features = [random.normal(traced.values[n][..., :CROP, :CROP]) for n in decoder.features]
    rig = looking(cameras, dict(decoder.options), random)
    return [random.normal(query), random.normal(query_pos), places, rig, *features]


def put(traced: Traced, decoder: Decoder, joined: bool) -> None:
    """Puts the op into the graph, with a new first placeholder for its weights."""
    graph = traced.graph
    with graph.inserting_before(next(iter(graph.nodes))):
        weights = graph.placeholder("weights")
    outputs = [node for node in decoder.outputs if node is not None]
    order = {node: i for i, node in enumerate(graph.nodes)}
    starts = [decoder.query, decoder.query_pos, decoder.points, decoder.cameras, *decoder.features]
    last = max(starts, key=order.__getitem__)
    with graph.inserting_after(last):
        given = decoder.query, decoder.query_pos, decoder.points, list(decoder.features), decoder.cameras, weights
        node = graph.call_function(decode, (decoder.options, joined, *given))
    with graph.inserting_after(node):
        new = {old: graph.call_function(operator.getitem, (node, i)) for i, old in enumerate(decoder.outputs) if old}
    for old in outputs:
        old.replace_all_uses_with(new[old])
    erased: set[Node] = set()
    for each in reversed(list(graph.nodes)):
        between = order.get(each, -1) > order[last] and each.op != "output"
        if between and not each.users and each not in erased:
            erased.add(each)
            graph.erase_node(each)
