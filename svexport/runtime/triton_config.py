"""Writes a model's configuration for Triton Inference Server: ``config.pbtxt``, in protobuf's text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from svexport.errors import UnsupportedError
from svexport.runtime.engine import TensorSpec

__all__ = ["DTYPES", "Enum", "Served", "ensemble_config", "model_config", "pbtxt", "tensor"]

DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "UINT8",
    torch.uint16: "UINT16",
    torch.uint32: "UINT32",
    torch.uint64: "UINT64",
    torch.int8: "INT8",
    torch.int16: "INT16",
    torch.int32: "INT32",
    torch.int64: "INT64",
    torch.float16: "FP16",
    torch.float32: "FP32",
    torch.float64: "FP64",
    torch.bfloat16: "BF16",
}
"""Triton's names of data types, which clients use too."""

_LINE = 100


class Enum(str):
    """An enum value, written without quotes."""


@dataclass
class Served:
    """A model in a repository.

    Attributes:
        name: name of its folder.
        kind: ``"onnx"`` or ``"plan"``.
        inputs: the engine's inputs, including the batch axis.
        outputs: likewise.
        max_batch_size: the largest batch; 0 if Triton does not batch it.
        sizes: a typical shape of each input including the batch axis, as far as it is known.
        shape_inputs: inputs and outputs whose values are sizes; only TensorRT has these.
        warm: whether a warm-up is written.
        notes: what was assumed or left out.
    """

    name: str
    kind: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_batch_size: int = 0
    sizes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    shape_inputs: frozenset[str] = frozenset()
    warm: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def file(self) -> str:
        """The name of the model file that Triton looks for."""
        return f"model.{self.kind}"


def tensor(model: Served, spec: TensorSpec) -> dict[str, Any]:
    """The description of an input or output, without its batch axis if Triton batches.

    Raises:
        UnsupportedError: on an unknown rank, or a size or type that Triton does not have.
    """
    what = f"{spec.name!r} of {model.name}"
    if spec.shape is None:
        raise UnsupportedError(
            f"{what} has no fixed rank in the file, and Triton needs one; export it with static ranks"
        )
    if 0 in spec.shape:
        raise UnsupportedError(f"{what} is {spec}: Triton has no empty tensors; export other sizes")
    if spec.dtype not in DTYPES:
        raise UnsupportedError(f"{what} is {spec}; Triton exchanges {', '.join(DTYPES.values())}")
    dims = [size if isinstance(size, int) else -1 for size in spec.shape[1 if model.max_batch_size else 0 :]]
    facts: dict[str, Any] = {"name": spec.name, "data_type": Enum(f"TYPE_{DTYPES[spec.dtype]}"), "dims": dims or [1]}
    if not dims:
        if model.max_batch_size:
            facts["reshape"] = {}  # to [batch]: dims must not be empty
        elif model.kind == "plan":
            raise UnsupportedError(
                f"{what} has no axes, and Triton has no such tensors with TensorRT; export it with an axis of size 1"
            )
    if spec.name in model.shape_inputs:
        facts["is_shape_tensor"] = True
    return facts


def model_config(model: Served, instances: int, device: torch.device | None, queue_delay: int | None) -> dict[str, Any]:
    """The configuration of a model. ``device`` is where instances run; None leaves it to the server."""
    facts: dict[str, Any] = {
        "name": model.name,
        "backend": "onnxruntime" if model.kind == "onnx" else "tensorrt",
        "platform": "onnxruntime_onnx" if model.kind == "onnx" else "tensorrt_plan",
        "max_batch_size": model.max_batch_size,
        "input": [tensor(model, spec) for spec in model.inputs],
        "output": [tensor(model, spec) for spec in model.outputs],
    }
    group: dict[str, Any] = {"count": instances}
    if device is not None or model.kind == "plan":
        group["kind"] = Enum("KIND_CPU" if device is not None and device.type == "cpu" else "KIND_GPU")
    if device is not None and device.index is not None:
        group["gpus"] = [device.index]
    facts["instance_group"] = [group]
    if model.max_batch_size > 1 and queue_delay is not None:
        facts["dynamic_batching"] = {"max_queue_delay_microseconds": queue_delay}
    if model.kind == "onnx" and (device is None or device.type == "cuda"):
        exact = {"name": "cuda", "parameters": [{"key": "use_tf32", "value": "0"}]}
        facts["optimization"] = {"execution_accelerators": {"gpu_execution_accelerator": [exact]}}
    if model.warm:
        facts["model_warmup"] = list(_warmup(model))
    return facts


