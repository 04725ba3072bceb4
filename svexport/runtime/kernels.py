"""svexport's CUDA kernels in ONNX Runtime: a library of custom ops, and models whose nodes use these ops.

An op of the domain ``svexport.kernels`` is a node whose output types are in its name (``SvGridSample_FLOAT16``), with
one more output for the kernel's workspace. Every other node is run by its body, as without kernels.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import os
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

from svexport.errors import BackendNotAvailableError, PluginBuildError
from svexport.graph.bodies import drop_unused_bodies, input_types
from svexport.graph.nodes import PLUGIN_ATTRIBUTES, beyond_plugin, svexport_nodes, weight_attributes
from svexport.graph.walk import attributes_of, graphs
from svexport.ops import _cuda
from svexport.ops._einsum.plan import MatMul, plan
from svexport.symbolic import SYMBOLICS
from svexport.symbolic._builder import Value
from svexport.tensorrt.library import FLAGS, compile_sources, gencode, link
from svexport.tensorrt.nodes import plugin_ops

__all__ = ["API_VERSION", "DOMAIN", "build", "find_headers", "library", "with_kernels"]

DOMAIN = "svexport.kernels"
API_VERSION = 16
"""The first version of ONNX Runtime's C API with all that the library calls. ONNX Runtime 1.n has versions up to n."""

_FLOATS: dict[int, str] = {TensorProto.FLOAT: "FLOAT", TensorProto.FLOAT16: "FLOAT16", TensorProto.BFLOAT16: "BFLOAT16"}
_MOST_DIMENSIONS = 8
_FOLDERS = ("include/onnxruntime/core/session", "include/onnxruntime", "include/core/session", "include", ".")
_lock = threading.Lock()


def find_headers(root: str | os.PathLike[str] | None = None) -> Path:
    """The folder of onnxruntime_c_api.h: below ``root``, by default the environment's ``ONNXRUNTIME_ROOT``, else /usr.

    Raises:
        PluginBuildError: if it is missing, or belongs to an ONNX Runtime that is too old.
    """
    base = Path(root or os.environ.get("ONNXRUNTIME_ROOT") or "/usr")
    folder = next((base / f for f in _FOLDERS if (base / f / "onnxruntime_c_api.h").is_file()), None)
    if folder is None:
        raise PluginBuildError(
            f"{base / 'include' / 'onnxruntime_c_api.h'} does not exist. The kernels are compiled against the C header "
            "of ONNX Runtime, which pip's onnxruntime-gpu lacks: install libonnxruntime-dev or unpack a release "
            "(https://github.com/microsoft/onnxruntime/releases), and give its folder as ONNXRUNTIME_ROOT"
        )
    text = (folder / "onnxruntime_c_api.h").read_text(errors="replace")
    found = re.search(r"#define\s+ORT_API_VERSION\s+(\d+)", text)
    if found is None or int(found[1]) < API_VERSION:
        raise PluginBuildError(
            f"{folder / 'onnxruntime_c_api.h'} is of ONNX Runtime {f'1.{found[1]}' if found else 'of no version'}; "
            f"the kernels need 1.{API_VERSION} or newer"
        )
    return folder.resolve()


def library(onnxruntime: Any) -> Path:
    """The library of custom ops for this svexport and the GPUs of this machine; compiled on first use.

    Only a file from svexport's own cache is ever loaded; its name holds the hash of its sources.

    Raises:
        PluginBuildError: if it must be compiled and this fails.
        BackendNotAvailableError: if this ONNX Runtime is too old for it.
    """
    version = tuple(map(int, re.findall(r"\d+", onnxruntime.__version__)[:2]))
    if version < (1, API_VERSION):
        raise BackendNotAvailableError(
            f"svexport's kernels need ONNX Runtime 1.{API_VERSION} or newer, here is {onnxruntime.__version__}; "
            "upgrade it, or load without kernels=True"
        )
    with _lock:
        path = build()
        # Keep it loaded until the process ends: ONNX Runtime unloads it with its last session, while kernels still run.
        ctypes.CDLL(str(path))
        return path


def build() -> Path:
    """:func:`library`, without loading it."""
    include = [_cuda.CSRC / "cuda", _cuda.CSRC / "tensorrt", _cuda.CSRC / "onnxruntime"]
    nodes = [_cuda.CSRC / "tensorrt" / f"{op.name}.cpp" for op in plugin_ops()]
    shared = [_cuda.CSRC / "tensorrt" / name for name in ("plugin.cpp", "weights.cpp")]
    sources = [*sorted(include[0].glob("**/*.cu")), *nodes, *shared, *sorted(include[2].glob("*.cpp"))]
    digest = hashlib.sha256(repr((FLAGS, gencode(None))).encode())
    for path in sorted({*sources, *(p for folder in include for p in folder.glob("**/*.*h"))}):
        digest.update(path.name.encode() + path.read_bytes())
    made = _cuda.cache_folder() / "onnxruntime" / digest.hexdigest()[:32] / "libsvexport_onnxruntime.so"
    if not made.is_file():
        # NvInferRuntime.h is svexport's own, found in `include`, not the system's.
        link(compile_sources(sources, include, find_headers()), made, ["-Xlinker", "-z,nodelete"])
    return made


