"""The definition of an op: one object from which everything else about it follows.

From an :class:`Op` come the torch operator (``torch.ops.svexport.<name>``: schema, fake, autograd), the ONNX node
(``svexport::Sv<Name>``: attributes by name and type) and the tests that hold all of them to the same reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from svexport.ops import _cuda

__all__ = ["DOMAIN", "OPS", "Argument", "Op", "autocast", "check_floating_point", "precise_dtype", "tracing"]

DOMAIN = "svexport"
OPS: dict[str, Op] = {}
"""Every op by name, filled as the files of ``svexport.ops`` are imported."""

_library = torch.library.Library(DOMAIN, "FRAGMENT")


def tracing() -> bool:
    """Whether the caller runs under torch.compile, torch.export or the TorchScript exporter.

    An op whose eager path is a plain torch composition (no dispatcher detour) must still appear as one operator in a
    trace.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export()


@dataclass(frozen=True)
class Argument:
    """One argument of an op's schema.

    Attributes:
        name: as in the torch schema; an attribute keeps this name on the ONNX node.
        kind: ``"tensor"``, ``"tensors"`` (a list), ``"int"``, ``"float"``, ``"ints"`` or ``"floats"``. A ``bool`` is an
            ``int``: TensorRT plugin fields know no other.
        optional: a ``Tensor?`` that may be absent.
        symbolic: a ``SymInt`` or ``SymInt[]``: sizes that the model may compute. Computed ones become inputs of the
            node, after its tensors, and the body gets them as tensors of shape (1,).
    """

    name: str
    kind: str
    optional: bool = False
    symbolic: bool = False

    @property
    def is_tensor(self) -> bool:
        return self.kind in ("tensor", "tensors")


# A torch string cannot be an attribute: TensorRT hands strings to plugins with their trailing NUL.
_KINDS = {
    "Tensor": "tensor",
    "Optional[Tensor]": "tensor",
    "List[Tensor]": "tensors",
    "int": "int",
    "bool": "int",
    "float": "float",
    "List[int]": "ints",
    "List[bool]": "ints",
    "List[float]": "floats",
}


@dataclass(frozen=True, eq=False)
class Op:
    """One operator, defined once.

    Args:
        name: snake_case, the same in every folder: ``grid_sample``.
        schema: torch schema without the name, ``"(Tensor input, Tensor grid, int mode) -> Tensor"``. Its tensors are
            the node's inputs, everything else its attributes.
        reference: the pure-torch definition, on any device and in float64 too. Its outputs never alias its inputs.
        samples: called with ``make(*shape) -> Tensor`` (random normal, of the dtype and device under test), yields
            argument tuples for the torch operator: the shapes every shared test runs on.
        implementation: a faster function with the same result as ``reference``, if torch has one; used for eager
            forward and backward.
        fake: output metadata; by default the reference itself, run on fake tensors.
        plugin: whether TensorRT runs the node as a plugin. If False, files carry the body in its place unless the node
            is requested (einsum, whose body is native MatMuls). A function, called with the attributes by name, says
            whether the plugin runs that node; every file carries the bodies of the nodes that it does not run.
        inline: whether every file carries the body in place of the node: for functions that need no plugin and that
            only the exporters at old opsets lack (unflatten, for example).
        weight_names: called with the attributes by name, returns state_dict names for the tensors of the schema's last
            list, the op's weights. They are the node's last inputs, or its attributes, with dots made underscores.
    """

    name: str
    schema: str
    reference: Callable[..., Any]
    samples: Callable[[Callable[..., Tensor]], Iterable[tuple[Any, ...]]]
    implementation: Callable[..., Any] | None = None
    fake: Callable[..., Any] | None = None
    plugin: bool | Callable[[Mapping[str, Any]], bool] = True
    inline: bool = False
    weight_names: Callable[[Mapping[str, Any]], list[str]] | None = None
    _parsed: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_parsed", torch._C.parse_schema(f"{DOMAIN}::{self.name}{self.schema}"))
        OPS[self.name] = self
        _register(self)
        _ = self.torch_op  # cached now: a first access under torch.compile would break its graph

    @property
    def node_type(self) -> str:
        """The ONNX op_type and TensorRT plugin name: ``SvGridSample``."""
        return "Sv" + "".join(part.capitalize() for part in self.name.split("_"))

    @cached_property
    def arguments(self) -> tuple[Argument, ...]:
        return tuple(
            Argument(
                a.name, _KINDS[str(a.type)], str(a.type).startswith("Optional"), a.real_type.str().startswith("SymInt")
            )
            for a in self._parsed.arguments
        )

    @property
    def attributes(self) -> tuple[Argument, ...]:
        """The arguments that become node attributes."""
        return tuple(a for a in self.arguments if not a.is_tensor)

    @cached_property
    def tensor_positions(self) -> tuple[tuple[int, bool], ...]:
        """The positions of the tensor arguments, and whether each is a list of tensors."""
        return tuple((i, a.kind == "tensors") for i, a in enumerate(self.arguments) if a.is_tensor)

    @property
    def has_plugin(self) -> bool:
        """Whether TensorRT has a plugin for nodes of this op, in C++ and in Python alike."""
        return bool(self.plugin) and not self.inline

    @property
    def num_outputs(self) -> int:
        return len(self._parsed.returns)

    @cached_property
    def torch_op(self) -> Any:
        """The torch operator overload, ``torch.ops.svexport.<name>.default``."""
        return getattr(getattr(torch.ops, DOMAIN), self.name).default

    def beyond_plugin(self, attributes: Mapping[str, Any]) -> bool:
        """Whether the op has a plugin that does not run a node with these attributes."""
        return callable(self.plugin) and not self.plugin(attributes)

    def bind(self, tensors: Sequence[Any], attributes: Mapping[str, Any]) -> list[Any]:
        """Turns a node's flat list of tensors and its attributes by name into arguments in schema order.

        Raises:
            ValueError: if the number of tensors is not that of the schema.
        """
        lists = [a.name for a in self.arguments if a.kind == "tensors"]
        weights = 0 if self.weight_names is None else len(self.weight_names(attributes))
        lengths = {lists.pop(): weights} if weights else {}
        fixed = sum(a.kind == "tensor" for a in self.arguments)
        required = fixed - sum(a.optional for a in self.arguments)
        given = len(tensors) - weights
        if given < required or (given > fixed and not lists):
            expected = f"{required if required == fixed else f'{required} to {fixed}'}{' or more' if lists else ''}"
            raise ValueError(f"expects {expected} inputs, got {given}")
        lengths |= dict.fromkeys(lists, given - fixed)
        rest = iter(tensors)
        return [
            attributes[a.name]
            if not a.is_tensor
            else [next(rest) for _ in range(lengths[a.name])]
            if a.kind == "tensors"
            else next(rest, None)
            for a in self.arguments
        ]

    def __call__(self, *args: Any) -> Any:
        return self.torch_op(*args)


