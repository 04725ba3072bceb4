"""Modules that take the place of others: same parameters, same result."""

from __future__ import annotations

import copy
import inspect
from typing import ClassVar, TypeVar

from torch import nn

from svexport.errors import UnsupportedError

__all__ = ["DropIn"]

T = TypeVar("T", bound="DropIn")


class DropIn:
    """Mixin of modules that replace another class. The class is recognized without importing its package."""

    replaces: ClassVar[tuple[str, ...]] = ()
    """Names of the classes it replaces; one with a module (``"torch.nn.…"``) matches only the class defined there."""
    requires: ClassVar[tuple[str, ...]] = ()
    """The attributes its forward reads."""

    @classmethod
    def from_module(cls: type[T], module: nn.Module) -> T:
        """Makes a module of this class with the state of ``module``.

        Both share the same parameter, buffer, submodule and hook objects, so the state_dict is the same by
        construction. Entries added to or removed from one later do not affect the other.

        Raises:
            UnsupportedError: if the class name, the attributes or the signature of ``forward`` do not fit.
        """
        if misfit := cls.misfit(module):
            raise UnsupportedError(f"{cls.__name__}.from_module {misfit}")
        new = cls.__new__(cls)
        registries = vars(nn.Module())
        vars(new).update({k: copy.copy(v) if k in registries else v for k, v in vars(module).items()})
        return new

    @classmethod
    def misfit(cls, module: nn.Module) -> str:
        """Why ``module`` cannot be replaced: ``"expects …, got …"``; empty if it can."""
        kind = type(module)
        qualified = f"{kind.__module__}.{kind.__qualname__}"
        if kind.__name__ not in cls.replaces and qualified not in cls.replaces:
            return (
                f"expects {' or '.join(cls.replaces) or 'no module: nothing is known to be the same'}, got {qualified}"
            )
        missing = [name for name in cls.requires if not hasattr(module, name)]
        if missing:
            return f"expects a {kind.__name__} with {', '.join(cls.requires)}, got {qualified} without " + ", ".join(
                missing
            )
        if "forward" in vars(module):
            return f"expects the forward of its class, got {qualified} with a forward of its own"
        expected, got = (inspect.signature(c.forward).parameters for c in (cls, kind))  # type: ignore[union-attr]
        if list(expected) != list(got):
            return f"expects forward({', '.join(expected)}), got {qualified}.forward({', '.join(got)})"
        return ""
