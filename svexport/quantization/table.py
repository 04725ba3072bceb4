"""TensorRT's calibration table: the file in which its int8 calibrators store the scales of a network's tensors."""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
from onnx import helper

from svexport import html
from svexport.errors import SvexportError
from svexport.graph.reading import read_model
from svexport.graph.saving import write as write_model
from svexport.graph.scope import Scope, is_standard, scopes
from svexport.graph.walk import refill
from svexport.quantization.layers import HIGH

__all__ = ["CalibrationTable"]

_MOST = 1 << 26
"""Bytes of a table that is read."""

_HEADER = re.compile(r"TRT-(\d{4,6})-(\w+)")
_LINE = re.compile(r"(.+): *([0-9a-fA-F]{1,8})")

_FIRST_OPSET = 13  # of scales by channel

_LAYERS = {"Conv": 0, "ConvTranspose": 1, "MatMul": 1, "Gemm": 1}
"""Nodes whose products are quantized, with the axis of their weights that has the output channels."""


@dataclass(frozen=True)
class CalibrationTable:
    """Scales by tensor, in the text format of ``IInt8Calibrator.writeCalibrationCache`` and ``trtexec --calib``.

    Each has a line ``name: 3c010a14``: the bits of a float32, the largest magnitude divided by 127. Source: NVIDIA's
    sampleINT8, "Calibration file".

    Attributes:
        scales: scales by the tensor's name in the ONNX file.
        version: TensorRT version, as ``NV_TENSORRT_VERSION``: 8601 is 8.6.1, 100100 is 10.1.0. Another TensorRT
            version calibrates again.
        algorithm: ``"EntropyCalibration2"``, ``"MinMaxCalibration"``, ….
    """

    scales: Mapping[str, float] = field(default_factory=dict)
    version: int = 8601
    algorithm: str = "EntropyCalibration2"

    def __post_init__(self) -> None:
        if not _HEADER.fullmatch(self._header):
            raise SvexportError(
                f"expected version as 8601 and algorithm as 'EntropyCalibration2', got {self.version!r} and "
                f"{self.algorithm!r}"
            )
        for name, scale in self.scales.items():
            if not name.strip() or "\n" in name or "\r" in name:
                raise SvexportError(f"a calibration table has a line per tensor, which cannot hold the name {name!r}")
            if not 0 <= scale <= float(np.finfo(np.float32).max):
                raise SvexportError(f"the scale of {name!r} is {scale!r}; expected a number of float32, 0 or more")

    @property
    def _header(self) -> str:
        return f"TRT-{self.version}-{self.algorithm}"

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> CalibrationTable:
        """Raises:
        SvexportError: if the file does not exist, or is not a calibration table.
        """
        place = Path(path)
        try:
            if place.stat().st_size > _MOST:
                raise ValueError(f"more than {_MOST >> 20} MB")
            first, *lines = place.read_text("utf-8").splitlines() or [""]
            header = _HEADER.fullmatch(first.strip())
            if header is None:
                raise ValueError(f"the first line is {first[:80]!r}, expected one such as TRT-8601-EntropyCalibration2")
            scales: dict[str, float] = {}
            for number, line in enumerate(lines, 2):
                if not line.strip():
                    continue
                entry = _LINE.fullmatch(line.rstrip())
                if entry is None or entry[1] in scales:
                    raise ValueError(f"line {number} is {line[:80]!r}, expected a new name: 3c010a14")
                (scales[entry[1]],) = struct.unpack(">f", bytes.fromhex(entry[2].zfill(8)))
            return cls(scales, int(header[1]), header[2])
        except (OSError, ValueError, SvexportError) as error:
            raise SvexportError(f"{place} is no calibration table of TensorRT: {error}") from error

    def write(self, path: str | os.PathLike[str]) -> None:
        """Raises:
        SvexportError: if it cannot be written.
        """
        lines = [f"{name}: {struct.pack('>f', scale).hex()}" for name, scale in self.scales.items()]
        html.write(path, "\n".join([self._header, *lines, ""]))

    @classmethod
    def of(cls, model: onnx.ModelProto | str | os.PathLike[str], version: int = 8601) -> CalibrationTable:
        """The table of the tensors that a file quantizes by one scale: inputs of QuantizeLinear, except constants.

        It is for a TensorRT that calibrates (below 11), together with the file without these nodes.

        Raises:
            SvexportError: if the file does not exist, or quantizes no tensor in this way.
        """
        scales: dict[str, float] = {}
        for scope in scopes(_loaded(model)):
            for node in scope.graph.node:
                if not is_standard(node, "QuantizeLinear") or node.input[0] in scope.constants:
                    continue
                scale = scope.array(node.input[1])
                if scale is not None and scale.size == 1:
                    scales[node.input[0]] = float(scale.reshape(-1)[0])
        if not scales:
            raise SvexportError("expected a file with QuantizeLinear nodes of one scale; quantize the model first")
        return cls(scales, version)

    def quantized(
        self, model: onnx.ModelProto | str | os.PathLike[str], path: str | os.PathLike[str] | None = None
    ) -> onnx.ModelProto:
        """Quantizes a file explicitly, as TensorRT 11 requires, by the scales of a table from TensorRT 8 or 10.

        Products with constant weights (Conv, ConvTranspose, MatMul, Gemm) whose input has a scale in the table get
        QuantizeLinear and DequantizeLinear before their input, and before their weights, with one scale per output
        channel.

        Args:
            model: an ONNX model or its path, at opset 13 or later.
            path: where to write the result, if anywhere.

        Raises:
            SvexportError: if the file does not exist, its opset is lower, or the table names no input of a product.
        """
        result = onnx.ModelProto()
        result.CopyFrom(_loaded(model))
        count = sum(self._insert(scope) for scope in scopes(result) if _can_hold(scope))
        if not count:
            raise SvexportError(
                f"the table has scales of {len(self.scales)} tensors, none of them the input of a Conv, ConvTranspose, "
                "MatMul or Gemm with constant weights; is it of this file?"
            )
        if path is not None:
            write_model(result, Path(path))
        return result

    def _insert(self, scope: Scope) -> int:
        """Quantizes the products of a graph, and says how many."""
        nodes: list[onnx.NodeProto] = []
        made: dict[tuple[str, int], str] = {}
        count = 0
        for node in scope.graph.node:
            weight = None if len(node.input) < 2 else scope.array(node.input[1])
            scale = self.scales.get(node.input[0]) if node.input else None
            axis = _channel_axis(node, weight)
            if axis is not None and weight is not None and scale:
                count += 1
                for place, scales in ((0, np.float32(scale)), (1, _weight_scales(weight, axis))):
                    key = node.input[place], axis if place else -1
                    if key not in made:
                        made[key] = _pair(scope, nodes, key[0], scales, axis)
                    node.input[place] = made[key]
            nodes.append(node)
        if count:
            kept = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
            refill(scope.graph.node, kept)
        return count


