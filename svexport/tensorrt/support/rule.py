"""Restrictions of a node's inputs, outputs and attributes.

A :class:`Rule` describes what is expected, and has a function of the :class:`Node` that describes what came instead, or
returns None if the node is as expected. It raises :class:`Undecided` if that is unknown without running the model. The
functions in lower case make rules for ``operators`` to list; each can be limited to ``since <= version < before``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from svexport.tensorrt.support.datatypes import FIRST, onnx_name
from svexport.tensorrt.support.node import Node, Undecided
from svexport.tensorrt.support.target import Version, version
from svexport.text import shape_text

__all__ = [
    "FOLD",
    "Came",
    "Rule",
    "all_ones",
    "attribute",
    "computed",
    "constant",
    "foldable",
    "needs_input",
    "no_input",
    "no_output",
    "no_type",
    "only",
    "rank",
    "refused",
    "same_types",
    "static",
    "within",
    "without",
]

Came: TypeAlias = str | None

FOLD = (
    "fold constants: svexport.export(..., simplify=True), or `polygraphy surgeon sanitize --fold-constants` for files "
    "from elsewhere"
)


@dataclass(frozen=True)
class Rule:
    """A restriction.

    Attributes:
        name: short and stable, for programs that read reports.
        expected: what TensorRT expects.
        came: describes what the node has instead, or returns None.
        todo: what to do about it.
        since: the first version that it applies to.
        before: the first later version that it no longer applies to.
        kind: ``"error"``: the parser refuses the node. ``"silent"``: it accepts the node and computes something else.
            ``"builder"``: it accepts the node, but no engine can be built. ``"documented"``: only the documentation
            states it; the parser's sources do not refuse the node.
    """

    name: str
    expected: str
    came: Callable[[Node], Came]
    todo: str = ""
    since: Version = (0, 0)
    before: Version = (99, 0)
    kind: str = "error"


def within(rule: Rule, since: str = "0.0", before: str = "99.0", kind: str = "error", todo: str = "") -> Rule:
    """The rule, limited to versions from ``since`` on and before ``before``."""
    return replace(rule, since=version(since), before=version(before), kind=kind, todo=todo or rule.todo)


# Inputs and outputs ---------------------------------------------------------------------------------------------------


def constant(index: int, name: str, **limits: Any) -> Rule:
    """An input that must be an initializer (or ``Constant``), if it is present."""

    def came(node: Node) -> Came:
        return None if not node.has_input(index) or node.is_constant(index) else node.origin(index)

    return within(Rule(f"constant_{name}", f"{name} as an initializer", came, FOLD), **limits)


def computed(index: int, name: str, **limits: Any) -> Rule:
    """An input that must not be an initializer."""

    def came(node: Node) -> Came:
        return f"{node.proto.input[index]!r}, an initializer" if node.is_constant(index) else None

    return within(Rule(f"computed_{name}", f"{name} that is no initializer", came), **limits)


def foldable(index: int, name: str, **limits: Any) -> Rule:
    """An input whose values the parser must be able to compute, for example from sizes of tensors."""

    def came(node: Node) -> Came:
        if not node.has_input(index) or node.is_constant(index):
            return None
        if node.proto.input[index] not in node.makers:
            return node.origin(index)
        raise Undecided(f"{node.origin(index)}, may or may not become a constant in the parser")

    return within(Rule(f"known_{name}", f"{name} as a constant", came, FOLD), **limits)


def rank(index: int, *allowed: int, **limits: Any) -> Rule:
    """The number of dimensions that an input may have."""
    dims = " or ".join([", ".join(map(str, allowed[:-1])), str(allowed[-1])] if len(allowed) > 1 else [str(allowed[0])])

    def came(node: Node) -> Came:
        if not node.has_input(index):
            return None
        found = len(node.shape(index))
        return None if found in allowed else f"{found} dimensions ({node.proto.input[index]!r})"

    return within(Rule("rank", f"input {index} with {dims} dimensions", came), **limits)


def static(index: int, **limits: Any) -> Rule:
    """An input whose sizes must be static."""

    def came(node: Node) -> Came:
        shape = node.shape(index)
        return None if None not in shape else f"{node.proto.input[index]!r} of shape {shape_text(shape)}"

    return within(
        Rule("static_shape", f"input {index} of static sizes", came, "export without dynamic sizes"), **limits
    )


def refused(*types: str, inputs: tuple[int, ...] = (0,), **limits: Any) -> Rule:
    """Types that the parser refuses."""
    todo = "cast to a floating-point type before it"
    return within(
        Rule("type", f"no {' or '.join(types)} tensors", lambda node: _typed(node, inputs, types), todo), **limits
    )


def only(*types: str, inputs: tuple[int, ...] = (0,), **limits: Any) -> Rule:
    """The only types that the parser does not refuse."""
    others = [name for name in FIRST if name not in types]
    return within(
        Rule("type", f"tensors of {' or '.join(types)}", lambda node: _typed(node, inputs, others), "cast before it"),
        **limits,
    )


def _typed(node: Node, inputs: Sequence[int], types: Sequence[str]) -> Came:
    """The first of some inputs that has one of the types."""
    found = [(node.proto.input[index], node.dtype(index)) for index in inputs if node.has_input(index)]
    return next((f"{kind} ({name!r})" for name, kind in found if kind in types), None)


def same_types(*inputs: int, **limits: Any) -> Rule:
    """Inputs that must have the same type, if they are present."""

    def came(node: Node) -> Came:
        found = list(dict.fromkeys(node.dtype(i) for i in inputs if node.has_input(i)))
        return None if len(found) < 2 else " and ".join(found)

    return within(Rule("same_types", "one type for all inputs", came, "cast them to one type"), **limits)


def no_output(index: int, name: str, **limits: Any) -> Rule:
    """An output that must not be requested."""

    def came(node: Node) -> Came:
        return f"the output {node.proto.output[index]!r}" if node.has_output(index) else None

    todo = f"do without {name} in the model"
    return within(Rule(f"no_{name}", f"no output {name}", came, todo), **limits)


def no_input(index: int, name: str, **limits: Any) -> Rule:
    """An input that must be omitted."""

    def came(node: Node) -> Came:
        return f"{node.proto.input[index]!r}" if node.has_input(index) else None

    return within(Rule(f"no_{name}", f"no input {name}", came, f"do without {name} in the model"), **limits)


def needs_input(index: int, name: str, **limits: Any) -> Rule:
    """An input that must be present, although it is optional in ONNX."""

    def came(node: Node) -> Came:
        return None if node.has_input(index) else f"{len(node.proto.input)} inputs"

    return within(Rule(f"needs_{name}", f"the input {name}", came, f"write {name} out"), **limits)


# Attributes -----------------------------------------------------------------------------------------------------------


def attribute(name: str, default: Any, *allowed: Any, **limits: Any) -> Rule:
    """An attribute that must have one of some values."""

    def came(node: Node) -> Came:
        found = node.attribute(name, default)
        return None if found in allowed else f"{name}={found!r}"

    return within(Rule(name, " or ".join(f"{name}={value!r}" for value in allowed), came), **limits)


def all_ones(name: str, **limits: Any) -> Rule:
    """An attribute whose values must all be 1."""

    def came(node: Node) -> Came:
        found = list(node.attribute(name, ()))
        return None if set(found) <= {1} else f"{name}={found}"

    return within(Rule(name, f"{name} of 1 only", came), **limits)


def without(*names: str, **limits: Any) -> Rule:
    """Attributes that a node must not have."""

    def came(node: Node) -> Came:
        return next((a.name for a in node.proto.attribute if a.name in names), None)

    return within(Rule("attribute", f"no {' or '.join(names)}", came), **limits)


def no_type(name: str, *types: str, **limits: Any) -> Rule:
    """Types that an attribute must not name."""

    def came(node: Node) -> Came:
        found = onnx_name(node.attribute(name, 0))
        return f"{name}={found}" if found in types else None

    return within(Rule(name, f"no {name}={' or '.join(types)}", came), **limits)
