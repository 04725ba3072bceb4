"""Proof of a graph rewrite: both models run in ONNX Runtime on the same random inputs."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import torch
from onnx import helper

from svexport.errors import VerificationError
from svexport.graph.bodies import lower
from svexport.parity import parity

__all__ = ["prove", "random_inputs"]


def prove(
    before: onnx.ModelProto,
    after: onnx.ModelProto,
    *,
    exact: bool = False,
    sizes: Mapping[str, int] | None = None,
    seed: int = 0,
    rtol: float = 1e-4,
    atol: float = 1e-5,
) -> None:
    """Runs two models on the same inputs, standard normal or small integers, and compares all their outputs.

    Args:
        before: the model as it was; svexport nodes are lowered.
        after: the model as it is now.
        exact: whether outputs have to be equal, as after a rewrite that only moves data.
        sizes: sizes of dynamic dimensions by name; 3 if none is given.
        seed: seed of the random inputs.
        rtol: relative tolerance unless ``exact``.
        atol: absolute tolerance unless ``exact``.

    Raises:
        VerificationError: if an output differs, or the names of inputs or outputs do.
    """
    names = [([i.name for i in m.graph.input], [o.name for o in m.graph.output]) for m in (before, after)]
    if names[0] != names[1]:
        raise VerificationError(f"a rewrite has to keep inputs and outputs: they were {names[0]} and are {names[1]}")
    feeds = random_inputs(before, sizes or {}, seed)
    if exact:
        rtol = atol = 0.0
    for name, expected, actual in zip(names[0][1], _run(before, feeds), _run(after, feeds), strict=True):
        found = parity(name, expected, actual, run="random", rtol=rtol, atol=atol)
        if not found.ok:
            raise VerificationError(
                f"the rewrite changed output {found.name!r} of shape {list(found.shape)}: {found.mismatched} elements "
                f"differ, by up to {found.max_abs:.3g}",
                [found],
            )


def random_inputs(model: onnx.ModelProto, sizes: Mapping[str, int], seed: int) -> dict[str, np.ndarray]:
    """Random values for the inputs of a model that have no default."""
    generator = np.random.default_rng(seed)
    defaults = {tensor.name for tensor in model.graph.initializer}
    feeds = {}
    for value in model.graph.input:
        if value.name not in defaults:
            tensor = value.type.tensor_type
            dtype = helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            shape = [d.dim_value if d.HasField("dim_value") else sizes.get(d.dim_param, 3) for d in tensor.shape.dim]
            floating = np.issubdtype(dtype, np.floating)
            values = generator.standard_normal(shape) if floating else generator.integers(0, 2, shape)
            feeds[value.name] = np.asarray(values, dtype)
    return feeds


def _run(model: onnx.ModelProto, feeds: Mapping[str, np.ndarray]) -> list[torch.Tensor]:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.intra_op_num_threads = 1
    # Runs the graph as written, because the runtime's optimizer also moves Transposes.
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    file = lower(model).SerializeToString()
    session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
    return [torch.from_numpy(np.asarray(value)) for value in session.run(None, dict(feeds))]
