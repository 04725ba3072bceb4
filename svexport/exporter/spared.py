"""Skips work of torch's tracers and exporters that repeats itself or has no effect."""

from __future__ import annotations

import functools
import sys
import traceback
import typing
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType, FunctionType
from typing import Any

import onnx
import onnx_ir as ir
import torch
from torch import fx
from torch.fx import proxy

from svexport.tracing.swapped import swapped

__all__ = ["rules_where_they_may_match", "spared"]


@contextmanager
def spared() -> Iterator[None]:
    """Applies all of these savings while a model is traced and converted; the result is the same."""
    with (
        _signatures_read_once(),
        _own_signatures_read_once(),
        _tables_made_once(),
        _protocols_read_once(),
        _code_when_run(),
        _frames_described_once(),
        _types_inferred_where_missing(),
    ):
        yield


@contextmanager
def _signatures_read_once() -> Iterator[None]:
    """Caches the signatures of ONNX's own operators, which onnxscript would read again for each node."""
    if not hasattr(ir, "schemas"):  # older versions read none
        yield
        return
    signature = ir.schemas.OpSignature
    own = signature.__dict__["from_op_schema"]
    kept: dict[tuple[str, int], Any] = {}

    def from_op_schema(cls: Any, schema: onnx.defs.OpSchema) -> Any:
        read = functools.partial(own.__get__(None, cls), schema)
        if schema.domain or cls is not signature:
            return read()
        key = schema.name, schema.since_version
        if key not in kept:
            kept[key] = read()
        return kept[key]

    with swapped(signature, from_op_schema=classmethod(from_op_schema)):
        yield


