"""Function calls of a model's forward: compares them with ops, and counts those that a copy leaves to torch."""

from __future__ import annotations

import cProfile
import inspect
import sys
from collections import Counter
from collections.abc import Mapping, Sequence, Set
from contextlib import AbstractContextManager, ExitStack
from types import CellType, FrameType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from svexport.exporter.functions import FUNCTIONS, NAMES, WHOLES, parameters, unfit, whole
from svexport.exporter.patterns.rewrite import FILES
from svexport.exporter.proof import Proof
from svexport.exporter.rebind import Key, Plan, binder, key_of, unnamed
from svexport.exporter.replacements import LeftAlone, Replacement, op_name
from svexport.tracing.arguments import bind, rebuild
from svexport.tracing.source import shown_line, user_line

__all__ = ["Remaining", "Watch", "Wholes", "forward", "plan_of", "told"]


class _Calls(TorchFunctionMode):
    """Intercepts calls of torch's functions that have an op; monkeypatching would miss ``from torch import einsum``."""

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


class Watch(_Calls):
    """Compares every call with our op's."""

    def __init__(self, skipped: Set[str]) -> None:
        super().__init__(skipped)
        self.calls: dict[tuple[str, Key, str, frozenset[Key]], Proof] = {}
        """By function, its caller, the line, and the callers of that one."""

    def call(self, name: str, frame: FrameType, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Makes the call with torch, and compares our function on the same arguments in its proof."""
        chain = _chain(frame)
        proof = self.calls.setdefault((name, chain[0], _line(frame), frozenset(chain)), Proof())
        function = FUNCTIONS[name]
        return proof.add(function.theirs(*args, **kwargs), lambda: function.ours(*args, **kwargs))


_NO_NAME = (
    "by no name that can be bound, for example through C code (torch.autograd.Function.apply), a container or an "
    "import inside a function"
)


class Remaining(_Calls):
    """Counts the calls that a copy leaves to torch."""

    def __init__(self, skipped: Set[str]) -> None:
        super().__init__(skipped)
        self.calls: dict[tuple[str, Key, str], list[str]] = {}
        """Reasons, by function, its caller, and the line."""

    def call(self, name: str, frame: FrameType, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Makes the call with torch, and notes why no op can be bound there."""
        if unnamed(frame.f_code, frame.f_globals):
            reason = f"{frame.f_code.co_name} was executed from text, in globals that are no module's"
        else:
            reason = f"{frame.f_code.co_name} reaches it, or is reached, {_NO_NAME}"
        call = name, key_of(frame.f_code, frame.f_globals), _line(frame)
        self.calls.setdefault(call, []).append(reason)
        return FUNCTIONS[name].theirs(*args, **kwargs)


class Wholes:
    """While entered, compares (or only counts) every call of a function that an op may replace as a whole."""

    def __init__(self, skipped: Set[str], *, compare: bool = True) -> None:
        self.names = WHOLES.keys() - skipped
        self.compare = compare
        self.entered: Counter[Key] = Counter()
        self.calls: dict[tuple[Key, str, str, frozenset[Key]], Proof] = {}
        """By function, the op, the line of its definition, and its callers."""
        self.unfit: dict[tuple[Key, str], str] = {}
        self._arguments: dict[FrameType, list[Any]] = {}

    def __enter__(self) -> Wholes:
        self._before = sys.getprofile()
        sys.setprofile(self._profile)
        return self

    def __exit__(self, *_: object) -> None:
        if isinstance(self._before, cProfile.Profile):  # before Python 3.12, a cProfile.Profile is no such function
            sys.setprofile(None)
            self._before.enable()
        else:
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
            proof = self.calls.setdefault((key, found[1], line, frozenset(_chain(frame))), Proof())
            with torch._C.DisableTorchFunction():
                proof.add(value, lambda: found[0](*arguments))
                if len(proof.errors) == 1 and not proof.fault:
                    proof.add_gradients(function, found[0], arguments)


def plan_of(watch: Watch, wholes: Wholes, skipped: frozenset[str]) -> Plan:
    """The plan of what may be bound: everything that was proven, in the places where it was."""
    entire = {key for key, _, _, _ in wholes.calls}
    entire -= {key for (key, *_), proof in wholes.calls.items() if proof.fault}
    outside = {call: proof for call, proof in watch.calls.items() if entire.isdisjoint(call[3])}
    faulty = {(key, name) for (name, key, _, _), proof in outside.items() if proof.fault}
    calls = {(key, name) for name, key, _, _ in outside} - faulty
    reached = {k for name, key, _, chain in outside if (key, name) in calls for k in chain}
    reached |= {k for key, _, _, chain in wholes.calls if key in entire for k in chain}
    no_op = frozenset(name for _, name in faulty)
    return Plan(frozenset(calls), frozenset(entire), frozenset(reached), skipped, no_op)


def told(
    watch: Watch, wholes: Wholes, remaining: Remaining, entered: Mapping[Key, int], plan: Plan
) -> tuple[list[Replacement], list[LeftAlone]]:
    """What was replaced and what was left alone of the function calls, line by line."""
    replaced, left = [], []
    entire = plan.wholes or frozenset()
    for key, line in wholes.unfit:
        left.append(LeftAlone("forward", ".".join(key), line, wholes.unfit[key, line]))
    whole_proofs: dict[tuple[Key, str, str], Proof] = {}
    for (key, op, line, _), proof in wholes.calls.items():
        whole_proofs.setdefault((key, op, line), Proof()).merge(proof)
    for (key, op, line), proof in whole_proofs.items():
        calls, error, words = proof.words(True)
        kept = entered.get(key, 0) if key in entire else 0
        if kept:
            left.append(LeftAlone("forward", ".".join(key), line, f"it is reached {_NO_NAME}"))
        if key in entire and kept < calls:
            replaced.append(Replacement("forward", ".".join(key), op_name(op), line, calls - kept, error, words))
        elif proof.fault:
            left.append(LeftAlone("forward", ".".join(key), line, proof.fault))
    proofs: dict[tuple[str, Key, str], Proof] = {}
    for (name, key, line, chain), proof in watch.calls.items():
        if entire.isdisjoint(chain):
            proofs.setdefault((name, key, line), Proof()).merge(proof)
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
            op = op_name(FUNCTIONS[name].op)
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
    if frame is not None and frame.f_code.co_filename.startswith(FILES):
        return None
    return None if frame is None or str(frame.f_globals.get("__name__")).partition(".")[0] == package else frame


def _chain(frame: FrameType | None) -> list[Key]:
    """The keys of a frame and of its callers inside the model."""
    chain = []
    while frame is not None and frame.f_code is not forward.__code__:
        chain.append(key_of(frame.f_code, frame.f_globals))
        frame = frame.f_back
    return chain


def _line(frame: FrameType) -> str:
    """The line of the user's code that made the call: that of the innermost frame that is not torch's."""
    code = frame.f_code
    if line := user_line(frame, forward.__code__):
        return shown_line(*line)
    return shown_line(code.co_filename.rstrip(".0123456789"), frame.f_lineno, code.co_name)  # texts are numbered


def forward(model: nn.Module, arguments: tuple[Any, dict[str, Any]], *contexts: AbstractContextManager[Any]) -> Any:
    """The results of a model in eval mode under these contexts, for copies of its arguments."""
    for module in model.modules():
        module.training = False
    bound = bind(model, *arguments)
    fresh = rebuild(dict(bound.arguments), lambda t: t.detach().clone())
    call = inspect.BoundArguments(bound.signature, fresh)  # type: ignore[arg-type]
    with torch.no_grad(), torch.random.fork_rng(devices=[]), ExitStack() as stack:
        stack.enter_context(torch.compiler.set_stance("force_eager"))  # compiled code calls nothing by name
        for context in contexts:
            stack.enter_context(context)
        return model(*call.args, **call.kwargs)
