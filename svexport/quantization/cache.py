"""Stores the state of a calibration in a file, so that an interrupted one can continue."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from svexport import html
from svexport.errors import SvexportError
from svexport.quantization.histogram import Histogram
from svexport.untrusted import parse_json

__all__ = ["CalibrationCache"]

_FORMAT, _VERSION = "svexport calibration", 1
_MOST = 1 << 28
"""Bytes of a cache that is read."""


class CalibrationCache:
    """A JSON file with histograms by layer, and the number of batches in them.

    It is valid for one model only, identified by its modules, parameters and buffers.
    """

    def __init__(self, path: str | os.PathLike[str], model: nn.Module) -> None:
        """Raises:
        SvexportError: if no file can be written there.
        """
        html.check_place(path)
        self.path, self._key = Path(path), _hash(model)

    def read(self) -> tuple[int, dict[str, Histogram]]:
        """The number of batches, and the histograms; empty if there is no file yet.

        Raises:
            SvexportError: if the file is not a calibration cache, or belongs to another model.
        """
        if not self.path.exists():
            return 0, {}
        advice = "delete it, or name another file as cache"
        try:
            if self.path.stat().st_size > _MOST:
                raise ValueError(f"more than {_MOST >> 20} MB")
            data = parse_json(self.path.read_text("utf-8"))
            if not isinstance(data, dict) or data.get("format") != _FORMAT or data.get("version") != _VERSION:
                raise ValueError(f"not in the format {_FORMAT!r}, version {_VERSION}")
            batches, layers, key = (data.get(name) for name in ("batches", "layers", "model"))
            if type(batches) is not int or batches < 0 or not isinstance(layers, dict):
                raise ValueError("without batches and layers")
            histograms = {name: Histogram.from_dict(layer) for name, layer in layers.items()}
        except (OSError, ValueError, RecursionError) as error:
            raise SvexportError(f"{self.path} is no calibration cache: {error}; {advice}") from error
        if key != self._key:
            raise SvexportError(f"{self.path} is the calibration of another model, or of other weights; {advice}")
        return batches, histograms

    def write(self, batches: int, histograms: Mapping[str, Histogram]) -> None:
        """Replaces the file by histograms of that many batches, by names of layers."""
        layers = {name: histogram.to_dict() for name, histogram in histograms.items()}
        data = {"format": _FORMAT, "version": _VERSION, "model": self._key, "batches": batches, "layers": layers}
        html.write(self.path, json.dumps(data))


def _hash(model: nn.Module) -> str:
    """A hash of the types and names of all modules, and of the values of parameters and buffers."""
    result = hashlib.sha256()
    for name, module in model.named_modules():
        result.update(f"{name}:{type(module).__module__}.{type(module).__qualname__};".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        tensor = tensor.detach().cpu().contiguous()
        result.update(f"{name}:{tensor.dtype}{list(tensor.shape)};".encode())
        result.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return result.hexdigest()
