"""The ONNX file that an engine is built from."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
from onnx import TensorProto

from svexport.errors import BuildError, SvexportError
from svexport.graph.bodies import strip
from svexport.graph.reading import check_regular
from svexport.graph.walk import graphs
from svexport.tensorrt.support.target import PLUGINS_BEFORE_FUNCTIONS, Version

__all__ = ["Source", "read_source", "source_lines"]


@dataclass(frozen=True)
class Source:
    """A file to build from.

    Attributes:
        path: path of the file; None for a model in memory.
        model: the model, without its external data if it has a path.
        half: whether it has float16 tensors.
        integers: whether it has quantizers.
        stripped: whether bodies were removed.
    """

    path: Path | None
    model: onnx.ModelProto
    half: bool
    integers: bool
    stripped: bool = False

    def for_version(self, version: Version) -> Source:
        """The source without bodies, if this version's parser would use them instead of the plugins."""
        if version >= PLUGINS_BEFORE_FUNCTIONS or not self.model.functions:
            return self
        model = onnx.ModelProto()
        model.CopyFrom(self.model)
        strip(model)
        return replace(self, model=model, stripped=True)

    def __str__(self) -> str:
        return str(self.path) if self.path else "the model"


def read_source(model: str | os.PathLike[str] | onnx.ModelProto) -> Source:
    """Reads the model in any form that :func:`svexport.build` accepts.

    Raises:
        BuildError: if it cannot be read.
    """
    path = None
    if not isinstance(model, onnx.ModelProto):
        if not isinstance(model, (str, os.PathLike)):
            raise BuildError(f"expected the path of an ONNX file or an onnx.ModelProto, got {type(model).__name__}")
        path = Path(model)
        try:
            check_regular(path)
        except SvexportError as error:
            raise BuildError(str(error)) from error
        try:
            model = onnx.load(str(path), load_external_data=False)
        except OSError as error:
            raise BuildError(f"cannot read {path}: {error.strerror or error}; check the path") from error
        except Exception as error:  # protobuf's own
            raise BuildError(f"{path} is not an ONNX file, or it was cut short; export or copy it again") from error
    if not model.HasField("graph"):
        raise BuildError(f"{path or 'the model'} holds no ONNX graph; export or copy it again")
    every = [g for root in (model.graph, *model.functions) for g in graphs(root)]
    constants = (t for g in every if isinstance(g, onnx.GraphProto) for t in g.initializer)
    types = {t.data_type for t in constants} | {v.type.tensor_type.elem_type for v in model.graph.input}
    integers = any(node.op_type == "QuantizeLinear" for g in every for node in g.node)
    return Source(path, model, TensorProto.FLOAT16 in types, integers)


def source_lines(model: onnx.ModelProto) -> dict[str, str]:
    """By node name, the line of the user's source that the node came from, as far as the file records it."""
    return {node.name: node.doc_string for g in graphs(model.graph) for node in g.node if node.name and node.doc_string}
