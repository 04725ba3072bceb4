"""Runs the parser behind TensorRT's Python bindings with Python plugins, in a process of its own; prints JSON.

``python -m tests.tensorrt.parser.bindings FOLDER LIBRARY FILE…``: FOLDER holds ``tensorrt_bindings``, LIBRARY is the
host, which stands in for libnvinfer.
"""

from __future__ import annotations

import ctypes
import json
import sys
from pathlib import Path
from typing import Any


def main(folder: str, library: str, files: list[str]) -> None:
    host = ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
    host.host_errors.restype = ctypes.c_char_p
    sys.path.insert(0, folder)
    import tensorrt_bindings as trt

    sys.modules["tensorrt"] = trt
    import svexport.tensorrt
    from svexport.tensorrt import fields

    kinds = dict(svexport.tensorrt.register_plugins().kinds)
    print(json.dumps({"version": trt.__version__, "kinds": kinds, "lists": fields._reads_lists()}))
    for file in files:
        print(json.dumps({"file": file, **parse(trt, Path(file)), "host": host.host_errors().decode()}), flush=True)


def parse(trt: Any, file: Path) -> dict[str, Any]:
    """One file; its network, parser and builder are released in the order in which Python drops them."""
    logger = trt.Logger(trt.Logger.ERROR)
    builder = trt.Builder(logger)
    network = builder.create_network(1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED))
    parser = trt.OnnxParser(network, logger)
    ok = parser.parse(file.read_bytes())
    layers = [network.get_layer(i).type for i in range(network.num_layers)]
    return {
        "ok": ok,
        "plugins": layers.count(trt.LayerType.PLUGIN_V3),
        "shapes": [list(network.get_output(i).shape) for i in range(network.num_outputs)],
        "inputs": [network.get_input(i).name for i in range(network.num_inputs)],
    }


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
