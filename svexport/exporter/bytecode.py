"""Reads which names a function's bytecode loads, and makes copies of code that load other names."""

from __future__ import annotations

import dis
import itertools
import opcode
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FunctionType, ModuleType
from typing import Any

__all__ = ["Use", "attribute_of", "codes", "inject", "loads", "rewritten", "uses"]

from svexport.exporter.functions import FUNCTIONS

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_SWAP = opcode.opmap.get("SWAP")  # from Python 3.11 on
_METHODS = {name.rpartition(".")[2]: name for name in FUNCTIONS if name.startswith("torch.Tensor.")}


# ------------------------------------------------------------------ what a function refers to


@dataclass(frozen=True, eq=False)
class Use:
    """An instruction of a function that loads a value by a global name and attributes, or a method (from Python 3.11).

    Attributes:
        code: of the function, or one nested in it.
        offset: of the instruction that loads the global, or the method.
        names: global and attributes; of a method its name alone.
        value: what they are now; of a method the name in :data:`FUNCTIONS`.
        line: where it is written.
    """

    code: CodeType
    offset: int
    names: tuple[str, ...]
    value: Any
    line: int
    method: bool = False


def codes(code: CodeType) -> Iterator[CodeType]:
    """A code object, and those of the functions, lambdas and comprehensions inside it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes(constant)


def loads(code: CodeType) -> Iterator[tuple[list[dis.Instruction], int]]:
    """Runs of instructions that load a variable, or attributes of what was there before, and attributes; their line."""
    run: list[dis.Instruction] = []
    line = first = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = getattr(instruction, "positions", None)
        line = (positions.lineno if positions else instruction.starts_line) or line
        if instruction.opname in ("EXTENDED_ARG", "CACHE"):
            continue
        if run and instruction.opname in _ATTRIBUTES:
            run.append(instruction)
            continue
        if run:
            yield run, first
        # Whatever a method is called on, the run is that of its name.
        run, first = ([instruction], line) if instruction.opname.startswith("LOAD_") else ([], line)
    if run:
        yield run, first


def attribute_of(value: Any, name: str) -> Any:
    """The attribute of a module or class, without running descriptors; None if it has none."""
    try:
        return getattr(value, name)
    except Exception:  # noqa: BLE001 - packages that import what is asked of them may not find it
        return None


def _is_method(instruction: dis.Instruction) -> bool:
    """Whether it loads what is called next, with the object it was found on as first argument."""
    if instruction.opname == "LOAD_METHOD":
        return True
    return instruction.opname == "LOAD_ATTR" and sys.version_info >= (3, 12) and bool((instruction.arg or 0) & 1)


def uses(function: FunctionType) -> Iterator[Use]:
    """Every load of a global with its attributes, and of a method of tensors that svexport has a faster form of."""
    names = function.__globals__
    for code in codes(function.__code__):
        for run, line in loads(code):
            root, *attributes = run
            known = root.opname == "LOAD_GLOBAL" and root.argval in names
            value = names[root.argval] if known else None
            chain = [root.argval]
            if known:
                yield Use(code, root.offset, tuple(chain), value, line)
            for instruction in run if root.opname in _ATTRIBUTES else attributes:
                # Of modules and classes, whose attributes are not computed; what an object holds is its own.
                known = known and isinstance(value, (ModuleType, type))
                value = attribute_of(value, instruction.argval) if known else None
                known = known and value is not None
                if known:
                    chain.append(instruction.argval)
                    yield Use(code, root.offset, tuple(chain), value, line)
                elif _SWAP is not None and _is_method(instruction) and instruction.argval in _METHODS:
                    name = _METHODS[instruction.argval]
                    yield Use(code, instruction.offset, (instruction.argval,), name, line, method=True)


# ------------------------------------------------------------------ changed code


def _width(code: bytes | bytearray, offset: int) -> int:
    """Bytes of an instruction with its caches."""
    entries: Any = getattr(opcode, "_inline_cache_entries", None)
    if entries is None:
        return 2
    name = opcode.opname[code[offset]]
    count = entries.get(name, 0) if isinstance(entries, dict) else entries[code[offset]]
    return 2 + 2 * count


def _prefixes(code: bytes | bytearray, offset: int) -> int:
    """The number of EXTENDED_ARG before an instruction."""
    count = 0
    while offset >= 2 * (count + 1) and code[offset - 2 * (count + 1)] == opcode.EXTENDED_ARG:
        count += 1
    return count


def rewritten(code: CodeType, changes: dict[CodeType, list[tuple[Use, str]]]) -> CodeType | None:
    """``code`` with other names loaded, in functions inside it too; None where one does not fit in its instruction."""
    instructions, names = bytearray(code.co_code), list(code.co_names)
    for use, name in changes.get(code, ()):
        if name not in names:
            names.append(name)
        index, offset = names.index(name), use.offset
        flag = sys.version_info >= (3, 11)  # the lowest bit: whether NULL is pushed too
        argument = index << 1 | (0 if use.method else instructions[offset + 1] & 1) if flag else index
        prefixes = _prefixes(instructions, offset)
        if not use.method:
            for at in range(prefixes + 1):
                instructions[offset - 2 * at + 1] = argument & 0xFF
                argument >>= 8
            if argument:
                return None
            continue
        # Under the object that the method was found on, where the function that gets it as an argument belongs.
        high = argument >> 8
        load = bytes([opcode.opmap["LOAD_GLOBAL"], argument & 0xFF])
        load += bytes(_width(load, 0) - 2)
        load = (bytes([opcode.EXTENDED_ARG, high]) if high else b"") + load
        load += bytes([_SWAP or 0, 2])
        width = _width(instructions, offset)
        if high > 0xFF or len(load) > width:
            return None
        nop = bytes([opcode.opmap["NOP"], 0])
        instructions[offset - 2 * prefixes : offset] = nop * prefixes
        instructions[offset : offset + width] = load + nop * ((width - len(load)) // 2)
    constants = []
    for constant in code.co_consts:
        inner = rewritten(constant, changes) if isinstance(constant, CodeType) else constant
        if isinstance(constant, CodeType) and inner is None:
            return None
        constants.append(inner)
    return code.replace(co_code=bytes(instructions), co_names=tuple(names), co_consts=tuple(constants))


_injected: dict[tuple[int, tuple[str, ...], int], tuple[str, Any]] = {}
_numbers = itertools.count()


def inject(names: dict[str, Any], chain: tuple[str, ...], value: Any) -> str:
    """Adds ``value`` to the globals of a module under a new name; a value that was added before keeps its name."""
    known = id(names), chain, id(value)
    if known not in _injected or _injected[known][0] not in names:
        name = next(n for i in _numbers if (n := f"_svexport_{i}_{chain[-1]}") not in names)
        names[name] = _namespace(chain[1:], value)
        _injected[known] = name, value  # which also keeps the value, and so its id
    return _injected[known][0]


def _namespace(attributes: tuple[str, ...], value: Any) -> Any:
    """Something with nothing but that attribute, of which there may be attributes in turn; without any, the value."""
    for attribute in reversed(attributes):
        space = ModuleType("svexport.bound")  # which torch.compile reads as it reads F
        vars(space)[attribute] = value
        value = space
    return value
