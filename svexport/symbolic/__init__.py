"""The ONNX side of the ops, one file per op, with the same name as in ``svexport.ops``."""

from importlib import import_module

import svexport.ops  # noqa: F401  (fills OPS)
from svexport.ops._op import OPS
from svexport.symbolic._symbolic import SYMBOLICS, Symbolic

__all__ = ["SYMBOLICS", "Symbolic"]

for _name in OPS:
    import_module(f"{__name__}.{_name}")
