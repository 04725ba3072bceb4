"""``svexport.replace``: a copy of a model in which known modules and functions are svexport ops."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from dataclasses import replace as replace_field
from typing import Any

import torch
from torch import Tensor, nn

from svexport import ops
from svexport.errors import UnsupportedError
from svexport.exporter.calls import Remaining, Watch, Wholes, forward, plan_of, told
from svexport.exporter.faster import WHOLE_MARGIN, gains, measure, on_gpu
from svexport.exporter.functions import FUNCTIONS, WHOLES
from svexport.exporter.patterns import DECODER, FINDERS, Patterns
from svexport.exporter.proof import Proof
from svexport.exporter.rebind import Plan, bind_functions, binder, objects
from svexport.exporter.replacements import LeftAlone, Replacement, op_name, print_report
from svexport.ops._module import DropIn
from svexport.tracing.arguments import bind, copied, example_arguments, rebuild
from svexport.tracing.as_in_files import AsInFiles
from svexport.tracing.record import recorded, remember
from svexport.tracing.source import definition

__all__ = ["LeftAlone", "Replacement", "replace"]


def replace(
    model: nn.Module,
    args: Any = None,
    *,
    only: str | Iterable[str] | None = None,
    skip: str | Iterable[str] = (),
    choose: str | None = None,
    verbose: bool = True,
) -> nn.Module:
    """Copies a model, with svexport ops in place of modules and functions that have a counterpart in ``svexport.ops``.

    The copy has the model's state_dict keys, trains like it and exports to the same nodes. Modules are recognized by
    class name, attributes and the signature of ``forward``. Functions are torch's (:data:`FUNCTIONS`), and whole
    functions of other packages by name and parameters (:data:`WHOLES`). Functions that the model's forward reaches, in
    any package, are copied with their names bound to the ops, so a call costs no more than the op's. The model and the
    packages, and scripted code, are not changed, except for private names added to modules' globals.

    With arguments, parts of a module's forward become ops too, whatever their names
    (:data:`svexport.exporter.patterns.FINDERS`). They are found in the graph of the functions that it calls, and the
    module gets a forward that runs that graph. It runs for arguments like the recorded ones (tensors of the same ranks,
    lists of the same lengths, the same constants) of any sizes for which the forward's comparisons of sizes have the
    same outcome. Otherwise the author's forward runs; also once an attribute that it read has been set, or is a list,
    dict or set that has changed. Changes in other objects that attributes refer to are not noticed. A whole decoder of
    the DETR3D kind is one op, and one autograd node where gradients are recorded, in float32 and float64 and not under
    autocast. This does not apply once modules in it were exchanged or have hooks. The same holds for an encoder of the
    Deformable DETR kind, unless dropout is active; in inference too, it runs only in these dtypes and not in a tracer.

    With arguments, every replacement is proven: original and replacement both run on the activations of a forward pass
    in eval mode. Whole functions and parts of forwards are compared with their gradients, parts also on other inputs.
    What differs is left alone. So is what is not reached by a name that can be bound: what is called through C code, a
    container, code executed from text, and before Python 3.11 a method of tensors.
    ``F.grid_sample`` in half precision on a CPU is compared with what torch computes on CUDA: float32 coordinates.

    Args:
        model: any ``nn.Module``; it stays as it is.
        args: as for :func:`svexport.export`, with the same defaults. Without any, nothing is proven, and functions are
            replaced whether or not the model calls them.
        only: names of what to replace: modules in the model (``"decoder"``: it and its submodules, not the functions
            that they call), classes and functions as the report names them or by their last part
            (``"torch.einsum"``, ``"LayerNorm"``), or ops. None: everything.
        skip: likewise, names of what to leave as it is.
        choose: ``"faster"`` times the model with and without each kind of replacement, forward and with backward, and
            leaves alone what does not gain; ``"all"`` replaces whatever is the same. Default: ``"faster"`` if the
            arguments are on a GPU, else ``"all"``. A call under autocast times under autocast, for models that will run
            there; proofs are made without it.
        verbose: print a report.

    Returns:
        The copy, with ``svexport_replacements``, a list of :class:`Replacement`, and ``svexport_left_alone``, a list of
        :class:`LeftAlone`. It can be pickled if the model can, and be copied, compiled and wrapped like it.
        ``torch.jit.script`` compiles the model's source text, with torch's functions.

    Raises:
        UnsupportedError: if ``model`` is no module, or cannot be copied; if ``only`` or ``skip`` has an unknown name;
            or if ``choose`` is unknown, or asks to time a model without arguments.
        ExportError: if the arguments do not fit ``forward``.
    """
    if not isinstance(model, nn.Module):
        raise UnsupportedError(f"expected a torch.nn.Module, got {type(model).__name__}; wrap functions in a module")
    if choose not in (None, "faster", "all"):
        raise UnsupportedError(f"choose expects 'faster', 'all' or None, got {choose!r}")
    arguments = example_arguments(model, args)
    if choose == "faster" and arguments is None:
        raise UnsupportedError("choose='faster' expects arguments of the model to time it with: replace(model, args)")
    chosen = _Choice(only, skip)
    proofs: dict[Any, Any] = {}

    def remade(kinds: Set[str]) -> _Made:
        with _without_autocast():
            return _replaced(model, arguments, chosen.without(kinds), proofs)

    made = remade(frozenset())
    if arguments is not None and (choose == "faster" or (choose is None and on_gpu(arguments))):
        made = _faster(model, arguments, made, remade)
    if made.outputs.fault:  # every part agrees, so the model branches on rounding, or keeps state
        fault = f"{type(model).__name__} as a whole, although every part is proven: {made.outputs.fault}"
        with _without_autocast():
            warnings.warn(f"{fault}{_by_rounding(model, arguments)}", stacklevel=2)
    made.copy.svexport_replacements = made.replacements  # type: ignore[assignment]
    made.copy.svexport_left_alone = made.left_alone  # type: ignore[assignment]
    if last := recorded(model):
        remember(made.copy, *last)
    if verbose:
        print_report(type(model).__name__, made.replacements, made.left_alone, made.outputs, [*made.speed, *made.notes])
    return made.copy


def _by_rounding(model: nn.Module, arguments: Any) -> str:
    """Says how much the model's own outputs change if its inputs change by one unit in the last place."""

    def rounded(t: Tensor) -> Tensor:
        return torch.nextafter(t, t + 1) if t.dtype in (torch.float32, torch.float64) else t

    itself = Proof()
    expected = forward(copied(model), arguments, AsInFiles())
    itself.add(expected, lambda: forward(copied(model), rebuild(arguments, rounded), AsInFiles()))
    error = max(itself.errors, default=0.0)
    return (
        f"; the original's outputs change by {error:.1e} when its inputs change in their last place"
        if itself.fault
        else ""
    )


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Turns autocast off for proofs: rounding to half, as of projections into cameras, changes what a model samples."""
    with ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@dataclass
class _Made:
    """A copy, and the record of how it was made.

    Attributes:
        outputs: the comparison of its outputs with the model's.
        notes: notes on how they were compared.
        speed: the measurements, in words.
    """

    copy: nn.Module
    replacements: list[Replacement]
    left_alone: list[LeftAlone]
    outputs: Proof
    notes: list[str]
    speed: list[str] = field(default_factory=list)


def _replaced(model: nn.Module, arguments: Any, chosen: _Choice, proofs: dict[Any, Any]) -> _Made:
    """A copy with everything replaced that is proven the same.

    Args:
        proofs: proofs of parts of modules, kept for the next copy.
    """
    classes, left_alone = _recognise(model)
    classes = {
        name: cls
        for name, cls in classes.items()
        if chosen(_labels(name, type(model.get_submodule(name)), cls.__name__))
    }
    skipped = {
        name for name, function in FUNCTIONS.items() if not chosen({*_parts(name), *_parts(op_name(function.op))})
    }
    skipped |= {name for name, known in WHOLES.items() if not chosen({name, *_parts(op_name(known[0][1]))})}
    patterns = Patterns(
        lambda name, op: chosen(_labels(name, type(model.get_submodule(name)), op)),
        frozenset(skipped & WHOLES.keys()),
        proofs=proofs,
    )
    for op in (*FINDERS, DECODER):
        chosen.labels |= {*_parts(op_name(op))}
    chosen.check(model)

    modules: dict[str, Proof] = {name: Proof() for name in classes}
    watch, wholes = Watch(skipped), Wholes(skipped)
    remaining, entered = Remaining(skipped), Wholes(skipped, compare=False)
    outputs, as_files = Proof(), AsInFiles()
    plan = Plan(skipped=frozenset(skipped))
    if arguments is not None:
        probe = copied(model)
        _compare(probe, classes, modules)
        expected = forward(probe, arguments, as_files)
        classes = {name: cls for name, cls in classes.items() if not modules[name].fault}
        probe = _swap(copied(model), classes)
        forward(probe, arguments, as_files, patterns.watch(probe))
        forward(patterns.applied(_swap(copied(model), classes)), arguments, as_files, watch, wholes)
        plan = plan_of(watch, wholes, plan.skipped)
        del probe

    replaced = patterns.applied(_swap(copied(model), classes))
    copies = bind_functions(replaced, plan, {id(value) for value in objects(model)})
    if arguments is not None:
        copy = copied(replaced)
        outputs.add(expected, functools.partial(forward, copy, arguments, as_files, remaining, entered))
        del expected, copy

    replacements = []
    for name, proof in modules.items():
        kind = type(model.get_submodule(name))
        if proof.fault:
            left_alone.append(LeftAlone(name, _qualified(kind), definition(kind), proof.fault))
        else:
            after, proven = op_name(classes[name].__name__), proof.words(arguments is not None)
            replacements.append(Replacement(name, _qualified(kind), after, definition(kind), *proven))
    for name, part in ((name, part) for name, parts in patterns.parts.items() for part in parts):
        kind = type(model.get_submodule(name))
        if part.proof.fault:
            left_alone.append(LeftAlone(name, part.what, definition(kind), part.proof.fault))
        elif name in patterns.rewrites or name in patterns.wholes:
            proven = part.proof.words(True)
            replacements.append(Replacement(name, part.what, op_name(part.op), definition(kind), *proven))
    for name, (what, reason) in patterns.unread.items():
        left_alone.append(LeftAlone(name, what, definition(type(model.get_submodule(name))), reason))
    if arguments is None:
        for name, source in binder(plan).notes(copies):
            function = FUNCTIONS.get(name)
            op = function.op if function else WHOLES[name.rpartition(".")[2]][0][1]
            replacements.append(Replacement("forward", name, op_name(op), source, *Proof().words(False)))
    else:
        more, not_bound = told(watch, wholes, remaining, entered.entered, plan)
        replacements += more
        left_alone += not_bound
    return _Made(replaced, replacements, left_alone, outputs, as_files.notes)


def _faster(model: nn.Module, arguments: Any, made: _Made, remade: Callable[[Set[str]], _Made]) -> _Made:
    """Keeps only the replacements that make the model faster.

    Args:
        remade: makes a copy without replacements by some kinds of ops.
    """
    bound = bind(model, *arguments)
    skipped: set[str] = set()
    lost: list[LeftAlone] = []
    while kinds := sorted({r.after for r in made.replacements}):
        variants = {kind: remade({*skipped, kind}).copy for kind in kinds} if len(kinds) > 1 else {}
        models = {name: copied(m) for name, m in {"original": model, "": made.copy, **variants}.items()}
        times = measure(models, lambda m: m(*bound.args, **bound.kwargs))
        without = {kind: times.get(kind, times["original"]) for kind in kinds}
        slow = {kind for kind in kinds if not gains(without[kind], times[""])}
        gain = {kind: without[kind].words(times[""]) for kind in kinds}
        if not slow and gains(times["original"], times[""], WHOLE_MARGIN):
            made.replacements = [replace_field(r, gain=gain[r.after]) for r in made.replacements]
            made.speed = [f"{type(model).__name__} as a whole is {times['original'].sentence(times[''])}"]
            break
        slow = slow or set(kinds)
        skipped |= slow
        for r in made.replacements:
            if r.after in slow:
                lost.append(LeftAlone(r.name, r.before, r.source, f"as {r.after} it was measured: {gain[r.after]}"))
        made = remade(skipped)
    made.left_alone += lost
    return made


class _Choice:
    """Tells what is to be replaced, according to ``only`` and ``skip``."""

    def __init__(self, only: str | Iterable[str] | None, skip: str | Iterable[str]) -> None:
        self.only = None if only is None else {only} if isinstance(only, str) else set(only)
        self.skip = {skip} if isinstance(skip, str) else set(skip)
        self.labels: set[str] = set()

    def __call__(self, labels: set[str]) -> bool:
        self.labels |= labels
        return (self.only is None or not labels.isdisjoint(self.only)) and labels.isdisjoint(self.skip)

    def without(self, kinds: Set[str]) -> _Choice:
        """The same choice, without replacements by these kinds of ops."""
        other = _Choice(self.only, {*self.skip, *kinds})
        other.labels = {*self.labels, *kinds}
        return other

    def check(self, model: nn.Module) -> None:
        """Raises UnsupportedError if ``only`` or ``skip`` has a name that nothing has."""
        modules = {name for name, _ in model.named_modules()}
        if unknown := {*(self.only or ()), *self.skip} - self.labels - modules:
            raise UnsupportedError(
                f"only and skip expect names of modules of {type(model).__name__}, or among "
                f"{', '.join(sorted(self.labels - modules))}; got {', '.join(sorted(map(repr, unknown)))}"
            )


def _labels(name: str, kind: type, op: str) -> set[str]:
    """The names by which a module can be chosen, and those of the modules that hold it."""
    path = name.split(".")
    holders = {".".join(path[: i + 1]) for i in range(len(path))}
    return {*holders, *_parts(_qualified(kind)), *_parts(op_name(op))}


def _parts(name: str) -> tuple[str, str]:
    return name, name.rpartition(".")[2]


# ------------------------------------------------------------------ modules


def _recognise(model: nn.Module) -> tuple[dict[str, type[DropIn]], list[LeftAlone]]:
    """The drop-in of every module that has one, by name; and modules that only share the class name with one."""
    known = [cls for cls in vars(ops).values() if isinstance(cls, type) and issubclass(cls, DropIn) and cls.replaces]
    found: dict[str, type[DropIn]] = {}
    left_alone = []
    # A decoder's submodules hold the parameters of one op, and are never called.
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
    """``model`` with the named modules replaced wherever they are registered."""
    new: dict[nn.Module, Any] = {}
    for name, cls in classes.items():
        old = model.get_submodule(name)
        new[old] = cls.from_module(old)
    for parent in [*model.modules(), *new.values()]:
        for name, child in parent._modules.items():
            if child in new:
                parent._modules[name] = new[child]
    return new.get(model, model)


def _compare(model: nn.Module, classes: Mapping[str, type[DropIn]], proofs: Mapping[str, Proof]) -> None:
    """Hooks every named module, so that each call is compared with its replacement."""
    comparing: list[str] = []  # a replacement calls submodules, which are not compared again

    def watch(name: str, ours: Any) -> Callable[..., None]:
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            if not comparing:
                comparing.append(name)
                proofs[name].add(output, lambda: ours.forward(*args, **kwargs))
                comparing.pop()

        return hook

    ours = {name: cls.from_module(model.get_submodule(name)) for name, cls in classes.items()}
    for name, module in ours.items():  # first: another hook may change the output
        model.get_submodule(name).register_forward_hook(watch(name, module), prepend=True, with_kwargs=True)


def _qualified(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
