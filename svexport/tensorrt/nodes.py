"""Generates ``csrc/tensorrt/nodes.h``, the plugins' description of the nodes, from the definitions of the ops.

Run ``python -m svexport.tensorrt.nodes`` after an op with a plugin is added or changed.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

import svexport.ops  # noqa: F401 - fills OPS
from svexport.ops._op import OPS, Op

__all__ = ["HEADER", "header", "plugin_ops"]

HEADER = Path(__file__).parents[1] / "csrc" / "tensorrt" / "nodes.h"

_TYPES = {"int": "int32_t", "float": "float", "ints": "std::vector<int32_t>", "floats": "std::vector<float>"}


def plugin_ops() -> list[Op]:
    """The ops that TensorRT runs as plugins, by name."""
    return sorted((op for op in OPS.values() if op.has_plugin), key=lambda op: op.name)


def header() -> str:
    """The text of ``nodes.h``: one struct per node, with its attributes as members."""
    ops = plugin_ops()
    lines = [
        "// The nodes as the definitions of the ops describe them. Written by `python -m svexport.tensorrt.nodes`.",
        "#pragma once",
        "",
        "#include <cstdint>",
        "#include <vector>",
        "",
        '#include "fields.h"',
        "",
        "// SVEXPORT_NODES(X) is X(op, Node) for every node that has a plugin.",
        "#define SVEXPORT_NODES(X) \\",
        *(f"  X({op.name}, {_struct(op)}) \\" for op in ops),
        "",
        "namespace svexport::plugin {",
        "",
        "struct NodeType {",
        "  const char* type;",
        "  int tensors, optional, outputs;  // tensors: inputs that are neither optional nor in a list",
        "};",
        "",
        *(line for op in ops for line in _definition(op)),
        "}  // namespace svexport::plugin",
        "",
    ]
    return "\n".join(lines)


def _struct(op: Op) -> str:
    return op.node_type.removeprefix("Sv") + "Node"


def _definition(op: Op) -> list[str]:
    computed = [a.name for a in op.attributes if a.symbolic]
    assert not computed, f"{op.name}: a plugin's attributes are fixed, {computed} may be computed by the model"
    tensors = [a for a in op.arguments if a.is_tensor]
    required, optional = sum(a.kind == "tensor" and not a.optional for a in tensors), sum(a.optional for a in tensors)
    members = [f"  {_TYPES[a.kind]} {a.name}{{}};" for a in op.attributes]
    names = textwrap.fill(", ".join(a.name for a in op.attributes), 102).replace("\n", "\n" + 16 * " ")
    return [
        f"// {', '.join(a.name + {'tensors': '...', 'tensor': '?' * a.optional}[a.kind] for a in tensors)}",
        f"struct {_struct(op)} {{",
        f'  static constexpr NodeType kNode{{"{op.node_type}", {required}, {optional}, {op.num_outputs}}};',
        *members,
        *_weights(op),
        "",
        *(["  template <class Visitor>", "  void each(Visitor&&) {}"] if not names else [f"  SVEXPORT_EACH({names})"]),
        "};",
        "",
    ]


def _weights(op: Op) -> list[str]:
    """Attribute names of the weights: those of a layer (prefix ``layers_<i>_``) and those after the layers."""
    if op.weight_names is None:
        return []
    names = [name.replace(".", "_") for name in op.weight_names({"num_layers": 1, "learned_offsets": 1})]
    first = "layers_0_"
    groups = {
        "kLayerWeights": [name.removeprefix(first) for name in names if name.startswith(first)],
        "kLastWeights": [name for name in names if not name.startswith(first)],
    }
    return [
        line
        for group, members in groups.items()
        for line in (
            f"  static constexpr const char* {group}[] = {{",
            *(" " * 6 + line for line in textwrap.wrap(", ".join(f'"{name}"' for name in members), 114)),
            "  };",
        )
    ]


if __name__ == "__main__":
    HEADER.write_text(header())
