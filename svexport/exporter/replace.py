"""``svexport.replace``: a copy of a model in which known modules and functions are svexport ops."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from html import escape
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport import html, ops
from svexport.errors import UnsupportedError
from svexport.exporter.arguments import bind, copied, example_arguments, leaves, rebuild
from svexport.exporter.as_in_files import AsInFiles
from svexport.exporter.record import recorded, remember
from svexport.exporter.source import definition, user_frame
from svexport.ops._module import DropIn
from svexport.parity import parity, tolerances

__all__ = ["FUNCTIONS", "LeftAlone", "Replacement", "replace"]

FUNCTIONS: dict[str, tuple[Callable[..., Any], Callable[..., Tensor]]] = {
    "torch.einsum": (torch.einsum, ops.einsum),
    "torch.nn.functional.grid_sample": (F.grid_sample, ops.grid_sample),
    "torch.linalg.inv": (torch.linalg.inv, ops.inverse),
    "torch.inverse": (torch.inverse, ops.inverse),
    "torch.Tensor.inverse": (torch.Tensor.inverse, ops.inverse),
    "torch.linalg.solve": (torch.linalg.solve, ops.solve),
}
"""The functions that are replaced, by name: torch's, and the op."""

_KEYWORDS = {op: frozenset(inspect.signature(op).parameters) for _, op in FUNCTIONS.values()}


@dataclass(frozen=True)
class Replacement:
    """A module or a call that is an svexport op in the copy.

    Attributes:
        name: of the module in the model; ``"forward"`` for calls.
        before: the class or function it was, ``torch.nn.modules.normalization.LayerNorm``.
        after: what it is now, ``svexport.ops.LayerNorm``.
        source: the line that defines the class, or the line of the call.
        calls: how often the forward came by.
        max_abs: the largest absolute difference of the two on the model's own activations; NaN where not proven.
        proof: the same in words: ``"max error 1.2e-07"``, or why there is none.
    """

    name: str
    before: str
    after: str
    source: str
    calls: int
    max_abs: float
    proof: str


@dataclass(frozen=True)
class LeftAlone:
    """A module or a call that looked replaceable and was not.

    Attributes:
        name: of the module in the model; ``"forward"`` for calls.
        kind: its class, or the function.
        source: the line that defines the class, or the line of the call.
        reason: what was expected, and what came.
    """

    name: str
    kind: str
    source: str
    reason: str