@contextmanager
def _own_signatures_read_once() -> Iterator[None]:
    """Caches the signatures of our conversions, which are made anew, from the same code, for each export."""
    from torch.onnx._internal.exporter import _schemas

    own = getattr(_schemas, "op_signature_from_function", None)
    if own is None:  # an older torch
        yield
        return

    def op_signature_from_function(function: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(function, FunctionType) or not function.__module__.startswith("svexport."):
            return own(function, *args, **options)
        defaults = repr((function.__defaults__, function.__kwdefaults__))
        key = function.__code__, defaults, args, tuple(options.items())
        if key not in _own_signatures:
            _own_signatures[key] = own(function, *args, **options)
        return _own_signatures[key]

    with swapped(_schemas, op_signature_from_function=op_signature_from_function):
        yield


_own_signatures: dict[Any, Any] = {}


@contextmanager
def _tables_made_once() -> Iterator[None]:
    """Caches the table of decompositions until torch's decompositions, its functions, or the exporter's own
    change."""
    from torch.onnx._internal.exporter import _decomp

    own = _decomp.create_onnx_friendly_decomposition_table

    def table(known: Any) -> dict[Any, Callable[..., Any]]:
        decompositions = torch._decomp.decomposition_table
        key = len(torch._C._dispatch_get_all_op_names()), len(decompositions), frozenset(known)
        if key not in _tables:
            _tables.clear()
            _tables[key] = own(known)
        return dict(_tables[key])

    with swapped(_decomp, create_onnx_friendly_decomposition_table=table):
        yield


_tables: dict[Any, dict[Any, Callable[..., Any]]] = {}


@contextmanager
def _protocols_read_once() -> Iterator[None]:
    """Caches the members of protocols, as Python 3.12 does; earlier, each ``isinstance`` collects them anew."""
    if sys.version_info >= (3, 12):
        yield
        return
    with swapped(typing, _get_protocol_attrs=functools.cache(typing._get_protocol_attrs)):  # type: ignore[attr-defined]
        yield


@contextmanager
def _types_inferred_where_missing() -> Iterator[None]:
    """Skips type inference for results whose types, with static sizes, are known; onnxscript would infer them again and
    merge both."""
    from onnxscript.optimizer._constant_folding import FoldConstantsPass

    own = FoldConstantsPass._do_inference

    def known(value: ir.Value) -> bool:
        return value.type is not None and value.shape is not None and value.shape.is_static()

    def infer(self: Any, node: ir.Node) -> None:
        if not all(map(known, node.outputs)):
            own(self, node)

    with swapped(FoldConstantsPass, _do_inference=infer):
        yield


@contextmanager
def rules_where_they_may_match() -> Iterator[None]:
    """Tries onnxscript's rules only on nodes whose type, and whose inputs' types, fit the pattern. The optimizer would
    try each rule on every node, which takes most of its time."""
    from onnxscript.rewriter import _pattern_ir
    from onnxscript.rewriter._rewrite_rule import RewriteRule

    own = RewriteRule.try_rewrite

    def may_match(pattern: Any, node: Any) -> bool:
        last = pattern.op_identifier()
        if last is not None and last[1] != node.op_type:
            return False
        if len(node.inputs) > len(pattern.inputs) and not pattern.allow_other_inputs:
            return False
        for index, wanted in enumerate(pattern.inputs):
            value = node.inputs[index] if index < len(node.inputs) else None
            if isinstance(wanted, _pattern_ir.NodeOutputPattern):
                made = None if value is None else value.producer()
                if made is None or not may_match(wanted.producer(), made):
                    return False
            elif isinstance(wanted, _pattern_ir.Constant) and (value is None or value.const_value is None):
                return False
        return True

    kinds: dict[Any, str | None] = {}  # of each rule's last node: most nodes are of another type than most rules

    def try_rewrite(self: Any, model: Any, graph: Any, node: Any, **options: Any) -> Any:
        last = self._target_pattern.output_nodes[0]
        if self not in kinds:
            identifier = last.op_identifier()
            kinds[self] = None if identifier is None else identifier[1]
        if kinds[self] not in (None, node.op_type) or not may_match(last, node):
            return None
        return own(self, model, graph, node, **options)

    with swapped(RewriteRule, try_rewrite=try_rewrite):
        yield


# ---------------------------------------------------------------- the code of graphs


class _Late:
    """An attribute that a graph module has only once its code is written."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: Any, cls: Any) -> Any:
        if module is None:
            raise AttributeError(self._name)
        if not isinstance(vars(cls).get("forward"), _Forward):  # no graph yet
            raise AttributeError(self._name)
        _recompile(module)
        if self._name not in vars(module):  # another torch version lacks it
            raise AttributeError(self._name)
        return vars(module)[self._name]


class _Forward:
    """Stands for a module's ``forward`` until it is read."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = weakref.ref(module)

    def __get__(self, module: Any, cls: Any) -> Any:
        _recompile(self._module())
        return (cls if module is None else module).forward  # replaced by recompiling


class _Code:
    """The result of ``recompile``, which is written when it is read."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        return getattr(_recompile(self._module), name)


_LATE = ("_code", "_lineno_map", "_prologue_start")

_recompile: Callable[[Any], Any] = fx.GraphModule.recompile


@contextmanager
def _code_when_run() -> Iterator[None]:
    """Writes the Python code of a graph only when it runs: torch.export writes the whole model's some twelve times, and
    runs none of it."""

    def recompile(self: fx.GraphModule) -> Any:
        codegen = self._graph._codegen
        if isinstance(codegen, fx.graph._PyTreeCodeGen):
            self._in_spec = codegen.pytree_info.in_spec
            self._out_spec = codegen.pytree_info.out_spec
        for name in _LATE:
            vars(self).pop(name, None)
        type(self).forward = _Forward(self)  # type: ignore[assignment,method-assign]
        if hasattr(self, "_recompile_submodules"):  # newer torch only
            self._recompile_submodules()
        return _Code(self)

    with swapped(fx.GraphModule, recompile=recompile, **{name: _Late(name) for name in _LATE}):
        yield


# ---------------------------------------------------------------- lines of nodes


class _Stack:
    """Python's stack from a frame outwards, with the interface of ``torch.utils._traceback.CapturedTraceback``."""

    def __init__(self, innermost: FrameType, known: dict[tuple[int, int], tuple[CodeType, traceback.FrameSummary]]):
        self._innermost, self._known = innermost, known

    def summary(self) -> traceback.StackSummary:
        known = self._known
        frames = traceback.StackSummary()
        frame: FrameType | None = self._innermost
        while frame is not None:
            code = frame.f_code
            key = id(code), frame.f_lasti  # hashing code is slow
            if key not in known:
                described = traceback.FrameSummary(code.co_filename, frame.f_lineno or 0, code.co_name)
                known[key] = code, described
            frames.append(known[key][1])
            frame = frame.f_back
        frames.reverse()
        return frames


@contextmanager
def _frames_described_once() -> Iterator[None]:
    """Caches frame summaries: each node gets Python's whole stack, nearly all of it the same as the node before."""
    known: dict[tuple[int, int], tuple[CodeType, traceback.FrameSummary]] = {}

    class Captured(proxy.CapturedTraceback):  # type: ignore[name-defined,misc]
        @staticmethod
        def extract(**options: Any) -> Any:
            if options:
                return proxy_own.extract(**options)
            return _Stack(sys._getframe(1), known)

    proxy_own = proxy.CapturedTraceback  # type: ignore[attr-defined]
    with swapped(proxy, CapturedTraceback=Captured):
        yield
