"""Which of torch's two exporters writes which opset."""

from __future__ import annotations

import torch

__all__ = ["LAST_TORCHSCRIPT_OPSET", "LATER", "OPSETS"]

_BOTH = torch.torch_version.TorchVersion(torch.__version__) >= "2.7"
"""torch 2.6 has one on torch.export too, which knows no dynamic sizes, and no einsum but what it is made of."""

OPSETS = range(9, 24 if _BOTH else 21)

LAST_TORCHSCRIPT_OPSET = 17 if _BOTH else OPSETS[-1]
"""The TorchScript exporter is reliable up to 17, and with what we verify up to 20; the other writes none below 18."""

LATER = (
    "try opset=18 or later (another exporter)"
    if _BOTH
    else f"update torch: this is {torch.__version__}, and from 2.7 on another exporter writes opset 18 and later"
)
"""What to do where the TorchScript exporter fails."""
