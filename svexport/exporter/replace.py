"""``svexport.replace``: a copy of a model in which known modules and functions are svexport ops."""

from __future__ import annotations

import functools
import inspect
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from html import escape
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport import html, ops
from svexport.errors import UnsupportedError
from svexport.exporter.arguments import bind, copied, example_arguments, leaves, rebuild
from svexport.exporter.as_in_files import AsInFiles
from svexport.exporter.functions import FUNCTIONS, NAMES, WHOLES, parameters, unfit, whole
from svexport.exporter.rebind import Key, Plan, bind_functions, binder, key_of, objects, unnamed
from svexport.exporter.record import recorded, remember
from svexport.exporter.source import definition, shown_line, user_line
from svexport.ops._module import DropIn
from svexport.parity import parity, tolerances

__all__ = ["LeftAlone", "Replacement", "replace"]


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


def replace(
    model: nn.Module,
    args: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    verbose: bool = True,
) -> nn.Module:
    """A copy of a model in which modules and functions with a counterpart in ``svexport.ops`` are those ops.

    The copy has the model's state_dict keys, trains like it and exports to the same nodes. Modules are recognised by
    class name, attributes and the signature of ``forward``. Functions are torch's (:data:`FUNCTIONS`), and whole ones
    of other packages by name and parameters (:data:`WHOLES`): those that the model's forward reaches are copied, also
    in other packages, with the names they look up bound to the ops: a call costs no more than that of the op. The
    model, scripted code and the packages stay as they are, but for private names beside their own.

    With arguments, every replacement is proven: what it replaces and what it is are both run on the activations of a
    forward pass in eval mode, whole functions with their gradients. What differs is left alone, and so is what is
    reached by no name that can be bound: through C code, a container, code executed from text, and before Python 3.11
    a method of tensors.
    ``F.grid_sample`` in half precision on a CPU is compared as torch computes it on CUDA, with coordinates in float32.

    Args:
        model: any ``nn.Module``; it stays as it is.
        args: as for :func:`svexport.export`, with the same defaults. Without any, nothing is proven, and functions are
            replaced whether or not the model calls them.
        only: names of what to replace: of modules in the model (``"decoder"``: it and those it holds, not the functions
            that they call), of classes and functions as the report has them or by their last part
            (``"torch.einsum"``, ``"LayerNorm"``), or of ops. None: everything.
        skip: likewise of what to leave as it is.
        verbose: print a report.

    Returns:
        The copy, with ``svexport_replacements``, a list of :class:`Replacement`, and ``svexport_left_alone``, a list of
        :class:`LeftAlone`. It can be pickled where the model can, and be copied, compiled and wrapped like it. What
        ``torch.jit.script`` compiles is the model's text, with torch's functions.

    Raises:
        UnsupportedError: if ``model`` is no module, or one that cannot be copied; or ``only`` or ``skip`` names what
            there is not.
        ExportError: if the arguments do not fit ``forward``.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"expected a torch.nn.Module, got {type(model).__name__}; wrap functions in a module")
    arguments = example_arguments(model, args)
    classes, left_alone = _recognise(model)
    chosen = _Choice(only, skip)
    classes = {
        name: cls for name, cls in classes.items() if chosen(_labels(name, type(model.get_submodule(name)), cls))
    }
    skipped = {
        name for name, function in FUNCTIONS.items() if not chosen({*_parts(name), *_parts(_op_name(function.op))})
    }
    skipped |= {name for name, known in WHOLES.items() if not chosen({name, *_parts(_op_name(known[0][1]))})}
    chosen.check(model)

    modules: dict[str, _Proof] = {name: _Proof() for name in classes}
    watch, wholes = _Watch(skipped), _Wholes(skipped)
    remaining, entered = _Remaining(skipped), _Wholes(skipped, compare=False)
    outputs, as_files = _Proof(), AsInFiles()
    plan = Plan(skipped=frozenset(skipped))
    if arguments is not None:
        probe = copied(model)
        _watch(probe, classes, modules)
        expected = _forward(probe, arguments, as_files)
        classes = {name: cls for name, cls in classes.items() if not modules[name].fault}
        _forward(_swap(copied(model), classes), arguments, as_files, watch, wholes)
        plan = _plan(watch, wholes, plan.skipped)
        del probe

    replaced = _swap(copied(model), classes)
    copies = bind_functions(replaced, plan, {id(value) for value in objects(model)})
    if arguments is not None:
        copy = copied(replaced)
        outputs.add(expected, functools.partial(_forward, copy, arguments, as_files, remaining, entered))
        if outputs.fault:  # though every part agrees: rounding decides something here, or the model keeps a state
            warnings.warn(f"{type(model).__name__} as a whole, every part of it proven: {outputs.fault}", stacklevel=2)
        del expected, copy

    replacements = []
    for name, proof in modules.items():
        kind = type(model.get_submodule(name))
        if proof.fault:
            left_alone.append(LeftAlone(name, _qualified(kind), definition(kind), proof.fault))
        else:
            after, proven = _op_name(classes[name].__name__), proof.words(arguments is not None)
            replacements.append(Replacement(name, _qualified(kind), after, definition(kind), *proven))
    if arguments is None:
        for name, source in binder(plan).notes(copies):
            function = FUNCTIONS.get(name)
            op = function.op if function else WHOLES[name.rpartition(".")[2]][0][1]
            replacements.append(Replacement("forward", name, _op_name(op), source, *_Proof().words(False)))
    else:
        more, not_bound = _told(watch, wholes, remaining, entered.entered, plan)
        replacements += more
        left_alone += not_bound
    replaced.svexport_replacements = replacements  # type: ignore[assignment]
    replaced.svexport_left_alone = left_alone  # type: ignore[assignment]
    if last := recorded(model):
        remember(replaced, *last)
    if verbose:
        _print(type(model).__name__, replacements, left_alone, outputs, as_files.notes)
    return replaced


class _Choice:
    """What ``only`` and ``skip`` leave to be replaced."""

    def __init__(self, only: str | Iterable[str] | None, skip: str | Iterable[str]) -> None:
        self.only = None if only is None else {only} if isinstance(only, str) else set(only)
        self.skip = {skip} if isinstance(skip, str) else set(skip)
        self.labels: set[str] = set()

    def __call__(self, labels: set[str]) -> bool:
        self.labels |= labels
        return (self.only is None or not labels.isdisjoint(self.only)) and labels.isdisjoint(self.skip)

    def check(self, model: nn.Module) -> None:
        """Raises UnsupportedError if there is a name that nothing has."""
        modules = {name for name, _ in model.named_modules()}
        if unknown := {*(self.only or ()), *self.skip} - self.labels - modules:
            raise UnsupportedError(
                f"only and skip expect names of modules of {type(model).__name__}, or among "
                f"{', '.join(sorted(self.labels - modules))}; got {', '.join(sorted(map(repr, unknown)))}"
            )


def _labels(name: str, kind: type, cls: type) -> set[str]:
    """The names that a module goes by, and those of the modules that hold it."""
    path = name.split(".")
    holders = {".".join(path[: i + 1]) for i in range(len(path))}
    return {*holders, *_parts(_qualified(kind)), *_parts(_op_name(cls.__name__))}


def _parts(name: str) -> tuple[str, str]:
    return name, name.rpartition(".")[2]


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


class _Calls(TorchFunctionMode):
    """Sees the calls of torch's functions that have an op; monkeypatching misses ``from torch import einsum``."""

    def __init__(self, skipped: Set[str]) -> None:
        super().__init__()
        self.skipped = skipped

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = NAMES.get(func)
        seen = name is not None and name not in self.skipped and kwargs.get("out") is None
        frame = _caller(func) if seen else None
        if frame is None:
            return func(*args, **kwargs)
        return self.call(name, frame, args, kwargs)  # type: ignore[arg-type]

    def call(self, name: str, frame: FrameType, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


class _Watch(_Calls):
    """Compares every call with our op's."""

    def __init__(self, skipped: Set[str]) -> None:
        super().__init__(skipped)
        self.calls: dict[tuple[str, Key, str, frozenset[Key]], _Proof] = {}
        """By function, who calls it, where, and those who call that one in turn."""

    def call(self, name: str, frame: FrameType, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        chain = _chain(frame)
        proof = self.calls.setdefault((name, chain[0], _line(frame), frozenset(chain)), _Proof())
        function = FUNCTIONS[name]
        return proof.add(function.theirs(*args, **kwargs), lambda: function.ours(*args, **kwargs))


_NO_NAME = (
    "by no name that can be bound: through C code (torch.autograd.Function.apply), a container or an import inside a "
    "function, say"
)


class _Remaining(_Calls):
    """Counts the calls that a copy leaves to torch."""

    def __init__(self, skipped: Set[str]) -> None:
        super().__init__(skipped)
        self.calls: dict[tuple[str, Key, str], list[str]] = {}
        """Why they are, by function, who calls it, and where."""

    def call(self, name: str, frame: FrameType, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if unnamed(frame.f_code, frame.f_globals):
            reason = f"{frame.f_code.co_name} was executed from text, in globals of no module"
        else:
            reason = f"{frame.f_code.co_name} reaches it, or is reached, {_NO_NAME}"
        call = name, key_of(frame.f_code, frame.f_globals), _line(frame)
        self.calls.setdefault(call, []).append(reason)
        return FUNCTIONS[name].theirs(*args, **kwargs)


class _Wholes:
    """Compares every call of a function that an op may replace as a whole, while it is entered; or counts them."""

    def __init__(self, skipped: Set[str], *, compare: bool = True) -> None:
        self.names = WHOLES.keys() - skipped
        self.compare = compare
        self.entered: Counter[Key] = Counter()
        self.calls: dict[tuple[Key, str, str, frozenset[Key]], _Proof] = {}
        """By function, the op, where it is defined, and those who call it."""
        self.unfit: dict[tuple[Key, str], str] = {}
        self._arguments: dict[FrameType, list[Any]] = {}

    def __enter__(self) -> _Wholes:
        self._before = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(self._before)

    def _profile(self, frame: FrameType, event: str, value: Any) -> None:
        code = frame.f_code
        if code.co_name not in self.names or event not in ("call", "return"):
            return
        found, key = whole(code), key_of(code, frame.f_globals)
        line = shown_line(code.co_filename, code.co_firstlineno, "")
        self.entered[key] += event == "call"
        if not self.compare:
            return
        if found is None:
            self.unfit[key, line] = unfit(code)
        elif event == "call":
            self._arguments[frame] = [frame.f_locals[name] for name in parameters(code)]
        elif (arguments := self._arguments.pop(frame, None)) is not None and value is not None:
            closure = tuple(CellType(frame.f_locals[name]) for name in code.co_freevars)
            function = FunctionType(code, frame.f_globals, None, None, closure)
            proof = self.calls.setdefault((key, found[1], line, frozenset(_chain(frame))), _Proof())
            with torch._C.DisableTorchFunction():
                proof.add(value, lambda: found[0](*arguments))
                if len(proof.errors) == 1 and not proof.fault:
                    proof.add_gradients(function, found[0], arguments)


def _plan(watch: _Watch, wholes: _Wholes, skipped: frozenset[str]) -> Plan:
    """What may be bound: all that was proven, where it was."""
    entire = {key for key, _, _, _ in wholes.calls}
    entire -= {key for (key, *_), proof in wholes.calls.items() if proof.fault}
    outside = {call: proof for call, proof in watch.calls.items() if entire.isdisjoint(call[3])}
    faulty = {(key, name) for (name, key, _, _), proof in outside.items() if proof.fault}
    calls = {(key, name) for name, key, _, _ in outside} - faulty
    reached = {k for name, key, _, chain in outside if (key, name) in calls for k in chain}
    reached |= {k for key, _, _, chain in wholes.calls if key in entire for k in chain}
    no_op = frozenset(name for _, name in faulty)
    return Plan(frozenset(calls), frozenset(entire), frozenset(reached), skipped, no_op)


def _told(
    watch: _Watch, wholes: _Wholes, remaining: _Remaining, entered: Mapping[Key, int], plan: Plan
) -> tuple[list[Replacement], list[LeftAlone]]:
    """What became of the calls of functions, line by line."""
    replaced, left = [], []
    entire = plan.wholes or frozenset()
    for key, line in wholes.unfit:
        left.append(LeftAlone("forward", ".".join(key), line, wholes.unfit[key, line]))
    whole_proofs: dict[tuple[Key, str, str], _Proof] = {}
    for (key, op, line, _), proof in wholes.calls.items():
        whole_proofs.setdefault((key, op, line), _Proof()).merge(proof)
    for (key, op, line), proof in whole_proofs.items():
        calls, error, words = proof.words(True)
        kept = entered.get(key, 0) if key in entire else 0
        if kept:
            left.append(LeftAlone("forward", ".".join(key), line, f"it is reached {_NO_NAME}"))
        if key in entire and kept < calls:
            replaced.append(Replacement("forward", ".".join(key), _op_name(op), line, calls - kept, error, words))
        elif proof.fault:
            left.append(LeftAlone("forward", ".".join(key), line, proof.fault))
    proofs: dict[tuple[str, Key, str], _Proof] = {}
    for (name, key, line, chain), proof in watch.calls.items():
        if entire.isdisjoint(chain):
            proofs.setdefault((name, key, line), _Proof()).merge(proof)
    for (name, key, line), proof in proofs.items():
        reasons = remaining.calls.pop((name, key, line), [])
        if (key, name) not in (plan.calls or ()):
            reason = proof.fault or f"{name} stays as it is in {key[1]}, because of another call there"
            left.append(LeftAlone("forward", name, line, reason))
            continue
        if reasons:
            left.append(LeftAlone("forward", name, line, binder(plan).refused.get(key) or reasons[0]))
        calls, error, words = proof.words(True)
        if len(reasons) < calls:
            op = _op_name(FUNCTIONS[name].op)
            replaced.append(Replacement("forward", name, op, line, calls - len(reasons), error, words))
    left += [LeftAlone("forward", name, line, reasons[0]) for (name, _, line), reasons in remaining.calls.items()]
    return replaced, left


def _caller(function: Any) -> FrameType | None:
    """The frame that calls a function of torch; None if it is svexport's."""
    frame: FrameType | None = sys._getframe(2)
    skipped = __file__, torch.overrides.__file__
    inner = getattr(function, "__code__", None)
    while frame is not None and (frame.f_code.co_filename in skipped or frame.f_code is inner):
        frame = frame.f_back
    package = __name__.partition(".")[0]
    return None if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] == package else frame


def _chain(frame: FrameType | None) -> list[Key]:
    """A frame and those that called it, in the model."""
    chain = []
    while frame is not None and frame.f_code is not _forward.__code__:
        chain.append(key_of(frame.f_code, frame.f_globals))
        frame = frame.f_back
    return chain


def _line(frame: FrameType) -> str:
    """Where the user's code called: the innermost of the frames that is not torch's."""
    code = frame.f_code
    if line := user_line(frame, _forward.__code__):
        return shown_line(*line)
    return shown_line(code.co_filename.rstrip(".0123456789"), frame.f_lineno, code.co_name)  # texts are numbered


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

    def add_gradients(self, theirs: Callable[..., Any], ours: Callable[..., Any], arguments: Sequence[Any]) -> None:
        """Compares gradients, in float64 and a little beside the arguments: at the edges of pixels there are none."""
        generator = torch.Generator().manual_seed(0)

        def near(t: Tensor) -> Tensor:
            if not t.is_floating_point():
                return t
            noise = torch.rand(t.shape, generator=generator, dtype=torch.float64).to(t.device)
            return (t.detach().double() + 1e-3 * noise).requires_grad_()

        given = rebuild(tuple(arguments), near)
        wanted = [t for _, t in leaves(given) if isinstance(t, Tensor) and t.requires_grad]
        found: list[list[Tensor | None]] = []
        try:
            with torch.enable_grad():
                for function in (theirs, ours):
                    outputs = [t for _, t in leaves(function(*given)) if isinstance(t, Tensor) and t.requires_grad]
                    cotangent = torch.Generator().manual_seed(1)
                    weights = [torch.rand(t.shape, generator=cotangent, dtype=t.dtype).to(t.device) for t in outputs]
                    total = sum(((t * w).sum() for t, w in zip(outputs, weights, strict=True)), torch.zeros(()))
                    if not outputs:
                        found.append([None] * len(wanted))
                        continue
                    found.append(list(torch.autograd.grad(total, wanted, allow_unused=True)))
        except Exception as error:  # noqa: BLE001 - what cannot be shown is not
            self.fault = f"its gradients cannot be compared: {type(error).__name__}: {error}"
            return
        for given_to, *gradients in zip(wanted, *found, strict=True):
            e, a = (torch.zeros_like(given_to) if g is None else g for g in gradients)
            rtol, atol = tolerances(None, None, {torch.float64})
            scale = max(1.0, float(e.abs().max())) if e.numel() else 1.0
            if not parity("", e, a, rtol=rtol, atol=atol * scale).ok:
                self.fault = f"svexport's gradient differs by {float((e - a).abs().max()):.1e} on the given inputs"

    def merge(self, other: _Proof) -> None:
        self.errors += other.errors
        self.fault = self.fault or other.fault

    def words(self, given: bool) -> tuple[int, float, str]:
        """How many comparisons there were, the largest error, and what to say; given: whether there were inputs."""
        unproven = "not proven: not reached" if given else "not proven: no inputs"
        error = max(self.errors, default=math.nan)
        return len(self.errors), error, f"max error {error:.1e}" if self.errors else unproven


def _forward(model: nn.Module, arguments: tuple[Any, dict[str, Any]], *contexts: AbstractContextManager) -> Any:
    for module in model.modules():
        module.training = False
    bound = bind(model, *arguments)
    fresh = rebuild(dict(bound.arguments), lambda t: t.detach().clone())
    call = inspect.BoundArguments(bound.signature, fresh)  # type: ignore[arg-type]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # what is compiled calls by no name
        for context in contexts:
            stack.enter_context(context)
        return model(*call.args, **call.kwargs)


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _op_name(op: str) -> str:
    return f"svexport.ops.{op}"


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