def with_kernels(model: onnx.ModelProto) -> tuple[onnx.ModelProto, list[str]]:
    """A copy of a model in which the nodes that have a kernel are custom ops, and the names of these nodes.

    Raises:
        UnsupportedError: on a node whose input data types or ranks cannot be inferred.
    """
    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    types = input_types(changed)
    names = {name for g in graphs(changed.graph) for n in g.node for name in n.output}
    fresh = (name for i in itertools.count() if (name := f"svexport_kernels_{i}") not in names)
    taken = []
    for node in list(svexport_nodes(changed)):
        outputs = _output_types(node, types)
        if outputs is None:
            continue
        taken.append(node.name or node.output[0])
        node.op_type = "_".join([node.op_type, *(_FLOATS[dtype] for dtype in outputs)])
        node.domain = DOMAIN
        node.ClearField("overload")
        inputs = [name for name in node.input if name]  # the present ones tell which are absent
        given = [*node.output, *[""] * (len(outputs) - len(node.output)), ""]
        kept = [a for a in node.attribute if a.name not in PLUGIN_ATTRIBUTES]
        del node.input[:], node.output[:], node.attribute[:]
        node.input.extend(inputs)
        node.output.extend(name or next(fresh) for name in given)
        node.attribute.extend(kept)
    if taken:
        changed.opset_import.append(helper.make_opsetid(DOMAIN, 1))
        drop_unused_bodies(changed)
    return changed, taken


def _output_types(node: onnx.NodeProto, types: Mapping[str, Value]) -> list[int] | None:
    """The types of a node's outputs; None for a node without a kernel."""
    op = SYMBOLICS[node.op_type].op if node.op_type in SYMBOLICS else None
    given = [types[name] for name in node.input if name]
    if op is None or not given or any(len(value.shape or ()) > _MOST_DIMENSIONS for value in given):
        return None
    attributes = attributes_of(node)
    if {a.name for a in op.attributes} - set(attributes) or set(weight_attributes(op, attributes)) & set(attributes):
        return None
    if op.name == "einsum":
        return [given[0].dtype or 0] if _is_product(given, attributes) else None
    if not op.has_plugin or beyond_plugin(node):
        return None
    dtypes = [value.dtype or 0 for value in given]
    same, outputs = [dtypes[0]], [dtypes[0]] * op.num_outputs
    others = dtypes[1:]
    if op.name == "ms_deform_attn":
        same, others = [dtypes[0]], dtypes[3:]
        if dtypes[0] == TensorProto.INT8:
            same, outputs = dtypes[4:], dtypes[4:]
        if dtypes[1] != dtypes[2] or dtypes[1] not in (TensorProto.INT32, TensorProto.INT64):
            return None
    elif op.name == "add_bias_residual_layer_norm":
        same = [dtypes[0], dtypes[2], *dtypes[5:]]
    elif op.name == "deform_conv2d":
        same = dtypes[2:3] if dtypes[0] == TensorProto.INT8 else [dtypes[0], dtypes[2]]
        outputs = dtypes[2:3]
    elif op.name == "grid_sample" and dtypes[0] == TensorProto.INT8:
        same, outputs = others, others
    elif op.name == "camera_sample":
        levels = len(attributes["scales"])
        same, others = dtypes[:levels], dtypes[levels:]
        if same[0] == TensorProto.INT8:
            outputs = [dtypes[levels + 2]]
            return outputs if len(set(same)) == 1 and set(others) <= set(_FLOATS) else None
    elif op.name == "transformer_decoder":
        levels = len(attributes["scales"])
        features = set(dtypes[3 : 3 + levels])
        same = [*dtypes[:2], *dtypes[4 + levels :]]
        others = [dtypes[2], dtypes[3 + levels]]
        outputs = [dtypes[0], dtypes[2], dtypes[2]]
        if len(features) != 1 or not features <= {dtypes[0], TensorProto.FLOAT, TensorProto.INT8}:
            return None
    if len(set(same)) != 1 or not {*same, *others, *outputs} <= set(_FLOATS):
        return None
    return outputs


def _is_product(operands: list[Value], attributes: Mapping[str, Any]) -> bool:
    """Whether an einsum is a product of two tensors with a contraction, and neither has a repeated label."""
    labels, ranks = tuple(attributes["labels"]), tuple(attributes["ranks"])
    if len(operands) != 2 or operands[0].dtype != operands[1].dtype or operands[0].dtype not in _FLOATS:
        return False
    if any(len(value.shape or ()) != rank for value, rank in zip(operands, ranks, strict=False)):
        return False
    ends = list(itertools.accumulate(ranks, initial=0))
    terms = [labels[a:b] for a, b in itertools.pairwise(ends)]
    if any(len(set(term)) != len(term) or len(term) > _MOST_DIMENSIONS for term in terms):
        return False
    steps = plan(labels, ranks, tuple(value.shape or () for value in operands)).steps
    return any(isinstance(step, MatMul) for step in steps)
