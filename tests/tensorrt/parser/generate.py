"""Writes a C++ header that implements every pure virtual class of TensorRT's NvInferImpl.h (``apiv::V…``).

``python generate.py INCLUDE_DIR > generated.h``. A pair ``setX``, ``getX`` becomes a member; every other method gives
an empty answer and notes itself as missing; ``host.cpp`` overrides some. ``GVThing`` implements ``apiv::VThing`` and
can write its members as JSON. For each public layer ``IThingLayer`` there is an ``HThingLayer``, which owns its core
and its values. The header is generated from the headers at hand when the host is compiled, and not kept.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = ["header"]

_METHOD = re.compile(r"virtual\s+([\w:&*<>\s]+?[\s&*])(\w+)\s*\(([^()]*)\)\s*(const)?\s*(noexcept)?\s*=\s*0\s*;")
_IMPLEMENTATION = re.compile(r"class (V\w+)\s*:\s*public\s+(\w+)\s*\{(.*?)\n\};", re.DOTALL)
_LAYER = re.compile(
    r"class (I\w+Layer)\s*:\s*public\s+(ILayer|ILoopBoundaryLayer|IIfConditionalBoundaryLayer)\s*\{(.*?)\n\};",
    re.DOTALL,
)
_NEEDED = re.compile(r"Layer$|^V(Tensor|Loop|IfConditional|NetworkDefinition|Builder|BuilderConfig)$")
_DEPRECATED = ("PluginLayer", "RNNv2Layer")  # and gone from later headers
_BOUNDARIES = {"ILoopBoundaryLayer": "GVLoopBoundaryLayer", "IIfConditionalBoundaryLayer": "GVConditionalBoundaryLayer"}


@dataclass(frozen=True)
class Method:
    """A pure virtual function; ``args`` are the types of its arguments, which are called a0, a1, …"""

    returns: str
    name: str
    args: tuple[str, ...]
    const: bool
    noexcept: str

    @property
    def key(self) -> str:
        """``X`` of ``setX`` and ``getX``."""
        return self.name[3:]

    @property
    def signature(self) -> str:
        args = ", ".join(f"{type_} a{i}" for i, type_ in enumerate(self.args))
        return f"{self.returns} {self.name}({args}) {'const ' if self.const else ''}{self.noexcept} override"


def _code(path: Path) -> str:
    """A header without comments and macros that say nothing here."""
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(), flags=re.DOTALL)
    return re.sub(r"TRT_DEPRECATED\w*|TRT_NODISCARD", "", text)


def _types(arguments: str) -> Iterator[str]:
    """The types of ``Dims const& x, int32_t``, with or without names and defaults."""
    for argument in arguments.split(","):
        argument = argument.split("=")[0].strip()
        if not argument or argument == "void":
            continue
        named = re.match(r"(.*?[\s&*])(\w+)$", argument)
        type_ = named[1].strip() if named and named[2] != "const" else ""
        yield argument if type_ in ("", "const") else type_


def _methods(body: str) -> list[Method]:
    found = _METHOD.findall(body)
    return [
        Method(returns.strip(), name, tuple(_types(args)), bool(const), noexcept)
        for returns, name, args, const, noexcept in found
    ]


def _stored(type_: str) -> str:
    """The type of a member that keeps values of a type."""
    if re.fullmatch(r"(char const|const char|AsciiChar const)\s*\*", type_.strip()):
        return "std::string"
    return re.sub(r"\bconst\b|&", "", type_).strip()


def _implementation(name: str, methods: list[Method]) -> str:
    """The class ``GV…`` of an ``apiv::V…``."""
    getters = {method.key: method.returns for method in methods if method.name.startswith("get") and not method.args}
    members: list[str] = []
    dumps: list[str] = []
    bodies: list[str] = []
    for method in methods:
        key, returns = method.key, method.returns
        kind = _stored(returns)
        if method.name.startswith("set") and len(method.args) == 1 and key in getters and returns in ("void", "bool"):
            value = "a0"
            if _stored(method.args[0]) == "std::string":
                value = "a0 ? a0 : std::string()"
            elif "*" in method.args[0]:
                value = f"const_cast<{_stored(getters[key])}>(a0)"
            body = f"m{key} = {value}; touch();{' return true;' if returns == 'bool' else ''}"
        elif method.name.startswith("get") and not method.args and "&" in returns and "const" not in returns:
            members.append(f"{kind}* m{key}{{}};")
            body = f"return *m{key};"
        elif method.name.startswith("get") and not method.args:
            members.append(f"{kind} m{key}{{}};")
            body = f"return m{key}{'.c_str()' if kind == 'std::string' else ''};"
            if "*" not in kind and "Stream" not in kind:
                dumps.append(f'writeField(o, "{key}", m{key});')
        elif method.name == "setOperation" and len(method.args) == 2:
            members.append(f"{method.args[1]} mOperation[2]{{}};")
            body = "mOperation[a0] = a1; touch();"
            dumps += [f'writeField(o, "Operation{i}", mOperation[{i}]);' for i in (0, 1)]
        elif method.name == "getOperation" and len(method.args) == 1:
            body = "return mOperation[a0];"
        elif method.name == "setScales" and len(method.args) == 2:
            members.append("std::vector<float> mScales;")
            body = "mScales.assign(a0, a0 + a1); touch();"
            dumps.append('writeField(o, "Scales", mScales);')
        elif method.name == "getScales":
            copied = "if (a0 == (int32_t)mScales.size()) std::copy(mScales.begin(), mScales.end(), a1);"
            body = f"{copied} return (int32_t)mScales.size();"
        elif method.name in ("setAlphaInt64", "setBetaInt64"):
            body = f"m{key} = a0; touch();"
        else:
            rest = "std::abort();" if "&" in returns else "" if returns == "void" else "return {};"
            body = f'missing("{name}::{method.name}"); {"return nullptr;" if rest and "*" in returns else rest}'
        bodies.append(f"{method.signature} {{ {body} }}")
    lines = [*members, *bodies, f"void dump(std::ostream& o) const override {{ {' '.join(dumps)} }}"]
    return "\n".join([f"struct G{name} : apiv::{name}, Values {{", *(f"  {line}" for line in lines), "};"])


def _layer(name: str, base: str, implementation: str) -> str:
    """The class ``H…`` of a public layer."""
    short = name[1:]
    set_up = ["mLayer = &core;", "mImpl = &v;", "core.pub = this;", "core.values = &v;", "v.core = &core;"]
    if base in _BOUNDARIES:
        set_up.insert(2, "mBoundary = &b;")
    set_up.append(f'core.kind = "{short.removesuffix("Layer")}";')
    members = ["Core core;", f"G{implementation} v;", *([f"{_BOUNDARIES[base]} b;"] if base in _BOUNDARIES else [])]
    lines = [*members, f"H{short}() {{", *(f"  {line}" for line in set_up), "}"]
    return "\n".join([f"struct H{short} : {name} {{", *(f"  {line}" for line in lines), "};"])


def header(folder: Path) -> str:
    """The text of generated.h for the headers in a folder."""
    parts = ["// Written by generate.py."]
    for name, base, body in _IMPLEMENTATION.findall(_code(folder / "NvInferImpl.h")):
        if base == "VRoot" and _NEEDED.search(name) and name[1:] not in _DEPRECATED:
            parts.append(_implementation(name, _methods(body)))
    for name, base, body in _LAYER.findall(_code(folder / "NvInfer.h")):
        implementation = re.search(r"apiv::(V\w+)\*\s*mImpl;", body)
        if implementation and name[1:] not in _DEPRECATED:
            parts.append(_layer(name, base, implementation[1]))
    return "\n".join([*parts, ""])


if __name__ == "__main__":
    print(header(Path(sys.argv[1])), end="")
