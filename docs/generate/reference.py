"""The reference: signatures and docstrings of what ``svexport`` exports, and of the command line."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from typing import Any

__all__ = ["entry", "navigation", "pages"]

MODULES = {
    "svexport": "What `import svexport` has. [Ops](../ops/index.md) have pages of their own.",
    "svexport.tensorrt": "Plugins, and what each TensorRT version parses.",
    "svexport.ops": "Modules, which take the place of torch's and others' with the same state_dict.",
}
_ROLE = re.compile(r":(?:func|class|meth|data|mod|attr):`~?(?P<name>[\w.]+)`")
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Shape|Yields):$")


def navigation() -> list[dict[str, str]]:
    return [{name: f"reference/{name}.md"} for name in MODULES] + [{"Command line": "reference/cli.md"}]


def pages() -> dict[str, str]:
    """Place on the site -> text."""
    made = {f"reference/{name}.md": _module(name, about) for name, about in MODULES.items()}
    return {**made, "reference/cli.md": _command_line()}


def _module(name: str, about: str) -> str:
    return "\n\n".join([f"# {name}", about, *(entry(f"{name}.{member}", value) for member, value in _members(name))])


def _members(name: str) -> Iterator[tuple[str, Any]]:
    module = import_module(name)
    for member in module.__all__:
        value = getattr(module, member)
        if isinstance(value, type) or (callable(value) and name != "svexport.ops"):
            yield member, value


@cache
def _places() -> dict[str, str]:
    """Where each name is explained, from the folder of a page: ``../reference/svexport.md#svexport.export``."""
    places = {}
    for module in MODULES:
        for member, value in _members(module):
            places[f"{module}.{member}"] = f"../reference/{module}.md#{module}.{member}"
            if isinstance(value, type):
                for method, _ in _methods(value):
                    places[f"{module}.{member}.{method}"] = f"../reference/{module}.md#{module}.{member}.{method}"
    from docs.generate.ops import functions

    for op, names in functions().items():
        places |= {f"svexport.ops.{name}": f"../ops/{op}.md#svexport.ops.{name}" for name in names}
    return places


def entry(name: str, value: Any, level: int = 2) -> str:
    """A function or class as Markdown: heading, signature, docstring, and the public methods of a class."""
    own = inspect.getdoc(value) if not isinstance(value, type) else (value.__dict__.get("__doc__") or "")
    pieces = [f"{'#' * level} {name.rpartition('.')[2]} {{ #{name} }}", _signature(name, value)]
    pieces.append(_markdown(inspect.cleandoc(own or ""), name))
    if isinstance(value, type):
        pieces += [entry(f"{name}.{method}", member, level + 1) for method, member in _methods(value)]
    return "\n\n".join(filter(None, pieces))


def _methods(value: type) -> list[tuple[str, Any]]:
    """Public methods and properties with docstrings that are svexport's own; ``forward`` is what the class says."""
    found = []
    for method in dir(value):
        member = inspect.getattr_static(value, method)
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        own = callable(function) and str(getattr(function, "__module__", "")).startswith("svexport")
        if own and not method.startswith("_") and function.__doc__ and not isinstance(function, type):
            found.append((method, member))
    return found


def _signature(name: str, value: Any) -> str:
    if isinstance(value, property):
        return "*property*"
    if isinstance(value, type) and issubclass(value, BaseException):
        return f"```python\nclass {name}({value.__bases__[0].__name__})\n```"
    try:
        signature = inspect.signature(getattr(value, "__func__", value))
    except (TypeError, ValueError):
        return ""
    shown = [p for p in signature.parameters.values() if p.name not in ("self", "cls")]
    parameters = [_parameter(p) for p in shown]
    kinds = [p.kind for p in shown]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        parameters.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    back = signature.return_annotation
    back = "" if isinstance(value, type) or back in (signature.empty, "None", None) else f" -> {back}"
    line = f"{name}({', '.join(parameters)}){back}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {parameter},\n" for parameter in parameters) + f"){back}"
    return f"```python\n{line}\n```"


def _parameter(parameter: inspect.Parameter) -> str:
    """As it stands in the source; of a default that has no short form, its name or three dots."""
    stars = {parameter.VAR_POSITIONAL: "*", parameter.VAR_KEYWORD: "**"}.get(parameter.kind, "")
    kind = "" if parameter.annotation is parameter.empty else f": {parameter.annotation}"
    if parameter.default is parameter.empty:
        return f"{stars}{parameter.name}{kind}"
    default = getattr(parameter.default, "__name__", repr(parameter.default))
    return f"{stars}{parameter.name}{kind}{' = ' if kind else '='}{'...' if default.startswith('<') else default}"


def _markdown(docstring: str, name: str) -> str:
    """Google's form of docstrings as Markdown: sections become lists, roles become links."""
    lines, pieces = docstring.splitlines(), []
    at = 0
    while at < len(lines):
        heading = _SECTION.match(lines[at])
        end = at + 1
        while end < len(lines) and (
            not _SECTION.match(lines[end]) if heading is None else not lines[end].strip() or lines[end].startswith(" ")
        ):
            end += 1
        text = textwrap.dedent("\n".join(lines[at + (heading is not None) : end])).strip("\n")
        if heading is None:
            pieces.append(_code(text.replace("``", "`")))
        else:
            pieces.append(f"**{heading[1]}**\n\n{_items(text)}")
        at = end
    return _ROLE.sub(lambda match: _linked(match["name"], name), "\n\n".join(pieces))


def _items(text: str) -> str:
    """``name: what it is``, continued on indented lines, as a list."""
    text = text.replace("``", "`")
    if re.match(r"(- )?[\w*]+(, [\w*]+)*: ", text) is None:
        return text
    found = re.split(r"\n(?=\S)", text)
    return "\n".join(
        re.sub(r"^(?:- )?([\w*]+(?:, [\w*]+)*): ", r"- `\1`: ", " ".join(map(str.strip, item.splitlines())))
        for item in found
    )


def _code(text: str) -> str:
    """Indented examples and ``>>>`` are code."""
    pieces = re.split(r"\n\n", text)
    for index, piece in enumerate(pieces):
        if piece.startswith((">>>", "    ")):
            pieces[index] = f"```text\n{textwrap.dedent(piece)}\n```"
    return "\n\n".join(pieces)


def _linked(name: str, here: str) -> str:
    scopes = [here.rpartition(".")[0], here, "svexport", "svexport.ops"]
    for candidate in (name, *(f"{scope}.{name}" for scope in scopes)):
        if candidate in _places():
            return f"[`{name}`]({_places()[candidate]})"
    return f"`{name}`"


def _command_line() -> str:
    """``--help`` of every command."""
    from svexport.cli import parser

    pieces = ["# Command line", "Every command takes `--json` and `--verbose`; the exit code is 0 only on success."]
    commands: Callable[[], Any] = parser
    for name, command in next(a for a in commands()._actions if a.dest == "command").choices.items():
        help_ = command.format_help()
        pieces.append(f"## svexport {name} {{ #{name} }}\n\n```text\n{help_.strip()}\n```")
    return "\n\n".join(pieces) + "\n"
