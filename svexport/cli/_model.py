"""Loads the model that a command line names and the arguments of its forward, for several commands."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import inspect
import os
import re
import sys
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from svexport.cli import _ahead
from svexport.errors import ExportError

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["add_arguments", "add_model", "batches", "checks", "load", "load_file", "load_model"]

DTYPES = ("float32", "float16", "bfloat16", "float64", "int8", "int16", "int32", "int64", "uint8", "bool")


@dataclass(frozen=True)
class InputSpec:
    """A random input, given as ``name=1x3x224x224:dtype``."""

    name: str
    shape: tuple[int, ...]
    dtype: str


def add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        metavar="MODEL",
        type=_model_spec,
        help="package.module:callable or path/to/file.py:callable; an nn.Module, or a callable that returns one",
    )
    parser.add_argument(
        "--weights", metavar="FILE", help="checkpoint to load into the model: a state_dict, alone or under a usual key"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of random weights and inputs (default: 0)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options for the model and the arguments of its ``forward``."""
    add_model(parser)
    parser.add_argument(
        "--input",
        metavar="NAME=1x3x224x224[:DTYPE]",
        action="append",
        default=[],
        type=_input_spec,
        help="a random argument of forward, by parameter name (NAME_0, NAME_1 for a list); may be repeated",
    )
    parser.add_argument(
        "--inputs", metavar="FILE", help=".npz or .pt with the arguments of forward; default: model.example_inputs"
    )


def checks(options: argparse.Namespace) -> list[Callable[[], None]]:
    """Checks to run before the model is loaded: the named files exist."""
    source, _ = options.model
    named = (source if source.endswith(".py") else None, options.weights, vars(options).get("inputs"))
    return [_ahead.existing(path) for path in named]


def load(options: argparse.Namespace) -> tuple[nn.Module, Any]:
    """Loads the model and the arguments of its forward: those on the command line, else the model's own.

    Raises:
        ExportError: if something could not be found or read; the message names it.
    """
    import torch

    model = load_model(options)
    given = None if options.inputs is None else _read_inputs(Path(options.inputs))
    if options.input:
        if not (given is None or isinstance(given, Mapping)):
            raise ExportError(
                f"--input adds to arguments by name, but {options.inputs} holds a {type(given).__name__}; "
                "save a dict by parameter name, or give all of them in the file"
            )
        named = Counter(spec.name for spec in options.input)
        if twice := [name for name, count in named.items() if count > 1]:
            raise ExportError(
                f"--input gives {', '.join(twice)} more than once; for a list, name its items NAME_0, NAME_1"
            )
        generator = torch.Generator().manual_seed(options.seed)
        given = {**(given or {}), **{spec.name: _random(spec, generator) for spec in options.input}}
    if isinstance(given, Mapping):
        given = _by_parameter(given, model)
        parameters = inspect.signature(model.forward).parameters
        unknown = given.keys() - parameters.keys()
        # A file of inputs may hold the one dict that forward takes; names on a command line are always parameters.
        if unknown and options.input and all(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters.values()):
            raise ExportError(
                f"{type(model).__name__}.forward has no parameter {', '.join(sorted(unknown))}; "
                f"it has {', '.join(parameters)}"
            )
    return model, _own_inputs(model) if given is None else given


def load_model(options: argparse.Namespace) -> nn.Module:
    """Loads only the model, with its weights.

    Raises:
        ExportError: if something could not be found or read; the message names it.
    """
    source, name = options.model
    model = _load_model(source, name, options.seed)
    if options.weights is not None:
        _load_weights(model, Path(options.weights))
    return model


def batches(given: Sequence[str], model: nn.Module) -> Iterable[Any]:
    """The arguments of successive calls of ``forward``: one file per call, or the name of one iterable in Python.

    Raises:
        ExportError: if something could not be found or read; the message names it.
    """
    if all(text.endswith((".npz", ".pt", ".pth")) for text in given):
        return _of_files([Path(text) for text in given], model)
    if len(given) > 1:
        raise ExportError(f"expected .npz or .pt files, or one package.module:name, got {' '.join(given)}")
    try:
        source, name = _model_spec(given[0])
    except argparse.ArgumentTypeError:
        raise ExportError(
            f"expected .npz or .pt files, or package.module:name of a DataLoader, got {given[0]!r}"
        ) from None
    found = _named(source, name)
    if not isinstance(found, Iterable) and callable(found):
        with _blaming(f"calling {given[0]}()"):
            found = found()
    if not isinstance(found, Iterable):
        raise ExportError(
            f"{given[0]} is a {type(found).__name__}; expected an iterable of batches, or a callable that returns one"
        )
    return found