def check_floating_point(op: str, what: str, tensor: Tensor) -> None:
    """Raises TypeError if ``tensor``, which the op calls ``what``, holds integers."""
    if not tensor.is_floating_point():
        raise TypeError(f"{op} expects a floating-point {what}, got {tensor.dtype}; convert it first")


def precise_dtype(tensor: Tensor) -> torch.dtype:
    """The dtype to compute in: at least float32 for floating point, its own dtype for integers."""
    return torch.promote_types(tensor.dtype, torch.float32) if tensor.is_floating_point() else tensor.dtype


def autocast(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Converts the tensors as autocast does for a matrix product, because autocast does not know our ops."""
    device = tensors[0].device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return [x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors]


def as_tuple(outputs: Any) -> tuple[Tensor, ...]:
    """An op's outputs as a tuple, also where there is only one."""
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


def _register(op: Op) -> None:
    """Registers forward, fake and autograd. The backward is a separate operator, derived from the reference."""
    forward = op.implementation or op.reference
    backward_name = f"{op.name}_backward"

    def or_kernel(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps ``function``: its first CUDA tensor loads the CUDA kernels, which then take over the dispatch key.

        The kernels call ``function`` for inputs that they do not support.
        """

        def run(*args: Any) -> Any:
            if not _cuda.tried() and any(t.is_cuda for t in _flat(args)) and _cuda.load() and name in _cuda.kernels():
                return getattr(getattr(torch.ops, DOMAIN), name)(*args)
            return function(*args)

        return run

    arguments = op.schema[op.schema.index("(") + 1 : op.schema.rindex(") ->")]

    _library.define(f"{op.name}{op.schema}", tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(op.name, or_kernel(op.name, forward), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{DOMAIN}::{op.name}", op.fake or op.reference, lib=_library)

    def backward_implementation(grads: Sequence[Tensor], *args: Any) -> list[Tensor]:
        args, needs = args[:-1], args[-1]
        # Under a TorchDispatchMode the autograd keys are already excluded, and autograd would record nothing.
        with (
            torch.enable_grad(),
            torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False),
        ):
            rest = iter(needs)
            tensors = [t if t is None else t.detach().requires_grad_(next(rest)) for t in _tensors(op, args)]
            wanted = [t for t in tensors if t is not None and t.requires_grad]
            # torch's faster implementations may have no deterministic backward on CUDA.
            function = op.reference if torch.are_deterministic_algorithms_enabled() else forward
            gradients = _vjp(function, _with_tensors(op, args, tensors), grads, wanted)
        # Clone each: the outputs of an operator must alias neither its inputs nor one another.
        return [g.clone(memory_format=torch.contiguous_format) for g in gradients]

    def backward_fake(grads: Sequence[Tensor], *args: Any) -> list[Tensor]:
        args, needs = args[:-1], args[-1]
        tensors = [t for t in _tensors(op, args) if t is not None]
        wanted = [t for t, need in zip(tensors, needs, strict=True) if need]
        return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in wanted]

    _library.define(f"{backward_name}(Tensor[] grads, {arguments}, bool[] needs_grad) -> Tensor[]")
    _library.impl(backward_name, or_kernel(backward_name, backward_implementation), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{DOMAIN}::{backward_name}", backward_fake, lib=_library)

    _library.impl(op.name, _autograd(op), "Autograd")
    # vmap alone bypasses the autograd key, and its own fallback refuses lists of tensors.
    _library.impl(op.name, op.reference, "FuncTorchBatched")


def _autograd(op: Op) -> Callable[..., Any]:
    """The op's kernel for the Autograd key, which redispatches to the op below autograd.

    ``torch.library.register_autograd`` does the same, but takes the CPU 1.4 to 4 times as long to record a call. On
    CUDA the extension takes over (``csrc/torch/autograd.cpp``) and calls this kernel for unusual inputs.
    """
    torch_op, torch_backward = op.torch_op, getattr(getattr(torch.ops, DOMAIN), f"{op.name}_backward").default

    def forward(ctx: Any, args: tuple[Any, ...], *tensors: Tensor | None) -> Any:
        ctx.save_for_backward(*tensors)
        ctx.args = _with_tensors(op, args, repeat(None))
        with torch._C._AutoDispatchBelowAutograd():
            return torch_op(*args)

    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        tensors, (_, *needs) = ctx.saved_tensors, ctx.needs_input_grad
        present = [need for t, need in zip(tensors, needs, strict=True) if t is not None]
        function = differentiable if torch.is_grad_enabled() else torch_backward
        found = iter(function(grads, *_with_tensors(op, ctx.args, tensors), present))
        return None, *(next(found) if need else None for need in needs)

    def differentiable(grads: Sequence[Tensor], *args: Any) -> list[Tensor]:
        """The backward with ``create_graph=True``, through the reference."""
        args, needs = args[:-1], args[-1]
        with torch.enable_grad():
            tensors = aliases(_tensors(op, args))
            present = [t for t in tensors if t is not None]
            wanted = [t for t, need in zip(present, needs, strict=True) if need]
            return _vjp(op.reference, _with_tensors(op, args, tensors), grads, wanted, create_graph=True)

    _library.impl(f"{op.name}_backward", differentiable, "AutogradPrivateUse3")  # where the extension finds it
    _library.impl(f"{op.name}_backward", differentiable, "Batched")  # is_grads_batched

    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    function: Any = type(op.node_type, (torch.autograd.Function,), methods)

    def kernel(*args: Any) -> Any:
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            return op.reference(*args)  # functorch and forward mode differentiate its torch ops themselves
        if torch.is_grad_enabled():
            tensors = _tensors(op, args)
            if any(t is not None and t.requires_grad for t in tensors):
                return function.apply(args, *tensors)
        with torch._C._AutoDispatchBelowAutograd():
            return torch_op(*args)

    return kernel


def _flat(args: Sequence[Any]) -> list[Tensor]:
    """All tensors among an operator's arguments, with lists flattened."""
    return [t for a in args for t in (a if isinstance(a, (list, tuple)) else (a,)) if isinstance(t, Tensor)]


def _tensors(op: Op, args: Sequence[Any]) -> list[Tensor | None]:
    """The tensors among an op's arguments in schema order, with lists flattened; None for absent ones."""
    tensors: list[Tensor | None] = []
    for i, is_list in op.tensor_positions:
        if is_list:
            tensors += args[i]
        else:
            tensors.append(args[i])
    return tensors


def _with_tensors(op: Op, args: Sequence[Any], tensors: Iterable[Tensor | None]) -> list[Any]:
    """The inverse of :func:`_tensors`: ``args`` with its tensors replaced by ``tensors``, in order."""
    args, rest = list(args), iter(tensors)
    for i, is_list in op.tensor_positions:
        args[i] = [next(rest) for _ in args[i]] if is_list else next(rest)
    return args


def aliases(tensors: Iterable[Tensor | None]) -> list[Tensor | None]:
    """Views of the tensors that require gradients, so that a gradient ends here: one may be computed from another."""
    return [t.view_as(t) if t is not None and t.requires_grad else t for t in tensors]


def gradients_again(
    function: Callable[..., Any], tensors: Iterable[Tensor | None], grads: Sequence[Tensor], needs: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of ``function(*tensors)`` that can be differentiated again (``create_graph=True``), where needed."""
    with torch.enable_grad():
        seen: list[Any] = aliases(tensors)
        wanted = [t for t, need in zip(seen, needs, strict=True) if need]
        found = iter(_vjp(function, seen, grads, wanted, create_graph=True))
    return [next(found) if need else None for need in needs]


def _vjp(
    function: Callable[..., Any],
    args: Sequence[Any],
    grads: Sequence[Tensor],
    wanted: Sequence[Tensor],
    create_graph: bool = False,
) -> list[Tensor]:
    """Gradients of ``function(*args)`` for the ``wanted`` tensors; zeros where the result does not depend on them."""
    pairs = [(o, g) for o, g in zip(as_tuple(function(*args)), grads, strict=True) if o.requires_grad]
    if not pairs:
        return [torch.zeros_like(t) for t in wanted]
    outputs, grads = zip(*pairs, strict=True)
    return list(
        torch.autograd.grad(
            outputs, wanted, grads, create_graph=create_graph, allow_unused=True, materialize_grads=True
        )
    )
