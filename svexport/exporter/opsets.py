"""Decides which of torch's two exporters writes which opset."""

from __future__ import annotations

import torch

__all__ = [
    "FIRST_DYNAMO_OPSET",
    "FIRST_TORCHSCRIPT_OPSET",
    "FIRST_WITH_BOTH",
    "LAST_TORCHSCRIPT_OPSET",
    "LATER",
    "OPSETS",
]

FIRST_WITH_BOTH = "2.11"
"""The first torch with both; the exporter on torch.export of older ones decomposes einsum, fails on dynamic sizes."""

_BOTH = torch.torch_version.TorchVersion(torch.__version__) >= FIRST_WITH_BOTH

OPSETS = range(9, 24 if _BOTH else 21)

FIRST_TORCHSCRIPT_OPSET = 17
"""The opset that the TorchScript exporter writes; models of lower opsets are converted."""

LAST_TORCHSCRIPT_OPSET = 17 if _BOTH else OPSETS[-1]
"""The TorchScript exporter is reliable up to 17, and with what we verify up to 20; the other writes none below 18."""

FIRST_DYNAMO_OPSET = 18
"""The opset that the exporter on torch.export writes; models of lower opsets are converted."""

LATER = (
    "try opset=18 or later (another exporter)"
    if _BOTH
    else f"update torch, {torch.__version__}: from {FIRST_WITH_BOTH} on another exporter writes opset 18 and later"
)
"""Advice for failures of the TorchScript exporter."""