def _of_files(paths: Sequence[Path], model: nn.Module) -> Iterator[Any]:
    for path in paths:
        one = _read_inputs(path)
        yield _by_parameter(one, model) if isinstance(one, Mapping) else one


def load_file(path: Path) -> ModuleType:
    """Imports a Python file as ``python path`` would: modules in its folder are importable."""
    if not path.is_file():
        raise ExportError(f"no such file: {path}")
    folder = str(path.parent.resolve())
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"svexport_file_{path.stem}"  # the prefix keeps it apart from a library of the same name
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None  # because the file ends in .py
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and torch.jit look up their module there
    with _blaming(f"importing {path}"):
        spec.loader.exec_module(module)
    return module


def _model_spec(text: str) -> tuple[str, str]:
    source, _, name = text.rpartition(":")
    is_module = all(part.isidentifier() for part in source.split("."))
    if not (source.endswith(".py") or is_module) or not all(part.isidentifier() for part in name.split(".")):
        raise argparse.ArgumentTypeError(
            f"expected package.module:callable or path/to/file.py:callable, got {text!r}; "
            "for example models/resnet.py:ResNet"
        )
    return source, name


def _input_spec(text: str) -> InputSpec:
    match = re.fullmatch(r"(?P<name>[^\W\d]\w*)=(?P<shape>\d+(x\d+)*)(:(?P<dtype>\w+))?", text)
    if match is None:
        raise argparse.ArgumentTypeError(
            f"expected NAME=SHAPE or NAME=SHAPE:DTYPE, sizes joined by x, got {text!r}; "
            "for example image=1x3x224x224 or ids=1x77:int64"
        )
    dtype = match["dtype"] or "float32"
    if dtype not in DTYPES:
        raise argparse.ArgumentTypeError(f"expected a dtype of {', '.join(DTYPES)}, got {dtype!r} in {text!r}")
    return InputSpec(match["name"], tuple(map(int, match["shape"].split("x"))), dtype)


def _named(source: str, name: str) -> Any:
    found: Any = load_file(Path(source)) if source.endswith(".py") else _import(source)
    for part in name.split("."):
        if not hasattr(found, part):
            raise ExportError(f"{source} has no {name!r}; it has {', '.join(_candidates(found)) or 'no models'}")
        found = getattr(found, part)
    return found


def _load_model(source: str, name: str, seed: int) -> nn.Module:
    import torch
    from torch import nn

    torch.manual_seed(seed)  # gives a model without a checkpoint the same weights in every command
    found = _named(source, name)
    if isinstance(found, nn.Module):
        return found
    what = f"{source}:{name}"
    if not callable(found):
        raise ExportError(f"{what} is a {type(found).__name__}; expected an nn.Module, or a callable that returns one")
    try:
        inspect.signature(found).bind()
    except TypeError as error:
        raise ExportError(
            f"{what}{inspect.signature(found)} is called without arguments, which fails: {error}; "
            "write a function without parameters that returns the model, and name that"
        ) from error
    except ValueError:
        pass  # a builtin without a signature
    with _blaming(f"calling {what}()"):
        torch.manual_seed(seed)  # seeds again: the import may have drawn numbers, or happened earlier
        model = found()
    if not isinstance(model, nn.Module):
        raise ExportError(f"{what}() returned a {type(model).__name__}; expected an nn.Module")
    return model


def _candidates(module: Any) -> list[str]:
    """Names of a module or class that the user may have meant: the public callables it defines itself."""
    own = getattr(module, "__name__", None)
    return [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == own
    ]