def _warmup(model: Served) -> Iterator[dict[str, Any]]:
    """Warm-up runs on zeros before the first request, with the smallest and the largest batch."""
    for batch in dict.fromkeys((1, max(model.max_batch_size, 1))):
        inputs = []
        for spec in model.inputs:
            facts = tensor(model, spec)
            dims = list(model.sizes[spec.name][1 if model.max_batch_size else 0 :]) or [1]
            value = {"data_type": facts["data_type"], "dims": dims, "zero_data": True}
            inputs.append({"key": spec.name, "value": value})
        yield {"name": f"batch of {batch}", "batch_size": batch, "inputs": inputs}


def ensemble_config(
    name: str,
    steps: Sequence[tuple[Served, Mapping[str, str], Mapping[str, str]]],
    inputs: Mapping[str, tuple[Served, TensorSpec]],
    outputs: Mapping[str, tuple[Served, TensorSpec]],
) -> dict[str, Any]:
    """The configuration of a chain of models.

    Args:
        name: name of the ensemble.
        steps: for each model, the ensemble's tensor for each of its inputs and outputs.
        inputs: inputs of the ensemble, each with the model and the model's input that it feeds.
        outputs: likewise.
    """

    def ends(given: Mapping[str, tuple[Served, TensorSpec]]) -> list[dict[str, Any]]:
        described = {outer: {**tensor(model, spec), "name": outer} for outer, (model, spec) in given.items()}
        own = ("is_shape_tensor", "reshape")  # these belong to the steps only
        return [{k: v for k, v in facts.items() if k not in own} for facts in described.values()]

    def pairs(names: Mapping[str, str]) -> list[dict[str, str]]:
        return [{"key": inner, "value": outer} for inner, outer in names.items()]

    return {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": min(model.max_batch_size for model, _, _ in steps),
        "input": ends(inputs),
        "output": ends(outputs),
        "ensemble_scheduling": {
            "step": [
                {"model_name": model.name, "model_version": -1, "input_map": pairs(ins), "output_map": pairs(outs)}
                for model, ins, outs in steps
            ]
        },
    }


def pbtxt(message: Mapping[str, Any], indent: str = "") -> str:
    """A message in protobuf's text format: dicts are messages, lists repeat their field."""
    lines = []
    for key, value in message.items():
        if isinstance(value, Mapping):
            value = [value]
        if isinstance(value, list) and value and isinstance(value[0], Mapping):
            for one in value:
                inner = pbtxt(one, indent + "  ")
                short = f"{indent}{key} {{ {'  '.join(line.strip() for line in inner.splitlines())} }}"
                flat = "{" not in inner and inner.count("\n") <= 3 and len(short) <= _LINE
                lines.append(short if flat else f"{indent}{key} {{\n{inner}{indent}}}")
        else:
            lines.append(f"{indent}{key}: {_scalar(value)}")
    return "".join(f"{line}\n" for line in lines)


def _scalar(value: Any) -> str:
    if isinstance(value, Enum):
        return str(value)
    if isinstance(value, str):
        return _quoted(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_scalar, value))}]"
    return str(value)


def _quoted(text: str) -> str:
    """Quotes a text, with octal escapes for all bytes except plain ASCII."""
    return '"' + "".join(
        chr(byte) if 32 <= byte < 127 and byte not in b'"\\' else f"\\{byte:03o}" for byte in text.encode()
    ) + '"'  # fmt: skip
