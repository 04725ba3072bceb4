"""The decoder of :mod:`transformer_decoder` as one autograd node, used where gradients are recorded.

Training is bound by the CPU: composed from torch ops, a layer is about fifty calls forward and twice as many backward,
each with its own autograd nodes. This module saves the activations itself and writes out the backward. Matrix products
and the norms' kernel add up gradients, and that kernel also computes the gradients of biases before norms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from svexport.ops._decoder.config import EPS, TransformerDecoderConfig, weight_names
from svexport.ops._decoder.layers import fold_image_size
from svexport.ops._gradients import Attended, Linears, Norm, keeps_graph, relu_backward
from svexport.ops._op import gradients_again
from svexport.ops.add_bias_residual_layer_norm import OP as ADD_NORM
from svexport.ops.camera_sample import OP as CAMERA_SAMPLE
from svexport.ops.transformer_decoder import differentiable

__all__ = ["recorded", "takes"]

_sigmoid_backward = torch.ops.aten.sigmoid_backward.default
_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default
_sample_backward = torch.ops.svexport.camera_sample_backward.default

_BEFORE_NORM = "mha.out_proj", "svca.output_proj", "ffn.2"
"""Linear layers followed by a norm; the norm's backward kernel computes the gradient of their bias."""

_CENTRE = 0, 1, 4
"""The positions of x, y and z of the centre in a box code."""


def _split(boxes: Tensor) -> tuple[Tensor, ...]:
    """Splits boxes into x and y, length and width, z, and the rest."""
    return boxes.split((2, 2, 1, boxes.shape[-1] - 5), -1)


_PROJECTIONS = "query", "key", "value"
"""The parts of an ``in_proj``."""


def takes(config: TransformerDecoderConfig) -> bool:
    """Whether this module supports a configuration: it is written for those of DETR3D's heads."""
    options = config.learned_offsets, config.residual_query_pos, config.pool, config.scales
    return config.num_groups == 1 and not any(options)