def _loaded(model: onnx.ModelProto | str | os.PathLike[str]) -> onnx.ModelProto:
    return model if isinstance(model, onnx.ModelProto) else read_model(Path(model))


def _can_hold(scope: Scope) -> bool:
    if scope.opset < _FIRST_OPSET:
        raise SvexportError(f"scales by channel come with opset {_FIRST_OPSET}, and the file has {scope.opset}")
    return True


def _channel_axis(node: onnx.NodeProto, weight: npt.NDArray[np.generic] | None) -> int | None:
    """The channel axis of the weights of a product; None for another node, and for weights that are not float32."""
    axis = next((axis for kind, axis in _LAYERS.items() if is_standard(node, kind)), None)
    if axis is None or weight is None or weight.dtype != np.float32 or weight.ndim < 2 or not weight.size:
        return None
    if node.op_type == "MatMul":
        return axis if weight.ndim == 2 else None
    if node.op_type == "Gemm":
        given = {attribute.name: attribute.i for attribute in node.attribute}
        return None if given.get("transA") else 0 if given.get("transB") else 1
    if node.op_type == "ConvTranspose" and any(a.name == "group" and a.i > 1 for a in node.attribute):
        return None  # output channels are along two axes
    return axis


def _weight_scales(weight: npt.NDArray[np.generic], axis: int) -> npt.NDArray[np.float32]:
    largest = np.abs(np.moveaxis(weight, axis, 0).reshape(weight.shape[axis], -1)).max(1)
    return np.where(largest > 0, largest, 1).astype(np.float32) / np.float32(HIGH)


def _pair(
    scope: Scope, nodes: list[onnx.NodeProto], name: str, scales: npt.NDArray[np.float32] | np.float32, axis: int
) -> str:
    """QuantizeLinear and DequantizeLinear behind a tensor."""
    array = np.asarray(scales)
    scale = scope.constant(array, f"{name}_scale")
    zero = scope.constant(np.zeros(array.shape, np.int8), f"{name}_zero_point")
    middle, result = scope.fresh(f"{name}_quantized"), scope.fresh(f"{name}_dequantized")
    options: dict[str, Any] = {"axis": axis} if array.ndim else {}
    first, second = scope.fresh(f"quantize_{name}"), scope.fresh(f"dequantize_{name}")
    nodes.append(helper.make_node("QuantizeLinear", [name, scale, zero], [middle], first, **options))
    nodes.append(helper.make_node("DequantizeLinear", [middle, scale, zero], [result], second, **options))
    return result