def replace(model: nn.Module, args: Any = None, *, verbose: bool = True) -> nn.Module:
    """A copy of a model in which modules and functions with a counterpart in ``svexport.ops`` are those ops.

    The copy has the model's state_dict keys, trains like it and exports to the same nodes. Modules are recognised by
    class name, attributes and the signature of ``forward``; :data:`FUNCTIONS` wherever the model's forward calls them,
    also in other packages, but not in scripted code. With arguments, every replacement is proven: what it replaces and
    what it is are both run on the activations of a forward pass in eval mode. What differs is left alone.
    ``F.grid_sample`` in half precision on a CPU is compared as torch computes it on CUDA, with coordinates in float32.

    Args:
        model: any ``nn.Module``; it stays as it is.
        args: as for :func:`svexport.export`, with the same defaults. Without any, nothing is proven, and functions are
            replaced whether or not the model calls them.
        verbose: print a report.

    Returns:
        The copy, with ``svexport_replacements``, a list of :class:`Replacement`, and ``svexport_left_alone``, a list of
        :class:`LeftAlone`.

    Raises:
        UnsupportedError: if ``model`` is no module, or one that cannot be copied.
        ExportError: if the arguments do not fit ``forward``.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"expected a torch.nn.Module, got {type(model).__name__}; wrap functions in a module")
    arguments = example_arguments(model, args)
    classes, left_alone = _recognise(model)
    modules: dict[str, _Proof] = {name: _Proof() for name in classes}
    calls: dict[tuple[str, str], _Proof] = {}
    outputs, as_files = _Proof(), AsInFiles()
    if arguments is not None:
        probe = copied(model)
        _watch(probe, classes, modules)
        expected = _forward(probe, arguments, as_files)
        classes = {name: cls for name, cls in classes.items() if not modules[name].fault}
        probe = _swap(copied(model), classes)
        outputs.add(expected, functools.partial(_forward, probe, arguments, as_files, _Watch(calls)))
        del probe, expected
        if outputs.fault:  # though every part agrees: rounding decides something here, or the model keeps a state
            warnings.warn(f"{type(model).__name__} as a whole, every part of it proven: {outputs.fault}", stacklevel=2)

    def proven(proof: _Proof) -> tuple[int, float, str]:
        error = max(proof.errors, default=math.nan)
        unproven = "not proven: no inputs" if arguments is None else "not proven: not reached"
        return len(proof.errors), error, f"max error {error:.1e}" if proof.errors else unproven

    replacements = []
    for name, proof in modules.items():
        kind = type(model.get_submodule(name))
        if proof.fault:
            left_alone.append(LeftAlone(name, _qualified(kind), definition(kind), proof.fault))
        else:
            after = f"svexport.ops.{classes[name].__name__}"
            replacements.append(Replacement(name, _qualified(kind), after, definition(kind), *proven(proof)))
    faulty = {function for (function, _), proof in calls.items() if proof.fault}
    functions = [f for f in FUNCTIONS if arguments is None or f in {function for function, _ in calls} - faulty]
    for (function, source), proof in calls.items():
        if function in functions:
            replacements.append(Replacement("forward", function, _op_name(function), source, *proven(proof)))
        else:
            reason = proof.fault or f"{function} stays as it is everywhere, because of another call"
            left_alone.append(LeftAlone("forward", function, source, reason))

    replaced = _swap(copied(model), classes)
    if functions and not isinstance(replaced, (_Replaced, torch.jit.ScriptModule)):
        if arguments is None:
            ours = ", ".join(dict.fromkeys(map(_op_name, FUNCTIONS)))
            everywhere = "wherever it calls them"
            replacements.append(Replacement("forward", ", ".join(FUNCTIONS), ours, everywhere, *proven(_Proof())))
        replaced.__class__ = _with_functions(type(replaced))  # type: ignore[arg-type]
        replaced._svexport_functions = tuple(functions)  # type: ignore[assignment]
    replaced.svexport_replacements = replacements  # type: ignore[assignment]
    replaced.svexport_left_alone = left_alone  # type: ignore[assignment]
    if last := recorded(model):
        remember(replaced, *last)
    if verbose:
        _print(type(model).__name__, replacements, left_alone, outputs, as_files.notes)
    return replaced


# ------------------------------------------------------------------ modules


def _recognise(model: nn.Module) -> tuple[dict[str, type[DropIn]], list[LeftAlone]]:
    """The drop-in of every module that has one, by name; and what has only the class name of such a module."""
    known = [cls for cls in vars(ops).values() if isinstance(cls, type) and issubclass(cls, DropIn) and cls.replaces]
    found: dict[str, type[DropIn]] = {}
    left_alone = []
    # What a decoder holds are the parameters of one op, in modules that are never called.
    decoders = [name for name, module in model.named_modules() if isinstance(module, ops.TransformerDecoder)]
    held = tuple(f"{name}." if name else "" for name in decoders)
    for name, module in model.named_modules():
        kind = type(module)
        namesakes = [c for c in known if kind.__name__ in {other.rpartition(".")[2] for other in c.replaces}]
        if isinstance(module, DropIn) or not namesakes or name.startswith(held):
            continue
        misfits = {cls: cls.misfit(module) for cls in namesakes}
        fitting = [cls for cls, misfit in misfits.items() if not misfit]
        if fitting:
            found[name] = fitting[0]
        else:
            reason = "; ".join(f"svexport.ops.{cls.__name__} {misfit}" for cls, misfit in misfits.items())
            left_alone.append(LeftAlone(name, _qualified(kind), definition(kind), reason))
    return found, left_alone


def _swap(model: nn.Module, classes: Mapping[str, type[DropIn]]) -> nn.Module:
    """``model`` with its modules of those names replaced, wherever they are registered."""
    new: dict[nn.Module, Any] = {}
    for name, cls in classes.items():
        old = model.get_submodule(name)
        new[old] = cls.from_module(old)
    for parent in [*model.modules(), *new.values()]:
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)


def _watch(model: nn.Module, classes: Mapping[str, type[DropIn]], proofs: Mapping[str, _Proof]) -> None:
    """Has every module of those names compared with its replacement whenever it is called."""
    comparing: list[str] = []  # a replacement calls submodules, which are not to be compared again

    def watch(name: str, ours: Any) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
            if not comparing:
                comparing.append(name)
                proofs[name].add(output, lambda: ours.forward(*args, **kwargs))
                comparing.pop()

        return hook

    ours = {name: cls.from_module(model.get_submodule(name)) for name, cls in classes.items()}
    for name, module in ours.items():  # first: another hook may change the output
        model.get_submodule(name).register_forward_hook(watch(name, module), prepend=True, with_kwargs=True)


# ------------------------------------------------------------------ functions


class _Functions(TorchFunctionMode):
    """Calls our ops in the place of torch's functions; monkeypatching misses ``from torch import einsum``."""

    def __init__(self, names: Iterable[str]) -> None:
        super().__init__()
        self.names = {FUNCTIONS[name][0]: name for name in names}

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = self.names.get(func)
        if name is None or not kwargs.keys() <= _KEYWORDS[FUNCTIONS[name][1]]:  # out=, say
            return func(*args, **kwargs)
        return self.call(name, args, kwargs)

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        return FUNCTIONS[name][1](*args, **kwargs)


