"""Flattens a model's arguments and results to tensors with stable names."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import re
import traceback
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from svexport.errors import ExportError, SvexportError, UnsupportedError
from svexport.tracing.record import recorded
from svexport.tracing.source import user_frame
from svexport.tracing.swapped import untraced

__all__ = [
    "MODEL_ATTRIBUTE",
    "FlatModel",
    "TracingStopped",
    "Types",
    "bind",
    "copied",
    "example_arguments",
    "given_arguments",
    "in_type",
    "unwrapped",
]

MODEL_ATTRIBUTE = "_svexport_model"
"""The attribute of :class:`FlatModel` that holds the user's model; names in the exported file lose this prefix."""

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)


def unwrapped(model: nn.Module) -> nn.Module:
    """The model inside wrappers of torch.compile, DataParallel or DistributedDataParallel."""
    while True:
        if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
            model = model.module
        elif _is_compiled(model):
            model = model.get_submodule("_orig_mod")
        else:
            return model


def _is_compiled(model: nn.Module) -> bool:
    return "_orig_mod" in model._modules and "forward" in vars(model)


def copied(model: nn.Module) -> nn.Module:
    """A deep copy.

    Raises:
        UnsupportedError: if the model cannot be copied.
    """
    # deepcopy refuses tensors with a grad_fn, such as the weight that torch.nn.utils.weight_norm leaves in a module, or
    # the output of the last forward.
    computed = (t for m in model.modules() for t in vars(m).values() if isinstance(t, Tensor) and t.grad_fn is not None)
    memo: dict[int, Any] = {id(tensor): tensor.detach().clone() for tensor in computed}
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedError(
            f"{type(model).__name__} cannot be copied: copy.deepcopy raised {type(error).__name__}: {error}. "
            "Remove the attributes that cannot be copied"
        ) from error


