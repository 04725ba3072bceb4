"""Proof of an exported file: ONNX Runtime against torch, on the given inputs and on fresh ones."""

from __future__ import annotations

import dis
import io
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from svexport.errors import EngineError, ExportError, VerificationError
from svexport.exporter.as_in_files import AsInFiles
from svexport.exporter.quantizers import allow_steps
from svexport.exporter.rounding import Rounding, Tolerances
from svexport.exporter.sizes import Size, tiled
from svexport.exporter.source import shown_line
from svexport.exporter.state import State
from svexport.exporter.ties import StableOrder
from svexport.exporter.way import OTHERS, UNGUARDED, Exit, TooLong, Way
from svexport.parity import Parity, parity
from svexport.progress import phase

__all__ = ["verify"]

_ANYWAY = "svexport.export(..., verify=False) writes the file anyway"

_KINDS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "negated": (torch.neg, torch.logical_not),
    "hundredfold": (lambda x: x * 100, torch.clone),
    "zero": (torch.zeros_like, torch.zeros_like),
}
"""Inputs of another kind than the given ones, for models that decide by values: of floating-point numbers, of masks."""

_OTHERS = ("scaled", "zeros")
"""Inputs of every model that are far from the given ones."""

_NOTHING = ("zeros", "zero")
"""Of which most functions are zero: a way that is gone with these alone has not been compared."""

_FIRST = ("random first",)
"""Of models that forward changes: what they remember of the given inputs is not in a file."""

MOST_ELEMENTS = 2**14
"""Of inputs of other sizes, or some times as many as are given."""


class _NotFinite(Exception):
    """Inputs of which a model makes no numbers."""