class _Watch(_Functions):
    """Compares every call with our op's."""

    def __init__(self, proofs: dict[tuple[str, str], _Proof]) -> None:
        super().__init__(FUNCTIONS)
        self.proofs = proofs

    def call(self, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        theirs, ours = FUNCTIONS[name]
        proof = self.proofs.setdefault((name, user_frame("".join(traceback.format_stack()))), _Proof())
        return proof.add(theirs(*args, **kwargs), lambda: ours(*args, **kwargs))


class _Replaced:
    """Mixin of the class of a copy whose forward runs under :class:`_Functions`."""

    _svexport_functions: tuple[str, ...]

    def __reduce_ex__(self, protocol: Any) -> Any:
        """By the class it was made from: the copy's own is no attribute of a module, where pickle could find it."""
        _, _, *state = cast(tuple, super().__reduce_ex__(protocol))
        return _new, (type(self).__mro__[2],), *state


@functools.cache
def _with_functions(base: type[nn.Module]) -> type[nn.Module]:
    @functools.wraps(base.forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _Functions(self._svexport_functions):
            return base.forward(self, *args, **kwargs)

    names = {
        "forward": forward,
        "__module__": base.__module__,
        "__qualname__": base.__qualname__,
        "__doc__": base.__doc__,
    }
    return type(base.__name__, (_Replaced, base), names)


def _new(base: type[nn.Module]) -> nn.Module:
    cls = _with_functions(base)  # type: ignore[arg-type]
    return cls.__new__(cls)


# ------------------------------------------------------------------ proof


@dataclass
class _Proof:
    """What the comparisons of one replacement came to."""

    errors: list[float] = field(default_factory=list)
    fault: str = ""

    def add(self, expected: Any, ours: Callable[[], Any]) -> Any:
        """Compares with what ``ours`` computes; returns that, or ``expected`` where it is not to be used."""
        try:
            actual = ours()
        except Exception as error:  # noqa: BLE001 - whatever our op does not take is left to torch
            self.fault = f"svexport's raised {type(error).__name__}: {error}"
            return expected
        theirs, found = (dict(leaves(value)) for value in (expected, actual))
        pairs = [(t, found.get(path)) for path, t in theirs.items() if isinstance(t, Tensor)]
        if theirs.keys() != found.keys() or not all(isinstance(t, Tensor) for _, t in pairs):
            self.fault = "svexport's returned another structure"
            return expected
        results = []
        for e, a in pairs:
            rtol, atol = tolerances(None, None, {e.dtype})
            results.append(parity("", e, a, rtol=rtol, atol=atol))  # type: ignore[arg-type]
        self.errors.append(max((p.max_abs for p in results), default=0.0))
        if not all(p.ok for p in results):
            self.fault = f"svexport's differs by {self.errors[-1]:.1e} on the given inputs"
        return expected if self.fault else actual


def _forward(model: nn.Module, arguments: tuple[Any, dict[str, Any]], *contexts: AbstractContextManager) -> Any:
    for module in model.modules():
        module.training = False
    bound = bind(model, *arguments)
    fresh = rebuild(dict(bound.arguments), lambda t: t.detach().clone())
    call = inspect.BoundArguments(bound.signature, fresh)  # type: ignore[arg-type]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        return model(*call.args, **call.kwargs)


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _op_name(function: str) -> str:
    return f"svexport.ops.{FUNCTIONS[function][1].__name__}"


# ------------------------------------------------------------------ report


def _print(
    model: str,
    replacements: list[Replacement],
    left_alone: list[LeftAlone],
    outputs: _Proof,
    notes: Sequence[str],
) -> None:
    """Tables, in a notebook as HTML."""
    from rich.console import Console
    from rich.text import Text

    tables: list[tuple[str, Sequence[str], list[tuple[str, ...]]]] = []
    if replacements:
        # A class stands once in the table, with its modules; a call stands for itself.
        groups: dict[tuple[str, str, str], list[Replacement]] = {}
        for r in replacements:
            groups.setdefault((r.before, r.after, r.source), []).append(r)
        rows: list[tuple[str, ...]] = []
        for (before, after, source), group in groups.items():
            worst = min(group, key=lambda r: (r.calls > 0, -r.max_abs))
            calls = str(sum(r.calls for r in group) or "")
            rows.append((_names([r.name for r in group]), before, after, _short(source), calls, worst.proof))
        tables.append((f"{model}: replaced", ("", "was", "is", "source", "calls", "proof"), rows))
    if left_alone:
        rows = [(a.name, a.kind, _short(a.source), a.reason) for a in left_alone]
        tables.append((f"{model}: left alone", ("", "is", "source", "because"), rows))
    line = "" if replacements else f"{model}: nothing to replace"
    if replacements and (outputs.errors or outputs.fault):
        verdict = outputs.fault or f"max error {outputs.errors[0]:.1e}"
        line = f"{model}, outputs as a whole: {verdict}"
    console = Console(width=None if sys.stdout.isatty() else 160)
    if console.is_jupyter:
        from IPython.display import HTML, display

        body = [html.section(title, html.table(columns, rows)) for title, columns, rows in tables]
        verdict = f'<p class="{"fail" if outputs.fault else "ok"}">{escape(line)}</p>' if line else ""
        display(HTML(html.fragment(*body, verdict, *(f"<p>{escape(note)}</p>" for note in notes))))
        return
    for title, columns, rows in tables:
        _table(console, title, columns, rows)
    if line:
        console.print(Text(line, "red" if outputs.fault else ""))
    for note in notes:
        console.print(Text(note))


def _table(console: Any, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    console.print(table)


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:2]) + (f" and {len(names) - 2} more" if len(names) > 2 else "")


def _short(text: str) -> str:
    """A call without its code, a library's file without its folders."""
    return text.partition(": ")[0].rpartition("site-packages/")[2]
