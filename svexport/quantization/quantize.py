"""Quantizes a model to int8 or fp8, with scales from a few batches."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from functools import partial
from itertools import chain, count, takewhile
from typing import Any

import torch
from torch import Tensor, nn

from svexport.errors import SvexportError
from svexport.logging import logger
from svexport.progress import phase
from svexport.quantization.cache import CalibrationCache
from svexport.quantization.calibrators import calibrate, check_method
from svexport.quantization.histogram import Histogram
from svexport.quantization.layers import FORMATS, QuantizedLayer, always_called, quantizable, to_quantized
from svexport.quantization.maps import MAP_READERS, maps_of, readers, to_quantized_maps
from svexport.tracing.arguments import bind, called, copied, eval_mode, unwrapped

__all__ = ["quantize"]

_SECONDS = 10.0
"""Between two writes of the cache."""


def quantize(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    method: str | None = None,
    percentile: float = 99.99,
    format: str = "int8",
    keep: Collection[str] = (),
    cache: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Copies a model and quantizes its layers explicitly to int8 or fp8, as TensorRT will compute them.

    Every ``nn.Linear``, ``nn.Conv1d`` to ``3d`` and ``nn.ConvTranspose1d`` to ``3d`` gets fake quantizers, symmetric
    and 8 bits wide: one scale for its input, and one per output channel for its weight, that of the channel's largest
    magnitude. :func:`svexport.export` writes them as QuantizeLinear and DequantizeLinear, from opset 13 on, with fp8
    from 19 on. svexport's layers that sample feature maps (:class:`svexport.ops.CameraSample`, ``Detr3DCrossAtten``,
    ``TransformerDecoder``, ``GridSample``, ``DeformConv2d``, ``ModulatedDeformConv2dPack``,
    ``MultiScaleDeformableAttention``, ``MultiScaleDeformableSampling``) read them in int8, with a scale per level:
    QuantizeLinear goes right before the node, and the plugin reads int8. The copy can be trained further: gradients
    pass the quantizers unchanged where they do not clamp.

    Args:
        model: the model, in float32 or half. It is not changed.
        batches: arguments of ``forward``, for example from a DataLoader: tensors, tuples or dicts, as for
            :func:`svexport.export`. The model runs in eval mode, without gradients.
        method: the input magnitude that the largest quantized number represents: ``"minmax"``: the largest;
            ``"percentile"``: the one that ``percentile`` per cent of all elements do not exceed; for int8 also
            ``"mse"``: that of the least squared error, and ``"entropy"``: that of least Kullback-Leibler divergence,
            as in TensorRT. Default: ``"entropy"`` for int8, ``"minmax"`` for fp8, whose steps grow with the numbers.
        percentile: for the method of that name, in per cent.
        format: ``"int8"``, or ``"fp8"`` (E4M3), which GPUs support from compute capability 8.9 on, TensorRT from 9.0.
        keep: names of layers, or patterns of names (``"head.*"``), that are not quantized.
        cache: a file that stores the calibration. An interrupted calibration continues with the same batches in the
            same order, and another method can use the file without running them again.

    Returns:
        The copy. Its ``state_dict`` has the model's keys, and ``<layer>.input_quantizer.scale`` and
        ``<layer>.weight_quantizer.scale``, or ``<layer>.map_quantizers.<level>.scale``. Layers that no batch reaches
        are not quantized.

    Raises:
        SvexportError: without a layer to quantize or without batches, if an input of a layer is not finite, if a name
            in ``keep`` matches nothing, if ``method``, ``percentile`` or ``format`` is invalid, or if ``cache`` belongs
            to another model.
        ExportError: if a batch does not fit ``forward``.
    """
    method = _method(method, format)
    check_method(method, percentile)
    result = copied(unwrapped(model))
    if any(isinstance(module, QuantizedLayer) for module in result.modules()):
        raise SvexportError(f"{type(result).__name__} is quantized already; give the model it was made of")
    maps = readers(result) if format == "int8" else {}
    layers = _chosen(result, quantizable(result) | maps, keep)
    histograms = _calibrated(result, layers, batches, None if cache is None else CalibrationCache(cache, result))
    for i, (name, layer) in enumerate(layers.items()):
        phase(f"choosing scales, {i + 1} of {len(layers)} layers")
        largest = [calibrate(one, method, percentile) for one in histograms.get(name, ())]
        if largest and name in maps:
            held = next(chain(layer.parameters(), result.parameters(), result.buffers()), None)
            to_quantized_maps(layer, largest, None if held is None else held.device)
        elif largest:
            to_quantized(layer, largest[0], format)
    always_called(result)
    if missed := [name for name in layers if name not in histograms]:
        logger.warning("{} layers stay as they are, for no batch reached them: {}", len(missed), ", ".join(missed[:8]))
    return result