def _import(name: str) -> ModuleType:
    if "" not in sys.path and os.getcwd() not in sys.path:  # `python -m` adds the folder, a console script does not
        sys.path.insert(0, os.getcwd())
    try:
        with _blaming(f"importing {name}"):
            return importlib.import_module(name)
    except ExportError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise ExportError(
                f"no module named {cause.name!r}, neither installed nor in {os.getcwd()}; "
                "run from the folder that holds the package, or name the file: path/to/file.py:callable"
            ) from cause
        raise


@contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Turns errors of the user's code into an ExportError that names the line they come from."""
    try:
        yield
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        exited = ': the file runs a program when imported; guard it with `if __name__ == "__main__"`'
        raise ExportError(
            f"{what} raised {type(error).__name__}: {error} ({frame.filename}:{frame.lineno})"
            + (exited if isinstance(error, SystemExit) else "; --verbose shows the traceback")
        ) from error


def _load_weights(model: nn.Module, path: Path) -> None:
    state = _torch_load(path)
    for key in ("state_dict", "model_state_dict", "model"):
        if isinstance(state, Mapping) and isinstance(state.get(key), Mapping):
            state = state[key]
            break
    if not isinstance(state, Mapping):
        raise ExportError(f"expected a state_dict in {path}, got a {type(state).__name__}")
    if state and all(str(key).startswith("module.") for key in state):  # saved from DistributedDataParallel
        state = {key.removeprefix("module."): value for key, value in state.items()}
    try:
        model.load_state_dict(state)
    except (RuntimeError, AttributeError) as error:
        raise ExportError(f"{path} does not fit the model: {error}") from error


def _read_inputs(path: Path) -> Any:
    if path.suffix in (".pt", ".pth"):
        return _torch_load(path)
    if path.suffix != ".npz":
        raise ExportError(
            f"expected a .npz or .pt file of inputs, got {path}; save one with "
            "numpy.savez(file, name=array) or torch.save({'name': tensor}, file)"
        )
    import numpy as np
    import torch

    if not path.is_file():
        raise ExportError(f"no such file: {path}")
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    except Exception as error:
        raise ExportError(f"{path} cannot be read as .npz of plain arrays: {error}") from error


def _torch_load(path: Path) -> Any:
    import torch

    if not path.is_file():
        raise ExportError(f"no such file: {path}")
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        first = (str(error) or type(error).__name__).splitlines()[0]  # the error of an empty file has no message
        raise ExportError(
            f"{path} cannot be read as tensors saved by torch.save: {first}\n"
            "  Only tensors in dicts, lists and tuples are read, because other objects could run code; "
            "save such: torch.save(model.state_dict(), file)"
        ) from error


def _random(spec: InputSpec, generator: Any) -> Tensor:
    import torch

    dtype = getattr(torch, spec.dtype)
    if dtype.is_floating_point:
        return torch.randn(spec.shape, generator=generator).to(dtype)
    return torch.randint(2, spec.shape, generator=generator).to(dtype)  # 0 and 1 are valid for nearly any index


def _own_inputs(model: nn.Module) -> Any:
    from svexport.tracing.arguments import given_arguments

    try:
        positional, keywords = given_arguments(model, None)
    except ExportError as error:
        raise ExportError(
            f"{type(model).__name__} came without inputs; give them, --input NAME=1x3x224x224 for random ones or "
            "--inputs FILE.npz, or set model.example_inputs = (images,)"
        ) from error
    return (*positional, keywords) if keywords else positional


def _by_parameter(given: Mapping[str, Any], model: nn.Module) -> dict[str, Any]:
    """Arguments by name; ``features_0``, ``features_1`` (names in exported files) become the list ``features``."""
    parameters = inspect.signature(model.forward).parameters
    arguments: dict[str, Any] = {}
    lists: dict[str, dict[int, Any]] = {}
    for name, value in given.items():
        match = re.fullmatch(r"(.+)_(\d+)", str(name))
        if match is not None and name not in parameters and match[1] in parameters:
            lists.setdefault(match[1], {})[int(match[2])] = value
        else:
            arguments[name] = value
    for name, items in lists.items():
        if sorted(items) != list(range(len(items))):
            raise ExportError(f"the list {name} needs {name}_0 to {name}_{max(items)}, got {sorted(items)}")
        arguments[name] = [items[i] for i in range(len(items))]
    return arguments
