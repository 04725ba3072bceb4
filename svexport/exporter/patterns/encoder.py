"""Finds a whole encoder of Deformable DETR, however its layers are divided into modules.

The graph goes down to torch's modules and to deformable attention with its linear layers, which was found before. In
it, each layer is that attention, a norm of the sum, a feed forward and again a norm of the sum. The nodes between lead
to the parameters. The rewritten module is then compared with the original, with gradients, in float64 and near the
values that it was given.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from svexport import ops
from svexport.exporter.functions import starts_of
from svexport.exporter.patterns.ms_deform_attn import shapes_of
from svexport.exporter.patterns.pattern import ADDS, RELUS
from svexport.exporter.patterns.projections import projected_deform_attn
from svexport.exporter.patterns.rewrite import Rewrite, apply, replace_nodes, weights_of
from svexport.exporter.patterns.traced import NotTraced, Traced
from svexport.exporter.proof import Proof, Random
from svexport.ops._deform_attn_gradients import Shape
from svexport.ops._deform_encoder import Encoder as Constants
from svexport.ops._deform_encoder import Given, encoded
from svexport.tracing.arguments import rebuild

__all__ = ["OP", "WHAT", "Attention", "Encoder", "encode", "find", "prove", "put"]

OP, WHAT = "ms_deform_attn", "an encoder of the Deformable DETR kind"


Node = Any  # a node of a graph, whose arguments may be anything


class Attention:
    """Stands for :func:`projected_deform_attn` in a graph; holds the modules, which cannot be arguments of a node."""

    __name__ = "projected_deform_attn"

    def __init__(self, layers: Sequence[nn.Module], shape: tuple[int, int, int]) -> None:
        self.layers, self.shape = tuple(layers), tuple(shape)

    def __call__(self, *tensors: Any) -> Tensor:
        """Computes the attention of query, source, centre, scale and sizes."""
        return projected_deform_attn(self.layers, self.shape, *tensors)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Encoder:
    """An encoder in a graph.

    Attributes:
        shape: numbers of heads, levels and points.
        eps: epsilons of the two norms of each layer.
        given: nodes of the source, the positions, and the centre and scale of offsets; and the sizes, which may be
            constants.
        modules: paths of the modules that have its parameters, in the order of the op.
        between: paths of modules without parameters: ReLU and dropout.
        output: the node of the last layer's result.
    """

    shape: tuple[int, int, int]
    eps: tuple[tuple[float, float], ...]
    given: tuple[Node, ...]
    modules: tuple[str, ...]
    between: tuple[str, ...]
    output: Node


def encode(
    shape: tuple[int, int, int],
    eps: tuple[tuple[float, float], ...],
    source: Tensor,
    pos: Tensor,
    centre: Tensor,
    scale: Tensor,
    sizes: Any,
    weights: list[Tensor],
) -> Tensor:
    """:func:`svexport.ops._deform_encoder.encoded` with plain constants.

    Args:
        sizes: (height, width) of each level, as a tensor or constants.
    """
    shapes = sizes if isinstance(sizes, Tensor) else shapes_of(sizes, source.device)
    shapes = torch.as_tensor(shapes, device=source.device)
    given = Given(pos, centre, scale, shapes, starts_of(shapes))
    return encoded(Constants(Shape(*shape), eps), source, given, weights)


class _Walk:
    """Walks from node to node; each method raises NotTraced if there is no such node."""

    def __init__(self, traced: Traced) -> None:
        self.traced = traced
        self.between: list[str] = []

    def module(self, node: Node) -> Any:
        return self.traced.called(node)

    def path(self, module: nn.Module) -> str:
        return next(name for name, m in self.traced.module.named_modules() if m is module)

    def only_user(self, node: Node) -> Node:
        """The only user of a node, past dropout."""
        while True:
            if len(node.users) != 1:
                raise NotTraced(f"expects {node} to be used once")
            (node,) = node.users
            if type(self.module(node)) is not nn.Dropout:
                return node
            self.between.append(str(node.target))

    def norm(self, node: Node, residual: Node) -> Node:
        """The norm of the sum of a node and its residual."""
        total = self.only_user(node)
        if total.target not in ADDS or residual not in total.args or len(total.args) != 2 or total.kwargs:
            raise NotTraced(f"expects the sum of {node} and {residual}")
        norm = self.only_user(total)
        module = self.module(norm)
        affine = (
            type(module) in (nn.LayerNorm, ops.LayerNorm)
            and len(module.normalized_shape) == 1
            and module.elementwise_affine
        )
        if not affine or module.bias is None:
            raise NotTraced(f"expects a norm of {total}")
        return norm

    def feed_forward(self, norm: Node) -> tuple[Node, Node]:
        """The two linear layers after a norm."""
        first = next((n for n in norm.users if type(self.module(n)) is nn.Linear), None)
        if first is None or len(norm.users) != 2:
            raise NotTraced(f"expects a feed forward after {norm}")
        relu = self.only_user(first)
        if relu.target not in RELUS and type(self.module(relu)) is not nn.ReLU:
            raise NotTraced(f"expects a ReLU after {first}")
        if relu.op == "call_module":
            self.between.append(str(relu.target))
        second = self.only_user(relu)
        layers = [self.module(n) for n in (first, second)]
        if any(type(layer) is not nn.Linear or layer.bias is None for layer in layers):
            raise NotTraced(f"expects linear layers with biases after {norm}")
        return first, second


def find(traced: Traced) -> Encoder | None:
    """The encoder in a graph whose attention is recorded as :class:`Attention`; None if there is none."""
    calls = [n for n in traced.graph.nodes if isinstance(n.target, Attention)]
    if len(calls) < 2 or len({call.target.shape for call in calls}) != 1:
        return None
    walk = _Walk(traced)
    modules: list[str] = []
    eps = []
    source = calls[0].args[1]
    given = _given(calls[0], source)
    for call in calls:
        if call.args[1] is not source or not all(map(_same, _given(call, source)[1:], given[1:])):
            raise NotTraced("expects layers that differ in nothing but their weights and the source")
        offsets, attention, output, *of_value = (walk.path(m) for m in call.target.layers)
        first_norm = walk.norm(call, source)
        first, second = walk.feed_forward(first_norm)
        source = walk.norm(second, first_norm)
        modules += [offsets, attention, output, *of_value]
        modules += [str(n.target) for n in (first_norm, first, second, source)]
        eps.append((walk.module(first_norm).eps, walk.module(source).eps))
        if not of_value:
            raise NotTraced("expects a linear layer of the value")
    return Encoder(calls[0].target.shape, tuple(eps), given, tuple(modules), tuple(walk.between), source)


def _given(call: Node, source: Node) -> tuple[Node, ...]:
    """The inputs of a layer: source, positions, centre, scale and sizes."""
    query, _, *rest = call.args
    if not isinstance(query, fx.Node) or query.target not in ADDS or len(query.args) != 2 or query.kwargs:
        raise NotTraced("expects the sum of source and positions as the query")
    pos = [n for n in query.args if n is not source]
    if len(pos) != 1 or not isinstance(pos[0], fx.Node):
        raise NotTraced("expects the sum of source and positions as the query")
    return source, pos[0], *rest


def _same(a: Node, b: Node) -> bool:
    """Whether two nodes apply the same function to the same arguments; constants are compared by value."""
    if a is b:
        return True
    if isinstance(a, fx.Node) and isinstance(b, fx.Node):
        plain = a.op == b.op and a.op in ("call_function", "call_method", "get_attr") and a.target == b.target
        return plain and _same(a.args, b.args) and _same(a.kwargs, b.kwargs)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    return type(a) is type(b) and bool(a == b)


def put(traced: Traced, encoder: Encoder) -> None:
    """Puts the op into the graph, with a new first placeholder for its weights.

    Raises:
        NotTraced: if other nodes use results inside the layers.
    """
    graph = traced.graph
    calls = [n for n in graph.nodes if isinstance(n.target, Attention)]
    with graph.inserting_before(next(iter(graph.nodes))):
        weights = graph.placeholder("weights")
    with graph.inserting_before(calls[0]):
        node = graph.call_function(encode, (encoder.shape, encoder.eps, *encoder.given, weights))
    replace_nodes(graph, [encoder.output], [node], {*encoder.modules, *encoder.between})
    if any(isinstance(n.target, Attention) for n in graph.nodes):
        raise NotTraced("a layer's result is also used outside of the next layer")


def prove(module: nn.Module, rewrite: Rewrite, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Proof:
    """Compares a module with the same module with the new forward: outputs, and all gradients in float64."""
    proof = Proof()
    theirs, ours = _copies(module, rewrite)
    if weights_of(ours, rewrite) is None:
        proof.fault = "its parameters cannot be reached"
        return proof
    with torch.no_grad():
        proof.add(theirs(*args, **kwargs), lambda: ours(*args, **kwargs))
    if proof.fault:
        return proof
    theirs, ours = theirs.double(), ours.double()
    random = Random(0)

    def near(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t
        return t.detach().double() + (random.uniform(t) - 0.5) * 0.1 * t.detach().double().abs().amax()

    given = rebuild((list(args), dict(kwargs)), near)
    names = [name for name, _ in theirs.named_parameters()]

    def function_of(m: nn.Module) -> Any:
        def call(call: Any, parameters: Sequence[Tensor]) -> Any:
            for name, value in zip(names, parameters, strict=True):
                holder, _, last = name.rpartition(".")
                m.get_submodule(holder)._parameters[last] = value  # type: ignore[assignment]
            return m(*call[0], **call[1])

        return call

    parameters = [p.detach() for p in theirs.parameters()]
    with torch.no_grad():
        proof.add_other(lambda: theirs(*given[0], **given[1]), lambda: ours(*given[0], **given[1]))
    if not proof.fault:
        proof.add_gradients(function_of(theirs), function_of(ours), (given, parameters))
    return proof


def _copies(module: nn.Module, rewrite: Rewrite) -> tuple[nn.Module, nn.Module]:
    """Two copies of the module in eval mode without hooks: the original, and one with the new forward."""
    theirs = copy.deepcopy(module).eval()
    for m in theirs.modules():
        m._forward_hooks.clear()
        m._forward_pre_hooks.clear()
    ours = copy.deepcopy(theirs)
    apply(ours, rewrite)
    return theirs, ours