def verify(
    model: nn.Module,
    path: Path,
    tensors: Sequence[Tensor],
    input_names: Sequence[str],
    output_names: Sequence[str],
    *,
    dynamic_axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
    held_to: Tolerances,
    notes: list[str],
    warned: Sequence[str],
    state: State,
    skipped: list[str],
    guarded: bool,
    kind: str = "default",
) -> list[Parity]:
    """Compares every output on the given inputs, on others of the same kind, and with every dynamic size changed.

    Of the others floating-point numbers are a little off, then of several scales and both signs, then zero; integers
    are drawn anew, within what they index; masks are drawn anew, then all true (or mixed, where they were), then all
    false. Runs that the model itself raises on, or makes numbers of that are not finite, are ``skipped``, which names
    them. With ``kind="quick"`` there are the given inputs alone.

    What an output is held to is relative to its own scale. Where torch in float32 is itself further from float64 than
    that, a file cannot do better: what it differs by is allowed as far as torch's own rounding explains it, and noted
    of inputs that are not the given ones, for those may be what a model was never meant for.

    A quantizer makes a whole step of a rounding error on the border of two. Elements that torch, too, takes for the
    other step once what it rounds changes by some rounding errors are allowed, and noted.

    ``F.grid_sample`` in half precision is torch's as on CUDA, and ``topk(sorted=False)`` sorts (:class:`AsInFiles`),
    which is noted.

    If Python takes values out of tensors, or the tracer has ``warned`` of it, inputs of more kinds are tried as well,
    and compared where forward goes a way with them that it has not gone before. Then nothing may follow from a value
    that a line took out of what depends on an input, whatever it is, but what has been compared (see
    :func:`_unproven`); with ``guarded`` the tracer has seen to those that ``torch.export`` knows of.

    Raises:
        ExportError: naming the lines that take values of inputs from which something follows.
        VerificationError: if any output differs, the worst one named, or the file does not run.
    """
    from svexport.runtime.session import OnnxEngine

    try:
        engine = OnnxEngine(path, device="cpu")
    except EngineError as error:
        raise VerificationError(f"{error}. No file was written.\n  {_ANYWAY}") from error
    results: list[Parity] = []
    ways: dict[str, Way] = {}
    as_files = AsInFiles()
    failing: dict[str, tuple[list[Tensor], list[Tensor]]] = {}  # inputs and what the file made of them, by run
    infinite: dict[Parity, tuple[int, int]] = {}  # how many elements of torch's result and of the file's
    inputs_of: dict[str, list[Tensor]] = {}
    compared: dict[str, Way] = {}
    sized = False  # whether there was a run with other sizes
    held = [*model.parameters(), *model.buffers()]

    def forward(run: str, inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
        phase(f"verifying, {run} inputs")
        arguments = [t.clone() for t in inputs]  # a model may work on its inputs in place
        with as_files, Way(arguments, held) as way:
            expected = model(*arguments)
        way.end(expected)
        if run in _OTHERS and not all(bool(e.isfinite().all()) for e in expected if e.is_floating_point()):
            raise _NotFinite("what torch computes there is not finite")
        ways[run] = way
        return expected

    def runs() -> Iterator[Iterable[tuple[str, list[Tensor]]]]:
        yield [("given", list(tensors))]
        if kind == "quick":
            return
        ranges = ways["given"].ranges
        yield (("random", inputs) for inputs in _random(tensors, [t.shape for t in tensors]))
        for name in _OTHERS:
            yield ((name, inputs) for inputs in _other(name, tensors, ranges))
        if dynamic_axes:
            yield from _resized(tensors, input_names, dynamic_axes, sizes)
        if warned or ways["given"].takes_values:
            yield from ([(name, [_of_kind(name, t) for t in tensors])] for name in _KINDS)
        if state.changed():
            state.restore()
            yield ((_FIRST[0], inputs) for inputs in _random(tensors, [t.shape for t in tensors]))

    for alternatives in runs():
        refusals: dict[str, Exception] = {}
        for run, inputs in alternatives:
            try:
                expected = forward(run, inputs)
                break
            except Exception as error:
                if run == "given":
                    raise
                refusals.setdefault(run, error)
        else:
            if not refusals:
                continue
            tried, first = " or ".join(refusals), next(iter(refusals.values()))
            failure = f"the model itself fails there ({type(first).__name__}: {first})"
            why = str(first) if isinstance(first, _NotFinite) else failure
            if refusals.keys() <= _KINDS.keys():  # not what the model is for
                continue
            skipped.append(f"{tried}: {why}")
            if dynamic_axes and not sized and refusals.keys().isdisjoint({"random", *_OTHERS, *_FIRST}):
                notes.append(f"not verified with {tried}: {why}")
            continue
        sized |= run not in {"given", "random", *_OTHERS, *_FIRST, *_KINDS}
        inputs_of[run] = list(inputs)
        if run in _KINDS and any(ways[run] == way for way in compared.values()):
            continue
        try:
            actual = engine.run([t.detach().cpu() for t in inputs])
        except EngineError as error:
            raise VerificationError(
                f"torch computes {run} inputs, the exported file does not: {error}. No file was written.\n"
                + _causes(
                    ways,
                    run,
                    warned,
                    "Usual cause: a number that the tracer took as it was, such as int(x.shape[0]), len(x) or the "
                    "groups of a convolution",
                )
                + _ANYWAY
            ) from error
        if len(expected) != len(actual):
            raise VerificationError(
                f"torch returns {len(expected)} tensors on {run} inputs, the exported file always {len(actual)}. "
                "No file was written.\n"
                + _causes(ways, run, warned, "How many come may not depend on the inputs or their sizes")
                + _ANYWAY
            )
        pairs = list(zip(output_names, expected, actual, strict=True))
        found = [_held(name, e, a, run, held_to) for name, e, a in pairs]
        if not all(p.ok for p in found):
            with as_files:
                allow_steps(found, model, inputs, pairs, notes)
        if not all(p.ok for p in found):
            rounding = Rounding(model, inputs, expected)
            with as_files:
                _allow_rounding(found, rounding, pairs, held_to, notes)
            if run in _OTHERS and rounding.sizes:
                skipped.append(f"{run}: how large torch's results are there depends on its rounding errors")
                continue
        if run in _OTHERS and not all(p.ok for p in found):
            with as_files:
                jumps = _jumps(model, inputs, pairs, found)
            if jumps:
                skipped.append(
                    f"{run}: torch's results there jump where inputs change by a millionth, of equal values say"
                )
                continue
        if not all(p.ok for p in found):
            failing[run] = inputs, actual
        results += found
        if run not in _NOTHING:
            compared[run] = ways[run]
        for p, (_, e, a) in zip(found, pairs, strict=True):
            if math.isinf(p.max_abs) and e.shape == a.shape and e.dtype == a.dtype:
                infinite[p] = int((~e.isfinite()).sum()), int((~a.isfinite()).sum())
    notes += as_files.notes
    failed = sorted((p for p in results if not p.ok), key=lambda p: p.max_rel, reverse=True)
    if failed:
        worst = failed[0]
        changed = state.changed()
        kept = (
            f"  forward changes {', '.join(changed)} of the model, which a file cannot: pass and return it instead.\n"
        )
        kinds = {str(t.dtype) for t in (*model.parameters(), *model.buffers())} | {f"torch.{worst.dtype}"}
        half = (
            "half precision itself, in which every runtime rounds its own way (give rtol and atol to allow more) and "
            "argmax and topk may take another of values that are nearly equal (compare what they take it from), "
        )
        usual = (
            f"Usual causes: {half if kinds & {'torch.float16', 'torch.bfloat16'} else ''}random numbers or data-"
            "dependent Python branches in forward (traced once, for the given inputs, with dynamic sizes of 2 or more)"
        )
        if worst in infinite:
            own, its = infinite[worst]
            usual = (
                f"{own} elements of torch's result are NaN or infinite, {its} of the file's: a number became too large "
                "for its type, or was divided by zero, of which runtimes need not make the same"
            )
        elif "(came as " in worst.name:
            usual = (
                f"torch's result is {worst.dtype}{list(worst.shape)}: the exporter has lost that, which another one "
                "(opset 17 or less, 18 or more) need not do"
            )
        with as_files:
            ties = _ties(model, *failing[worst.run], held_to)
        if ties:
            usual = (
                f"Some values are equal, which torch may return in any order, ONNX by their places: {ties}. Nothing "
                "else differs. Use torch.sort(x, dim=-1, descending=True, stable=True), or values that are never equal"
            )
        raise VerificationError(
            f"the exported file does not compute what torch computes: output {worst.name!r} differs by up to "
            f"{worst.max_abs:.3g} (relative {worst.max_rel:.3g}, cosine {worst.cosine:.6f}) on {worst.run} inputs, "
            f"{worst.mismatched} elements outside rtol={worst.rtol:g}, atol={worst.atol:.3g}; "
            f"{len(failed)} of {len(results)} comparisons fail. No file was written.\n"
            f"{kept if changed else ''}"
            + _causes(ways, worst.run, warned, usual)
            + f"{_ANYWAY}; svexport.compare(..., layers=True) then shows the first layer that differs",
            failed,
        )
    if kind != "quick":
        with as_files:
            unproven = _unproven(model, inputs_of, ways, compared.values(), held, guarded)
        if unproven:
            _refuse(unproven, input_names)
    return results


def _unproven(
    model: nn.Module,
    inputs_of: Mapping[str, Sequence[Tensor]],
    ways: Mapping[str, Way],
    compared: Collection[Way],
    held: Sequence[Tensor],
    guarded: bool,
) -> list[Exit]:
    """Lines that take values of inputs out of tensors, from which something follows that has not been compared.

    What follows is seen where a line is made to get another value: functions called, or given, anything else. Nothing
    does where the value is only printed, kept, or checked by an assertion. A branch has been compared if both its ways
    have been gone.
    """
    first: dict[Any, tuple[str, Exit]] = {}
    for run, way in ways.items():
        for line, found in way.exits.items():
            first.setdefault(line, (run, found))
    unproven = []
    for line, (run, found) in first.items():
        if guarded and found.name not in UNGUARDED:
            continue
        seen = set().union(*(way.seen_at(line) for way in compared))
        if {"True", "False"} <= seen:
            continue
        for which in range(1 if seen <= {"True", "False"} else OTHERS):
            if _follows(model, inputs_of[run], ways[run], compared, held, (line, which)):
                unproven.append(found)
                break
    return unproven


def _follows(
    model: nn.Module,
    inputs: Sequence[Tensor],
    usual: Way,
    compared: Iterable[Way],
    held: Sequence[Tensor],
    forced: tuple[tuple[str, int, str], int],
) -> bool:
    """Whether forward goes a way that has not been compared when a line gets another value out of a tensor."""
    arguments = [t.clone() for t in inputs]
    way = Way(arguments, held, forced=forced, most=2 * usual.length + 100)
    try:
        with redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with way:
                results = model(*arguments)
    except Exception as error:  # noqa: BLE001 - the user's code may raise anything
        return not (refusal := _refusal(error)) or (way.leaves(usual) and not _checks(forced[0], refusal))
    way.end(results)
    return not any(way.same_flow(other) for other in compared)


def _refusal(error: BaseException) -> tuple[str, int, str] | None:
    """The line that raised an error by a statement, as an assertion does; None of what Python or torch could not do."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    if traceback is None or isinstance(error, TooLong):
        return None
    code = traceback.tb_frame.f_code
    if code.co_code[traceback.tb_lasti] != dis.opmap["RAISE_VARARGS"]:
        return None
    return code.co_filename, traceback.tb_lineno, code.co_name


def _checks(line: tuple[str, int, str], refusal: tuple[str, int, str]) -> bool:
    """Whether a line that raises belongs to one that looks at a value; its message may look at more."""
    return (line[0], line[2]) == (refusal[0], refusal[2]) and 0 <= refusal[1] - line[1] <= 3


def _refuse(unproven: Sequence[Exit], names: Sequence[str]) -> NoReturn:
    inputs = [names[index] for index in sorted(frozenset().union(*(e.inputs for e in unproven))) if index < len(names)]
    where = "".join(f"\n  at {shown_line(*e.line)}" for e in unproven[:5])
    raise ExportError(
        f"forward takes values of {', '.join(inputs)} out of tensors, and goes on by them; a file would have those of "
        f"the given inputs for all. No file was written.{where}\n"
        "  Keep them tensors: compute both ways and choose by torch.where, multiply with a mask, torch.gather what an "
        f"index says; or make constants of these inputs: svexport.export(..., freeze={inputs!r}). {_ANYWAY}"
    )


def _causes(ways: Mapping[str, Way], run: str, warned: Sequence[str], usual: str) -> str:
    """What an error says of its causes: where forward went another way than with the given inputs, or guesses."""
    if where := ways["given"].parting(ways[run]):
        return (
            f"  forward takes values out of tensors, which are others there than on the given inputs, at {where}\n"
            "  A file has one way for all inputs: compute both and choose by torch.where, or make a constant of it. "
        )
    taken = [shown_line(*line) for line in ways["given"].exits if not any(f":{line[1]}: " in w for w in warned)]
    lines = [*warned[:5], *(f"values of inputs are taken out of tensors at {line}" for line in taken[:5])]
    return "".join(f"  {line}\n" for line in lines) + f"  {usual}. "


def _jumps(
    model: nn.Module, inputs: Sequence[Tensor], pairs: Sequence[tuple[str, Tensor, Tensor]], found: Sequence[Parity]
) -> bool:
    """Whether torch's own results change as much as ``found`` says of the file's, where inputs hardly change."""
    for _ in range(2):
        near = [t + 1e-6 * (_size(t) * torch.randn_like(t)) if t.is_floating_point() else t.clone() for t in inputs]
        try:
            others = model(*near)
        except Exception:  # noqa: BLE001 - which is as far as can be
            return True
        for p, (_, e, _), other in zip(found, pairs, others, strict=True):
            if not p.ok and other.shape != e.shape:
                return True
            if not p.ok and e.numel() and not math.isinf(p.max_abs):
                own = parity("", e, other, rtol=p.rtol, atol=p.atol)
                if own.max_abs >= p.max_abs / 4 and 4 * own.mismatched >= p.mismatched:
                    return True
    return False


def _size(tensor: Tensor) -> float:
    """The largest number of a tensor, or 1 of nothing."""
    return float(tensor.abs().amax()) or 1.0 if tensor.numel() else 1.0


def _ties(model: nn.Module, inputs: Sequence[Tensor], actual: Sequence[Tensor], held_to: Tolerances) -> str:
    """The calls that order equal values another way than ONNX does, if torch agrees with the file but for them."""
    try:
        with StableOrder() as order:
            expected = model(*(t.clone() for t in inputs))
    except Exception:  # noqa: BLE001 - a model that knows what it gets from torch; only the explanation would be lost
        return ""
    agrees = all(_held("", e, a, "", held_to).ok for e, a in zip(expected, actual, strict=True))
    return ", ".join(order.where) if agrees else ""


def _held(name: str, expected: Tensor, actual: Tensor, run: str, held_to: Tolerances) -> Parity:
    rtol, atol = held_to.held(expected)
    return parity(name, expected, actual, run=run, rtol=rtol, atol=atol)


def _allow_rounding(
    found: list[Parity],
    rounding: Rounding,
    pairs: Sequence[tuple[str, Tensor, Tensor]],
    held_to: Tolerances,
    notes: list[str],
) -> None:
    """Of ``found``, allows what torch's own rounding explains; on the given inputs up to what is held to at most."""
    for index, (name, e, a) in enumerate(pairs):
        p = found[index]
        if p.ok or not (own := rounding.allows(index, a, p.rtol, p.atol)):
            continue
        atol = p.atol + Rounding.FACTOR * own
        if p.run != "given":
            notes.append(f"{name} on {p.run} inputs: torch itself differs by {own:.1e} between float32 and float64")
        elif held_to.atol is not None or (e.is_floating_point() and atol > held_to.most[1]):
            continue
        found[index] = parity(name, e, a, run=p.run, rtol=p.rtol, atol=atol)


def _of_kind(kind: str, tensor: Tensor) -> Tensor:
    number, mask = _KINDS[kind]
    return number(tensor) if tensor.is_floating_point() else mask(tensor) if tensor.dtype == torch.bool else tensor


def _other(name: str, tensors: Sequence[Tensor], ranges: Mapping[int, int]) -> Iterator[list[Tensor]]:
    """Inputs far from the given ones; with the given integers, and masks, where a model does not take others."""
    change = _scaled if name == "scaled" else _zeros
    changed = [change(t, ranges.get(index)) for index, t in enumerate(tensors)]
    yield changed
    for kept in (lambda t: not t.is_floating_point() and t.dtype != torch.bool, lambda t: not t.is_floating_point()):
        if any(map(kept, tensors)):
            yield [t if kept(t) else c for t, c in zip(tensors, changed, strict=True)]


def _scaled(tensor: Tensor, size: int | None) -> Tensor:
    """Of both signs, a tenth, as large, ten or a hundred times as large; other integers; masks all set, or half."""
    noise = torch.rand(tensor.shape, dtype=torch.float64, device=tensor.device)
    if tensor.is_floating_point():
        signs = torch.randint_like(noise, 2) * 2 - 1
        most = torch.finfo(tensor.dtype).max
        return (tensor.double() * signs * 10 ** ((4 * noise).floor() - 1)).clamp(-most, most).to(tensor.dtype)
    if size is not None:
        return (noise * size).long().clamp(max=size - 1).to(tensor.dtype)
    if tensor.dtype == torch.bool or _is_mask(tensor):
        return (noise < 0.5).to(tensor.dtype) if bool(tensor.all()) else torch.ones_like(tensor)
    least = min(int(tensor.min()), 0) if tensor.numel() else 0
    return (tensor + (4 * noise).long().to(tensor.dtype) - 1).clamp(min=least)


def _zeros(tensor: Tensor, size: int | None) -> Tensor:
    """Nothing but zero, no mask set; integers in another order."""
    if tensor.is_floating_point() or tensor.dtype == torch.bool or _is_mask(tensor):
        return torch.zeros_like(tensor)
    return tensor.flatten().flip(0).reshape(tensor.shape) if size is None else (size - 1 - tensor).clamp(0, size - 1)


def _is_mask(tensor: Tensor) -> bool:
    return bool(((tensor == 0) | (tensor == 1)).all()) and bool(tensor.numel())


def _resized(
    tensors: Sequence[Tensor],
    names: Sequence[str],
    dynamic_axes: Mapping[str, Mapping[int, str]],
    sizes: Mapping[str, Size],
) -> Iterator[Iterator[tuple[str, list[Tensor]]]]:
    """Every dynamic size larger, then as small as can be, then each alone much larger.

    Of several the larger ones are unequal where a model takes that. A model may halve its sizes, or divide them by
    other numbers: of each run there are alternatives.
    """
    roots: dict[str, tuple[Size, int]] = {}
    for name, tensor in zip(names, tensors, strict=True):
        for axis, symbol in dynamic_axes.get(name, {}).items():
            roots.setdefault(sizes[symbol].root, (sizes[symbol], tensor.shape[axis]))
    least = {root: max(s.root_for(1) for s in sizes.values() if s.root == root) for root in roots}
    tried = set()

    def at(wanted: Mapping[str, int]) -> Iterator[tuple[str, list[Tensor]]]:
        run = ", ".join(f"{root}={size}" for root, size in wanted.items())
        if run in tried or all(size == roots[root][0].root_for(roots[root][1]) for root, size in wanted.items()):
            return
        tried.add(run)
        shapes = [list(tensor.shape) for tensor in tensors]
        for name, shape in zip(names, shapes, strict=True):
            for axis, symbol in dynamic_axes.get(name, {}).items():
                if sizes[symbol].root in wanted:
                    shape[axis] = sizes[symbol].size(wanted[sizes[symbol].root])
        if sum(map(math.prod, shapes)) > max(MOST_ELEMENTS, 4 * sum(t.numel() for t in tensors)):
            return
        yield from ((run, inputs) for inputs in _random(tensors, shapes))

    def larger() -> Iterator[tuple[str, list[Tensor]]]:
        for apart in (1, 0) if len(roots) > 1 else (0,):
            for more in (lambda n, k: n + 1 + k, lambda n, k: n + (n & -n) * (1 + k), lambda n, k: n * (2 + k)):
                wanted = {}
                for place, (root, (size, given)) in enumerate(roots.items()):
                    wanted[root] = size.other(given, partial(more, k=place * apart))
                yield from at(wanted)

    def smaller() -> Iterator[tuple[str, list[Tensor]]]:
        for less in (lambda n: 1, lambda n: n & -n, lambda n: n // 2, lambda n: n - 1):
            wanted = {}
            for root, (size, given) in roots.items():
                n = size.root_for(given)
                low = max(size.low, least[root])
                wanted[root] = n if n <= low else max(less(n), low)
            yield from at(wanted)

    def much(root: str) -> Iterator[tuple[str, list[Tensor]]]:
        size, given = roots[root]
        n = size.root_for(given)
        for wanted in (-(-4 * n // 12) * 12, -(-2 * n // 12) * 12, 4 * n, 2 * n):
            if n < wanted <= size.high:
                yield from at({root: wanted})

    yield larger()
    yield smaller()
    for root in list(roots)[:3]:
        yield much(root)


def _random(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> Iterator[list[Tensor]]:
    """Everything random; or floating-point numbers alone, for integers may be sizes that fit one another."""
    yield [_random_like(t, shape) for t, shape in zip(tensors, shapes, strict=True)]
    if not all(t.is_floating_point() for t in tensors):
        yield [
            _random_like(t, shape) if t.is_floating_point() else tiled(t, shape)
            for t, shape in zip(tensors, shapes, strict=True)
        ]


def _random_like(tensor: Tensor, shape: Sequence[int]) -> Tensor:
    """Fresh values like the given ones, tiled or cut to ``shape``: each changed by about a tenth where floating point
    (so that what was a projection matrix still is one), drawn from among them for anything else."""
    tensor = tiled(tensor, shape)
    if not tensor.numel():
        return tensor
    if not tensor.is_floating_point():  # indices and masks stay valid
        return tensor.flatten()[torch.randint(tensor.numel(), tensor.shape, device=tensor.device)]
    noise = torch.randn(tensor.shape, dtype=torch.float64, device=tensor.device)
    # Zeros alone say nothing: any values will do.
    return (tensor.double() * (1 + 0.1 * noise) if tensor.any() else noise).to(tensor.dtype)