def _method(method: str | None, format: str) -> str:
    """The default of a format."""
    if format not in FORMATS:
        raise SvexportError(f"format: expected one of {', '.join(FORMATS)}, got {format!r}")
    if format == "fp8" and method in ("entropy", "mse"):
        raise SvexportError(
            f"method: {method!r} counts 128 equal steps, which fp8 does not have; use 'minmax' or 'percentile'"
        )
    return method or ("entropy" if format == "int8" else "minmax")


def _chosen(model: nn.Module, layers: Mapping[str, nn.Module], keep: Collection[str]) -> dict[str, nn.Module]:
    """The layers to quantize: those that ``keep`` does not name."""
    if isinstance(keep, str):
        raise SvexportError(f"keep: expected a list of names, got the string {keep!r}; give [{keep!r}]")
    names = list(layers)
    if none := [pattern for pattern in keep if not any(fnmatchcase(name, pattern) for name in names)]:
        raise SvexportError(
            f"keep: no layer is named {', '.join(map(repr, none))}; those that can be quantized are {_some(names)}"
        )
    chosen = {name: layer for name, layer in layers.items() if not any(fnmatchcase(name, p) for p in keep)}
    if not chosen:
        kinds = "nn.Linear, nn.Conv, nn.ConvTranspose and svexport's that sample maps"
        left = f"keep leaves none of {len(layers)}" if layers else "it has none"
        raise SvexportError(f"{type(model).__name__}: expected a layer to quantize, {kinds}; {left}")
    return chosen


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")


def _calibrated(
    model: nn.Module, layers: Mapping[str, nn.Module], batches: Iterable[Any], cache: CalibrationCache | None
) -> dict[str, list[Histogram]]:
    """Histograms of the inputs of all layers that some batch reaches; of maps, one a level."""
    seen, histograms = cache.read() if cache else (0, {})
    number, written = 0, time.monotonic()
    with torch.no_grad(), eval_mode(model), _observed(layers, histograms):
        for number, batch in enumerate(batches, 1):
            if number <= seen:
                continue
            phase(f"calibrating, batch {number}")
            try:
                called(model, bind(model, batch), f"batch {number}")
            except _NotFinite as error:
                raise SvexportError(f"batch {number}: {error}") from error
            if cache and time.monotonic() - written > _SECONDS:
                cache.write(number, histograms)
                written = time.monotonic()
    if not max(number, seen):
        raise SvexportError("batches is empty; give an iterable of what forward is called with, such as a DataLoader")
    if cache and number > seen:
        cache.write(number, histograms)
    return {name: found for name in layers if (found := _of(name, histograms))}


def _of(name: str, histograms: Mapping[str, Histogram]) -> list[Histogram]:
    """The histogram of a layer's input, or of each level of its maps."""
    levels = takewhile(histograms.__contains__, (f"{name}:{level}" for level in count()))
    return [histograms[place] for place in ([name] if name in histograms else levels)]


class _NotFinite(SvexportError):
    pass


@contextmanager
def _observed(layers: Mapping[str, nn.Module], histograms: dict[str, Histogram]) -> Iterator[None]:
    handles = [
        layer.register_forward_pre_hook(partial(_observe, name, histograms), with_kwargs=True)
        for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _observe(
    name: str, histograms: dict[str, Histogram], layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    if isinstance(layer, MAP_READERS):
        inputs = {f"{name}:{level}": x for level, x in enumerate(maps_of(layer, args, kwargs))}
    else:
        inputs = {name: args[0] if args else kwargs["input"]}
    for place, x in inputs.items():
        if isinstance(x, Tensor):
            try:
                histograms.setdefault(place, Histogram()).add(x)
            except SvexportError as error:
                raise _NotFinite(f"input of {place}: {error}") from error