def recorded(
    query: Tensor,
    query_pos: Tensor,
    reference_points: Tensor,
    features: Sequence[Tensor],
    lidar2img: Tensor,
    weights: Sequence[Tensor | Sequence[Tensor]],
    config: TransformerDecoderConfig,
    *,
    joined: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """:func:`svexport.ops.transformer_decoder` for tensors of one dtype, float32 or float64.

    Args:
        weights: in the order of the op; an ``in_proj`` may be split in three: queries, keys and values.
        joined: whether the gradient of a layer's points flows to the layers that moved them there. DETR3D's code stops
            it, as the operator does.
    """
    flat: list[Tensor] = []
    for weight in weights:
        flat += [weight] if isinstance(weight, Tensor) else weight
    return _Recorded.apply(config, joined, query, query_pos, reference_points, lidar2img, *features, *flat)


class _Layer:
    """The activations of a layer."""

    where: Tensor
    query: Tensor
    attended: Attended
    mixed: Tensor
    norms: list[Norm]
    scored: Tensor
    samples: tuple[Any, ...]
    sampled: Tensor
    points: Tensor
    sides: list[Tensor]
    slope: Tensor
    encoded: list[tuple[Tensor, ...]]
    hidden: list[Tensor]
    moved: Tensor


def _linear(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def _linear_relu(p: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return torch._addmm_activation(p[f"{name}.bias"], x, p[f"{name}.weight"].t())


def _norm_relu(p: dict[str, Tensor], linear: str, norm: str, x: Tensor) -> tuple[Tensor, ...]:
    """Runs a linear layer, its norm and a ReLU; returns the output and what their backward needs."""
    product = _linear(p, linear, x)
    weight, bias = p[f"{norm}.weight"], p[f"{norm}.bias"]
    y, mean, rstd = torch.native_layer_norm(product, weight.shape, weight, bias, EPS)
    return y.relu_(), x, product, mean, rstd


def _norm_relu_backward(
    p: dict[str, Tensor], into: dict[str, Tensor], linear: str, norm: str, grad: Tensor, kept: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor]:
    """The gradients of the linear layer's output and input."""
    y, _, product, mean, rstd = kept
    weight, bias = p[f"{norm}.weight"], p[f"{norm}.bias"]
    grad = relu_backward(grad, y, 0)
    masks = [True, True, True]
    found = _layer_norm_backward(grad, product, weight.shape, mean, rstd, weight, bias, masks)
    grad, into[f"{norm}.weight"], into[f"{norm}.bias"] = found
    return grad, grad @ p[f"{linear}.weight"]


def _logits(points: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The inverse sigmoid, and what its backward needs: points and 1 - points, and both clamped to the bounds."""
    sides = torch.stack((points, 1 - points))
    bounded = sides.clamp(EPS, 1)
    low, high = bounded.unbind()
    return torch.log(low / high), sides, bounded


def _slopes(layers: Sequence[_Layer]) -> Sequence[Tensor]:
    """The derivatives of the inverse sigmoids of all layers, computed at once."""
    sides, bounded = (torch.stack(t) for t in zip(*(layer.sides for layer in layers), strict=True))
    return ((sides == bounded) / bounded).sum(1).unbind()


def _parts(name: str) -> list[str]:
    """The names of the parts of a weight: three for an ``in_proj``, otherwise the name itself."""
    module, mark, kind = name.rpartition("in_proj_")
    return [f"{module}{part}.{kind}" for part in _PROJECTIONS] if mark else [name]


class _Decoder:
    """One decoder with its weights, forward and backward."""

    def __init__(self, config: TransformerDecoderConfig, weights: Sequence[Tensor]) -> None:
        self.config = config
        self.names = weight_names(vars(config))
        self.parts = len(weights) > len(self.names)
        if self.parts:
            self.names = [part for name in self.names for part in _parts(name)]
        self.p = dict(zip(self.names, weights, strict=True))
        if not self.parts:
            for name in self.names:
                if len(parts := _parts(name)) > 1:
                    self.p |= zip(parts, self.p[name].chunk(len(parts)), strict=True)
        self.offsets = weights[0].new_zeros(1, 1, 1, 3)

    def layer(
        self, i: int, query: Tensor, pos: Tensor, points: Tensor, features: list[Tensor], cameras: Tensor
    ) -> tuple[_Layer, Tensor, Tensor]:
        """Runs a layer; returns its activations, and the query and box it outputs."""
        p, config, name, kept = self.p, self.config, f"layers.{i}", _Layer()
        batch, queries = points.shape[:2]
        channels, counts = config.embed_dims, (config.num_cams, config.num_points, config.num_levels, 1)

        kept.query, kept.points, kept.where = query, points, query + pos
        projected = [
            _linear(p, f"{name}.mha.{part}", x).view(batch, queries, config.num_heads, -1).transpose(1, 2)
            for part, x in zip(_PROJECTIONS, (kept.where, kept.where, query), strict=True)
        ]
        kept.attended = Attended.of(*projected)
        kept.mixed = kept.attended.output.detach().transpose(1, 2).reshape(-1, channels)
        kept.norms = []
        query = self._add_norm(kept, f"{name}.mha.out_proj", f"{name}.mha_norm", kept.mixed, query)

        svca = f"{name}.svca"
        kept.scored = query + pos
        scores = _linear(p, f"{svca}.attention_weights", kept.scored).view(batch, queries, *counts)
        _, _, _, _, _, _, depth_eps, in_image, uv_clamp, activation, *_, scales = config.attributes()
        view = [1, 1], list(map(float, config.pc_range)), depth_eps, in_image, uv_clamp, activation, scales
        kept.samples = features, points, cameras, scores, self.offsets, *view
        kept.sampled = CAMERA_SAMPLE(*kept.samples).view(-1, channels)
        logits, *kept.sides = _logits(points)
        encoder = f"{svca}.position_encoder"
        kept.encoded = [_norm_relu(p, f"{encoder}.0", f"{encoder}.1", logits.view(-1, 3))]
        kept.encoded += [_norm_relu(p, f"{encoder}.3", f"{encoder}.4", kept.encoded[0][0])]
        position = kept.encoded[1][0]
        query = self._add_norm(kept, f"{svca}.output_proj", f"{name}.svca_norm", kept.sampled, query, position)

        kept.hidden = [query, _linear_relu(p, f"{name}.ffn.0", query)]
        query = self._add_norm(kept, f"{name}.ffn.2", f"{name}.ffn_norm", kept.hidden[1], query)
        kept.hidden += [query, _linear_relu(p, f"{name}.reg.0", query)]
        kept.hidden += [_linear_relu(p, f"{name}.reg.2", kept.hidden[3])]
        box = _linear(p, f"{name}.reg.4", kept.hidden[4]).view(batch, queries, -1)
        xy, _, z, _ = _split(box)
        kept.moved = torch.cat((xy, z), -1).add_(logits).sigmoid_()
        return kept, query, box

    def _add_norm(
        self, kept: _Layer, linear: str, norm: str, x: Tensor, residual: Tensor, extra: Tensor | None = None
    ) -> Tensor:
        p = self.p
        product = F.linear(x, p[f"{linear}.weight"])
        args = Norm(product, p[f"{linear}.bias"], residual, p[f"{norm}.weight"], p[f"{norm}.bias"], EPS, extra)
        kept.norms.append(args)
        return ADD_NORM(*args)[0]

    def classes(self, query: Tensor) -> tuple[Tensor, list[tuple[Tensor, ...]]]:
        kept = [_norm_relu(self.p, "cls.0", "cls.1", query)]
        kept += [_norm_relu(self.p, "cls.3", "cls.4", kept[0][0])]
        return _linear(self.p, "cls.6", kept[1][0]), kept

    def layer_backward(
        self,
        i: int,
        kept: _Layer,
        grad: Tensor,
        grad_box: Tensor,
        grad_logits: Tensor,
        sums: _Sums,
        into: dict[str, Tensor],
    ) -> tuple[Tensor, Tensor | None]:
        """Gradients of the layer's input query and input points; None for points that need none.

        Args:
            grad: gradient of the output query; the gradients of this layer are added to it.
            grad_box: gradient of the box, including that of its centre, which moves the points.
            grad_logits: gradient of the inverse sigmoid of the points, from the moved points.
        """
        p, name, unused = self.p, f"layers.{i}", sums.zeros
        mid, wide, out, first, second = kept.hidden
        g = grad_box.reshape(-1, grad_box.shape[-1])
        sums.linears.add(f"{name}.reg.4", g, second)
        g = relu_backward(g @ p[f"{name}.reg.4.weight"], second, 0)
        sums.linears.add(f"{name}.reg.2", g, first)
        g = relu_backward(g @ p[f"{name}.reg.2.weight"], first, 0)
        sums.linears.add(f"{name}.reg.0", g, out)
        grad = torch.addmm(grad, g, p[f"{name}.reg.0.weight"])

        grad = kept.norms[2].backward(grad, unused, into, f"{name}.ffn.2", f"{name}.ffn_norm")
        sums.linears.add(f"{name}.ffn.2", grad, wide)
        g = relu_backward(grad @ p[f"{name}.ffn.2.weight"], wide, 0)
        sums.linears.add(f"{name}.ffn.0", g, mid)
        grad = torch.addmm(grad, g, p[f"{name}.ffn.0.weight"])

        svca = f"{name}.svca"
        grad = kept.norms[1].backward(grad, unused, into, f"{svca}.output_proj", f"{name}.svca_norm")
        sums.linears.add(f"{name}.svca.output_proj", grad, kept.sampled)
        encoder = f"{svca}.position_encoder"
        g = grad
        for j, of in ((3, kept.encoded[1]), (0, kept.encoded[0])):
            product, g = _norm_relu_backward(p, into, f"{encoder}.{j}", f"{encoder}.{j + 1}", g, of)
            sums.linears.add(f"{name}.svca.position_encoder.{j}", product, of[1])
        grad_points, grad_scores = sums.samples(kept.samples, (grad @ p[f"{svca}.output_proj.weight"]))
        if grad_points is not None:
            grad_points = torch.addcmul(grad_points, grad_logits + g.view_as(grad_logits), kept.slope)
        g, weight = grad_scores.view(len(grad), -1), p[f"{svca}.attention_weights.weight"]
        sums.linears.add(f"{name}.svca.attention_weights", g, kept.scored)
        sums.pos.append((g, weight))
        return self._attention_backward(i, kept, torch.addmm(grad, g, weight), sums, into), grad_points

    def _attention_backward(self, i: int, kept: _Layer, grad: Tensor, sums: _Sums, into: dict[str, Tensor]) -> Tensor:
        p, channels, name = self.p, self.config.embed_dims, f"layers.{i}"
        grad = kept.norms[0].backward(grad, sums.zeros, into, f"{name}.mha.out_proj", f"{name}.mha_norm")
        sums.linears.add(f"{name}.mha.out_proj", grad, kept.mixed)
        g = grad @ p[f"{name}.mha.out_proj.weight"]
        found = kept.attended.backward(g.view_as(kept.attended.output.transpose(1, 2)).transpose(1, 2))
        for part, of, x in zip(_PROJECTIONS, found, (kept.where, kept.where, kept.query), strict=True):
            g, weight = of.transpose(1, 2).reshape(-1, channels), p[f"{name}.mha.{part}.weight"]
            sums.linears.add(f"{name}.mha.{part}", g, x)
            if x is kept.where:
                sums.pos.append((g, weight))
            grad = torch.addmm(grad, g, weight)
        return grad


class _Sums:
    """Gradients that all layers accumulate into.

    Attributes:
        zeros: the gradient of an unused output.
        pos: gradient of the query positions as factors: a gradient and a weight for each linear layer they enter.
        cameras: gradient of the cameras, summed over the samples; None if not needed.
        linears: gradients of the linear layers' parameters.
        needs_points: whether the gradient of the layer's input points is needed.
    """

    def __init__(self, like: Tensor, needs_cameras: bool, needs_features: Sequence[bool]) -> None:
        self.linears = Linears(_BEFORE_NORM)
        self.zeros = torch.zeros_like(like)
        self.pos: list[tuple[Tensor, Tensor]] = []
        self.needs_cameras, self.needs_points, self.needs_features = needs_cameras, True, needs_features
        self.cameras: Tensor | None = None
        self._sampled: list[tuple[Tensor, tuple[Any, ...]]] = []

    def samples(self, samples: tuple[Any, ...], grad: Tensor) -> tuple[Tensor | None, Tensor]:
        """Gradients of points (None if not needed) and of scores."""
        grad = grad.view(*samples[1].shape[:2], -1)
        if any(self.needs_features):
            self._sampled.append((grad, samples))
        needs = [*[False] * len(self.needs_features), self.needs_points, self.needs_cameras, True, False]
        found = iter(_sample_backward([grad], *samples, needs))
        grad_points = next(found) if self.needs_points else None
        if self.needs_cameras:
            more = next(found)
            self.cameras = more if self.cameras is None else self.cameras.add_(more)
        return grad_points, next(found)

    def features(self) -> list[Tensor | None]:
        """Gradients of the feature maps, None if not needed. One call for all layers avoids adding maps per layer."""
        if not self._sampled:
            return [None] * len(self.needs_features)
        grads, samples = zip(*self._sampled, strict=True)
        features, _, cameras, _, *rest = samples[0]
        points, scores = (torch.cat([layer[i] for layer in samples], 1) for i in (1, 3))
        needs = [*self.needs_features, False, False, False, False]
        found = iter(_sample_backward([torch.cat(grads, 1)], features, points, cameras, scores, *rest, needs))
        return [next(found) if need else None for need in self.needs_features]


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        config: TransformerDecoderConfig,
        joined: bool,
        query: Tensor,
        query_pos: Tensor,
        points: Tensor,
        cameras: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        levels = len(config.feature_sizes)
        features, weights = list(tensors[:levels]), tensors[levels:]
        decoder = _Decoder(config, weights)
        pos = query_pos.reshape(-1, config.embed_dims)
        x, place, folded = query.reshape(-1, config.embed_dims), points, fold_image_size(cameras, config.image_size)
        kept = []
        for i in range(config.num_layers):
            layer, x, box = decoder.layer(i, x, pos, place, features, folded)
            kept.append(layer)
            place = layer.moved
        classes, kept_classes = decoder.classes(x)
        low, high = config.pc_range[:3], config.pc_range[3:]
        centre = [t * (b - a) + a for t, a, b in zip(place.split(1, -1), low, high, strict=True)]
        _, size, _, rest = _split(box)
        boxes = torch.cat((*centre[:2], size, centre[2], rest), -1)
        ctx.save_for_backward(query, query_pos, points, cameras, *tensors)
        ctx.kept, ctx.config, ctx.joined, ctx.decoder = (kept, kept_classes), config, joined, decoder
        ctx.set_materialize_grads(False)
        return classes.view(*query.shape[:2], -1), boxes, place.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # raises if a saved tensor was changed in place
        needs = ctx.needs_input_grad[2:]
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *_composed(ctx.config, ctx.joined, tensors, grads, needs)
        found_all = _backward(ctx, grads, tensors, needs)
        return None, None, *(g if need else None for g, need in zip(found_all, needs, strict=True))


def _composed(
    config: TransformerDecoderConfig, joined: bool, tensors: Sequence[Tensor], grads: Any, needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients that can be differentiated again, from the composition of torch ops."""
    levels = len(config.feature_sizes)
    lengths = [len(_parts(name)) for name in weight_names(vars(config))]

    def function(query: Tensor, query_pos: Tensor, points: Tensor, cameras: Tensor, *rest: Tensor) -> list[Tensor]:
        features, weights = rest[:levels], list(rest[levels:])
        if len(weights) > len(lengths):
            parts = iter(weights)
            weights = [torch.cat([next(parts) for _ in range(n)]) if n > 1 else next(parts) for n in lengths]
        args = query, query_pos, points, features, cameras, weights, *config.attributes()
        return [o for o, g in zip(differentiable(joined, *args), grads, strict=True) if g is not None]

    return gradients_again(function, tensors, [g for g in grads if g is not None], needs)


def _backward(ctx: Any, grads: Any, tensors: Sequence[Tensor], needs: Sequence[bool]) -> list[Tensor | None]:
    """Gradients of all tensors."""
    decoder, config, (kept, (first, second)) = ctx.decoder, ctx.config, ctx.kept
    query, levels = tensors[0], len(config.feature_sizes)
    grad_classes, grad_boxes, grad_moved = grads
    p, into = decoder.p, {}
    sums = _Sums(first[1], needs[3], needs[4 : 4 + levels])

    if grad_classes is None:
        into = {name: torch.zeros_like(p[name]) for name in decoder.names if name.startswith("cls.")}
        grad = torch.zeros_like(first[1])
    else:
        g = grad_classes.reshape(-1, grad_classes.shape[-1])
        into["cls.6.weight"], into["cls.6.bias"] = g.t() @ second[0], g.sum(0)
        grad = g @ p["cls.6.weight"]
        for j, of in ((3, second), (0, first)):
            g, grad = _norm_relu_backward(p, into, f"cls.{j}", f"cls.{j + 1}", grad, of)
            sums.linears.add(f"cls.{j}", g, of[1])
    nothing = query.new_zeros(*query.shape[:2], config.code_size)
    blank = _split(nothing)
    sizes = blank if grad_boxes is None else _split(grad_boxes)
    if grad_boxes is not None:
        scale = [config.pc_range[j + 3] - config.pc_range[j] for j in range(3)]
        centre = torch.cat([grad_boxes[..., a : a + 1] * s for a, s in zip(_CENTRE, scale, strict=True)], -1)
        grad_moved = centre if grad_moved is None else centre + grad_moved
    for layer, slope in zip(kept, _slopes(kept), strict=True):
        layer.slope = slope
    again = keeps_graph()  # this backward may run a second time, so keep the activations
    for i in reversed(range(config.num_layers)):
        layer = kept[i] if again else kept.pop()
        moved = layer.moved
        g = nothing[..., :3] if grad_moved is None else _sigmoid_backward(grad_moved, moved)
        xy, z = g.split((2, 1), -1)
        box = torch.cat((xy, sizes[1], z, sizes[3]), -1)
        sums.needs_points = ctx.joined or (i == 0 and needs[2])
        grad, grad_moved = decoder.layer_backward(i, layer, grad, box, g, sums, into)
        sizes = blank
    sums.linears.put(into)
    if not decoder.parts:
        for name in decoder.names:
            if len(parts := _parts(name)) > 1:
                into[name] = torch.cat([into.pop(part) for part in parts])
    grad_pos = None
    if needs[1]:
        into_pos, weights_of_pos = zip(*sums.pos, strict=True)
        grad_pos = (torch.cat(into_pos, 1) @ torch.cat(weights_of_pos)).view_as(query)
    found: list[Tensor | None] = [grad.view_as(query), grad_pos, grad_moved]
    if sums.cameras is not None:
        height, width = config.image_size
        rows = sums.cameras
        sums.cameras = torch.cat((rows[..., :1, :] / width, rows[..., 1:2, :] / height, rows[..., 2:, :]), -2)
    return [*found, sums.cameras, *sums.features(), *(into[name] for name in decoder.names)]