def in_type(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with floating-point tensors converted; complex ones stay: ``to`` would drop their imaginary part."""
    return copied(model)._apply(lambda t: t.to(dtype) if t.is_floating_point() else t)


def example_arguments(model: nn.Module, args: Any) -> tuple[Any, dict[str, Any]] | None:
    """Positional and keyword arguments to call a model with: those given, its own examples, or the last recorded."""
    if args is not None:
        return args, {}
    for attribute in ("example_inputs", "example_input_array"):  # ours, Lightning's
        found = getattr(model, attribute, None)
        if found is not None:
            return found() if callable(found) else found, {}
    return recorded(model)


def given_arguments(model: nn.Module, args: Any) -> tuple[Any, dict[str, Any]]:
    """:func:`example_arguments` of the model, or else of the model inside its wrappers.

    Raises:
        ExportError: if there are none.
    """
    found = example_arguments(model, args) or example_arguments(unwrapped(model), args)
    if found is None:
        raise ExportError(
            f"{type(model).__name__} came without arguments to call it with. Give them, "
            "svexport.export(model, (images,)), or set model.example_inputs = (images,), or run one forward under "
            "svexport.record: `with svexport.record(model): model(images)`"
        )
    return found


def bind(model: nn.Module, args: Any, kwargs: Mapping[str, Any] | None = None) -> inspect.BoundArguments:
    """Arguments bound to the parameters of the model's ``forward``.

    Args:
        model: the model to be called.
        args: a tuple of positional arguments (a last dict of parameter names is taken as keywords, as torch.onnx does),
            a dict of keyword arguments, or a single argument.
        kwargs: further keyword arguments.

    Raises:
        ExportError: if they do not fit the signature.
    """
    signature = _signature(model)
    names = list(signature.parameters)
    keywords = dict(kwargs or {})
    positional = args if isinstance(args, tuple) else (args,)
    last = positional[-1] if positional else None
    unbound = set(names[len(positional) - 1 :])
    if isinstance(last, dict) and last and unbound.issuperset(last):
        positional, keywords = positional[:-1], {**last, **keywords}
    try:
        return signature.bind(*positional, **keywords)
    except TypeError as error:
        given = [_describe(a) for a in positional] + [f"{k}={_describe(v)}" for k, v in keywords.items()]
        raise ExportError(
            f"the arguments do not fit {type(model).__name__}.forward{signature}: {error}.\n"
            f"Got ({', '.join(given)}). Give a tuple with one entry per parameter, or a dict by parameter name"
        ) from error


def _signature(model: nn.Module) -> inspect.Signature:
    if not isinstance(model, torch.jit.ScriptModule):
        return inspect.signature(model.forward)
    parameters = []
    script: Any = model.forward
    for argument in script.schema.arguments[1:]:  # without self
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        parameters.append(inspect.Parameter(argument.name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default))
    return inspect.Signature(parameters)


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__} of {len(value)}"
    return type(value).__name__


def leaves(
    value: Any, path: tuple[str, ...] = (), seen: set[int] | None = None
) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Every leaf of nested dicts, lists, tuples, named tuples and dataclasses, with the keys that lead to it.

    Another object (such as the key-value cache of a language model) gives the tensors among its attributes, once per
    object (``seen`` holds their ids), or the object itself if it has none.
    """
    seen = set() if seen is None else seen
    items: Iterable[tuple[str, Any]]
    if isinstance(value, Mapping):
        items = ((str(k), v) for k, v in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        items = zip(value._fields, value, strict=True)
    elif isinstance(value, (list, tuple)):
        items = ((str(i), v) for i, v in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        items = ((f.name, getattr(value, f.name)) for f in dataclasses.fields(value))
    elif _has_attributes(value):
        if id(value) in seen:
            return
        seen.add(id(value))
        inner = [leaf for key, item in vars(value).items() for leaf in leaves(item, (*path, key), seen)]
        yield from [leaf for leaf in inner if isinstance(leaf[1], Tensor)] or [(path, value)]
        return
    else:
        yield path, value
        return
    for key, item in items:
        yield from leaves(item, (*path, key), seen)


def _has_attributes(value: Any) -> bool:
    """Whether an object may hold tensors: it is not a tensor, module, class, function or number of torch.export."""
    return hasattr(value, "__dict__") and not callable(value) and not isinstance(value, (Tensor, ModuleType, *_NUMBERS))


def rebuild(value: Any, replace: Callable[[Tensor], Tensor], copies: dict[int, Any] | None = None) -> Any:
    """The same structure with every tensor replaced, in the order of :func:`leaves`; ``copies`` holds objects by id."""
    copies = {} if copies is None else copies
    if isinstance(value, Tensor):
        return replace(value)
    if isinstance(value, Mapping):
        items = {k: rebuild(v, replace, copies) for k, v in value.items()}
        if isinstance(value, defaultdict):
            return type(value)(value.default_factory, items)
        return items if type(value) is dict else type(value)(items)  # type: ignore[call-arg]
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(rebuild(v, replace, copies) for v in value))
    if isinstance(value, (list, tuple)):
        return type(value)(rebuild(v, replace, copies) for v in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: rebuild(getattr(value, f.name), replace, copies) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    if _has_attributes(value) and any(isinstance(leaf, Tensor) for _, leaf in leaves(value)):
        if id(value) not in copies:
            copies[id(value)] = new = copy.copy(value)
            vars(new).update({k: rebuild(v, replace, copies) for k, v in vars(value).items()})
        return copies[id(value)]
    return value


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Eval mode without calling train()/eval(), which models override; each module gets its own flag back.

    torch.compile is disabled, because its code cannot be traced.

    torch.nn's attention layers compute as in training. Their fast path is one opaque function that ignores the values
    of non-boolean masks and puts zeros at padded positions. Also, a file should use the mask it is given, not a causal
    one because the mask looked causal when it was traced.
    """
    before = [
        (module, module.training, vars(module).get("_compiled_call_impl"), vars(module).get("forward"))
        for module in model.modules()
    ]
    fast_path = torch.backends.mha.get_fastpath_enabled()
    detect = nn.modules.transformer._detect_is_causal_mask
    try:
        for module, _, compiled, forward in before:
            module.training = False
            if compiled is not None:
                module._compiled_call_impl = None
            if forward is not None and _is_compiled(module):
                module.forward = module.get_submodule("_orig_mod").__call__
        torch.backends.mha.set_fastpath_enabled(False)
        nn.modules.transformer._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
        yield
    finally:
        nn.modules.transformer._detect_is_causal_mask = detect
        torch.backends.mha.set_fastpath_enabled(fast_path)
        for module, training, compiled, forward in before:
            module.training = training
            if compiled is not None:
                module._compiled_call_impl = compiled
            if forward is not None and _is_compiled(module):
                module.forward = forward


class _Results:
    """Results of a forward, kept outside the module because torch.export undoes assignments to it."""

    names: list[str] = []  # noqa: RUF012 - replaced, never mutated
    dtypes: list[torch.dtype] = []  # noqa: RUF012 - as above
    keys: list[tuple[str, ...]] = []  # noqa: RUF012 - as above


class TracingStopped(RuntimeError):
    """An operator raised while it was traced, which ends the trace, although the forward continued."""


class Types(NamedTuple):
    """The types that a model computes in, if they differ from those of its arguments.

    Attributes:
        dtype: if given, floating-point inputs are cast to it on entry.
        single: positions, among the tensors of the arguments, of inputs that the mode also gets in float32, besides
            the cast ones that forward sees.
        mode: if given, makes a new mode for each forward of the model to run in; not used in float64.
    """

    dtype: torch.dtype | None = None
    single: Collection[int] = ()
    mode: Callable[[nn.Module, Sequence[tuple[Tensor, Tensor]]], AbstractContextManager[Any]] | None = None


OWN_TYPES = Types()


class FlatModel(nn.Module):
    """The user's model as ``forward(*tensors) -> tuple of tensors``, the form that both exporters trace.

    Non-tensor arguments are constants of the file; numbers among the results are left out.

    Args:
        model: the user's model, which is not changed.
        bound: its arguments, from :func:`bind`.
        freeze: parameters of forward, or names of inputs, whose tensors become constants.
        types: the types that it computes in.

    Attributes:
        tensors: the tensors among the arguments, in order.
        input_names: a name for each of them, from the parameter names: ``image``, ``features_0``.
        output_names: names of the results, from dict keys and positions: ``boxes``, ``output_1``; filled by a forward.
        output_dtypes: dtypes of the results, likewise.
        frozen: descriptions of the constants, by name.

    Raises:
        ExportError: if ``freeze`` names something that is not an input.
    """

    def __init__(
        self,
        model: nn.Module,
        bound: inspect.BoundArguments,
        freeze: Collection[str] = (),
        types: Types = OWN_TYPES,
    ) -> None:
        super().__init__()
        self.add_module(MODEL_ATTRIBUTE, model)
        self._types = types
        self.training = model.training
        self._bound = bound
        self._precise = False
        self._modes: Sequence[TorchFunctionMode] = ()
        parameters = bound.signature.parameters
        self.input_paths: list[tuple[str, ...]] = []
        self.tensors: list[Tensor] = []
        self.frozen: dict[str, str] = {}
        self._constants: list[Tensor | None] = []  # of each tensor among the arguments; None of inputs
        found, paths = [], []
        for path, leaf in leaves(dict(bound.arguments)):
            if isinstance(leaf, Tensor):
                keywords = parameters[path[0]].kind is inspect.Parameter.VAR_KEYWORD
                paths.append(path[1:] if keywords else path)
                found.append(leaf)
        names = unique("_".join(path) for path in paths)
        for name, path, tensor in zip(names, paths, found, strict=True):
            constant = name in freeze or path[0] in freeze
            self._constants.append(tensor.detach().clone() if constant else None)
            if constant:
                self.frozen[name] = _values(tensor)
            else:
                self.input_paths.append(path)
                self.tensors.append(tensor)
        if unknown := set(freeze) - {*names, *(path[0] for path in paths)}:
            raise ExportError(f"freeze names {sorted(unknown)}; the inputs are {', '.join(names)}")
        self.input_names = unique("_".join(path) for path in self.input_paths)
        self._results = _Results()

    @property
    def taken_for_one(self) -> str:
        """A hint for a dict or list that became one argument, although its items may have been meant as arguments."""
        given = list(self._bound.arguments.items())
        if len(given) != 1 or not isinstance(given[0][1], (dict, list)):
            return ""
        (name, value), *_ = given
        if isinstance(value, list):
            return f"\n  the list was given to forward as its argument {name}; to give several arguments, use a tuple"
        keys, parameters = ", ".join(map(str, value)), ", ".join(self._bound.signature.parameters)
        return (
            f"\n  the dict with {keys} was given to forward as its argument {name}; to give arguments by name, use the "
            f"names of forward's parameters: {parameters}"
        )

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Dtypes of the parameters, or of the inputs if the model has no parameters."""
        return {p.dtype for p in self.parameters()} or {t.dtype for t in self.tensors}

    @property
    def output_names(self) -> list[str]:
        """Names from the keys and positions of the result; empty before the first run."""
        return self._results.names

    @property
    def output_keys(self) -> list[tuple[str, ...]]:
        """Keys and positions of each result in the dict that the model returned; empty if it returned no dict."""
        return self._results.keys

    @property
    def output_dtypes(self) -> list[torch.dtype]:
        """Dtypes of the last run's results."""
        return self._results.dtypes

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Calls the model with the given tensors in place of the arguments' own; returns the tensors of the result."""
        if torch.compiler.is_dynamo_compiling():  # dynamo does not trace modes
            if self._types.mode is not None:
                raise TracingStopped("dynamo does not trace mixed precision")
            return self._forward(tensors)
        with ExitStack() as stack:
            for mode in self._modes:
                stack.enter_context(mode)
            return self._forward(tensors)

    def _forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        tracing = torch.jit.is_tracing()
        result = self._call(tensors)
        if tracing and not torch.jit.is_tracing():
            raise TracingStopped("forward caught the error of an operator, which had stopped the tracer")
        results = [(path, leaf) for path, leaf in leaves(result) if leaf is not None]
        if tracing and any(isinstance(leaf, Tensor) and not leaf.dim() for _, leaf in results):
            with untraced():  # the tracer makes tensors of sizes, which a model may return
                numbers = {
                    path
                    for path, leaf in leaves(self._call([t.detach().clone() for t in tensors]))
                    if isinstance(leaf, (int, float))
                }
            results = [(path, leaf) for path, leaf in results if path not in numbers]
        names: list[str] = []
        outputs: list[Tensor] = []
        for path, leaf in results:
            if isinstance(leaf, Tensor):
                if leaf.dtype.is_complex and (tracing or self._modes):
                    raise ExportError(
                        f"{type(getattr(self, MODEL_ATTRIBUTE)).__name__} returned a "
                        f"{str(leaf.dtype).removeprefix('torch.')} tensor{' at ' + '.'.join(path) if path else ''}, "
                        "which ONNX does not compute with; return torch.view_as_real of it"
                    )
                positional = not path or path[0].isdigit()
                names.append("_".join(("output", *path) if positional else path) or "output")
                outputs.append(leaf)
            elif not isinstance(leaf, (bool, int, float, str, *_NUMBERS)):
                raise ExportError(
                    f"{type(getattr(self, MODEL_ATTRIBUTE)).__name__} returned a {type(leaf).__name__}"
                    f"{' at ' + '.'.join(path) if path else ''}; "
                    "expected tensors in dicts, lists, tuples, dataclasses or attributes"
                )
        if not outputs:
            raise ExportError(
                f"{type(getattr(self, MODEL_ATTRIBUTE)).__name__} returned {_describe(result)} without any tensor; "
                "expected at least one tensor, alone or in dicts, lists, tuples, dataclasses or attributes"
            )
        self._results.names = unique(names, taken=self.input_names)
        kept = [path for path, leaf in results if isinstance(leaf, Tensor)]
        self._results.keys = kept if isinstance(result, Mapping) else []
        self._results.dtypes = [output.dtype for output in outputs]
        return tuple(outputs)

    @contextmanager
    def traced_in(self, *modes: TorchFunctionMode) -> Iterator[None]:
        """Makes forward run inside these modes, but not the exporters' code around it; the last mode acts first."""
        self._modes = modes
        try:
            yield
        finally:
            self._modes = ()

    def double(self) -> FlatModel:
        """Switches to float64; inputs are first rounded to ``dtype``."""
        self._precise = True
        return super().double()

    def _call(self, tensors: Iterable[Tensor]) -> Any:
        rest, constants, types = iter(tensors), enumerate(self._constants), self._types
        beside: list[tuple[Tensor, Tensor]] = []

        def take(_: Tensor) -> Tensor:
            place, constant = next(constants)
            tensor = next(rest) if constant is None else constant.clone()
            if types.dtype is None or not tensor.is_floating_point():
                return tensor
            if place in types.single and self._precise:
                return tensor.double()
            shown = tensor.to(types.dtype)
            if place in types.single:
                beside.append((shown, tensor.float()))
            return shown.double() if self._precise else shown

        arguments = rebuild(dict(self._bound.arguments), take)
        call = inspect.BoundArguments(self._bound.signature, arguments)  # type: ignore[arg-type]
        model = getattr(self, MODEL_ATTRIBUTE)
        with nullcontext() if types.mode is None or self._precise else types.mode(model, beside):
            return model(*call.args, **call.kwargs)


def _values(tensor: Tensor) -> str:
    values = ", ".join(f"{v:.6g}" if isinstance(v, float) else str(v) for v in tensor.detach().flatten()[:16].tolist())
    return f"{_describe(tensor)} [{values}{', ...' if tensor.numel() > 16 else ''}]"


def own_failure(model: nn.Module, tensors: Sequence[Tensor]) -> ExportError | None:
    """The error of a forward that fails without any exporter, with the user's line; or an error about packed sequences,
    which the exporters' own errors do not name."""
    packed: list[str] = []

    def look(name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
        if args and isinstance(args[0], nn.utils.rnn.PackedSequence):
            packed.append(name.replace(MODEL_ATTRIBUTE, "model", 1))

    recurrent = [(name, m) for name, m in model.named_modules() if isinstance(m, nn.RNNBase)]
    hooks = [m.register_forward_pre_hook(functools.partial(look, name)) for name, m in recurrent]
    try:
        model(*(t.clone() for t in tensors))
    except Exception as own:  # noqa: BLE001 - the user's code may raise anything
        return _failed(own, "these arguments", getattr(model, "taken_for_one", ""))
    finally:
        for hook in hooks:
            hook.remove()
    if packed:
        return ExportError(
            f"{packed[0]} is given a packed sequence, whose sizes are values of tensors, and cannot be exported\n"
            "  pass the padded sequence, and take each row's last output, at lengths - 1, by torch.gather (with one "
            "direction that is the last state); or, with opset=17 or less, use only the output, by "
            "pad_packed_sequence"
        )
    return None


def called(model: nn.Module, bound: inspect.BoundArguments, what: str) -> Any:
    """Calls the model with arguments bound by :func:`bind`, and returns its result.

    Args:
        what: the arguments in words, for the error: ``"batch 3"``.

    Raises:
        ExportError: if ``forward`` fails, with its line.
    """
    try:
        return model(*bound.args, **bound.kwargs)
    except SvexportError:
        raise
    except Exception as own:
        given = ", ".join(f"{name} {_describe(value)}" for name, value in bound.arguments.items())
        raise _failed(own, f"{what} ({given})") from own


_NO_KERNEL = re.compile(r"(?:not implemented for|[Uu]nsupported|n't support) .*?\b(?:Complex)?(Half|BFloat16)\b")


def _failed(own: Exception, on: str, hint: str = "") -> ExportError:
    where = user_frame("".join(traceback.format_tb(own.__traceback__)))
    if half := _NO_KERNEL.search(str(own)):
        kind = {"Half": "torch.float16"}.get(half[1], "torch.bfloat16")
        hint += (
            "\n  torch has no such function in half precision here: export the float32 model with "
            f'dtype={kind}, keep="auto", which leaves it in float32'
        )
    return ExportError(
        f"the model itself fails on {on}: {type(own).__name__}: {own}" + (f"\n  at {where}" if where else "") + hint
    )


def unique(names: Iterable[str], taken: Sequence[str] = ()) -> list[str]:
    """The names, made valid and unique: a repeated one (or one in ``taken``) gets a number."""
    used = set(taken)
    result = []
    for name in names:
        candidate, count = name, 1
        while candidate in used:
            count += 1
            candidate = f"{name}_{count}"
        used.add(candidate)
        result.append(candidate)
    return result
